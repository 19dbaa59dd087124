"""The stages of ``make gpu``, the commands of its plan, in their order; and what no run with one GPU shows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage, which has a process of its own.

    Attributes:
        name: of its module in ``tests.gpu``, and what that is told after a dot.
        what: what it does.
        seconds: its limit with a GPU.
        dry: its limit without one.
    """

    name: str
    what: str
    seconds: float
    dry: float = 60.0


STAGES = (
    Stage("marked", "the tests marked gpu", 150),
    Stage("parity", "training on one GPU against the CPU, loss by loss", 75),
    Stage("lane", "every method of the NCCL communicator on a group of one rank, with delayed kernels", 75),
    Stage("played", "four played ranks on one GPU, delayed side streams, poison: all schedules, equal bits", 180),
    Stage("remat", "recomputation with collectives by name", 60),
    Stage("memory_runs_out", "out of memory in a backward, then a good step", 60),
    Stage("graphs", "unit graphs, fx and Inductor, with attention and dropout", 150),
    Stage("syncs", "no wait for the device but the consensus", 45),
    Stage("peak", "peak memory against the footprint, within 1 %", 60),
    Stage("saving", "an asynchronous save while training", 60),
    Stage("bench", "benchmarks/gpu.py: step time, MFU, host time", 450, 120),
    Stage("whole_step", "a CUDA graph of the whole step against none", 90),
    Stage("graph", "steps captured by a policy: bits of eager steps, refusals, and what a replay takes", 45),
)
TOTAL = 25 * 60.0
"""Seconds for all of them."""

LADDER = (
    "eager",
    "fshard",
    "fshard fx",
    "compiled loss",
    "fshard inductor",
    "eager clip",
    "fshard clip",
    "compiled graphs",
    "fsdp2 titan",
    "eager, again",
)
"""Peers of ``benchmarks/gpu.py``. The first comes again, to see by how much the card drifts."""

GRAPHS = "fshard graph", "fshard fx graph", "fshard inductor graph"
LONG = tuple(f"{peer}, 16 rows" for peer in ("eager", "compiled loss", "fshard fx", "fshard inductor"))
AGAIN = "lane", "syncs", "whole_step", "graph"


@dataclass(frozen=True)
class Command:
    """A part of the plan: it fits into ten minutes of a card.

    Attributes:
        what: it does.
        decides: what its numbers decide.
        seconds: its limit.
        stages: of which it consists.
    """

    what: str
    decides: str
    seconds: float
    stages: tuple[Stage, ...]


def _ladder(peers: tuple[str, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(f"ladder.{peer}", f"a GPT of 1.3B parameters: {peer}", 140, 600) for peer in peers)


PLAN = (
    Command(
        "ten peers at 4,096 tokens, each alone",
        "Copies of fshard 1.5 ms over eager's, or norms .7 ms: these first. A step 1.5 ms longer than its kernels: "
        "graphs first. `fshard inductor` over 1.05 of `compiled loss`: compare kinds of kernels.",
        525,
        _ladder(LADDER),
    ),
    Command(
        "the step replayed as a CUDA graph",
        "A gain under 2 ms: graphs wait; over 4 ms: they come first. A step that was not captured says why.",
        240,
        _ladder(GRAPHS),
    ),
    Command(
        "AdamW and norms beside products, float8 with its rounding",
        "AdamW beside products in less than these and half of AdamW: build it. Float8 and its rounding under .8 of "
        "bf16 at 16,384 rows: float8 products, else only gathers.",
        180,
        (Stage("micro", "memory-bound work beside products, products in float8", 180),),
    ),
    Command(
        "four peers at 16,384 tokens",
        "Ratios where the host matters least.",
        300,
        _ladder(LONG),
    ),
    Command(
        "four stages again",
        "If one fails, no number above counts.",
        255,
        tuple(stage for stage in STAGES if stage.name in AGAIN),
    ),
)
"""The first 25 minutes of a card."""

UNTESTED = (
    "NCCL between ranks: all-gather, reduce-scatter, all-reduce and all-to-all that send anything",
    "transfers of a schedule over NCCL: in a world of one every group is resident, and played ranks copy memory",
    "aborting a collective in which another rank waits, and how soon that rank learns of it",
    "a rank that dies or hangs beside NCCL, and NCCL's own watchdog",
    "overlap of communication with compute over NVLink, PCIe or a network",
    "memory and start of communicators that span GPUs, and sharing them between roles",
    "the choice of a GPU by LOCAL_RANK, and the refusal of two ranks on one GPU by its UUID",
    "jobs on several hosts",
    "recovery from an error of a device",
)
"""What one GPU leaves untested."""
