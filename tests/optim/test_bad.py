"""Optimizers that cannot be, or do not fit a plan: errors with the path, before anything is made, on every mesh."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard import optim as O  # noqa: N812
from fshard.errors import PlanError

PARAMS = {"a": {"w": torch.zeros(8, 4), "b": torch.zeros(4)}, "c": {"w": torch.zeros(4, 8), "s": torch.zeros(4, 3, 4)}}
LEAF = [fs.Rule(r".*", fs.fsdp("shard"), align="leaf")]
FLAT = [(r".*", fs.fsdp("shard"))]
FROZEN = [fs.Rule(r"a\..*", fs.fsdp("shard"), trainable=False), *FLAT]

ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: O.lion(-1.0, betas=(0.9, 1.0)), r"lr = -1.0(.|\n)*betas\[1\]"),
    (
        lambda: O.muon(0.1, momentum=1.0, iterations=0, adjust="other", coefficients=(1, 2), dtype=torch.int8),
        "(?s)momentum.*iterations.*adjust.*coefficients.*dtype",
    ),  # type: ignore[arg-type]
    (lambda: O.adafactor(beta2_decay=0.1, eps=1.0, clip=0.5), "(?s)beta2_decay.*clip.*eps"),  # type: ignore[arg-type]
    (lambda: O.adamw8bit(0.1, block=100), "block = 100: must be a multiple of 64"),
    (lambda: O.every(0, O.sgd(0.1)), "steps = 0: must be at least 1"),
    (lambda: O.every(2.0, O.sgd(0.1)), "steps = 2.0"),  # type: ignore[arg-type]
    (lambda: O.every(2, O.every(2, O.sgd(0.1))), "outermost"),
    (lambda: O.ema(O.every(2, O.sgd(0.1)), 0.9), "outermost"),
    (lambda: O.partition([(".*", O.every(2, O.sgd(0.1)))]), "outermost"),
    (lambda: O.chain(O.clip_value(1.0), O.every(2, O.sgd(0.1))), "outermost"),
    (lambda: O.ema(O.ema(O.sgd(0.1), 0.9), 0.9), "average already"),
    (lambda: O.ema(O.sgd, 1.0), r"(?s)opt = .*sgd.*decay = 1.0"),
    (lambda: O.chain(), "no parts"),
    (lambda: O.chain(O.sgd(0.1), O.sgd(0.1)), "part 0 .*has no apply"),
    (lambda: O.chain(O.clip_value(1.0)), "the last part"),
    (lambda: O.clip_value(0.0), "limit = 0.0"),
    (lambda: O.scale("half"), "factor = 'half'"),  # type: ignore[arg-type]
    (lambda: O.add_decay(-1.0), "rate = -1.0"),
    (lambda: O.partition([]), "at least one"),
    (
        lambda: O.partition([("(", O.sgd(0.1)), (".*", 3), ".*"]),
        r"(?s)rules\[0\]\[0\]: '\('.*rules\[1\]\[1\] = 3.*rules\[2\]",
    ),  # type: ignore[list-item]
    (lambda: O.partition([(".*", None)]), "none of them has an optimizer"),
    (lambda: O.masked(O.sgd(0.1), "("), "not a regular expression"),
    (lambda: O.from_torch(O.sgd, lr=0.1), "cls is the class sgd: give a class"),  # type: ignore[arg-type]
    (lambda: O.from_torch(torch.optim.Adam, lr=0.1, momentum=0.9), "unexpected keyword argument 'momentum'"),
    (lambda: O.from_torch(torch.optim.Adam, lr=0.1, betas=(0.9, 2.0)), "Invalid beta"),
]


@pytest.mark.parametrize(("make", "problem"), ARGUMENTS)
def test_arguments_out_of_range(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make()


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_classes_that_are_not_elementwise(name: str) -> None:
    with pytest.raises(PlanError, match=rf'from_torch\({name}\): its rule is not elementwise.*align="leaf"'):
        O.from_torch(getattr(torch.optim, name), lr=1e-6)


class Normed(torch.optim.SGD):
    """Not elementwise in its second update alone."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for leaf in group["params"]:
                if self.state[leaf]:
                    leaf.grad = leaf.grad / leaf.grad.norm()
        return super().step(closure)


def test_a_class_whose_later_updates_are_not_elementwise() -> None:
    with pytest.raises(PlanError, match=r"from_torch\(Normed\): .* after update 2 of a parameter .* cut into halves"):
        O.from_torch(Normed, lr=0.1, momentum=0.9)


