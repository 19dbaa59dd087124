"""The trainer: a script of public functions. ``fs.train`` runs it with a config, without what the config leaves out."""

import contextlib
import functools
import glob
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from runpy import run_path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import default_collate

import fshard as fs

CONFIG: Mapping[str, Any] = {}
"""The values of the config."""


def function_of_file(where: str) -> Any:
    """The function of a file, which is run for it: FILE.py:FUNCTION."""
    file, _, name = where.rpartition(":")
    sys.path.insert(0, str(Path(file).resolve().parent))  # it may import its neighbours
    try:
        found = run_path(file)
    finally:
        sys.path.pop(0)
    if not callable(found.get(name)):
        raise ValueError(f"{file} has no function {name!r}: give the name of one that returns an nn.Module")
    return found[name]


def hugging_face_model(source: str, options: Mapping[str, Any]) -> Any:
    """The function that makes a model of Hugging Face."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, make = AutoConfig.from_pretrained(source, **options), AutoModelForCausalLM
    return lambda: make.from_config(config, dtype=torch.float32).train()  # type: ignore[no-untyped-call]


def matrices(model: fs.Model) -> str:
    """A pattern of the paths of all matrices in the units of a model."""
    inside = tuple(f"{unit}." for unit in model.units)
    found = [path for path, leaf in fs.tree.paths(model.params) if leaf.ndim == 2 and path.startswith(inside)]
    if not found:
        raise ValueError(f"the {len(model.units)} units of the model have no matrices: name others in model.units")
    return "|".join(map(re.escape, found))


def make_model() -> fs.Model:
    """Make the model. Its parameters take no memory."""
    source, options = CONFIG["model.source"], CONFIG["model.options"]
    if CONFIG["model.kind"] == "function":
        make = functools.partial(function_of_file(source), **options)
    else:
        make = hugging_face_model(source, options)
    with fs.empty_weights():
        model = fs.split(make(), units=CONFIG["model.units"])
    if CONFIG["model.lora.rank"]:
        model = fs.lora.wrap(model, CONFIG["model.lora.targets"] or matrices(model), **CONFIG["lora"])
    return model


def found_files(sources: Sequence[str]) -> list[Path]:
    """The files that paths, folders and globs name, in order."""
    out: list[Path] = []
    for source in sources:
        inside = Path(source).rglob("*") if Path(source).is_dir() else map(Path, glob.glob(source))
        files = sorted(path for path in inside if path.is_file())
        if not files:
            raise ValueError(f"there is no file {source!r} in {Path.cwd()}: give a file, a folder of files, or a glob")
        out += files
    return out


def text_of(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}: give a file of text in UTF-8") from error
    if "\0" in text or not text.strip():
        raise ValueError(f"{path} {'is no text: it has a byte 0' if text.strip() else 'is empty'}: give a file of text")
    return text


def json_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file with a JSON object a line."""
    for number, line in enumerate(text_of(path).split("\n"), 1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ValueError(f"{path}:{number}: this line is no JSON: {error}: give valid JSON") from error
        if isinstance(record, dict):
            yield record
        elif record is not None:
            raise ValueError(f"{path}:{number}: this line is no JSON object: give fields and values in braces")


def read_records() -> Any:
    """Read the records of the data."""
    if CONFIG["data.format"] == "topics":
        return [{CONFIG["data.text"]: "".join(topics[name] for name in sorted(topics))}]
    elif CONFIG["data.format"] == "text":
        return [{CONFIG["data.text"]: text_of(path)} for path in found_files(CONFIG["data.source"])]
    elif CONFIG["data.format"] == "jsonl":
        return [record for path in found_files(CONFIG["data.source"]) for record in json_records(path)]
    elif CONFIG["data.format"] == "parquet":
        from pyarrow.parquet import read_table  # type: ignore[import-untyped, unused-ignore]

        return [record for path in found_files(CONFIG["data.source"]) for record in read_table(path).to_pylist()]
    else:
        import datasets  # type: ignore[import-untyped, unused-ignore]

        name, *more = CONFIG["data.source"]
        if not Path(name).is_dir():
            return datasets.load_dataset(name, *more, split=CONFIG["data.split"])
        found = datasets.load_from_disk(name)
        return found[CONFIG["data.split"]] if isinstance(found, dict) else found


def encoded(records: Any, field: str, end: bool) -> list[Tensor]:
    """The tokens in a field of every record; with ``end``, the token that ends a document is the last of each."""
    for number, record in enumerate(records):
        if not isinstance(record.get(field), str):
            names = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"record {number} has no text in a field {field!r}; its fields: {names}: give one of them")
    encode, _ = make_tokens()
    return [encode(record[field], end) for record in records]


