"""Costs of ops and bytes: seconds by op, a rate and a latency by link, and copies beside compute."""

import json
import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Protocol, runtime_checkable

from fshard.arguments import described, expect
from fshard.errors import PlanError
from fshard.reading.texts import read_json
from fshard.schedule import schedule_refusals
from fshard.schedule.ops import STEP_KINDS, op_kinds
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import Transfer, awaited, moves
from fshard.writing import write_whole

FORMAT = "fshard costs 3"

TIMED = ("cpu",)
"""Types of devices that do not run behind their host, so that its clock times their ops."""

COPIED = {"all_gather": "in", "offload": "out", "activation_offload": "out", "activation_fetch": "in"}
"""Kinds of ops that start copies from host memory (in), and to it (out)."""


@dataclass(frozen=True)
class Link:
    """A carrier of transfers. It carries one after the other, in the order in which they are issued.

    Args:
        bytes_per_s: bytes that a rank can send in a second.
        latency: seconds from the issue of a transfer to its first byte.

    Raises:
        PlanError: a rate that is not positive, or a negative latency.

    >>> fs.sim.Link(125e6, latency=50e-6)  # 1 Gbit/s
    Link(bytes_per_s=125000000.0, latency=5e-05)
    """

    bytes_per_s: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        expect("fs.sim.Link", [(name, value, (int, float), "a number") for name, value in vars(self).items()])
        problems = [] if self.bytes_per_s > 0 else [f"bytes_per_s={self.bytes_per_s!r} is not positive"]
        if not 0 <= self.latency < math.inf:
            problems.append(f"latency={self.latency!r} is not a number of seconds")
        if problems:
            raise schedule_refusals.bad_costs(problems)

    def seconds(self, sent: int) -> float:
        """The time of so many bytes on the link, without the latency."""
        return sent / self.bytes_per_s


@runtime_checkable
class MeasuredRun(Protocol):
    """A run of a schedule and its times, as ``step.measured``."""

    @property
    def schedule(self) -> Schedule:
        """The schedule."""

    @property
    def issued(self) -> Sequence[float]:
        """The seconds at which the device comes to each op."""

    @property
    def seconds(self) -> float:
        """The time of the step."""

    @property
    def clock(self) -> str | None:
        """The type of the device, if the run was timed; None for a simulation."""


