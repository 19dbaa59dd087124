"""The peers' GPT and AdamW in JAX: the same numbers from the same start, sharded by ``NamedSharding``.

Nothing here knows PyTorch. Parameters are a flat dict by the names of PyTorch's ``state_dict``; for ``scan`` those of
all blocks are stacked, one array for each name, as ``jax.lax.scan`` wants them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Params = dict[str, jax.Array]
AXIS = "shard"
STACKED = "blocks.*."


@dataclass(frozen=True)
class Form:
    """How the program is written.

    Attributes:
        heads: attention heads.
        scan: run the blocks by ``lax.scan`` over stacked parameters, instead of one after the other.
        least: leaves of fewer elements are replicated: one small collective costs more than their memory.
        attention: which implementation; None leaves it to JAX.
        half: gather and compute in bfloat16, whatever the parameters are.
    """

    heads: int
    scan: bool = False
    least: int = 0
    attention: str | None = None
    half: bool = False


def stack(leaves: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """``blocks.0.x``, ``blocks.1.x`` ... as one ``blocks.*.x`` with a leading dim."""
    inner = [name.removeprefix("blocks.0.") for name in leaves if name.startswith("blocks.0.")]
    rest = {name: leaf for name, leaf in leaves.items() if not name.startswith("blocks.")}
    stacked = {STACKED + name: jnp.stack([leaves[f"blocks.{i}.{name}"] for i in range(depth)]) for name in inner}
    return {**rest, **stacked}


def spec(name: str, shape: tuple[int, ...], ranks: int, least: int) -> PartitionSpec:
    """FSDP by ``NamedSharding``: the largest dim that the ranks divide is cut over them."""
    first = 1 if name.startswith(STACKED) else 0
    dims = [dim for dim in range(first, len(shape)) if shape[dim] % ranks == 0]
    size = 1
    for dim in range(first, len(shape)):
        size *= shape[dim]
    if not dims or size < least:
        return PartitionSpec()
    cut = max(dims, key=lambda dim: shape[dim])
    return PartitionSpec(*(AXIS if dim == cut else None for dim in range(len(shape))))


def norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm, as ``torch.nn.LayerNorm``."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    spread = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(spread + 1e-5) * weight + bias).astype(x.dtype)


def linear(x: jax.Array, p: Mapping[str, jax.Array], name: str) -> jax.Array:
    """``torch.nn.Linear``."""
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def block(x: jax.Array, p: Mapping[str, jax.Array], form: Form) -> jax.Array:
    """Pre-norm attention and MLP."""
    batch, tokens, width = x.shape
    mixed = linear(norm(x, p["norm1.weight"], p["norm1.bias"]), p, "qkv")
    q, k, v = jnp.moveaxis(mixed.reshape(batch, tokens, 3, form.heads, -1), 2, 0)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=form.attention)
    x = x + linear(y.reshape(batch, tokens, width), p, "out")
    hidden = jax.nn.gelu(linear(norm(x, p["norm2.weight"], p["norm2.bias"]), p, "up"), approximate=False)
    return x + linear(hidden, p, "down")


def make_loss(form: Form, mesh: Mesh) -> Callable[[Params, jax.Array], jax.Array]:
    """``loss(params, rows)``: the mean cross entropy of each next token over the global batch.

    A sharding constraint on the weights of each block asks for FSDP's way: gather weights, leave activations where they
    are. Without it the partitioner may exchange activations instead.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    spread = NamedSharding(mesh, PartitionSpec(AXIS))

    def gathered(p: Mapping[str, jax.Array]) -> Params:
        cast = {name: leaf.astype(jnp.bfloat16) if form.half else leaf for name, leaf in p.items()}
        return {name: jax.lax.with_sharding_constraint(leaf, whole) for name, leaf in cast.items()}

    def one(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
        return jax.lax.with_sharding_constraint(block(x, gathered(p), form), spread)

    def loss(params: Params, rows: jax.Array) -> jax.Array:
        rest = gathered({name: leaf for name, leaf in params.items() if not name.startswith("blocks.")})
        tokens, targets = rows[:, :-1], rows[:, 1:]
        x = rest["embed.weight"][tokens] + rest["place.weight"][: tokens.shape[1]]
        if form.scan:
            stacked = {k.removeprefix(STACKED): leaf for k, leaf in params.items() if k.startswith(STACKED)}
            x, _ = jax.lax.scan(lambda carry, p: (one(carry, p), None), x, stacked)
        else:
            depth = len({name.split(".")[1] for name in params if name.startswith("blocks.")})
            for i in range(depth):
                at = f"blocks.{i}."
                x = one(x, {k.removeprefix(at): leaf for k, leaf in params.items() if k.startswith(at)})
        logits = norm(x, rest["norm.weight"], rest["norm.bias"]) @ rest["head.weight"].T
        likely = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(likely, targets[..., None], -1).mean()

    return loss


def adamw(
    p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, step: jax.Array, hyper: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One leaf's update, as ``torch.optim.AdamW``: in float32, whatever is kept. ``step`` counts from 1."""
    kept, (p, g, m, v) = p.dtype, (x.astype(jnp.float32) for x in (p, g, m, v))
    low, high = hyper["betas"]
    m = low * m + (1 - low) * g
    v = high * v + (1 - high) * g * g
    root = jnp.sqrt(v) / jnp.sqrt(1 - high**step) + hyper["eps"]
    p = p * (1 - hyper["lr"] * hyper["weight_decay"]) - hyper["lr"] / (1 - low**step) * m / root
    return p.astype(kept), m.astype(kept), v.astype(kept)


def init(params: Params) -> tuple[Params, Params, Params, jax.Array]:
    """The state: parameters, both moments, the steps made."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)


def make_step(form: Form, mesh: Mesh, hyper: Mapping[str, Any], specs: Mapping[str, PartitionSpec]) -> Any:
    """``step(state, rows) -> (state, loss)``, compiled, with its state donated."""
    loss_fn = make_loss(form, mesh)

    def step(state: Any, rows: jax.Array) -> Any:
        params, first, second, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        count = count + 1
        new = {
            name: adamw(
                leaf,
                jax.lax.with_sharding_constraint(grads[name], NamedSharding(mesh, specs[name])),
                first[name],
                second[name],
                count,
                hyper,
            )
            for name, leaf in params.items()
        }
        params, first, second = ({name: parts[i] for name, parts in new.items()} for i in range(3))
        return (params, first, second, count), loss

    return jax.jit(step, donate_argnums=0)


def make_product(form: Form, mesh: Mesh, specs: Mapping[str, PartitionSpec], backward: bool) -> Any:
    """``product(params, v, rows)``, compiled: the Hessian times ``v``, sharded as the parameters are.

    It is the derivative of the gradient along ``v``; *backward*: the gradient of the derivative along ``v``.
    """
    loss_fn = make_loss(form, mesh)

    def product(params: Params, v: Params, rows: jax.Array) -> Params:
        if backward:
            return jax.grad(lambda p: jax.jvp(lambda q: loss_fn(q, rows), (p,), (v,))[1])(params)
        return jax.jvp(lambda p: jax.grad(loss_fn)(p, rows), (params,), (v,))[1]

    return jax.jit(product, out_shardings={name: NamedSharding(mesh, where) for name, where in specs.items()})
