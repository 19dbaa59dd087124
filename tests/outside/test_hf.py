"""Models of Hugging Face transformers train sharded as in one process, and ``README.md`` says so of each."""

from typing import Any

import pytest
import torch

import fshard as fs
from tests.outside import hf_table
from tests.outside.hf_models import CASES
from tests.outside.hf_runs import run
from tests.shared.workers import Pools

pytest.importorskip("transformers")

QUICK = ("Llama", "T5", "Mixtral")
"""A decoder, an encoder with a decoder and tied weights, and experts: what the default suite has time for."""


def several(names: tuple[str, ...], compile: str | None, options: dict[str, Any]) -> list[Any]:
    """On each rank: some models, one after the other."""
    return [run(name, compile, **options) for name in names]


def check(
    pool: Pools | None, names: tuple[str, ...], compile: str | None = None, world: int = 2, **options: Any
) -> None:
    """No rank found anything wrong, and without options the page says what every rank found.

    Without a pool, ranks are virtual: each of a pool would import ``transformers``.
    """
    page = hf_table.rows()
    if pool is None:
        ranks = fs.virtual_mesh((world,), ("shard",)).run(several, names, compile, options)
    else:
        ranks = pool(world).run(several, names, compile, options, timeout=150.0)
    for results in ranks:
        found = {name: outcome.problems for name, outcome in zip(names, results, strict=True)}
        assert not any(found.values()), found
        for name, outcome in zip(names, results, strict=True):
            model, units, eager, _, graphs = page[name]
            assert (model, units) == (f"`{CASES[name].model}`", hf_table.units(outcome))
            if compile is None:
                assert eager == hf_table.verdict(outcome)
                continue
            ran = hf_table.graphs(outcome).split(";")[0]  # behind it torch's words for why some units are none
            assert ran == graphs.split(";")[0] if not options else ("graphs" in ran) == ("graphs" in graphs)


@pytest.mark.long
def test_models_equal_one_process() -> None:
    check(None, QUICK)


@pytest.mark.long
def test_graphs_of_models_equal_one_process() -> None:
    check(None, QUICK[:1], "fx")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{"schedule": fs.Policy(reshard=False, prefetch=2)}, {"accumulate": 2}, {}])
def test_every_model_equals_one_process(pool: Pools, name: str, options: dict[str, Any]) -> None:
    check(pool, (name,), **options)


def test_the_table_has_a_line_for_every_model() -> None:
    page = hf_table.rows()
    assert list(page) == list(CASES)
    for name, (model, units, eager, gaps, graphs) in page.items():
        assert model == f"`{CASES[name].model}`" and units.startswith("`"), name
        assert all(cell.startswith("works") for cell in (eager, graphs)), name
        assert all(float(gap) <= 1e-5 for gap in gaps.split(", ")), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"remat": "all"}])
def test_graphs_of_every_model_equal_one_process(pool: Pools, name: str, options: dict[str, Any]) -> None:
    check(pool, (name,), "fx", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "T5", "Mixtral", "ViT"])
def test_models_on_four_ranks(pool: Pools, name: str) -> None:
    check(pool, (name,), world=4)


@pytest.mark.long
def test_weights_take_no_memory_and_buffers_are_there() -> None:
    with fs.empty_weights():
        module = CASES["Llama"].build()
    assert {leaf.device.type for leaf in module.parameters()} == {"meta"}
    whole = dict(CASES["Llama"].build().named_buffers())
    assert whole and all(torch.equal(buffer, whole[path]) for path, buffer in module.named_buffers())
