"""Gradients of single samples, and sums of them clipped one by one (DP-SGD) in bounded memory.

On a schedule a rank's samples go through the units together, forward and backward, and the sums of a unit's clipped
gradients are reduced while the next are computed. Elsewhere parameters are gathered once.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.collectives.scope import cutting
from fshard.errors import PlanError
from fshard.model.remat_function import exact
from fshard.runtime.comm import announce, collective_call, mesh_communicator
from fshard.runtime.engine.batch import check_device
from fshard.runtime.steps.backends import check_backend
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.runtime.steps.step_options import read_running
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.flat import Flat as FlatTree
from fshard.transform.active_transforms import under_way
from fshard.transform.gather import gather_all, gather_some
from fshard.transform.linearized import keeps
from fshard.transform.meeting import LossMeeting, meeting
from fshard.transform.sample_engine import SampleEngine, SampleFinder
from fshard.transform.sample_refusals import check_whole
from fshard.transform.sample_tape import OUTSIDE, Flat, SampleTape
from fshard.transform.sample_units import SampleLoss, cut_rows, filled, of_rows, row_count
from fshard.transform.scheduled_function import MayBeScheduled, ScheduledFunction, Schedules
from fshard.transform.sharded_loss import LossFn, check_loss
from fshard.transform.tangent_plan import frozen
from fshard.transform.tree_vectors import split_trainable, zero_filled


class ScheduledSamples(ScheduledFunction):
    """Gradients of single samples on schedules, on one rank.

    Args:
        tool: the tool.
        parts: the parts of a batch that run one after the other.
        plan: the plan as this rank holds it.
        exact: the same, whose transfers round nothing.

    Attributes:
        tape: the gradients that the latest backward has left.
        norms: the norms of samples, by part.
        real: how many rows of a part count; None for all.
    """

    def __init__(self, tool: "SampleTool", parts: int, plan: Plan, exact: Plan) -> None:
        self.tape, self.norms = SampleTape(tool.clip_norm is not None), list[Tensor]()
        self.tool, self.parts = tool, parts
        trained = frozenset(path for path, leaf in plan.leaves.items() if leaf.trainable)
        self.shapes = {path: torch.empty(plan.leaves[path].shape, device="meta") for path in trained}
        self.real: int | None = None
        loss, clips = SampleLoss(tool.loss_fn, plan, self.tape), tool.clip_norm is not None
        policy = Policy(reshard=tool.reshard, accumulation="full" if parts > 1 else "sharded")
        make = functools.partial(SampleEngine, tape=self.tape, paths=trained)
        super().__init__(
            loss,
            plan,
            exact if clips else frozen(exact),
            read_running(policy, False, tool.compile),
            tool.call,
            True,
            accumulate=parts,
            told={"clip_norm": tool.clip_norm},
            engine=functools.partial(make, weigh=self._weigh if clips else None),
        )
        self.runner.finder = SampleFinder(loss, self.programs, make, clips)

    def _weigh(self) -> Tensor:
        """The factor of each sample's gradient in the sum."""
        dtype = functools.reduce(
            torch.promote_types, [self.plan.leaves[path].dtype for path in self.shapes], torch.float32
        )
        self.norms.append(self.tape.norms(self.shapes, dtype, self.plan.mesh.device)[: self.real])
        assert self.tool.clip_norm is not None
        return clipping(self.norms[-1], self.tool.clip_norm)

    def clipped(self) -> tuple[dict[str, Any], Tensor]:
        """The sum of clipped gradients of the latest run, and the norms of samples."""
        homes = self.programs.memory.homes
        # Copies: the next call overwrites the buffers of this one. A run that left its schedule has run twice.
        chunks = {group: homes[group].clone() for group in self._trained}
        total = FlatTree(self.form, chunks | self.form.zero_chunks()).tree()
        # Without marks of shards, which draws of noise have none of either.
        return tree.mapped(Tensor.detach, total), torch.cat(self.norms[-self.parts :])


