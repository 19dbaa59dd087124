"""Which gradients make an update: unequal microbatches, several steps, skipped steps, and clipping by rules."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.errors import BatchError, LossError, PeerError, PlanError
from tests.optim import runs as optims
from tests.optim.runs import net
from tests.shared import parity
from tests.shared.virtual import Job
from tests.shared.workers import Pools

LENGTHS = [5, 3, 8, 1, 2, 7, 4, 6, 6, 1, 3, 2]
"""Rows of the batches of the twelve steps, on the first rank; each further rank has one more."""
TOLERANCE = 1e-5
CLIP = 1.28
"""Which some of the norms exceed."""


def rows(step: int, rank: int) -> Tensor:
    """A rank's batch: as many rows as ``LENGTHS`` says and one a rank more."""
    return torch.randn(LENGTHS[step] + rank, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def errors_of(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The error of each row."""
    return ((forward(x) - torch.sin(3 * x[:, :4])) ** 2).mean(1)


def setup(
    mesh: fs.Mesh, opt: Any, rules: Any = optims.NORMS, weighted: bool = True, **options: Any
) -> tuple[Any, Any, fs.Plan]:
    """A state and a step; the loss is a mean over all rows, exact if ``weighted``."""
    module = net()
    model = fs.split(copy.deepcopy(module), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, rules, batch=P(mesh.axis_names))

    def loss_fn(params: Any, x: Tensor) -> Any:
        each = errors_of(lambda x: model.apply(params, x), x)
        loss = fs.Mean(each.sum(), len(each)) if weighted else each.mean()
        return loss, {"rows": fs.Mean(each.detach().sum(), len(each))}

    state = fs.init_state(plan, opt, params=tree.nest(dict(module.named_parameters())))
    return state, fs.make_train_step(loss_fn, opt, plan, **options), plan


def plain(
    batches: Sequence[Tensor], clip: Callable[[nn.Module], object] = lambda module: None, skip: Sequence[int] = ()
) -> dict[str, Tensor]:
    """One process: an update of SGD for each batch, but those that are skipped."""
    module = net()
    rule = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for number, x in enumerate(batches):
        module.zero_grad()
        errors_of(module, x).mean().backward()
        clip(module)
        if number not in skip:
            rule.step()
    return {path: leaf.detach().clone() for path, leaf in module.named_parameters()}


def sgd() -> Any:
    """The optimizer of ``plain``. With Adam a gradient times two would be the same."""
    return fs.optim.sgd(0.05, momentum=0.9)


def gap(params: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of an element."""
    assert params.keys() == want.keys()
    return max((params[path] - want[path]).abs().max().item() for path in want)


def merged(steps: Sequence[int], world: int) -> Tensor:
    """The rows of all ranks in some steps."""
    return torch.cat([rows(step, rank) for step in steps for rank in range(world)])


def run(kind: str, axes: Any = ((-1,), ("shard",)), rules: Any = optims.NORMS) -> tuple[dict[str, Tensor], list[float]]:
    """On a rank: twelve batches in one of several ways; the parameters and what is to be seen."""
    with fs.make_mesh(*axes) as mesh:
        if kind.startswith("every"):
            # The scale grows at every second step, in the middle of what is carried.
            scale = fs.LossScale(initial=8.0, interval=2) if "scaled" in kind else None
            state, step, plan = setup(mesh, fs.optim.every(3, sgd()), rules, clip_norm=CLIP, loss_scale=scale)
            batches: list[Any] = [rows(number, mesh.rank) for number in range(12)]
        elif kind == "microbatches":
            state, step, plan = setup(mesh, sgd(), rules, clip_norm=CLIP, accumulate=3)
            batches = [fs.Microbatches([rows(i, mesh.rank) for i in range(n, n + 3)]) for n in range(0, 12, 3)]
        elif kind == "ragged":
            state, step, plan = setup(mesh, sgd(), rules, clip_norm=CLIP, accumulate=3)
            batches = [torch.cat([rows(i, mesh.rank) for i in range(n, n + 3)]) for n in range(0, 12, 3)]
        else:
            clip = [(r"blocks\.0\..*", 0.8), (r".*norm.*|inp\..*", None), (r".*", 1.6)]
            state, step, plan = setup(mesh, sgd(), rules, clip_norm=clip)
            batches = [rows(number, mesh.rank) for number in range(12)]
        norms = []
        for batch in batches:
            state, metrics = step(state, batch)
            norms.append(metrics.grad_norm.item())
        return parity.whole(fs.unshard(state.params, plan)), norms


def clip_by_rule(module: nn.Module) -> None:
    """What ``run("rules")`` does, by PyTorch."""
    named = dict(module.named_parameters())
    first = [path for path in named if path.startswith("blocks.0.")]
    free = [path for path in named if path not in first and ("norm" in path or path.startswith("inp."))]
    nn.utils.clip_grad_norm_([named[path] for path in first], 0.8)
    nn.utils.clip_grad_norm_([leaf for path, leaf in named.items() if path not in first + free], 1.6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["every", "every, scaled", "microbatches", "ragged"])
def test_unequal_parts_are_one_batch(job: Job, world: int, kind: str) -> None:
    want = plain(
        [merged(range(n, n + 3), world) for n in range(0, 12, 3)],
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), CLIP),
    )
    results = job(world).run(run, kind)
    assert gap(results[0][0], want) <= TOLERANCE
    assert all(norms == results[0][1] for _, norms in results)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rule_clips_its_own_leaves(job: Job, world: int) -> None:
    want = plain([merged([n], world) for n in range(12)], clip_by_rule)
    assert gap(job(world).run(run, "rules")[0][0], want) <= TOLERANCE


