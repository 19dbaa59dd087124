"""LoRA: adapters read as part of their weights wherever those are read, train alone, and merge."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError, TreeError
from tests.shared import modules, parity
from tests.shared.virtual import Job
from tests.shared.workers import Pools

RANK, ALPHA, STEPS, ROWS = 2, 8.0, 10, 8
LR = 0.1


class Conv1D(nn.Module):
    """As in transformers: a linear layer whose weight is transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Experts(nn.Module):
    """A leaf of three dims, read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bm,enm->ben", x, self.weight)


class Tied(nn.Module):
    """An embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tok(x)))


class Attention(nn.Module):
    """torch's own attention, which reads the weight of its output layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


FORMS: dict[str, tuple[Any, str, Any]] = {
    "linear": (lambda: nn.Linear(5, 3), "weight", lambda: torch.randn(4, 2, 5)),
    "no bias": (lambda: nn.Linear(5, 3, bias=False), "weight", lambda: torch.randn(5)),
    "transposed": (lambda: Conv1D(3, 5), "weight", lambda: torch.randn(4, 2, 5)),
    "embedding": (lambda: nn.Embedding(9, 4), "weight", lambda: torch.randint(9, (3, 4))),
    "counted": (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), "weight", lambda: torch.randint(9, (3, 4))),
    "tied": (Tied, r"tok\.weight", lambda: torch.randint(11, (3, 4))),
    "three dims": (Experts, "weight", lambda: torch.randn(2, 5)),
    "attention": (Attention, r"inner\.(in_proj_weight|out_proj\.weight)", lambda: torch.randn(2, 3, 8)),
    "convolution": (lambda: nn.Conv2d(2, 3, (2, 2)), "weight", lambda: torch.randn(2, 2, 4, 4)),
}


def disturbed(params: Any) -> dict[str, Any]:
    """Adapters that do something."""
    draw = torch.Generator().manual_seed(3)
    flat = dict(tree.paths(params))
    for path in flat:
        if path.endswith("_lora_b"):
            flat[path] = torch.randn(flat[path].shape, generator=draw)
    return tree.nest(flat)


@pytest.mark.parametrize("name", FORMS)
def test_adapted_equals_merged(name: str) -> None:
    torch.manual_seed(1)
    make, targets, data = FORMS[name]
    model = fs.split(make())
    wrapped = fs.lora.wrap(model, targets, rank=RANK, alpha=ALPHA)
    x = data()
    torch.testing.assert_close(wrapped.apply(wrapped.params, x), model.apply(model.params, x))
    params = disturbed(wrapped.params)
    merged = fs.lora.merge(params, alpha=ALPHA)
    assert list(dict(tree.paths(merged))) == list(dict(tree.paths(model.params)))
    apart = wrapped.apply(params, x)
    torch.testing.assert_close(apart, model.apply(merged, x), rtol=1e-5, atol=1e-5)
    assert (apart - model.apply(model.params, x)).abs().max() > 0.1

    def through(run: Any) -> Any:
        def loss(flat: dict[str, Tensor]) -> Tensor:
            total: Tensor = run(tree.nest(flat)).square().sum()
            return total

        return torch.func.grad(loss)(dict(tree.paths(params)))

    ours = through(lambda p: wrapped.apply(p, x))
    theirs = through(lambda p: model.apply(fs.lora.merge(p, alpha=ALPHA), x))
    for path, _ in tree.paths(fs.lora.adapters(params)):
        torch.testing.assert_close(ours[path], theirs[path], rtol=1e-4, atol=1e-4)


def test_no_whole_matrix_is_made() -> None:
    """Of a linear layer's adapters, nothing as large as its weight is saved or computed."""
    model = fs.lora.wrap(fs.split(nn.Linear(64, 64)), "weight", rank=RANK)
    params = {path: leaf.requires_grad_("lora" in path) for path, leaf in model.params.items()}
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel() if x.untyped_storage()._cdata != params["weight"].untyped_storage()._cdata else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.apply(params, torch.randn(3, 64)).sum().backward()
    assert saved and max(saved) <= 3 * 64
    assert params["weight_lora_b"].grad is not None and params["weight"].grad is None


