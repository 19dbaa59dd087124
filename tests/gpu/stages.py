"""The stages of ``make gpu``, in their order; and what no run with one GPU shows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage, which has a process of its own.

    Attributes:
        name: of the stage, and of its module in ``tests.gpu``.
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
