"""Destinations of numbers of a run: files, TensorBoard, Weights & Biases, MLflow, the terminal. See ``fs.track``."""

from fshard.tracking.json_lines import JsonLines, read_lines
from fshard.tracking.live import Live
from fshard.tracking.run_services import MLflow, TensorBoard, Wandb
from fshard.tracking.tracker import Tracker, scalars

__all__ = ["JsonLines", "Live", "MLflow", "TensorBoard", "Tracker", "Wandb", "read_lines", "scalars"]


def __dir__() -> list[str]:
    return sorted(__all__)
