"""Reads configs: TOML and ``key=value`` become a ``TrainConfig``, and each problem has its line."""

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, get_args, get_origin

from fshard.arguments import described
from fshard.errors import PlanError, lines
from fshard.reading.texts import read_text
from fshard.recipe.train_config import VERSION, TrainConfig

REMEDY = "fshard train --help lists every key."

ELSEWHERE = {
    "rate.peak": "lr learning_rate max_lr",
    "rate.kind": "lr_scheduler scheduler lr_schedule",
    "steps": "max_steps num_steps epochs num_epochs num_train_epochs iterations",
    "batch": "batch_size global_batch_size per_device_train_batch_size",
    "out": "output_dir out_dir",
    "model.source": "model_name model_name_or_path pretrained name",
    "data.source": "dataset train_file path file files",
    "data.length": "seq_len seq_length sequence_length context_length block_size max_length",
    "optimizer.clip_norm": "clip max_grad_norm grad_clip",
    "step.precision": "dtype mixed_precision bf16 fp16",
    "step.accumulate": "gradient_accumulation_steps accumulation_steps grad_accum",
    "checkpoints.every": "save_every save_steps checkpoint_every",
}
"""By key: names that other programs have for it."""


@dataclass(frozen=True)
class ReadConfig:
    """A config, and the places where its values were given.

    Attributes:
        file: its file; empty where it is of a program.
        places: by key, such as ``model.source``, its place: ``run.toml:3``.
    """

    config: TrainConfig
    file: str
    places: Mapping[str, str]

    def place(self, name: str) -> str:
        """The place of a key, or of the first one in it, or of the table that it would be in."""
        inside = [place for key, place in self.places.items() if key.startswith(f"{name}.")]
        if name not in self.places and inside:
            return inside[0]
        while name and name not in self.places:
            name = name.rpartition(".")[0]
        return self.places.get(name, self.file or "config")


def read_config(source: Any, changes: Sequence[str] = ()) -> ReadConfig:
    """Read a config: a path of a TOML file, a mapping, or a ``TrainConfig``.

    Args:
        source: the config.
        changes: ``key=value``, in place of what the source says. Values are TOML, or strings without quotes.

    Raises:
        PlanError: the file cannot be read or is not TOML, or keys or values are wrong; all in one report.
    """
    file, found, places = "", source, {}
    if isinstance(source, TrainConfig):
        found = nested(source)
    elif not isinstance(source, Mapping):
        file = str(source)
        try:
            text = read_text(source)
            found = tomllib.loads(text)
        except PlanError as error:
            raise PlanError(f"{error}: give the path of a config in TOML") from None
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"{file} is not TOML: {error}: correct that line") from error
        places = dict(key_lines(text, file))
    found = merged(found, changes, places)
    _refuse_newer(found, places.get("version", file or "config"))
    problems: list[str] = []
    read = ReadConfig(_built(TrainConfig, found, "", problems, ReadConfig(TrainConfig(), file, places)), file, places)
    if problems:
        raise PlanError(lines("the config cannot be used:", problems, REMEDY))
    return read


def _refuse_newer(found: Mapping[str, Any], place: str) -> None:
    version = found.get("version", VERSION)
    if version != VERSION:
        raise PlanError(
            f"{place}: version = {version!r}: this fshard reads configs of version {VERSION}: install a newer fshard "
            f"for a later version, or write version = {VERSION}"
        )


def key_lines(text: str, file: str) -> Iterator[tuple[str, str]]:
    """The keys and tables of valid TOML, each with its place. Statements are told apart by parsing them one by one."""
    table, pending, begin = "", "", 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        pending += line
        try:
            found = tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue  # the statement goes on in the next line
        header = pending.lstrip().startswith("[")
        names = [*_names(found)]
        if header and names:
            table = names[-1]
        prefix = f"{table}." if table and not header else ""
        for name in names:
            yield f"{prefix}{name}", f"{file}:{begin}"
        pending, begin = "", number + 1


