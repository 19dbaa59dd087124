"""What the benchmarks compute with their numbers, and that the peers in other runtimes train the same model."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "lab",
    "model",
    "common",
    "report",
    "claims",
    "turns",
    "peers",
    "jax_fsdp",
    "jax_products",
    "opacus_sums",
    "balance",
    "hsdp",
    "pipeline_peers",
    "gpu",
    "pictures",
    "auto",
)


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which is no package: its files are scripts."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        names = [name for name in NAMES if (FOLDER / f"{name}.py").exists()]
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))
        for name in {name for name in set(sys.modules) - before if (FOLDER / f"{name}.py").exists()}:
            del sys.modules[name]


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_takes_from_the_library_is_there(script: Path) -> None:
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in [node for node in nodes if (node.module or "").split(".")[0] == "fshard"]:
        module = importlib.import_module(str(node.module))
        for name in [alias.name for alias in node.names]:
            assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), f"{node.module}.{name}"


def test_a_ratio_is_the_median_of_the_ratios_of_each_round(bench: Any) -> None:
    # The machine is ten times slower in the last round: a ratio of medians or of sums would show it.
    row = bench.common.ratio("a / b", "wall", [1.0, 2.0, 30.0], [2.0, 4.0, 30.0], target=0.5)
    assert row.value == 0.5 and not row.short and row.verdict == "ok"
    assert row.low == 0.5 and row.high == 1.0


def test_a_missed_target_says_by_how_much(bench: Any) -> None:
    row = bench.common.Row("a / b", "wall", 0.75, target=0.6)
    assert row.short and row.verdict == "+25%"
    assert bench.common.Row("a", "wall", float("nan"), target=0.6).short
    assert bench.common.Row("a", "wall", 3.0).verdict == ""


@pytest.mark.parametrize(("flags", "status"), [(["--strict"], 1), ([], 0)])
def test_only_strict_runs_fail_on_a_shortfall(
    bench: Any, flags: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--results", str(tmp_path), *flags])
    report = bench.common.Report("thing", "A claim.", {"ranks": 2})
    report.rows = [bench.common.Row("a", "wall", 2.0, target=1.0)]
    assert report.finish(bench.common.arguments("A claim.")) == status
    written = json.loads((tmp_path / "thing.json").read_text())
    assert written["rows"][0]["verdict"] == "+100%"
    assert {"commit", "torch", "device", "load", "load_after"} <= written["environment"].keys()
    report.rows = [bench.common.Row("a", "s", 2.0, target=1.0, strict=False)]
    assert report.finish(bench.common.arguments("A claim.")) == 0, "an absolute time is not judged"
    report.rows = []
    assert report.finish(bench.common.arguments("A claim.")) == status, "nothing was shown"


def test_the_page_holds_what_was_measured(bench: Any, tmp_path: Path) -> None:
    report = bench.common.Report("thing", "A claim.", {}, notes=["a note"])
    report.rows = [bench.common.ratio("a / b", "wall", [1.0], [2.0], 0.4), bench.common.Row("bytes", "MiB", 3.0)]
    report.environment["load_after"] = [0.0, 0.0]
    report.finish(SimpleNamespace(quick=False, strict=False, results=tmp_path))
    text = "\n".join(bench.report.section(json.loads((tmp_path / "thing.json").read_text())))
    assert "| a / b | wall | **0.500** | 0.500 .. 0.500 | ≤ 0.4 | +25% |" in text
    assert "| bytes | MiB | 3.000 |  |  |  |" in text and text.rstrip().endswith("a note")


ORDERS = ("the runs' order", "fshard's order")


def test_the_docs_show_what_was_foreseen_for_published_runs() -> None:
    rows = json.loads((FOLDER / "results" / "published.json").read_text())["rows"]
    found = {row["case"].partition(", ")[2]: row["value"] for row in rows if row["case"].startswith("all: ")}
    wanted = [f"{found[f'{order}: {kind} error']:.1%}" for order in ORDERS for kind in ("median", "worst")]
    lines = (FOLDER.parent / "docs" / "foresight.md").read_text().splitlines()
    shown = next(line for line in lines if line.startswith("| all | 36 |"))
    assert [cell.strip() for cell in shown.split("|")[3:-1]] == [each.replace("%", " %") for each in wanted]


def test_a_peer_that_is_not_there_leaves_a_note(bench: Any) -> None:
    notes: list[str] = []
    assert bench.peers.select(["eager", "nosuch"], notes) == ["eager"]
    assert len(notes) == 1 and notes[0].startswith("nosuch: skipped: there is no such peer; known: eager, ")


class Writes:
    """In the place of processes: writes its product when it is told."""

    def __init__(self, numpy: Any, product: list[float]) -> None:
        self.numpy, self.product = numpy, product

    def step(self, name: str, number: int) -> None:
        """Obey."""
        if name.startswith("write "):
            self.numpy.savez(name.removeprefix("write "), w=self.numpy.array(self.product))


def test_products_are_compared_before_they_are_timed(bench: Any, tmp_path: Path) -> None:
    first, near, far, lost = (
        Writes(bench.jax_products.np, [1.0, last]) for last in (100.0, 100.01, 101.0, float("nan"))
    )
    assert bench.jax_products.check({"hvp": first, "jax": near}, tmp_path) == pytest.approx(1e-4)
    with pytest.raises(SystemExit, match="jax finds another product than hvp: w differs by 1.0e-02 of its largest"):
        bench.jax_products.check({"hvp": first, "jax": far}, tmp_path)
    with pytest.raises(SystemExit, match="jax finds another product than hvp"):
        bench.jax_products.check({"hvp": first, "jax": lost}, tmp_path)


def test_products_without_jax_leave_a_row(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.jax_fsdp, "obstacle", lambda: "no JAX")
    report = bench.common.Report("thing", "A claim.", {})
    bench.jax_products.add_rows(report, 2, 1)
    assert [(row.case, row.value, row.verdict) for row in report.rows] == [("2 ranks: hvp / jax, GPT", None, "no JAX")]


def test_a_process_that_dies_ends_the_turns(bench: Any) -> None:
    dies = [sys.executable, "-c", "input(); raise SystemExit(3)"]
    with (
        pytest.raises(SystemExit, match="family: no answer to 'step a 1'"),
        bench.turns.Family("family", [dies], {}) as f,
    ):
        f.ask("step a 1")
    assert [process.poll() for process in f.processes] == [3]


def test_a_process_that_is_silent_ends_the_turns(bench: Any) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(SystemExit, match="no answer"), bench.turns.Family("family", [sleeps], {}, timeout=0.2) as f:
        f.ask("step a 1")
    assert f.processes[0].poll() is not None


@pytest.mark.parametrize("form", ["jax", pytest.param("jax scan", marks=pytest.mark.slow)])
def test_jax_trains_the_same_model(bench: Any, form: str, tmp_path: Path) -> None:
    if bench.jax_fsdp.obstacle():
        pytest.skip("JAX is not installed")
    size = bench.model.Size(depth=2, width=32, heads=2, tokens=8, batch=2, vocabulary=16)
    bench.jax_fsdp.write_data(tmp_path / "data.npz", size, ranks=1, numbers=4)
    plain, ours = bench.peers.Torch(bench.model.make(size)), []
    for number in range(4):
        plain.step(bench.model.rows(size, number))
        ours.append(float(plain.loss))
    command = bench.jax_fsdp.jax_command(tmp_path / "data.npz", size, bench.jax_fsdp.FORMS[form])
    with bench.turns.Family(form, [command], bench.jax_fsdp.JAX, timeout=150) as family:
        theirs = [family.step(form, number)["loss"] for number in range(4)]
    assert theirs == pytest.approx(ours, rel=1e-5)


def test_the_stages_of_a_pipeline_are_the_model(bench: Any) -> None:
    size = bench.model.Size(depth=4, width=32, heads=2, tokens=8, batch=2, vocabulary=16)
    cut, rows = bench.pipeline_peers.gpt(size, 2), bench.model.rows(size, 0)
    first, last = cut.parts
    assert torch.equal(last(first(cut.inputs(rows))), cut.net(cut.inputs(rows)))
    names = [{id(leaf) for leaf in part.parameters()} for part in cut.parts]
    assert names[0] | names[1] == {id(leaf) for leaf in cut.net.parameters()} and not names[0] & names[1]


def test_gaps_are_what_no_kernel_covers(bench: Any) -> None:
    # Two that overlap, one inside of another, a gap of 3, one that comes out of order.
    assert bench.gpu.exposed([(0, 4), (2, 6), (3, 5), (11, 12), (9, 11)]) == (12, 3)
    assert bench.gpu.exposed([]) == (0, 0)


def test_balance_divides_by_the_longer_of_the_two(bench: Any) -> None:
    samples = {"full": [1.1, 2.2, 1.1], "compute": [1.0, 2.0, 1.0], "wire": [0.5, 1.0, 3.0]}
    first, second, *_ = bench.balance.describe("x", samples, least=0.25)
    assert "compute" in first.case and first.value == pytest.approx(1.1) and first.target == 1.1
    assert second.value == pytest.approx(1.1 / 1.5)


def test_a_mute_communicator_leaves_no_uninitialized_memory(bench: Any) -> None:
    comm = bench.balance.MuteCommunicator(2, control=False)
    out = torch.full((4,), float("nan"))
    comm.all_gather(out, torch.tensor([1.0, 2.0])).wait()
    assert out.tolist() == [1, 2, 1, 2]
    comm.all_gather(out, torch.tensor([3.0, 4.0])).wait()
    assert out.tolist() == [1, 2, 1, 2], "later gathers move nothing"


def test_the_page_counts_what_is_missed_and_says_what_was_not_measured(bench: Any) -> None:
    rows = [vars(bench.common.Row(f"case {i}", "wall", 0.5 + i, target=1.0)) for i in range(3)]
    around = {"date": "", "commit": "", "changed": False, "torch": "", "python": "", "cores": 1, "processor": ""}
    content = {"name": "wire", "claim": "Claim.", "rows": rows, "notes": []}
    found = {"wire": {**content, "environment": {**around, "load": [0], "load_after": [0]}}}
    text = bench.report.page(found)
    assert "**1 of 3 targets are met.**" in text and "| `wire.py` | case 2 | wall | 2.500 | ≤ 1 | +150% |" in text
    assert "### gpu.py\n\nNot measured yet." in text


def test_what_no_card_has_run_is_a_row_that_says_so(bench: Any) -> None:
    told = [vars(bench.common.Row("1 rank: fshard / eager", "wall", 1.04))]
    around = {"date": "", "commit": "", "changed": False, "torch": "", "python": "", "cores": 1, "processor": ""}
    content = {"name": "gpu", "claim": "Claim.", "rows": told, "notes": [], "environment": {**around, "load": [0]}}
    text = "\n".join(bench.report.section(content))
    assert "| 1 rank: fshard / eager | wall | 1.040 |  |  |  |" in text
    assert "| 8 ranks, silent: fshard / fsdp2 | wall | - |  |  | not run on a card |" in text
    assert text.count("not run on a card") == len(bench.gpu.CASES) - 1
    missed = bench.common.Row("a", "wall", target=1.0, why="no time was left")
    assert missed.short and missed.verdict == "no time was left"


def test_claims_are_rows_of_benchmarks_that_run_for_them(bench: Any) -> None:
    claims = bench.claims
    assert len(claims.CLAIMS) == 10
    assert {claim.shown[0] for claim in claims.CLAIMS} == set(claims.RUNS)
    around = {"date": "a day", "commit": "c" * 40, "changed": False, "torch": "", "python": "", "cores": 1}
    environment = {**around, "processor": "", "load": [0]}
    name, case, measure = claims.CLAIMS[2].shown
    row = vars(bench.common.Row(case, measure, 0.5, 0.4, 0.6, target=1.0)) | {"verdict": "ok"}
    found = {name: {"rows": [row], "environment": environment}}
    text = claims.page(f"before\n{claims.BEGIN}\nold\n{claims.END}\nafter\n", found)
    assert "relative to FSDP2 | **0.500** | 0.400 .. 0.600 | ≤ 1: ok | `step_time.py`" in text
    assert text.count("|  |  |  |") == 9 and "commit `cccccccccc`" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert claims.page(text, found) == text, "written twice, it is the same"


def test_pictures_show_the_ratios_to_fsdp2(bench: Any, tmp_path: Path) -> None:
    rows = [
        vars(bench.common.ratio("2 ranks: fshard / fsdp2", "wall", [1.0, 2.0], [2.0, 4.0])),
        vars(bench.common.ratio("2 ranks: fshard / fsdp2", "cpu", [9.0], [1.0])),
        vars(bench.common.ratio("4 ranks: fshard / fsdp2", "wall", [9.0], [1.0])),
        vars(bench.common.ratio("2 ranks: fshard / ddp", "wall", [9.0], [1.0])),
    ]
    (tmp_path / "step_time.json").write_text(json.dumps({"rows": rows}))
    panels = bench.pictures.collect(tmp_path)
    assert panels == {"loopback, 2 ranks": {"fshard": (0.5, 0.5, 0.5)}}
    bench.pictures.draw(panels, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_lab_whose_process_is_gone_is_removed(bench: Any) -> None:
    why = bench.lab.obstacle()
    if why:
        pytest.skip(why)
    mine, theirs = f"fslab-{os.getpid()}-{bench.lab.started(os.getpid())}-0", f"fslab-{os.getpid()}-1-0"
    try:
        for name in (mine, theirs):
            subprocess.run(["ip", "netns", "add", name], check=True)
        gone = bench.lab.clean()
        assert theirs in gone and mine not in gone
    finally:
        for name in (mine, theirs):
            bench.lab.remove(name)


def test_a_lab_that_cannot_be_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bench.lab.LabError, match="3 ranks cannot be put on hosts of 2"):
        bench.lab.Lab(3, "1gbit", together=2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if sys.platform.startswith("linux"):
        with pytest.raises(bench.lab.LabError, match="needs root"), bench.lab.Lab(2, "1gbit"):
            pass


ECHO = """
import socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if sys.argv[1] == "answer":
    end.bind(("10.0.0.2", 9))
    print("bound", flush=True)
    data, peer = end.recvfrom(9)
    end.sendto(data, peer)
