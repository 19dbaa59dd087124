"""Wire formats in a search: what is tried, what comes first, what packing takes, and what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.foresight.foresee import foresee, task_of
from fshard.foresight.hardware import hardware
from fshard.foresight.packing_time import packing_seconds
from fshard.runtime.comm.packing import packed, unpack
from fshard.runtime.engine.activations import Activations
from fshard.schedule import build, simulate
from fshard.schedule.build import Builds
from fshard.schedule.candidates import candidates
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import COMPUTE_KINDS
from fshard.sharding.wire import WireFormat
from tests.foresight.test_plan import JOB
from tests.foresight.test_search import FAST, LAYERS, SLOW, job
from tests.training.wire_cases import CASES, REPLICAS, Case, batch, loss_fn, mesh_of, plan_of

EXACT = fs.Wire()
INT8 = fs.Wire("int8", "int8")
ONE = fs.abstract_mesh((16,), ("data",))
HOSTS = fs.abstract_mesh((2, 8), ("replica", "data"))
LARGE: dict[str, Any] = {
    "model": {f"l{i}": {"w": torch.empty(4096, 4096, device="meta")} for i in range(4)},
    "batch": torch.empty(8192, 4096, device="meta"),
}


def step_on(mesh: fs.Mesh, wire: fs.Wire, **options: Any) -> tuple[fs.types.TrainStep, Tensor]:
    """The step of the job on a mesh, and its batch."""
    made = job()
    batched, units = P(mesh.axis_names), tuple(made["model"])
    plan = fs.make_plan(made["model"], mesh, [(".*", fs.fsdp("data"))], batch=batched, units=units, wire=wire)
    return fs.make_train_step(made["loss"], fs.optim.adamw(1e-3), plan, **options), torch.zeros(64, 512)


def test_exact_transfers_alone_are_the_default() -> None:
    found = fs.sim.search(job(), [ONE, HOSTS], SLOW)
    assert all(option.wire == EXACT for option in found.options)
    assert "wire" not in found.head and "exact" not in str(found)
    both = fs.sim.search(job(), [ONE, HOSTS], SLOW, wires=[None, "int8"])
    assert [option for option in both.options if option.wire == EXACT] == found.options
    assert "wire" in both.head and "gather='int8', reduce='int8'" in str(both) and "exact" in both._repr_html_()
    assert {len(row) for row in both.table()} == {len(both.head)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["int8", "int4", "bf16", "fp8_e4m3"])
def test_a_format_is_faster_over_a_slow_link_and_no_use_over_a_fast_one(name: str) -> None:
    slow = fs.sim.search(job(**LARGE), [ONE], SLOW, remats=[None], wires=[None, name])
    assert [option.wire for option in slow.options] == [fs.Wire(name, name), EXACT]
    bits = {"int8": 8.125, "fp8_e4m3": 8.125, "int4": 4.125, "bf16": 16}[name]
    ratio = slow.options[0].seconds / slow.options[1].seconds
    assert bits / 32 - 0.01 < ratio < bits / 32 + 0.1
    assert slow.options[0].exposed < slow.options[1].exposed
    fast = fs.sim.search(job(**LARGE), [ONE], FAST, remats=[None], wires=[None, name])
    assert fast.best.wire == EXACT, fast
    assert fast.options[1].rows_per_s > 0.5 * fast.best.rows_per_s


def test_an_option_is_what_its_plan_and_step_are() -> None:
    for option in fs.sim.search(job(), [ONE, HOSTS], SLOW, remats=[None], wires=[None, "int8"]).options:
        gpus = fs.abstract_mesh(option.mesh.sizes, option.mesh.axis_names, device="cuda")
        step, rows = step_on(gpus, option.wire, schedule=option.policy)
        trace = step.trace(rows)
        seen = foresee(step, rows, SLOW)
        assert seen.chosen.policy == option.policy
        assert seen.peak_bytes == option.peak_bytes and seen.simulation.seconds == option.seconds
        assert seen.chosen.memory == trace.footprint
        assert str(seen.schedule) == str(trace.schedule)
        moves = {(move.kind, group.name): move for group in trace.schedule.groups for move in group.transfers}
        sent: Counter[str] = Counter()
        for op in trace.schedule:
            if (op.kind, op.target) in moves:
                sent[moves[op.kind, op.target].axes] += moves[op.kind, op.target].sent
        assert dict(sent) == seen.simulation.sent_by_axes
        assert {move.wire for move in moves.values()} == ({"int8/256"} if option.wire == INT8 else {""})


def test_what_feedback_keeps_is_foreseen() -> None:
    wires = (EXACT, fs.Wire(reduce={"replica": "int4"}, feedback=True))
    exact, kept = (foresee(*step_on(HOSTS, wire), SLOW).state_bytes for wire in wires)
    assert kept == exact + LAYERS * 512 * 512 // 8 * 4  # float32, as large as what a rank updates


def test_a_name_keeps_sums_over_many_replicas_exact() -> None:
    wide = fs.abstract_mesh((16, 2), ("replica", "data"))
    found = fs.sim.search(job(), [HOSTS, wide], SLOW, remats=[None], wires=["int8"])
    assert {o.shape: o.wire for o in found.options} == {
        "replica=2,data=8": INT8,
        "replica=16,data=2": fs.Wire("int8", {"data": "int8"}),
    }
    given = fs.sim.search(job(), [HOSTS, wide], SLOW, remats=[None], wires=[INT8])
    assert [o.shape for o in given.options] == ["replica=2,data=8"]
    assert "16 replicas would send" in given.refused["replica=16,data=2, gather='int8', reduce='int8'"]


def test_formats_of_one_axis_and_of_rules() -> None:
    sums = fs.Wire(reduce={"replica": "int4"}, feedback=True)
    product = fs.Wire(reduce={"replica": "powersgd"})
    found = fs.sim.search(job(), [ONE, HOSTS], SLOW, remats=[None], wires=[None, sums, product])
    assert {(o.shape, o.wire) for o in found.options} == {
        ("data=16", EXACT),
        *(("replica=2,data=8", wire) for wire in (EXACT, sums, product)),
    }
    assert len(found.refused) == 2 and all("names 'replica'" in why for why in found.refused.values())
    rules = [fs.Rule("l0.*", fs.fsdp("data"), wire=EXACT), (".*", fs.fsdp("data"))]
    own = fs.sim.search(job(rules=rules), [ONE], SLOW, remats=[None], wires=[None, "int8"])
    times = {o.wire: o.seconds for o in own.options}
    all_of = {o.wire: o.seconds for o in fs.sim.search(job(), [ONE], SLOW, remats=[None], wires=[None, "int8"]).options}
    assert all_of[INT8] < times[INT8] < times[EXACT] == all_of[EXACT]


def test_rules_that_part_groups_under_a_format_alone() -> None:
    """A program that was traced with other groups is not taken for it."""
    layers = {
        f"l{i}": {"w": torch.empty(512, 512, device="meta"), "b": torch.empty(512, device="meta")} for i in (0, 1)
    }

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params.values():
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return x.square().mean()

    rules = [fs.Rule(".*b", fs.fsdp("data"), wire=EXACT), (".*", fs.fsdp("data"))]
    given = job(model=layers, loss=loss, rules=rules)
    found = fs.sim.search(given, [ONE], SLOW, remats=[None], wires=[None, "int8"])
    alone = [fs.sim.search(given, [ONE], SLOW, remats=[None], wires=[wire]).best for wire in ("int8", None)]
    assert found.options == alone


def test_a_function_of_the_mesh() -> None:
    def make(mesh: fs.Mesh) -> Any:
        return job(rules=[(".*", fs.fsdp(mesh.axis_names[-1]))])

    found = fs.sim.search(make, [ONE, HOSTS], SLOW, remats=[None], wires=[None, "int8"])
    assert len(found.options) == 4 and found.best.wire == INT8

    def made(mesh: fs.Mesh) -> Any:
        return step_on(mesh, EXACT)

    assert len(fs.sim.search(made, [ONE], SLOW).options) == 1
    with pytest.raises(PlanError, match="the job makes the step itself, so its plan has the formats that it has"):
        fs.sim.search(made, [ONE], SLOW, wires=[None, "int8"])
    fixed = made(ONE)
    wrong = fs.sim.search(lambda mesh: fixed, [ONE, HOSTS], SLOW).refused
    assert "the job made a step on the mesh data=16" in wrong["replica=2,data=8"]


@pytest.mark.parametrize(
    ("wires", "words"),
    [
        (["int7"], "'int7' is none of 'fp32', 'bf16'"),
        (["powersgd"], "only sums over replicas have a low rank"),
        ([], "nothing is given: give None for exact transfers"),
        ([8], "8, an int is given"),
        ("int8", r"wires is .int8., a str: give a list of formats, such as \[None, \"int8\"\]"),
    ],
)
def test_bad_formats_are_refused_before_anything_is_traced(wires: Any, words: str) -> None:
    def make(mesh: fs.Mesh) -> Any:
        raise AssertionError("the job was made")

    with pytest.raises(PlanError, match=words):
        fs.sim.search(make, 8, FAST, wires=wires)


def test_a_job_with_formats_of_its_own() -> None:
    found = fs.sim.search(job(wire=INT8), [ONE], SLOW, remats=[None])
    assert [option.wire for option in found.options] == [INT8]
    with pytest.raises(PlanError, match=r"the job has wire=Wire\(gather='int8', reduce='int8'\) already"):
        fs.sim.search(job(wire=INT8), [ONE], SLOW, wires=[None, "int4"])


FORMS = [
    WireFormat("bf16"),
    WireFormat("int8", 256),
    WireFormat("int4", 16),
    WireFormat("fp8_e4m3", 64),
    WireFormat("nf4", 64),
    WireFormat("int4", 32, rotate=True),
    WireFormat("int8", 64, stochastic=True),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [2**14, 3 * 2**14])
def test_packing_takes_what_its_operators_read_and_write(form: WireFormat, dtype: torch.dtype, numel: int) -> None:
    """Counted on real tensors; and no less than each byte once."""
    from fshard.foresight.packing_time import _bytes_packed, _bytes_unpacked

    x = torch.randn(numel).to(dtype)
    wire = packed(x, form)
    with Activations([]) as seen:
        packed(x, form)
    assert seen.take().moved == pytest.approx(numel * _bytes_packed(form, dtype), rel=0.02)
    assert _bytes_packed(form, dtype) * numel >= x.nbytes + wire.nbytes
    for add in (False, True):
        with Activations([]) as seen:
            unpack(wire, form, x, add)
        assert seen.take().moved == pytest.approx(numel * _bytes_unpacked(form, dtype, add), rel=0.02)
        assert _bytes_unpacked(form, dtype, add) * numel >= wire.nbytes + (1 + add) * x.nbytes


def steps() -> dict[str, Case]:
    """Cases of formats, plans and policies: what a step may move."""
    return {**CASES, **{f"replicas, {name}": case for name, case in REPLICAS.items()}}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 4) for name in steps()), *((name, 1) for name in CASES)])
def test_every_compressed_transfer_of_every_policy_takes_time_and_nothing_else_does(name: str, ranks: int) -> None:
    case = steps()[name]
    plan = plan_of(case, mesh_of(case, ranks, fs.abstract_mesh))
    step = fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, accumulate=case.accumulate)
    rows = tuple(x.repeat(case.accumulate, 1) for x in batch(0, 0))
    task = replace(task_of(step, step.trace(rows), plan), updates={})  # what optimizers take has tests of its own
    machine = hardware("h100", link="1e30,0", short=False)
    found = packing_seconds(plan, task.stages, machine.speed)
    formats = {(kind, group.name) for group in plan.groups for kind in group.wires}
    moves = {(move.kind, info.name) for info in task.groups for move in info.transfers if move.wire and move.sent}
    assert moves <= formats
    assert moves or ranks == 1
    if ranks == 1:  # only what units read is rounded, after an update
        assert {kind for kind, _ in found} <= {"update", "wait all_gather"}
    hosted = {("update", group.name) for group in plan.groups if group.kinds.hosted}  # the host packs it there
    for kind, group in moves:
        start = ("update" if kind == "all_gather" else kind), group
        assert (start in hosted or found[start] > 0) and found[f"wait {kind}", group] > 0
    named = {(kind.removeprefix("wait ").replace("update_gather", "update"), group) for kind, group in found}
    assert named <= {(kind, group) for kind, group in formats} | {("update", group) for _, group in formats}
    costs, exact = machine.of(task, plan), machine.of(task, plan)
    exact = fs.sim.Costs({op: s for op, s in exact.seconds.items() if op[0] in COMPUTE_KINDS}, links=exact.links)
    for policy in candidates(task, "deferred"):
        schedule = build(task.program, task.under(policy).groups, policy, task.accumulate)
        kinds = {op.kind for op in schedule}
        with_formats, without = (simulate(schedule, each.only(kinds)) for each in (costs, exact))
        added = sum(found.get((op.kind, op.target), 0.0) for op in schedule)
        assert with_formats.compute == pytest.approx(without.compute + added)


def test_measured_units_take_packing_over_named_links() -> None:
    step, rows = (lambda plan: (fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan), batch(0, 0)))(
        plan_of(Case(), fs.abstract_mesh((4,), ("shard",)))
    )
    task = task_of(step, step.trace(rows), step.plan)
    units = {(op.kind, op.target): 1e-3 for op in task.stages.computes} | {("update", ""): 1e-4}
    machine = hardware("h100", costs=fs.sim.Costs(units))
    costs = machine.of(task, step.plan)
    found = packing_seconds(step.plan, task.stages, machine.speed)
    for op, seconds in found.items():
        assert costs.of_op(*op) == (1e-4 if op[0] == "update" else seconds)


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    flags = ["plan", f"{path}:make", "--mesh", "16", "--link", "eth1", "--inside", "nvlink4", "--search"]
    assert main([*flags, "--json", "--wires", "int4", "replica=int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["search"][0]
    assert (first["seconds"], first["policy"]) == (pytest.approx(found["seconds"]), found["policy"])
    tried = {each["wire"] for each in found["search"]}
    assert {"exact", "gather='int4', reduce='int4'", "reduce={'replica': 'int8'}"} <= tried
    assert main([*flags, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert {each["wire"] for each in plain["search"]} == {"exact"}
    assert [each for each in found["search"] if each["wire"] == "exact"] == plain["search"]
    assert main([*flags, "--wires", "int4"]) == 0
    printed = capsys.readouterr().out
    assert "wire formats" in printed and "in int4/256" in printed and "gather='int4'" in printed


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--wires", "int8"], "--wires says what --search tries"),
        (["--search", "--wires", "int7"], "'int7' is none of"),
        (["--search", "--wires", "replica=int7"], "'int7' is none of"),
    ],
)
def test_a_wrong_command(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before the job is read, which does not exist."""
    assert main(["plan", "nothing.py:make", *argv]) == 2
    assert words in capsys.readouterr().err


