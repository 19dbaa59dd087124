"""Stacks of other threads: written down by faulthandler, never read as frames."""

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fshard
from fshard.runtime.comm import stacks
from fshard.runtime.comm.call_site import CALLS, call_site
from fshard.runtime.comm.stacks import CodePlace, stack_of

ROOT = Path(fshard.__file__).parent


@contextmanager
def held(source: str, file: str) -> Iterator[int]:
    """A thread that is in ``wait()`` of a program, by its identity."""
    inside, over = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        over.wait(20.0)

    thread = threading.Thread(target=exec, args=(compile(source, file, "exec"), {"wait": wait}))
    thread.start()
    assert inside.wait(20.0)
    try:
        yield thread.ident or 0
    finally:
        over.set()
        thread.join(20.0)


def test_the_stack_of_another_thread_has_its_lines() -> None:
    with held("def f():\n    wait()\n\nf()\n", "/tmp/ä/中 😀.py") as thread:
        found = [place for place in stack_of(thread) if place.file.endswith("😀.py")]
    assert found == [CodePlace("", "f", "/tmp/ä/中 😀.py", 2), CodePlace("", "<module>", "/tmp/ä/中 😀.py", 4)]


def test_own_and_other_stacks_agree_on_functions_of_the_package() -> None:
    """Names of methods and of functions within functions are qualified, though faulthandler's are not."""
    file = str(ROOT / "runtime" / "steps" / "passes.py")
    source = (ROOT / "runtime" / "steps" / "passes.py").read_text()
    wanted = {}

    def visit(code: object) -> None:
        for each in [each for each in code.co_consts if hasattr(each, "co_consts")]:  # type: ignore[attr-defined]
            wanted[each.co_firstlineno, each.co_name] = each
            visit(each)

    visit(compile(source, file, "exec"))
    functions = [code for code in wanted.values() if code.co_name.isidentifier() and not inside_class_body(code)]
    assert {"Passes.run"} <= {code.co_qualname for code in functions}
    for code in functions:
        line = max(line for _, _, line in code.co_lines() if line is not None)
        assert stacks._qualified(file, line, code.co_name) == code.co_qualname
        assert stacks._module(file) == "fshard.runtime.steps.passes"


def inside_class_body(code: object) -> bool:
    """Whether this is the body of a class, which runs at import."""
    return "__qualname__" in code.co_names  # type: ignore[attr-defined]


def test_functions_without_a_name_are_within_those_that_have_one() -> None:
    file = str(ROOT / "runtime" / "comm" / "stacks.py")
    line = next(n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if "lambda found" in text)
    assert stacks._qualified(file, line, "<lambda>") == "_unescaped.<locals>.<lambda>"
    assert stacks._qualified(file, 1, "<module>") == "<module>"
    assert stacks._qualified("/tmp/fshard.py", 3, "f") == "f"


NESTED = """
class A:
    def f(self):
        def g():
            def h():
                return 1
            return h
        return g
"""


def test_the_innermost_function_of_a_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nested.py"
    file.write_text(NESTED)
    monkeypatch.setattr(stacks, "OURS", f"{tmp_path}/")
    found = [stacks._qualified(str(file), line, name) for line, name in ((6, "h"), (7, "g"), (8, "f"), (2, "A"))]
    assert found == ["A.f.<locals>.g.<locals>.h", "A.f.<locals>.g", "A.f", "A"]


def test_names_need_no_syntax_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 may fail to make one while another thread makes one, too."""
    monkeypatch.setattr("ast.parse", lambda *args, **kwargs: pytest.fail("a syntax tree was made"))
    stacks._functions.cache_clear()
    line = stacks._own.__code__.co_firstlineno
    assert stacks._qualified(stacks.__file__, line, "_own") == "_own"


DUMP = """Thread 0x00007f0000000001 [loader 3] (most recent call first):
  File "/a.py", line 3 in f
  ...

Current thread 0x00007f0000000002 (most recent call first):
  File "/b \\xe9.py", line 4 in g
  File "/c, line 3 in.py", line 5 in <module>
  <truncated>
"""


@pytest.mark.parametrize(
    ("thread", "found"),
    [
        (0x7F0000000001, [("/a.py", 3, "f")]),
        (0x7F0000000002, [("/b é.py", 4, "g"), ("/c, line 3 in.py", 5, "<module>")]),
        (0x7F0000000003, []),
    ],
)
def test_texts_of_faulthandler_are_read(thread: int, found: list[tuple[str, int, str]]) -> None:
    assert [(place.file, place.line, place.function) for place in stacks._told(DUMP, thread)] == found


def test_a_thread_that_has_ended_has_no_stack() -> None:
    with held("wait()", "/tmp/a.py") as thread:
        assert any(place.file == "/tmp/a.py" for place in stack_of(thread))
    assert list(stack_of(thread)) == []


def test_without_room_for_a_file_there_is_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stacks.tempfile, "TemporaryFile", full)
    with held("wait()", "/tmp/a.py") as thread:
        assert list(stack_of(thread)) == [] and call_site(thread) == f"the thread {threading_name(thread)}"


def threading_name(thread: int) -> str:
    """The name of a thread."""
    return next(one.name for one in threading.enumerate() if one.ident == thread)


def test_no_frames_of_other_threads_are_read() -> None:
    """Not even their names: following ``f_back`` in a thread that runs on ends the process now and then."""
    named = {
        (str(path.relative_to(ROOT)), node.attr)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("_current_frames", "walk_stack")
    }
    assert not named, "stack_of() tells which functions another thread is in"


BUSY = """
import sys, threading, time
from fshard.runtime.comm.call_site import op_of, place

def deep(n):
    return sum(deep(n - 1) for _ in range(2)) if n else len([x for x in range(3)])

main, over = threading.main_thread().ident, threading.Event()
def look():
    while not over.is_set():
        op_of(main), place(main)
watchers = [threading.Thread(target=look) for _ in range(2)]
sys.setswitchinterval(1e-6)
[watcher.start() for watcher in watchers]
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    deep(10)
over.set()
"""


@pytest.mark.slow
@pytest.mark.long
def test_looks_at_a_thread_that_runs_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY, "5"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_calls_of_objects_have_the_names_that_users_know_them_by() -> None:
    named = 0
    for file in ROOT.rglob("*.py"):
        for made in ast.walk(ast.parse(file.read_text())):
            for fn in made.body if isinstance(made, ast.ClassDef) else ():
                if isinstance(fn, ast.FunctionDef) and "collective_call" in map(ast.unparse, fn.decorator_list):
                    assert f"{made.name}.{fn.name}" in CALLS, (file, made.name)
                    named += 1
    assert named > 20
