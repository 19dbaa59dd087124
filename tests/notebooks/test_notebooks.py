"""The notebooks run cell by cell, in a kernel of their own, and keep the outputs of such a run."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import addresses

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MINUTE = 60.0

nbformat = pytest.importorskip("nbformat")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(notebook: Any, **options: Any) -> Any:
    """The notebook after its cells have run, in order, with this checkout."""
    client = pytest.importorskip("nbclient")
    around = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    resources = {"metadata": {"path": str(FOLDER)}}
    options = {"timeout": 170, "kernel_name": "python3", "resources": resources, **options}
    return client.NotebookClient(notebook, **options).execute(env=around)


def first_cell(notebook: Any) -> Any:
    """The first cell of code, which installs fshard."""
    return next(cell for cell in notebook.cells if cell.cell_type == "code")


def texts(notebook: Any) -> list[str]:
    """What the cells have printed."""
    return [out.text for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "stream"]


def lines_of_losses(notebook: Any) -> list[str]:
    """The lines with losses. A kernel sends what a cell prints in as many texts as it likes."""
    return [line for line in "".join(texts(notebook)).splitlines() if "loss" in line]


def seconds_of_children() -> float:
    """Processor time of the kernels that have ended, and of what they have started."""
    return os.times().children_user + os.times().children_system


def shown(notebook: Any) -> list[str]:
    """What each cell shows as text, without numbers, which may be times."""
    found = []
    for cell in notebook.cells:
        outs = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", ())]
        found.append(re.sub(r"[\d.,]+(e[-+]?\d+)?", "#", "".join(outs)))
    return found


def test_there_are_nine_and_their_outputs_are_kept() -> None:
    assert len(NOTEBOOKS) == 9
    for name in NOTEBOOKS:
        cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert all(cell.execution_count == number for number, cell in enumerate(cells, 1)), name
        assert sum(bool(cell.outputs) for cell in cells) > len(cells) // 2, name
        assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"], name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_what_is_missing(name: str) -> None:
    source = first_cell(read(name)).source
    assert source == addresses.install(addresses.setting()), "make notebooks"
    *code, pip = source.splitlines()
    exec("\n".join([*code, "    raise AssertionError('fshard is installed')"]), {})
    assert pip.startswith("    %pip install -q ")


ADDRESS = "https://github.com/OWNER/NAME"


@pytest.mark.parametrize("written", [ADDRESS, f"{ADDRESS}/", f"{ADDRESS}.git"])
def test_one_setting_gives_installation_and_links(written: str) -> None:
    address = addresses.repository(f'[project.urls]\nRepository = "{written}"')
    assert address == ADDRESS and f"git+{ADDRESS}" in addresses.install(address)
    link = addresses.colab(address, "examples/notebooks/1_first_steps")
    assert link.endswith("/github/OWNER/NAME/blob/main/examples/notebooks/1_first_steps.ipynb")
    text = (FOLDER / "1_first_steps.ipynb").read_text(encoding="utf-8")
    old, new = [nbformat.reads(each, as_version=4).cells for each in (text, addresses.linked(text, link))]
    title, _, link_line, *rest = new[0].source.splitlines()
    assert link_line == f"[Open in Colab]({link})"
    assert [title, *rest] == old[0].source.splitlines() and new[1:] == old[1:]


@pytest.mark.parametrize("text", ["", "[project]\nname = 'fshard'", "[project.urls]\nDocumentation = 'https://a.b'"])
def test_without_the_setting_there_is_no_link(text: str) -> None:
    assert addresses.repository(text) == "" == addresses.colab("", "a")
    assert addresses.linked("{}", "") == "{}" and "../.." in addresses.install("")
    assert addresses.colab("https://git.example.org/OWNER/NAME", "a") == ""  # Colab reads from GitHub alone


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str) -> None:
    kept, began = read(name), seconds_of_children()
    done = executed(read(name))
    assert 0.5 < seconds_of_children() - began < MINUTE
    assert lines_of_losses(done) == lines_of_losses(kept)
    stale = [number for number, (one, two) in enumerate(zip(shown(kept), shown(done), strict=True)) if one != two]
    assert not stale, f"cells {stale} of {name} show something else than what is kept: make notebooks"


@pytest.mark.slow
@pytest.mark.processes
def test_a_failing_cell_shows_the_users_lines_and_the_next_one_runs() -> None:
    """Cells in the wrong order, a cell that is run twice, and one that is interrupted."""
    setup = [cell.source for cell in read("5_schedules").cells if cell.cell_type == "code"][1]
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
    done = executed(notebook, allow_errors=True)
    errors = [[out for out in cell.outputs if out.output_type == "error"] for cell in done.cells]
    assert [error[0].ename if error else "" for error in errors] == [
        *("", "", "DonatedError", "RuntimeError", "", "KeyboardInterrupt", "")
    ]
    trace = "\n".join(errors[3][0].traceback)
    assert "loss_fn" in trace and "skipping hidden" in trace and len(trace.splitlines()) < 60
    assert texts(done)[-2:] == ["step 2\n", "1 []\n"]


@pytest.mark.long
@pytest.mark.processes
def test_a_fresh_kernel_shows_a_figure() -> None:
    """No cell has imported pyplot, which would teach the kernel to show figures."""
    cell = (
        "import torch\nimport fshard as fs\n"
        "plan = fs.make_plan({'w': torch.ones(4)}, fs.make_mesh((1,), ('data',)), [('.*', fs.fsdp('data'))])\n"
        "fs.view.plan(plan).figure()"
    )
    done = executed(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]))
    assert "image/png" in done.cells[0].outputs[0]["data"]
