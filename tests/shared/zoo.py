"""Small deterministic models that between them use every way in which a program can read its parameters.

Each example gives one program twice: as fshard runs it (``model``, ``rules``, ``loss_fn``) and as plain
PyTorch on the same start values (``plain``). Batches are global, 24 rows, so that 1, 2, 3 and 4 ranks get
equal parts, of two equal microbatches each.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from tests.shared import functions, modules, tricky

ROWS = 24
Batch = Any
Objective = Callable[[Callable[..., Any], Batch, Callable[[Tensor, Tensor], Any]], Any]
"""``objective(forward, batch, mean)``: a loss; ``mean(total, count)`` is ``fs.Mean`` or a division."""


@dataclass(frozen=True)
class Plain:
    """The program in plain PyTorch: its parameters by path, and the loss of a global batch."""

    parameters: dict[str, Tensor]
    loss: Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Example:
    """One program, for fshard and for plain PyTorch.

    Attributes:
        model: what ``fs.split`` returned, or a raw tree.
        rules: as for ``fs.make_plan``.
        loss_fn: as for ``fs.make_train_step``.
        plain: the reference.
        batch: the global batch of a step.
        units: the unit patterns of a raw tree.
        clip: a gradient norm that the first steps exceed.
    """

    model: Any
    rules: Sequence[Any]
    loss_fn: Callable[[Any, Batch], Any]
    plain: Plain
    batch: Callable[[int], Batch]
    units: tuple[str, ...] = ()
    clip: float = 0.1
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        whole = {path: leaf.detach().clone() for path, leaf in self.plain.parameters.items()}
        object.__setattr__(self, "start", whole)

    def plan(self, mesh: fs.Mesh) -> fs.Plan:
        """The plan on a mesh, all of whose axes are data axes."""
        names = mesh.axis_names
        spec = P(names[0] if len(names) == 1 else names)
        return fs.make_plan(self.model, mesh, self.rules, batch=spec, units=self.units)

    def batches(self, mesh: fs.Mesh, steps: int) -> Iterator[Batch]:
        """A rank's part of the first batches."""
        return (cut(self.batch(step), mesh.rank, mesh.size) for step in range(steps))

    def params(self) -> dict[str, Any]:
        """A fresh copy of the start values, as a nested dict."""
        return tree.nest({path: leaf.clone() for path, leaf in self.start.items()})


def cut(batch: Batch, rank: int, world: int) -> Batch:
    """A rank's equal part of a global batch; leaves that are no tensors go to every rank."""

    def part(leaf: Any) -> Any:
        return leaf.chunk(world)[rank].clone() if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return tree.map(part, batch)


def build(name: str) -> Example:
    """The example of this name, with the same values in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name) + 7)
        return (EXAMPLES | TRICKY)[name]()


def _divide(total: Tensor, count: Tensor) -> Tensor:
    return total / count


def _of_module(
    module: nn.Module,
    units: tuple[str, ...],
    objective: Objective,
    batch: Callable[[int], Batch],
    rules: Sequence[Any] = ((r".*", fs.fsdp("shard")),),
) -> Example:
    twin = copy.deepcopy(module)
    model = fs.split(module, units=units)

    def loss_fn(params: Any, batch: Batch) -> Any:
        return objective(lambda *args, **kwargs: model.apply(params, *args, **kwargs), batch, fs.Mean)

    def plain_loss(batch: Batch) -> Tensor:
        result = objective(twin, batch, _divide)
        return result[0] if isinstance(result, tuple) else result

    return Example(model, rules, loss_fn, Plain(dict(twin.named_parameters()), plain_loss), batch)


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def _regression(width: int, out: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        x = torch.randn(ROWS, width, generator=_generator(step))
        return {"x": x, "y": torch.sin(x[:, :1] * torch.arange(1, out + 1))}

    return batch


def _squared(forward: Callable[..., Any], batch: Batch, mean: Any) -> Tensor:
    return F.mse_loss(forward(batch["x"]), batch["y"])


def _tokens(vocab: int, length: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        x = torch.randint(vocab, (ROWS, length), generator=_generator(step))
        return {"x": x, "y": (3 * x + 1) % vocab}

    return batch


def _language(forward: Callable[..., Any], batch: Batch, mean: Any) -> Tensor:
    return F.cross_entropy(forward(batch["x"]).flatten(0, 1), batch["y"].flatten())


def gpt() -> Example:
    """A GPT with tied embeddings; norms are replicated."""
    rules = [(r".*norm.*", P()), (r".*", fs.fsdp("shard"))]
    return _of_module(modules.GPT(), ("blocks.*",), _language, _tokens(64, 16), rules)


def odd() -> Example:
    """The odd MLP, with replicated norm leaves."""
    rules = [(r"norm\..*", P()), (r".*", fs.fsdp("shard"))]
    return _of_module(modules.OddMLP(), ("first", "second"), _squared, _regression(7, 5), rules)


def unet() -> Example:
    """Skip connections between units."""
    return _of_module(modules.UNet(), ("down.*", "mid", "up.*"), _squared, _regression(10, 4))


def translator() -> Example:
    """Cross attention: one unit's output is an input of several later ones."""
    return _of_module(modules.Translator(), ("encoder.*", "decoder.*"), _language, _tokens(20, 6))


