"""Running the program of a step on this rank: a forward and a backward for each microbatch."""

import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard import tree
from fshard.errors import CommError, different_microbatches, weighted_in_backward
from fshard.runtime.engine.batch import check_even
from fshard.runtime.engine.loss import check_differentiable, check_means, detached, read_loss
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.execution.trace import GlueWatch
from fshard.runtime.steps.consensus import CUT, FAILED, RETRY
from fshard.runtime.steps.failures import starved
from fshard.runtime.steps.finder import Fn
from fshard.runtime.steps.handshake import uneven_rows
from fshard.runtime.steps.records import Agreed, Ran
from fshard.schedule.ops import ROOT


@dataclass(frozen=True)
class Passes:
    """The passes of a function through its microbatches.

    Attributes:
        fn: the loss function, or for evaluation any function.
        train: which of the two it is.
        in_backward: whether updates happen in the backward.
        divisor: what gradients are divided by before they are summed.
    """

    fn: Fn
    train: bool
    in_backward: bool
    divisor: float

    def run(self, agreed: Agreed) -> Ran:
        """Run the program. What it raises is part of the result; what all ranks raise together is raised at once."""
        executor = agreed.ready.executor
        try:
            return self._program(agreed)
        except CommError as error:
            if executor.lost:
                raise
            return Ran(agreed, CUT, failure=error)
        except Mispredicted as reason:
            return Ran(agreed, RETRY, left=str(reason))
        except BaseException as error:  # Ctrl-C too: other ranks wait for this one's collectives
            if executor.lost:
                raise
            if starved(error):
                traceback.clear_frames(error.__traceback__)  # they hold the activations
            return Ran(agreed, FAILED, failure=error)

    def _program(self, agreed: Agreed) -> Ran:
        executor, given, prepared = agreed.ready.executor, agreed.ready.request, agreed.ready.prepared
        if isinstance(executor, OnDemand):
            if given.update is not None and not self.in_backward:
                given.update.finish()
                executor.ask("the update")  # others would wait for the parts of a rank whose update has failed
                prepared.actions.complete(given.update)
            prepared.actions.start(given.shards, None, accumulated=given.accumulated)
        ran = Ran(agreed)
        try:
            # Autocast keeps casts of weights by the leaf's identity, and slot leaves outlive their values.
            torch.clear_autocast_cache()
            with given.randomness():
                for index, part in enumerate(agreed.ready.parts):
                    executor.microbatch = index
                    prepared.engine.start(executor)
                    executor.reach("forward", ROOT, 0)
                    executor.settle()
                    ran = self._microbatch(ran, part) if self.train else self._evaluated(ran, part)
                    executor.end_microbatch()
        finally:
            prepared.engine.stop()
        if isinstance(executor, OnDemand):
            self._check_rows(ran)
            executor.ask("the end of the program")  # a rank that failed after its last request answers here
        return ran

    def _check_rows(self, ran: Ran) -> None:
        """Refuse a plain mean over unequal rows, which nobody knew to be one before the program ran."""
        ready = ran.agreed.ready
        if self.train and not ran.weighted:
            if ran.agreed.uneven:
                raise uneven_rows(ran.agreed.uneven)
            check_even(ready.request.batch, len(ready.parts))

    def _evaluated(self, ran: Ran, part: Any) -> Ran:
        with torch.no_grad():
            result = self._call(ran.agreed, part)
        check_means(result)
        ran.agreed.ready.executor.reach("backward", ROOT, 0)
        return replace(ran, aux=[*ran.aux, result])

    def _microbatch(self, ran: Ran, part: Any) -> Ran:
        given, engine = ran.agreed.ready.request, ran.agreed.ready.prepared.engine
        loss = read_loss(self._call(ran.agreed, part))
        check_differentiable(loss)
        weighted = loss.count is not None
        if weighted and self.in_backward:
            raise weighted_in_backward()
        if ran.aux and (ran.weighted is not weighted or _spec(ran.aux[:1]) != _spec([loss.aux])):
            raise different_microbatches()
        seed = torch.full_like(loss.total, given.loss_scale / self.divisor)
        with given.shield.opened():
            engine.differentiate(loss.total, seed)
        part_of_it = loss.total.detach(), 1.0 if loss.count is None else loss.count
        aux = tree.map(detached, loss.aux) if loss.aux else loss.aux
        return Ran(ran.agreed, losses=[*ran.losses, part_of_it], aux=[*ran.aux, aux], weighted=weighted)

    def _call(self, agreed: Agreed, part: Any) -> Any:
        engine, executor = agreed.ready.prepared.engine, agreed.ready.executor
        watch = nullcontext() if isinstance(executor, Scheduled) else GlueWatch(engine, executor)
        with watch, agreed.ready.request.shield.opened():
            return engine.run(self.fn, part, self.train)


def _spec(values: Any) -> Any:
    return tree.flatten(values)[1]
