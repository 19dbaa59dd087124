"""Runs the notebooks and keeps what they show now: ``make notebooks``; a diff tells what was stale.

The first cell of each becomes the one that installs fshard from where the project lives (``addresses.py``).
"""

import sys

import nbformat

from tests.notebooks import addresses
from tests.notebooks.test_notebooks import FOLDER, NOTEBOOKS, executed, first_cell, read

if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        notebook = read(name)
        first_cell(notebook).source = addresses.install(addresses.setting())
        done = executed(notebook, record_timing=False)
        nbformat.write(done, FOLDER / f"{name}.ipynb")
        print(f"{name}: {sum(bool(cell.get('outputs')) for cell in done.cells)} cells show something")
