"""Compare values that must be equal on all ranks."""

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.ranks import Ranks
from fshard.errors import ReplicationError, lines


def check_invariant(group: Ranks, x: Tensor, label: str) -> None:
    """Compare a tensor over the ranks of a group; nan equals nan. All ranks raise the same error.

    Raises:
        ReplicationError: it differs.
    """
    rows = raw.gather(group, x)()
    same = (rows == rows[0]) | ((rows != rows) & (rows[0] != rows[0]))
    wrong = ~same.reshape(group.size, -1)
    if not wrong.any():
        return
    ranks = group.mesh.ranks(group.axes)
    problems = []
    for row in torch.nonzero(wrong.any(1)).flatten().tolist():
        at = int(wrong[row].int().argmax())
        place = list(torch.unravel_index(torch.tensor(at, device="cpu"), x.shape)) if x.dim() else []
        index = f"[{', '.join(str(int(i)) for i in place)}]"
        first, here = rows[0].flatten()[at].item(), rows[row].flatten()[at].item()
        count = int(wrong[row].sum())
        problems.append(f"rank {ranks[row]}: {count} of {x.numel()} differ; first at {index}: {here}, not {first}")
    remedy = f"Name the axis in its spec, or make it equal first, such as by psum or pmean over {str(group)!r}."
    head = f"{label} must be the same along {str(group)!r}, but differs from the value of rank {ranks[0]}:"
    raise ReplicationError(lines(head, problems, remedy))
