"""Contests in real steps: ranks choose alike by given times, and nothing but time depends on them."""

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fshard as fs
from fshard.errors import PeerError
from fshard.runtime.memory.memory_spaces import free_bytes
from fshard.runtime.steps import contests, measured_rates
from fshard.runtime.steps.contests import Contest
from fshard.schedule import Policy
from fshard.schedule.auto import Rates
from fshard.schedule.footprint import footprint
from tests.shared.workers import Pools

DEPTH, WIDTH = 4, 16
CAP = 80
"""More steps than a choice takes."""

DEFAULT, EVEN = Policy(), Policy(prefetch=1, reduces=1, reshard=fs.keep(last=3))

Seconds = Callable[[Policy, int], float]
"""What a step takes under a policy on a rank."""


def ahead(policy: Policy, rank: int) -> float:
    """Slow under what gathers little ahead, as all ranks see it."""
    return 2.0 - policy.prefetch / 10 + rank / 100


def torn(policy: Policy, rank: int) -> float:
    """Each rank is slow under what the other is fast under, except for one policy."""
    return 1.2 if policy == EVEN else 1.0 + (policy.prefetch + rank) % 2


RATES = Rates(3e4, 1e6, 0.002)


@contextlib.contextmanager
def timed(seconds: Seconds, mesh: fs.Mesh) -> Iterator[None]:
    """A choice by given rates, and contests by given times, while this lasts."""

    def note(self: Contest, times: Any) -> None:
        assert times[-1] > times[1]
        self.seconds.append(seconds(self.schedule.policy, mesh.rank))

    with mock.patch.object(Contest, "note", note), mock.patch.object(measured_rates, "measured", lambda *_: RATES):
        yield


@fs.unit
def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
    """One layer."""
    return torch.tanh(x @ params["w"])


