"""Training in stages equals training in one plain process: losses, norms of gradients, and parameters."""

import functools
from typing import Any

import pytest
import torch

import fshard as fs
from tests.pipeline.staged_runs import StagedRun, problems, staged
from tests.shared import parity

V = {"chunks": 2, "placement": "v"}
LOOP = {"chunks": 2}
GRID = {"sizes": (2, 2)}
WHOLE = (fs.Rule(".*", fs.fsdp("data"), align="leaf"),)
FROZEN = (
    fs.Rule(r"head\.w|blocks\.3\..*", fs.fsdp("data"), trainable=False),
    (".*", fs.fsdp("data")),
)
sgd = functools.partial(fs.optim.sgd, 0.1, momentum=0.9)


def muon() -> Any:
    """Whole matrices."""
    return fs.optim.partition([(r"blocks.*", fs.optim.muon(0.02)), (r".*", fs.optim.adamw(1e-3))])


PROGRAMS = {
    "stack": StagedRun(sizes=(4, 1)),
    "glue": StagedRun("glue", (3, 1)),
    "translator": StagedRun("translator", (4, 1)),
    "unet": StagedRun("unet", stages=LOOP, opt=sgd),
    "experts": StagedRun("experts", (3, 1), opt=sgd),
    "rotary": StagedRun("rotary", **GRID),
    "writing": StagedRun("writing", (3, 1), stages={"cut": (1, 1, 3)}, opt=sgd),
    "tied": StagedRun("tied", (3, 1), opt=sgd),
}
OTHERS = {
    "one stage": StagedRun(sizes=(1, 1)),
    "writing, other cuts": StagedRun("writing", (2, 1), opt=sgd),
    "writing, every unit": StagedRun("writing", (5, 1), opt=sgd),
    "translator, loop": StagedRun("translator", stages=LOOP),
    "experts, loop": StagedRun("experts", stages=LOOP, opt=sgd),
    "unet, all stages": StagedRun("unet", (6, 1), accumulate=8),
    "tied, grid": StagedRun("tied", (2, 3), opt=sgd),
    "tied, loop": StagedRun("tied", stages=LOOP, opt=sgd),
}
ORDERS = {
    "gpipe": StagedRun("tied", policy={"pipeline": "gpipe"}, opt=sgd),
    "1f1b": StagedRun(sizes=(3, 1), accumulate=8, policy={"pipeline": "1f1b"}),
    "interleaved": StagedRun("tied", stages=LOOP, policy={"pipeline": "interleaved"}, opt=sgd),
    "three microbatches": StagedRun("unet", accumulate=3, stages=LOOP),
    "fewer than stages": StagedRun(sizes=(4, 1), accumulate=2),
    "one microbatch": StagedRun("tied", (3, 1), accumulate=1, opt=sgd),
}
PARTED = {
    "zb_h1": StagedRun("tied", policy={"pipeline": "zb_h1"}, opt=sgd),
    "zbv": StagedRun("tied", stages=V, policy={"pipeline": "zbv"}, opt=sgd),
    "zbv, skips": StagedRun("unet", stages=V, opt=sgd),
    "zbv, full": StagedRun("tied", (2, 2), stages=V, policy={"accumulation": "full"}, opt=sgd),
    "dualpipev": StagedRun("experts", stages=V, policy={"pipeline": "dualpipev"}, opt=sgd),
    "remat": StagedRun(step={"remat": "all"}, policy={"pipeline": "zb_h1"}),
    "graphs": StagedRun("tied", (2, 2), policy={"pipeline": "zb_h1"}, step={"compile": "fx"}, opt=sgd),
    "graphs, zbv": StagedRun("translator", stages=V, step={"compile": "fx"}),
    "graphs, remat": StagedRun(
        "experts", policy={"pipeline": "zb_h1"}, step={"compile": "fx", "remat": "all"}, opt=sgd
    ),
}
OPTIONS = {
    "hsdp": StagedRun("tied", (2, 2, 2), ("stage", "replica", "data"), accumulate=3, opt=sgd),
    "zero1": StagedRun("tied", (2, 2), rules=(fs.Rule(".*", fs.P(), opt=fs.P(flat="data")),), opt=sgd),
    "replicated": StagedRun(rules=((".*", fs.P()),), **GRID),
    "remat": StagedRun("experts", step={"remat": "all"}, opt=sgd, **GRID),
    "graphs": StagedRun("translator", step={"compile": "fx"}),
    "graphs, many under way": StagedRun(
        sizes=(4, 1), accumulate=8, step={"compile": "fx"}, policy={"pipeline": "gpipe"}
    ),
    "graphs, loop, remat": StagedRun("experts", stages=LOOP, step={"compile": "fx", "remat": "all"}, opt=sgd),
    "in backward": StagedRun("tied", (2, 2), policy={"update": "in_backward"}, step={"clip_norm": None}, opt=sgd),
    "full": StagedRun("tied", (2, 2), stages=LOOP, policy={"accumulation": "full"}, opt=sgd),
    "kept": StagedRun(policy={"reshard": False}, **GRID),
    "some kept": StagedRun(policy={"reshard": fs.keep(last=1)}, **GRID),
    "some kept, by name": StagedRun(policy={"reshard": fs.keep("_feed(blocks.0)", "_logits(head.w)")}, **GRID),
    "secondary": StagedRun(
        sizes=(2, 2, 2),
        axes=("stage", "far", "data"),
        rules=((".*", fs.fsdp(("far", "data"))),),
        policy={"reshard": fs.secondary("data")},
        accumulate=3,
    ),
    "no prefetch": StagedRun(policy={"prefetch": 0, "reduces": 0}, **GRID),
    "prefetch 1": StagedRun(policy={"prefetch": 1, "reduces": 1}, **GRID),
    "prefetch 3": StagedRun(policy={"prefetch": 3, "reduces": 4}, **GRID),
    "debug": StagedRun("tied", step={"debug": True}, opt=sgd, **GRID),
    "norms": StagedRun(step={"norms": "groups", "skip_norm": 100.0}, **GRID),
    "host": StagedRun("tied", rules=(fs.Rule(".*", fs.fsdp("data"), memory_kind="unpinned_host"),), opt=sgd, **GRID),
    "clip by rules": StagedRun("tied", step={"clip_norm": (("blocks.*", 0.1), (".*", 0.2))}, opt=sgd, **GRID),
    "not donated": StagedRun(step={"donate": False}),
}