def test_norms_are_right_over_mixed_axes(pool: Pools) -> None:
    mixed = [(r".*up\.weight", P("a")), (r".*norm.*", P()), (r"inp.*", fs.fsdp(("a", "b"))), (r".*", fs.fsdp("b"))]
    axes = ((2, 2), ("a", "b"))
    want = plain([merged([n], 4) for n in range(12)], clip_by_rule)
    assert gap(pool(4).run(run, "rules", axes, mixed)[0][0], want) <= TOLERANCE
    want = plain(
        [merged(range(n, n + 3), 4) for n in range(0, 12, 3)], lambda m: nn.utils.clip_grad_norm_(m.parameters(), CLIP)
    )
    assert gap(pool(4).run(run, "every", axes, mixed)[0][0], want) <= TOLERANCE


def plain_means() -> dict[str, Tensor]:
    """On a rank: three steps of a plain mean to an update."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step, plan = setup(mesh, fs.optim.every(3, sgd()), weighted=False, clip_norm=CLIP)
        for number in range(12):
            state, _ = step(state, optims.batch(number).chunk(mesh.size)[mesh.rank])
        return parity.whole(fs.unshard(state.params, plan))


@pytest.mark.parametrize("world", [1, 2])
def test_several_steps_of_a_plain_mean(pool: Pools, world: int) -> None:
    batches = [torch.cat([optims.batch(i) for i in range(n, n + 3)]) for n in range(0, 12, 3)]
    want = plain(batches, lambda m: nn.utils.clip_grad_norm_(m.parameters(), CLIP))
    assert gap(pool(world).run(plain_means)[0], want) <= TOLERANCE


def skip(spikes: bool) -> tuple[dict[str, Tensor], list[bool], list[int], bool]:
    """On a rank: steps of which some are skipped; whether their states were the same, bit for bit."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        options = {"skip_norm": 20.0} if spikes else {"skip": lambda metrics: metrics.loss > 5.0}
        state, step, plan = setup(mesh, fs.optim.ema(sgd(), 0.9), **options)
        said, numbers, kept = [], [], True
        for number in range(8):
            x = rows(number, mesh.rank) * (30.0 if number in (2, 5) else 1.0)
            before = [leaf.clone() for leaf in tree.leaves((state.params, state.opt_state))]
            following, metrics = step(state, x)
            if metrics.skipped:
                kept &= following is state
                kept &= all(map(torch.equal, before, tree.leaves((following.params, following.opt_state))))
            state = following
            said.append(metrics.skipped)
            numbers.append(state.step)
        return parity.whole(fs.unshard(state.params, plan)), said, numbers, kept


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("spikes", [True, False])
def test_a_skipped_step_leaves_the_state_as_it_is(pool: Pools, world: int, spikes: bool) -> None:
    batches = [merged([n], world) * (30.0 if n in (2, 5) else 1.0) for n in range(8)]
    for params, said, numbers, kept in pool(world).run(skip, spikes):
        assert said == [number in (2, 5) for number in range(8)]
        assert numbers == [1, 2, 2, 3, 4, 4, 5, 6] and kept
        assert gap(params, plain(batches, skip=(2, 5))) <= TOLERANCE


