"""A small GPT whose layers are parallel in one way or another, and the same GPT in plain PyTorch.

The program is written once; a *kit* says how its layers are computed. ``Plain`` uses torch.nn.functional on whole
tensors and nothing of fshard.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, parallel, tree
from fshard import collectives as c
from tests.shared import parity
from tests.shared.parity import Run

ROWS, TIME, VOCAB, WIDTH, HEADS, DEPTH, EXPERTS = 16, 16, 48, 16, 4, 2, 4
HEAD = WIDTH // HEADS
STEPS = 6
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def whole(moe: bool) -> dict[str, Tensor]:
    """The start values by path."""
    gen = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen) * 0.3

    out = {"embed.w": normal(VOCAB, WIDTH), "head.norm": 1 + normal(WIDTH), "head.w": normal(VOCAB, WIDTH)}
    for i in range(DEPTH):
        at = f"blocks.{i}"
        out |= {f"{at}.norm1": 1 + normal(WIDTH), f"{at}.norm2": 1 + normal(WIDTH), f"{at}.shift": normal(WIDTH)}
        out |= {f"{at}.qkv.w": normal(3 * WIDTH, WIDTH), f"{at}.qkv.b": normal(3 * WIDTH)}
        out |= {f"{at}.out.w": normal(WIDTH, WIDTH), f"{at}.out.b": normal(WIDTH)}
        if moe:
            out |= {f"{at}.router": normal(EXPERTS, WIDTH)}
            out |= {f"{at}.experts.up": normal(EXPERTS, 2 * WIDTH, WIDTH)}
            out |= {f"{at}.experts.down": normal(EXPERTS, WIDTH, 2 * WIDTH)}
        else:
            out |= {f"{at}.up.w": normal(2 * WIDTH, WIDTH), f"{at}.up.b": normal(2 * WIDTH)}
            out |= {f"{at}.down.w": normal(WIDTH, 2 * WIDTH), f"{at}.down.b": normal(WIDTH)}
    return out


def batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    x = torch.randint(VOCAB, (ROWS, TIME), generator=torch.Generator().manual_seed(100 + step))
    return {"x": x, "y": (3 * x + x.roll(1, 1)) % VOCAB}


class Plain:
    """Whole tensors, one process."""

    aux = True

    def unit(self, fn: Any) -> Any:
        return fn

    def embed(self, tokens: Tensor, w: Tensor) -> Tensor:
        return F.embedding(tokens, w)

    def norm(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, w.shape, w) if b is None else F.layer_norm(x, w.shape, w, b)

    def column(self, x: Tensor, p: Any) -> Tensor:
        return F.linear(x, p["w"], p["b"])

    def row(self, x: Tensor, p: Any) -> Tensor:
        return F.linear(x, p["w"], p["b"])

    def places(self, length: int) -> Tensor:
        return torch.arange(length)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def feed(self, p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.row(F.gelu(self.column(x, p["up"])), p["down"]), x.new_zeros(())

    def loss(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).flatten(0, 1).float(), y.flatten())

    rules: Sequence[Any] = [(".*", fs.fsdp("shard"))]


class PlainExperts(Plain):
    """All experts, token by token; with a capacity, by a loop over choices."""

    def __init__(self, capacity: float | None, k: int = 2) -> None:
        self.capacity, self.k = capacity, k

    def feed(self, p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, p["router"])
        probs = logits.softmax(-1)
        top = probs.topk(self.k, -1)
        weights = top.values / top.values.sum(-1, keepdim=True)
        room = None if self.capacity is None else -(-int(self.capacity * x.shape[1] * self.k) // EXPERTS)
        keep = torch.ones_like(weights)
        for row in range(x.shape[0]) if room is not None else ():
            taken = [0] * EXPERTS
            for choice in range(self.k):
                for t in range(x.shape[1]):
                    expert = int(top.indices[row, t, choice])
                    taken[expert] += 1
                    keep[row, t, choice] = float(taken[expert] <= room)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            y = F.linear(F.gelu(F.linear(x, p["experts"]["up"][expert])), p["experts"]["down"][expert])
            share = ((top.indices == expert) * weights * keep).sum(-1, keepdim=True)
            out = out + share * y
        f = F.one_hot(top.indices, EXPERTS).float().flatten(0, 2).mean(0)
        balance = EXPERTS * (f * probs.flatten(0, 1).mean(0)).sum()
        return out, 0.1 * balance * self.aux + 0.01 * logits.logsumexp(-1).square().mean()


class OnUnits(Plain):
    """Plain layers inside of units."""

    def unit(self, fn: Any) -> Any:
        return fs.unit(fn)


class TensorParallel(OnUnits):
    """Megatron's layers; with ``sequence`` activations between them are slices of the sequence."""

    def __init__(self, sequence: bool, flat: str | None) -> None:
        self.dim = 1 if sequence else None
        self.rules = parallel.megatron_rules(
            column=[r".*\.(qkv|up)\.(w|b)", r"(embed|head)\.w"], row=r".*\.(out|down)\.(w|b)", flat=flat
        )

    def embed(self, tokens: Tensor, w: Tensor) -> Tensor:
        return parallel.vocab_embedding(tokens, w, sequence_dim=self.dim)

    def norm(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if self.dim is None:
            return super().norm(x, w, b)
        return parallel.rms_norm(x, w) if b is None else parallel.layer_norm(x, w, b)

    def column(self, x: Tensor, p: Any) -> Tensor:
        return parallel.column_linear(x, p["w"], p["b"], sequence_dim=self.dim)

    def row(self, x: Tensor, p: Any) -> Tensor:
        return parallel.row_linear(x, p["w"], p["b"], sequence_dim=self.dim)

    def loss(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return parallel.vocab_cross_entropy(parallel.column_linear(x, w, sequence_dim=self.dim), y)


class ExpertParallel(OnUnits):
    """Experts on the axis ``ep``, which is a data axis."""

    def __init__(self, capacity: float | None, axes: tuple[str, ...]) -> None:
        self.capacity, self.axes = capacity, axes
        flat = tuple(axis for axis in axes if axis != "ep")
        self.rules = [parallel.expert_rule(r".*\.experts\..*", flat=flat or None), (r".*", fs.fsdp(axes))]

    def feed(self, p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, p["router"])
        routing = parallel.route(logits)

        def experts(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            middle = F.gelu(parallel.grouped_linear(rows, p["experts"]["up"], counts))
            return parallel.grouped_linear(middle, p["experts"]["down"], counts)

        out = parallel.moe(x, routing, experts, capacity=self.capacity)
        balance = parallel.load_balance_loss(routing, axis=self.axes)
        # Not 0.1 * balance: PyTorch's forward over reverse mode makes float64 of a 0-dim tensor times a number.
        return out, torch.stack((balance, parallel.z_loss(logits))) @ torch.tensor((0.1 * self.aux, 0.01))


class ContextParallel(OnUnits):
    """The sequence on the axis ``cp``, which is a data axis."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.rules = [(r".*", fs.fsdp(axes))]

    def places(self, length: int) -> Tensor:
        return parallel.zigzag_positions(length)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel.ring_attention(q, k, v)


def program(kit: Any) -> Any:
    """``loss_fn(params, batch)`` of a kit."""

    def turn(x: Tensor, places: Tensor) -> Tensor:
        angle = torch.outer(places.to(x.dtype), 0.5 ** torch.arange(HEAD // 2).to(x.dtype))
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def embed(p: Any, tokens: Tensor) -> Tensor:
        return kit.embed(tokens, p["w"])

    def block(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        split = kit.column(kit.norm(x, p["norm1"]), p["qkv"]).unflatten(-1, (-1, 3, HEAD))
        q, k, v = split.permute(3, 0, 2, 1, 4).unbind(0)
        places = kit.places(q.shape[2])
        mixed = kit.attention(turn(q, places), turn(k, places), v)
        x = x + kit.row(mixed.transpose(1, 2).flatten(2), p["out"])
        y, aux = kit.feed(p, kit.norm(x, p["norm2"], p["shift"]))
        return x + y, aux

    def head(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return kit.loss(kit.norm(x, p["norm"]), p["w"], y)

    embed, block, head = kit.unit(embed), kit.unit(block), kit.unit(head)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, aux = embed(params["embed"], batch["x"]), 0.0
        for i in range(DEPTH):
            x, more = block(params["blocks"][str(i)], x)
            aux = aux + more
        return head(params["head"], x, batch["y"]) + aux

    return loss_fn


@dataclass(frozen=True)
class Case:
    """A kit by name, the mesh, and which axes cut the batch along rows and along time."""

    kind: str
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes that cut rows."""
        return tuple(axis for axis in self.names if axis not in ("tp", "cp"))

    @property
    def batch(self) -> P:
        """How the batch is cut."""
        return P(self.rows, "cp") if "cp" in self.names else P(self.rows)

    @property
    def moe(self) -> bool:
        """Whether it has experts."""
        return self.kind in ("capacity", "dropless")

    def kit(self) -> Any:
        """The kit."""
        capacity = 0.75 if self.kind == "capacity" else None
        if self.moe:
            return ExpertParallel(capacity, self.rows)
        if self.kind == "context":
            return ContextParallel((*self.rows, "cp") if self.names[-1] == "cp" else self.names)
        return TensorParallel(self.kind == "sequence", "shard" if "shard" in self.names else None)

    def plain(self) -> Any:
        """Its plain twin."""
        return PlainExperts(0.75 if self.kind == "capacity" else None) if self.moe else Plain()

    def cut(self, whole: dict[str, Tensor], mesh: fs.Mesh) -> dict[str, Tensor]:
        """A rank's part of a global batch."""
        with c.use_mesh(mesh):
            mine = {k: c.cut(x, P(self.rows)) for k, x in whole.items()}
            return {k: parallel.zigzag_slice(x) if "cp" in self.names else x for k, x in mine.items()}


@dataclass(frozen=True)
class Config:
    """How the step is made."""

    reshard: bool = True
    prefetch: int = 1
    accumulate: int = 1
    debug: bool = True
    compile: str | None = None
    remat: str | None = None
    compute: torch.dtype = torch.float32


def train(case: Case, configs: Sequence[Config]) -> list[Run]:
    """On a rank: train under each configuration."""
    with fs.make_mesh(case.sizes, case.names) as mesh:
        return [_train(case, config, mesh) for config in configs]


def _train(case: Case, config: Config, mesh: fs.Mesh) -> Run:
    kit = case.kit()
    kit.aux = config.accumulate == 1
    start = tree.nest(whole(case.moe))
    units, precision = ("embed", "blocks.*", "head"), fs.Precision(compute=config.compute)
    plan = fs.make_plan(start, mesh, kit.rules, batch=case.batch, units=units, precision=precision)
    opt = fs.optim.sgd(**SGD)
    state = fs.init_state(plan, opt, params=start)
    step = fs.make_train_step(
        program(kit),
        opt,
        plan,
        schedule=fs.Policy(prefetch=config.prefetch, reshard=config.reshard),
        accumulate=config.accumulate,
        debug=config.debug,
        compile=config.compile,
        remat=config.remat,
    )
    batches = (case.cut(batch(number), mesh) for number in range(STEPS))
    run, _ = parity.sharded(step, state, plan, batches)
    if config.compile:
        blocks = [line for line in step.units.splitlines() if line.startswith("block(")]
        run.problems.extend(line for line in blocks if "as it is" not in line or "collective" not in line)
    return run


@functools.cache
def expected(kind: str, aux: bool, compute: torch.dtype = torch.float32) -> Run:
    """One plain process on the global batch, with torch.optim.SGD. It computes with casts of its parameters."""
    case = Case(kind, (1,), ("shard",))
    kit = case.plain()
    kit.aux = aux
    params = {path: leaf.requires_grad_() for path, leaf in whole(case.moe).items()}
    loss_fn = program(kit)

    def backward(step: int) -> float:
        cast = tree.nest({path: leaf.to(compute) for path, leaf in params.items()})
        return parity.backward(loss_fn(cast, batch(step)))

    return parity.plain(params, torch.optim.SGD(params.values(), **SGD), backward, STEPS)


def differences(case: Case, configs: Sequence[Config], ranks: Sequence[Sequence[Run]]) -> list[str]:
    """How runs differ from one plain process, or ranks from each other."""
    out = []
    for number, config in enumerate(configs):
        want = expected(case.kind, config.accumulate == 1)
        found = parity.differences([results[number] for results in ranks], want)
        out += [f"{config}: {line}" for line in found]
    return out