@functools.cache
def make_tokens() -> tuple[Callable[[str, bool], Tensor], int]:
    """Make the function that turns text into tokens, and ends a document if told to; and the number of all tokens."""
    if CONFIG["data.tokenizer"] == "bytes":

        def encode(text: str, end: bool) -> Tensor:
            data = b"\0" + text.encode() + b"\0" * end  # byte 0 ends a document
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)[1:]

        return encode, 256
    else:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(CONFIG["data.tokenizer"])
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

        def encode(text: str, end: bool) -> Tensor:
            found = tokenizer.encode(text, add_special_tokens=False)
            return torch.tensor([*found, *ends * end], dtype=torch.int32, device="cpu")

        return encode, len(tokenizer)


def held_out(documents: Any) -> tuple[Any, Any]:
    """Documents, or the tokens of the only one, to train on, and those at the end that are held out."""
    if isinstance(documents, list) and len(documents) == 1 and isinstance(documents[0], Tensor):
        train, test = held_out(documents[0])
        return [train], [test] if len(test) else []
    share, count = CONFIG["data.held_out"], len(documents)
    cut = min(count - 1, int(count * (1 - share))) if share else count
    if cut < 1:
        raise ValueError(f"held_out = {share} of {count} leaves nothing: give more data, or held_out = 0")
    return documents[:cut], documents[cut:]


class Answers:
    """Rows whose targets are those of answers alone: packed tokens, and marks of the answers that are packed alike."""

    def __init__(self, tokens: fs.data.Packed, marks: fs.data.Packed) -> None:
        self.tokens, self.marks = tokens, marks

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        found = self.tokens[row]
        return {**found, "targets": found["targets"].where(self.marks[row]["targets"] == 1, -100)}


def answer_pair(prompt: Tensor, better: Tensor, worse: Tensor) -> dict[str, Tensor]:
    """A prompt with two answers, (2, length): tokens, and marks of the answers. What is longer is cut at its end."""
    length = CONFIG["data.length"]
    if len(prompt) >= length:
        raise ValueError(f"a prompt has {len(prompt)} tokens, and a row {length}: give more data.length")
    tokens, marks = torch.zeros(2, 2, length, dtype=torch.int64, device="cpu")
    for row, answer in enumerate((better, worse)):
        both = torch.cat((prompt, answer))[:length]
        tokens[row, : len(both)], marks[row, len(prompt) : len(both)] = both, 1
    return {"tokens": tokens, "marks": marks}


def read_data() -> tuple[Any, Any]:
    """Read rows to train on, and rows that are held out."""
    records, batch, length = read_records(), CONFIG["batch"], CONFIG["data.length"]
    if CONFIG["data.rows"] == "pairs":
        prompts, better = encoded(records, CONFIG["data.prompt"], False), encoded(records, CONFIG["data.chosen"], True)
        worse = encoded(records, CONFIG["data.rejected"], True)
        rows, tests = held_out([*map(answer_pair, prompts, better, worse)])
    elif CONFIG["data.rows"] == "answers":
        prompts, answers = encoded(records, CONFIG["data.prompt"], False), encoded(records, CONFIG["data.answer"], True)
        packed = functools.partial(fs.data.Packed, length=length, split=not CONFIG["data.whole"])
        documents = [torch.cat(both) for both in zip(prompts, answers, strict=True)]
        marks = [torch.cat((torch.zeros_like(a), torch.ones_like(b))) for a, b in zip(prompts, answers, strict=True)]
        rows, tests = map(Answers, map(packed, held_out(documents)), map(packed, held_out(marks)))
    elif CONFIG["data.rows"] == "packed":
        packed = functools.partial(fs.data.Packed, length=length, split=not CONFIG["data.whole"])
        rows, tests = map(packed, held_out(encoded(records, CONFIG["data.text"], CONFIG["data.ends"])))
    else:
        train, test = held_out(torch.cat(encoded(records, CONFIG["data.text"], False)))
        rows = train.unfold(0, length + 1, 1) if len(train) > length else []  # they begin at any token
        tests = test.unfold(0, length + 1, length) if len(test) > length else []
    least = {"keep": 1, "drop": batch}[CONFIG["evaluation.partial"]]
    if len(rows) < batch or 0 < CONFIG["data.held_out"] and len(tests) < least:
        found = f"{len(rows)} rows of {length} tokens to train on, and {len(tests)} held out"
        raise ValueError(f"{found}, are too few for a batch of {batch}: give more data, a smaller batch or less length")
    return rows, tests


