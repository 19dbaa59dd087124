"""Environments of ``srun`` and ``mpirun``: a rank, the number of ranks, and where they meet, by torchrun's names."""

import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from fshard.errors import PlanError


class Launcher(NamedTuple):
    """The variables of a program that starts processes.

    Attributes:
        name: the program.
        size: the variable of the number of processes.
        rank: that of a process's number.
        local: that of its number among the processes of its host.
        local_size: that of their number.
        jobs: those that name the job, equal on all ranks and different for each job.
    """

    name: str
    size: str
    rank: str
    local: str
    local_size: str
    jobs: tuple[str, ...]


LAUNCHERS = (
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_PORT",)),
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
"""``mpirun`` comes before ``srun``, which it uses to start itself on other hosts."""

NTASKS = "SLURM_NTASKS"
"""Set for the whole allocation, so also in a batch script that starts one process without ``srun``."""

PORTS = range(15000, 32000)
"""Where ranks meet by default: ports below those that systems hand out."""


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set, of those of another launcher; empty without a launcher.

    Raises:
        PlanError: several processes were started, and the variables do not tell how they meet.

    >>> found = as_torchrun({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODELIST": "n[03-04,07]"})
    >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]
    ('1', '2', 'n03')
    >>> as_torchrun({})
    {}
    """
    if environment.get("RANK") and environment.get("WORLD_SIZE"):
        _check_ranks(environment)
        return {}
    for one in LAUNCHERS:
        if _number(environment, one.size, 1) > 1:
            return _joined(environment, one)
    tasks = _number(environment, NTASKS, 1)
    if tasks > 1 and "SLURM_STEP_NUM_TASKS" not in environment:
        raise PlanError(
            f"{NTASKS}={tasks}, but this process was not started by srun, and RANK is not set, so it would train alone "
            f"on the whole batch: start the program with `srun python ...` or `torchrun`; or, if one process is meant, "
            f"with `env -u {NTASKS} python ...`"
        )
    if _number(environment, "WORLD_SIZE", 1) > 1:
        raise PlanError(
            f"WORLD_SIZE={environment['WORLD_SIZE']}, but RANK is {_state(environment, 'RANK')}, so this process would "
            f"train alone on the whole batch: start the program with torchrun, or set RANK, MASTER_ADDR and "
            f"MASTER_PORT, too"
        )
    if environment.get("RANK"):
        raise PlanError(
            f"RANK={environment['RANK']}, but WORLD_SIZE is {_state(environment, 'WORLD_SIZE')}, so this process would "
            f"train alone on the whole batch: start the program with torchrun, or set WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT, too; or, if one process is meant, start it with `env -u RANK python ...`"
        )
    return {}


def _check_ranks(environment: Mapping[str, str]) -> None:
    """Refuse what torchrun would not set.

    Raises:
        PlanError: a number is none or too large, or nothing tells where ranks meet.
    """
    rank, world = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if rank >= world:
        raise PlanError(
            f"RANK={rank} and WORLD_SIZE={world}: ranks go from 0 to {world - 1}. Start the program with torchrun, or "
            f"give each process a rank of its own"
        )
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if lacking and world > 1:
        raise PlanError(
            f"RANK={rank} and WORLD_SIZE={world} are set without {' and '.join(lacking)}, so ranks cannot meet: start "
            f"the program with torchrun, or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port"
        )
    _number(environment, "MASTER_PORT", 0)
    _number(environment, "LOCAL_RANK", 0)


def _state(environment: Mapping[str, str], name: str) -> str:
    """Say how a variable lacks a value."""
    return "empty" if name in environment else "not set"


def _joined(environment: Mapping[str, str], one: Launcher) -> dict[str, str]:
    """Return what torchrun would have set for a process of this launcher."""
    world, rank = _number(environment, one.size, 1), _number(environment, one.rank, -1)
    if not 0 <= rank < world:
        given = environment.get(one.rank, "not set")
        raise PlanError(
            f"{one.size}={world}, but {one.rank} is {given}: it must be the number of this process, from 0 to "
            f"{world - 1}. Or start the program with torchrun"
        )
    found = {"RANK": f"{rank}", "WORLD_SIZE": f"{world}"}
    local = one.local if one.local in environment else "SLURM_LOCALID"
    if local in environment:
        found["LOCAL_RANK"] = f"{_number(environment, local, 0)}"
    found["MASTER_ADDR"] = environment.get("MASTER_ADDR") or _address(environment, one, world)
    found["MASTER_PORT"] = environment.get("MASTER_PORT") or f"{_port(environment, one)}"
    return found


def _address(environment: Mapping[str, str], one: Launcher, world: int) -> str:
    """The host of rank 0.

    Raises:
        PlanError: the variables do not tell it.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    if one.name == "srun" and nodes:
        return first_host(nodes)
    if one.local_size and _number(environment, one.local_size, 0) == world:
        return "127.0.0.1"
    raise PlanError(
        f"{one.size}={world}, but RANK is not set, and nothing tells the host of rank 0: set MASTER_ADDR to its name "
        f"and MASTER_PORT to a free port for all processes, or start the program with torchrun"
    )


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it.

    >>> first_host("gpu[007-012,020],cpu1"), first_host("a,b"), first_host("r[1-2]n[3,5]")
    ('gpu007', 'a', 'r1n3')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _port(environment: Mapping[str, str], one: Launcher) -> int:
    """A port that ranks of a job have in common."""
    named = [environment[name] for name in one.jobs if name in environment]
    job = named or [str(os.getppid())]  # ranks of one host have one parent
    return PORTS[zlib.crc32(" ".join(job).encode()) % len(PORTS)]


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    """The number that a variable has.

    Raises:
        PlanError: it has something else.
    """
    text = environment.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal():
        raise PlanError(
            f"{name}={text!r} must be a number: set RANK and WORLD_SIZE, or start the program with torchrun"
        )
    return int(text)
