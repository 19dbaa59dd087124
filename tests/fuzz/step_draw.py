"""Generated step functions: programs over parts, as data that prints as it is made and travels to other processes.

A program is a list of ops over registers. A register holds a state, a tree of parameters or of gradients, or a number.
Each op adds one register, and an update two: a state and a norm.
"""

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

STEPS = 3
"""Calls of a step function."""

PATHS = (
    "scale",
    *[f"{unit}.{leaf}" for unit in ("gen.0", "gen.1", "dis.0") for leaf in ("inp", "bias", "out", "norm")],
)
ONLY = (r"dis\..*", r"gen\..*|scale", r".*bias", r"gen\.0\..*", r".*\.(inp|norm)", r"(?!scale).*")
"""Subsets of leaves: along units, and across them and their groups."""
READS = {"first": r"gen\..*|scale", "second": ".*", "weighted": r"gen\..*|scale", "real": r"dis\..*"}
"""The leaves that each loss reads."""


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        kind: "grad", "evaluate", "params", "add", "scale", "norm", "mix", "where", "update" or "replace".
        of: the registers that it reads.
        what: the loss, of "grad" and "evaluate".
        only: the leaves, of "grad" and "update"; None for all.
        number: a factor, or the limit of a norm.
        lr: the learning rate, of "update"; None for the optimizer's own.
    """

    kind: str
    of: tuple[int, ...]
    what: str = ""
    only: str | None = None
    number: float | None = None
    lr: float | None = None


@dataclass(frozen=True)
class Program:
    """What a step function does while its flag has one value.

    Attributes:
        ops: the ops. Its first registers are the states, and then a frozen one that comes in the batch.
        returned: the register of each state that it returns.
        told: the registers of its metrics.
    """

    ops: tuple[Op, ...]
    returned: tuple[int, ...]
    told: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A step function, and how it runs.

    Attributes:
        sizes: of the mesh.
        names: of its axes.
        rules: of each state's plan: a key of ``step_run.PLANS``.
        programs: what the step function does, by the value of a flag.
        flags: the value of the flag in each call.
        how: "step", "asking" or "eager", see ``tests.parts.ways``.
        real: whether it runs on real processes.
        options: of the parts.
        policy: of the schedule.
        stop: the call, the op before which it ends in an error first, and the rank; None for no such call.
    """

    number: int
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    rules: tuple[str, ...]
    programs: tuple[Program, ...]
    flags: tuple[int, ...]
    opt: str
    how: str
    real: bool
    donate: bool
    debug: bool
    options: tuple[tuple[str, Any], ...]
    policy: tuple[tuple[str, Any], ...]
    stop: tuple[int, int, int] | None = None

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return self.sizes[0] * (self.sizes[1] if len(self.sizes) > 1 else 1)


@dataclass(frozen=True)
class Register:
    """What is known of a register.

    Attributes:
        kind: "state", "params", "grads" or "number".
        plan: the number of the plan; that of numbers is -1.
        paths: the leaves of a tree.
        unread: of a state, the leaves whose update nobody has read.
        frozen: whether it is of the state in the batch.
    """

    kind: str
    plan: int = -1
    paths: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    frozen: bool = False