@dataclass(frozen=True)
class Costs:
    """Costs of ops.

    Args:
        seconds: how long the device is busy with one op, by kind and target: ``("forward", "blocks.0")``. With the
            target ``""`` it is what every op of that kind takes that has no entry of its own. Ops that it lacks take no
            time.
        link: the link of everything that has no link of its own.
        reduces: the link of reduce-scatters and of sums over replicas, if it is another than that of all-gathers.
        links: links by mesh axes, joined by ``+``: ``{"replica": Link(25e6)}``. All that goes over these axes, and
            over no others, takes that link.
        host: seconds of a step before its first op and after its last.
        machine: what the costs were measured on, in words.
        copies: seconds of copies between a device and the memory of its host, beside compute, by the op that starts
            them: ``("all_gather", "blocks.0")`` for a shard that comes from there before it is sent, ``("offload",
            "blocks.0")`` for a gradient that goes there, ``("activation_offload", "blocks.0")`` and
            ``("activation_fetch", "blocks.0")`` for what a unit keeps there. Those of a direction run one after the
            other.

    Raises:
        PlanError: a negative time, one of an unknown op, or something else than a link.

    >>> fs.sim.Costs({("forward", "blocks.0"): 2e-3}, fs.sim.Link(125e6)).link
    Link(bytes_per_s=125000000.0, latency=0.0)
    """

    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    link: Link = Link()
    reduces: Link | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    host: float = 0.0
    machine: str = ""
    copies: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = "a dict of seconds by op, such as {('forward', 'blocks.0'): 2e-3}"
        wants = [
            ("seconds", self.seconds, Mapping, seconds),
            ("links", self.links, Mapping, "a dict of fs.sim.Link by axes"),
            ("copies", self.copies, Mapping, "a dict of seconds by op, such as {('offload', 'blocks.0'): 2e-3}"),
            ("host", self.host, (int, float), "seconds"),
        ]
        expect("fs.sim.Costs", wants)
        links = {"link": self.link, "reduces": self.reduces or self.link, **self.links}
        problems = [
            f"{name}={link!r} is not an fs.sim.Link" for name, link in links.items() if not isinstance(link, Link)
        ]
        problems += _op_problems(self.seconds, self.copies)
        if not 0 <= self.host < math.inf:
            problems.append(f"host={self.host!r} is not a number of seconds")
        if problems:
            raise schedule_refusals.bad_costs(problems)

    @classmethod
    def of(cls, *runs: MeasuredRun) -> "Costs":
        """The costs that ops had in real steps: ``step.measured`` of some steps of one schedule.

        They are the medians of what each op took on this rank. What waits for transfers took is left out, since it
        depends on the link, and so are the handshake and the consensus, where ranks wait for each other: say what the
        link does, ``Costs.of(...).over(fs.sim.Link(125e6, 50e-6))``.

        Raises:
            PlanError: no run, a simulation, runs of several schedules, or times of a device that runs behind its host.

        Example::

            runs = []
            for batch in batches:
                state, metrics = step(state, batch)
                runs.append(step.measured)
            costs = fs.sim.Costs.of(*runs[2:])  # the first steps allocate
        """
        _check_runs(runs)
        taken: dict[tuple[str, str], list[float]] = {}
        for run in runs:
            ends = [*run.issued[1:], run.seconds]
            for op, begin, end in zip(run.schedule, run.issued, ends, strict=True):
                if awaited(op.kind) is None and op.kind not in STEP_KINDS:
                    taken.setdefault((op.kind, op.target), []).append(max(end - begin, 0.0))
        seconds = {op: median(times) for op, times in taken.items() if median(times)}
        return cls(seconds)

    def of_op(self, kind: str, target: str) -> float:
        """The seconds that an op takes on the device, beside what its bytes take."""
        own = self.seconds.get((kind, target))
        return self.seconds.get((kind, ""), 0.0) if own is None else own

    def only(self, kinds: Container[str]) -> "Costs":
        """Those of a schedule that has ops of these kinds."""
        seconds, copies = (
            {op: value for op, value in each.items() if op[0] in kinds} for each in (self.seconds, self.copies)
        )
        return replace(self, seconds=seconds, copies=copies)

    def __str__(self) -> str:
        return f"costs of {len(self.seconds)} kinds of ops, measured on {self.machine or 'a machine without a name'}"

    def carrier(self, transfer: Transfer) -> tuple[str, Link]:
        """The queue that a transfer shares with others, by name, and its link."""
        if transfer.axes in self.links:
            return transfer.axes, self.links[transfer.axes]
        if transfer.row.link == "reduces" and self.reduces is not None:
            return "reduces", self.reduces
        return "link", self.link

    def over(self, links: "Costs | Link") -> "Costs":
        """The times of these ops over other links: units from here, links from there.

        Args:
            links: a link for everything, or the costs whose links these are.
        """
        expect("costs.over(links)", [("links", links, (Link, Costs), "a link, or the costs whose links these are")])
        if isinstance(links, Link):
            return replace(self, link=links, reduces=None, links={})
        words = f"units of {self.machine}; links of {links.machine}" if self.machine or links.machine else ""
        moved = {key: value for key, value in links.seconds.items() if moves(key[0])}
        units = {key: value for key, value in self.seconds.items() if not moves(key[0])}
        copies = {**self.copies, **links.copies}
        return Costs({**units, **moved}, links.link, links.reduces, links.links, self.host, words, copies)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a JSON file, complete or not at all: a file that was there stays until the new one is whole.

        Raises:
            PlanError: the file cannot be written: no such folder, no permission, no room.
        """
        write_whole(path, json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON file. A link without a limit has the rate null."""
        every = {"link": self.link, "reduces": self.reduces, **{f"over {k}": v for k, v in self.links.items()}}
        return {
            "format": FORMAT,
            "machine": self.machine,
            "host": self.host,
            "seconds": {f"{kind}|{target}": value for (kind, target), value in self.seconds.items()},
            "copies": {f"{kind}|{target}": value for (kind, target), value in self.copies.items()},
            "links": {name: _plain(link) for name, link in every.items() if link is not None},
        }