def test_the_given_model_stays_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fs.split(module, units=("*",))
    wrapped = fs.lora.wrap(model, r"0\.weight", rank=RANK)
    assert type(model.module[0]) is nn.Linear and type(module[0]) is nn.Linear  # type: ignore[index]
    assert list(dict(tree.paths(model.params))) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert wrapped.units == model.units and wrapped.params["0"]["weight"] is model.params["0"]["weight"]
    assert wrapped.frozen == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_adapters_of_another_dtype() -> None:
    model = fs.lora.wrap(fs.split(nn.Linear(4, 4).bfloat16()), "weight", rank=RANK, dtype=torch.float32)
    assert model.params["weight_lora_a"].dtype == torch.float32
    assert model.apply(model.params, torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_first_values_are_those_of_init_state() -> None:
    model = fs.lora.wrap(fs.split(nn.Linear(4, 6)), "weight", rank=RANK, seed=3)
    plan = fs.make_plan(model, fs.abstract_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    state = fs.init_state(plan, fs.optim.sgd(0.1), seed=3)
    for name in ("weight_lora_a", "weight_lora_b"):
        assert torch.equal(state.params[name], model.params[name].view(-1))
    assert model.params["weight_lora_a"].abs().max() <= 0.5 and model.params["weight_lora_a"].std() > 0.1


def test_hand_written_functions() -> None:
    params = fs.lora.init({"up": {"w": torch.randn(6, 4)}, "norm": torch.ones(6)}, r"up\.w", rank=RANK)
    full = disturbed(params)
    x = torch.randn(3, 4)
    out = fs.lora.linear(full["up"], x, alpha=ALPHA, name="w")
    torch.testing.assert_close(out, x @ fs.lora.merge(full, alpha=ALPHA)["up"]["w"].T)
    rules = [fs.Rule(fs.lora.PATHS, fs.fsdp("shard")), fs.Rule(".*", fs.fsdp("shard"), trainable=False)]
    plan = fs.make_plan(params, fs.abstract_mesh((2,), ("shard",)), rules, units=("up",))
    assert [path for path, leaf in plan.leaves.items() if leaf.trainable] == ["up.w_lora_a", "up.w_lora_b"]
    assert {path: group.unit for path, (group, _) in plan.places().items()} == {
        **dict.fromkeys(("up.w", "up.w_lora_a", "up.w_lora_b"), "up"),
        "norm": "root",
    }


def build() -> tuple[fs.Model, fs.Model]:
    """A language model with tied embeddings, and the same with adapters in its attention and its embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = fs.split(modules.GPT(), units=("blocks.*",))
    return model, fs.lora.wrap(model, [r".*attn\..*weight", r"tok\.weight"], rank=RANK, alpha=ALPHA)


def tokens(step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """A global batch, or a part of it."""
    x = torch.randint(64, (ROWS, 16), generator=torch.Generator().manual_seed(step % 2))
    return x[rows], ((3 * x + 1) % 64)[rows]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The language model's loss."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(compile: str | None) -> dict[str, Any]:
    """On a rank: what came of training the adapters."""
    model = build()[1]
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, [(r".*norm.*", fs.P()), (".*", fs.fsdp("shard"))])
        opt = fs.optim.sgd(LR, momentum=0.9)
        state = fs.init_state(plan, opt, params=model.params)
        step = fs.make_train_step(
            lambda p, b: loss_of(model.apply(p, b[0]), b[1]), opt, plan, debug=True, compile=compile
        )
        part = ROWS // mesh.size
        batches = (tokens(number, slice(mesh.rank * part, (mesh.rank + 1) * part)) for number in range(STEPS))
        return {
            "run": parity.sharded(step, state, plan, batches)[0],
            "groups": {group.name for group in plan.groups if group.trainable},
            "memory": {item for item in step.schedule.memory.sizes if item.partition(":")[0] != "param"},
        }


@pytest.mark.sample(2)
@pytest.mark.parametrize(("world", "compile"), [(2, None), (4, "fx")])
def test_training_adapters_equals_one_process(job: Job, world: int, compile: str | None) -> None:
    """One plain process computes with merged weights; autograd takes the gradients of adapters through the merge."""
    model, wrapped = build()
    flat = {path: leaf.clone() for path, leaf in tree.paths(wrapped.params)}
    small = [path for path in flat if "_lora_" in path]
    for path in small:
        flat[path].requires_grad_()
    rule = torch.optim.SGD([flat[path] for path in small], lr=LR, momentum=0.9)

    def backward(step: int) -> float:
        x, y = tokens(step)
        return parity.backward(loss_of(model.apply(fs.lora.merge(tree.nest(flat), alpha=ALPHA), x), y))

    want = parity.plain(flat, rule, backward, STEPS)
    assert want.losses[0] - want.losses[-1] > 0.05
    ranks = job(world).run(trained, compile)
    problems = parity.differences([ours["run"] for ours in ranks], want, parity.Near(loss=4e-5))
    assert not problems, "\n".join(problems)
    for ours in ranks:
        assert ours["run"].state.keys() == {f"momentum_buffer.{path}" for path in small}
        assert all(torch.equal(leaf, flat[path]) for path, leaf in ours["run"].params.items() if path not in small)
        assert {item.partition(":")[2] for item in ours["memory"]} == ours["groups"]


@pytest.mark.parametrize(
    ("targets", "error"),
    [
        ("q", "'q'"),
        ([], "none given"),
        (["weight", "nothing"], "'nothing'"),
        (".*", r"bias  \[3\]  torch.float32"),
        ("weight", "has adapters already"),
        ("weight_lora_a", "is an adapter itself"),
    ],
)
def test_targets_that_cannot_be(targets: Any, error: str) -> None:
    model = fs.split(nn.Linear(2, 3))
    if "adapter" in error:
        model = fs.lora.wrap(model, "weight")
    with pytest.raises(PlanError, match=error):
        fs.lora.wrap(model, targets)
    with pytest.raises(PlanError, match=error):
        fs.lora.init(model.params, targets)


def test_a_rank_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="rank=0"):
        fs.lora.wrap(fs.split(nn.Linear(2, 3)), "weight", rank=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"weight_lora_a": None}, "weight: weight_lora_a is missing"),
        ({"weight": None}, "weight: weight is missing"),
        ({"weight_lora_b": torch.zeros(6)}, r"weight: \[3, 2\] beside \[8, 2\] and \[6\]"),
    ],
)
def test_adapters_that_do_not_fit(change: dict[str, Any], error: str) -> None:
    params = {**fs.lora.wrap(fs.split(nn.Linear(2, 3)), "weight").params, **change}
    with pytest.raises(TreeError, match=error):
        fs.lora.merge({path: leaf for path, leaf in params.items() if leaf is not None}, alpha=1)


ABSORBED: dict[str, tuple[tuple[str, ...], tuple[int, ...], list[Any]]] = {
    "flat": (("shard",), (2,), [(".*", fs.fsdp("shard"))]),
    "rows, and whole matrices": (
        ("shard",),
        (2,),
        [("w", fs.P("shard")), fs.Rule("(e|v)", fs.fsdp("shard"), align="leaf"), (".*", fs.P())],
    ),
    "a local axis": (
        ("shard", "tp"),
        (2, 2),
        [
            ("w", fs.P("tp", None, flat="shard")),
            ("e", fs.P(None, None, "tp")),
            ("v.*", fs.fsdp("shard")),
            (".*", fs.P()),
        ],
    ),
    "one rank": (("shard",), (1,), [(".*", fs.fsdp("shard"))]),
}


def absorbed(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """On a rank: what a state has absorbed, what its whole tree merges to, and whether the state was left alone."""
    names, sizes, rules = ABSORBED[name]
    with fs.make_mesh(sizes, names) as mesh:
        draw = torch.Generator().manual_seed(2)
        bare = {
            "w": torch.randn(6, 5, generator=draw),
            "e": torch.randn(3, 4, 4, generator=draw),
            "v": torch.randn(7, 3, generator=draw),
        }
        bare["v"] = bare["v"].bfloat16()
        whole = disturbed(fs.lora.init(bare, [".*"], rank=2))
        plan = fs.make_plan(whole, mesh, rules, batch=fs.P("shard"))
        state = fs.init_state(plan, fs.optim.sgd(0.1), params=whole)
        new = fs.lora.absorb(state, alpha=ALPHA)
        again = fs.unshard(state.params, plan)
        same = all(torch.equal(leaf, whole[path]) for path, leaf in again.items())
        return fs.unshard(new.params, plan), fs.lora.merge(whole, alpha=ALPHA), same


@pytest.mark.parametrize("name", ABSORBED)
def test_shards_absorb_their_adapters(pool: Pools, name: str) -> None:
    for whole, merged, same in pool(torch.Size(ABSORBED[name][1]).numel()).run(absorbed, name):
        assert same and len(whole) == 3 * len(merged) == 9
        for path, leaf in merged.items():
            torch.testing.assert_close(whole[path], leaf, rtol=1e-6 if leaf.dtype == torch.float32 else 8e-3, atol=1e-6)
            assert not whole[path + "_lora_b"].any() and whole[path + "_lora_a"].any()
            assert leaf.dtype == whole[path].dtype


def test_a_tree_without_adapters_has_nothing_to_merge() -> None:
    merged = fs.lora.merge(disturbed(fs.lora.wrap(fs.split(nn.Linear(2, 3)), "weight").params), alpha=1.0)
    for bare, path in ((merged, "weight"), ({}, "w")):
        with pytest.raises(TreeError, match=rf"merge: none of {len(bare)} leaves is an adapter, such as {path}_lora_a"):
            fs.lora.merge(bare, alpha=1.0)


def test_a_state_without_adapters_has_nothing_to_absorb() -> None:
    mesh, params = fs.make_mesh((1,), ("shard",)), {"w": torch.ones(2, 2)}
    state = fs.init_state(fs.make_plan(params, mesh, [(".*", fs.P())]), fs.optim.sgd(0.1), params=params)
    with pytest.raises(TreeError, match="absorb: none of 1 leaves is an adapter, such as w_lora_a.*lora.wrap"):
        fs.lora.absorb(state, alpha=1.0)
