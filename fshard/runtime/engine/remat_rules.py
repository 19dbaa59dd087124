"""Rules of recomputation: which units run again in their backward, and what is kept (``make_train_step(..., remat=)``).

The engine runs such a unit under ``torch.utils.checkpoint``. Its first use of something that was not kept comes inside
of the unit's backward, when its groups have been gathered again, so the second run reads the same leaves.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fshard.errors import LossError, PlanError, RematError, lines
from fshard.model.checkpoint_policies import SavePolicy, everything, nothing, offload
from fshard.model.checkpointed import checkpointed
from fshard.model.foreign_objects import held, opaque
from fshard.patterns import escaped, glob_matches, glob_meant
from fshard.schedule.ops import ROOT, Program

ANY = "**"
"""The glob of all units."""


class RematHost(Protocol):
    """The engine. ``inside`` is the unit whose function is running."""

    inside: str


@dataclass(frozen=True)
class Remat:
    """Rules on units: the first whose glob matches a unit's name decides."""

    rules: tuple[tuple[str, SavePolicy], ...] = ()

    def of(self, unit: str) -> SavePolicy | None:
        """The policy for a unit; None if autograd keeps what it wants."""
        found = self._policy(unit)
        return None if found.ops is None else found

    def hosted(self, program: Program) -> dict[str, int]:
        """The units of a program that keep on the host what their backward reads, and how far ahead it comes back."""
        if not self.offloads:
            return {}
        found = {call.unit: self._policy(call.unit).ahead for call in program.backward}
        return {unit: ahead for unit, ahead in found.items() if ahead}

    @property
    def offloads(self) -> bool:
        """Tell whether a rule keeps activations on the host."""
        return any([policy.ahead for _, policy in self.rules])

    def _policy(self, unit: str) -> SavePolicy:
        return next((policy for pattern, policy in self.rules if glob_matches(pattern, unit)), everything)

    def check(self, units: Iterable[str], leaves: Iterable[str] = ()) -> None:
        """Refuse rules for units that there are not.

        Args:
            units: the names of units.
            leaves: the paths of parameters, which are no units.

        Raises:
            PlanError: a pattern matches none of these units.
        """
        names = sorted(set(units) - {ROOT})
        missed = [glob for glob, _ in self.rules if not any(glob_matches(glob, name) for name in names)]
        for glob, policy in self.rules:
            path = next((path for path in leaves if glob in missed and policy.ahead and glob_matches(glob, path)), "")
            if path:
                raise no_unit(glob, path, names, policy.ahead)
        if missed and [glob for glob, _ in self.rules] != [ANY]:  # "all" of none is fine
            idle = [f"{glob!r}{glob_meant(glob, names)}" for glob in missed]
            remedy = f"Globs must match a whole name; there are {', '.join(names) or 'no units'}."
            raise PlanError(lines("remat= holds patterns that match no unit:", idle, remedy))

    def around(self, unit: str, function: Callable[..., Any], host: RematHost) -> Callable[..., Any]:
        """A unit's function, computed again in the backward if a rule says so."""
        policy = self.of(unit) if self.rules else None
        if policy is None:
            return function
        options: dict[str, Any] = {"context_fn": policy.contexts()} if policy.ops else {}

        def inside(*args: Any, **kwargs: Any) -> Any:
            outer, host.inside = host.inside, unit  # in the backward, too, a unit inside of this one is part of it
            try:
                return function(*args, **kwargs)
            finally:
                host.inside = outer

        @functools.wraps(function)
        def kept(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            objects = [(value, held(value)) for value in opaque((args, kwargs))]
            try:
                result = checkpointed(functools.partial(inside, **kwargs), *args, **options)
            except RuntimeError as error:
                if "saved tensor hooks" in str(error):
                    raise _transforming(unit) from error
                raise
            changed = [type(value).__name__ for value, before in objects if held(value) != before]
            if changed:
                raise _writing(unit, changed[0])
            return result

        return kept


NO_REMAT = Remat()


def no_unit(glob: str, path: str, units: Sequence[str], ahead: int) -> PlanError:
    """The error of a rule that offloads a parameter, whose memory is the state's, or all units where there are none."""
    if glob == ANY:
        return nothing_leaves(0, ahead)
    return PlanError(
        f"remat=[({glob!r}, 'offload')] names {path}, a parameter: its memory is that of the state, which each step "
        f"donates, and of the arena. What leaves are activations of units: {', '.join(units) or 'there are none'}. To "
        f"keep parameters on the host give fs.Rule({path!r}, ..., memory_kind='pinned_host')"
    )


def differentiated(units: Sequence[str]) -> PlanError:
    """The error of units that are to be offloaded, and that the loss differentiates itself."""
    return PlanError(
        f"remat='offload': the loss function differentiates {', '.join(units)} itself, which reads in the forward what "
        f"would be on the host: leave {'it' if len(units) == 1 else 'them'} out, remat=[({units[0]!r}, None), ...]"
    )


def nothing_leaves(calls: int, ahead: int) -> PlanError:
    """The error of a step none of whose activations would leave the device."""
    return PlanError(
        f"remat='offload': nothing would leave the device. The backward has {calls} calls of units, and with "
        f"prefetch={ahead} the first {ahead} of them keep their activations there: give more units "
        f"(fs.split(units=)), a smaller prefetch, or leave it out"
    )


def again(units: Sequence[str], hosted: bool = False) -> Remat:
    """Rules under which these units are computed again, and all of each; with ``hosted``, offloaded."""
    policy = offload() if hosted else nothing
    return Remat(tuple((escaped(unit), policy) for unit in units))


def own_generator(unit: str) -> PlanError:
    """The error of a unit that draws from a generator of its own and is to be computed again."""
    return PlanError(
        f"unit {unit} draws from a torch.Generator of its own, and would draw other numbers where it is computed "
        f"again: leave generator= out, which draws by the seed of the state, or the unit, remat=[({unit!r}, None), ...]"
    )


def _transforming(unit: str) -> RematError:
    return RematError(
        f"unit {unit} takes gradients by torch.func, which cannot run where it would be computed again: leave it out, "
        f"remat=[({unit!r}, None), ...], or use compile='fx', whose graphs hold the gradients too"
    )


def unsaved(unit: str) -> RematError:
    """The error of a unit whose activations are to leave, and that takes gradients where PyTorch has such hooks."""
    return RematError(
        f"unit {unit} takes gradients by torch.func, which PyTorch refuses where something moves what autograd saves: "
        f"leave it out, remat=[({unit!r}, None), ...]"
    )


def _writing(unit: str, kind: str) -> RematError:
    return RematError(
        f"unit {unit} writes tensors into its argument, a {kind}, and would write them again where it is computed "
        f"again: call the model without it (a model of transformers with use_cache=False), or leave the unit out, "
        f"remat=[({unit!r}, None), ...]"
    )


@contextlib.contextmanager
def reentrant_refused() -> Iterator[None]:
    """Around a backward: what to do about checkpoints of the kind that torch itself advises against, and freed graphs.

    Raises:
        RematError: the program holds one, or a second backward of a unit that keeps single results.
        LossError: the graph of the loss has been freed.
    """
    try:
        yield
    except RuntimeError as error:
        if "through the graph a second time" in str(error):
            raise LossError(
                "a part of the loss's graph has been freed: give torch.autograd.grad in the loss retain_graph=True or "
                "create_graph=True; and detach what is kept from an earlier step or microbatch"
            ) from error
        if "under selective activation checkpoint" in str(error):
            raise RematError(
                "a unit that takes a gradient in its forward cannot keep single results, as policies such as "
                "fs.checkpoint_policies.dots do: compute it again whole, remat=[(unit, 'all'), ...], or leave it out"
            ) from error
        if "use_reentrant=True" not in str(error):
            raise
        raise RematError(
            "the program checkpoints with use_reentrant=True, which runs a backward of its own inside of the step's: "
            "say use_reentrant=False (to a model of transformers, gradient_checkpointing_enable({'use_reentrant': "
            "False})), or leave it to the step: make_train_step(..., remat='all')"
        ) from error


def read_remat(given: Any) -> Remat:
    """``remat=`` as rules.

    Raises:
        PlanError: it is none of what ``make_train_step`` says.
    """
    if given is None:
        return Remat()
    if given in ("all", "offload") or isinstance(given, SavePolicy):
        return Remat(((ANY, _policy(given)),))
    if isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [rule for rule in given if isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)]
        if len(pairs) == len(given):
            return Remat(tuple((pattern, _policy(policy)) for pattern, policy in pairs))
    raise PlanError(
        f"remat={given!r} must be None, 'all', 'offload', a policy of fs.checkpoint_policies, or a list of (glob of "
        f"units, one of these)"
    )


def _policy(given: Any) -> SavePolicy:
    if given is None:
        return everything
    if isinstance(given, SavePolicy):
        return given
    if given in ("all", "offload"):
        return nothing if given == "all" else offload()
    raise PlanError(f"remat: {given!r} is not a policy: give None, 'all', 'offload', or one of fs.checkpoint_policies")
