"""Two hosts, as network namespaces of this machine: torchrun joins them, one is lost, the other goes on alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.lab import Lab, obstacle

SCRIPT, ROOT = Path(__file__).with_name("two_hosts.py"), Path(__file__).parents[2]
STEPS = 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]


def started(lab: Lab, host: int, hosts: int, folder: Path, pause: float) -> "subprocess.Popen[str]":
    """The job of one host, in a session of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--node-rank={host}"]
    torchrun += ["--nproc-per-node=1", "--master-addr=10.0.0.1", "--master-port=29500", "--local-addr", address(host)]
    command = lab.command(host, [*torchrun, str(SCRIPT), str(folder), str(STEPS), str(pause)])
    names = "timeout:1 attempts:1"  # no server of names can be reached, and PyTorch asks for that of each peer
    words = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "RES_OPTIONS": names}
    env = {**os.environ, **words, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def address(host: int) -> str:
    """The address of a host of the lab."""
    return f"10.0.0.{host + 1}"


def ended(jobs: Sequence["subprocess.Popen[str]"], seconds: float) -> list[str]:
    """What jobs printed, once all are over; none of them outlives this."""
    deadline, late = time.monotonic() + seconds, False
    while any(job.poll() is None for job in jobs) and not late:
        time.sleep(0.2)
        late = time.monotonic() > deadline
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    said = [job.communicate()[0] for job in jobs]
    assert not late, "\n".join(said)
    return said


def lost(lab: Lab, host: int) -> None:
    """End every process of a host at once; those of torchrun's workers have sessions of their own."""
    told = subprocess.run(["ip", "netns", "pids", lab.names[host]], capture_output=True, text=True, check=True)
    for pid in map(int, told.stdout.split()):
        os.kill(pid, signal.SIGKILL)


def reached(folder: Path, step: int, seconds: float = 90.0) -> None:
    """Wait until a run has come to a step."""
    deadline, file = time.monotonic() + seconds, folder / "step"
    while not (file.exists() and file.read_text() and int(file.read_text()) >= step):
        assert time.monotonic() < deadline, "the run has not come to its first steps"
        time.sleep(0.2)


@pytest.mark.timeout(400)
def test_a_host_is_lost_and_the_other_goes_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    with Lab(2, "1gbit") as lab:
        said = ended([started(lab, host, 2, whole, 0.0) for host in range(2)], 120.0)
        assert (whole / "loss").exists(), "\n".join(said)
        jobs = [started(lab, host, 2, cut, 0.5) for host in range(2)]
        try:
            reached(cut, 5)
            lost(lab, 1)
        finally:
            first, _ = ended(jobs, 120.0)
        assert jobs[0].returncode != 0 and "rank 1" in first and not (cut / "loss").exists(), first
        (alone,) = ended([started(lab, 0, 1, cut, 0.0)], 120.0)
        assert (cut / "loss").exists(), alone
    assert float((cut / "loss").read_text()) == pytest.approx(float((whole / "loss").read_text()), rel=1e-5)