def param(cases: dict[str, StagedRun]) -> Any:
    """The cases, with their names."""
    return pytest.mark.parametrize("run", cases.values(), ids=cases.keys())


@pytest.mark.sample(2)
@param(PROGRAMS)
def test_programs(run: StagedRun) -> None:
    """Edges over stages, skips, several outputs, masks, tables, writes in place and tied leaves."""
    assert problems(run) == []


@pytest.mark.slow
@param(OTHERS)
def test_other_cuts(run: StagedRun) -> None:
    """The same programs, cut in other ways."""
    assert problems(run) == []


@pytest.mark.sample(4)
@param(ORDERS)
def test_orders(run: StagedRun) -> None:
    """Orders and numbers of microbatches."""
    assert problems(run) == []


@pytest.mark.sample(4)
@param(PARTED)
def test_parted_backwards(run: StagedRun) -> None:
    """Backwards in two parts. A first stage has no first part: all of its backward runs in the second."""
    assert problems(run) == []


@pytest.mark.sample(8)
@param(OPTIONS)
def test_options(run: StagedRun) -> None:
    """What steps and plans without stages have, too."""
    assert problems(run) == []


ROUNDED = parity.Near(1e-2, 2e-2, 2e-2)
ALONE = {
    "bf16": (StagedRun("tied", plan={"precision": fs.Precision(compute=torch.bfloat16)}, **GRID), ROUNDED),
    "float16": (
        StagedRun(
            "tied",
            plan={"precision": fs.Precision(compute=torch.float16)},
            step={"loss_scale": fs.LossScale(initial=1024.0)},
            **GRID,
        ),
        ROUNDED,
    ),
    "int8": (StagedRun("tied", plan={"wire": fs.Wire(reduce="int8")}, opt=sgd, **GRID), ROUNDED),
    "muon": (StagedRun(rules=WHOLE, opt=muon, **GRID), parity.Near()),
    "every": (StagedRun("tied", opt=lambda: fs.optim.every(2, sgd()), **GRID), parity.Near()),
    "frozen stage": (StagedRun(sizes=(3, 1), rules=FROZEN, stages={"cut": (2, 2, 2)}), parity.Near()),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("run", "near"), ALONE.values(), ids=ALONE.keys())
def test_like_without_stages(run: StagedRun, near: parity.Near) -> None:
    """Formats and optimizers whose results differ from a plain process, as they do without stages."""
    alone = run.with_(sizes=run.sizes[1:], axes=run.axes[1:], stages={}, policy={})
    assert parity.differences(staged(run), staged(alone)[0], near) == []


def test_dropout() -> None:
    """Units that draw numbers run, alike on all ranks; their draws are not those of a model without stages."""
    runs = staged(StagedRun("dropout", **GRID))
    assert all(run.like(runs[0]) for run in runs) and not [text for run in runs for text in run.problems]
    assert runs[0].losses[-1] < 4.0


def test_given_microbatches() -> None:
    """``fs.Microbatches`` of equal shapes give what the batch gives that they are cut from."""
    run = StagedRun(accumulate=2)
    mesh = fs.virtual_mesh(run.sizes, run.axes)

    def rank() -> tuple[float, float]:
        from tests.pipeline.staged_runs import made

        found = []
        for cut in (False, True):
            step, _, state, batch = made(run, mesh)
            rows = batch(0)
            parts = [{name: x[half * 12 : half * 12 + 12] for name, x in rows.items()} for half in range(2)]
            found.append(step(state, fs.Microbatches(tuple(parts)) if cut else rows)[1].loss.item())
        return found[0], found[1]

    assert all(one == other for one, other in mesh.run(rank))