def make_plan(model: fs.Model, mesh: fs.Mesh) -> fs.Plan:
    """Say which rank holds what: leaves are sharded over all axes but replica, where no rule says otherwise."""
    stages = None
    if CONFIG["mesh.stages"]:
        stages = fs.Stages(CONFIG["mesh.stages"], **CONFIG["stages"])
    cut = tuple(CONFIG["mesh.cut"])
    rules: list[Any] = [(".*", fs.fsdp(cut))]
    if CONFIG["mesh.rules"]:
        kinds: dict[str, Any] = {"fsdp": lambda *axes: fs.fsdp(axes or cut), "replicated": fs.P}
        kinds["dims"] = lambda *axes: fs.P(*[axis or None for axis in axes])
        rules = [(pattern, kinds[kind](*axes)) for pattern, kind, *axes in CONFIG["mesh.rules"]]
    if CONFIG["optimizer.name"] == "muon":
        rules.insert(0, fs.Rule(matrices(model), fs.fsdp(cut), align="leaf"))
    precision = None
    if CONFIG["step.precision"] == "bf16":
        precision = fs.Precision(compute=torch.bfloat16, inputs=True)
    return fs.make_plan(model, mesh, rules, batch=fs.P(tuple(CONFIG["mesh.batch"])), precision=precision, stages=stages)


def logits_of(model: fs.Model, params: Any, tokens: Tensor, batch: Any) -> Any:
    """The logits of tokens."""
    if CONFIG["model.kind"] == "function":
        logits = model.apply(params, tokens)
    elif CONFIG["data.alone"]:  # documents see themselves
        alone = {"attention_mask": fs.data.document_mask(batch["documents"]), "position_ids": batch["positions"]}
        logits = model.apply(params, input_ids=tokens, use_cache=False, **alone).logits
    else:
        logits = model.apply(params, input_ids=tokens, use_cache=False).logits
    known, given = logits.shape[-1], make_tokens()[1]
    if known < given:
        raise ValueError(f"the model knows {known} tokens, and data.tokenizer has {given}: give the model's tokenizer")
    return logits.float()


def margin(model: fs.Model, params: Any, batch: Any) -> Any:
    """The log odds of better answers against worse ones."""
    tokens, marks = batch["tokens"].flatten(0, 1), batch["marks"].flatten(0, 1)
    scores = logits_of(model, params, tokens, batch)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    better, worse = (scores * marks[:, 1:]).sum(1).unflatten(0, (-1, 2)).unbind(1)
    return better - worse


def loss(model: fs.Model, params: Any, batch: Any) -> Any:
    """The loss of a batch."""
    if CONFIG["data.rows"] == "pairs":
        gains = CONFIG["objective.beta"] * (margin(model, params, batch) - batch["before"])
        return fs.Mean(-logsigmoid(gains).sum(), len(gains))
    elif CONFIG["data.rows"] == "windows":
        logits = logits_of(model, params, batch[:, :-1], batch)
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / CONFIG["objective.unit"]
    else:
        logits, targets = logits_of(model, params, batch["tokens"], batch), batch["targets"].flatten()
        losses = cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return fs.Mean(losses / CONFIG["objective.unit"], (targets >= 0).sum())


def make_step(model: fs.Model, plan: fs.Plan) -> fs.types.TrainStep:
    """Make the train step, with its optimizer."""
    rate = getattr(fs.optim.schedules, CONFIG["rate.kind"])(**CONFIG["rate"])
    decay = {"matrices": fs.optim.matrices, "all": None}[CONFIG["optimizer.decay"]]
    opt: Any = fs.optim.adamw(rate, decay=decay, **CONFIG["adamw"])
    if CONFIG["optimizer.name"] == "muon":
        muon = fs.optim.muon(rate, decay=decay, adjust="match_rms_adamw", **CONFIG["muon"])
        opt = fs.optim.partition([(matrices(model), muon), (".*", opt)])
    if CONFIG["optimizer.average"]:
        opt = fs.optim.ema(opt, CONFIG["optimizer.average"])
    options: dict[str, Any] = {}
    if CONFIG["step.pipeline"]:
        options["schedule"] = fs.Policy(pipeline=CONFIG["step.pipeline"])
    return fs.make_train_step(functools.partial(loss, model), opt, plan, **CONFIG["step"], **options)


def first_values(model: Any) -> list[tuple[str, Any]]:
    """First values by pattern; of a model of Hugging Face, biases are 0, other vectors 1, and all else normal."""
    out = [(pattern, getattr(fs.init, name)(*numbers)) for pattern, name, *numbers in CONFIG["model.init"]]
    if CONFIG["model.weights"] == "read":
        if CONFIG["model.lora.rank"]:
            out += [(".*_lora_a", fs.init.kaiming_uniform(a=5**0.5)), (".*_lora_b", fs.init.zeros())]
    elif CONFIG["model.kind"] == "hugging face":
        std = getattr(model.module.config, "initializer_range", 0.02)
        for path, leaf in fs.tree.paths(model.params):
            own = fs.init.normal(std) if leaf.ndim > 1 else fs.init.zeros() if path.endswith("bias") else fs.init.ones()
            out.append((re.escape(path), model.inits[path] if re.fullmatch(fs.lora.PATHS, path) else own))
    return out


