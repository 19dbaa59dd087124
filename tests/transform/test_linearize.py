"""Functions linearized at a point, on real ranks and played ones, against plain PyTorch on whole tensors in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from tests.shared.bad import Raised, attempt
from tests.shared.virtual import Job
from tests.transform import cases as cases
from tests.transform.test_tools import outer_loss, whole_gnvp, whole_hvp
from tests.transform.test_transforms import FLAT, HSDP, Axes, mine

F = torch.func
X = cases.batch()
TOLERANCE = 1e-12


def outputs(p: Any, x: Any) -> Any:
    """Two outputs, one of them without rows."""
    out = cases.predict(p, x)
    return {"logits": out, "size": out.square().mean().sqrt()}


def logits(p: Any) -> Tensor:
    """Of the whole model and the global batch."""
    return cases.predict({**p, "frozen": p["frozen"].detach()}, X)


def far(got: Any, want: Any, plan: fs.Plan, what: str) -> list[str]:
    """Where a tree of shards is not that of a whole tree, or a tensor not the other."""
    pairs = [(what, got, want)]
    if not isinstance(want, Tensor):
        flat = dict(tree.paths(got))
        pairs = [(f"{what} {path}", flat[path], leaf) for path, leaf in tree.paths(fs.shard(want, plan))]
    errors = [(name, (a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for name, a, b in pairs if b.numel()]
    return [f"{name}: {error:.1e}" for name, error in errors if not error <= TOLERANCE]


def maps(axes: Axes) -> list[str]:
    """On a rank: what differs from plain PyTorch."""
    out: list[str] = []
    with fs.make_mesh(*axes) as mesh:
        plan, x = cases.plan_on(mesh), mine(X, mesh)
        params = fs.shard(cases.whole(), plan)
        turns = [cases.directions(), tree.map(lambda leaf: leaf.sin(), cases.directions())]
        rows = len(x["x"])
        own = slice(mesh.rank * rows, (mesh.rank + 1) * rows)
        for reshard in (False, True):
            jacobian = fs.func.linearize(outputs, plan, reshard=reshard)(params, x)
            hessian = fs.func.hvp(cases.weighted_loss, plan, reshard=reshard).linearize(params, x)
            fresh = fs.func.hvp(cases.weighted_loss, plan, reshard=reshard)
            for turn, v in enumerate(turns):
                name, along = f"{reshard} {turn}", fs.shard(v, plan)
                out += far(jacobian(along)["logits"], F.jvp(logits, (cases.whole(),), (v,))[1][own], plan, f"J {name}")
                out += far(hessian(along), whole_hvp(v), plan, f"H {name}")
                out += far(hessian.pull(along), whole_hvp(v), plan, f"transposed H {name}")
                out += far(fresh(params, along, x), whole_hvp(v), plan, f"hvp {name}")
            weights = torch.linspace(0, 1, 12 * 7, dtype=torch.float64).view(12, 7)
            pulled = jacobian.pull({"logits": weights[own], "size": torch.zeros((), dtype=torch.float64)})
            out += far(pulled, F.vjp(logits, cases.whole())[1](weights)[0], plan, f"transposed J {reshard}")
            want = F.grad(lambda p: cases.reference(cases.weighted_loss)(p, X))(cases.whole())
            out += far(hessian.value, want, plan, f"gradient {reshard}")
            again = [torch.equal(a, b) for a, b in zip(*map(tree.leaves, [hessian(along)] * 2), strict=True)]
            out += [] if all(again) else ["a product changed"]
        curved = fs.func.gnvp(cases.predict, outer_loss, plan).linearize(params, x)
        for v in turns:
            out += far(curved(fs.shard(v, plan)), whole_gnvp(v), plan, "G")
    return out


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_to_plain_pytorch(job: Job, world: int) -> None:
    assert not sum(job(world).run(maps, FLAT), [])


def test_on_replicas_of_shards(job: Job) -> None:
    assert not sum(job(4).run(maps, HSDP), [])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # PyTorch's own
def test_equal_to_linearize_of_pytorch() -> None:
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    v = cases.directions()
    value, push = F.linearize(logits, cases.whole())
    ours = fs.func.linearize(cases.predict, plan)(fs.shard(cases.whole(), plan), X)
    assert not far(ours.value, value, plan, "value") + far(ours(fs.shard(v, plan)), push(v), plan, "product")


def forwards(products: int) -> list[int]:
    """On a rank: how often each way of making products calls the loss function."""
    counts = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), units=("*",))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        params = fs.init_state(plan, fs.optim.sgd(0.1), seed=0).params
        v, x = tree.map(torch.ones_like, params), torch.ones(2, 8)
        calls: list[int] = []

        def loss(p: Any, batch: Tensor) -> Tensor:
            calls.append(1)
            return model.apply(p, batch).square().mean()

        ways: list[Any] = []
        for reshard in (False, True):
            product = fs.func.hvp(loss, plan, reshard=reshard)
            ways += [lambda p=product: [p(params, v, x) for _ in range(products)]]
            ways += [lambda p=product: [*map(p.linearize(params, x), [v] * products)]]
        for way in ways:
            calls.clear()
            way()
            counts.append(len(calls))
    return counts


def test_one_forward_serves_many_products() -> None:
    # Products by themselves find their schedule by one run on tensors without data.
    assert fs.virtual_mesh((2,), ("shard",)).run(forwards, 5) == [[1 + 5, 1, 1 + 5, 1]] * 2


def mistakes() -> list[list[Raised | None]]:
    """On a rank: what each mistake raises, made by all ranks and by rank 1 alone."""
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, x = cases.plan_on(mesh), mine(X, mesh)
        params = fs.shard(cases.whole(), plan)
        jacobian = fs.func.linearize(cases.predict, plan)(params, x)
        hessian = fs.func.hvp(cases.mean_loss, plan).linearize(params, x)
        curved = fs.func.gnvp(cases.predict, outer_loss, plan)
        integers = fs.func.linearize(lambda p, b: cases.predict(p, b).argmax(1), plan)
        calls = [
            (jacobian, params, {"table": params["table"]}),
            (jacobian.pull, jacobian.value, jacobian.value[:, :2]),
            (hessian, params, 3),
            (lambda p: curved(p, params, x), params, {}),
            (lambda p: curved(params, p, x), params, {}),
            (lambda f: f(params, x), fs.func.linearize(cases.predict, plan), integers),
            (lambda b: fs.func.linearize(cases.predict, plan)(params, b), x, {}),
        ]
        for call, right, wrong in calls:
            alone = attempt(lambda: call(wrong if mesh.rank == 1 else right))  # noqa: B023
            every = attempt(lambda: call(wrong))  # noqa: B023
            out.append([alone, every, attempt(lambda: call(right))])  # noqa: B023
    return out


def test_mistakes_are_told_to_all_ranks_before_a_collective() -> None:
    kinds = ["TreeError", "TreeError", "TreeError", "TreeError", "TreeError", "LossError", "KeyError"]
    first, second = fs.virtual_mesh((2,), ("shard",)).run(mistakes)
    for kind, others, own in zip(kinds, first, second, strict=True):
        assert own[0] and own[1] and kind in own[0].kinds and kind in own[1].kinds, own
        assert others[0] and "PeerError" in others[0].kinds and own[0].text.splitlines()[0] in others[0].text
        assert others[1] and kind in others[1].kinds
        assert own[2] is None and others[2] is None


def written_batches() -> list[Raised | None]:
    """On a rank: what products of maps raise when rank 1 has written to its batch."""
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = cases.plan_on(mesh)
        params = fs.shard(cases.whole(), plan)
        hvp, gnvp = fs.func.hvp(cases.mean_loss, plan), fs.func.gnvp(cases.predict, outer_loss, plan)
        for make, pulls in (
            (fs.func.linearize(cases.predict, plan), True),
            (hvp.linearize, True),
            (gnvp.linearize, False),
        ):
            batch = tree.map(torch.clone, mine(X, mesh))
            found = make(params, batch)
            found(params)
            if mesh.rank == 1:
                tree.leaves(batch)[0].zero_()
            out.append(attempt(lambda: found(params)))  # noqa: B023
            out.append(attempt(lambda: found.pull(found.value if pulls else params)))  # noqa: B023
    return out


def test_a_map_refuses_a_batch_that_was_written_to() -> None:
    first, second = fs.virtual_mesh((2,), ("shard",)).run(written_batches)
    for other, own in zip(first, second, strict=True):
        assert own and "BatchError" in own.kinds and "written to in place" in own.text
        assert other and "PeerError" in other.kinds


def test_the_choice_of_resharding_goes_by_the_bytes_of_the_parameters() -> None:
    def chosen(size: int) -> bool:
        plan = fs.make_plan(
            {"w": torch.empty(size, device="meta")}, fs.abstract_mesh((2,), ("s",)), [(".*", fs.fsdp("s"))]
        )
        return fs.func.hvp(lambda p, x: p["w"].sum(), plan).reshard

    assert not chosen(2**25) and chosen(2**25 + 32)


def test_wrong_arguments_are_refused() -> None:
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    wrong: list[Any] = [
        lambda: fs.func.linearize(plan, cases.predict),  # type: ignore[arg-type]
        lambda: fs.func.linearize(cases.predict, plan, reshard=1),  # type: ignore[arg-type]
        lambda: fs.func.hvp(cases.mean_loss, plan, reshard="no"),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(fs.errors.PlanError, match="wrong type"):
            call()


@pytest.mark.parametrize("kind", ["hvp", "gnvp"])
def test_products_draw_a_mask_each_and_a_linear_map_one(kind: str) -> None:
    plan = fs.make_plan({"w": torch.ones(64)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])

    def dropped(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(p["w"] * x, 0.5)

    tools = {
        "hvp": fs.func.hvp(lambda p, x: dropped(p, x).square().sum(), plan),
        "gnvp": fs.func.gnvp(dropped, lambda out, x: out.square().sum(), plan),
    }
    product, one, x = tools[kind], {"w": torch.ones(64)}, torch.ones(64)
    assert not torch.equal(product(one, one, x)["w"], product(one, one, x)["w"])
    linear = product.linearize(one, x)
    assert torch.equal(linear(one)["w"], linear(one)["w"])
