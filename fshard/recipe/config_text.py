"""Writes configs: as TOML, as a table of keys, and what differs between two of them."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from fshard.recipe.read_config import flat, keys, type_text
from fshard.recipe.train_config import TrainConfig


def to_toml(config: TrainConfig) -> str:
    """A config as TOML, with every key."""
    out, table = [], ""
    for name, value in flat(config).items():
        head, _, last = name.rpartition(".")
        if head != table:
            out.append(f"\n[{head}]")
            table = head
        out.append(f"{last} = {value_text(value)}")
    return "\n".join(out) + "\n"


def value_text(value: Any) -> str:
    """A value as TOML.

    >>> value_text({"depth": 2, "b c": [1.0, True]})
    '{ depth = 2, "b c" = [1.0, true] }'
    """
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key_text(name)} = {value_text(each)}" for name, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _key_text(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def key_table() -> Iterator[tuple[str, str, str, str]]:
    """Every key with its type, its default and a line of help."""
    kinds, defaults = _types(), flat(TrainConfig())
    for name, each in keys(TrainConfig):
        choices = each.metadata.get("choices")
        yield name, " | ".join(choices or (kinds[name],)), value_text(defaults[name]), each.metadata["help"]


def _types() -> dict[str, str]:
    """The type of each key in words, without the article."""

    def inside(cls: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for name, hint in get_type_hints(cls).items():
            if hasattr(hint, "__dataclass_fields__"):
                yield from inside(hint, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", type_text(hint).removeprefix("a ")

    return dict(inside(TrainConfig, ""))


def changed_meaning(before: TrainConfig, now: TrainConfig) -> list[str]:
    """The keys in which two configs mean different runs, with both values. The steps count where the rate needs them.

    >>> from dataclasses import replace
    >>> changed_meaning(TrainConfig(), replace(TrainConfig(), seed=1, out="runs/b"))
    ['seed: the run has 0, and the config now 1']
    """
    free = {name for name, each in keys(TrainConfig) if each.metadata.get("free")} | free_tables()
    told = {"rate.total": lambda config: config.rate.total or config.steps}
    out, old_values = [], flat(before)
    for name, value in flat(now).items():
        old = old_values[name]
        if name in told and now.rate.kind != "constant":
            old, value = told[name](before), told[name](now)
        if old != value and name not in free:
            out.append(f"{name}: the run has {value_text(old)}, and the config now {value_text(value)}")
    return out


def free_tables() -> set[str]:
    """The keys of tables that may change as a whole."""
    tables = {name for name, each in TrainConfig.__dataclass_fields__.items() if each.metadata.get("free")}
    return {name for name, _ in keys(TrainConfig) if name.partition(".")[0] in tables}