class Run:
    """A state and its step, made together."""

    def __init__(self, mesh: fs.Mesh, schedule: Any, hook: Callable[[int, Policy | None], None] | None = None) -> None:
        params = {f"l{i}": {"w": torch.eye(WIDTH) + i / 10} for i in range(DEPTH)}
        self.plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=("*",))
        self.mesh, self.opt, self.hook, self.number = mesh, fs.optim.adamw(1e-2), hook, 0
        self.state = fs.init_state(self.plan, self.opt, params=params)
        self.step = fs.make_train_step(self.loss, self.opt, self.plan, schedule=schedule)

    def loss(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        if self.hook is not None and not torch.is_inference(x) and type(x) is torch.Tensor:
            self.hook(self.number, self.policy)
        for i in range(DEPTH):
            x = layer(params[f"l{i}"], x)
        return x.square().mean()

    @property
    def policy(self) -> Policy | None:
        """That of the step under way, or of the latest one."""
        schedule = self.step.latest.schedule
        return schedule.policy if schedule is not None else None

    def batch(self, rows: int = 2) -> torch.Tensor:
        """Of the next step on this rank."""
        draw = torch.Generator().manual_seed(100 * self.number + self.mesh.rank)
        return torch.randn(rows, WIDTH, generator=draw)

    def one(self, rows: int = 2) -> float:
        """Make a step, and return its loss."""
        self.state, metrics = self.step(self.state, self.batch(rows))
        self.number += 1
        return float(metrics.loss)

    def choice(self, rows: int = 2) -> Any:
        """What auto has chosen so far."""
        return self.step.trace(self.batch(rows)).choice

    def weights(self) -> list[list[float]]:
        """This rank's part of the parameters, after the update that waits."""
        return [x.flatten().tolist() for x in fs.tree.leaves(self.state.params)]


def contested(seconds: Seconds) -> tuple[Any, ...]:
    """On a rank: all of a contest by given times."""
    with fs.make_mesh((-1,), ("shard",)) as mesh, timed(seconds, mesh):
        run, policies, losses, refs, arenas = Run(mesh, "auto"), [], [], dict[int, Any](), dict[int, Any]()
        sizes: list[int] = []
        while run.number < CAP:
            losses.append(run.one())
            policies.append(str(run.policy))
            programs = run.step.programs
            refs |= {id(made): weakref.ref(made.engine) for made in programs.made.values()}
            arenas[run.number] = weakref.ref(programs.memory.arena.untyped_storage())
            sizes.append(programs.memory.arena.nbytes)
            if run.choice().settled:
                break
        choice, schedule = run.choice(), run.step.schedule
        gc.collect()
        kept = [ref() for ref in refs.values() if ref() is not None]
        held = {id(ref()) for ref in arenas.values() if ref() is not None}
        alone = len(kept) == len(held) == len(programs.made) == 1 and not programs.contests
        grown = any(a < b for a, b in itertools.pairwise(sizes))
        sized = sizes[-1] == schedule.memory.arena_bytes and not grown
        said = str(choice), choice.policy == schedule.policy, sized, alone
        return said, policies, losses, run.weights(), choice.policy


def plain(steps: int) -> tuple[list[float], list[list[float]]]:
    """On a rank: losses and weights without a choice."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        run = Run(mesh, Policy())
        return [run.one() for _ in range(steps)], run.weights()


@pytest.mark.parametrize(("seconds", "best"), [(ahead, DEFAULT), (torn, EVEN)])
def test_ranks_choose_alike_by_what_the_slowest_took_and_keep_every_bit(
    pool: Pools, seconds: Seconds, best: Policy
) -> None:
    ranks = pool(2).run(contested, seconds)
    assert ranks[0][0] == ranks[1][0] and ranks[0][1] == ranks[1][1]
    (words, chosen, sized, alone), policies, *_, winner = ranks[0]
    assert winner == best and chosen and sized and alone and "of 5 policies that were timed" in words
    assert policies[0] == str(DEFAULT) and len(set(policies)) == 5 and policies[-1] == str(winner)
    assert [rank[2:4] for rank in ranks] == pool(2).run(plain, len(policies))


VIRTUAL = fs.virtual_mesh((2,), ("shard",))


def settle(run: Run, rows: int = 2) -> list[Any]:
    """Steps until auto has chosen: the schedule of each."""
    seen = []
    while run.number < CAP:
        run.one(rows)
        seen.append(run.step.schedule)
        if run.choice(rows).settled:
            return seen
    raise AssertionError("it never settles")


@pytest.mark.long
def test_a_contest_stays_within_the_limit_of_memory() -> None:
    def limited(seconds: Seconds) -> Any:
        free = Run(VIRTUAL, fs.Auto(compute=1e9, wire=1e9)).choice()
        peaks = sorted({each.memory.peak_bytes for each in free.candidates})
        found = []
        for limit in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
            run, held = Run(VIRTUAL, fs.Auto(memory=limit)), []
            while run.number < CAP:
                run.one()
                schedule, arena = run.step.schedule, run.step.programs.memory.arena.nbytes
                peak = footprint(schedule, run.step.trace(run.batch()).needs).peak_bytes
                held.append(peak + arena - schedule.memory.arena_bytes)
                if run.choice().settled:
                    break
            found.append((limit, max(held), run.number, len(run.choice().measured), run.choice().settled))
        return found

    with timed(ahead, VIRTUAL):
        found = VIRTUAL.run(lambda: limited(ahead))[0]
    assert all(most <= limit and settled for limit, most, _, _, settled in found)
    counts = [count for *_, count, _ in found]
    assert counts[-1] > 2 and counts[0] < counts[-1] and counts[0] != 1


def failing(kind: str) -> tuple[Any, ...]:
    """On a rank: a contest in which rank 1 fails at times; what was raised, and what came of it."""
    failed: list[str] = []
    dropped: list[str] = []

    with fs.make_mesh((-1,), ("shard",)) as mesh, timed(ahead, mesh):
        run: Run

        def hook(number: int, policy: Policy | None) -> None:
            contest = next(iter(run.step.programs.contests.values()), None) if number else None
            if not isinstance(contest, Contest) or mesh.rank == 0:
                return
            if kind == "memory" and contest.schedule.policy == DEFAULT:
                dropped.append(str(contest.schedule.policy))
                raise MemoryError("no memory for this policy")
            if kind == "loss" and number == 3 and len(failed) < 2:
                raise ValueError("a bad row")

        run, losses, counts = Run(mesh, "auto", hook), [], []
        while run.number < CAP:
            contest = next(iter(run.step.programs.contests.values()), None)
            before = (len(contest.seconds), len(contest.round.contenders)) if isinstance(contest, Contest) else None
            try:
                losses.append(run.one())
            except (ValueError, PeerError) as error:
                failed.append(str(error).splitlines()[-1])
                assert isinstance(contest, Contest) and before is not None
                counts.append((before[0] == len(contest.seconds), contest.over or not contest.dispensable))
                continue
            if run.choice().settled:
                break
        return str(run.choice()), losses, run.weights(), len(failed), counts, len(dropped), str(run.choice().policy)


def test_a_step_that_failed_counts_for_nobody_and_its_policy_leaves(pool: Pools) -> None:
    ranks = pool(2).run(failing, "loss")
    words, losses, weights, count, notes, *_ = ranks[0]
    assert ranks[1][0] == words and count == ranks[1][3] == 2 and "that were timed" in words
    assert notes == ranks[1][4] == [(True, True)] * 2
    assert [rank[1:3] for rank in ranks] == pool(2).run(plain, len(losses))


def test_a_policy_that_finds_no_memory_leaves_and_the_step_is_made_all_the_same(pool: Pools) -> None:
    ranks = pool(2).run(failing, "memory")
    words, losses, _, count, *_ = ranks[0]
    assert ranks[1][0] == words and count == ranks[1][3] == 0 and "that were timed" in words
    assert ranks[1][5] > 0, "rank 1 has failed"
    assert [rank[1:3] for rank in ranks] == pool(2).run(plain, len(losses))
    assert ranks[0][6] == str(Policy(reshard=False)), "the next best"


def test_two_programs_have_a_contest_each() -> None:
    def both() -> Any:
        run = Run(VIRTUAL, "auto")
        while run.number < 2 * CAP and not (run.number > 2 and run.choice(2).settled and run.choice(3).settled):
            run.one(2 + run.number % 2)
        run.one(2)
        first = run.step.schedule.policy == run.choice(2).policy
        run.one(3)
        chosen = run.step.schedule.policy == run.choice(3).policy
        known = len(run.choice(2).measured), len(run.choice(3).measured)
        return run.number, first, chosen, known, str(run.choice(2)), str(run.choice(3))

    with timed(ahead, VIRTUAL):
        one, two = VIRTUAL.run(both)
    number, first, second, known, *_ = one
    assert one == two and number < 2 * CAP and first and second and min(known) > 2


@pytest.mark.long
def test_a_step_of_a_restored_state_begins_anew(tmp_path: Path) -> None:
    def interrupted() -> Any:
        run = Run(VIRTUAL, "auto")
        losses = [run.one() for _ in range(10)]
        middle = run.choice().settled
        fs.Checkpointer(tmp_path).save(run.state)
        again = Run(VIRTUAL, "auto")
        again.state, again.number = fs.Checkpointer(tmp_path).restore(again.plan, again.opt), run.number
        losses += [again.one() for _ in range(10)]
        return middle, losses, again.weights(), str(again.step.schedule.policy), again.choice().settled

    def whole() -> Any:
        run = Run(VIRTUAL, None)
        return [run.one() for _ in range(20)], run.weights()

    one, two = VIRTUAL.run(interrupted)
    assert [rank[1:3] for rank in (one, two)] == VIRTUAL.run(whole)
    assert not one[0] and not one[4] and one[3] == two[3]


@pytest.mark.parametrize(("size", "schedule"), [(1, "auto"), (2, fs.Auto(compute=1e9, wire=1e9))], ids=str)
def test_by_given_rates_there_is_no_contest(size: int, schedule: Any) -> None:
    mesh = fs.virtual_mesh((size,), ("shard",))

    def run() -> Any:
        one = Run(mesh, schedule)
        one.one()
        return one.choice().settled, one.step.schedule.policy == one.choice().policy, one.step.programs.contests

    assert mesh.run(run)[0] == (True, True, {})


@pytest.mark.long
def test_where_memory_is_short_less_is_timed() -> None:
    def measured() -> int:
        run = Run(VIRTUAL, "auto")
        settle(run)
        return len(run.choice().measured)

    with timed(ahead, VIRTUAL):
        plenty = VIRTUAL.run(measured)[0]
        with mock.patch.object(contests, "free_bytes", lambda device: 2 * 8000):
            short = VIRTUAL.run(measured)[0]
        with mock.patch.object(contests, "free_bytes", lambda device: 100):
            none = VIRTUAL.run(measured)[0]
    assert plenty > short > 0 == none


def test_free_memory_is_what_the_host_and_the_control_group_leave(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert free_bytes(cpu, tmp_path) is None
    write = functools.partial(_write, tmp_path)
    write("proc/meminfo", "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:    700 kB\nHugePages_Total:  0\n")
    assert free_bytes(cpu, tmp_path) == 700 * 1024
    write("proc/self/cgroup", "9:name=systemd:/\n0::/job/one\n")
    assert free_bytes(cpu, tmp_path) == 700 * 1024
    write("sys/fs/cgroup/job/one/memory.max", "max\n")
    write("sys/fs/cgroup/job/one/memory.current", "9000\n")
    assert free_bytes(cpu, tmp_path) == 700 * 1024
    write("sys/fs/cgroup/job/one/memory.max", "10000\n")
    assert free_bytes(cpu, tmp_path) == 1000
    write("sys/fs/cgroup/job/one/memory.stat", "anon 4000\ninactive_file 300\nactive_file 20\n")
    assert free_bytes(cpu, tmp_path) == 1320
    assert free_bytes(torch.device("meta")) is None and (free_bytes(cpu) or 1) > 0


def _write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
