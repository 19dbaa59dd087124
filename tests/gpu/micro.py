"""``benchmarks/gpu_micro.py`` in the process of a stage."""

import pytest

from tests.gpu.ladder import FOLDER
from tests.gpu.place import Found, Place


def run(place: Place, found: Found) -> None:
    """Measure, and keep each number when it is known."""
    with pytest.MonkeyPatch.context() as change:
        change.syspath_prepend(FOLDER)
        import gpu_micro

        if place.dry:
            found.leave("figures: tiny products on the CPU")
        with found.trying("micro-benchmarks"):
            for what, numbers in gpu_micro.rows():
                found.number(what, numbers)
                texts = [f"{what}, {name}: {value}" for name, value in numbers.items() if isinstance(value, str)]
                found.check(place.dry or not texts, "; ".join(texts))
                for text in texts if place.dry else ():
                    found.leave(text)
