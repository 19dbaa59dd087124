"""The package keeps the rules of the house, and each rule notices when it is broken."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.project import layering, words
from tests.project import map as shape

ROOT = Path(__file__).parents[2] / "fshard"
RULES = (*layering.RULES, *shape.RULES, *words.RULES)


@pytest.fixture(scope="module")
def house() -> dict[str, layering.Module]:
    """The real package."""
    return layering.load(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: layering.Rule, house: dict[str, layering.Module]) -> None:
    problems = rule(house)
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_files_outside_the_package_are_short(folder: str) -> None:
    problems = layering.long_files(layering.load(ROOT.parent / folder))
    assert not problems, "\n".join(["", *problems])


def test_the_whole_package_is_read(house: dict[str, layering.Module]) -> None:
    assert {"fshard", "fshard.errors", "fshard.tree", "fshard.optim.adamw"} <= house.keys()
    assert len(house) == len(list(ROOT.rglob("*.py")))


GOOD = {
    "__init__.py": "from fshard.lora import run\nfrom fshard.sharding import P\n__all__ = ['P', 'run']",
    "errors.py": "class A(Exception): ...",
    "tree.py": "import optree\nfrom fshard import errors\nfrom fshard.errors import A\nLIMITS = {'a': 1}",
    "optim/__init__.py": "from fshard.optim.base import rate",
    "optim/base.py": "import torch\nfrom .. import errors\nfrom ..tree import LIMITS\nx = torch.ones(2)",
    "sharding/__init__.py": "from fshard.sharding.spec import P",
    "sharding/spec.py": "from fshard import tree\nclass P: ...",
    "sharding/plan.py": "from fshard.sharding.spec import P\nimport fshard.optim\nfrom . import spec",
    "runtime/__init__.py": "",
    "runtime/comm/communicators.py": "import torch\nimport torch.distributed as dist\ntorch.distributed.f()",
    "runtime/comm/__init__.py": "",
    "runtime/engine/__init__.py": "",
    "runtime/engine/engine.py": "from fshard.runtime.comm import communicators",
    "runtime/comm/p2p.py": "from torch import distributed",
    "launch.py": "from fshard.runtime import comm\ndef f():\n    from fshard import sharding\n    x = {}",
    "lora.py": "from fshard import launch\nfrom fshard.launch import f\ndef run(): ...",
}

LONG = "def f():\n" + "    x = 1\n" * 60
WISHED = "def f():\n" + "    x = 1\n" * 40
DOCUMENTED = 'def f():\n    """\n' + "    text\n" * 60 + '    """\n'
SHORT = "def g():\n    pass\n"
BRANCHED = f"def f(x): return {' or '.join('x' * 16)}\n"
INNER = BRANCHED.strip()
LARGE = "class A:\n    fixed: int\n" + "".join(f"    def f{i}(self): self.x{i} = 1\n" for i in range(15))

BROKEN = [
    # rule, file, what is appended to it, what the only problem says
    ("upward_floors", "runtime/comm/p2p.py", "from fshard.runtime.engine import engine", "of a higher floor"),
    ("upward_floors", "runtime/odd.py", "X = 1", "lies in no room of the runtime"),
    ("early_extras", "optim/base.py", "from rich.table import Table", "imports rich.table.Table where"),
    ("upward_imports", "errors.py", "import fshard.tree.x\nimport fshard.optim", "of a higher layer"),
    (
        "upward_imports",
        "sharding/spec.py",
        "from fshard.runtime.comm import x",
        "imports fshard.runtime.comm,",
    ),
    ("upward_imports", "sharding/spec.py", "from ..runtime import comm", "imports fshard.runtime.comm,"),
    ("upward_imports", "sharding/spec.py", "from fshard import P", "imports fshard, of a higher layer"),
    ("upward_imports", "sharding/spec.py", "import fshard", "imports fshard, of a higher layer"),
    (
        "upward_imports",
        "optim/base.py",
        "def f():\n    from fshard.lora import run",
        "optim/base.py:6: imports",
    ),
    (
        "upward_imports",
        "optim/base.py",
        "if X:\n    import fshard.sharding.plan",
        "imports fshard.sharding.plan,",
    ),
    (
        "upward_imports",
        "model/__init__.py",
        "from fshard.optim import rate",
        "another room in the same layer",
    ),
    ("upward_imports", "attic/__init__.py", "", "the room 'attic' is in no layer"),
    ("upward_imports", "attic.py", "", "the room 'attic' is in no layer"),
    ("import_cycles", "sharding/spec.py", "from fshard.sharding import plan", "plan -> fshard.sharding.spec"),
    (
        "import_cycles",
        "errors.py",
        "def f():\n    from fshard import tree",
        "tree -> fshard.errors -> fshard.tree",
    ),
    (
        "import_cycles",
        "sharding/spec.py",
        "from . import P",
        "sharding -> fshard.sharding.spec -> fshard.sharding",
    ),
    ("foreign_uses", "runtime/steps/commit.py", "import torch.distributed", "commit.py:2: uses torch.distributed"),
    ("foreign_uses", "lora.py", "import torch.distributed", "lora.py:4: uses torch.distributed"),
    ("foreign_uses", "lora.py", "import torch.distributed.tensor as t", "uses torch.distributed"),
    ("foreign_uses", "lora.py", "from torch import nn, distributed", "uses torch.distributed"),
    ("foreign_uses", "lora.py", "from torch.distributed.tensor import DTensor", "uses torch.distributed"),
    (
        "foreign_uses",
        "lora.py",
        "def f():\n    import torch.distributed as d",
        "lora.py:5: uses torch.distributed",
    ),
    (
        "foreign_uses",
        "lora.py",
        "import torch\ntorch.distributed.barrier()",
        "lora.py:5: uses torch.distributed",
    ),
    (
        "foreign_uses",
        "lora.py",
        "import torch as t\nt.distributed.barrier()",
        "lora.py:5: uses torch.distributed",
    ),
    ("foreign_uses", "lora.py", "importlib.import_module('torch.distributed')", "uses torch.distributed"),
    ("foreign_uses", "lora.py", "x = __import__('optree')", "uses optree"),
    ("foreign_uses", "runtime/arena.py", "from torch.distributed import barrier", "uses torch.distributed"),
    ("foreign_uses", "lora.py", "import optree", "uses optree, which only fshard.tree may"),
    ("foreign_uses", "lora.py", "from optree.pytree import x", "uses optree"),
    ("private_names_of_torch", "lora.py", "from torch._C import f", "lora.py:4: uses torch._C.f; import it from"),
    ("private_names_of_torch", "lora.py", "torch._foreach_add_([], [])", "lora.py:4: uses torch._foreach_add_"),
    ("private_names_of_torch", "lora.py", "def f(): return c10d.x._store", "lora.py:4: uses c10d.x._store"),
    ("global_statements", "lora.py", "def f():\n    global a, b\n    a = b = 1", "lora.py:5: global a, b"),
    ("shared_state", "lora.py", "cache = {}", "lora.py:4: cache can change"),
    ("shared_state", "lora.py", "_seen: set[int] = {1}", "_seen can change"),
    ("shared_state", "lora.py", "a = b = [x for x in y]", "a, b can change"),
    ("shared_state", "lora.py", "if x:\n    cache = []", "cache can change"),
    ("shared_state", "lora.py", "try:\n    x = 1\nexcept E:\n    cache = []", "cache can change"),
    ("shared_state", "lora.py", "class A:\n    cache = {}", "cache can change"),
    ("shared_state", "lora.py", "CURRENT = ContextVar('x')", "CURRENT can change"),
    ("shared_state", "lora.py", "_LOCAL = threading.local()", "_LOCAL can change"),
    ("shared_state", "lora.py", "_CACHE: X = weakref.WeakKeyDictionary[A, B]()", "_CACHE can change"),
    ("shared_state", "lora.py", "TABLE = dict()", "TABLE can change"),
    ("long_files", "lora.py", "x = 1\n" * 400, "lora.py: 404 lines"),
    ("long_functions", "lora.py", LONG + SHORT * 30, "f has 61 lines"),
    (
        "long_functions",
        "lora.py",
        "class A:\n    async " + LONG.replace("\n", "\n    ") + "\n" + SHORT * 30,
        "f has 61",
    ),
    ("long_functions", "lora.py", WISHED, "f has 41 lines"),
    ("complex_functions", "lora.py", BRANCHED, "lora.py:4: f has a complexity of 16, above 15"),
    ("complex_functions", "lora.py", f"class A:\n    def g():\n        {INNER}", "f has a complexity of 16, above 15"),
    ("complex_functions", "checkpoint/restore.py", BRANCHED, "f has a complexity of 16"),
    ("large_classes", "lora.py", LARGE, "lora.py:4: A has 16 attributes, above 15"),
    ("large_classes", "schedule/text.py", LARGE, "A has 16 attributes"),
    ("shared_class_names", "lora.py", "class P: ...", "lora.py:4: class P, "),
    ("shared_class_names", "view/odd.py", "def f():\n    class A: ...", "view/odd.py:3: class A"),
    ("shared_file_stems", "view/base.py", "", "fshard/optim/base.py, fshard/view/base.py"),
    ("questions_for_docstrings", "lora.py", 'def f():\n    """What a rank has."""', "of f begins with What"),
    ("questions_for_docstrings", "lora.py", 'class K:\n    """Where it lies."""', "of K begins with Where"),
]

ALLOWED = [
    ("lora.py", "class K:\n    def f(self):\n        self.cache = {}"),
    ("lora.py", "from functools import cache\n@cache\ndef h(): ..."),
    ("lora.py", "LIMITS = {'a': 1}\n__all__ = ['run']\nitems = (1, 2)"),
    ("lora.py", "import torch\ntorch.nn.functional.relu(x)\nmesh.distributed = 1\nimport torch.distributedx"),
    ("lora.py", WISHED + SHORT * 30),
    ("lora.py", DOCUMENTED),
    ("lora.py", BRANCHED.replace("x or ", "", 1)),
    ("lora.py", LARGE.replace("    fixed: int\n", "").replace("class A", "class K")),
    ("lora.py", 'def f():\n    """Return what a rank has."""'),
    ("schedule/text.py", BRANCHED),
    ("checkpoint/manifest.py", BRANCHED),
    ("runtime/comm/gloo.py", "import torch.distributed as dist"),
    ("view/__init__.py", "from fshard.sharding.plan import P"),
    ("lora.py", "def k():\n    import fshardx"),
]


def build(root: Path, files: dict[str, str]) -> dict[str, layering.Module]:
    """A package of these files, read."""
    for name, text in files.items():
        path = root / "fshard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text) + "\n")
    return layering.load(root / "fshard")


def broken(modules: dict[str, layering.Module]) -> dict[str, list[str]]:
    """The problems that each rule finds, without rules that find none."""
    found = {rule.__name__: rule(modules) for rule in RULES}
    return {rule: problems for rule, problems in found.items() if problems}


def test_a_good_package_breaks_no_rule(tmp_path: Path) -> None:
    assert broken(build(tmp_path, GOOD)) == {}


@pytest.mark.parametrize(("rule", "file", "source", "says"), BROKEN)
def test_a_broken_rule_is_noticed(tmp_path: Path, rule: str, file: str, source: str, says: str) -> None:
    modules = build(tmp_path, GOOD | {file: f"{GOOD.get(file, '')}\n{source}"})
    problems = next(r for r in RULES if r.__name__ == rule)(modules)
    assert len(problems) == 1, problems
    assert says in problems[0]


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_what_is_allowed_is_no_problem(tmp_path: Path, file: str, source: str) -> None:
    assert broken(build(tmp_path, GOOD | {file: f"{GOOD.get(file, '')}\n{source}"})) == {}


def test_all_problems_are_reported(tmp_path: Path) -> None:
    modules = build(
        tmp_path, GOOD | {"errors.py": "import optree\na = []\nb = {}", "runtime/memory/arena.py": "import optree"}
    )
    found = broken(modules)
    assert {rule: len(problems) for rule, problems in found.items()} == {"foreign_uses": 2, "shared_state": 2}


def test_every_room_is_a_package() -> None:
    """Wheels leave out folders that are none, and test runners put them on the path of modules."""
    rooms = {path.parent for path in ROOT.rglob("*.py")}
    assert not [str(room) for room in rooms if not (room / "__init__.py").exists()]