def twice() -> Example:
    """Weights shared by two calls of one unit."""
    return _of_module(modules.Twice(), ("inp", "shared", "between", "out"), _squared, _regression(6, 3))


def skipping() -> Example:
    """A Python bool in the batch decides whether a unit runs."""
    base = _regression(6, 3)

    def batch(step: int) -> Batch:
        return {**base(step), "extra": step % 3 != 1}

    def objective(forward: Callable[..., Any], batch: Batch, mean: Any) -> Tensor:
        return F.mse_loss(forward(batch["x"], extra=batch["extra"]), batch["y"])

    return _of_module(modules.Skipping(), ("inp", "extra", "mid", "out"), objective, batch)


def masked() -> Example:
    """A mean over unequal token counts, with auxiliary values."""
    base = _tokens(18, 8)

    def batch(step: int) -> Batch:
        lengths = (torch.arange(ROWS) * (step + 1)) % 8 + 1
        return {**base(step), "mask": (torch.arange(8) < lengths[:, None]).float()}

    def objective(forward: Callable[..., Any], batch: Batch, mean: Any) -> Any:
        logits = forward(batch["x"])
        losses = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
        mask = batch["mask"].flatten()
        right = (logits.argmax(-1) == batch["y"]).flatten().float() * mask
        loss = mean((losses * mask).sum(), mask.sum())
        return loss, {"accuracy": mean(right.sum(), mask.sum()), "tokens": mask.sum()}

    return _of_module(modules.Masked(), ("layers.*",), objective, batch)


def conv() -> Example:
    """Leaves cut along dim 0 and along dim 1, beside flat-sharded and replicated ones."""

    def batch(step: int) -> Batch:
        x = torch.randn(ROWS, 3, 6, 6, generator=_generator(step))
        return {"x": x, "y": torch.sin(x[:, 0, 0, :5])}

    rules = [
        (r"stages\.\d\.0\.weight", P("shard")),
        (r"head\.weight", P(None, "shard")),
        (r"stages\.\d\.1\..*", P()),
        (r".*", fs.fsdp("shard")),
    ]
    return _of_module(modules.ConvNet(), ("stages.*",), _squared, batch, rules)


def adapted() -> Example:
    """Frozen leaves inside of units, a frozen unit between trained ones, and every kind of spec."""
    rules = [
        (r"layers\.0\.base\.weight", P("shard")),
        (r"layers\.1\.base\..*", P()),
        (r"out\.weight", P(None, "shard")),
        (r".*\.b\.bias", P()),
        (r".*", fs.fsdp("shard", min_size=3)),
    ]
    return _of_module(modules.Adapted(), ("layers.*", "frozen", "out"), _squared, _regression(12, 4), rules)


def _of_functions(
    program: Any, units: Any, whole: dict[str, Tensor], owners: tuple[str, ...], batch: Any, rules: Any
) -> Example:
    """An example of hand-written functions: ``program(params, batch, units)``, units marked or plain."""
    own = {path: leaf.clone().requires_grad_() for path, leaf in whole.items()}
    nested = tree.nest(own)
    return Example(
        model=tree.nest(whole),
        rules=rules,
        loss_fn=lambda params, batch: program(params, batch, units.MARKED),
        plain=Plain(own, lambda batch: program(nested, batch, units.PLAIN)),
        batch=batch,
        units=owners,
    )


def handwritten() -> Example:
    """Pure functions over a raw tree; the first and the last unit read one embedding."""
    rules = [(r".*\.bias", P()), (r".*", fs.fsdp("shard"))]
    whole = functions.language_params()
    return _of_functions(functions.language, functions, whole, ("layers.*",), _tokens(16, 6), rules)


def glue() -> Example:
    """Units with keywords, pytree results, integer results, and code between them."""
    rules = [(r".*", fs.fsdp("shard"))]
    whole = functions.routed_params()
    return _of_functions(functions.routed, functions, whole, ("enc", "mix.*"), _regression(6, 4), rules)


def _tricky(program: Any) -> Callable[[], Example]:
    base = _regression(6, 4)

    def batch(step: int) -> Batch:
        return {**base(step), "turn": torch.tensor(step // 2 % 3)}

    def example() -> Example:
        rules = [(r"c\.b", P()), (r".*", fs.fsdp("shard"))]
        return _of_functions(program, tricky, tricky.params(), tricky.UNITS, batch, rules)

    return example


EXAMPLES: dict[str, Callable[[], Example]] = {
    example.__name__: example
    for example in (gpt, odd, unet, translator, twice, skipping, masked, conv, adapted, handwritten, glue)
}
TRICKY = {program.__name__: _tricky(program) for program in tricky.PROGRAMS}
