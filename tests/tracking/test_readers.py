"""What the readers of TensorBoard, MLflow and Weights & Biases read back equals what a run told."""

import json
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import fshard as fs
from tests.tracking.test_track import recorded

pytestmark = pytest.mark.long


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = recorded(fs.trackers.TensorBoard(tmp_path), config={"width": 4})
    read = EventAccumulator(str(tmp_path)).Reload()
    assert {*told[0]} <= {*read.Tags()["scalars"]}
    for name in told[0]:
        found = [(event.step, event.value) for event in read.Scalars(name)]
        assert found == [(step, pytest.approx(float(row[name]), rel=1e-6)) for step, row in enumerate(told, 1)]
    assert b'"width": 4' in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_forgets_steps_that_a_resumed_run_makes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mesh = fs.make_mesh((1,), ("data",))
    for steps in ((1, 2, 3), (3, 4)):
        with fs.track([fs.trackers.TensorBoard(tmp_path)], mesh) as track:
            for step in steps:
                track(step, {"loss": step + len(steps)})
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 4), (2, 5), (3, 5), (4, 6)]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = fs.trackers.MLflow("an experiment", uri=tmp_path.as_uri(), name="a run")
    told = recorded(tracker, config={"width": 4})
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    run = client.get_run(tracker.run_id)
    assert run.data.params == {"width": "4"} and run.info.status == "FINISHED" and run.info.run_name == "a run"
    for name in told[0]:
        found = [(metric.step, metric.value) for metric in client.get_metric_history(tracker.run_id, name)]
        assert found == [(step, row[name]) for step, row in enumerate(told, 1)]
    with fs.track([fs.trackers.MLflow("an experiment", uri=tmp_path.as_uri(), run_id=tracker.run_id)], MESH) as track:
        track(5, {"grad_norms/(a|b).*": 1.0})
    assert client.get_metric_history(tracker.run_id, "grad_norms/_a_b_._")[0].value == 1.0


@pytest.mark.filterwarnings("ignore")
def test_mlflow_whose_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match=r"MLflow\('x'.*(has failed and gets no more|did not take all)") as caught:
        assert len(recorded(fs.trackers.MLflow("x", uri="http://127.0.0.1:9"), patience=20)) == 4
    assert len([one for one in caught if "training goes on" in str(one.message)]) == 1


def test_wandb_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the slow test reads back, as the calls that it comes from."""
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("fshard.tracking.tracker.find_spec", lambda name: object())
    told = recorded(fs.trackers.Wandb("project", name="a run"), config={"width": 4}, patience=20)
    fake.init.assert_called_once_with(project="project", config={"width": 4}, name="a run")
    logged = fake.init.return_value.log.call_args_list
    assert [call.kwargs["step"] for call in logged] == [1, 1, 2, 2, 3, 3, 4, 4]
    for call, mine in zip(logged[::2], told, strict=True):
        assert {name: call.args[0][name] for name in mine} == mine
    fake.init.return_value.finish.assert_called_once_with()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    # Its process starts with the settings of the environment alone: beside other tests 30 seconds, its own, may pass.
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "200")
    options: dict[str, Any] = {"mode": "offline", "dir": str(tmp_path), "settings": {"silent": True}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = recorded(fs.trackers.Wandb("project", name="a run", **options), config={"width": 4}, patience=240)
    assert not [str(one.message) for one in caught if "training goes on" in str(one.message)]
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    records, deadline = [], time.monotonic() + 120
    while not any(record.HasField("exit") for record in records):  # its process may write after the run's end
        assert time.monotonic() < deadline, f"{len(records)} records, and none of the end"
        time.sleep(0.05)
        records = [Record.FromString(data) for data in framed(path.read_bytes())]
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == ("project", "a run")
    assert {update.key: json.loads(update.value_json) for update in run.config.update}["width"] == 4
    rows = [record.history for record in records if record.HasField("history")]
    found = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]
    assert [row["_step"] for row in found] == [1, 2, 3, 4]
    for row, mine in zip(found, told, strict=True):
        assert {name: row[name] for name in mine} == mine


MESH = fs.make_mesh((1,), ("data",))


def framed(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which Weights & Biases writes: blocks of 32 KiB, after a header."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind or at + 7 + length > len(data):
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
