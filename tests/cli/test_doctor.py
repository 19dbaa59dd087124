"""``fshard doctor``: what it finds, as text and as JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import fshard as fs
from fshard.cli import doctor
from fshard.cli.link_tests import LinkTests, findings, link_tests, pairs_of
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


def test_links_of_all_ranks_are_measured() -> None:
    for found in fs.virtual_mesh((3,), ("any",)).run(link_tests):
        assert found.links.keys() == {(0, 1), (0, 2), (1, 2)} and all(min(each) > 0 for each in found.links.values())
        assert found.clocks[0] == 0 and len(found.versions) == len(found.hosts) == 3
        assert not [line for line in findings(found) if "versions" in line[3] or "clocks" in line[3]]


def test_what_is_unlike_on_a_rank_is_told() -> None:
    links = {(0, 1): (1e9, 1e-5), (0, 2): (1e8, 1e-5), (1, 2): (1e9, 1e-5)}
    found = LinkTests(links, [0.0, 0.001, -2.5], ["a", "b", "a"], ["one", "one", "two"])
    told = {name: problem for _, name, _, problem in findings(found) if problem}
    assert "rank 0 has a: install the same" in told["rank 1"] and "10.0 times slower" in told["0 to 2"]
    clocks = {name: problem for section, name, _, problem in findings(found) if section == "clocks"}
    assert not clocks["rank 1"] and "NTP" in clocks["rank 2"]


def test_many_ranks_are_tried_from_rank_0_and_between_neighbors() -> None:
    assert pairs_of(1) == [] and len(pairs_of(16)) == 120 and len(pairs_of(64)) == 63 + 62