@dataclass
class Writer:
    """Writes a program."""

    draw: random.Random
    states: int
    registers: list[Register] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    latest: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        every = frozenset(PATHS)
        self.latest = list(range(self.states))
        self.registers = [Register("state", plan, every) for plan in range(self.states)]
        self.registers.append(Register("state", self.states - 1, every, frozen=True))

    def write(self, many: int) -> None:
        """Some ops, and at least one update of each state."""
        kinds = ("grad", "evaluate", "params", "add", "scale", "norm", "mix", "where", "update", "replace")
        for _ in range(many):
            (kind,) = self.draw.choices(kinds, (6, 1, 2, 4, 2, 2, 1, 1, 6, 0.7))
            getattr(self, kind)()
        for plan in range(self.states):
            if self.latest[plan] == plan:
                self.grad(plan)
                self.update(plan)

    def add_op(self, op: Op, register: Register) -> int:
        """An op that makes a register."""
        self.ops.append(op)
        self.registers.append(register)
        return len(self.registers) - 1

    def pick(self, *kinds: str, plan: int | None = None) -> int | None:
        """A register of one of some kinds; of states mostly the latest."""
        if kinds == ("state",) and self.draw.random() < 0.8:
            return self.latest[self.draw.randrange(self.states) if plan is None else plan]
        fits = [n for n, r in enumerate(self.registers) if r.kind in kinds and plan in (None, r.plan)]
        return self.draw.choice(fits[-6:]) if fits else None

    def read(self, number: int) -> None:
        """Its value is asked for: no update of it waits."""
        self.registers[number] = replace(self.registers[number], unread=frozenset())

    def only(self, within: frozenset[str] = frozenset(PATHS)) -> str | None:
        """A subset of leaves, or None."""
        fits = [o for o in ONLY if within.issuperset(chosen(o))]
        return self.draw.choice(fits) if fits and (self.draw.random() < 0.6 or within != frozenset(PATHS)) else None

    def grad(self, plan: int | None = None) -> None:
        """A pass."""
        source = self.pick("state", plan=plan) if plan is not None else self.pick("state", *["params"] * 2)
        assert source is not None
        kind, what, only = self.registers[source], self.draw.choice([*READS]), self.only()
        if not chosen(only) & chosen(READS[what]):
            what = "second"
        self.read(source)
        self.told.append(self.add_op(Op("grad", (source,), what, only), Register("grads", kind.plan, chosen(only))))
        self.registers.append(Register("number"))
        self.told[-1] = len(self.registers) - 1

    def evaluate(self) -> None:
        """An evaluation."""
        source = self.pick("state")
        assert source is not None
        self.read(source)
        self.told.append(
            self.add_op(Op("evaluate", (source,), self.draw.choice(["first", "second"])), Register("number"))
        )

    def params(self) -> None:
        """The parameters of a state."""
        source = self.pick("state")
        assert source is not None
        self.read(source)
        self.add_op(Op("params", (source,)), replace(self.registers[source], kind="params"))

    def factor(self) -> tuple[tuple[int, ...], float]:
        """What a tree is multiplied by: a number, or one that is found in the step."""
        found = self.pick("number")
        return ((found,) if found is not None and self.draw.random() < 0.5 else ()), round(
            self.draw.uniform(-0.4, 0.4), 3
        )

    def add(self) -> None:
        """A sum of two trees of one plan."""
        x = self.pick("params", "grads")
        y = self.pick("params", "grads", plan=self.registers[x].plan) if x is not None else None
        if x is None or y is None:
            return
        left, right = self.registers[x], self.registers[y]
        if not left.paths >= right.paths:
            x, y, left, right = y, x, right, left
        if left.paths >= right.paths:
            more, number = self.factor()
            self.add_op(Op("add", (x, y, *more), number=number), replace(left, frozen=False))

    def scale(self) -> None:
        """A tree, times a number."""
        x = self.pick("grads")
        if x is not None:
            more, number = self.factor()
            self.add_op(Op("scale", (x, *more), number=1 + number), self.registers[x])

    def norm(self) -> None:
        """The norm of a tree."""
        x = self.pick("grads", "params")
        if x is not None:
            self.told.append(self.add_op(Op("norm", (x,)), Register("number")))

    def mix(self) -> None:
        """A number of two numbers, read before the step is over."""
        a, b = self.pick("number"), self.pick("number")
        if a is not None and b is not None:
            self.told.append(self.add_op(Op("mix", (a, b)), Register("number")))

    def where(self) -> None:
        """A number that two numbers decide."""
        a, b = self.pick("number"), self.pick("number")
        if a is not None and b is not None:
            self.told.append(self.add_op(Op("where", (a, b)), Register("number")))

    def update(self, plan: int | None = None) -> None:
        """An update by gradients of the same leaves."""
        source = self.pick("state", plan=plan)
        if source is None or self.registers[source].frozen:
            return
        state = self.registers[source]
        fits = [
            n for n, r in enumerate(self.registers)
            if r.kind == "grads" and r.plan == state.plan and not r.paths & state.unread
        ]  # fmt: skip
        if not fits:
            return
        grads = fits[-1] if self.draw.random() < 0.7 else self.draw.choice(fits)
        paths = self.registers[grads].paths
        only = next((o for o in (None, *ONLY) if chosen(o) == paths), "")
        if only == "":
            return
        clip = self.draw.choice([None, None, 0.3, 3.0])
        lr = self.draw.choice([None, None, None, 0.003])
        made = replace(state, unread=state.unread | paths)
        self.latest[state.plan] = self.add_op(Op("update", (source, grads), only=only, number=clip, lr=lr), made)
        self.registers.append(Register("number"))
        self.told.append(len(self.registers) - 1)

    def replace(self) -> None:
        """A state with other parameters."""
        source = self.pick("state")
        params = self.pick("params", plan=self.registers[source or 0].plan)
        if source is not None and params is not None and not self.registers[source].frozen:
            self.read(source)
            made = replace(self.registers[source], unread=frozenset())
            self.latest[made.plan] = self.add_op(Op("replace", (source, params)), made)


