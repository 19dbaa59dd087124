"""Draw the curves of runs: python examples/plot_run.py runs/llama/metrics.jsonl --out llama.png."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt  # pip install "fshard[view]"

import fshard as fs

cli = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
cli.add_argument("lines", type=Path, nargs="+", help="files of fs.trackers.JsonLines, one a run")
cli.add_argument("--names", nargs="+", default=["loss", "held out/loss", "lr"], help="one axis for each")
cli.add_argument("--out", type=Path, default=Path("run.png"), help="the picture")
args = cli.parse_args()
figure, axes = plt.subplots(len(args.names), 1, sharex=True, figsize=(7, 1.8 * len(args.names)), squeeze=False)
for file, style in zip(args.lines, cycle(("-", "--", ":"))):
    rows = fs.trackers.read_lines(file)
    for axis, name in zip(axes[:, 0], args.names, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        marker = "o" if len(points) < 30 else None
        axis.plot(*zip(*points, strict=True), ls=style, marker=marker, label=file.stem) if points else None
        axis.set_ylabel(name)
if len(args.lines) > 1:
    axes[0, 0].legend(frameon=False)
axes[-1, 0].set_xlabel("step")
figure.tight_layout()
figure.savefig(args.out, dpi=110, metadata={"Software": ""})