def disagree(how: str) -> list[str]:
    """On a rank: a predicate that is not the same on all ranks, and whether the state can be used after it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:

        def decide(metrics: fs.types.Metrics) -> bool:
            if how == "raises" and mesh.rank == 1:
                raise ZeroDivisionError("mine")
            return mesh.rank == 1

        state, step, _ = setup(mesh, sgd(), skip=decide)
        try:
            step(state, rows(0, mesh.rank))
        except (LossError, PeerError, ZeroDivisionError) as error:
            tree.leaves(state.params)
            return [type(error).__name__, str(error)]
        return []


def test_ranks_that_disagree_about_skipping(pool: Pools) -> None:
    for kind, text in pool(2).run(disagree, "differs"):
        assert kind == "LossError" and "rank 0: make the step\n  rank 1: skip the step" in text
    (peer, said), (own, _) = pool(2).run(disagree, "raises")
    assert (peer, own) == ("PeerError", "ZeroDivisionError") and "rank 1: ZeroDivisionError: mine" in said


def unequal_means(kind: str) -> str:
    """On a rank: unequal microbatches of a plain mean."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step, _ = setup(mesh, sgd(), weighted=False, accumulate=2)
        x = torch.randn(7, 6)
        try:
            step(state, fs.Microbatches([x[:4], x[4:]]) if kind == "given" else x)
        except BatchError as error:
            state, _ = step(state, x[:6])  # nothing has happened
            return str(error)
        return ""


@pytest.mark.parametrize("kind", ["given", "cut"])
def test_unequal_parts_of_a_plain_mean_are_refused_on_every_rank(pool: Pools, kind: str) -> None:
    for text in pool(2).run(unequal_means, kind):
        assert ("microbatch 1: [[3, 6]]" if kind == "given" else "[7, 6]") in text and "fs.Mean" in text


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (fs.Microbatches([torch.ones(2, 6)]), r"holds 1 batches, and the step makes accumulate=2"),
        (fs.Microbatches([torch.ones(2, 6), {"x": torch.ones(2, 6)}]), "microbatch 1"),
        (torch.ones(1, 6), "1 rows a rank cannot be cut into accumulate=2"),
    ],
)
def test_microbatches_that_cannot_be(batch: Any, problem: str) -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        state, step, _ = setup(mesh, sgd(), accumulate=2)
        with pytest.raises(BatchError, match=problem):
            step(state, batch)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"clip_norm": 0.0}, r"clip_norm=0\.0 must be positive"),
    ({"clip_norm": []}, "no rule"),
    ({"clip_norm": [(r"blocks.*", 1.0)]}, r"inp\.weight: no pattern matches"),
    ({"clip_norm": [(r"blocks.*", 1.0), ("bloks.*", 2.0), (r".*", None)]}, "'bloks.*' decides no trained leaf"),
    ({"clip_norm": [("(", 1.0)]}, "not a regular expression"),
    ({"clip_norm": [(".*", -1.0)]}, r"clip_norm\[0\]=-1\.0 must be positive"),
    ({"skip_norm": -1.0}, r"skip_norm = -1"),
    ({"skip": 3}, "skip=3"),
    ({"skip_norm": 1.0, "schedule": fs.Policy(update="in_backward")}, "update='in_backward'"),
]


@pytest.mark.parametrize(("options", "problem"), BAD, ids=str)
def test_bad_options_of_a_step(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        setup(fs.abstract_mesh((2,), ("shard",)), sgd(), **options)


def test_every_needs_the_whole_gradient() -> None:
    with pytest.raises(PlanError, match=r"fs\.optim\.every"):
        setup(
            fs.abstract_mesh((2,), ("s",)),
            fs.optim.every(2, sgd()),
            [(".*", fs.fsdp("s"))],
            schedule=fs.Policy(update="in_backward"),
        )


def test_an_average_is_evaluated() -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        state, step, plan = setup(mesh, fs.optim.ema(sgd(), 0.5))
        evaluate = fs.make_eval_step(lambda params, x: params["out"]["bias"].sum() + 0 * x.sum(), plan)
        means = state.params["out"]["bias"].clone()
        for number in range(3):
            state, _ = step(state, rows(number, 0))
            means = 0.5 * means + 0.5 * state.params["out"]["bias"]
        assert evaluate(fs.averaged(state), rows(0, 0)).item() == pytest.approx(means.sum().item(), rel=1e-5)
        assert evaluate(state, rows(0, 0)).item() != pytest.approx(means.sum().item(), rel=1e-3)
        with pytest.raises(fs.errors.TreeError, match=r"fs\.optim\.ema"):
            fs.averaged(setup(mesh, sgd())[0])