def first_state(model: fs.Model, plan: fs.Plan, opt: Any) -> fs.TrainState:
    """Make the state of step 0."""
    values, seed = first_values(model), CONFIG["seed"]
    if CONFIG["model.weights"] == "read":
        source = CONFIG["model.source"]
        if not Path(source).is_dir():
            from huggingface_hub import snapshot_download

            source = snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
        return fs.io.load_hf(source, plan, opt, seed=seed, init=values)
    else:
        return fs.init_state(plan, opt, seed=seed, init=values)


def on_device(rows: list[Any], device: torch.device) -> Any:
    """Rows as one batch on a device."""
    return fs.tree.map(lambda x: x.long().to(device), default_collate(rows))


def compared(rows: list[Any], device: torch.device, odds: Any, first: fs.TrainState) -> Any:
    """Pairs of answers as one batch, with their log odds under the weights of step 0."""
    batch = on_device(rows, device)
    return {**batch, "before": odds(first, batch)}


def drawn(rows: Any, plan: fs.Plan, collate: Callable[[list[Any]], Any], step: int) -> Any:
    """This rank's part of a batch of rows that are drawn at random for a step."""
    places = random.Random(f"{CONFIG['seed']} {step}").choices(range(len(rows)), k=CONFIG["batch"])
    return plan.local_batch(collate([rows[i] for i in places]))


def evaluate(state: fs.TrainState, loss_fn: Any, batches: Callable[[], Any]) -> dict[str, float]:
    """The loss of a state on held-out data."""
    parts = itertools.islice(batches(), CONFIG["evaluation.batches"] or None)
    if CONFIG["optimizer.average"]:
        state = fs.averaged(state)
    if CONFIG["data.rows"] == "windows":
        judge = fs.make_eval_step(loss_fn, state.plan)
        losses = [judge(state, batch).item() for batch in parts]
        return {"held out": sum(losses) / len(losses)}
    else:
        return {"held out": fs.perplexity(state, loss_fn, parts).loss}


def make_trackers() -> list[Any]:
    """Make the trackers."""
    return [getattr(fs.trackers, name)(where) for name, where in CONFIG["trackers"].items()]


def train(mesh: fs.Mesh) -> fs.TrainState:
    """Train on these ranks, and return the last state."""
    model, (rows, tests) = make_model(), read_data()
    plan = make_plan(model, mesh)
    step = make_step(model, plan)
    collate: Any = functools.partial(on_device, device=mesh.device)
    if CONFIG["data.rows"] == "pairs":
        odds, first = fs.make_eval_step(functools.partial(margin, model), plan), first_state(model, plan, None)
        collate = functools.partial(compared, device=mesh.device, odds=odds, first=first)
    loader = functools.partial(fs.data.Loader, plan=plan, batch=CONFIG["batch"], seed=CONFIG["seed"], collate=collate)
    options: dict[str, Any] = {"steps": CONFIG["steps"]}
    if CONFIG["data.held_out"]:
        judged = functools.partial(loader, tests, shuffle=False, epochs=1, partial=CONFIG["evaluation.partial"])
        options["evaluate"] = functools.partial(evaluate, loss_fn=functools.partial(loss, model), batches=judged)
        options["evaluate_every"] = CONFIG["evaluation.every"] or None
    if CONFIG["data.rows"] == "windows":
        batches: Any = functools.partial(drawn, rows, plan, collate)
        elements = CONFIG["batch"] * CONFIG["data.length"]
    else:
        batches, elements = loader(rows), None  # the loss counts them
    if CONFIG["out"]:
        checkpoints: Any = fs.Checkpointer(**CONFIG["checkpoints"])
    else:
        checkpoints = contextlib.nullcontext()
    start, state = functools.partial(first_state, model, plan, step.opt), None
    with checkpoints as saved, fs.track(make_trackers(), step, config=CONFIG, elements=elements) as track:
        for state, _ in fs.train_loop(step, start, batches, checkpoints=saved, track=track, **options):  # noqa: B007
            pass
        return saved.restore(plan, step.opt) if state is None else state  # a run that was over yields no state


if __name__ == "__main__":
    with fs.make_mesh(CONFIG["mesh.shape"], CONFIG["mesh.axes"]) as mesh:
        train(mesh)
