"""Optimizers beside what they must equal: one plain PyTorch process that trains the same small net."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from tests.shared import parity
from tests.shared.parity import Run

STEPS, ROWS, WIDTH = 10, 24, 16
FLAT = ((r".*", fs.fsdp("shard")),)
WHOLE = (fs.Rule(r".*", fs.fsdp("shard"), align="leaf"),)
MIXED = (
    fs.Rule(r"blocks\.\d\.(up|down)\.weight", fs.fsdp("shard"), align="leaf"),
    (r".*norm.*", P()),
    (r".*", fs.fsdp("shard")),
)
NORMS = ((r".*norm.*", P()), (r".*", fs.fsdp("shard")))


class Block(nn.Module):
    """Two matrices of different shapes, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def net() -> Net:
    """The net, with the same values in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net()


def batch(step: int) -> Tensor:
    """The global batch of a step: 24 rows."""
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(100 + step))


def loss_of(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A mean over rows."""
    return ((forward(x) - torch.sin(3 * x[:, :4])) ** 2).mean()


Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Case:
    """One optimizer, the rules of its plan, and its reference.

    Attributes:
        opt: makes the optimizer of ``fs.optim``.
        reference: makes what has ``step()`` from the parameters by path.
        rules: as for ``fs.make_plan``.
        options: of the train step, and of the reference loop: ``clip_norm``.
    """

    opt: Callable[[], Any]
    reference: Callable[[Named], Any]
    rules: Sequence[Any] = FLAT
    options: Mapping[str, Any] = field(default_factory=dict)


def plain(case: Case, narrow: int = 0) -> Run:
    """The reference's run; with ``narrow``, cast to bfloat16 as so many ranks do it."""
    module = net()
    named = dict(module.named_parameters())
    rule = case.reference(named)

    def backward(step: int) -> float:
        if narrow:
            return _in_bfloat16(module, batch(step), narrow)
        return parity.backward(loss_of(module, batch(step)))

    run = parity.plain(named, rule, backward, STEPS, case.options.get("clip_norm"))
    return _averaged(run, getattr(rule, "ema", {}))


def _averaged(run: Run, ema: Mapping[str, Tensor]) -> Run:
    """The run, with averages of leaves among its parameters."""
    return replace(run, params=run.params | {f"average of {path}": leaf.clone() for path, leaf in ema.items()})


def _in_bfloat16(module: Net, x: Tensor, ranks: int) -> float:
    """The mean loss of all ranks; gradients of cast leaves are added up in float32, in the order of ranks."""
    named, losses = dict(module.named_parameters()), []
    for part in x.chunk(ranks):
        cast = {path: leaf.detach().bfloat16().requires_grad_() for path, leaf in named.items()}
        loss = loss_of(lambda x, cast=cast: torch.func.functional_call(module, cast, x.bfloat16()), part)  # type: ignore[misc]
        for leaf, grad in zip(named.values(), torch.autograd.grad(loss, list(cast.values())), strict=True):
            assert leaf.grad is not None
            leaf.grad += grad.float() / ranks
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def sharded(names: Sequence[str], axes: Any = ((-1,), ("shard",)), narrow: bool = False) -> dict[str, Run]:
    """On a rank: the runs of these cases."""
    with fs.make_mesh(*axes) as mesh:
        return {name: run(CASES[name], mesh, narrow) for name in names}


def run(case: Case, mesh: fs.Mesh, narrow: bool = False) -> Run:
    """One case on a mesh, in float32 or, ``narrow``, in bfloat16."""
    module = net()
    model = fs.split(copy.deepcopy(module), units=("blocks.*",))
    names = mesh.axis_names
    cast = torch.bfloat16 if narrow else torch.float32
    spec, precision = P(names[0] if len(names) == 1 else names), fs.Precision(cast, cast)
    plan = fs.make_plan(model, mesh, case.rules, batch=spec, precision=precision if narrow else None)
    opt = case.opt()
    state = fs.init_state(plan, opt, params=tree.nest(dict(module.named_parameters())))
    step = fs.make_train_step(
        lambda params, x: loss_of(lambda x: model.apply(params, x.to(cast)), x), opt, plan, **dict(case.options)
    )
    batches = (batch(number).chunk(mesh.size)[mesh.rank] for number in range(STEPS))
    seen, state = parity.sharded(step, state, plan, batches)
    ema = fs.unshard(fs.averaged(state).params, plan) if "ema" in state.opt_state else {}
    return _averaged(seen, dict(tree.paths(ema)))


