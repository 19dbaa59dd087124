"""Records for TensorBoard, Weights & Biases and MLflow."""

import json
import os
import re
import time
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


FORBIDDEN = re.compile(r"[^/\w.\- :]")
"""Characters that names of MLflow's metrics cannot hold. Each becomes an underscore."""


class MLflow:
    """A run of MLflow, on a tracking server or in a folder.

    Args:
        experiment: the name of the experiment, which is made if there is none.
        uri: the tracking server or folder, such as ``"http://host:5000"`` or ``"file:///runs"``; None for MLflow's own
            default.
        name: the name of the run.
        run_id: a run to go on with.

    Raises:
        ImportError: mlflow is not installed: ``pip install "fshard[mlflow]"``.

    Example::

        with fs.track([fs.trackers.MLflow("gpt", uri="http://host:5000")], step, config={"lr": 3e-4}) as track:
            track(state.step, metrics)
    """

    remote = True

    def __init__(
        self, experiment: str, *, uri: str | None = None, name: str | None = None, run_id: str | None = None
    ) -> None:
        need("fs.trackers.MLflow", "mlflow", "mlflow-skinny", "mlflow")
        self.experiment, self.uri, self.name, self.run_id = experiment, uri, name, run_id
        self._client: Any = None

    def __repr__(self) -> str:
        return f"MLflow({self.experiment!r}, uri={self.uri!r})"

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Begin the run; the configuration becomes its parameters."""
        entities = import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = import_module("mlflow").MlflowClient(tracking_uri=self.uri)
        if self.run_id is None:
            known = self._client.get_experiment_by_name(self.experiment)
            number = known.experiment_id if known is not None else self._client.create_experiment(self.experiment)
            self.run_id = self._client.create_run(number, run_name=self.name).info.run_id
            params = [entities.Param(FORBIDDEN.sub("_", str(key)), str(value)) for key, value in config.items()]
            self._client.log_batch(self.run_id, params=params)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a step, in one request."""
        now = int(time.time() * 1000)
        rows = [self._metric(FORBIDDEN.sub("_", name), float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def close(self) -> None:
        """End the run."""
        if self._client is not None:
            self._client.set_terminated(self.run_id)


class TensorBoard:
    """Event files that TensorBoard shows: ``tensorboard --logdir FOLDER``. Values are kept as float32.

    A resumed run writes a file of its own beside the others, and tells TensorBoard which steps it makes again.

    Args:
        folder: the folder of the run.

    Raises:
        ImportError: tensorboard is not installed: ``pip install "fshard[tensorboard]"``.

    Example::

        with fs.track([fs.trackers.TensorBoard("runs/a")], step) as track:
            track(state.step, metrics)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        need("fs.trackers.TensorBoard", "tensorboard", "tensorboard", "tensorboard")
        self.folder = os.fspath(folder)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({self.folder!r})"

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Open the event file; the configuration is a text in it."""
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(self.folder, purge_step=step)
        if config:
            self._writer.add_text("config", f"```\n{json.dumps(dict(config), indent=1, default=str)}\n```", step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
