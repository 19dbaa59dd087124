"""Bad input to the functions of fshard.parallel: the path, the numbers and the remedy, before any collective.

Errors that come up while a program is traced are asked for on an abstract mesh, where nothing can be sent.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, errors, parallel, tree
from fshard import collectives as c
from tests.shared.bad import Raised, alike, attempt
from tests.shared.workers import Pools

LEAVES = {"up": (8, 6), "down": (6, 8), "norm": (6,), "embed": (10, 6), "experts": (4, 6, 6)}
COLUMN, ROW = parallel.column_rule("up", flat="shard"), parallel.row_rule("down", flat="shard")
REST, ROWS = (".*", fs.fsdp("shard")), P("shard")


def params() -> dict[str, Tensor]:
    """A tree of one unit."""
    return {name: torch.ones(shape) for name, shape in LEAVES.items()}


def trace(mesh: fs.Mesh, body: Callable[..., Tensor], rules: Any, batch: P = ROWS) -> Any:
    """Find the program of a loss of one unit."""
    plan = fs.make_plan({"u": params()}, mesh, [_below(rule) for rule in rules], batch=batch, units=("u",))
    unit = fs.unit(body)
    loss = lambda p, x: unit(p["u"], x).square().mean() + sum(leaf.sum() for leaf in tree.leaves(p)) * 0  # noqa: E731
    step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
    return step, plan


def _below(rule: Any) -> fs.Rule:
    rule = rule if isinstance(rule, fs.Rule) else fs.Rule(*rule)
    return fs.Rule(rf"u\.{rule.pattern}", rule.at_rest, rule.compute)


def experts(p: Any, x: Tensor, count: int = 4, capacity: float | None = None) -> Tensor:
    """A mixture of experts."""
    routing = parallel.route(x[:, :count], 2)
    return parallel.moe(
        x,
        routing,
        lambda rows, n: parallel.grouped_linear(rows, p["experts"], n, axis="tp"),
        axis="tp",
        capacity=capacity,
    )


def ring(p: Any, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """Ring attention of three tokens a rank."""
    q = (x @ p["up"].mT[:, :6]).view(1, 1, -1, 6)
    return parallel.ring_attention(q, q, q, axis="tp", documents=documents)


BOTH = P(("tp", "shard"))
TRACED: dict[str, tuple[Callable[..., Tensor], Any, P, tuple[str, ...]]] = {
    "column-parallel leaf that is whole": (
        lambda p, x: parallel.column_linear(x, p["up"]),
        [REST],
        P("shard"),
        ("column_linear: u.up [8, 6] is whole on each of the 2 ranks of 'tp'", "to [4, 6]", "column_rule"),
    ),
    "row-parallel leaf cut along the wrong dim": (
        lambda p, x: parallel.row_linear(x, p["down"]),
        [parallel.column_rule("down"), REST],
        P("shard"),
        ("row_linear: u.down [6, 8] is cut by 'tp' along dim 0", "dim 1, to [6, 4]", "row_rule"),
    ),
    "row-parallel bias that is cut": (
        lambda p, x: parallel.row_linear(F.linear(x, p["up"]), p["down"], p["norm"]),
        [COLUMN, ROW, ("norm", P("tp")), REST],
        P("shard"),
        ("row_linear: u.norm [6] is cut by 'tp'", "leave 'tp' out"),
    ),
    "norm that is cut": (
        lambda p, x: parallel.rms_norm(x, p["norm"]),
        [("norm", P("tp")), REST],
        P("shard"),
        ("shared: u.norm [6] is cut by 'tp'", "every rank needs all of it"),
    ),
    "embedding that is whole": (
        lambda p, x: parallel.vocab_embedding(x.long().abs() * 0, p["embed"]),
        [REST],
        P("shard"),
        ("vocab_embedding: u.embed [10, 6] is whole", "to [5, 6]"),
    ),
    "tensor-parallel axis that is a data axis": (
        lambda p, x: parallel.column_linear(x, p["up"]),
        [fs.Rule("up", P("tp"), P("tp")), ("(?!up).*", fs.fsdp("shard"))],
        BOTH,
        ("column_linear: axis 'tp' is a data axis", "leave 'tp' out of batch="),
    ),
    "experts that were gathered": (
        experts,
        [(".*", fs.fsdp(("tp", "shard")))],
        BOTH,
        ("grouped_linear: u.experts [4, 6, 6] is whole", "to [2, 6, 6]", "expert_rule"),
    ),
    "experts on an axis of the same tokens": (
        experts,
        [parallel.expert_rule("experts", "tp"), REST],
        P("shard"),
        ("dispatch: axis 'tp' is not a data axis", "('shard',)", "batch="),
    ),
    "experts that the axis does not divide": (
        lambda p, x: experts(p, x, count=3),
        [parallel.expert_rule("experts", "tp"), (".*", fs.fsdp("shard"))],
        BOTH,
        ("3 experts over the 2 ranks of axis 'tp'", "Choose 4 experts"),
    ),
    "heads that the axis does not divide": (
        lambda p, x: x * parallel.local_heads(3) + p["norm"],
        [COLUMN, ROW, REST],
        P("shard"),
        ("3 attention heads over the 2 ranks of axis 'tp'", "Choose 4 attention heads", "divides 3"),
    ),
    "sequence that cannot be shared out": (
        ring,
        [(".*", fs.fsdp(("tp", "shard")))],
        BOTH,
        ("ring_attention: 3 tokens a rank on 2 ranks of axis 'tp'", "multiple of 4", "pad it to 8"),
    ),
    "documents of the whole sequence": (
        lambda p, x: ring(p, x[:2], torch.zeros(1, 4).long()),
        [(".*", fs.fsdp(("tp", "shard")))],
        BOTH,
        ("ring_attention: documents [1, 4] of 1 rows of 2 tokens on this rank must be [1, 2]", "zigzag_slice"),
    ),
    "a mask instead of documents": (
        lambda p, x: ring(p, x[:2], torch.ones(1, 1, 2, 4, dtype=torch.bool)),
        [(".*", fs.fsdp(("tp", "shard")))],
        BOTH,
        ("ring_attention: documents are torch.bool", "a mask (batch, 1, queries, keys) is not taken"),
    ),
    "sequence on an axis of the same tokens": (
        ring,
        [COLUMN, REST],
        P("shard"),
        ("ring_attention: axis 'tp' is not a data",),
    ),
    "sequence that the tensor-parallel axis does not divide": (
        lambda p, x: parallel.row_linear(x[:, :4], p["down"], sequence_dim=0),
        [COLUMN, ROW, REST],
        P("shard"),
        ("psum_scatter: dim 0 of shape [3, 6] has 3 elements", "size 2 does not divide"),
    ),
    "vocabulary larger than the logits": (
        lambda p, x: parallel.vocab_cross_entropy(x, x[:, 0].long(), vocab=13),
        [COLUMN, ROW, REST],
        P("shard"),
        ("vocab=13", "6 columns each have 12", "padded(13, 2) = 14"),
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_program_that_does_not_fit_its_plan(name: str) -> None:
    body, rules, batch, says = TRACED[name]
    raised = []
    for rank in range(4):
        mesh = fs.abstract_mesh((2, 2), ("tp", "shard"), rank=rank)
        step, _ = trace(mesh, body, rules, batch)
        raised.append(attempt(lambda step=step: step.trace(torch.ones(3, 6))))  # type: ignore[misc]
    alike(raised, "CollectiveError" if "psum_scatter" in says[0] else "PlanError", says)


TORCH: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "heads of the whole model on a rank's part": (
        lambda p, x: F.linear(x, p["up"]).unflatten(-1, (3, -1)).mean(1),
        ("u.up  [8, 6]: [4, 6], by P('tp', None)", "fs.parallel.local_heads"),
    ),
    "a layer that needs all of a leaf that is cut": (
        lambda p, x: F.linear(F.linear(x, p["up"]), p["down"].mT),
        ("u.down  [6, 8]: [6, 4], by P(None, 'tp')", "needs a rule without that axis"),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_errors_of_torch_inside_of_a_unit_tell_which_leaves_are_parts(name: str) -> None:
    body, says = TORCH[name]
    told = set()
    for rank in range(4):
        step, _ = trace(fs.abstract_mesh((2, 2), ("tp", "shard"), rank=rank), body, [COLUMN, ROW, REST])
        with pytest.raises(RuntimeError) as caught:
            step.trace(torch.ones(3, 6))
        told.add("\n".join(caught.value.__notes__))
    text = told.pop()
    assert not told and "in unit <lambda>(u)" in text and "batch: float32 [3, 6]" in text
    assert not [part for part in says if part not in text], text


def test_a_program_that_fits(pool: Pools) -> None:
    body = lambda p, x: parallel.row_linear(parallel.column_linear(x, p["up"]), p["down"])  # noqa: E731
    step, _ = trace(fs.abstract_mesh((2, 2), ("tp", "shard")), body, [COLUMN, ROW, REST])
    assert "forward" in str(step.trace(torch.ones(3, 6)))


def bad_steps_on_a_rank() -> list[Raised | None]:
    """On a rank: what steps raise before they communicate."""
    out = []
    with fs.make_mesh((2, 2), ("tp", "shard")) as mesh:
        for body, rules, batch, _ in TRACED.values():
            step, plan = trace(mesh, body, rules, batch)
            state = fs.init_state(plan, fs.optim.sgd(0.1), params={"u": params()})
            out.append(attempt(lambda step=step, state=state: step(state, torch.ones(3, 6))))  # type: ignore[misc]
    return out


def test_all_ranks_raise_alike(pool: Pools) -> None:
    ranks = pool(4).run(bad_steps_on_a_rank)
    for number, (_, _, _, says) in enumerate(TRACED.values()):
        alike([rank[number] for rank in ranks], "ShardError", says)


PLANS = {
    "vocabulary that the axis does not divide": (
        [parallel.column_rule("embed", flat="shard"), REST],
        ("u.embed  [10, 6]", "dim 0 has 10 elements, which 4 ranks of 'tp'", "pad the leaf to 12"),
    ),
    "experts that the axis does not divide": (
        [parallel.expert_rule("embed", "tp", flat="shard"), REST],
        ("u.embed  [10, 6]", "10 elements, which 4 ranks", "to 12, or choose a size of 'tp' that divides 10"),
    ),
    "experts on an axis that is not there": (
        [parallel.expert_rule("experts", flat="tp"), REST],
        ("u.experts  [4, 6, 6]", "no axis 'ep'"),
    ),
    "experts gathered over their own axis": (
        [parallel.expert_rule("experts", "tp", flat="tp"), REST],
        ("u.experts  [4, 6, 6]", "'tp' is used twice"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_cannot_be(name: str) -> None:
    rules, says = PLANS[name]
    mesh = fs.abstract_mesh((4, 2), ("tp", "shard"))
    raised = attempt(lambda: trace(mesh, lambda p, x: x, rules))
    alike([raised], "PlanError", says)


ROUTING = parallel.route(torch.ones(3, 4))
CALLS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "too many choices": (lambda: parallel.route(torch.ones(2, 4), 5), ("k=5 of 4 experts", "1 to 4")),
    "no capacity": (
        lambda: parallel.dispatch(torch.ones(3, 2), ROUTING, axis=None, capacity=0.0),
        ("capacity=0.0", "None, which drops nothing"),
    ),
    "routing of other tokens": (
        lambda: parallel.dispatch(torch.ones(5, 2), ROUTING, axis=None),
        ("[5, 2]", "[3, 2]"),
    ),
    "weights for other experts": (
        lambda: parallel.grouped_linear(torch.ones(4, 2), torch.ones(4, 3, 2), (2, 2), axis=None),
        ("[4, 3, 2]", "2 experts", "expert_rule"),
    ),
    "targets of another shape": (
        lambda: parallel.vocab_cross_entropy(torch.ones(3, 4), torch.ones(4).long()),
        ("logits [3, 4] need targets [3], and got [4]",),
    ),
    "reduction": (
        lambda: parallel.vocab_cross_entropy(torch.ones(3, 4), torch.ones(3).long(), reduction="avg"),
        ("'avg'", "'mean'"),
    ),
    "target outside": (
        lambda: parallel.vocab_cross_entropy(torch.ones(3, 4), torch.tensor([1, 4, -1])),
        ("2 of 3 numbers, the first 4", "vocabulary of 4", "0 to 3"),
    ),
    "token outside": (
        lambda: parallel.vocab_embedding(torch.tensor([1, 9]), torch.ones(4, 2)),
        ("1 of 2 numbers, the first 9",),
    ),
    "sequence": (
        lambda: parallel.zigzag(torch.ones(1, 10), 4),
        ("10 tokens over 4 ranks", "2 * 4 = 8", "pad it to 16"),
    ),
    "unlike queries and keys": (
        lambda: parallel.ring_attention(torch.ones(1, 3, 4, 2), *[torch.ones(1, 2, 4, 2)] * 2, axis="tp"),
        ("[1, 3, 4, 2]", "[1, 2, 4, 2]", "multiple"),
    ),
    **{
        f"documents at {offsets}": (
            lambda offsets=offsets: parallel.document_ids(torch.tensor(offsets), 5),
            ("document_ids: cu_seqlens=", "of a row of 5 tokens", "begin with 0"),
        )
        for offsets in ([0, 6], [1, 5], [0, 3, 2], [], [[0, 5]], [0.0, 5.0])
    },
    "no layer": (lambda: parallel.megatron_rules(column=[], row=[]), ("no layer is parallel",)),
}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_tokens_without_such_a_dim(shape: tuple[int, ...]) -> None:
    tokens, end = torch.zeros(shape).long(), len(shape)
    with c.use_mesh(fs.make_mesh((1,), ("tp",))):
        for dim in range(-end, end):
            assert parallel.vocab_embedding(tokens, torch.ones(4, 2), sequence_dim=dim).shape == (*shape, 2)
        for dim in (-end - 1, end):
            with pytest.raises(errors.CollectiveError, match=rf"sequence_dim: dim={dim} of a tensor of shape"):
                parallel.vocab_embedding(tokens, torch.ones(4, 2), sequence_dim=dim)


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_be(name: str) -> None:
    call, says = CALLS[name]
    with c.use_mesh(fs.make_mesh((1,), ("tp",))):
        alike([attempt(call)], "PlanError", says)


def test_numbers_of_rows_that_cannot_be() -> None:
    with c.use_mesh(fs.make_mesh((1,), ("ep",))):
        for send, says in (([1, 2], "one int >= 0 for each of the 1 ranks"), ([3], "send=[3] are 3 rows")):
            with pytest.raises(errors.CollectiveError, match="ragged_all_to_all") as caught:
                c.ragged_all_to_all(torch.ones(2, 2), "ep", send, [2])
            assert says in str(caught.value)


def test_no_mesh_in_scope() -> None:
    with pytest.raises(errors.AxisError, match="'tp'"):
        parallel.column_linear(torch.ones(2, 3), torch.ones(4, 3))


def copies(norm: Callable[[Tensor, Tensor], Tensor], debug: bool = True) -> Raised | None:
    """On a rank: what a step with a norm on slices of the sequence raises."""
    with fs.make_mesh((2, 2), ("tp", "shard")) as mesh:

        def body(p: Any, x: Tensor) -> Tensor:
            y = norm(parallel.split_sequence(x * p["norm"], 0), p["norm"])
            return parallel.row_linear(parallel.column_linear(y, p["up"], sequence_dim=0), p["down"])

        step, plan = trace(mesh, body, [COLUMN, ROW, REST])
        opt = fs.optim.sgd(0.1)
        step = fs.make_train_step(step._runner.finder.fn, opt, plan, debug=debug)
        state = fs.init_state(plan, opt, params={"u": params()})
        x = torch.arange(24.0).view(4, 6).sin() + mesh.index(("shard",))
        before = {path: leaf.clone() for path, leaf in tree.paths(state.params)}
        raised = attempt(lambda: step(state, x))
        if raised:
            assert all(torch.equal(leaf, before[path]) for path, leaf in tree.paths(state.params))
        return raised


def forgotten(x: Tensor, weight: Tensor) -> Tensor:
    """A norm that leaves its weight's gradient to each rank."""
    return F.rms_norm(x, weight.shape, weight)


def test_a_missing_sum_over_copies_is_found() -> None:
    mesh = fs.virtual_mesh((2, 2), ("tp", "shard"))
    says = ("u.norm  [6]", "on rank ", "fs.parallel.shared")
    alike(mesh.run(copies, forgotten), "ReplicationError", says)
    assert mesh.run(copies, parallel.rms_norm) == [None] * 4
    assert mesh.run(copies, forgotten, False) == [None] * 4


def test_a_missing_sum_over_copies_is_found_on_real_ranks(pool: Pools) -> None:
    alike(pool(4).run(copies, forgotten), "ReplicationError", ("u.norm  [6]",))
