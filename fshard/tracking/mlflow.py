"""Records for MLflow."""

import re
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fshard.tracking.tracker import need

FORBIDDEN = re.compile(r"[^/\w.\- :]")
"""What names of MLflow's metrics cannot hold. It becomes an underscore."""


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
