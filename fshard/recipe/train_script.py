"""The script of a config: the trainer, without the branches and functions that the config leaves out.

``fs.train`` runs this script, and ``fshard train --emit-script`` writes it, so both do the same.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

from fshard.pipeline.named_orders import ORDERS
from fshard.recipe.config_checks import data_axes, is_function, reads_weights, source_format, tokenizer
from fshard.recipe.read_config import flat
from fshard.recipe.train_config import TrainConfig
from fshard.version import VERSION

TRAINER = Path(__file__).parents[1] / "trainer.py"
"""The script of all configs."""


def script_of(config: TrainConfig) -> str:
    """The script that does what a config says. It runs alone or under torchrun."""
    given = script_values(config)
    text = used(pruned(TRAINER.read_text(), given))
    for pattern, new in {
        r"\n{3,}(?= )": "\n\n",
        r'"""\n(?= +def )': '"""\n\n',
        r"  # (type: ignore|noqa).*": "",
    }.items():
        text = re.sub(pattern, new, text)
    keys = dict.fromkeys(re.findall(r'CONFIG\["([\w.]+)"\]', text))
    config_text = "".join(f'    "{name}": {literal(given[name])},\n' for name in sorted(keys, key=[*given].index))
    source = repr(config.model.source)[1:-1].replace('"', "'")
    text = re.sub(r'^""".*?"""', lambda _: f'"""Trains {source}. Written by fshard {VERSION} from a config."""', text)
    return text.replace("CONFIG: Mapping[str, Any] = {}", f"CONFIG = {{\n{config_text}}}")


def literal(value: Any) -> str:
    """A value as Python, with double quotes where that is as good.

    >>> print(literal(["a"]), literal('say "a"'))
    ["a"] 'say "a"'
    """
    text = pformat(value, width=100, sort_dicts=False).replace("\n", "\n        ")
    return text if '"' in text else text.replace("'", '"')


def pruned(text: str, config: Mapping[str, Any]) -> str:
    """A script without the branches that a config does not take.

    >>> pruned('if CONFIG["a"] > 1:\\n    b = 1\\nelse:\\n    b = 2', {"a": 1})
    'b = 2'
    """
    while node := next(_branches(ast.parse(text)), None):
        lines = text.splitlines()
        chosen = node.body if eval(ast.unparse(node.test), {"CONFIG": config}) else node.orelse
        kept: list[str] = []
        if chosen:
            shift = chosen[0].col_offset - node.col_offset
            kept = [line[shift:] for line in lines[chosen[0].lineno - 1 : chosen[-1].end_lineno]]
            kept[0] = re.sub(r"^( *)elif ", r"\1if ", kept[0])
        text = "\n".join([*lines[: node.lineno - 1], *kept, *lines[node.end_lineno :]])
    return text


def _branches(tree: ast.AST) -> Iterator[ast.If]:
    """The branches that depend on the config alone, the outer ones first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and names(node.test) == {"CONFIG"}:
            yield node