class SampleTool(MayBeScheduled):
    """A function of the gradients of single samples.

    Args:
        loss_fn: the loss of a batch.
        plan: the plan.
        call: what ranks call it when they compare their calls.
        reshard: whether units are gathered again in each pass; None for models of which that saves memory.
        compile: the backend of unit graphs.
        clip_norm: the largest norm of a sample's gradient; None where gradients are asked for themselves.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        plan: Plan,
        call: str,
        reshard: bool | None,
        compile: str | None,
        clip_norm: float | None = None,
    ) -> None:
        check_loss(loss_fn, plan)
        check_backend(compile)
        expect(call, [("reshard", reshard, (bool, type(None)), "True, False or None")])
        check_whole(plan, call)
        self.loss_fn, self.plan, self.call, self.compile, self.clip_norm = loss_fn, plan, call, compile, clip_norm
        self.reshard = not keeps(plan) if reshard is None else reshard
        self._parted: dict[int, Schedules] = {}
        self._schedules = self._in(1)

    def __repr__(self) -> str:
        clip = "" if self.clip_norm is None else f", clip_norm={self.clip_norm}"
        return f"<{self.call} of {getattr(self.loss_fn, '__name__', 'a function')}{clip}>"

    def _in(self, parts: int) -> Schedules:
        """The scheduled functions for batches of so many parts."""
        if parts not in self._parted:
            self._parted[parts] = Schedules(self.plan, functools.partial(ScheduledSamples, self, parts), 0)
        return self._parted[parts]

    def _scheduled(self, params: Any, batch: Any, real: int | None) -> ScheduledSamples | None:
        """The scheduled function that has run on checked arguments; None if the call has none."""
        self._schedules = self._in(1)
        if (found := self._found(batch, params)) is not None:
            parts, least = self._parts(batch)
            if least < parts:
                self._unscheduled = f"a rank has {least} rows, and another one runs {parts} parts of a batch"
                return None
            self._schedules = self._in(parts)
            found = self._found(batch, params)
        if not isinstance(found, ScheduledSamples):
            return None
        found.norms.clear()
        found.real = real
        return None if self._outcome(found, params, [], batch) is None else found

    def _parts(self, batch: Any) -> tuple[int, int]:
        """The parts in which all ranks run their batches, and the fewest rows of a rank."""
        return 1, 1

    def _check(self, params: Any, batch: Any) -> None:
        self.plan.check_tree(params, whole=False)
        check_device(batch, self.plan.mesh.device)
        row_count(batch)

    def _met(self, params: Any, batch: Any) -> tuple[Flat, Flat, LossMeeting]:
        """The trainable leaves, the others, and the ranks, when all have checked their arguments."""
        ranks = meeting(self.plan.mesh, batch, BatchRows(), params)
        equal = Equal(self.plan, {"tool": self.call, "clip_norm": self.clip_norm})

        def checked() -> tuple[Flat, Flat]:
            self._check(params, batch)
            return split_trainable(self.plan, params)

        if self.plan.mesh.size > 1 and self.plan.mesh.transport is None:
            checked()  # outside of run, where ranks cannot meet, an error says how trees of whole tensors are given
        trained, rest = ranks.all_ranks("the call", checked, ranks.facts(equal))
        return trained, rest, ranks

    def _taped(self, leaves: Flat, paths: list[str], batch: Any) -> SampleTape:
        """The gradients of samples by gathered leaves."""
        tape = SampleTape(self.clip_norm is not None)
        tensors = [x for x in (*leaves.values(), *tree.leaves(batch)) if isinstance(x, Tensor)]
        if under_way(tensors):  # a graph of plain autograd cannot be differentiated by transforms around it
            loss, rows = of_rows(self.loss_fn, self.plan, batch)

            def one(some: Flat, row: list[Tensor]) -> Tensor:
                with exact():
                    return loss(tree.nest({**leaves, **some}), row)

            tape.begin(len(rows[0]))
            by = {path: leaves[path] for path in paths}
            for path, grad in torch.vmap(torch.func.grad(one), (None, 0))(by, rows).items():
                tape.hold(OUTSIDE, path, grad)
            return tape
        own = {path: leaf.detach().requires_grad_(path in paths) for path, leaf in leaves.items()}
        with torch.enable_grad(), exact():
            total = SampleLoss(self.loss_fn, self.plan, tape).gathered(own, batch).total
        if total.requires_grad:
            torch.autograd.backward([total])
        return tape


class SampleGradients(SampleTool):
    """``gradients(params, batch)``. Made by ``fs.func.per_sample_grad``."""

    @collective_call
    def __call__(self, params: Any, batch: Any) -> dict[str, Any]:
        """The gradients of this rank's samples.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
            PeerError: another rank failed.
        """
        self._check(params, batch)
        batch, real = filled(batch)
        if (scheduled := self._scheduled(params, batch, real)) is not None:
            return held_by(scheduled.tape, self.plan.here, real)
        trained, rest, ranks = self._met(params, batch)
        with cutting(self.plan.mesh):
            whole = dict(tree.paths(gather_all(self.plan, {**rest, **trained})))
        tape = ranks.all_ranks("the gradients", lambda: self._taped(whole, list(trained), batch))
        return held_by(tape, self.plan, real)


class ClippedGradient(SampleTool):
    """``clipped(params, batch) -> (sum, norms)``. Made by ``fs.func.clipped_grad``.

    Attributes:
        microbatch: rows that are computed at once; None for all.
    """

    clip_norm: float

    def __init__(
        self,
        loss_fn: LossFn,
        plan: Plan,
        clip_norm: float,
        microbatch: int | None,
        reshard: bool | None,
        compile: str | None,
    ) -> None:
        super().__init__(loss_fn, plan, "clipped_grad", reshard, compile, clip_norm)
        self.microbatch = microbatch

    @collective_call
    def __call__(self, params: Any, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """The sum of clipped gradients, and the norms of this rank's samples before clipping.

        Raises:
            TreeError, BatchError: arguments that do not fit, alike on all ranks.
            PeerError: another rank failed.
        """
        self._check(params, batch)
        batch, real = filled(batch)
        if (scheduled := self._scheduled(params, batch, real)) is not None:
            return scheduled.clipped()
        trained, rest, ranks = self._met(params, batch)
        with cutting(self.plan.mesh):
            pulled: Any = torch.func.vjp(lambda p: gather_some(self.plan, p, True), trained)
            fixed = gather_some(self.plan, rest, False)
        total, norms = ranks.all_ranks("the gradients", lambda: self._summed(fixed, pulled[0], batch, real))
        with cutting(self.plan.mesh):
            (summed,) = pulled[1](total)
            return zero_filled(self.plan, summed, rest), norms

    def _parts(self, batch: Any) -> tuple[int, int]:
        """The most parts in which any rank runs its batch, and the fewest rows of any. Collective."""
        if self.microbatch is None:
            return 1, 1
        rows = row_count(batch)
        met = announce(mesh_communicator(self.plan.here.mesh), self.call, [rows, -(-rows // self.microbatch)])
        return max([parts for _, parts in met]), min([rows for rows, _ in met])

    def _summed(self, fixed: Flat, whole: Flat, batch: Any, real: int | None) -> tuple[Flat, Tensor]:
        """This rank's sum, of whole leaves, and the norms."""
        total = {path: torch.zeros_like(leaf) for path, leaf in whole.items()}
        dtype = functools.reduce(torch.promote_types, [leaf.dtype for leaf in whole.values()], torch.float32)
        norms = []
        for part in cut_rows(batch, self.microbatch):
            tape = self._taped({**fixed, **whole}, list(whole), part)
            norms.append(tape.norms(whole, dtype, self.plan.mesh.device)[:real])
            for place in list(tape.calls):
                for path, g in tape.summed(place, whole, clipping(norms[-1], self.clip_norm)).items():
                    total[path] = total[path] + g
        return total, torch.cat(norms)


