"""``fs.sim.search``: which meshes are tried, what comes first, what is refused; and ``fshard plan --search``."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.foresight.foresee import task_of
from fshard.foresight.jobs import Job
from fshard.foresight.search import _fastest, _timed, shapes
from fshard.schedule.auto import tried
from fshard.schedule.build import Builds
from fshard.schedule.candidates import candidates
from tests.foresight.test_plan import JOB

LAYERS, WIDTH = 3, 512
FAST = fs.sim.hardware("h100", link="nvlink4", per_host=8)
SLOW = fs.sim.hardware("h100", link="eth1", inside="nvlink4", per_host=8)


@fs.unit
def compute(layer: Any, x: Tensor) -> Tensor:
    """One layer."""
    return torch.tanh(x @ layer["w"]).sin().cos()


def job(depth: int = LAYERS, **more: Any) -> dict[str, Any]:
    """Some layers without weights."""
    layers = {f"l{i}": {"w": torch.empty(WIDTH, WIDTH, device="meta")} for i in range(depth)}

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params.values():
            x = compute(layer, x)
        return x.square().mean()

    return {"model": layers, "loss": loss, "batch": torch.empty(64, WIDTH, device="meta"), **more}


def test_every_option_is_what_the_mesh_alone_gives() -> None:
    meshes = [fs.abstract_mesh((16,), ("data",)), fs.abstract_mesh((2, 8), ("replica", "data"))]
    together = fs.sim.search(job(), meshes, SLOW)
    alone = [option for mesh in meshes for option in fs.sim.search(job(), [mesh], SLOW).options]
    key = lambda option: (option.shape, str(option.remat))  # noqa: E731
    assert sorted(map(key, together.options)) == sorted(map(key, alone))
    found = {key(option): option for option in alone}
    for option in together.options:
        assert option.seconds == found[key(option)].seconds
        assert option.peak_bytes == found[key(option)].peak_bytes
    assert [o.rows_per_s for o in together.options] == sorted((o.rows_per_s for o in together.options), reverse=True)


@pytest.mark.parametrize(
    ("spec", "parts", "shared"), [(fs.P("data"), 4, 1), (fs.P("data", "cp"), 4, 2), (fs.P(None, ("data", "cp")), 1, 8)]
)
def test_rows_are_those_of_dim_0_however_many_ranks_share_them(spec: Any, parts: int, shared: int) -> None:
    mesh, batch = fs.abstract_mesh((4, 2), ("data", "cp")), torch.empty(3, 16, WIDTH, device="meta")
    rules = [fs.Rule(".*", fs.fsdp("data"))] if "cp" not in spec.axes else None
    option = fs.sim.search(job(batch=batch, batch_spec=spec, rules=rules), [mesh], FAST, remats=[None]).best
    assert (option.rows_per_s, option.shared) == (pytest.approx(3 * parts / option.seconds), shared)


@pytest.mark.parametrize("step", [False, True], ids=["job", "own step"])
@pytest.mark.parametrize("make", [fs.abstract_mesh, fs.virtual_mesh])
def test_jobs_may_use_the_device_of_their_mesh(make: Any, step: bool) -> None:
    """Whatever has it: devices that are foreseen need not be here."""

    def made(mesh: fs.Mesh) -> Any:
        batch = torch.zeros(8, WIDTH, device=mesh.device)
        loss = lambda params, x: (x @ params["l0"]["w"] + torch.arange(1.0, device=mesh.device)).sum()  # noqa: E731
        given = job(1, batch=batch, loss=loss)
        if not step:
            return given
        plan = fs.make_plan(given["model"], mesh, [(".*", fs.fsdp("data"))], batch=P("data"))
        return fs.make_train_step(loss, fs.optim.adamw(1e-3), plan), batch

    mesh = make((4,), ("data",))
    best = fs.sim.search(made, [mesh], FAST).best
    assert best.mesh is mesh and best.remat is None
    assert fs.sim.search(made, 4, FAST).best.mesh.device.type == "cpu"


def test_longer_rows_count_the_more() -> None:
    """The same work, in more rows or in longer ones: what takes less comes first."""
    batch = torch.empty(4, 512, WIDTH, device="meta")
    made = lambda mesh: job(batch=batch, batch_spec=fs.P(*mesh.axis_names))  # noqa: E731
    meshes = [fs.abstract_mesh(sizes, ("data", "cp")) for sizes in ((16, 1), (2, 8), (8, 2))]
    found = fs.sim.search(made, meshes, SLOW, remats=[None]).options
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert all(each.shared * each.rows_per_s * each.seconds == pytest.approx(64) for each in found)


def test_a_slow_link_between_hosts_prefers_replicas_or_secondary_shards() -> None:
    best = fs.sim.search(job(), 16, SLOW, remats=[None]).best
    assert len(best.mesh.axis_names) == 2, best
    one = fs.sim.search(job(), [fs.abstract_mesh((16,), ("data",))], SLOW, remats=[None]).best
    assert best.seconds < one.seconds


def test_recomputation_where_nothing_else_fits() -> None:
    batch = torch.empty(2**15, WIDTH, device="meta")
    free = fs.sim.search(job(batch=batch), 8, FAST)
    plain = next(o for o in free.options if o.remat is None and o.shape == "data=8")
    again = next(o for o in free.options if o.remat == "all" and o.shape == "data=8")
    assert again.peak_bytes < plain.peak_bytes
    tight = fs.sim.hardware("h100", link="nvlink4", memory=(again.peak_bytes + plain.peak_bytes) // 2)
    found = fs.sim.search(job(batch=batch), [fs.abstract_mesh((8,), ("data",))], tight)
    assert [(o.remat, o.fits) for o in found.options] == [("all", True), (None, False)]
    assert "too much" in str(found) and "too much" in found._repr_html_()


def test_recomputation_by_rules() -> None:
    rules = [("**", "all")]
    found = fs.sim.search(job(), 8, FAST, remats=[rules])
    assert {str(option.remat) for option in found.options} == {str(rules)}
    same = fs.sim.search(job(), 8, FAST, remats=["all"])
    assert [o.peak_bytes for o in found.options] == [o.peak_bytes for o in same.options]


def test_secondary_shards_are_tried_where_two_axes_shard() -> None:
    mesh = fs.abstract_mesh((4, 8), ("host", "local"))
    best = fs.sim.search(job(6), [mesh], SLOW, remats=[None]).best
    assert str(best.policy.reshard) == 'secondary("local")' or best.policy.reshard is False, best


def test_a_function_of_the_mesh_and_what_it_refuses() -> None:
    def make(mesh: fs.Mesh) -> Any:
        axis = "data" if "replica" not in mesh.axis_names else "nothing"
        return job(rules=[(".*", fs.fsdp(axis))])

    found = fs.sim.search(make, shapes(8, 8), FAST, remats=[None])
    assert found.best.shape == "data=8"
    assert found.refused and all("nothing" in why for why in found.refused.values())
    with pytest.raises(PlanError, match="no mesh can be used"):
        fs.sim.search(job(rules=[(".*", fs.fsdp("nothing"))]), 8, FAST)


@pytest.mark.parametrize(
    "given, words",
    [
        ((3, 8, FAST), "search returned 3"),
        ((job(), [], FAST), "no mesh is given"),
        ((job(), 8, "h100"), r"hardware"),
    ],
)
def test_bad_input(given: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fs.sim.search(*given)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    flags = ["plan", f"{path}:make", "--mesh", "16", "--link", "eth1", "--inside", "nvlink4", "--search"]
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["search"][0]
    assert first["mesh"] == ",".join(f"{name}={size}" for name, size in found["mesh"].items())
    assert (first["seconds"], first["policy"]) == (pytest.approx(found["seconds"]), found["policy"])
    assert main(flags) == 0
    assert "Meshes of 16 ranks" in capsys.readouterr().out


def plain_best(found: Any, held: Any, limit: float) -> Any:
    """What ``_fastest`` is defined to be: all policies are weighed, then compared."""
    fits = [each for each in found if held(each) <= limit]
    return min(fits, key=lambda each: (each.seconds, held(each))) if fits else min(found, key=held)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_the_fastest_is_that_of_all_policies_within_any_limit(sizes: tuple[int, ...]) -> None:
    mesh = fs.abstract_mesh(sizes, ("data", "local")[: len(sizes)])
    step, batch = Job(**job(accumulate=2)).step(mesh)
    task = task_of(step, step.trace(batch), step.plan)
    builds = Builds()
    # Without costs all policies are equally fast.
    for costs in (SLOW.of(task, step.plan), FAST.of(task, step.plan), fs.sim.Costs()):
        runs = _timed(task, costs, builds)
        found = [tried(task, policy, costs)[0] for policy in candidates(task, "deferred")]
        for sign in (1, -1):
            held = lambda each: sign * each.memory.peak_bytes  # noqa: B023, E731 - the first policies hold least
            sizes_of = sorted({held(each) for each in found})
            assert len(sizes_of) > 5
            few = sizes_of[:: len(sizes_of) // 4]
            for limit in (-math.inf, *few, *(size - 1 for size in few), math.inf):
                assert _fastest(task, runs, held, limit) == plain_best(found, held, limit)


def test_the_command_traces_a_program_once_for_each_kind_of_recomputation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        JOB + "\n\nplain = loss\n\ndef loss(params, x):\n    print('traced')\n    return plain(params, x)\n"
    )
    assert main(["plan", f"{path}:make", "--mesh", "16", "--search", "--json"]) == 0
    assert capsys.readouterr().out.count("traced") == 2  # with and without
