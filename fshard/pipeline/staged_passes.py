"""The passes of one rank of a pipeline: forwards and backwards of its stages, in the order of its schedule."""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.pipeline.mail import Mail
from fshard.pipeline.parted_backward import PartedBackward
from fshard.pipeline.pipeline_actions import Action
from fshard.pipeline.rank_program import RankProgram
from fshard.pipeline.stage_engine import StageEngine
from fshard.pipeline.staged_trace import NOTHING, StagedProgram, ValueEdge, told_leaves, told_values
from fshard.runtime.engine.batch import marks_undone
from fshard.runtime.engine.loss_result import Loss, check_data, check_differentiable, detached, read_loss
from fshard.runtime.engine.rng import reseed
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.steps.passes import Context, Passes
from fshard.runtime.steps.records import PassResult
from fshard.schedule.ops import ROOT, Call


@dataclass
class StageRun:
    """A forward of a stage that waits for its backward.

    Attributes:
        result: what the function returned, on the last stage.
        loss: on the last stage, in training.
        values: the outputs that other stages read, by the numbers of call and output.
        received: the values of other stages, likewise.
        grads: the gradients of outputs that came from other stages of this rank.
        parted: its backward, if that is in two parts, between these.
    """

    values: dict[tuple[int, int], Tensor]
    received: dict[tuple[int, int], Tensor]
    grads: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    result: Any = None
    loss: Loss | None = None
    parted: PartedBackward | None = None

    def release(self) -> None:
        """Let go of all but the result: its backward is over. A loss holds its graph, which holds what was received."""
        if self.loss is not None:
            loss, self.result = self.loss, None
            aux = tree.mapped(detached, loss.aux) if loss.aux else loss.aux
            self.loss = Loss(loss.total.detach(), loss.count, aux)
        self.values.clear()
        self.received.clear()
        self.grads.clear()
        self.parted = None


