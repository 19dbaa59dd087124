"""Functions that scripts of configs hold a copy of: reading models, data and tokens."""

import glob
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from fshard.errors import PlanError, missing_extra


def from_file(where: str) -> Any:
    """A function of a file that is run for it: FILE.py:FUNCTION."""
    file, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise PlanError(f"there is no file {file!r} in {Path.cwd()}: give FILE.py:FUNCTION from here")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).resolve().parent))  # it may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise PlanError(f"{file} has no function {name!r}: give the name of one that returns an nn.Module")
    return getattr(module, name)


def hugging_face_config(source: str, options: dict[str, Any]) -> Any:
    """The configuration of a model: of a config.json, a folder or a name."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise missing_extra(f"the model {source}", "transformers", "recipe") from error
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{source!r} is no file or folder in {Path.cwd()}, and no model of Hugging Face that can be read: "
            f"{str(error).splitlines()[0]} Give FILE.py:FUNCTION, a config.json, a folder, or another name"
        ) from error


def check_vocabulary(config: Any, size: int) -> None:
    """Refuse more tokens than a model knows."""
    if config.get_text_config().vocab_size < size:
        known = config.get_text_config().vocab_size
        raise PlanError(
            f"the model knows {known} tokens, and data.tokenizer has {size}: give the tokenizer of the model"
        )


def hugging_face_model(config: Any) -> Any:
    """The model of a configuration."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    return make.from_config(config, dtype=torch.float32)


def hugging_face_folder(source: str) -> str:
    """The folder with the weights of a model, which is downloaded if it is a name."""
    if Path(source).is_dir():
        return source
    from huggingface_hub import snapshot_download

    return str(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))


def found_files(sources: Sequence[str]) -> list[Path]:
    """The files that paths, folders and globs name, in order."""
    out: list[Path] = []
    for source in sources:
        inside = sorted(Path(source).rglob("*")) if Path(source).is_dir() else map(Path, sorted(glob.glob(source)))
        files = [path for path in inside if path.is_file()]
        if not files:
            raise PlanError(f"there is no file {source!r} in {Path.cwd()}: give a file, a folder with files, or a glob")
        out += files
    return out


def text_of(path: Path) -> str:
    """The text of a file in UTF-8."""
    data = path.read_bytes()
    if not data:
        raise PlanError(f"{path} is empty: give a file with text")
    try:
        text = data.decode()
        bad = data.find(0)
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        raise PlanError(f"{path} is no text: byte {bad} is {data[bad]:#04x}: give a file of text in UTF-8")
    return text


def text_records(sources: Sequence[str], field: str) -> list[dict[str, Any]]:
    """A record for each file of text; without sources, CPython's documentation."""
    if not sources:
        return [{field: "".join(topics[name] for name in sorted(topics))}]
    return [{field: text_of(path)} for path in found_files(sources)]


def jsonl_records(sources: Sequence[str]) -> list[dict[str, Any]]:
    """The records of files with a JSON object a line."""
    out = []
    for path in found_files(sources):
        for number, line in enumerate(text_of(path).splitlines(), 1):
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise PlanError(f"{path}:{number}: this line is no JSON: {error}: correct it") from error
            if record is not None and not isinstance(record, dict):
                raise PlanError(f"{path}:{number}: this line is no JSON object: give fields and values in braces")
            out += [record] if record is not None else []
    return out


def parquet_records(sources: Sequence[str]) -> list[dict[str, Any]]:
    """The records of parquet files."""
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise missing_extra("parquet data", "pyarrow", "recipe") from error
    out: list[dict[str, Any]] = []
    for path in found_files(sources):
        try:
            out += parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
            raise PlanError(f"{path} is no parquet file: {error}: give another file, or data.format") from error
    return out


def hugging_face_records(sources: Sequence[str], split: str) -> Any:
    """The records of a data set of Hugging Face: a folder that it saved, or a name and maybe a configuration."""
    source = sources[0]
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise missing_extra(f"the data set {source}", "datasets", "recipe") from error
    try:
        if not Path(source).is_dir():
            return datasets.load_dataset(*sources, split=split)
        found = datasets.load_from_disk(source)
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(f"no data set {source!r} with a split {split!r} can be read: {error}: give another") from error


def field_values(records: Any, name: str) -> list[str]:
    """The text in a field of every record."""
    for number, record in enumerate(records):
        if not isinstance(record.get(name), str):
            fields = ", ".join(map(repr, record)) or "none"
            raise PlanError(
                f"record {number} has no text in a field {name!r}; its fields: {fields}: name another field"
            )
    return [record[name] for record in records]


class ByteTokens:
    """The bytes of text as tokens; byte 0 ends a document."""

    size = 256

    def __call__(self, text: str, end: bool = False) -> Tensor:
        return torch.frombuffer(bytearray(text.encode() + b"\0" * end), dtype=torch.uint8)


class HuggingFaceTokens:
    """The tokens of a tokenizer of Hugging Face, without those that it adds by itself."""

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise missing_extra(f"the tokenizer {name}", "transformers", "recipe") from error
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise PlanError(f"no tokenizer {name!r} can be read: {str(error).splitlines()[0]}: give another") from error
        self.end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        self.size = len(self.tokenizer)

    def __call__(self, text: str, end: bool = False) -> Tensor:
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor([*found, *self.end * end], dtype=torch.int32, device="cpu")
