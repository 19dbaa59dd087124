"""What ops and bytes cost: units, links, processors. Costs of one machine's units go with another machine's links.

A transfer costs more than its time on the wire. Its rank starts it, which may copy what is sent; threads carry it
beside compute, and take processor time from it where a rank has no second processor; and its wait may copy or add up
what has arrived. A ``Link`` has a figure for each.
"""

import json
import math
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.reading.texts import read_json
from fshard.schedule import refusals
from fshard.schedule.link import Link
from fshard.schedule.ops import STEP_KINDS, op_kinds
from fshard.schedule.transfers import KINDS, Transfer, moves
from fshard.sharding.mesh import Mesh
from fshard.writing import write_whole

FORMAT = "fshard costs 2"

GATHERS = frozenset(kind.name for kind in KINDS.values() if kind.stage in ("read", "updated"))
"""Kinds of transfers that send the same bytes to each peer."""

COPIED = ("all_gather", "offload")
"""Kinds of ops that start copies from host memory, and to it."""


@dataclass(frozen=True)
class Costs:
    """Costs of ops.

    Args:
        seconds: how long the device is busy with one op, by kind and target: ``("forward", "blocks.0")``. With the
            target ``""`` it is what every op of that kind takes that has no entry of its own. Ops that it lacks take no
            time.
        link: the link of all-gathers, and of everything else that has no link of its own.
        reduces: the link of reduce-scatters and of sums over replicas, if it is another than that of all-gathers.
        links: links by mesh axes, joined by ``+``: ``{"replica": Link(25e6)}``. All that goes over these axes, and
            over no others, takes that link. A key such as ``"reduce_scatter over replica"`` is that of one kind of
            transfer, which shares the wire of its axes.
        host: seconds of a step before its first op and after its last.
        processors: processors that a rank has. With 2 or more, threads that carry transfers take nothing from compute;
            with 1 they share it; with 1/2, as on a machine of 2 with 4 ranks, everything takes up to twice the time.
        machine: what the costs were measured on, in words.
        ranks: the ranks that took part in the handshake and the consensus; 0 if that is not known.
        updates_by_bytes: the part of the time of updates that goes by the bytes of their shards.
        copies: seconds of copies between a device and the memory of its host, beside compute, by the op that starts
            them: ``("all_gather", "blocks.0")`` for a shard that comes from there before it is sent, ``("offload",
            "blocks.0")`` for a gradient that goes there. Those of a kind run one after the other.

    Raises:
        PlanError: a negative time, one of an unknown op, or something else than a link.

    >>> Costs({("forward", "blocks.0"): 2e-3}, Link(125e6)).link
    Link(bytes_per_s=125000000.0, latency=0.0)
    """

    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    link: Link = Link()
    reduces: Link | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    host: float = 0.0
    processors: float = 2.0
    machine: str = ""
    ranks: int = 0
    updates_by_bytes: float = 0.0
    copies: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = "a dict of seconds by op, such as {('forward', 'blocks.0'): 2e-3}"
        wants = [
            ("seconds", self.seconds, Mapping, seconds),
            ("links", self.links, Mapping, "a dict of fs.sim.Link by axes"),
            ("copies", self.copies, Mapping, "a dict of seconds by op, such as {('offload', 'blocks.0'): 2e-3}"),
            ("host", self.host, (int, float), "seconds"),
            ("processors", self.processors, (int, float), "a number of processors"),
        ]
        expect("fs.sim.Costs", wants)
        links = {"link": self.link, "reduces": self.reduces or self.link, **self.links}
        problems = [
            f"{name}={link!r} is not an fs.sim.Link" for name, link in links.items() if not isinstance(link, Link)
        ]
        problems += _op_problems(self.seconds, self.copies)
        if not 0 <= self.host < math.inf or not 0 < self.processors < math.inf:
            problems.append(f"host={self.host!r}, processors={self.processors!r}: not negative, and more than none")
        if not 0 <= self.updates_by_bytes <= 1:
            problems.append(f"updates_by_bytes={self.updates_by_bytes!r}: a part, from 0 to 1")
        if problems:
            raise refusals.bad_costs(problems)

    @property
    def shared(self) -> float:
        """The part of work beside compute that compute feels: none of it where a rank has two processors."""
        return min(max(2.0 - self.processors, 0.0), 1.0)

    @property
    def slow(self) -> float:
        """Return how many times longer everything takes at most where a rank has less than a processor.

        If none ever waits.
        """
        return max(1.0, 1.0 / self.processors)

    def of(self, kind: str, target: str) -> float:
        """Return what an op takes on the device, beside what its bytes take."""
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
        """The wire that a transfer shares with others, by name, and its link."""
        axes = transfer.axes
        wire = axes if axes in self.links else ""
        own = self.links.get(f"{transfer.kind} over {axes}")
        if own is not None:
            return axes, own
        if wire:
            return wire, self.links[wire]
        if transfer.row.link == "reduces" and self.reduces is not None:
            return "reduces", self.reduces
        return "link", self.link

    def over(self, links: "Costs | Link", processors: float | None = None) -> "Costs":
        """The times of these ops over other links: units from here, links from there.

        Args:
            links: a link for everything, or the costs whose links these are.
            processors: those that a rank has there; by default those of ``links``, or of these costs.
        """
        expect("costs.over(links)", [("links", links, (Link, Costs), "a link, or the costs whose links these are")])
        if isinstance(links, Link):
            return replace(self, link=links, reduces=None, links={}, processors=processors or self.processors)
        words = f"units of {self.machine}; links of {links.machine}" if self.machine or links.machine else ""
        moved = {key: value for key, value in links.seconds.items() if moves(key[0])}
        units = {key: value for key, value in self.seconds.items() if not moves(key[0])}
        return Costs(
            {**units, **moved},
            links.link,
            links.reduces,
            links.links,
            self.host,
            processors or links.processors,
            words,
            self.ranks,
            self.updates_by_bytes,
            {**self.copies, **links.copies},
        )

    def among(self, mesh: Mesh) -> "Costs":
        """The costs where other ranks take part: each has a message for each peer, which takes its time.

        Through shared memory, a gather's start copies a shard once for all peers: a byte that is sent takes less of it.
        A link whose transfers are messages to several peers needs two of them to be busy all the time. More ranks that
        shard have less to update each.

        Args:
            mesh: the ranks. What is not known to grow with them stays.
        """
        kept = self._kept(mesh)
        longer = 1.0 - self.updates_by_bytes * (1.0 - kept)  # what updates take, of what they took
        seconds = {op: each * longer if op[0] == "update" else each for op, each in self.seconds.items()}
        links, by_bytes = dict(self.links), self.updates_by_bytes * kept / longer
        every = max([link.each for link in self.links.values()], default=0.0)
        for kind in STEP_KINDS if self.ranks else ():
            if (kind, "") in seconds:
                more = every * (mesh.size - self.ranks)
                seconds[kind, ""] = max(seconds[kind, ""] + more, 0.0)
        for key, link in self.links.items():
            kind, over, axes = key.rpartition(" over ")
            names = tuple(axes.split("+"))
            if link.peers and set(names) <= set(mesh.axis_names):
                peers = mesh.axis_size(names) - 1
                more = peers - link.peers
                links[key] = link.to_peers(peers, kind in GATHERS)
                if over:
                    wait = f"wait {kind}", ""
                    seconds[wait] = max(seconds.get(wait, 0.0) + link.each * more, 0.0)
        ranks = mesh.size if self.ranks else 0
        return replace(self, seconds=seconds, links=links, ranks=ranks, updates_by_bytes=by_bytes)

    def _kept(self, mesh: Mesh) -> float:
        """The part of a shard that is left to update where so many ranks shard."""
        kept = 1.0
        for key, link in self.links.items():
            kind, _, axes = key.partition(" over ")
            if kind == "all_gather" and link.peers and set(axes.split("+")) <= set(mesh.axis_names):
                kept = (link.peers + 1) / mesh.axis_size(tuple(axes.split("+")))
        return kept

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
            "processors": self.processors,
            "host": self.host,
            "ranks": self.ranks,
            "updates_by_bytes": self.updates_by_bytes,
            "seconds": {f"{kind}|{target}": value for (kind, target), value in self.seconds.items()},
            "copies": {f"{kind}|{target}": value for (kind, target), value in self.copies.items()},
            "links": {name: _plain(link) for name, link in every.items() if link is not None},
        }


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
            yield f"{op[0]} {op[1]} starts no copy: those that do are {' and '.join(COPIED)}"


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Costs from a file of ``Costs.save``.

    Args:
        path: the file.

    Raises:
        PlanError: the file is not there, or is none of these.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Costs({}, Link(1e9)).save(f"{folder}/costs.json")
    ...     read_costs(f"{folder}/costs.json").link.bytes_per_s
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
        numbers = float(found["host"]), float(found["processors"])
        more = int(found.get("ranks", 0)), float(found.get("updates_by_bytes", 0.0))
        return Costs(seconds, link, reduces, axes, *numbers, found["machine"], *more, copies)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, PlanError):
            text = str(error) if os.fspath(path) in str(error) else f"{os.fspath(path)}: {error}"
            raise PlanError(text) from error
        raise PlanError(
            f"{os.fspath(path)}: not costs that Costs.save has written ({type(error).__name__}: {error}): calibrate "
            f"again, and save what comes of it"
        ) from error


def _plain(link: Link) -> dict[str, float | None]:
    return {name: None if value == math.inf else value for name, value in asdict(link).items()}


def _link(values: Mapping[str, Any]) -> Link:
    found = {name: math.inf if value is None else float(value) for name, value in values.items()}
    shared = bool(found.pop("shared_memory", 0.0))
    counts = {name: int(found.get(name, usual)) for name, usual in (("peers", 0), ("together", 1))}
    return Link(**{**found, **counts}, shared_memory=shared)  # type: ignore[arg-type]


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

    >>> Noise(ranks=0.02, ops=0.05).seed
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
            raise refusals.bad_costs(problems)
