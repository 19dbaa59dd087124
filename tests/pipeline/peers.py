"""Orders of PyTorch's schedules, by stand-ins for its stages: no process group, no tensors."""

from types import SimpleNamespace
from typing import Any

from fshard.pipeline import Action

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def their_order(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """The compute actions of each rank in PyTorch's schedule of this name."""
    schedule = _schedule(name, ranks, microbatches, chunks)
    order = schedule._get_pipeline_order() if name in ("gpipe", "1f1b") else schedule.pipeline_order
    if name == "1f1b":  # it numbers the forwards of the last rank from 1, in this table alone
        order[ranks - 1] = [a._replace(microbatch_index=a[2] and a[2] - (a[1] == "F")) for a in order[ranks - 1] if a]
    return tuple(tuple(own for theirs in order[rank] if theirs for own in _actions(theirs)) for rank in range(ranks))


def their_csv(name: str, ranks: int, microbatches: int, chunks: int) -> str:
    """The text of the CSV file that PyTorch writes, with communication."""
    order = _schedule(name, ranks, microbatches, chunks).pipeline_order_with_comms
    return "".join(",".join(map(str, order[rank])) + "\r\n" for rank in range(ranks))


def _schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Any:
    """PyTorch's schedule of this name, on rank 0."""
    from torch.distributed.pipelining import schedules  # takes seconds to import

    stages = [
        SimpleNamespace(
            group=None,
            group_rank=0,
            group_size=ranks,
            num_stages=ranks * chunks,
            stage_index=chunk * ranks,
            is_first=chunk == 0,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    kind = getattr(schedules, CLASSES[name])
    return kind(stages[0] if name in ("gpipe", "1f1b") else stages, microbatches, loss_fn=len)


def _actions(theirs: Any) -> list[Action]:
    """The actions of one cell; none for what is no computation."""
    if theirs.sub_actions:
        return [own for each in theirs.sub_actions for own in _actions(each)]
    kind = theirs.computation_type.value
    return [Action(theirs.stage_index, kind, theirs.microbatch_index)] if kind in "FBIW" else []
