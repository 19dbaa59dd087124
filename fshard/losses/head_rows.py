"""The losses of some rows from their hidden states, and the derivatives by the logits, in place.

With x the logits after the cap, p their softmax, t the label's logit, V classes, e the smoothing and z the weight of
the squared log-sum-exp::

    loss = lse - (1 - e) t - e mean(x) + z lse^2
    d loss / d x = (1 + 2 z lse) p - (1 - e) onehot - e / V
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard import collectives
from fshard.sharding.mesh import Mesh

Parts = Sequence[Tensor]
"""Tensors whose products with those of another sequence are summed."""


@dataclass(frozen=True)
class HeadLoss:
    """The options of a head's loss.

    Attributes:
        classes: of the whole vocabulary.
        ignore_index: labels that have no loss.
        z_loss: weight of the squared log-sum-exp.
        label_smoothing: weight of the mean over classes.
        softcap: logits are ``softcap * tanh(logits / softcap)``; None for logits as they are.
        axis: the axis that cuts the vocabulary; None for a whole one.
        mesh: of that axis.
    """

    classes: int
    ignore_index: int = -100
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None
    axis: str | None = None
    mesh: Mesh | None = None

    def losses(self, hiddens: Parts, weights: Parts, bias: Tensor | None, labels: Tensor) -> Tensor:
        """The loss of each row, (rows,), by operators that autograd knows."""
        if self.axis is not None:
            hiddens = [collectives.pvary(each, self.axis, mesh=self.mesh) for each in hiddens]
        logits = F.linear(hiddens[0], weights[0], bias)
        for hidden, weight in zip(hiddens[1:], weights[1:], strict=True):
            logits = logits + F.linear(hidden, weight)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits.to(_wide(logits)) / self.softcap)
        logits = logits.to(_wide(logits))
        local, valid = self._local(labels, logits)
        columns = logits if valid is None else logits.masked_fill(~valid, -torch.inf)
        picked = self._at(logits, local)
        if self.axis is None and valid is None:
            total = columns.logsumexp(-1)
            mean = logits.sum(-1) / self.classes if self.label_smoothing else None
        else:
            top = self._top(columns.detach().amax(-1))
            summed = logits if valid is None else logits.masked_fill(~valid, 0.0)
            parts = [(columns - top.unsqueeze(-1)).exp().sum(-1), picked, summed.sum(-1)]
            exps, picked, sums = self._sum(torch.stack(parts)).unbind(0)
            total, mean = exps.log() + top, sums / self.classes
        found = self._joined(total, picked, mean)
        return torch.where(labels != self.ignore_index, found, torch.zeros_like(found))

    def derived(self, hiddens: Parts, weights: Parts, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the rows' losses, and its derivative by the logits before the cap, (rows, columns).

        The derivative has the dtype of the products, and lies where the logits were.
        """
        raw = torch.mm(hiddens[0], weights[0].t())
        for hidden, weight in zip(hiddens[1:], weights[1:], strict=True):
            raw.addmm_(hidden, weight.t())
        if bias is not None:
            raw.add_(bias)
        dtype, x = raw.dtype, raw.to(_wide(raw))
        del raw
        capped = None
        if self.softcap is not None:
            capped = x.div_(self.softcap).tanh_()
            x = capped * self.softcap
        local, valid = self._local(labels, x)
        counted = (labels != self.ignore_index).to(x.dtype)
        smooth, share = self.label_smoothing, self.label_smoothing / self.classes
        picked = self._at(x, local)
        sums = (x if valid is None else x * valid).sum(-1) if smooth else torch.zeros_like(picked)
        if valid is not None:
            x.masked_fill_(~valid, -torch.inf)
        top = self._top(x.amax(-1))
        exps, picked, sums = self._sum(torch.stack((x.sub_(top.unsqueeze(-1)).exp_().sum(-1), picked, sums))).unbind(0)
        total = exps.log() + top
        losses = torch.where(counted > 0, self._joined(total, picked, sums / self.classes), 0.0)
        x.mul_((counted * (1 + 2 * self.z_loss * total) / exps).unsqueeze(-1))
        if smooth:
            x.sub_((share * counted).unsqueeze(-1) if valid is None else (share * counted).unsqueeze(-1) * valid)
        here = ((local >= 0) & (local < x.shape[-1])).to(x.dtype) * counted * (smooth - 1)
        x.scatter_add_(-1, local.clamp(0, x.shape[-1] - 1).unsqueeze(-1), here.unsqueeze(-1))
        if capped is not None:
            x.mul_(capped.square_().neg_().add_(1))
        return losses.sum(), x.to(dtype)

    def _joined(self, total: Tensor, picked: Tensor, mean: Tensor | None) -> Tensor:
        """The losses, of log-sum-exps, labels' logits and mean logits."""
        found = total - (1 - self.label_smoothing) * picked if self.label_smoothing else total - picked
        if self.label_smoothing and mean is not None:
            found = found - self.label_smoothing * mean
        return found + self.z_loss * total.square() if self.z_loss else found

    def _local(self, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Labels counted from this rank's first column, and which columns are classes, if not all are."""
        width, first = logits.shape[-1], 0
        parts = 1
        if self.axis is not None:
            first = width * collectives.axis_index(self.axis, mesh=self.mesh)
            parts = collectives.axis_size(self.axis, mesh=self.mesh)
        padded = width * parts > self.classes
        valid = torch.arange(width, device=logits.device) < self.classes - first if padded else None
        return torch.where(labels == self.ignore_index, -1, labels - first), valid

    def _at(self, logits: Tensor, local: Tensor) -> Tensor:
        """The logit of each label that is this rank's; 0 for all others."""
        width = logits.shape[-1]
        found = logits.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        return torch.where((local >= 0) & (local < width), found, torch.zeros_like(found))

    def _top(self, own: Tensor) -> Tensor:
        return own if self.axis is None else collectives.pmax(own, self.axis, mesh=self.mesh)

    def _sum(self, own: Tensor) -> Tensor:
        return own if self.axis is None else collectives.psum(own, self.axis, mesh=self.mesh)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