else:
    end.settimeout(20)
    begin = time.monotonic()
    end.sendto(b"x", ("10.0.0.2", 9))
    end.recvfrom(9)
    print(time.monotonic() - begin)
"""


def test_a_link_holds_packets(bench: Any) -> None:
    why = bench.lab.obstacle()
    if why or not os.path.exists("/dev/net/tun"):
        pytest.skip(why or "no tun devices")
    with bench.lab.Lab(2, "1gbit", delay=0.05) as lab:
        first, second = (
            lab.command(rank, [sys.executable, "-c", ECHO, word]) for rank, word in enumerate(("ask", "answer"))
        )
        with subprocess.Popen(second, stdout=subprocess.PIPE, text=True) as answering:
            assert answering.stdout is not None and answering.stdout.readline() == "bound\n"
            asked = subprocess.run(first, capture_output=True, text=True, check=True)
        assert float(asked.stdout) >= 0.1
        assert min(lab.sent()) > 0


def test_the_overlap_of_sums_over_replicas(bench: Any) -> None:
    kinds = (
        "handshake",
        "all_gather",
        "wait all_gather",
        "forward",
        "backward",
        "reduce_scatter",
        "wait reduce_scatter",
        "replica_reduce",
        "all_gather",
        "backward",
        "wait replica_reduce",
    )
    ops = tuple(SimpleNamespace(kind=kind) for kind in kinds)
    issued = (0, 0, 0, 1, 2, 4, 4, 5, 5, 5, 8)
    ends = (0, 1, 1, 2, 4, 5, 5, 9, 7, 8, 9)  # the sum lasts from 5 to 9, a gather beside it from 5 to 7
    run = SimpleNamespace(schedule=ops, issued=issued, starts=issued, ends=ends, seconds=10)
    found = bench.hsdp.overlap(run)
    assert found == {
        "beside gathers or reductions": 0.5,
        "beside reductions": 0.0,
        "beside gathers": 0.5,
        "beside compute": 0.75,
        "waited for, of the step": 0.1,
    }
    groups = (SimpleNamespace(name="a", shard_bytes=10_000_000), SimpleNamespace(name="alone", shard_bytes=7))
    summed = type("Ops", (tuple,), {"groups": groups})([SimpleNamespace(kind="replica_reduce", target="a")])
    assert bench.hsdp.link_seconds(SimpleNamespace(schedule=summed), "200mbit") == pytest.approx(0.8)
    assert bench.hsdp.overlap(SimpleNamespace(schedule=(), issued=(), starts=(), ends=(), seconds=1)) == {}