def of_torch(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[[Named], Any]:
    """A reference of ``torch.optim`` over all parameters."""
    return lambda named: cls(list(named.values()), **options)


class Lion:
    """Lion as its paper writes it."""

    def __init__(self, named: Named, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.named, self.lr, self.betas, self.weight_decay = named, lr, betas, weight_decay
        self.kept = {path: torch.zeros_like(leaf) for path, leaf in named.items()}

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        b1, b2 = self.betas
        for path, leaf in self.named.items():
            assert leaf.grad is not None
            update = (b1 * self.kept[path] + (1 - b1) * leaf.grad).sign()
            leaf.sub_(self.lr * (update + self.weight_decay * leaf))
            self.kept[path] = b2 * self.kept[path] + (1 - b2) * leaf.grad


class Muon:
    """Muon as its paper writes it, in float32."""

    def __init__(self, leaves: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        self.leaves, self.lr, self.momentum, self.weight_decay = leaves, lr, momentum, weight_decay
        self.kept = [torch.zeros_like(leaf) for leaf in leaves]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        for leaf, kept in zip(self.leaves, self.kept, strict=True):
            assert leaf.grad is not None
            kept.mul_(self.momentum).add_((1 - self.momentum) * leaf.grad)
            x = (1 - self.momentum) * leaf.grad + self.momentum * kept
            x = x / x.norm()
            for _ in range(5):
                product = x @ x.T
                x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
            leaf.mul_(1 - self.lr * self.weight_decay)
            leaf.sub_(self.lr * max(1.0, leaf.shape[0] / leaf.shape[1]) ** 0.5 * x)


class Several:
    """Several references, each over the parameters that its filter passes."""

    def __init__(self, *rules: Any) -> None:
        self.rules = rules

    def step(self) -> None:
        """One update of each."""
        for rule in self.rules:
            rule.step()


class Averaged:
    """A reference and the moving average of the parameters beside it."""

    def __init__(self, named: Named, rule: Any, decay: float) -> None:
        self.named, self.rule, self.decay = named, rule, decay
        self.ema = {path: leaf.detach().clone() for path, leaf in named.items()}

    def step(self) -> None:
        """Update, then average, by PyTorch's own function."""
        self.rule.step()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(self.decay)
        average(list(self.ema.values()), [leaf.detach() for leaf in self.named.values()], None)


class ClipValue:
    """A reference behind PyTorch's clipping by value."""

    def __init__(self, named: Named, rule: Any, limit: float) -> None:
        self.named, self.rule, self.limit = named, rule, limit

    def step(self) -> None:
        """Clip, then update."""
        nn.utils.clip_grad_value_(self.named.values(), self.limit)
        self.rule.step()


def _pick(named: Named, test: Callable[[str], bool]) -> list[nn.Parameter]:
    return [leaf for path, leaf in named.items() if test(path)]


def _muon(named: Named) -> Several:
    return Several(
        Muon(_pick(named, _hidden), 0.02, 0.95, 0.1),
        torch.optim.AdamW(_pick(named, lambda p: not _hidden(p)), lr=0.01, eps=1e-6, weight_decay=0.0),
    )


def _hidden(path: str) -> bool:
    return "blocks" in path and "norm" not in path and "weight" in path


def muon_and_adamw(**options: Any) -> Any:
    """Muon for the matrices of blocks, AdamW for the rest."""
    adamw = fs.optim.adamw(0.01, eps=1e-6, weight_decay=0.0)
    return fs.optim.partition([(r"blocks\.\d\.(up|down)\.weight", fs.optim.muon(0.02, **options)), (r".*", adamw)])


def _partitioned(named: Named) -> Several:
    return Several(
        torch.optim.SGD(_pick(named, lambda p: "bias" in p), lr=0.05, momentum=0.9),
        torch.optim.NAdam(_pick(named, lambda p: "norm.weight" in p), lr=0.01),
        torch.optim.AdamW(
            [
                {
                    "params": _pick(named, lambda p: "weight" in p and "norm" not in p and "up" in p),
                    "weight_decay": 0.1,
                },
                {"params": _pick(named, lambda p: "weight" in p and "norm" not in p and "up" not in p)},
            ],
            lr=0.01,
            weight_decay=0.0,
        ),
    )


def _from_torch(cls: str, **options: Any) -> Case:
    rule = getattr(torch.optim, cls)
    return Case(lambda: fs.optim.from_torch(rule, **options), of_torch(rule, **options))


O = fs.optim  # noqa: E741
CASES: dict[str, Case] = {
    "Adadelta": _from_torch("Adadelta", lr=1.0),
    "Adagrad": _from_torch("Adagrad", lr=0.02, initial_accumulator_value=0.1, weight_decay=0.01),
    "Adam": _from_torch("Adam", lr=0.01, eps=1e-6, weight_decay=0.01, amsgrad=True),
    "AdamW": _from_torch("AdamW", lr=0.01, eps=1e-6, weight_decay=0.1),
    "Adamax": _from_torch("Adamax", lr=0.01, eps=1e-6),
    "ASGD": _from_torch("ASGD", lr=0.05, t0=3),
    "NAdam": _from_torch("NAdam", lr=0.01, eps=1e-6),
    "RAdam": _from_torch("RAdam", lr=0.01, eps=1e-6),
    "RMSprop": _from_torch("RMSprop", lr=0.005, eps=1e-4, momentum=0.9, centered=True),
    "Rprop": _from_torch("Rprop", lr=0.001),
    "SGD": _from_torch("SGD", lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "lion": Case(
        lambda: O.lion(0.002, betas=(0.9, 0.95), weight_decay=0.1),
        lambda named: Lion(named, 0.002, (0.9, 0.95), 0.1),
        NORMS,
    ),
    "ema": Case(
        lambda: O.ema(O.adamw(0.01, eps=1e-6, weight_decay=0.0), 0.8),
        lambda named: Averaged(named, of_torch(torch.optim.AdamW, lr=0.01, eps=1e-6, weight_decay=0.0)(named), 0.8),
        NORMS,
        {"clip_norm": 0.1},
    ),
    "chain": Case(
        lambda: O.chain(O.clip_value(0.01), O.scale(0.5), O.add_decay(0.1), O.sgd(0.1, momentum=0.9)),
        lambda named: ClipValue(
            named, Scaled(named, torch.optim.SGD(named.values(), 0.1, 0.9, weight_decay=0.1)), 0.01
        ),
        NORMS,
        {"clip_norm": 1.0},
    ),
    "clipping by value, by rules": Case(
        lambda: O.partition(
            [(r"blocks\..*", O.chain(O.clip_value(0.01), O.sgd(0.1, momentum=0.9))), (r".*", O.sgd(0.1, momentum=0.9))]
        ),
        lambda named: ClipValue(
            {path: leaf for path, leaf in named.items() if path.startswith("blocks.")},
            torch.optim.SGD(named.values(), 0.1, 0.9),
            0.01,
        ),
        NORMS,
    ),
    "masked": Case(
        lambda: O.masked(O.adamw(0.01, eps=1e-6), r"blocks\..*weight"),
        lambda named: torch.optim.AdamW(_pick(named, lambda p: "blocks" in p and "weight" in p), lr=0.01, eps=1e-6),
        NORMS,
    ),
    "muon": Case(lambda: muon_and_adamw(dtype=torch.float32), _muon, MIXED, {"clip_norm": 0.5}),
    "muon in one group": Case(lambda: muon_and_adamw(dtype=torch.float32), _muon, WHOLE),
    "muon over all ranks": Case(
        lambda: muon_and_adamw(dtype=torch.float32),
        _muon,
        (fs.Rule(r".*", fs.fsdp("shard"), align="leaf", opt=fs.fsdp(("shard", "replica"))),),
        {"clip_norm": 0.5},
    ),
    "adafactor over replicas": Case(
        lambda: O.ema(O.adafactor(0.02), 0.8),
        lambda named: Averaged(named, torch.optim.Adafactor(list(named.values()), lr=0.02), 0.8),
        (fs.Rule(r".*", P(), align="leaf", opt=fs.fsdp("replica")),),
    ),
    "adafactor": Case(
        lambda: O.adafactor(0.02, weight_decay=0.1), of_torch(torch.optim.Adafactor, lr=0.02, weight_decay=0.1), WHOLE
    ),
    "partition": Case(
        lambda: O.partition(
            [
                (r".*bias", O.sgd(0.05, momentum=0.9)),
                (r".*norm\.weight", O.from_torch(torch.optim.NAdam, lr=0.01)),
                (r".*", O.adamw(0.01, weight_decay=0.1, decay=r".*\.up\..*")),
            ]
        ),
        _partitioned,
    ),
}


TWO_AXES = [name for name in CASES if " over " in name]
"""Those whose rules need a mesh of replicas and shards."""
ONE_AXIS = [name for name in CASES if name not in TWO_AXES]


class Scaled:
    """A reference that halves gradients first."""

    def __init__(self, named: Named, rule: Any) -> None:
        self.named, self.rule = named, rule

    def step(self) -> None:
        """Halve, then update."""
        for leaf in self.named.values():
            assert leaf.grad is not None
            leaf.grad.mul_(0.5)
        self.rule.step()
