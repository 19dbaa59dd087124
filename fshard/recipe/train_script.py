"""The script of a config: plain Python that trains with public functions of fshard alone.

``fs.train`` runs this script, and ``fshard train --emit-script`` writes it, so both do the same.
"""

import re
from pathlib import Path
from pprint import pformat
from string import Template
from typing import Any

from fshard.recipe.config_checks import check_config, is_function, reads_weights, source_format, tokenizer
from fshard.recipe.config_text import given_values
from fshard.recipe.copied_code import copied
from fshard.recipe.script_template import TEMPLATE
from fshard.recipe.train_config import TrainConfig
from fshard.version import VERSION


def script_of(config: TrainConfig) -> str:
    """The script that does what a config says. It runs alone or under torchrun.

    Raises:
        PlanError: keys that do not fit together.
    """
    check_config(config)
    flags, lines = flags_of(config), []
    for line in TEMPLATE.splitlines():
        found = re.match(r"\?([\w&|]+) ?(.*)", line)
        if found is None or any(flags.issuperset(each.split("&")) for each in found[1].split("|")):
            lines.append(line if found is None else found[2])
    text = Template("\n".join(lines)).substitute(values(config))
    text = re.sub(r"\n\n\n+(?=    )", "\n\n", re.sub(r"\n{4,}", "\n\n\n", text))
    name = repr(config.model.source)[1:-1].replace('"', "'")
    head = f'"""Trains {name}. Written by fshard {VERSION} from a config."""\n\n'
    return head + copied(text) + text.strip() + "\n"


def flags_of(config: TrainConfig) -> set[str]:
    """The flags of the template that hold."""
    kind = config.objective.kind
    flags = {config.data.rows if kind == "next-token" else kind, "file" if is_function(config) else "hf"}
    alone = config.data.isolate and "hf" in flags and flags & {"packed", "sft"}
    more = {"held": config.data.held_out, "lora": config.model.lora.rank, "alone": alone}
    return flags | {name for name, holds in more.items() if holds}


def values(config: TrainConfig) -> dict[str, Any]:
    """The values of the template."""
    model, mesh, flags = config.model, config.mesh, flags_of(config)
    more = ", **alone(batch)" if "alone" in flags else ""
    called = f"input_ids=tokens, use_cache=False{more}).logits" if "hf" in flags else "tokens)"
    order = {"windows": "batches", "dpo": "lambda n: batch_of(rows, order(n))"}
    return {
        **data_values(config), "config": pformat(given_values(config), width=110, sort_dicts=False),
        "source": repr(model.source), "options": dict(model.options), "seed": config.seed, "batch": config.batch,
        "units": repr("auto" if model.units == ("auto",) else model.units), "alpha": model.lora.alpha,
        "targets": repr(model.lora.targets) if model.lora.targets else "matrices(model)", "rank": model.lora.rank,
        "rules": rules(config), "batch_axes": repr(mesh.batch or mesh.axes), "steps": config.steps,
        "precision": "fs.Precision(compute=torch.bfloat16, inputs=True)" if config.step.precision == "bf16" else None,
        "logits": f"model.apply(params, {called}", "beta": config.objective.beta, "rate": rate(config),
        "nats": " / math.log(2)" if config.objective.bits else "", "optimizer": optimizer(config),
        "step": step_options(config), "start": start(config), "most": config.evaluation.batches or None,
        "judged": "fs.averaged(state)" if config.optimizer.average else "state", "shape": mesh.shape,
        "trackers": trackers(config), "saved": checkpointer(config), "axes": mesh.axes,
        "batches": next((order[flag] for flag in flags if flag in order), "loader(rows)"),
        "elements": f", elements={config.batch * config.data.length}" if "windows" in flags else "",
        "evaluate": f"evaluate=evaluate, evaluate_every={config.evaluation.every or None}" if "held" in flags else "",
    }  # fmt: skip


def data_values(config: TrainConfig) -> dict[str, Any]:
    """The values of the template that say where data are, and how they are read."""
    data, form = config.data, source_format(config)
    read = {
        "text": f"text_records({data.source!r}, {data.text!r})",
        "jsonl": f"jsonl_records({data.source!r})",
        "parquet": f"parquet_records({data.source!r})",
        "huggingface": f"hugging_face_records({data.source!r}, {data.split!r})",
    }
    name = tokenizer(config)
    tokens = "ByteTokens()" if name == "bytes" else f"HuggingFaceTokens({name!r})"
    literal = {name: repr(getattr(data, name)) for name in ("text", "prompt", "answer", "chosen", "rejected", "length")}
    more = {"split": not data.whole, "share": data.held_out, "end": form != "text"}
    return {"records": read[form], "tokens": tokens, **literal, **more}