def names(node: ast.AST) -> set[str]:
    """The names that a piece of code uses."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def used(text: str) -> str:
    """A script without the imports and definitions that its last statement does not need.

    >>> print(used("import a, b\\ndef f(): a()\\n\\n\\ndef g(): b()\\n\\n\\nf()"), end="")
    import a
    def f(): a()
    <BLANKLINE>
    <BLANKLINE>
    f()
    """
    lines, (*body, last) = text.splitlines(), ast.parse(text).body
    defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    needed, open_ = set[str](), names(last)
    while open_:
        name = open_.pop()
        needed.add(name)
        open_ |= (names(defined[name]) if name in defined else set()) - needed
    for node in reversed(body):
        begin, end = min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))), node.end_lineno or 0
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in needed]
            lines[begin - 1 : end] = [ast.unparse(node)] if node.names else []
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in needed:
            lines[begin - 1 : end + 2] = []  # and the empty lines below
    return "\n".join([*lines, ""])


def script_values(config: TrainConfig) -> dict[str, Any]:
    """The values of a config as the script reads them: what is automatic is said, and tables of arguments are dicts."""
    model, data, opt, run = config.model, config.data, config.optimizer, config.step
    rows = {"sft": "answers", "dpo": "pairs"}.get(config.objective.kind, data.rows)
    form, function = source_format(config), is_function(config)
    out = flat(config) | {
        "data.format": form if data.source else "topics", "data.rows": rows, "data.tokenizer": tokenizer(config),
        "data.ends": form != "text", "data.alone": data.isolate and rows in ("packed", "answers"),
        "evaluation.partial": "drop" if rows == "windows" else "keep",
        "lora": {"rank": model.lora.rank, "alpha": model.lora.alpha, "seed": config.seed},
        "model.kind": "function" if function else "hugging face",
        "model.units": "auto" if model.units == ("auto",) else list(model.units),
        "model.weights": "read" if reads_weights(config) else "fresh",
        "muon": {"momentum": opt.momentum, "weight_decay": opt.weight_decay},
        "adamw": {"betas": opt.betas, "eps": opt.eps, "weight_decay": opt.weight_decay},
        "objective.unit": math.log(2) if config.objective.bits else 1.0,
        "checkpoints": checkpoints(config), "trackers": trackers(config),
    }  # fmt: skip
    step = {"clip_norm": opt.clip_norm or None, "accumulate": run.accumulate}
    more = {name: getattr(run, name) for name in ("remat", "compile", "schedule")}
    out["step"] = step | {name: value for name, value in more.items() if value not in ("none", "default")}
    return out | rates(config) | mesh_values(config)


def mesh_values(config: TrainConfig) -> dict[str, Any]:
    """The axes that cut a batch and leaves, and the stages that the order of a pipeline needs."""
    mesh, rules = config.mesh, ORDERS.get(config.step.pipeline)
    split = [axis for axis in mesh.axes if axis != mesh.stages]
    stages: dict[str, Any] = {"leaves": [(leaf, stages) for leaf, *stages in mesh.leaves]}
    if rules is not None:
        stages |= {"chunks": rules.least, "placement": "v" if rules.folded else "loop"}
    cut = [axis for axis in split if axis != "replica"] or split
    return {"mesh.batch": list(data_axes(config)), "mesh.cut": cut, "stages": stages}


def rates(config: TrainConfig) -> dict[str, Any]:
    """The kind of the learning rate, and its arguments."""
    rate, total = config.rate, config.rate.total or config.steps
    warmup = rate.warmup if rate.warmup >= 0 else min(100, total // 8)
    given = {"peak": rate.peak, "warmup": warmup, "total": total, "floor": rate.floor}
    if rate.kind == "wsd":
        cooldown = rate.cooldown if rate.cooldown > 0 else max(1, total // 5)
        return {"rate.kind": "warmup_stable_decay", "rate": given | {"cooldown": cooldown}}
    if rate.kind == "constant":
        return {"rate.kind": "warmup_linear", "rate": given | {"total": warmup + 1, "floor": rate.peak}}
    return {"rate.kind": f"warmup_{rate.kind}", "rate": given}


def trackers(config: TrainConfig) -> dict[str, Any]:
    """The trackers by name, each with its place."""
    track, out = config.track, Path(config.out)
    wanted = {
        "Live": config.steps if track.live else None,
        "JsonLines": str(out / "metrics.jsonl") if config.out else None,
        "TensorBoard": str(out / "tensorboard") if track.tensorboard else None,
        "Wandb": track.wandb,
        "MLflow": track.mlflow,
    }
    return {name: where for name, where in wanted.items() if where}


def checkpoints(config: TrainConfig) -> dict[str, Any]:
    """The arguments of the checkpointer."""
    saved, folder = config.checkpoints, str(Path(config.out) / "checkpoints")
    return {"directory": folder, "keep": saved.keep or None, "every": saved.every or None, "async_": saved.asynchronous}
