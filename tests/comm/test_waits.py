"""Every place of the package that may wait for a rank, a store, a thread or a lock is known, with what ends it."""

import ast
import inspect
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fshard
from fshard.runtime.comm.bounded import bounded
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.watchdog import STATUS

ROOT = Path(fshard.__file__).parent

WAITING = {
    *("wait", "poll", "select", "recv", "recvmsg", "recv_bytes", "accept", "connect", "acquire", "barrier"),
    *("flock", "lockf", "sleep", "communicate", "monitored_barrier", "synchronize"),
    *("new_group", "init_process_group", "destroy_process_group", "TCPStore", "FileStore", "PrefixStore"),
}
"""Names of functions and methods that may wait."""

STORE = {"get", "check", "wait", "set", "add", "multi_get", "compare_set"}
"""What a store is asked; it may never answer."""

ENDED = {
    "threads.py": "a lock that is asked for without waiting",
    "cli/link_tests.py": "a device, whose ops of NCCL the timeout ends",
    "checkpoint/checkpointer.py": "the thread of a save: its collectives, by the timeout; the file system has none",
    "checkpoint/folder.py": "a lock that is asked for without waiting, again and again for three seconds",
    "checkpoint/save.py": "a device: its own watchdog; the other thread that copies from it",
    "checkpoint/write.py": "threads that write files: the file system has no timeout",
    "collectives/raw.py": "handles of communicators",
    "outer_steps/outer_exchange.py": "handles of communicators",
    "pipeline/mail.py": "handles of communicators",
    "pipeline/stage_sums.py": "handles of communicators",
    "outer_steps/outer_step.py": "handles of communicators",
    "training/elastic.py": "Checkpointer.wait",
    "interchange/export_plan.py": "handles of communicators",
    "runtime/execution/actions.py": "handles of communicators",
    "played/cooperative.py": "played ranks: known at once when none can go on",
    "played/paused.py": "played ranks: known at once when none can go on; a poll, ended with the run",
    "runtime/memory/gradients.py": "a device: its own watchdog",
    "foresight/packing_time.py": "a handle that is done: nothing is sent",
    "runtime/comm/host_calls.py": "handles of communicators",
    "runtime/whole_graph/device_capture.py": "a device: its own watchdog",
    "runtime/comm/joining.py": "bounded, one second; its notes are left in joining.py, bounded",
    "runtime/comm/bounded.py": "the seconds that it is given",
    "runtime/comm/ending.py": "two seconds, once at the end of a process",
    "runtime/comm/exchange.py": "handles of communicators",
    "runtime/comm/gloo.py": "the timeout of the communicator, for each message; the watchdog",
    "runtime/comm/links.py": "one deadline for a communicator's links; a poll of zero, or of what is left of a timeout",
    "runtime/comm/failure_notes.py": "bounded, one second; a store that was silent is asked no more",
    "runtime/comm/part_transport.py": "bounded, in processes.py",
    "runtime/comm/pending.py": "the timeout of the communicator",
    "runtime/comm/processes.py": "bounded",
    "played/transport.py": "played ranks: known at once when none can go on",
    "runtime/comm/devices.py": "bounded, in processes.py; a deadline of its own; a thread that nobody waits for",
    "runtime/comm/start.py": "bounded, in processes.py; a deadline of its own; a socket of datagrams sends nothing",
    "runtime/comm/watchdog.py": "a tick of the thread that looks at waits",
    "runtime/steps/measured_rates.py": "handles of communicators",
    "runtime/memory/offload.py": "a device: its own watchdog",
    "runtime/engine/hosted_activations.py": "copies on a device: its own watchdog",
    "runtime/execution/resident.py": "copies on a device: its own watchdog",
    "runtime/execution/power_sgd.py": "handles of communicators",
    "runtime/execution/replica_sums.py": "handles of communicators",
    "runtime/execution/pending_update.py": "handles of communicators",
    "runtime/execution/wires.py": "handles of communicators",
    "tracking/tracker.py": "a deadline that it is given",
    "launching/caller.py": "the ranks' own: they are killed when the process that launched them is told to stop",
    "launching/nursery.py": "a poll; ranks that outlive one that failed are killed after some seconds",
}
"""Files that wait, and what ends their waits."""

ASKING = {
    "runtime/comm/joining.py",
    "runtime/comm/devices.py",
    "runtime/comm/failure_notes.py",
    "runtime/comm/start.py",
}
"""Files that ask a store. What they do is done in threads that somebody waits for with a deadline."""

ENTRIES = {
    "runtime/comm/joining.py": ("join", "join_by_file", "_of_group", "_agreed"),
    "runtime/comm/processes.py": ("communicator", "abort", "abort_all", "close", "_drop", "_made", "meet", "_destroy"),
}
"""The files that may call these, and their functions that others call."""

BOUNDED = {"new_group", "init_process_group", "destroy_process_group", "TCPStore"}
"""Calls of torch.distributed that ask the store."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The calls of a module, each after the name that is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""), node


def owner(call: ast.Call) -> str:
    """What a method is called on."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def waits(text: str) -> list[str]:
    """What may wait in a module."""
    out = []
    for name, node in calls(ast.parse(text)):
        if name not in WAITING | STORE | {"join", "result"}:
            continue
        on = owner(node)
        joins = name == "join" and (not node.args or "thread" in on)
        asks = name in STORE and on.split(".")[-1] in ("store", "_store()")
        task = name == "result" and "task" in on
        if name in WAITING or joins or asks or task:
            out.append(f"{node.lineno}: {on}.{name}")
    return out


