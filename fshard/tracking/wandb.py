"""Records for Weights & Biases."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fshard.tracking.tracker import need


class Wandb:
    """A run of Weights & Biases; offline too, ``mode="offline"``, which ``wandb sync`` uploads later.

    Args:
        project: the name of the project.
        **options: further arguments of ``wandb.init``, such as ``name=``, ``mode=``, ``dir=``, ``id=`` and ``resume=``.

    Raises:
        ImportError: wandb is not installed: ``pip install "fshard[wandb]"``.

    Example::

        with fs.track([fs.trackers.Wandb("gpt", mode="offline", name="first")], step) as track:
            track(state.step, metrics)
    """

    remote = True

    def __init__(self, project: str, **options: Any) -> None:
        need("fs.trackers.Wandb", "wandb", "wandb", "wandb")
        self.project, self.options = project, options
        self._run: Any = None

    def __repr__(self) -> str:
        return f"Wandb({self.project!r})"

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Begin the run."""
        self._run = import_module("wandb").init(project=self.project, config=dict(config), **self.options)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
