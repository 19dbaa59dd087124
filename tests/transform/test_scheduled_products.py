"""Hessian-vector products on a schedule: what travels, by formula; departures; limits of memory; what has none."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from fshard.runtime.memory import gradients
from fshard.schedule import check
from fshard.state.flat import form_of
from fshard.state.flat_maps import join_pieces
from fshard.transform import shard_chunks, trace_samples
from fshard.transform.shard_chunks import chunks_of
from tests.shared.bad import Raised, attempt
from tests.shared.virtual import Job
from tests.transform import cases as cases
from tests.transform.test_tools import outer_loss, whole_gnvp, whole_hvp
from tests.transform.test_transforms import FLAT, differences, mine

F = torch.func
UNITS, WIDTH = 6, 8
X = cases.batch()


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """One layer."""
    return torch.tanh(x @ p["0"]["weight"].T + p["0"]["bias"])


class Layers:
    """Layers whose order is a matter of Python, as data-dependent programs are."""

    def __init__(self, mesh: fs.Mesh) -> None:
        self.order, self.mesh = list(range(UNITS)), mesh
        net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS))).double()
        model = fs.split(net, units=("*",))
        self.plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp(mesh.axis_names[0]))])
        draw = torch.Generator().manual_seed(5)
        self.whole = tree.map(lambda x: torch.randn(x.shape, generator=draw, dtype=torch.float64) / 3, model.params)
        self.x = torch.randn(4 * mesh.size, WIDTH, generator=draw, dtype=torch.float64)

    def loss(self, params: Any, x: Tensor) -> Tensor:
        """The mean square of the output."""
        for number in self.order:
            x = layer(params[str(number)], x)
        return x.square().mean()

    def wrong(self, tool: Any) -> float:
        """How far the product of the weights with the Hessian is from that of whole tensors on one rank."""
        params = fs.shard(self.whole, self.plan)
        got = tool(params, tree.map(torch.cos, params), mine(self.x, self.mesh))
        grad = F.grad(lambda p: self.loss(p, self.x))
        want = F.jvp(grad, (self.whole,), (tree.map(torch.cos, self.whole),))[1]
        pairs = zip(tree.leaves(got), tree.leaves(fs.shard(want, self.plan)), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs if a.numel())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_and_bytes_are_those_of_the_formula(ranks: int, reshard: bool) -> None:
    layers = Layers(fs.abstract_mesh((ranks,), ("shard",)))
    product = fs.func.hvp(layers.loss, layers.plan, reshard=reshard)
    schedule = product.trace(torch.ones(4, WIDTH).double()).schedule
    check(schedule)
    counts = Counter(op.kind for op in schedule)
    around = schedule.policy.prefetch + 1  # units that stay gathered from their forward to their backward
    gathers = 2 * UNITS + 2 * (UNITS - around) * reshard  # parameters and tangents
    apart = ranks > 1
    assert (counts["all_gather"], counts["reduce_scatter"]) == (gathers * apart, UNITS * apart)
    infos = {info.name: info for info in schedule.groups}
    moved = [(op.kind, infos[op.target].transfer(op.kind)) for op in schedule if op.target in infos]
    sent = sum(move.sent for _, move in moved if move is not None)
    bytes_of = 8 * (ranks - 1) * layers.plan.groups[0].chunk  # of a group: each rank's part, to all others
    assert sent == (gathers + UNITS) * bytes_of
    assert not any(op.kind == "reduce_scatter" and op.target.endswith("'") for op in schedule)
    assert product.reshard == reshard and schedule.policy.reshard == reshard


def runs() -> list[str]:
    """On a rank: what is wrong with products that ran, of every kind of leaf."""
    out: list[str] = []
    with fs.make_mesh(*FLAT) as mesh:
        plan, x, v = cases.plan_on(mesh), mine(X, mesh), cases.directions()
        params, along = fs.shard(cases.whole(), plan), fs.shard(v, plan)
        for options in ({"reshard": True}, {"reshard": False}, {"schedule": fs.Policy(prefetch=0, reduces=0)}):
            product = fs.func.hvp(cases.weighted_loss, plan, **options)
            first, second = product(params, along, x), product(params, along, x)
            out += differences(second, whole_hvp(v), plan, f"{options}")
            out += ["bits"] * any(
                not torch.equal(a, b) for a, b in zip(*map(tree.leaves, (first, second)), strict=True)
            )
            out += ["record"] * (product.record != product.schedule.ops)
        return out + forwards(plan, params, along, x)


def forwards(plan: fs.Plan, params: Any, along: Any, x: Any) -> list[str]:
    """The same of tools that take no gradient."""
    out, kind = [], cases.reference(cases.mean_loss)
    slope, key = fs.func.jvp(cases.mean_loss, plan), fs.random.key(2)
    want = F.jvp(lambda p: kind(p, X), (cases.whole(),), (cases.directions(),))
    out += differences(slope(params, along, x), want, plan, "slope")
    with patch.object(trace_samples, "most_together", lambda plan: 2):
        apart = fs.func.hessian_trace_samples(cases.weighted_loss, plan, 3)
    together = fs.func.hessian_trace_samples(cases.weighted_loss, plan, 3)
    found, other = together(params, x, key), apart(params, x, key)
    out += differences(found, together._by_products(params, x, key), plan, "samples")
    out += differences(other, found, plan, "two runs")
    curved = fs.func.gnvp(cases.predict, outer_loss, plan, schedule=fs.Policy(prefetch=0))
    out += differences(curved(params, along, x), whole_gnvp(cases.directions()), plan, "Gauss-Newton")
    out += ["record"] * any(tool.record != tool.schedule.ops for tool in (slope, together, apart, curved))
    gathers = {tool: Counter(op.kind for op in tool.schedule)["all_gather"] for tool in (slope, together, apart)}
    trained = sum(group.trainable for group in plan.groups if group.parts > 1)
    frozen = sum(not group.trainable for group in plan.groups if group.parts > 1)
    assert plan.mesh.size == 1 or [*gathers.values()] == [n * trained + frozen for n in (2, 4, 3)], gathers
    return out


@pytest.mark.parametrize("world", [1, 3])
def test_what_ran_is_the_schedule(job: Job, world: int) -> None:
    assert not sum(job(world).run(runs), [])


def shifts() -> list[str]:
    """On a rank: what is wrong where tangents of results are the tangents of parameters themselves."""
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        shift = fs.unit(lambda p, x: x + p["0"]["bias"])

        def loss(params: Any, x: Tensor) -> Tensor:
            for number in range(UNITS):
                x = shift(params[str(number)], torch.ones_like(x)) * layer(params[str(number)], x)
            return x.square().mean()

        layers.loss = loss  # type: ignore[method-assign]
        product = fs.func.hvp(loss, layers.plan, schedule=fs.Policy(prefetch=0))
        wrong, params = layers.wrong(product), fs.shard(layers.whole, layers.plan)
        x, v = mine(layers.x, mesh), tree.map(torch.cos, params)
        _, slope = fs.func.jvp(loss, layers.plan)(params, v, x)
        whole_v = tree.map(torch.cos, layers.whole)
        want = F.jvp(lambda p: loss(p, layers.x), (layers.whole,), (whole_v,))[1]
        (sample,) = fs.func.hessian_trace_samples(loss, layers.plan, 1)(params, x, fs.random.key(0))
        signs = fs.unshard(fs.tree.rademacher(fs.random.fold_in(fs.random.key(0), 0), layers.plan), layers.plan)
        moved = F.jvp(F.grad(lambda p: loss(p, layers.x)), (layers.whole,), (signs,))[1]
        curved = sum((a * b).sum() for a, b in zip(tree.leaves(moved), tree.leaves(signs), strict=True))
        assert product.record == product.schedule.ops
        return [f"{a} {b}" for a, b in [(wrong, 0.0), (slope, want), (sample, curved)] if abs(a - b) > 1e-12]


def test_tangents_that_are_those_of_parameters_are_kept() -> None:
    assert not sum(fs.virtual_mesh((2,), ("any",)).run(shifts), [])


def departures() -> list[Any]:
    """On a rank: errors of products of a program that changes, the schedules, and what one rank alone raises."""
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        product = fs.func.hvp(layers.loss, layers.plan, reshard=True)
        first = layers.wrong(product), product.record == product.schedule.ops
        layers.order.reverse()
        second = layers.wrong(product), attempt(lambda: product.schedule)
        layers.order = layers.order[2:]  # calls that are left out
        third = layers.wrong(product)
        layers.order = [*range(UNITS)]
        other = fs.func.hvp(layers.loss, layers.plan, reshard=True)
        layers.wrong(other)
        layers.order = layers.order[:: 1 if mesh.rank else -1]
        alone = attempt(lambda: layers.wrong(other))
        layers.order = [*range(UNITS)]
        return [first, second, third, alone, layers.wrong(other)]


def test_a_program_that_leaves_its_schedule_is_right_or_told() -> None:
    for first, second, third, alone, last in fs.virtual_mesh((2,), ("any",)).run(departures):
        assert first[0] < 1e-15 and first[1]
        assert second[0] < 1e-15 and second[1] is not None and "on demand" in second[1].text
        assert third < 1e-15 and last < 1e-15
        assert alone is not None and "ScheduleError" in alone.kinds, alone
        assert f"rank 0: all_gather {UNITS - 1}'" in alone.text and "rank 1: all_gather 0'" in alone.text


def limited(bytes_: int) -> Raised | None | list[str]:
    """On a rank: what a product in so much memory raises, or what is wrong with it."""
    with fs.make_mesh(*FLAT) as mesh:
        plan, x, v = cases.plan_on(mesh), mine(X, mesh), cases.directions()
        product = fs.func.hvp(cases.weighted_loss, plan, schedule=fs.Auto(memory=bytes_, compute=1e9, wire=1e9))
        found: list[Any] = []
        given = fs.shard(cases.whole(), plan), fs.shard(v, plan), x
        raised = attempt(lambda: found.append(product(*given)))
        return raised or differences(found[0], whole_hvp(v), plan, "limited")


def test_a_limit_of_memory_chooses_the_policy_or_is_refused() -> None:
    ranks = fs.virtual_mesh((2,), ("any",))
    assert ranks.run(limited, 2**20) == [[], []]
    for raised in ranks.run(limited, 2**8):
        assert isinstance(raised, Raised) and "PlanError" in raised.kinds and "memory" in raised.text


def one_rank() -> tuple[fs.Plan, Any, Any]:
    """The plan of one rank, with parameters and a direction."""
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    return plan, fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)


class Cube(torch.autograd.Function):
    """A cube without a forward derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


def values(params: Any, batch: Any) -> Any:
    """A loss that looks at a value."""
    found = cases.weighted_loss(params, batch)
    return found if found.total.item() > -1 else fs.Mean(2 * found.total, found.count)


def alias(params: Any, batch: Any) -> Any:
    """A loss with a unit that returns a parameter itself."""
    same = fs.unit(lambda p: p["norm"])
    found = cases.weighted_loss(params, batch)
    return fs.Mean(found.total * same(params["layers"]["0"]).square().sum(), found.count)


@pytest.mark.parametrize(("loss", "words"), [(values, "depends on values"), (alias, "is a view of one of its")])
def test_programs_without_a_schedule_run_as_transforms_do(loss: Callable[..., Any], words: str) -> None:
    plan, params, v = one_rank()
    product = fs.func.hvp(loss, plan)
    plain = cases.reference(loss)
    want = F.jvp(lambda p: F.grad(plain)(p, X), (cases.whole(),), (cases.directions(),))[1]
    for _ in range(2):
        assert not differences(product(params, v, X), want, plan, "product")
        with pytest.raises(PlanError, match=f"no schedule.*{words}"):
            print(product.schedule)


def test_products_inside_of_transforms_are_differentiated() -> None:
    plan, params, v = one_rank()
    product = fs.func.hvp(cases.weighted_loss, plan)
    plain = F.grad(cases.reference(cases.weighted_loss))

    def curvature(p: Any) -> Tensor:
        return fs.tree.vdot(v, product(p, v, X), plan)

    def whole(p: Any) -> Tensor:
        found = F.jvp(lambda p: plain(p, X), (p,), (cases.directions(),))[1]
        return sum((a * b).sum() for a, b in zip(tree.leaves(found), tree.leaves(cases.directions()), strict=True))

    assert not differences(F.grad(curvature)(params), F.grad(whole)(cases.whole()), plan, "third")
    with pytest.raises(PlanError, match="no schedule.*a transform is under way"):
        print(product.schedule)
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    assert product(leaves, v, X)["scale"].requires_grad
    with torch.no_grad():
        assert not differences(product(params, v, X), whole_hvp(cases.directions()), plan, "without gradients")
    print(product.schedule)


def test_a_choice_is_made_once() -> None:
    plan, *_ = one_rank()
    with pytest.raises(PlanError, match="give one of them"):
        fs.func.hvp(cases.mean_loss, plan, reshard=True, schedule="auto")
    assert fs.func.hvp(cases.mean_loss, plan, schedule="auto").reshard
    assert not fs.func.hvp(cases.mean_loss, plan, schedule=fs.Policy(reshard=False)).reshard


def chunked() -> list[str]:
    """On a rank: which trees are read where they lie, and what is wrong with chunks of those that are copied."""
    with fs.make_mesh(*FLAT) as mesh:
        plan, out = cases.plan_on(mesh), []
        form, shards = form_of(plan), fs.shard(cases.whole(), plan)
        whole = {group.id: chunk for group, chunk in zip(plan.groups, own_chunks(plan, shards), strict=True)}
        lying = {
            "as they are": shards,
            "of a gradient": fs.value_and_grad(cases.weighted_loss, plan)(shards, mine(X, mesh))[1],
        }
        copied = {
            "clones": tree.map(torch.clone, shards),
            "other strides": tree.map(lambda x: torch.stack((x, x), -1)[..., 0], shards),
        }
        for name, given in {**lying, **copied}.items():
            found = chunks_of(given, form)
            own = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(given)}
            for group in plan.groups:
                if name in lying and group.name in ("layers.0", "root"):
                    lies = found[group.id].untyped_storage().data_ptr() in own
                    out += [f"{name}: {group.name} was copied"] * (not lies)
                if name in copied and not torch.equal(found[group.id], whole[group.id]):
                    out.append(f"{name}: {group.name}")
        return out


def own_chunks(plan: fs.Plan, shards: Any) -> list[Tensor]:
    """This rank's chunk of each group, by the linear map of transforms."""
    flat = dict(tree.paths(shards))
    return [join_pieces(group, plan.mesh, [flat[leaf.path] for leaf in group.leaves]) for group in plan.groups]


def test_shards_are_gathered_from_where_they_lie() -> None:
    assert not sum(fs.virtual_mesh((3,), ("any",)).run(chunked), [])


def test_directions_of_another_layout_are_read_leaf_by_leaf() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    mesh, x, found = fs.make_mesh((1,), ("shard",)), torch.randn(5, 4).double(), []
    gradient: Any = None
    for units in (("0", "2"), ()):
        model = fs.split(net, units=units)
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])

        def loss(p: Any, x: Tensor, model: fs.Model = model) -> Tensor:
            return model.apply(p, x).square().sum()

        params = fs.shard(model.params, plan)
        gradient = gradient or fs.value_and_grad(loss, plan)(params, x)[1]
        found.append(tree.leaves(fs.func.hvp(loss, plan)(params, gradient, x)))
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_gradients_take_no_norms_and_copy_no_parameters() -> None:
    plan, params, v = one_rank()
    product, gradient = fs.func.hvp(cases.weighted_loss, plan), fs.value_and_grad(cases.weighted_loss, plan)
    taken: Any = AssertionError("a norm, or a chunk for copies")
    copied = patch.object(shard_chunks, "memory_space", side_effect=taken)
    with copied, patch.object(gradients, "norms_of", side_effect=taken):
        assert not differences(product(params, v, X), whole_hvp(cases.directions()), plan, "product")
        gradient(params, X)
