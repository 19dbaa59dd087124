"""Large vocabularies: a Llama of 131,072 classes on two ranks, its logits by chunks, whole, and under FSDP2.

The claim: at equal prefetch, and with every layer computed again in the backward on both sides, the most that a step
needs above what is there between steps is at most 0.75 of FSDP2's, and no more than FSDP2's with chunks; and where
logits are most of the work, chunks take at most 1.01 of the processor time of whole logits.

The peak is that of tensors as ``memory.py`` counts them. Times are those of the head, its loss and their backward in
one process, taken in turns. Chunked and whole losses must agree first.
"""

import argparse
import functools
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory
import peers
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fshard as fs

CLASSES, CHUNKS = 1 << 17, 8
SIZES = {
    "vocab_size": CLASSES,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_cache": False,
}
PEERS = ("fshard chunked", "fshard whole", "fsdp2", "fsdp2 chunked")
HEADS = ((1 << 15, 256, 512), (CLASSES, 128, 256))
"""Classes, width and rows of the heads that are timed."""


def llama() -> nn.Module:
    """The model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


class Torch:
    """FSDP2 with layers that are computed again, two layers gathered ahead in both directions."""

    def __init__(self) -> None:
        self.model: Any = llama()
        model = self.model
        layers = [*model.model.layers]
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
        layers, mesh = [*model.model.layers], init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        chain = [self.sharded(mesh), *layers]
        for at, one in enumerate(chain):
            if chain[at + 1 : at + 3]:
                one.set_modules_to_forward_prefetch(chain[at + 1 : at + 3])
            if chain[max(1, at - 2) : at]:
                one.set_modules_to_backward_prefetch(chain[max(1, at - 2) : at][::-1])
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAMW)

    def sharded(self, mesh: DeviceMesh) -> Any:
        """Shard what is outside of layers; returns the module that holds it."""
        return fully_shard(self.model, mesh=mesh)

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute gradients; returns the loss."""
        loss: torch.Tensor = self.model(**batch).loss
        loss.backward()
        return loss

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One step; the loss of this rank's rows."""
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


class TorchChunked(Torch):
    """The same, and head, loss and their backward by chunks, as torchtitan has them: the head is a group of its own.

    Its gradient is reduced after the last chunk, and it stays gathered from the first to the last.
    """

    def sharded(self, mesh: DeviceMesh) -> Any:
        """Shard the head apart from the decoder."""
        fully_shard(self.model.lm_head, mesh=mesh, reshard_after_forward=False)
        return fully_shard(self.model.model, mesh=mesh)

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute gradients chunk by chunk; returns the loss."""
        head, hidden = self.model.lm_head, self.model.model(batch["input_ids"]).last_hidden_state[:, :-1]
        rows = hidden.detach().flatten(0, 1).requires_grad_()
        labels, total = batch["labels"][:, 1:].flatten(), torch.zeros(())
        parts = [*zip(rows.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)]
        for number, (part, wanted) in enumerate(parts):
            last = number + 1 == len(parts)
            head.set_requires_gradient_sync(last)
            head.set_reshard_after_backward(last)
            loss = nn.functional.cross_entropy(head(part), wanted, reduction="sum") / len(labels)
            loss.backward()
            total += loss.detach()
        hidden.backward(rows.grad.view_as(hidden))
        return total


class Fshard:
    """This library, with logits by chunks or whole."""

    def __init__(self, chunks: int) -> None:
        module = llama()
        model = fs.split(module, units=("model.layers.*",))
        mesh = fs.make_mesh((-1,), ("data",))
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))])
        opt = fs.optim.adamw(**peers.ADAMW)
        loss = fs.causal_lm_loss(model, chunks=chunks) if chunks else lambda p, batch: model.apply(p, **batch).loss
        self.state = fs.init_state(plan, opt, params=model.params)
        self.train = fs.make_train_step(loss, opt, plan, remat="all")

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One step; the loss of all rows."""
        self.state, metrics = self.train(self.state, batch)
        return float(metrics.loss)


def made(name: str) -> Any:
    """A peer."""
    makers = {"fsdp2": Torch, "fsdp2 chunked": TorchChunked}
    return makers[name]() if name in makers else Fshard(CHUNKS if name == "fshard chunked" else 0)


def work(args: argparse.Namespace) -> int:
    """One rank: losses of two steps, then peaks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with peers.process_group():
        tokens = torch.randint(CLASSES, (4, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
        batch = {"input_ids": tokens, "labels": tokens}
        found, losses = {}, {}
        for name in PEERS:
            peer = made(name)
            mean = torch.tensor([peer.step(batch) for _ in range(2)])
            dist.all_reduce(mean)
            losses[name] = (mean / dist.get_world_size()).tolist()
            found[name] = memory.peaks(functools.partial(peer.step, batch), 1, args.steps)
            del peer
        for name, each in losses.items():
            torch.testing.assert_close(torch.tensor(each), torch.tensor(losses["fsdp2"]), msg=f"{name}: {losses}")
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps({"peaks": found, "losses": losses}))
        dist.barrier()
    return 0


def turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of processor time of functions that take turns."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            if number:
                took[name].append(time.process_time() - begun)
    return took


def timed(classes: int, width: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Processor time of a head, its loss and their backward."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(classes, width).mul_(width**-0.5).requires_grad_()
    labels = torch.randint(classes, (count,))

    def whole() -> tuple[torch.Tensor, ...]:
        loss = nn.functional.cross_entropy(hidden @ weight.T, labels)
        return torch.autograd.grad(loss, (hidden, weight))

    def chunked() -> tuple[torch.Tensor, ...]:
        loss = fs.chunked_cross_entropy(hidden, weight, labels, chunks=CHUNKS)
        return torch.autograd.grad(loss, (hidden, weight))

    for mine, theirs in zip(chunked(), whole(), strict=True):
        torch.testing.assert_close(mine, theirs)
    return turns({"chunked": chunked, "whole": whole}, rounds)


def measure(args: argparse.Namespace) -> int:
    """Time heads, run the workers, report."""
    steps = 3 if args.quick else 7
    report = Report("vocabulary", __doc__.splitlines()[0], {"model": SIZES, "chunks": CHUNKS, "ranks": 2})
    for classes, width, count in HEADS:
        took = timed(classes, width, count, 5 if args.quick else 15)
        name = f"chunked / whole, {classes:,} classes, width {width}, {count} rows"
        report.rows.append(ratio(name, "cpu", took["chunked"], took["whole"], 1.01))
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        report.notes.append("peaks: skipped: they need Linux, and a C compiler named cc")
        return report.finish(args)
    with memory.preloaded():
        found = run_workers(2, None, {"worker": 1, "steps": steps}, script="vocabulary.py")
    tensors = {name: memory.firsts(each) for name, each in found["peaks"].items()}
    for ours, theirs, limit in (
        ("fshard chunked", "fsdp2", 0.75),
        ("fshard chunked", "fsdp2 chunked", 1.0),
        ("fshard whole", "fsdp2", 1.0),
    ):
        report.rows.append(ratio(f"{ours} / {theirs}", "tensors", tensors[ours], tensors[theirs], limit))
    for name, each in tensors.items():
        report.rows.append(middle(name, "MiB", [size / memory.MIB for size in each]))
    report.rows.append(Row("logits of a rank", "MiB", 4 * 128 * CLASSES * 4 / memory.MIB))
    report.medians = found
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What a worker is told."""
    for name in ("worker", "steps"):
        cli.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    cli.add_argument("--out", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    sys.exit(work(given) if given.worker else measure(given))