def clipping(norms: Tensor, limit: float) -> Tensor:
    """The factors that scale gradients of these norms down to a limit, which is positive."""
    return (limit / norms).clamp(max=1.0)


def held_by(tape: SampleTape, plan: Plan, real: int | None) -> dict[str, Any]:
    """The gradient of each sample by each trained leaf, ``(rows, *shape)``, in the dtype of the leaf, as a tree.

    Args:
        tape: what a backward has left.
        plan: the plan.
        real: how many rows count; None for all.
    """
    out = {}
    for path, leaf in plan.leaves.items():
        parts = [part.left for left in tape.calls.values() for part in left.pop(path, ())]
        if parts:
            out[path] = functools.reduce(torch.add, parts).to(leaf.dtype).contiguous()
        elif leaf.trainable:
            out[path] = torch.zeros((tape.rows, *leaf.shape), dtype=leaf.dtype, device=plan.mesh.device)
    tape.begin(0)
    return tree.nest({path: grads[:real] for path, grads in out.items()})


def per_sample_grad(
    loss_fn: LossFn, plan: Plan, *, reshard: bool | None = None, compile: str | None = None
) -> SampleGradients:
    """The gradient of each sample's own loss: ``per_sample_grad(loss_fn, plan)(params, batch)``.

    Args:
        loss_fn: as for ``fs.make_train_step``; it is called with batches of one row, and a rank may have no samples. An
            ``fs.Mean`` counts as the mean of that row.
        plan: the plan.
        reshard: free a unit's parameters after its forward, and gather them again for its backward. None chooses False
            for models whose parameters take up to 128 MiB.
        compile: as for ``fs.make_train_step``, of the graphs of a unit of all samples, which calls on a schedule run:
            ``print(grads.units)``.

    Returns:
        The function. It returns a tree of the trainable leaves, each of shape ``(rows of this rank's batch, *whole leaf
        shape)``: whole leaves for all samples of this rank, in the memory of as many models; ``clipped_grad`` needs
        less.

    Raises:
        PlanError: ranks share the samples themselves: the plan's ``batch=`` cuts another dim than the first.
        BatchError: tensors of the batch have different numbers of rows, or there are no tensors.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> grads = fs.func.per_sample_grad(lambda params, batch: (batch @ params["w"]).sum(), plan)
    >>> grads({"w": w.flatten()}, torch.ones(3, 2))["w"].shape
    torch.Size([3, 2, 2])
    """
    return SampleGradients(loss_fn, plan, "per_sample_grad", reshard, compile)


