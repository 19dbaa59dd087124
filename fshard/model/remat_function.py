"""``fs.remat``: compute a function again in the backward instead of keeping the results of its forward.

The forward is one autograd Function that saves its inputs. Its backward is the same kind of Function around the
function's ``torch.func.vjp``, and its jvp around ``torch.func.jvp``, so that every derivative of it recomputes, too,
and each transform of torch.func finds a rule (``jax.checkpoint``; Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016).
"""

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard import tree
from fshard.arguments import expect
from fshard.errors import PlanError, RematError, TransformError
from fshard.model.checkpoint_policies import SavePolicy, nothing
from fshard.model.checkpointed import checkpointed
from fshard.model.exact import Exact
from fshard.model.float8 import ScaledProducts
from fshard.model.model_refusals import explained
from fshard.torch_internals import DisableFuncTorch, disable_current_modes, function_mode_stack, functorch

Fn = TypeVar("Fn", bound=Callable[..., Any])
Flat = Callable[..., tuple[Tensor, ...]]
Rule = Callable[[Flat, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def remat(fn: Fn, policy: SavePolicy | None = None) -> Fn:
    """A function that computes ``fn``, and keeps only its inputs for the backward (``jax.checkpoint``).

    It works under ``grad``, ``vjp``, ``jvp``, ``vmap``, any nesting of them, double backward, and ``torch.compile``.

    Args:
        fn: a pure function of pytrees of tensors and plain values, which returns a pytree. All tensors that need a
            gradient must be arguments. Random numbers in it must come from ``fs.random``.
        policy: which results are kept too: ``fs.checkpoint_policies.nothing`` (the default), ``dots``, ``everything``,
            ``saving(ops)``. ``dots`` and ``saving`` work in plain autograd and under ``torch.compile``; they raise
            under a transform of ``torch.func`` and on double backward. Inside of a compiled transform the compiler
            sees the whole computation, and ``remat`` leaves it alone.

    Raises:
        RematError: a call of ``fn`` reads a tensor of the surrounding graph through a closure, or draws from torch's
            global generator; or a transform cannot honour the policy.
        PlanError: ``fn`` is not a function, or ``policy`` is not a policy.

    >>> f = fs.remat(lambda w, x: torch.tanh(x @ w).sum())
    >>> torch.func.grad(f)(torch.zeros(2, 1), torch.ones(3, 2))
    tensor([[3.],
            [3.]])
    """
    expect("fs.remat(fn)", [("fn", fn, Callable, "a function; units of a step are named by make_train_step(remat=)")])
    policy = nothing if policy is None else policy
    if not isinstance(policy, SavePolicy):
        raise PlanError(
            f"remat(policy={policy!r}): give fs.checkpoint_policies.nothing, dots, everything or saving(ops)"
        )
    if policy.ahead:
        raise PlanError(
            f"remat(policy={policy}): only the schedule of a step can move what is kept to the host: give it to "
            f"make_train_step(..., remat=), or another policy here"
        )
    if policy.ops is None:
        return fn

    contexts: dict[str, Any] = {"context_fn": policy.contexts()} if policy.ops else {}

    @functools.wraps(fn)
    def again(*args: Any, **kwargs: Any) -> Any:
        transformed = functorch.peek_interpreter_stack() is not None
        if torch.compiler.is_compiling() and transformed:
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling() or (policy.ops and not transformed):
            if torch.compiler.is_compiling():
                from torch.utils.checkpoint import checkpoint

                return checkpoint(fn, *args, use_reentrant=False, **contexts, **kwargs)
            same = _in_context(functools.partial(fn, **kwargs), contextvars.copy_context())
            return checkpointed(same, *args, **contexts)
        if policy.ops:
            raise RematError(
                f"remat(policy={policy}) under a transform of torch.func, which cannot keep single results: "
                f"use fs.checkpoint_policies.nothing or everything there"
            )
        return _again(fn, args, kwargs)

    return again  # type: ignore[return-value]


@dataclass
class Recomputed:
    """One call of a function, as a function of its tensors alone."""

    fn: Flat
    watched: bool  # whether tensors that it reads beside its arguments are refused; the first forward checks
    autocast: Autocast  # the state at the call, which the backward restores
    context: contextvars.Context  # that of the call: autograd's thread of a device, where it may run again, has none
    reverse: bool = False  # whether its forward derivative is taken by two reverse ones
    what: str = ""  # what it computes, for errors
    known: tuple[Tensor, ...] = ()  # its results, if somebody else has computed them

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with _autocast(self.autocast), exact():
            return self.fn(*tensors)

    def derived(
        self, rule: Rule, tensors: Sequence[Tensor], wanted: Sequence[int], places: Sequence[int], more: Any
    ) -> dict[int, Tensor]:
        """By the number of a tensor or a result, a derivative of this call, which its own backward recomputes too.

        ``rule`` computes it, from the call as a function of its ``wanted`` tensors alone, these, and ``more``: the
        gradients of the floating-point results at ``places``, or the tangents of the ``wanted`` tensors. An operator
        need not have a derivative by the others, such as the running mean of a norm.
        """
        count = len(tensors)

        def fn(*args: Tensor) -> tuple[Tensor, ...]:
            def of(*some: Tensor) -> tuple[Tensor, ...]:
                filled = list(args[:count])
                for i, tensor in zip(wanted, some, strict=True):
                    filled[i] = tensor
                outs = _in_context(self, self.context)(*filled)
                return tuple(outs[i] for i in places)

            return rule(of, tuple(args[i] for i in wanted), args[count:])

        again = Recomputed(fn, False, self.autocast, self.context, self.reverse, self.what)
        with explained(self.what):
            found = RematFunction.apply(again, *tensors, *more)  # type: ignore[no-untyped-call]
        return dict(zip(wanted if rule is _vjp else places, found, strict=True))


class RematFunction(torch.autograd.Function):
    """``RematFunction.apply(call, *tensors)``: the call's result, whose derivatives compute it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Recomputed, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not call.watched:
            return _own(call(*tensors), tensors)
        detached = [tensor.detach() for tensor in tensors]
        with NoCaptures():
            return _own(call(*detached), detached)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.places = inputs[0], [i for i, out in enumerate(output) if _floating(out)]
        ctx.count = len(output)
        ctx.zeros = [functools.partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in output]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.mark_non_differentiable(*(out for out in output if not _floating(out)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = [i for i, x in enumerate(tensors) if _floating(x) and ctx.needs_input_grad[i + 1]]
        given = [ctx.zeros[i]() if (grad := grads[i]) is None else grad for i in ctx.places]
        found = ctx.call.derived(_vjp, tensors, wanted, ctx.places, given)
        return None, *map(found.get, range(len(tensors)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = [i for i, x in enumerate(tensors) if _floating(x) and tangents[i] is not None]
        given = [tangents[i] for i in wanted]
        rule = _jvp_by_reverse if ctx.call.reverse else _jvp
        found = ctx.call.derived(rule, tensors, wanted, ctx.places, given)
        return tuple(map(found.get, range(ctx.count)))


class KnownFunction(RematFunction):
    """A call whose result is known: only derivatives compute it."""

    @staticmethod
    def forward(call: Recomputed, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _own(call.known, tensors)


def known(fn: Flat, values: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The values of a function at some tensors, which are known: it is called where a derivative of them is taken."""
    call = Recomputed(fn, False, autocast_state(), contextvars.copy_context(), known=tuple(values))
    found: tuple[Tensor, ...] = KnownFunction.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return found


def exact() -> AbstractContextManager[Any]:
    """A scope in which operators with wrong derivatives in PyTorch are computed in other ways: see ``Exact``."""
    return nullcontext() if torch.compiler.is_compiling() else _exact()


@contextmanager
def _exact() -> Iterator[Exact]:
    try:
        with Exact(by_reverse) as mode:
            yield mode
    except RuntimeError as error:
        # Whether torch.utils.checkpoint itself raised: the innermost frames are its own, or those of its hooks.
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-3:]
        in_checkpoint = any(file.endswith("checkpoint.py") and "torch" in file for file in files)
        if in_checkpoint and functorch.peek_interpreter_stack() is not None:
            raise TransformError(
                "torch.utils.checkpoint was called under a transform of torch.func, which forbids the hooks that it "
                "needs: call fs.remat(fn)(*args) in its place, which works under every transform, or fn itself: "
                "fs.func.sharded_loss computes each unit again in its backward anyway. (For models of transformers: "
                "model.gradient_checkpointing_disable().)"
            ) from error
        raise


def by_reverse(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes ``fn``, and whose forward derivative is taken by two reverse ones."""
    return lambda *args, **kwargs: _again(fn, args, kwargs, reverse=True)


def _again(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reverse: bool = False) -> Any:
    if any(isinstance(mode, ScaledProducts) for mode in function_mode_stack()):
        raise RematError(
            "fs.remat inside of a unit whose linear layers multiply in float8 would compute them again without it: "
            "use make_train_step(remat=), or fs.Precision() without products="
        )
    leaves, spec = tree.flatten((args, kwargs))
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    plain = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
    result: list[Any] = []
    out_spec: Any = None

    def flat(*given: Tensor) -> tuple[Tensor, ...]:
        nonlocal out_spec
        filled = dict(enumerate(plain)) | dict(zip(tensors, given, strict=True))
        args, kwargs = tree.unflatten(spec, list(filled.values()))
        outs, out_spec = tree.flatten(fn(*args, **kwargs))
        result[:] = [None if isinstance(out, Tensor) else (out,) for out in outs]
        return tuple(out for out in outs if isinstance(out, Tensor))

    with _unchanged_generators():
        what = getattr(fn, "__name__", "")
        call = Recomputed(flat, True, autocast_state(), contextvars.copy_context(), reverse, what)
        with explained(what):
            outs = iter(RematFunction.apply(call, *tensors.values()))  # type: ignore[no-untyped-call]
    return tree.unflatten(out_spec, [next(outs) if value is None else value[0] for value in result])


def _in_context(fn: Callable[..., Any], context: contextvars.Context) -> Callable[..., Any]:
    """A function that runs in a copy of a context: one that is entered cannot be entered again."""
    return lambda *args, **kwargs: context.copy().run(fn, *args, **kwargs)


def _own(outs: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results of a Function must be new tensors: an input that is returned itself would lose its gradient."""
    return tuple(out.view_as(out) if any(out is tensor for tensor in given) else out for out in outs)


def _vjp(of: Flat, primals: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pull = torch.func.vjp(of, *primals)[1]
    # Autograd takes formulas that have a forward derivative only where a graph is made.
    stack = functorch.get_interpreter_stack() or ()
    forward = any(level.key() == functorch.TransformType.Jvp for level in stack)
    grads: tuple[Tensor, ...] = pull(cotangents, create_graph=forward or torch.is_grad_enabled())
    return grads


def _jvp(of: Flat, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # A dual number takes its primal's layout, and cannot be written where that is an expanded one.
    plain, given = (tuple(x.contiguous() for x in some) for some in (primals, tangents))
    found: tuple[Tensor, ...] = torch.func.jvp(of, plain, given)[1]
    return found


def _jvp_by_reverse(of: Flat, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As ``_jvp``. The pullback is a linear function of cotangents, and the pullback of that is the pushforward."""
    out, pull = torch.func.vjp(of, *primals)[:2]
    push: Any = torch.func.vjp(lambda *cotangents: pull(cotangents), *map(torch.zeros_like, out))[1]
    found: tuple[Tensor, ...] = push(tuple(tangents))
    return found


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class NoCaptures(TorchFunctionMode):
    """Refuses tensors of the surrounding graph that are no arguments: their gradients would be lost silently.

    It checks the arguments of operators. The function's arguments come detached, so a tensor that requires grad, or
    belongs to a transform that began outside, was captured. Samples of a surrounding vmap are allowed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and name != "detach" and _foreign(tensor):
                    raise RematError(
                        f"the function given to fs.remat reads a tensor of shape {list(tensor.shape)} in {name} that "
                        f"needs a gradient and is not an argument of it: pass it as an argument, or read "
                        f"tensor.detach() if it is a constant. (Inside, differentiate with torch.func, not with "
                        f"requires_grad.)"
                    )
        return func(*args, **kwargs)


def _foreign(tensor: Tensor) -> bool:
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return tensor.requires_grad
    level, batched = functorch.maybe_get_level(tensor), functorch.is_batchedtensor(tensor)
    vmap = functorch.TransformType.Vmap
    stack = functorch.get_interpreter_stack() or ()
    # Transforms that begin inside take the level of a suspended one, so the kinds must agree too.
    return not any(one.level() == level and (one.key() == vmap) == batched for one in stack)


@contextmanager
def _unchanged_generators() -> Iterator[None]:
    """Refuse draws from torch's generators: a recomputation would draw other numbers."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    with DisableFuncTorch(), disable_current_modes():  # a trace would make tensors without data of them
        before = [generator.get_state() for generator in generators]
    yield
    for generator, state in zip(generators, before, strict=True):
        with DisableFuncTorch(), disable_current_modes():
            same = torch.equal(generator.get_state(), state)
        if not same:
            raise RematError(
                f"the function given to fs.remat draws from torch's generator on {generator.device}, and would draw "
                f"other numbers when it is computed again: use fs.random with a key among the arguments, and call "
                f"modules by apply(..., training=False), or without nn.Dropout"
            )


def autocast_state() -> Autocast:
    """Tell whether autocast is on, and its dtype, by kind of device."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


@contextmanager
def _autocast(state: Autocast) -> Iterator[None]:
    """Autocast as it was at the call, without its cache, which would keep casts of this call's tensors."""
    with ExitStack() as stack:
        if state != autocast_state():
            for kind, enabled, dtype in state:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield
