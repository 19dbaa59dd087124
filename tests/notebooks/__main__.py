"""Runs the notebooks and keeps what they show now: ``make notebooks``; a diff tells what was stale."""

import nbformat

from tests.notebooks.test_notebooks import FOLDER, NOTEBOOKS, executed, read

if __name__ == "__main__":
    for name in NOTEBOOKS:
        done = executed(read(name), record_timing=False)
        nbformat.write(done, FOLDER / f"{name}.ipynb")
        print(f"{name}: {sum(bool(cell.get('outputs')) for cell in done.cells)} cells show something")
