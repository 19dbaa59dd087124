"""``fs.view.record``: what the last runs of a rank did, op by op, as a file for ``fshard trace``."""

import os
from pathlib import Path

from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.runtime.execution.observers import flight_of
from fshard.sharding.mesh import Mesh


def record(folder: str | os.PathLike[str], mesh: Mesh) -> None:
    """Write to which op this rank came when, in its last 32 runs on a mesh, at most 8,192 ops.

    It needs no other rank, so it is no collective call: a handler of a signal, or of an exception on one rank, may make
    it. ``fshard trace folder`` reads the records of all ranks that are there, and says who waits for whom.

    Args:
        folder: made if it is not there. Each rank writes a file of its own, complete or not at all.
        mesh: of the steps.

    Raises:
        PlanError: nothing has run on the mesh, it has no processes, or the folder cannot be written to.

    >>> import os, tempfile
    >>> mesh = fs.make_mesh((1,), ("data",))
    >>> plan = fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(2)})
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), fs.optim.sgd(0.1), plan)
    >>> state, metrics = step(state, torch.ones(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.view.record(folder, mesh)
    ...     names = sorted(os.listdir(folder))
    >>> names[-1]
    'rank0.flight'
    """
    wants = [("folder", folder, (str, os.PathLike), "a folder"), ("mesh", mesh, Mesh, "the mesh of the steps")]
    expect("record(folder, mesh)", wants)
    flight = flight_of(mesh)
    if flight is None or not flight.runs:
        why = "no step has run on it yet" if flight is not None else "ranks without processes keep no record"
        raise PlanError(f"record(folder, mesh): {mesh!r}: {why}")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        flight.write(Path(folder))
    except OSError as error:
        raise PlanError(f"record({str(folder)!r}, mesh): the record cannot be written there: {error}") from error