def _check_runs(runs: Sequence[MeasuredRun]) -> None:
    """Refuse runs that say nothing of what ops cost.

    Raises:
        PlanError: no run, a simulation, runs of several schedules, or times of a device that runs behind its host.
    """
    way = "give step.measured of some steps of one schedule, Costs.of(*runs)"
    if not runs:
        raise PlanError(f"Costs.of: no run was given: {way}")
    for run in runs:
        if not isinstance(run, MeasuredRun):
            raise PlanError(f"Costs.of: {described(run)} is no measured run: {way}")
        if run.clock is None:
            raise PlanError(f"Costs.of: the times of a simulation were not measured: {way}")
    if any(run.schedule != runs[0].schedule for run in runs):
        raise PlanError(f"Costs.of: the runs are of several schedules: {way}")
    late = next((run.clock for run in runs if run.clock not in TIMED), None)
    if late is not None:
        raise PlanError(
            f"Costs.of: the host's clock gave these times, and it runs ahead of a device of type {late}: they are "
            f"those of launches. Take the seconds of units from torch.profiler, or foresee by fs.sim.hardware(...)"
        )


def _op_problems(seconds: Mapping[Any, Any], copies: Mapping[Any, Any]) -> Iterator[str]:
    """List what is wrong with ops and their times."""
    known = op_kinds()
    for op, value in [*seconds.items(), *copies.items()]:
        if not isinstance(op, tuple) or len(op) != 2:
            yield f"{op!r} is no op: give a pair of its kind and its target, ('forward', 'blocks.0')"
        elif op[0] not in known:
            yield f"{op[0]} {op[1]}: the kinds of ops are {', '.join(sorted(known))}"
        elif not isinstance(value, int | float) or not 0 <= value < math.inf:
            yield f"{op[0]} {op[1]} takes {value!r} seconds"
        elif op not in seconds and op[0] not in COPIED:
            yield f"{op[0]} {op[1]} starts no copy: those that do are {', '.join(COPIED)}"


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Costs from a file of ``Costs.save``.

    Args:
        path: the file.

    Raises:
        PlanError: the file is not there, or is none of these.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.sim.Costs({}, fs.sim.Link(1e9)).save(f"{folder}/costs.json")
    ...     fs.sim.read_costs(f"{folder}/costs.json").link.bytes_per_s
    1000000000.0
    """
    try:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        links = {name: _link(values) for name, values in found["links"].items()}
        seconds, copies = _by_op(found["seconds"]), _by_op(found.get("copies", {}))
        link, reduces = links.pop("link"), links.pop("reduces", None)
        axes = {name.removeprefix("over "): each for name, each in links.items()}
        return Costs(seconds, link, reduces, axes, float(found["host"]), found["machine"], copies)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, PlanError):
            text = str(error) if os.fspath(path) in str(error) else f"{os.fspath(path)}: {error}"
            raise PlanError(text) from error
        raise PlanError(
            f"{os.fspath(path)}: not costs that Costs.save has written ({type(error).__name__}: {error}): measure "
            f"again, fs.sim.Costs.of(step.measured), and save what comes of it"
        ) from error


def _plain(link: Link) -> dict[str, float | None]:
    return {name: None if value == math.inf else value for name, value in asdict(link).items()}


def _link(values: Mapping[str, Any]) -> Link:
    return Link(**{name: math.inf if value is None else float(value) for name, value in values.items()})


def _by_op(seconds: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    parts = [(*key.partition("|"), value) for key, value in seconds.items()]
    return {(kind, target): float(value) for kind, _, target, value in parts}


@dataclass(frozen=True)
class Noise:
    """Differences of ranks from each other: factors on the time of each op, drawn once from a seed.

    Args:
        ranks: the spread of ranks: each is slower by ``exp(ranks * |x|)``, x normal.
        ops: the same for each op of each rank.
        slow: ranks that are slower by a known factor: ``{17: 1.3}``.
        seed: of the draws.

    Raises:
        PlanError: a negative spread, or a factor that is not positive.

    >>> fs.sim.Noise(ranks=0.02, ops=0.05).seed
    0
    """

    ranks: float = 0.0
    ops: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        spreads = [(name, getattr(self, name)) for name in ("ranks", "ops")]
        problems = [f"{name}={value!r} is not a spread >= 0" for name, value in spreads if not 0 <= value < 10]
        problems += [f"slow[{rank}]={value!r} is not positive" for rank, value in self.slow.items() if not value > 0]
        if problems:
            raise schedule_refusals.bad_costs(problems)
