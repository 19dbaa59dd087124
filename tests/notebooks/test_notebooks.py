"""The notebooks run cell by cell, in a kernel of their own, and keep the outputs of such a run."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MINUTE = 60.0

nbformat = pytest.importorskip("nbformat")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(notebook: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The notebook after its cells have run, in order, with this checkout."""
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    resources = {"metadata": {"path": str(FOLDER)}}
    return client.NotebookClient(notebook, timeout=170, kernel_name="python3", resources=resources, **options).execute()


def texts(notebook: Any) -> list[str]:
    """What the cells have printed."""
    return [out.text for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "stream"]


def test_there_are_six_and_their_outputs_are_kept() -> None:
    assert len(NOTEBOOKS) == 6
    for name in NOTEBOOKS:
        cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert all(cell.execution_count == number for number, cell in enumerate(cells, 1)), name
        assert sum(bool(cell.outputs) for cell in cells) > len(cells) // 2, name
        assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"], name


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, began = read(name), time.process_time()
    done = executed(read(name), monkeypatch)
    assert time.process_time() - began < MINUTE
    printed = [text for text in texts(done) if "loss" in text]
    assert printed == [text for text in texts(kept) if "loss" in text]


@pytest.mark.slow
@pytest.mark.processes
def test_a_failing_cell_shows_the_users_lines_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells in the wrong order, a cell that is run twice, and one that is interrupted."""
    setup = next(cell.source for cell in read("3_schedules").cells if cell.cell_type == "code")
    cells = [
        setup,
        "state = fs.init_state(plan, opt)\nkept = state\nstate, _ = step(state, draw(0))",
        "step(kept, draw(0))",
        "step(state, {'x': torch.ones(4, 3), 'y': torch.ones(4)})",
        "state, metrics = step(state, draw(1))\nprint('step', state.step)",
        "import _thread, threading, os, signal, time\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "while True:\n    state, metrics = step(state, draw(2))",
        "after, metrics = step(state, draw(3))\nprint(after.step - state.step, "
        "[t.name for t in threading.enumerate() if t.name.startswith('rank ')])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    done = executed(notebook, monkeypatch, allow_errors=True)
    errors = [[out for out in cell.outputs if out.output_type == "error"] for cell in done.cells]
    assert [error[0].ename if error else "" for error in errors] == [
        *("", "", "DonatedError", "RuntimeError", "", "KeyboardInterrupt", "")
    ]
    trace = "\n".join(errors[3][0].traceback)
    assert "loss_fn" in trace and "skipping hidden" in trace and len(trace.splitlines()) < 60
    assert texts(done)[-2:] == ["step 2\n", "1 []\n"]