def _names(found: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names in a value: those of tables before those in them."""
    found = found[-1] if isinstance(found, list) and found else found
    for name, value in found.items() if isinstance(found, Mapping) else ():
        yield f"{prefix}{name}"
        yield from _names(value, f"{prefix}{name}.")


def merged(found: Mapping[str, Any], changes: Sequence[str], places: dict[str, str]) -> dict[str, Any]:
    """A table with ``key=value`` changes; their places are noted.

    >>> merged({"model": {"units": ["a"]}}, ["model.source=m.py:make", "steps=3"], {})
    {'model': {'units': ['a'], 'source': 'm.py:make'}, 'steps': 3}
    """
    out: dict[str, Any] = _copied(found)
    for change in changes:
        name, equals, text = change.partition("=")
        path = name.strip().split(".")
        if not equals or not all(path):
            raise PlanError(f"{change!r} is not key=value: give changes as steps=100 or model.source=model.py:make")
        at: Any = out
        for part in path[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise PlanError(f"command line: {change}: {part} is a value, and no table")
        at[path[-1]] = _value(text.strip())
        places[name.strip()] = "command line"
    return out


def _copied(value: Any) -> Any:
    return {name: _copied(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _value(text: str) -> Any:
    """A TOML value; the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _built(cls: Any, found: Any, prefix: str, problems: list[str], read: ReadConfig) -> Any:
    """A dataclass of a table; what is wrong is added to the problems."""
    if not isinstance(found, Mapping):
        near = difflib.get_close_matches(prefix, [name for name, _ in keys(TrainConfig) if "." not in name], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"{read.place(prefix)}: {prefix} = {described(found)}: must be a table, [{prefix}]{meant}")
        return cls()
    known, given = {each.name: each for each in fields(cls)}, {}
    for name, value in found.items():
        path = f"{prefix}.{name}" if prefix else name
        if name not in known:
            problems.append(f"{read.place(path)}: {path} is no key{_nearest(path, isinstance(value, Mapping))}")
        elif is_dataclass(known[name].type):
            given[name] = _built(known[name].type, value, path, problems, read)
        elif (problem := _problem(known[name], value)) is not None:
            problems.append(f"{read.place(path)}: {path} = {value!r}: must be {problem}")
        else:
            given[name] = _typed(known[name].type, value)
    return replace(cls(), **given)


def _nearest(path: str, table: bool) -> str:
    """The key or table that is meant: the nearest of all, or else a key of nearly this name in another table."""
    every = [name for name, _ in keys(TrainConfig)]
    last = path.rpartition(".")[2]
    if meant := next((name for name, words in ELSEWHERE.items() if last in words.split()), ""):
        return f": give {meant}"
    tables = [*dict.fromkeys(name.rpartition(".")[0] for name in every if "." in name)]
    near = difflib.get_close_matches(path, tables if table else every, 1)
    near = near or [name for name in every if difflib.get_close_matches(last, [name.rpartition(".")[2]])]
    return f": did you mean {near[0]}?" if near else ""


def keys(cls: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Every key of the schema, with its field; tables in order."""
    for each in fields(cls):
        if not is_dataclass(each.type):
            yield f"{prefix}{each.name}", each
    for each in fields(cls):
        if is_dataclass(each.type):
            yield from keys(each.type, f"{prefix}{each.name}.")


def _problem(known: Field[Any], value: Any) -> str | None:
    """Say what a value must be, if it is something else."""
    hint = known.type
    if not _fits(hint, value):
        return type_text(hint) + (f", [{value!r}]" if hint == tuple[str, ...] and isinstance(value, str) else "")
    choices, least, below = [known.metadata.get(name) for name in ("choices", "least", "below")]
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        return f"one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    if least is not None and value < least:
        return f"{least:g} or more"
    return f"below {below:g}" if below is not None and value >= below else None


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(get_args(hint)[0], each) for each in value)
    if hint is Any:
        return isinstance(value, str | int | float)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    kind = get_origin(hint) or hint
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _typed(hint: Any, value: Any) -> Any:
    """A value as the schema has it: lists are tuples, whole numbers may be floats."""
    if get_origin(hint) is tuple:
        return tuple(_typed(get_args(hint)[0], each) for each in value)
    return float(value) if hint is float else value


def type_text(hint: Any) -> str:
    """A type in words.

    >>> type_text(tuple[int, ...]), type_text(float)
    ('a list of whole numbers', 'a finite number')
    """
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return f"a list of {'lists' if get_origin(inner) is tuple else type_text(inner).removeprefix('a ') + 's'}"
    words = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false", Any: "a value"}
    return words.get(hint, "a table")


def nested(config: Any) -> dict[str, Any]:
    """A config as nested dicts; tuples are lists."""
    return asdict(config, dict_factory=lambda pairs: {name: _listed(value) for name, value in pairs})


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def flat(config: TrainConfig) -> dict[str, Any]:
    """The values of a config by key, such as ``model.source``."""
    values = nested(config)
    out = {}
    for name, _ in keys(TrainConfig):
        at: Any = values
        for part in name.split("."):
            at = at[part]
        out[name] = at
    return out
