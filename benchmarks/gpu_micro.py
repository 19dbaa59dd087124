"""What decides two designs on a GPU: memory-bound work beside products, and products in float8 with their rounding.

It prints a line of JSON for each number: milliseconds of AdamW and of the norm of a block's gradient alone, and beside
the products of a block on a stream of its own; and of a product in bf16, by rows in float8, and of the rounding.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import arguments
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Numbers = tuple[str, dict[str, float | str]]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def bench(device: str) -> Callable[[Callable[[], object]], float]:
    """What times a function, in milliseconds. On a GPU it is Triton's, which clears the cache between calls."""
    if device == "cuda":
        from triton.testing import do_bench

        return lambda call: float(do_bench(call))

    def once(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)

    return once


def overlap(device: str, width: int, tokens: int) -> Iterator[Numbers]:
    """AdamW and a norm, alone and beside the products of a transformer block."""
    ms, count = bench(device), 12 * width * width

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=BF16)

    x, wide = draw(tokens, width), draw(tokens, 4 * width)
    weights = draw(3 * width, width), draw(width, width), draw(4 * width, width), draw(width, 4 * width)
    param, grad, mean, square = (draw(count) for _ in range(4))
    square.abs_()
    step = torch.ones((), device=device, dtype=torch.float32)
    rates = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    side = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]

    def block() -> None:
        for weight in weights:
            F.linear(x if weight.shape[1] == width else wide, weight)

    def adamw() -> None:
        args = [param], [grad], [mean], [square], [], [step]
        torch._fused_adamw_(*args, **rates, amsgrad=False, maximize=False)

    def norm() -> None:
        torch._foreach_norm([grad], 2, dtype=torch.float32)

    def beside(work: Callable[[], None]) -> None:
        if side is None:
            block(), work()
            return
        now = torch.cuda.current_stream()
        side.wait_stream(now)
        with torch.cuda.stream(side):
            work()
        block()
        now.wait_stream(side)

    for name, work in (("adamw", adamw), ("norm", norm)):
        yield name, {"block": ms(block), "alone": ms(work), "beside": ms(lambda work=work: beside(work))}


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8 with a scale a row."""
    scale = (x.abs().amax(1, keepdim=True).float() / 448).clamp_min(1e-12)
    return (x.float() / scale).clamp(-448, 448).to(FP8), scale


def attempted(measure: Callable[[], float]) -> float | str:
    """A number, or why there is none: PyTorch 2.11 has no products by rows on a CPU."""
    try:
        return measure()
    except RuntimeError as error:
        return str(error).splitlines()[0]


def products(device: str, width: int, tokens: tuple[int, ...]) -> Iterator[Numbers]:
    """Products of a transformer block, in bf16 and by rows in float8, and the rounding of their inputs."""
    ms, cast = bench(device), torch.compile(rounded, dynamic=False) if device == "cuda" else rounded
    for count in tokens:
        for n, k in ((3 * width, width), (4 * width, width), (width, 4 * width)):
            a, b = (torch.randn(rows, k, device=device, dtype=BF16) for rows in (count, n))
            (qa, sa), (qb, sb) = cast(a), cast(b)
            right = sb.t().contiguous()

            def float8(qa: Any = qa, sa: Any = sa, qb: Any = qb, right: Any = right) -> Tensor:
                fast = device == "cuda"
                return torch._scaled_mm(qa, qb.t(), scale_a=sa, scale_b=right, out_dtype=BF16, use_fast_accum=fast)

            numbers = {
                "bf16": ms(lambda a=a, b=b: F.linear(a, b)),
                "float8": attempted(lambda float8=float8: ms(float8)),
                "rounding": ms(lambda a=a: cast(a)),
                "transpose": ms(lambda qb=qb: qb.t().contiguous()),
            }
            yield f"{count} x {k} by {n}", numbers


def rows() -> Iterator[Numbers]:
    """All numbers, as they come; tiny ones, without meaning, on a CPU."""
    cuda = torch.cuda.is_available()
    device, width = ("cuda", 2048) if cuda else ("cpu", 32)
    yield from overlap(device, width, 4096 if cuda else 64)
    yield from products(device, width, (4096, 16384) if cuda else (64,))


def main() -> int:
    """Print them."""
    arguments(__doc__)
    for what, numbers in rows():
        print(json.dumps({"what": what, **numbers}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