@dataclass(frozen=True)
class StagedPasses(Passes):
    """The passes of the stages of one rank through the microbatches of a step.

    Attributes:
        staged: the program.
        rank: this rank's part of it.
        mail: its messages.
    """

    staged: StagedProgram
    rank: RankProgram
    mail: Mail

    def run_stages(
        self,
        engine: StageEngine,
        executor: Scheduled,
        parts: Sequence[Any],
        scale: float,
        opened: Context = nullcontext,
    ) -> PassResult:
        """Run the stages of this rank on each microbatch.

        Args:
            engine: runs its units.
            executor: runs the ops of its schedule.
            parts: the microbatches.
            scale: what the loss is multiplied by for the backward.
            opened: the context of the user's code, where signals are let through.
        """
        runs: dict[tuple[int, int], StageRun] = {}
        ended: dict[int, StageRun] = {}
        computes = self.rank.program.computes
        self.mail.start()
        seed = torch.default_generator.initial_seed()  # of the step; each stage and microbatch has its own
        try:
            torch.clear_autocast_cache()  # as in a pass of one stage
            with torch.autograd.set_multithreading_enabled(False), marks_undone(parts):
                for action, portion in self.rank.turns:
                    microbatch, first = portion.microbatch, computes[portion.first]
                    executor.begin_microbatch(microbatch)
                    executor.before(first.kind, first.target, first.index)
                    engine.resume(executor)
                    if action is not None and action.kind == "F":
                        key = action.stage, microbatch
                        runs[key] = self._forward(engine, executor, parts[microbatch], key, runs, opened, seed)
                        if self._last(action.stage):
                            ended[microbatch] = runs[key]
                    elif action is not None:
                        with opened():
                            self._backward(engine, action, runs, scale)
                    if portion.end == len(computes):
                        engine.end_microbatch()
        except BaseException:
            self.mail.failed = True
            raise
        finally:
            engine.stop()
        return self._measured([ended[microbatch] for microbatch in sorted(ended)])

    def _last(self, stage: int) -> bool:
        return stage + 1 == len(self.staged.last)

    def _forward(
        self,
        engine: StageEngine,
        executor: Scheduled,
        part: Any,
        key: tuple[int, int],
        runs: dict[tuple[int, int], StageRun],
        opened: Context,
        seed: int,
    ) -> StageRun:
        """Run a stage on a microbatch."""
        stage, microbatch = key
        engine.start(executor)
        if stage == self.rank.stages[0]:
            executor.reach("forward", ROOT, 0)
        run = StageRun({}, self._arrived(key, runs))

        def keep(place: tuple[int, int], value: Tensor) -> None:
            run.values[place] = value
            for name in self._names(place):
                self.mail.post(name, microbatch, value)

        reseed(seed, f"stage {stage} microbatch {microbatch}", self.mail.mesh.device)
        with torch.set_grad_enabled(self.train), opened():
            run.result = engine.forward(self.fn, part, stage, run.received, keep)
        if self._last(stage):
            self.check_result(run.result)
            if self.train:
                run.loss = read_loss(run.result)
                check_differentiable(run.loss)
        return run

    def check_result(self, result: Any) -> None:
        """Refuse what a trace has left in a result."""
        check_data(result)

    def _backward(
        self, engine: StageEngine, action: Action, runs: dict[tuple[int, int], StageRun], scale: float
    ) -> None:
        """Run the backward of a stage on a microbatch, or a part of it."""
        stage, microbatch = action.stage, action.microbatch
        run = runs[stage, microbatch]
        calls = [call for call in self.rank.program.backward if self._stage_of[call] == stage]
        if action.kind == "W":
            assert run.parted is not None
            engine.backward_of_leaves(run.parted, calls)
            runs.pop((stage, microbatch)).release()
            return

        def done() -> None:
            for edge in self.staged.edges:
                if edge.target == stage and edge.grad:
                    leaf = run.received[edge.call, edge.output]
                    self._return(edge, leaf.grad if leaf.grad is not None else torch.zeros_like(leaf), microbatch, runs)

        values, grads = self._roots(run, microbatch, scale)
        if action.kind == "I":
            inputs = [*run.received.values()]
            run.parted = PartedBackward(values, grads, inputs, engine.slots.trained)
            engine.backward_of_inputs(run.parted, calls, done)
        else:
            engine.backward(functools.partial(torch.autograd.backward, values, grads), done)
            runs.pop((stage, microbatch)).release()

    def _roots(self, run: StageRun, microbatch: int, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """The values from which a backward starts, and their gradients."""
        values, grads = list[Tensor](), list[Tensor]()
        if run.loss is not None:
            values.append(run.loss.total)
            grads.append(torch.full_like(run.loss.total, scale / self.divisor))
        for place, value in run.values.items():
            found = [*run.grads.get(place, ()), *self._answers(place, microbatch)]
            if found:
                values.append(value)
                grads.append(functools.reduce(operator.add, found))
        return values, grads

    @functools.cached_property
    def _stage_of(self) -> Mapping[Call, int]:
        return dict(zip(self.staged.calls, self.staged.stages, strict=True))

    def _arrived(self, key: tuple[int, int], runs: Mapping[tuple[int, int], StageRun]) -> dict[tuple[int, int], Tensor]:
        """The values of other stages that a stage reads, as leaves of a graph of their own."""
        stage, microbatch = key
        found = {}
        for edge in self.staged.edges:
            if edge.target == stage:
                place = edge.call, edge.output
                name = self._message(edge, ">")
                local = name not in self.mail.messages
                value = (
                    runs[edge.source, microbatch].values[place] if local else self.mail.inbox.pop((name, microbatch))
                )
                found[place] = value.detach().requires_grad_(edge.grad)
        return found

    def _answers(self, place: tuple[int, int], microbatch: int) -> Iterator[Tensor]:
        """The gradients that came from other ranks of a value that was sent."""
        for edge in self.staged.edges:
            name = self._message(edge, "<")
            if (edge.call, edge.output) == place and name in self.mail.messages:
                yield self.mail.inbox.pop((name, microbatch))

    def _return(self, edge: ValueEdge, grad: Tensor, microbatch: int, runs: Mapping[tuple[int, int], StageRun]) -> None:
        """Give the gradient of a value back to the stage that computed it."""
        name = self._message(edge, "<")
        if name in self.mail.messages:
            self.mail.outbox[name, microbatch] = grad
        else:
            runs[edge.source, microbatch].grads.setdefault((edge.call, edge.output), []).append(grad)

    def _names(self, place: tuple[int, int]) -> list[str]:
        """The messages that send an output."""
        names = [self._message(edge, ">") for edge in self.staged.edges if (edge.call, edge.output) == place]
        return [name for name in names if name in self.mail.messages]

    def _message(self, edge: ValueEdge, way: str) -> str:
        return f"{self.staged.calls[edge.call]}:{edge.output}{way}{edge.target}"

    def _measured(self, runs: Sequence[StageRun]) -> PassResult:
        """The results of all microbatches; on ranks without the last stage, what they learn of them."""
        if not self.train:
            return PassResult((), [run.result for run in runs] or [told_leaves(self.staged.result)])
        if not runs:
            loss = read_loss(self.staged.result)
            none = torch.zeros((), dtype=loss.total.dtype, device="cpu"), 0.0
            aux = told_values(loss.aux)
            return PassResult([none], [{} if aux is NOTHING else aux], loss.count is not None)
        losses = [run.loss for run in runs if run.loss is not None]
        totals = [(loss.total, 1.0 if loss.count is None else loss.count) for loss in losses]
        return PassResult(totals, [loss.aux for loss in losses], losses[0].count is not None)