def clipped_grad(
    loss_fn: LossFn,
    plan: Plan,
    clip_norm: float,
    *,
    microbatch: int | None = None,
    reshard: bool | None = None,
    compile: str | None = None,
) -> ClippedGradient:
    """The sum over the global batch of the samples' gradients, each clipped to a norm:
    ``clipped_grad(loss_fn, plan, clip_norm)(params, batch) -> (sum, norms)``.

    DP-SGD adds its noise to this sum (Abadi et al., "Deep Learning with Differential Privacy", 2016). No gradient of a
    single sample is held of matrices that linear layers, embeddings or products ``x @ w`` read: norms and sum come from
    the inputs of these layers and the gradients of their outputs. A bias or a norm has a vector for each sample, and
    other leaves, such as convolutions, have a gradient for each sample of a microbatch.

    Args:
        loss_fn: as for ``per_sample_grad``.
        plan: the plan.
        clip_norm: the largest norm, over all leaves, of a sample's gradient; larger ones are scaled down to it.
        microbatch: rows that are computed at once; None for all. Results are equal, up to the order of float sums.
        reshard: as for ``per_sample_grad``.
        compile: likewise.

    Returns:
        The function. ``sum`` is a tree of shards like ``params``, zero for frozen leaves; ``norms``, ``(rows,)``, are
        the norms of this rank's samples before clipping.

    Raises:
        PlanError: ``clip_norm`` or ``microbatch`` is not positive, or ranks share the samples themselves.
        BatchError: tensors of the batch have different numbers of rows, or there are no tensors.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> clipped = fs.func.clipped_grad(lambda params, batch: (batch @ params["w"]).sum(), plan, clip_norm=1.0)
    >>> clipped({"w": w.flatten()}, torch.tensor([[1.0, 1.0], [0.1, 0.1]]))
    ({'w': tensor([0.6000, 0.6000, 0.6000, 0.6000])}, tensor([2.0000, 0.2000]))
    """
    check_loss(loss_fn, plan)
    check_whole(plan, "clipped_grad")
    expect("clipped_grad(loss_fn, plan, clip_norm)", [("clip_norm", clip_norm, (int, float), "a positive number")])
    if not clip_norm > 0 or (microbatch is not None and (not isinstance(microbatch, int) or microbatch < 1)):
        raise PlanError(f"clipped_grad(clip_norm={clip_norm}, microbatch={microbatch}): both must be positive")
    return ClippedGradient(loss_fn, plan, float(clip_norm), microbatch, reshard, compile)
