"""``fshard doctor``: what it finds, as text and as JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import fshard as fs
from fshard.cli import doctor
from fshard.cli.main import main
from fshard.version import VERSION


def test_findings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-test"]) in (0, 1)
    found = {one["name"]: one["value"] for one in json.loads(capsys.readouterr().out)}
    assert found["fshard"] == VERSION and "gloo" in found["backends"]
    assert {"torch", "CUDA", "processors", "interfaces", "host name", "shared memory"} <= found.keys()


def test_problems_are_told_and_are_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no processes here")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(doctor, "launch", failing)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "! no such interface: nowhere0" in out and "! RuntimeError: no processes here" in out


def test_the_self_test_on_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def virtual(fn: Callable[..., Any], ranks: int, all_ranks: bool) -> Any:
        return fs.virtual_mesh((ranks,), ("any",)).run(fn)

    monkeypatch.setattr(doctor, "launch", virtual)
    section, name, value, problem = doctor.tested()
    assert (section, name, problem) == ("self-test", "two ranks", "") and "5 steps in" in value


@pytest.mark.processes
@pytest.mark.slow
def test_the_self_test(capsys: pytest.CaptureFixture[str]) -> None:
    section, name, value, problem = doctor.tested()
    assert (section, name, problem) == ("self-test", "two ranks", "") and "5 steps in" in value
