"""One exchange between replicas: a fragment's differences leave, and their mean moves the anchor when it arrives.

Every replica rounds its own difference once, and gets those of all. It adds them in the order of replicas, so that all
come to the same anchor, bit for bit. A few numbers ahead of the difference, in the same message, say which one it is.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.errors import NonFiniteError, ScheduleError, lines
from fshard.optim import checks
from fshard.optim.base import Optimizer, State, States, Tensors
from fshard.optim.combinators import Inner
from fshard.optim.contract import contract, update_of
from fshard.optim.form import Form, LeafInfo
from fshard.outer_steps.fragments import HEAD, Fragment, Range
from fshard.runtime.comm import Communicator, Handle, exchange, mesh_communicator
from fshard.runtime.comm.device_streams import in_use
from fshard.runtime.comm.packing import pack, unpack_sum
from fshard.runtime.comm.row_sums import sum_rows
from fshard.runtime.execution import Shard, Shards
from fshard.schedule.transfers import KINDS
from fshard.sharding.part_mesh import ReplicaMesh
from fshard.sharding.plan import Plan
from fshard.sharding.wire import WireFormat
from fshard.state.exchanges import ANCHOR, Timetable

DELTA = "delta"
"""Of each replica: what it has sent and nobody has added yet, and between exchanges what rounding left of it."""

OUTER = "outer_"
"""The beginning of the names of the outer optimizer's buffers."""


@dataclass(frozen=True)
class Outer(Inner):
    """An optimizer whose state has the buffers of outer steps too. Its updates are those of the inner optimizer.

    Args:
        opt: the inner optimizer.
        outer: the outer one, which updates the anchor with the mean difference between it and the replicas.
        every: the steps between two exchanges of a fragment.
        over: the mesh axis of replicas.
        wire: the format in which differences travel; None for exact ones.
        fragments: their number, or patterns.
        delay: the steps for which a fragment is under way.
        mix: how much of its own values a replica keeps when a fragment arrives.
    """

    outer: Optimizer
    every: int
    over: str
    wire: str | None
    fragments: int | tuple[str, ...]
    delay: int
    mix: float

    def __post_init__(self) -> None:
        whole = checks.is_optimizer(self.outer) and not contract(self.outer).uniform
        found = [f"outer = {self.outer!r}: must update each element by itself, as fs.optim.sgd does"] if whole else []
        checks.require(self, *found, opt=checks.optimizer, outer=checks.optimizer)

    @property
    def table(self) -> Timetable:
        """Say when fragments leave and arrive."""
        number = self.fragments if isinstance(self.fragments, int) else len(self.fragments)
        return Timetable(self.every, self.delay, number)

    @property
    def keeps_delta(self) -> bool:
        """Tell whether something of a difference must be kept: while it is under way, or because it was rounded."""
        return self.delay > 0 or self.wire is not None

    def init(self, param: Tensor, hyper: Any) -> State:
        """The inner optimizer's buffers, the parameters as they are, and the outer optimizer's buffers for these."""
        anchor = param.to(torch.promote_types(param.dtype, torch.float32), copy=True)
        outer = {OUTER + name: value for name, value in contract(self.outer).init(anchor, None).items()}
        delta = {DELTA: torch.zeros_like(anchor)} if self.keeps_delta else {}
        return {**super().init(param, hyper), ANCHOR: anchor, **outer, **delta}

    def forms(self, hyper: Any) -> dict[str, Form]:
        """Return what the inner optimizer keeps, and what outer steps do."""
        outer = {OUTER + name: Form(wide=True, common=True) for name in contract(self.outer).forms(None)}
        delta = {DELTA: Form(wide=True)} if self.keeps_delta else {}
        return {**super().forms(hyper), ANCHOR: Form(wide=True, common=True), **outer, **delta}

    def problems(self, leaves: list[LeafInfo]) -> list[str]:
        """Those of both optimizers."""
        return [*super().problems(leaves), *contract(self.outer).problems(leaves)]

    def update(self, params: Tensors, grads: Tensors, states: States, *, step: int, hyper: Any, **more: Any) -> None:
        """The update of the inner optimizer; see ``Optimizer.update``."""
        update_of(self.opt)(params, grads, states, step=step, hyper=hyper, **more)