def chosen(only: str | None) -> frozenset[str]:
    """The leaves of a subset."""
    return frozenset(path for path in PATHS if only is None or re.fullmatch(only, path))


def draw(seed: int, number: int, real: float = 0.0) -> Case:
    """The case of this number."""
    die = random.Random(f"steps {seed} {number}")
    sizes, names = die.choice(
        [((1,), ("shard",)), ((2,), ("shard",)), ((2,), ("shard",)), ((3,), ("shard",)), ((2, 2), ("replica", "shard"))]
    )
    states = die.choice([1, 1, 1, 2])
    how = die.choice(["step", "step", "step", "step", "asking", "eager"])
    programs = [program(die, states, die.randint(3, 14))]
    options = {"accumulate": die.choice([1, 1, 2]), "remat": die.choice([None, None, "all"])}
    policy = {
        "prefetch": die.randrange(4),
        "reduces": die.choice([1, 2, 4]),
        "reshard": die.choice([True, False, "keep"]),
    }
    return Case(
        number, sizes, names, tuple(die.choice(["mixed", "flat", "spread"]) for _ in range(states)),
        *flagged(random.Random(f"flags {seed} {number}"), programs, states), die.choice(["sgd", "adamw"]), how,
        die.random() < real, how != "eager" and die.random() < 0.7, die.random() < 0.3,
        tuple(options.items()), tuple(policy.items()), stopped(random.Random(f"stops {seed} {number}"), sizes, how),
    )  # fmt: skip


def stopped(die: random.Random, sizes: tuple[int, ...], how: str) -> tuple[int, int, int] | None:
    """The places at which a step function ends in an error, after which the call is made again."""
    ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    return (
        (die.randrange(STEPS), die.randint(0, 12), die.randrange(ranks))
        if how != "eager" and die.random() < 0.4
        else None
    )


def program(die: random.Random, states: int, many: int) -> Program:
    """A program of at least so many ops."""
    writer = Writer(die, states)
    writer.write(many)
    return Program(tuple(writer.ops), tuple(writer.latest), tuple(writer.told))


def flagged(die: random.Random, programs: list[Program], states: int) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """The programs of a step function whose flag may change between calls, and its values in these."""
    flags = die.choice([(0,) * STEPS, (0, 1, 0), (0, 1, 1), (0, 0, 1)])
    if any(flags):
        longer = program(die, states, die.randint(1, 8))
        own = programs[0]
        shorter = Program((), tuple(range(states)), ())  # the flag takes all passes and updates away
        programs.append(die.choice([longer, longer, shorter]))
        if die.random() < 0.5 and programs[1].ops:
            programs[:] = [programs[1], own]
    return tuple(programs), flags
