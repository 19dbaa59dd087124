"""``fs.launch``: the side of the caller. It starts the ranks, shows what rank 0 writes, and ends them all."""

import codecs
import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from fshard.arguments import Want, expect
from fshard.errors import CommError, LaunchError, PeerError, PlanError, lines
from fshard.hints import teaching
from fshard.launching.job import JOB, LAUNCHED, STATUS, log_of, packed, read_outcome, setting_of
from fshard.played.cooperative import playing
from fshard.tracebacks import hide

R = TypeVar("R")

POLL = 0.2
"""Seconds between two looks at whether the ranks are still there."""

ENDING = 10.0
"""Seconds that the nursery gets to end its ranks and itself, before all of them are killed."""

GONE = 2.0
"""Seconds until all processes are gone that were killed. One that has left their session is not, and may hold on."""

TAIL = 2000
"""Characters of a dead rank's output that an error shows."""


@teaching
def launch(fn: Callable[..., R], *args: Any, ranks: int, all_ranks: bool = False, **kwargs: Any) -> Any:
    """Run a function on real ranks, from a notebook or a script, and return what it returned on rank 0.

    Inside of the function, ``fs.make_mesh((-1,), ("data",))`` is the mesh of these ranks: the ``main()`` of a script
    for torchrun runs unchanged. The function may be defined in a cell. It is sent to new processes, by value, with what
    it uses, so it finds a notebook's variables as they are now, and changes none of them: what should come back is
    returned. (Steps, states and meshes belong to a process: make them inside.) New processes, not forks of this one,
    since threads and CUDA do not survive a fork: it does not matter what the notebook has done before.

    What rank 0 writes, progress bars included, is shown as it comes. No process is left behind: not by an error, not by
    an interrupt, and not if this process is killed. Only a process that a rank starts in a session of its own lives on.

    Args:
        fn: the function.
        *args: its arguments, on every rank.
        **kwargs: its further arguments by name.
        ranks: how many. With CUDA, rank ``i`` gets GPU ``i``.
        all_ranks: return the list of what all ranks returned.

    Raises:
        PlanError: it was called inside of a rank, or something cannot be sent to another process, which is named.
        LaunchError: a rank died, or raised what cannot be raised here.
        Exception: what the function raised on the first rank that failed by itself, with a note that has the lines of
            the function that led to it.

    >>> def total():
    ...     mesh = fs.make_mesh((-1,), ("data",))
    ...     return fs.collectives.psum(torch.tensor(mesh.rank + 1), "data", mesh=mesh)
    >>> fs.launch(total, ranks=2)  # doctest: +SKIP
    tensor(3)
    """
    __tracebackhide__ = True
    wants: list[Want] = [
        ("fn", fn, Callable, "a function; its arguments come after it"),
        ("ranks", ranks, int, "a number, ranks=2"),
        ("all_ranks", all_ranks, bool, "True or False"),
    ]
    expect("fs.launch(fn, ranks=2)", wants)
    _check_place(ranks)
    folder = tempfile.mkdtemp(prefix="fshard-launch-")
    try:
        Path(folder, JOB).write_bytes(packed(fn, args, kwargs))
        _run(folder, ranks)
        results = _results(Path(folder), ranks)
    except BaseException as error:
        hide(error)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results if all_ranks else results[0]


def _check_place(ranks: int) -> None:
    """Refuse to launch where ranks run already, or more ranks than GPUs.

    Raises:
        PlanError: saying where this is.
    """
    if isinstance(ranks, bool) or ranks < 1:
        raise PlanError(f"fs.launch(ranks={ranks!r}): give the number of ranks, 1 or more")
    where = ""
    if playing() is not None:
        where = "a rank of a virtual mesh"
    elif LAUNCHED in os.environ:
        where = f"rank {os.environ.get('RANK')} of an fs.launch"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        where = f"rank {os.environ.get('RANK')} of torchrun"
    if where:
        raise PlanError(
            f"fs.launch was called by {where}, and ranks start no ranks: call the function itself, which finds the "
            f"ranks by fs.make_mesh, or launch from outside"
        )


def _run(folder: str, ranks: int) -> None:
    """Start the ranks, and show what rank 0 writes until all have ended."""
    setting = setting_of(folder, ranks)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(setting.path), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    start = "import sys; from fshard.launching.nursery import main; main(sys.argv[1])"
    command = [sys.executable, "-c", start, setting.text()]
    pipe = subprocess.PIPE
    # A session of its own: Ctrl-C in a terminal reaches this process alone, which then ends all of the others.
    alive, held = os.pipe()
    with open(alive, "rb", buffering=0) as gone:  # it ends with the last process that holds the other end
        with open(held, "wb", buffering=0):
            nursery = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                start_new_session=True,
                bufsize=0,
                pass_fds=[held],
            )
        try:
            _show(nursery)
        finally:
            _end(nursery, gone)


