"""Programs of hand-written units on nested dicts, each for fshard and as plain functions: what a pipeline must carry.

A program is made twice, with ``fs.unit`` for the stages of a pipeline, and with nothing for one plain process.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs

ROWS, TIME, VOCAB, WIDTH = 24, 6, 24, 8
Mark = Callable[[Any], Any]
"""``fs.unit``, or a function that returns what it is given."""


@dataclass(frozen=True)
class PipelineProgram:
    """A program.

    Attributes:
        params: its leaves by path.
        make: makes ``loss_fn(params, batch)`` of the mark of units.
        units: the patterns of its units.
        batch: the global batch of a step.
        leaves: gives where leaves outside of units are, of the number of stages.
    """

    params: Mapping[str, Tensor]
    make: Callable[[Mark], Callable[[Any, Any], Any]]
    units: tuple[str, ...]
    batch: Callable[[int], Any]
    leaves: Callable[[int], Any] = lambda count: ()


class Draw:
    """Draws start values.

    Args:
        seed: of them.
    """

    def __init__(self, seed: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) / math.sqrt(shape[-1])


def tokens(step: int) -> dict[str, Tensor]:
    """Tokens, what is to be found of them, and how many of each row count."""
    x = torch.randint(VOCAB, (ROWS, TIME), generator=torch.Generator().manual_seed(100 + step))
    lengths = (torch.arange(ROWS) * (step + 3)) % TIME + 1
    return {"x": x, "y": (3 * x + x.roll(1, 1)) % VOCAB, "mask": torch.arange(TIME) < lengths[:, None]}


def _embed(p: Any, x: Tensor) -> Tensor:
    return F.embedding(x, p["w"])


def _feed(p: Any, x: Tensor) -> Tensor:
    return x + F.linear(torch.tanh(F.linear(x, p["up"])), p["down"])


def _logits(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, p["w"])


def _stack(draw: Draw, depth: int) -> dict[str, Tensor]:
    out = {"embed.w": draw(VOCAB, WIDTH)}
    for at in range(depth):
        out |= {f"blocks.{at}.up": draw(2 * WIDTH, WIDTH), f"blocks.{at}.down": draw(WIDTH, 2 * WIDTH)}
    return {**out, "head.w": draw(VOCAB, WIDTH)}


def _language(depth: int, block: Any, between: Any = None) -> Callable[[Mark], Any]:
    """A language model of blocks ``block(p, x)``, with code between them."""

    def make(unit: Mark) -> Any:
        embed, feed, logits = unit(_embed), unit(block), unit(_logits)

        def loss_fn(params: Any, batch: Any) -> Any:
            x = embed(params["embed"], batch["x"])
            for at in range(depth):
                x = feed(params["blocks"][str(at)], x)
                x = x if between is None else between(x, at)
            losses = F.cross_entropy(logits(params["head"], x).flatten(0, 1), batch["y"].flatten(), reduction="none")
            mask = batch["mask"].flatten()
            return fs.Mean((losses * mask).sum(), mask.sum())

        return loss_fn

    return make


STACK = ("embed", "blocks.*", "head")


def stack(depth: int = 4) -> PipelineProgram:
    """Blocks one after the other; an exact mean of unequal counts."""
    return PipelineProgram(_stack(Draw(), depth), _language(depth, _feed), STACK, tokens)


def glue() -> PipelineProgram:
    """Code between units that writes to what a unit returned, and that is read on both sides of a cut."""

    def between(x: Tensor, at: int) -> Tensor:
        x = x * 1.5
        x.mul_(0.5)
        return x + at * 0.01

    return PipelineProgram(_stack(Draw(), 4), _language(4, _feed, between), STACK, tokens)


def dropout() -> PipelineProgram:
    """Units that draw numbers."""
    return PipelineProgram(_stack(Draw(), 4), _language(4, lambda p, x: F.dropout(_feed(p, x), 0.1)), STACK, tokens)


def translator() -> PipelineProgram:
    """An encoder whose output every block of the decoder reads, with a mask of ints that a unit computes."""
    depth = 3

    def encode(p: Any, x: Tensor) -> dict[str, Any]:
        return {"memory": F.embedding(x, p["w"]), "mask": (x % 5 > 0).long(), "name": "encoded", "none": None}

    def cross(p: Any, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        scores = (F.linear(x, p["q"]) @ memory.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e4)
        return _feed(p, x + scores.softmax(-1) @ memory)

    def make(unit: Mark) -> Any:
        enc, feed, embed, cross_, logits = unit(encode), unit(_feed), unit(_embed), unit(cross), unit(_logits)

        def loss_fn(params: Any, batch: Any) -> Any:
            found = enc(params["source"], batch["x"])
            memory = found["memory"]
            for at in range(2):
                memory = feed(params["encoder"][str(at)], memory)
            x = embed(params["target"], batch["y"].roll(1, 1))
            for at in range(depth):
                x = cross_(params["decoder"][str(at)], x, memory=memory, mask=found["mask"])
            return F.cross_entropy(logits(params["head"], x).flatten(0, 1), batch["y"].flatten())

        return loss_fn

    draw = Draw(6)
    params = {"source.w": draw(VOCAB, WIDTH)}
    for at in range(2):
        params |= {f"encoder.{at}.up": draw(2 * WIDTH, WIDTH), f"encoder.{at}.down": draw(WIDTH, 2 * WIDTH)}
    params["target.w"] = draw(VOCAB, WIDTH)
    for at in range(depth):
        params |= {f"decoder.{at}.up": draw(2 * WIDTH, WIDTH), f"decoder.{at}.down": draw(WIDTH, 2 * WIDTH)}
        params[f"decoder.{at}.q"] = draw(WIDTH, WIDTH)
    params["head.w"] = draw(VOCAB, WIDTH)
    return PipelineProgram(params, make, ("source", "encoder.*", "target", "decoder.*", "head"), tokens)


def unet() -> PipelineProgram:
    """Units whose outputs skip over stages."""

    def make(unit: Mark) -> Any:
        one = unit(lambda p, x: torch.tanh(F.linear(x, p["w"], p["b"])))

        def loss_fn(params: Any, batch: Any) -> Any:
            skips, x = [], batch["x"]
            for at in range(3):
                x = one(params["down"][str(at)], x)
                skips.append(x)
            for at in range(3):
                x = one(params["up"][str(at)], torch.cat([x, skips[2 - at]], 1))
            return F.mse_loss(x, batch["y"])

        return loss_fn

    draw, params = Draw(7), dict[str, Tensor]()
    for at in range(3):
        params |= {f"down.{at}.w": draw(WIDTH, WIDTH), f"down.{at}.b": draw(1, WIDTH)[0]}
    for at in range(3):
        params |= {f"up.{at}.w": draw(WIDTH, 2 * WIDTH), f"up.{at}.b": draw(1, WIDTH)[0]}

    def batch(step: int) -> Any:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        return {"x": x, "y": x.flip(1).sin()}

    return PipelineProgram(params, make, ("down.*", "up.*"), batch)


def experts() -> PipelineProgram:
    """Blocks that return an auxiliary loss each, all of which the loss function adds up in memory of its own."""
    depth = 4

    def block(p: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = F.linear(x, p["router"]).softmax(-1)
        out = _feed(p, x) * probs.max(-1, keepdim=True).values
        load = F.one_hot(probs.argmax(-1), 2).float().amax(-1).mean(1) * probs.amax((1, 2))
        return out, probs.mean(1).square().sum(-1) * 2, load.detach()

    def make(unit: Mark) -> Any:
        embed, feed, logits = unit(_embed), unit(block), unit(_logits)

        def loss_fn(params: Any, batch: Any) -> Any:
            x, balance = embed(params["embed"], batch["x"]), []
            loads = torch.zeros(depth, len(x))
            for at in range(depth):
                x, aux, load = feed(params["blocks"][str(at)], x)
                balance.append(aux)
                loads[at] = load
            found = F.cross_entropy(logits(params["head"], x).flatten(0, 1), batch["y"].flatten())
            return found + 0.1 * torch.stack(balance).mean() + 0.01 * (loads * balance[0]).mean()

        return loss_fn

    params = _stack(Draw(8), depth)
    head = params.pop("head.w")
    for at in range(depth):
        params[f"blocks.{at}.router"] = Draw(at)(2, WIDTH)
    return PipelineProgram({**params, "head.w": head}, make, STACK, tokens)


def rotary() -> PipelineProgram:
    """Tables of angles that the loss function computes from the batch, and gives to every block."""

    def block(p: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return _feed(p, torch.cat((a * cos - b * sin, a * sin + b * cos), -1))

    def make(unit: Mark) -> Any:
        embed, feed, logits = unit(_embed), unit(block), unit(_logits)

        def loss_fn(params: Any, batch: Any) -> Any:
            places = batch["mask"].cumsum(1).float()
            angle = places[..., None] * 0.5 ** torch.arange(WIDTH // 2)
            cos, sin = angle.cos(), angle.sin()
            x = embed(params["embed"], batch["x"])
            for at in range(4):
                x = feed(params["blocks"][str(at)], x, cos, sin=sin)
            return F.cross_entropy(logits(params["head"], x).flatten(0, 1), batch["y"].flatten())

        return loss_fn

    return PipelineProgram(_stack(Draw(9), 4), make, STACK, tokens)


def writing() -> PipelineProgram:
    """Code between units that writes in place to results which several stages read, also results of other layouts."""

    def turned(p: Any, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x), p["w"]).t().contiguous().t()

    def carrying(p: Any, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        return (torch.tanh(F.linear(x, p["w"])) + carried).t().contiguous().t(), carried

    def make(unit: Mark) -> Any:
        turn, carry, plain = unit(turned), unit(carrying), unit(lambda p, x: F.linear(torch.tanh(x), p["w"]))

        def loss_fn(params: Any, batch: Any) -> Any:
            x = first = plain(params["a"], batch["x"])
            x.mul_(0.5)
            y, same = carry(params["b"], x + 1, x)
            z, _ = carry(params["c"], y.t().view(-1).view(WIDTH, -1).t(), same)
            z = z + turn(params["d"], z).detach()  # a unit without a backward
            last, _ = carry(params["e"], z, same)
            return F.mse_loss(last + 0.3 * first, batch["y"])

        return loss_fn

    draw, made = Draw(11), unet()
    return PipelineProgram({f"{name}.w": draw(WIDTH, WIDTH) for name in "abcde"}, make, tuple("abcde"), made.batch)


def tied() -> PipelineProgram:
    """A table that the first and the last unit read, and a leaf outside of units that code between units reads."""

    def make(unit: Mark) -> Any:
        embed, feed, logits = unit(_embed), unit(_feed), unit(lambda p, x: F.linear(x, p["table"]["w"], p["bias"]))

        def loss_fn(params: Any, batch: Any) -> Any:
            x = embed(params["table"], batch["x"]) * params["scale"]
            for at in range(4):
                x = feed(params["blocks"][str(at)], x) * params["scale"]
            found = logits({"table": params["table"], "bias": params["bias"]}, x)
            return F.cross_entropy(found.flatten(0, 1), batch["y"].flatten())

        return loss_fn

    params = _stack(Draw(10), 4)
    params["table.w"] = params.pop("embed.w")
    params |= {"scale": torch.tensor(0.9), "bias": torch.zeros(VOCAB)}
    del params["head.w"]
    return PipelineProgram(
        params,
        make,
        ("blocks.*",),
        tokens,
        lambda count: (("table.w", (0, -1)), ("scale", tuple(range(count))), ("bias", -1)),
    )


PROGRAMS = {make.__name__: make for make in (stack, glue, dropout, translator, unet, experts, rotary, writing, tied)}
