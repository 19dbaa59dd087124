"""The optimizer: AdamW with exact global clipping over 290 leaves, a 12-layer model, one process.

The claim: with one flat shard a group it takes at most 0.10 of the time that FSDP2 takes for as many DTensors.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import peers
import torch
from common import Report, arguments, middle, ratio
from model import Size, rows
from peers import CLIP, Fshard, Peer, Torch
from torch import Tensor, nn

import fshard as fs
from fshard.runtime.steps.consensus import OK, exchange_row, tally, tally_columns, verdict_of

LAYERS, PER_LAYER = 12, 12
SIZE = Size(depth=LAYERS, width=32, tokens=4, vocabulary=32)


class Block(nn.Module):
    """A chain of linear maps: 24 leaves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(PER_LAYER))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.maps:
            x = x + linear(x)
        return x


class Chain(nn.Module):
    """12 blocks and a norm: 290 leaves. It reads tokens as rows of the identity, so it needs no embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, self.norm.normalized_shape[0]).float()
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def chain() -> Chain:
    """The model, always with the same weights."""
    torch.manual_seed(0)
    return Chain(SIZE)


def finish_torch(peer: Torch, batch: Tensor) -> float:
    """Seconds of clip and update."""
    peers.loss_of(peer.module(batch[:, :-1]), batch).backward()
    begin = time.perf_counter()
    peer.update()
    taken = time.perf_counter() - begin
    peer.optimizer.zero_grad(set_to_none=True)
    return taken


def finish_fshard(peer: Fshard, batch: Tensor) -> float:
    """Seconds of norm, consensus and update.

    A step takes the norm at its end and leaves the update to the next one. To have both alone the norm, which reads
    gradients that are still there, is taken a second time, by the library's own functions, and the update called for.
    """
    peer.state, _ = peer.train(peer.state, batch)
    runner, decide = peer.train._runner, peer.train._decide
    gradients = runner.latest.prepared.actions.gradients
    gradients.norms.clear()
    begin = time.perf_counter()
    norms = [(gradients.shares[group], norm) for group, norm in gradients.all_norms().items()]
    mine = tally(norms, (), [(torch.tensor(1.0), 1.0)], (), False, False)
    control = runner.programs.comms.control
    row = exchange_row(control, OK, tally_columns(mine))
    verdict = verdict_of(control, row, mine, runner.parts, 1, runner.parts)
    decide.scales(peer.state.step, verdict.scale, verdict)
    fs.settle(peer.state).finished()
    return time.perf_counter() - begin


def measure(args: argparse.Namespace) -> int:
    """Build, check, take turns, report."""
    rounds = args.rounds or (40 if args.quick else 200)
    configuration = {"leaves": len(list(chain().parameters())), "width": SIZE.width, "ranks": 1, "rounds": rounds}
    report = Report("optimizer", __doc__.splitlines()[0], configuration)
    with peers.process_group():
        plain = Torch(chain(), clip=CLIP)
        sharded = Torch(chain(), peers.fsdp2, CLIP)
        ours = Fshard(chain(), clip=CLIP)
        built: dict[str, Peer] = {"eager clip": plain, "fsdp2 clip": sharded, "fshard clip": ours}
        peers.check_agreement(built, SIZE)
        turns: dict[str, Callable[[Tensor], float]] = {
            "eager": lambda batch: finish_torch(plain, batch),
            "fsdp2": lambda batch: finish_torch(sharded, batch),
            "fshard": lambda batch: finish_fshard(ours, batch),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(-3, rounds):
            for name, turn in turns.items():
                taken = turn(rows(SIZE, number + 100))
                if number >= 0:
                    times[name].append(taken)
    report.medians = {name: statistics.median(values) for name, values in times.items()}
    report.rows.append(ratio("fshard / fsdp2", "wall", times["fshard"], times["fsdp2"], 0.10))
    report.rows.append(ratio("fshard / eager", "wall", times["fshard"], times["eager"]))
    for name, values in times.items():
        target = 0.5 if name == "fshard" else None
        report.rows.append(middle(name, "ms", [1000 * value for value in values], target, strict=False))
    return report.finish(args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options = arguments(__doc__, lambda cli: cli.add_argument("--rounds", type=int, help="updates of each peer"))
    sys.exit(measure(options))