def test_whole_gradients_are_added_up_where_the_plan_of_an_option_does() -> None:
    """Gradients that are exact until they are packed may be added up; those that travel in bfloat16 are rounded."""
    given = job(precision=fs.Precision(reduce=torch.bfloat16), accumulate=2, batch=torch.empty(128, 512, device="meta"))
    alone = [fs.sim.search(given, [ONE], SLOW, remats=[None], wires=[wire]).best for wire in ("int8", None)]
    assert [option.policy.accumulation for option in alone] == ["full", "sharded"]
    for order in ([None, "int8"], ["int8", None]):
        assert fs.sim.search(given, [ONE], SLOW, remats=[None], wires=order).options == alone


ON_MESH = """

def make_by_axis(mesh):
    return make() | {"rules": [(".*", fs.fsdp(mesh.axis_names[-1]))]}


def make_packed():
    return make() | {"wire": fs.Wire("int8", "int8")}
"""


def test_a_function_of_a_file_is_called_with_each_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB + ON_MESH)
    flags = ["--mesh", "16", "--link", "eth1", "--inside", "nvlink4", "--json"]
    assert main(["plan", f"{path}:make_by_axis", *flags, "--search", "--wires", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "host=2,local=8" in {each["mesh"] for each in found["search"]}
    assert found["search"][0]["seconds"] == pytest.approx(found["seconds"])


def test_more_replicas_than_a_format_is_of_use_for_are_no_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB + ON_MESH)
    flags = ["--mesh", "replica=4,data=2", "--memory", "1K", "--json"]
    assert main(["plan", f"{path}:make_packed", *flags]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["remedies"] and not any("ranks" in each["change"] for each in found["remedies"])


def test_schedules_are_alike_whatever_their_groups_send() -> None:
    """``Builds`` builds ops once for all plans and numbers of ranks where they are the same, and only there."""
    builds, alike = Builds(), 0
    for case in steps().values():
        program = None  # one for all numbers of ranks
        for ranks in (1, 2, 4):
            if ranks % case.replicas:
                continue
            plan = plan_of(case, mesh_of(case, ranks, fs.abstract_mesh))
            step = fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, accumulate=2)
            program = program or step.trace(tuple(x.repeat(2, 1) for x in batch(0, 0))).schedule.program
            for policy in (fs.Policy(), fs.Policy(prefetch=0, reduces=1, reshard=False)):
                before = len(builds.ops)
                schedule = builds.build(program, group_infos(plan), policy, 2, True)
                assert schedule == build(program, group_infos(plan), policy, 2)
                alike += len(builds.ops) == before
    assert alike > 20 and len(builds.ops) > 10
