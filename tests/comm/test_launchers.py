"""Jobs of srun and mpirun: ranks join by their variables, or an error names these."""

import os
import random
import subprocess
import sys
from typing import Any

import pytest

import fshard as fs
from fshard.errors import PlanError
from fshard.runtime.comm.launchers import LAUNCHERS, as_torchrun, first_host

WAYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

STEPPED = """
import torch, fshard as fs
with fs.make_mesh((-1,), ("data",), timeout=30.0) as mesh:
    plan = fs.make_plan({"w": torch.zeros(1)}, mesh, [(".*", fs.P())], batch=fs.P("data"))
    opt = fs.optim.sgd(1.0)
    step = fs.make_train_step(lambda p, x: (p["w"] * x).mean(), opt, plan)
    state, _ = step(fs.init_state(plan, opt, params={"w": torch.zeros(1)}), torch.full((1,), 1.0 + 2 * mesh.rank))
    print(mesh.rank, mesh.size, state.params["w"].item())
"""


def variables(launcher: Any, world: int, rank: int) -> dict[str, str]:
    """What a launcher sets for a process, if all of them are on one host."""
    found = {launcher.size: str(world), launcher.rank: str(rank), launcher.local: str(rank)}
    found |= {name: "1234" for name in launcher.jobs}
    if launcher.local_size:
        found[launcher.local_size] = str(world)
    return found | ({"SLURM_NTASKS": str(world), "SLURM_NODELIST": "127.0.0.1"} if launcher.name == "srun" else {})


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("launcher", LAUNCHERS[-1:], ids=lambda one: one.name)
def test_ranks_train_as_one_job(launcher: Any) -> None:
    """The mean of the gradients 1 and 3, on both ranks; each alone would have its own."""
    clean = {name: value for name, value in os.environ.items() if name not in WAYS}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STEPPED],
            env=clean | variables(launcher, 2, rank) | {launcher.jobs[0]: f"{os.getpid()}{launcher.name}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [["0", "2", "-2.0"], ["1", "2", "-2.0"]]


def test_all_ranks_find_the_same_place() -> None:
    """Every launcher and size: ranks are numbered, and meet at one address."""
    for launcher in LAUNCHERS:
        for world in (2, 3, 8):
            found = [as_torchrun(variables(launcher, world, rank)) for rank in range(world)]
            assert [int(one["RANK"]) for one in found] == list(range(world))
            assert len({(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in found}) == 1


def test_what_is_given_stays() -> None:
    """torchrun inside of an allocation, an address of the user's own, and processes alone."""
    assert as_torchrun({"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}) == {}
    own = as_torchrun(variables(LAUNCHERS[0], 2, 1) | {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"})
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("node7", "29500")
    assert as_torchrun({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == {}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4, but this process was not started by srun"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but RANK is not set"),
        ({"WORLD_SIZE": "4", "RANK": ""}, "WORLD_SIZE=4, but RANK is empty"),
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "RANK=1, but WORLD_SIZE is empty"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2: ranks go from 0 to 1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' must be a number"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "without MASTER_ADDR, so ranks cannot meet"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT='x' must be a number"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2, but PMI_RANK is not set"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "nothing tells the host of rank 0: set MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "5"}, "OMPI_COMM_WORLD_RANK is 5"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE='two' must be a number"),
    ],
)
def test_a_job_that_cannot_join_is_refused(given: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process trains alone where several were started."""
    for name in [*WAYS, *given]:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=named):
        fs.make_mesh((-1,), ("data",))


def test_a_world_of_one_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fs.make_mesh((-1,), ("data",)).size == 1


def test_the_first_host_of_any_list() -> None:
    """Lists as Slurm writes them, against the hosts that they stand for."""
    draw = random.Random(7)
    for _ in range(200):
        start, more = draw.randrange(1, 500), draw.randrange(1, 20)
        width, tail = draw.choice([1, 3, 4]), draw.choice(["", "-ib", ".cluster"])
        first = f"gpu{start:0{width}}{tail}"
        ranges = f"{start:0{width}}" + draw.choice(["", f"-{start + more:0{width}}", f",{start + more:0{width}}"])
        rest = draw.choice(["", ",cpu1", ",x[1-2,4]"])
        assert first_host(f"gpu[{ranges}]{tail}{rest}") == first
        assert first_host(first + rest) == first