ROLE = KINDS["exchange"].role
"""The role of the communicator between replicas."""


@dataclass(frozen=True, eq=False)
class FragmentFlight:
    """A fragment under way.

    Attributes:
        number: of the fragment.
        left: the step after which it left.
        rows: what arrives of each replica.
        sent: what this one sends.
        work: the handle of the transfer.
    """

    number: int
    left: int
    rows: Tensor
    sent: Tensor
    work: Handle


@dataclass(frozen=True, eq=False)
class Exchange:
    """Exchanges of fragments between the replicas of a plan.

    Attributes:
        plan: of one replica.
        mesh: its ranks.
        opt: the optimizer, with the options of outer steps.
        fragments: what can travel.
        form: the format in which differences travel; None for exact ones.
    """

    plan: Plan
    mesh: ReplicaMesh
    opt: Outer
    fragments: tuple[Fragment, ...]
    form: WireFormat | None

    def nbytes(self, number: int) -> int:
        """The bytes of a message with this fragment."""
        return self.fragments[number].nbytes

    def send(self, number: int, step: int, shards: Shards, stop: bool = False, again: bool = False) -> FragmentFlight:
        """Send a fragment's difference to the other replicas. Collective within a replica.

        Args:
            number: of the fragment.
            step: the step after which it leaves.
            shards: the state after that step.
            stop: whether this rank asks all to stop.
            again: whether it had left before the state was saved, which says what it was.
        """
        fragment, shards = self.fragments[number], shards.overwrite()
        value = torch.zeros(fragment.numel, dtype=fragment.dtype, device=self.mesh.device)
        for cut, view in _views(fragment, value):
            if again:
                view.copy_(_buffer(shards, DELTA, cut))
                continue
            view.copy_(_anchor(shards, cut)).sub_(_own(shards, cut).to(view))
            if self.form is not None:
                view.add_(_buffer(shards, DELTA, cut).to(view))
            if self.opt.keeps_delta:
                _buffer(shards, DELTA, cut).copy_(view)
        return self._start(number, step, value, stop)

    def receive(self, flight: FragmentFlight, shards: Shards) -> bool:
        """Wait for a fragment, and move the anchor and this replica's parameters by it. Says whether a rank stops.

        Raises:
            ScheduleError: replicas are at different steps; on all of them.
            NonFiniteError: a difference is infinite or nan; on all ranks alike, before anything is written.
            CommError: a replica is lost.
        """
        flight.work.wait()
        rows = flight.rows.view(self.mesh.replicas, -1)
        heads = rows[:, :HEAD].reshape(-1).view(torch.int64).view(-1, HEAD // 8).tolist()
        self._check(flight, heads, shards.overwrite())
        fragment = self.fragments[flight.number]
        mean = torch.empty(fragment.numel, dtype=fragment.dtype, device=self.mesh.device)
        self._sum(rows[:, HEAD:], mean)
        mean.div_(len(heads))
        self._update(flight, mean, shards)
        arrived = mean  # whose memory is not needed any more
        if self.opt.keeps_delta:
            self._sum(flight.sent[None, HEAD:], arrived)
        for cut, own in _views(fragment, arrived):
            if self.opt.keeps_delta:
                _buffer(shards, DELTA, cut).sub_(own)
            param, anchor = _own(shards, cut), _anchor(shards, cut)
            if self.opt.mix:
                param.lerp_(anchor.to(param), 1 - self.opt.mix)
            else:
                param.copy_(anchor)
        for held in (flight.rows, flight.sent):
            in_use(held)
        return any(stop for *_, stop in heads)

    def _start(self, number: int, step: int, value: Tensor, stop: bool) -> FragmentFlight:
        """Start the transfer of a difference. A replica that has left is an error where the fragment is received."""
        mesh = self.mesh
        sent = torch.empty(self.nbytes(number), dtype=torch.uint8, device=mesh.device)
        finite = bool(value.isfinite().all())
        facts = exchange(mesh_communicator(mesh), torch.tensor([not finite, stop], device="cpu"))
        wrong, stops = (bool(fact) for fact in facts.any(0).tolist())
        head = sent[:HEAD].view(torch.int64)
        for place, said in enumerate((step, number, wrong, stops)):
            head[place].fill_(int(said))  # a copy from the host would wait for the device
        if self.form is not None:
            pack(value, self.form, sent[HEAD:])
        else:
            sent[HEAD:].view(value.dtype).copy_(value)
        rows = sent.new_empty(mesh.replicas * sent.numel())
        work = self.between().all_gather(rows, sent)
        return FragmentFlight(number, step, rows, sent, work)

    def between(self) -> Communicator:
        """The communicator of the ranks that hold the same part of each replica. All replicas make the first call."""
        whole = self.mesh.whole
        if whole.transport is None:
            return mesh_communicator(whole)
        comm: Communicator = whole.transport.communicator(ROLE, (self.mesh.over,))
        return comm

    def _sum(self, rows: Tensor, out: Tensor) -> None:
        """Write the sum of what replicas have sent to ``out``, in their order."""
        if self.form is not None:
            unpack_sum(rows, self.form, out, False)
        else:
            sum_rows(out, [row.view(out.dtype) for row in rows.unbind()], False)

    def _check(self, flight: FragmentFlight, heads: list[list[int]], shards: Shards) -> None:
        """Refuse fragments that differ between replicas, and values that are not finite."""
        if any(head[:2] != heads[0][:2] for head in heads):
            rows = [f"replica {r}: fragment {head[1]} after step {head[0]}" for r, head in enumerate(heads)]
            remedy = "All replicas must make the same steps: restore all of them from one checkpoint."
            raise ScheduleError(lines("replicas exchange different fragments:", rows, remedy))
        broken = [str(replica) for replica, head in enumerate(heads) if head[2]]
        if broken:
            for cut in self.fragments[flight.number].ranges if self.opt.keeps_delta else ():
                _buffer(shards, DELTA, cut).zero_()
            raise NonFiniteError(
                f"parameters of replica {', '.join(broken)} are not finite after step {flight.left}, in fragment "
                f"{self.fragments[flight.number].name}: no anchor was changed. Resume from the last checkpoint, with a "
                f"smaller learning rate, or with clip_norm= in the inner step"
            )

    def _update(self, flight: FragmentFlight, mean: Tensor, shards: Shards) -> None:
        """Update the anchor: the mean difference is its gradient."""
        outer, fragment = contract(self.opt.outer), self.fragments[flight.number]
        alike: dict[tuple[Hashable, torch.dtype], tuple[list[Tensor], list[Tensor], list[State]]] = {}
        for cut, grad in _views(fragment, mean):
            leaf, anchor = self.plan.leaves[cut.path], _anchor(shards, cut)
            key = outer.hyper(leaf.path, leaf.shape), anchor.dtype
            params, grads, states = alike.setdefault(key, ([], [], []))
            kept = [name for name in shards[cut.group].opt if name.startswith(OUTER)]
            params.append(anchor)
            grads.append(grad.to(anchor))
            states.append({name.removeprefix(OUTER): _buffer(shards, name, cut) for name in kept})
        count = self.opt.table.count(flight.number, flight.left)
        with torch.no_grad():
            for (hyper, _), (params, grads, states) in alike.items():
                outer.update(params, grads, states, step=count, hyper=hyper)


def _views(fragment: Fragment, buffer: Tensor) -> Iterator[tuple[Range, Tensor]]:
    """The ranges of a fragment, each with its part of the fragment's buffer."""
    return ((cut, buffer[cut.place : cut.place + cut.end - cut.begin]) for cut in fragment.ranges)


def _buffer(shards: Shards, name: str, cut: Range) -> Tensor:
    return shards[cut.group].opt[name][cut.begin : cut.end]


def _anchor(shards: Shards, cut: Range) -> Tensor:
    return _buffer(shards, ANCHOR, cut)


def _own(shards: Shards, cut: Range) -> Tensor:
    shard: Shard = shards[cut.group]
    return shard.own.detach()[cut.begin : cut.end]
