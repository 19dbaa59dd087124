"""What would have to change for a step to fit: each remedy is what the changed step itself would hold and take."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.foresight.foresee import Foresight, foresee
from fshard.foresight.jobs import Job, job_of
from fshard.foresight.remedies import Remedy, closing, open_changes, remedies

HOST = "pinned_host"
HARDWARE = fs.sim.hardware("h100", memory=1000, communicator=1)
MESH = fs.abstract_mesh((4,), ("data",), device="cuda")
TOGETHER = "those that help, together"
STATE, PARAMS = "optimizer state in host memory", "parameters and state in host memory"


def job(rules: list[Any] | None = None, opt: Any = None, rows: int = 8, **more: Any) -> Job:
    """Four layers, as ``fshard plan`` takes them."""
    params = {f"l{i}": {"w": torch.empty(64, 64, device="meta")} for i in range(4)}

    @fs.unit
    def layer(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ weights["w"]))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for weights in params.values():
            x = layer(weights, x)
        return x.square().mean()

    made = {"model": params, "loss": loss, "batch": torch.empty(rows, 64, device="meta"), "optimizer": opt, **more}
    return job_of("a job", {**made, "rules": rules or [(".*", fs.fsdp("data"))]})


def found(made: Job, hardware: Any = HARDWARE, mesh: Any = MESH, **options: Any) -> tuple[Foresight, dict[str, Remedy]]:
    """What does not fit, and its remedies by their first words."""
    step, batch = made.step(mesh, **options)
    seen = foresee(step, batch, hardware)
    every = [*remedies(seen, step, functools.partial(made.step, mesh, **options))]
    none = any(line.startswith("None of these") for line in closing(seen, every))
    assert none is not any(remedy.enough for remedy in every)
    return seen, {remedy.change.partition(" (")[0].partition(":")[0]: remedy for remedy in every}


def itself(made: Job, mesh: Any = MESH, **options: Any) -> tuple[int, float]:
    """What a changed step holds and takes under the policy that holds least."""
    step, batch = made.step(mesh, **options)
    there = foresee(step, batch, HARDWARE)
    return there.held(there.least), there.least.seconds


@pytest.mark.parametrize(
    ("words", "rule"),
    [(STATE, {"opt_memory_kind": HOST}), (PARAMS, {"memory_kind": HOST, "update_on": "device"})],
)
def test_host_memory_is_what_rules_that_say_so_would_do(words: str, rule: dict[str, Any]) -> None:
    seen, changes = found(job())
    remedy = changes[words]
    assert (remedy.peak_bytes, remedy.seconds) == itself(job([fs.Rule(".*", fs.fsdp("data"), **rule)]))
    assert remedy.peak_bytes < seen.held(seen.least) and (remedy.seconds or 0) > seen.least.seconds


def test_recomputation_is_timed_as_the_step_that_does_it() -> None:
    again = found(job(rows=4096))[1]['remat="all"']
    assert (again.peak_bytes, again.seconds) == itself(job(rows=4096), remat="all")


def heads(rows: int) -> Job:
    """A layer and a head over many classes, whose logits can come in chunks."""
    params = {"l": {"w": torch.empty(64, 64, device="meta")}, "head": torch.empty(4096, 64, device="meta")}

    def loss(params: Any, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(params["head"][y] @ params["l"]["w"])
        return torch.nn.functional.cross_entropy((hidden @ params["head"].t()).flatten(0, 1), y.flatten())

    def chunked(chunks: int) -> Any:
        return lambda params, y: fs.chunked_cross_entropy(
            torch.tanh(params["head"][y] @ params["l"]["w"]), params["head"], y, chunks=chunks
        )

    batch = torch.empty(rows, 4, dtype=torch.long, device="meta")
    given = {"model": params, "loss": loss, "batch": batch, "rules": [(".*", fs.fsdp("data"))], "chunked": chunked}
    made = job_of("a job", given)
    assert isinstance(made, Job)
    return made


def test_chunks_of_logits_are_what_the_step_that_has_them_would_hold() -> None:
    made = heads(256)
    step, batch = made.step(MESH)
    seen = foresee(step, batch, HARDWARE)
    changes = open_changes(made)
    every = {each.change: each for each in remedies(seen, step, functools.partial(made.step, MESH), changes)}
    remedy = every["chunks=8: the head and its loss by chunks of rows (fs.causal_lm_loss)"]
    assert (remedy.peak_bytes, remedy.seconds) == itself(made, chunks=8)
    assert remedy.peak_bytes < 0.4 * seen.held(seen.least)


def test_chunks_are_offered_where_there_are_rows_for_them() -> None:
    assert [len(open_changes(heads(rows))) for rows in (2, 3)] == [2, 3]
    assert len(open_changes(job())) == 2 and not open_changes(job(remat="all"))


@pytest.mark.parametrize("options", [{}, {"compile": "fx"}], ids=str)
def test_fewer_rows_hold_what_as_many_microbatches_do(options: dict[str, Any]) -> None:
    """With graphs, too, whose memory of forwards is told by itself."""
    rows = 4096
    seen = foresee(*job(rows=rows).step(MESH, **options), HARDWARE)
    limit = int(seen.held(seen.least) * 0.7)
    seen, changes = found(job(rows=rows), replace(HARDWARE, memory=limit), **options)
    fewer = next(remedy for remedy in changes.values() if "rows in a microbatch" in remedy.change)
    count = int(fewer.change.partition("accumulate=")[2].split()[0])
    assert fewer.enough and count > 1
    peak, _ = itself(job(rows=rows), accumulate=count, **options)
    assert fewer.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rows", "accumulate", "spec", "cut"),
    [
        (8, 1, fs.P("data"), True),
        (8, 4, fs.P("data"), True),
        (4, 4, fs.P("data"), False),  # one row a microbatch
        (8, 1, fs.P(None, "data"), False),  # samples do not lie along dim 0
    ],
)
def test_rows_are_fewer_where_steps_can_cut_them(rows: int, accumulate: int, spec: fs.P, cut: bool) -> None:
    batch = torch.empty(rows, 4, 64, device="meta")
    changes = found(job(batch=batch, batch_spec=spec, accumulate=accumulate))[1]
    assert any("rows in a microbatch" in remedy.change for remedy in changes.values()) is cut


HSDP = fs.abstract_mesh((2, 4), ("replica", "data"))
INT4 = fs.Wire(reduce={"replica": "int4"}, feedback=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [8, 64, 4096])  # few activations, and many
@pytest.mark.parametrize(("mesh", "wire"), [(MESH, None), (HSDP, None), (HSDP, INT4)])
def test_each_change_lowers_the_peak_and_those_that_help_do_so_most(rows: int, mesh: Any, wire: Any) -> None:
    seen, changes = found(job(rows=rows, wire=wire), mesh=mesh)
    changes = {words: remedy for words, remedy in changes.items() if not words.startswith("the policy")}
    assert all(each.peak_bytes < 0.98 * seen.held(seen.least) for each in changes.values())
    both = changes.pop(TOGETHER, None)
    assert both is None or both.peak_bytes < min(each.peak_bytes for each in changes.values())


def test_what_a_change_would_do_under_its_own_policy_is_found() -> None:
    """Another policy may hold least then: none is said not to fit that would."""
    made = job(rows=64, wire=INT4)
    peak, _ = itself(made, HSDP, accumulate=32)
    fewer = next(
        remedy
        for remedy in found(made, replace(HARDWARE, memory=int(1.03 * peak)), HSDP)[1].values()
        if remedy.change.startswith(("2 of 64", "4 of 64", "8 of 64"))
    )
    assert fewer.enough


def test_what_is_in_host_memory_already_is_no_remedy_and_the_rest_helps_together() -> None:
    changes = found(job([fs.Rule(".*", fs.fsdp("data"), memory_kind=HOST)], rows=4096))[1]
    assert not {STATE, PARAMS} & {*changes} and TOGETHER in changes


def test_parameters_follow_their_state() -> None:
    there = [fs.Rule(".*", fs.fsdp("data"), opt_memory_kind=HOST)]
    changes = found(job(there, rows=4))[1]
    moved = [fs.Rule(".*", fs.fsdp("data"), memory_kind=HOST, update_on="device")]
    assert STATE not in changes and changes[PARAMS].peak_bytes == itself(job(moved, rows=4))[0]


def test_more_ranks_are_those_that_shard() -> None:
    """Along an axis of replicas they hold as much each, and along one that cuts compute they run another program."""
    wide = fs.abstract_mesh((2, 32), ("replica", "data"))
    peak, _ = itself(job(rows=4), wide)
    changes = found(job(rows=4), replace(HARDWARE, memory=peak), HSDP)[1]
    ranks = next(remedy for words, remedy in changes.items() if "ranks" in words)
    assert ranks.change.startswith("64 ranks, data=32") and ranks.peak_bytes == peak


def test_axes_that_cut_compute_are_not_scaled() -> None:
    """With more ranks along them each would run another program."""
    mesh = fs.abstract_mesh((2, 4), ("tp", "data"))
    cut = [fs.Rule(".*", fs.P(("data",), "tp"), compute=fs.P(None, "tp"))]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return sum((x @ leaf["w"]).square().mean() for leaf in params.values())  # type: ignore[return-value]

    made = job(cut, loss=loss, batch_spec=fs.P("data"))
    seen, changes = found(made, mesh=mesh)
    assert [*seen.scaling] == [2, 4, 8] and not any("tp=4" in remedy.change for remedy in changes.values())
    for size, seconds in zip((1, 2, 4), seen.scaling.values(), strict=True):
        step, batch = made.step(fs.abstract_mesh((2, size), ("tp", "data")))
        there = foresee(step, batch, HARDWARE)
        same = next(each for each in there.candidates if each.policy == seen.chosen.policy)
        assert seconds == pytest.approx(same.seconds)


def test_leaves_that_are_in_host_memory_stay_as_they_are() -> None:
    """Others go there beside them."""
    rules = [fs.Rule("l0.*", fs.fsdp("data"), memory_kind=HOST), (".*", fs.fsdp("data"))]
    seen, changes = found(job(rules))
    moved = [rules[0], fs.Rule(".*", fs.fsdp("data"), memory_kind=HOST, update_on="device")]
    assert (changes[PARAMS].peak_bytes, changes[PARAMS].seconds) == itself(job(moved))


def test_frozen_leaves_may_be_there_and_state_that_is_sharded_further_may() -> None:
    frozen = [fs.Rule("l[012].*", fs.fsdp("data"), trainable=False), (".*", fs.fsdp("data"))]
    seen, changes = found(job(frozen))
    there = [fs.Rule("l[012].*", fs.fsdp("data"), trainable=False, memory_kind=HOST)]
    there += [fs.Rule(".*", fs.fsdp("data"), memory_kind=HOST, update_on="device")]
    assert (changes[PARAMS].peak_bytes, changes[PARAMS].seconds) == itself(job(there))
    changes = found(job([fs.Rule(".*", fs.P(), opt=fs.fsdp("data"))]))[1]
    assert STATE in changes and PARAMS not in changes


def test_measured_costs_say_nothing_of_other_steps() -> None:
    costs = fs.sim.Costs({("forward", ""): 1e-3, ("backward", ""): 2e-3, ("update", ""): 1e-3})
    seen, changes = found(job(), replace(HARDWARE, costs=costs))
    assert all(remedy.seconds is None and "a step of" not in str(remedy) for remedy in changes.values())
    assert "in updates there" not in "".join(closing(seen, [*changes.values()]))


def test_what_no_change_mends_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import torch\ndef make():\n    return {'model': {'w': torch.empty(64, 64, device='meta')}, 'batch': "
        "torch.empty(8, 64, device='meta'), 'loss': lambda params, x: (x @ params['w']).square().mean()}\n"
    )
    flags = ["--mesh", "2", "--communicator", "1", "--html", str(tmp_path / "page.html")]
    for memory, said in (("1K", True), ("100M", False)):
        main(["plan", f"{path}:make", "--memory", memory, *flags])
        printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
        for words in ("None of these is enough", "Host memory: 47.7 GiB a second to a rank's host"):
            assert (words in printed) is (words.replace("'", "&#x27;") in page) is said
    assert main(["plan", f"{path}:make", "--memory", "60K", *flags]) == 1
    printed = capsys.readouterr().out
    assert "which fits; a step of" in printed and "None of these" not in printed
