"""A cluster in one machine: each rank in a network namespace of its own, behind a link of a given rate.

One veth pair a rank leads to a bridge, which has a namespace of its own too, so the machine's own network is not
touched. A token bucket on both ends of each pair is the link: what a rank sends and what it receives are shaped, each
to the full rate. With ``--together 2`` every two ranks share a host, that is a namespace and its link: among themselves
they talk over loopback, or by shared memory. With ``--delay 0.001`` links also hold each packet for a millisecond
(``delays.py``), and only what a rank sends is shaped. Needs Linux, root and iproute2.

A lab that was killed leaves namespaces behind; the next one removes them. Its ranks die with it.

    python benchmarks/lab.py --ranks 2 --rate 1gbit -- python benchmarks/worker.py --peers fsdp2 fshard
    python benchmarks/lab.py --ranks 4 --together 2 --rate 200mbit -- ...
    python benchmarks/lab.py --clean     # remove what a killed lab left behind
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

PREFIX = "fslab"
DEVICE = "eth0"
PORT = 29500

BUCKET = 64 << 10
"""Bytes that a link lets pass at once."""

CONTROL = "reno"
"""TCP's congestion control, whatever this machine has: the one that every Linux allows in a namespace. BBR would pace
each connection by itself, so that a link between several peers idles: 18 of 24 MB/s, in place of 22."""

WHOLE = BUCKET // 2
"""Bytes that TCP hands to a link in one piece. Pieces that do not fit into the bucket would be cut into packets of 1.5
kB, with a timer for each: at 1 Gbit/s in both directions that takes 1.3 processors, which adapters do by themselves."""


class LabError(RuntimeError):
    """The lab cannot be built here."""


class Lab:
    """Namespaces and links, there between ``__enter__`` and ``__exit__``.

    Args:
        ranks: how many there will be.
        rate: of each link, as ``tc`` reads it: ``1gbit``, ``200mbit``.
        together: ranks on one host, which is one namespace with one link.
        delay: seconds for which links hold each packet.
    """

    def __init__(self, ranks: int, rate: str, together: int = 1, delay: float = 0.0) -> None:
        if together < 1 or ranks % together:
            raise LabError(f"{ranks} ranks cannot be put on hosts of {together}")
        self.rate, self.together, self.delay = rate, together, delay
        self.forwarder: subprocess.Popen[str] | None = None
        owner = f"{PREFIX}-{os.getpid()}-{started(os.getpid())}"
        self.switch = f"{owner}-switch"
        self.names = [f"{owner}-{host}" for host in range(ranks // together)]

    def __enter__(self) -> "Lab":
        why = obstacle()
        if why:
            raise LabError(why)
        clean()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` as this rank."""
        return ["ip", "netns", "exec", self.names[rank // self.together], *command]

    def environment(self) -> dict[str, str]:
        """What every rank needs to know to join the others."""
        return {"MASTER_ADDR": _address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE}

    def sent(self) -> list[int]:
        """Bytes that have gone on each link, one a host."""
        texts = [_ip("netns", "exec", name, "cat", "/proc/net/dev") for name in self.names]
        return [sent_bytes(text, DEVICE) for text in texts]

    def _build(self) -> None:
        for name in (self.switch, *self.names):
            _ip("netns", "add", name)
        if self.delay:
            self._hold()
        else:
            self._bridge()
        for host, name in enumerate(self.names):
            _ip("-n", name, "address", "add", f"{_address(host)}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("netns", "exec", name, "sh", "-c", f"echo {CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control")
            _ip("-n", name, "link", "set", DEVICE, "up")
            _shape(name, DEVICE, self.rate)

    def _bridge(self) -> None:
        """Join all hosts by veth pairs and a bridge."""
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            _ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
            _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "link", "set", DEVICE, "gso_max_size", str(WHOLE))
            _shape(self.switch, port, self.rate)

    def _hold(self) -> None:
        """Join all hosts by a process that holds packets."""
        script, hosts = Path(__file__).with_name("delays.py"), enumerate(self.names)
        words = [str(script), str(self.delay), DEVICE, *(f"{name}={_address(host)}" for host, name in hosts)]
        command, pipe = [sys.executable, *words], subprocess.PIPE
        self.forwarder = subprocess.Popen(command, stdout=pipe, text=True, preexec_fn=die_with_parent)
        assert self.forwarder.stdout is not None
        if self.forwarder.stdout.readline() != "ready\n":
            raise LabError(f"{' '.join(words)}: it ended with status {self.forwarder.wait()}")

    def _remove(self) -> None:
        if self.forwarder is not None:
            with self.forwarder:  # which waits for it
                self.forwarder.kill()
        for name in (*self.names, self.switch):
            remove(name)


def obstacle() -> str | None:
    """Why there can be no lab here, or None."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux: it is made of network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"the lab needs {' and '.join(missing)} (package iproute2)" if missing else None


def sent_bytes(text: str, device: str) -> int:
    """The bytes that a device has sent, from the text of ``/proc/net/dev``; 0 if there is no such device."""
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    return 0


def run_ranks(commands: Sequence[Sequence[str]], environment: Mapping[str, str], timeout: float) -> int:
    """Run one process a rank, with torchrun's variables, until all are over or one has failed.

    Returns:
        The first exit status that is not 0; 124 if they take longer than ``timeout`` seconds.
    """
    processes: list[subprocess.Popen[bytes]] = []
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(len(commands)), **environment}
    deadline = time.monotonic() + timeout
    try:
        for rank, command in enumerate(commands):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, start_new_session=True, preexec_fn=die_with_parent))
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            if time.monotonic() > deadline:
                return 124
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone, however it went."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def started(pid: int) -> str:
    """When a process has started, in ticks since boot; empty if there is none. Numbers of processes are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def unwind_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise, as Ctrl-C does, so that whatever was built is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def remove(name: str) -> None:
    """Remove a namespace, with the processes that still run in it. Its links go with it."""
    for pid in _ip("netns", "pids", name, check=False).split():
        os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name, check=False)


def clean() -> list[str]:
    """Remove the namespaces of labs whose process is gone, and say which."""
    gone = []
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        parts = name.split("-")
        if parts[0] == PREFIX and len(parts) == 4 and started(int(parts[1])) != parts[2]:
            remove(name)
            gone.append(name)
    return gone


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _shape(namespace: str, device: str, rate: str) -> None:
    # A deeper bucket fills while ranks compute, and lets the next message through at once: with 512 kB, a message of
    # 600 kB takes 1.7 ms at 1 Gbit/s in place of 5.
    bucket = ("tbf", "rate", rate, "burst", f"{BUCKET}b", "latency", "200ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _ip(*arguments: str, check: bool = True) -> str:
    return _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Run a command in every namespace and say what each rank has sent."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--ranks", type=int, default=2, help="how many (default: 2)")
    cli.add_argument("--rate", default="1gbit", help="of each rank's link, as tc reads it (default: 1gbit)")
    cli.add_argument("--together", type=int, default=1, help="ranks on one host, which share a link (default: 1)")
    cli.add_argument("--delay", type=float, default=0.0, help="seconds for which links hold a packet (default: 0)")
    cli.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    cli.add_argument("--clean", action="store_true", help="remove what killed labs left behind, and stop")
    cli.add_argument("command", nargs=argparse.REMAINDER, help="-- and what each rank runs")
    args = cli.parse_args()
    why = obstacle()
    if why:
        print(f"skipped: {why}")
        return 0
    if args.clean:
        print("\n".join(clean()) or "nothing was left behind")
        return 0
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        cli.error("no command: give it after --")
    unwind_on_signals()
    with Lab(args.ranks, args.rate, args.together, args.delay) as lab:
        commands = [lab.command(rank, command) for rank in range(args.ranks)]
        status = run_ranks(commands, lab.environment(), args.timeout)
        for host, sent in enumerate(lab.sent()):
            print(f"{'rank' if args.together == 1 else 'host'} {host} sent {sent:,} bytes")
    return status


if __name__ == "__main__":
    sys.exit(main())