def _end(nursery: "subprocess.Popen[bytes]", gone: IO[bytes]) -> None:
    """End the nursery, its ranks and what these have started, as workers of a DataLoader, and wait until they are gone.

    The nursery does so when its input ends, since it alone can wait for its children. If it fails to, all of them are
    killed here. Processes that ranks have forked hold ``gone`` open as long as they live.
    """
    assert nursery.stdin is not None and nursery.stdout is not None and nursery.stderr is not None
    nursery.stdin.close()
    try:
        with suppress(subprocess.TimeoutExpired):
            nursery.wait(ENDING)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(nursery.pid, signal.SIGKILL)
        nursery.wait()
        ended = select.poll()  # select() takes no descriptors from 1,024 on
        ended.register(gone, select.POLLIN)
        ended.poll(GONE * 1000)
        nursery.stdout.close()
        nursery.stderr.close()


def _show(nursery: "subprocess.Popen[bytes]") -> None:
    """Pass on what rank 0 writes, until its pipes end or the ranks are gone."""
    decode = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as selector:
        for stream, target in ((nursery.stdout, "stdout"), (nursery.stderr, "stderr")):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, (target, decode("replace")))
        over = False
        while selector.get_map() and not over:
            over = nursery.poll() is not None  # what is in the pipes by then is still shown
            while ready := selector.select(0 if over else POLL):
                for key, _ in ready:
                    _pass_on(selector, key)
                if not selector.get_map():
                    break
    nursery.wait()


def _pass_on(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
    name, decoder = key.data
    data = os.read(stream.fileno(), 65536)
    target = getattr(sys, name)
    target.write(decoder.decode(data, final=not data))
    target.flush()
    if not data:
        selector.unregister(stream)


def _results(folder: Path, ranks: int) -> list[Any]:
    """Return what the ranks returned.

    Raises:
        LaunchError, Exception: what the first rank that failed by itself has raised, or how it died.
    """
    try:
        statuses = {int(rank): status for rank, status in json.loads((folder / STATUS).read_text()).items()}
    except FileNotFoundError:
        raise LaunchError(
            "fs.launch: the processes could not be started, or were killed together: see what was printed above"
        ) from None
    outcomes = {rank: read_outcome(folder, rank) for rank in range(ranks)}
    results = {rank: found[1] for rank, found in outcomes.items() if found is not None and found[0] == "result"}
    if len(results) < ranks:
        raise _failure(folder, {rank: found for rank, found in outcomes.items() if rank not in results}, statuses)
    return [*results.values()]


def _failure(folder: Path, outcomes: Mapping[int, Any], statuses: Mapping[int, Any]) -> BaseException:
    """Return what is told of ranks that returned nothing.

    Ranks that failed by themselves come first, then those that died, unless they were ended here, then the others.
    """
    errors = {rank: found for rank, found in outcomes.items() if found is not None}
    own = [rank for rank, found in errors.items() if not isinstance(found[1], CommError | PeerError)]
    dead = {rank: statuses[rank] for rank in outcomes if rank not in errors and statuses[rank] is not None}
    if own or (errors and not dead):
        return _raised(errors[min(own or errors)])
    return _died(folder, min(dead, default=0), dead or {0: -signal.SIGKILL})


def _raised(found: tuple[Any, ...]) -> BaseException:
    """A rank's exception, with its lines as a note."""
    error: BaseException = found[1]
    if not isinstance(error, Exception):  # SystemExit would end this process, and nobody here pressed Ctrl-C
        error = LaunchError(f"a rank ended with {type(error).__name__}({error})")
    error.add_note(found[2])
    return error


def _died(folder: Path, rank: int, dead: Mapping[int, Any]) -> LaunchError:
    """A rank that left neither a result nor an error."""
    status = dead[rank]
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    why = " (perhaps for memory: see dmesg)" if status == -signal.SIGKILL else ""
    try:
        told = Path(log_of(str(folder), rank)).read_text(errors="replace")[-TAIL:].splitlines()
    except FileNotFoundError:
        told = ["see what is printed above"]
    return LaunchError(
        lines(f"rank {rank} {how}{why}, and left no result. Its last output:", told, "All other ranks were ended.")
    )