def rules(config: TrainConfig) -> str:
    """The rules of the plan as Python."""
    mesh = config.mesh
    cut = tuple(axis for axis in mesh.axes if axis != "replica") or mesh.axes
    shards = f"fs.fsdp({cut if len(cut) > 1 else cut[0]!r})"
    specs = {
        "fsdp": lambda *axes: f"fs.fsdp({axes if len(axes) > 1 else axes[0]!r})" if axes else shards,
        "replicated": lambda: "fs.P()",
        "dims": lambda *axes: f"fs.P({', '.join(repr(axis or None) for axis in axes)})",
    }
    own = [f"({pattern!r}, {specs[kind](*axes)})" for pattern, kind, *axes in mesh.rules] or [f"('.*', {shards})"]
    if config.optimizer.name == "muon":
        own.insert(0, f"fs.Rule(matrices(model), {shards}, align='leaf')")
    return f"[{', '.join(own)}]"


def rate(config: TrainConfig) -> str:
    """The learning rate as Python."""
    rate, total = config.rate, config.rate.total or config.steps
    warmup = rate.warmup if rate.warmup >= 0 else min(100, total // 8)
    if rate.kind == "constant":
        return f"fs.optim.schedules.warmup_linear({rate.peak}, {warmup}, total={warmup + 1}, floor={rate.peak})"
    given = f"{rate.peak}, warmup={warmup}, total={total}, floor={rate.floor}"
    if rate.kind == "wsd":
        return f"WarmupStableDecay({given}, cooldown={rate.cooldown if rate.cooldown > 0 else max(1, total // 5)})"
    return f"fs.optim.schedules.warmup_{rate.kind}({given})"


def optimizer(config: TrainConfig) -> str:
    """The optimizer as Python."""
    opt = config.optimizer
    decay = f"weight_decay={opt.weight_decay}" + (", decay=fs.optim.matrices" if opt.decay == "matrices" else "")
    rule = f"fs.optim.adamw(rate, betas={opt.betas}, eps={opt.eps}, {decay})"
    if opt.name == "muon":
        muon = f"fs.optim.muon(rate, momentum={opt.momentum}, {decay}, adjust='match_rms_adamw')"
        rule = f"fs.optim.partition([(matrices(model), {muon}), (r'.*', {rule})])"
    return f"fs.optim.ema({rule}, {opt.average})" if opt.average else rule


def step_options(config: TrainConfig) -> str:
    """The options of the train step as Python."""
    run = config.step
    given = {"clip_norm": config.optimizer.clip_norm or None, "accumulate": run.accumulate}
    more = {name: getattr(run, name) for name in ("remat", "compile", "schedule")}
    given |= {name: value for name, value in more.items() if value not in ("none", "default")}
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def start(config: TrainConfig) -> str:
    """The first state as Python."""
    init = [f"({pattern!r}, fs.init.{name}({', '.join(map(str, rest))}))" for pattern, name, *rest in config.model.init]
    if reads_weights(config):
        lora = ["('.*_lora_a', fs.init.kaiming_uniform(a=5**0.5))", "('.*_lora_b', fs.init.zeros())"]
        init += lora if config.model.lora.rank else []
        folder = f"hugging_face_folder({config.model.source!r})"
        return f"fs.io.load_hf({folder}, plan, opt, seed={config.seed}, init=[{', '.join(init)}])"
    init += [] if is_function(config) else ["*fresh(model)"]
    return f"fs.init_state(plan, opt, seed={config.seed}, init=[{', '.join(init)}])"


def trackers(config: TrainConfig) -> str:
    """The trackers as Python."""
    track, out = config.track, Path(config.out)
    wanted = {
        f"Live({config.steps})": track.live,
        f"JsonLines({str(out / 'metrics.jsonl')!r})": config.out,
        f"TensorBoard({str(out / 'tensorboard')!r})": track.tensorboard,
        f"Wandb({track.wandb!r})": track.wandb,
        f"MLflow({track.mlflow!r})": track.mlflow,
    }
    return ", ".join(f"fs.trackers.{text}" for text, chosen in wanted.items() if chosen)


def checkpointer(config: TrainConfig) -> str:
    """The place of checkpoints as Python."""
    saved, folder = config.checkpoints, str(Path(config.out) / "checkpoints")
    given = f"{folder!r}, keep={saved.keep or None}, every={saved.every or None}, async_={saved.asynchronous}"
    return f"fs.Checkpointer({given})" if config.out else "contextlib.nullcontext()"