def asks(text: str) -> list[str]:
    """Where a module asks a store."""
    return [
        f"{call.lineno}: {owner(call)}.{name}"
        for name, call in calls(ast.parse(text) if "store" in text else ast.Module([], []))
        if name in STORE and "store" in owner(call)
    ]


def sources() -> dict[str, str]:
    """The text of each module by its path in the package."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}


def test_every_wait_is_known_with_what_ends_it() -> None:
    found = {file: lines for file, text in sources().items() if (lines := waits(text))}
    new = {file: lines for file, lines in found.items() if file not in ENDED}
    assert not new, f"these may wait: end them after a time, and say here by what: {new}"
    assert not ENDED.keys() - found.keys(), f"these wait no more: {sorted(ENDED.keys() - found.keys())}"


def test_only_functions_with_a_deadline_ask_a_store() -> None:
    found = {file: lines for file, text in sources().items() if file not in ASKING and (lines := asks(text))}
    assert not found, f"a store may never answer: ask it by FailureNotes, or inside of bounded(): {found}"


def test_what_asks_the_store_runs_with_a_deadline() -> None:
    """In the two files that may call them: each is reached through ``bounded`` alone."""
    modules = {file: ast.parse(sources()[file]) for file in ENTRIES}
    functions = {
        node.name: node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    dangerous = {*BOUNDED, "start_name", "agree_on_places"}
    while True:  # functions that call what is dangerous, outside of a bounded body, are so themselves
        grown = {name for name, body in functions.items() if name not in dangerous and _open(body) & dangerous}
        if not grown:
            break
        dangerous |= grown
    entries = {name for names in ENTRIES.values() for name in names}
    assert entries <= functions.keys()
    assert not entries & dangerous, entries & dangerous
    assert {"_make", "_group", "_base", "_init", "destroy"} <= dangerous
    for file, other in sources().items():
        if file not in ENTRIES and any(name in other for name in BOUNDED):
            assert not [name for name, _ in calls(ast.parse(other)) if name in BOUNDED], file


def _open(function: ast.FunctionDef) -> set[str]:
    """What a function calls itself, not inside of what it gives to ``bounded``."""
    inside = {
        id(node)
        for name, call in calls(function)
        if name in ("bounded", "_in_time")
        for argument in call.args[:1]
        for node in ast.walk(argument)
    }
    nested = {
        id(n) for f in ast.walk(function) if isinstance(f, ast.FunctionDef) and f is not function for n in ast.walk(f)
    }
    return {name for name, call in calls(function) if id(call) not in inside | nested}


def test_a_new_wait_is_seen() -> None:
    assert waits("def f(a):\n    a.recv(4)\n    store.get('x')\n    thread.join(3)\n    ','.join([])") == [
        "2: a.recv",
        "3: store.get",
        "4: thread.join",
    ]
    assert asks("self.store.check(['a'])") == ["1: self.store.check"]


def test_a_call_that_does_not_return_is_left_behind() -> None:
    done = threading.Event()
    with pytest.raises(TimeoutError, match=r"timed out after 0\.05 s: a thing did not end"):
        bounded(done.wait, 0.05, "a thing")
    done.set()
    assert bounded(lambda: 3, 5.0, "a thing") == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}["a"], 5.0, "a thing")


def test_a_thread_that_helps_is_where_its_caller_is() -> None:
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    told = bounded(call_site, 5.0, "a look")
    assert told.endswith(f"test_waits.py:{line}") and "bounded" in told


def test_a_line_of_a_notebook_is_named_by_its_cell() -> None:
    cell = compile("\ntold = call_site()", "/tmp/ipykernel_123/456789.py", "exec")
    names = {"call_site": call_site, "__name__": "__main__"}
    exec(cell, names)
    assert str(names["told"]).startswith("fs.call_site, cell:2")


@pytest.mark.parametrize(("file", "named"), [("queue.py", False), ("site-packages/made.py", True)])
def test_a_line_of_the_standard_library_is_not_the_users(file: str, named: bool) -> None:
    """That which has called it is; and what is installed in its folder does not belong to it."""
    code = compile("told = call_site()", f"{Path(queue.__file__).parent}/{file}", "exec")
    names = {"call_site": call_site, "__name__": "made"}
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    exec(code, names)
    assert str(names["told"]).endswith("made.py:1" if named else f"test_waits.py:{line}")


def test_who_waits_in_the_standard_library_is_where_the_user_called_it() -> None:
    items: queue.Queue[int] = queue.Queue()
    waiting = threading.Thread(target=lambda: items.get())
    waiting.start()
    end = time.monotonic() + 10
    while "test_waits.py:" not in (told := call_site(waiting.ident)) and time.monotonic() < end:
        time.sleep(0.01)
    items.put(0)
    waiting.join(10)
    assert "queue.py" not in told and "test_waits.py:" in told


STUCK = """
import time
from fshard.runtime.comm.watchdog import Watchdog
watchdog = Watchdog(1, 0.5, print)
watchdog.start()
with watchdog.waiting("all-gather on control(shard)", 0):
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_wait_without_an_end_ends_the_process() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50)
    assert done.returncode == STATUS and time.monotonic() - began < 40
    assert "CommError: rank 1 has waited 5 s for rank 0 in all-gather on control(shard)" in done.stderr