MISFITS: list[tuple[Any, Any, str]] = [
    (O.adamw(0.1, decay=r".*wieght"), FLAT, r"decay = '\.\*wieght' matches none of the 4 leaves.*'a\.w'"),
    (O.sgd(0.1, decay="b"), FLAT, "decay = 'b' matches none"),
    (O.lion(0.1, decay="b"), FLAT, "decay = 'b' matches none"),
    (O.from_torch(torch.optim.Adam, lr=0.1, decay="b"), FLAT, "decay = 'b' matches none"),
    (O.ema(O.adamw(0.1, decay="b"), 0.9), FLAT, "decay = .b."),
    (O.masked(O.sgd(0.1), "b"), FLAT, r"partition: rules\[0\] 'b' decides no leaf"),
    (O.partition([(r"a\..*", O.sgd(0.1))]), FLAT, r"no pattern matches c\.w"),
    (O.partition([(r".*", O.sgd(0.1)), (r"a\.w", O.adamw(0.1))]), FLAT, r"rules\[1\] 'a\\\\.w' decides no leaf"),
    (
        O.partition([(r"a\..*", O.sgd(0.1)), (".*", O.adamw(0.1))]),
        FROZEN,
        r"rules\[0\] .* frozen leaves alone \(a\.w, a\.b\)",
    ),
    (
        O.partition([(r"a\..*", O.adamw(0.1, decay=r"c\.w")), (".*", O.sgd(0.1))]),
        FLAT,
        r"decay = 'c\\\\.w' matches none of the 2",
    ),
    (O.muon(0.1), LEAF, r"a\.b  \[4\] is neither a matrix(.|\n)*fs\.optim\.partition"),
    (O.muon(0.1), FLAT, r'a\.b  \[4\] is neither a matrix(.|\n)*a\.w  \[8, 4\]  .*align="leaf"'),  # both in one report
    (
        O.partition([(r".*w", O.muon(0.1)), (".*", O.sgd(0.1))]),
        FLAT,
        r'a\.w  \[8, 4\]  P\(flat=.shard.\): .*whole matrices.*align="leaf"',
    ),
    (
        O.partition([(r".*w", O.muon(0.1)), (".*", O.sgd(0.1))]),
        [fs.Rule(r".*", fs.fsdp("shard"), align=64)],
        'align="leaf"',
    ),
    (O.partition([(r".*w", O.muon(0.1)), (".*", O.sgd(0.1))]), [(r".*w", P("shard")), (".*", P())], "dim 0 is cut"),
    (O.adafactor(0.1), FLAT, r'a\.b  \[4\]  P\(flat=.shard.\): .*the whole leaf.*align="leaf"'),
    (O.adafactor(0.1), [(r"c\.s", P("shard")), (".*", P())], r"c\.s .*dim 0 is cut"),
    (O.adamw8bit(0.1), FLAT, r"a\.w .*blocks of 256 elements.*align=256"),
    (O.adamw8bit(0.1, block=512), [fs.Rule(r".*", fs.fsdp("shard"), align=256)], "align=512"),
]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("opt", "rules", "problem"), MISFITS)
def test_optimizers_that_do_not_fit(opt: Any, rules: Any, problem: str, ranks: int) -> None:
    for rank in range(ranks):
        plan = fs.make_plan(PARAMS, fs.abstract_mesh((ranks,), ("shard",), rank=rank), rules)
        with pytest.raises(PlanError, match=problem):
            fs.init_state(plan, opt, params=PARAMS)
        with pytest.raises(PlanError, match=problem):
            fs.make_train_step(lambda params, batch: params["a"]["w"].sum(), opt, plan)


FITS: list[tuple[Any, Any]] = [
    (O.partition([(r".*(w|s)", O.muon(0.1)), (".*", O.sgd(0.1))]), LEAF),
    (O.partition([(r".*s", O.muon(0.1)), (".*", O.sgd(0.1))]), [(r"c\.s", P("shard")), *FLAT]),
    (O.partition([(r".*w", O.muon(0.1)), (".*", None)]), [(".*", P())]),
    (O.adamw8bit(0.1), [fs.Rule(r"a\..*", fs.fsdp("shard"), align=512), *LEAF]),
    (O.partition([(r"c\..*", O.sgd(0.1))]), FROZEN),
    (O.adafactor(0.1), LEAF),
]


@pytest.mark.parametrize(("opt", "rules"), FITS)
def test_optimizers_that_fit(opt: Any, rules: Any) -> None:
    plan = fs.make_plan(PARAMS, fs.abstract_mesh((2,), ("shard",)), rules)
    assert fs.init_state(plan, opt, params=PARAMS).step == 0
    assert fs.make_train_step(lambda params, batch: params["a"]["w"].sum(), opt, plan).plan is plan


def test_a_state_of_another_optimizer_is_refused() -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        plan = fs.make_plan(PARAMS, mesh, FLAT)
        one = O.partition([(r"a\..*", O.adamw(0.1)), (".*", O.sgd(0.1))])
        other = O.partition([(r"c\..*", O.adamw(0.1)), (".*", O.sgd(0.1))])
        step = fs.make_train_step(lambda params, batch: params["a"]["w"].sum(), other, plan)
        with pytest.raises(fs.errors.TreeError, match="not of the same leaves"):
            step(fs.init_state(plan, one, params=PARAMS), None)


def test_masked_takes_any_pattern_even_one_that_matches_all() -> None:
    plan = fs.make_plan(PARAMS, fs.abstract_mesh((2,), ("shard",)), FLAT)
    some = fs.init_state(plan, O.masked(O.adamw(0.1), r"(?i)A\.w|c\..*"), params=PARAMS)
    assert sorted(path for path, _ in fs.tree.paths(some.opt_state["exp_avg"])) == ["a.w", "c.s", "c.w"]
    fs.init_state(plan, O.masked(O.adamw(0.1), ".*"), params=PARAMS)


def test_only_plain_rules_are_differentiable() -> None:
    plan = fs.make_plan(PARAMS, fs.abstract_mesh((2,), ("shard",)), FLAT)
    with pytest.raises(PlanError, match="no differentiable form"):
        fs.func.differentiable(O.ema(O.adamw(0.1), 0.9), plan)
