"""Records for TensorBoard."""

import json
import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fshard.tracking.tracker import need


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
        proto = "tensorboard.compat.proto"
        self._event = import_module(f"{proto}.event_pb2").Event
        self._summary = import_module(f"{proto}.summary_pb2").Summary
        log, now = import_module(f"{proto}.event_pb2").SessionLog, time.time()
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(self.folder)
        self._writer.add_event(self._event(wall_time=now, step=step, session_log=log(status=log.START)))
        if config:
            metadata = import_module(f"{proto}.summary_pb2").SummaryMetadata
            tensor, kinds = import_module(f"{proto}.tensor_pb2").TensorProto, import_module(f"{proto}.types_pb2")
            text = f"```\n{json.dumps(dict(config), indent=1, default=str)}\n```".encode()
            value = self._summary.Value(
                tag="config",
                metadata=metadata(plugin_data=metadata.PluginData(plugin_name="text")),
                tensor=tensor(dtype=kinds.DT_STRING, string_val=[text]),
            )
            self._writer.add_event(self._event(wall_time=now, step=step, summary=self._summary(value=[value])))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers as one event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
