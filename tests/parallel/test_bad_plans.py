"""Plans of models that cannot be followed: the path, the numbers and the remedy, before any collective."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import parallel
from fshard.errors import PlanError, ReplicationError, TreeError
from tests.parallel.plan_models import Net, batch, net, planned, train

MESH = fs.abstract_mesh((2, 2), ("data", "tp"))
WIDE = fs.abstract_mesh((2, 6), ("data", "tp"))


class Experts(nn.Module):
    """Stacked experts."""

    def __init__(self, count: int = 4, named: int = 4) -> None:
        super().__init__()
        self.num_experts, self.up = named, nn.Parameter(torch.zeros(count, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Attention(nn.Module):
    """Heads of width 4, and experts."""

    def __init__(self, heads: int = 3, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.head_dim, self.q, self.experts = 4, nn.Linear(8, 4 * heads), experts or Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x)  # type: ignore[no-any-return]


def bounded() -> nn.Module:
    """An embedding whose rows are rescaled when they are read."""
    return nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))


def edited() -> Net:
    """A model whose plan somebody wrote to."""
    made = net()
    made._tp_plan = {**Net._tp_plan, "blocks.*.gone": "colwise"}
    return made


BAD: dict[str, tuple[Any, Any, fs.Mesh, str]] = {
    "unknown": (net, {"blocks.*.up": "colwize"}, MESH, r"blocks\.\*\.up: 'colwize'.*'colwise'"),
    "no name": (net, {"head": 3}, MESH, "head: 3, which is no name of a style"),
    "missing": (net, {"blocks.*.gone": "colwise"}, MESH, r"blocks\.\*\.gone: 'colwise', and there is no such module"),
    "edited": (edited, None, MESH, r"blocks\.\*\.gone: 'colwise', and there is no such module"),
    "nothing to take": (net, {"blocks.*.upp": None}, MESH, r"no entry 'blocks\.\*\.upp' to take away.*blocks\.\*\.up'"),
    "not linear": (
        net,
        {"blocks.0.norm": "colwise"},
        MESH,
        r"blocks\.0\.norm: 'colwise' is for a linear layer.*LayerNorm",
    ),
    "not embedding": (net, {"head": "embedding_rowwise"}, MESH, "head: .* is for an embedding, and this is a Linear"),
    "max_norm": (bounded, {"0": "embedding_rowwise"}, MESH, "0: .*is for an embedding"),
    "vocabulary": (
        net,
        None,
        WIDE,
        r"embed\.weight: dim 0 of \[64, 8\] is 64, not a multiple of the 6 ranks of 'tp'; res",
    ),
    "heads": (Attention, {"q": "colwise"}, MESH, "q: 3 attention heads over the 2 ranks of 'tp'"),
    "parameter": (Attention, {"experts.up": "packed_colwise"}, MESH, r"experts\.up: .* whose module has no entry"),
    "module": (
        Attention,
        {"experts": "grouped_gemm"},
        fs.abstract_mesh((2,), ("ep",)),
        "is for a parameter of experts",
    ),
    "experts": (
        lambda: Attention(experts=Experts(3, 3)),
        {"experts": "moe_tp_experts"},
        MESH,
        r"experts\.up: dim 0 of \[3, 2, 2\] is 3, not a multiple of the 2 ranks",
    ),
    "named experts": (
        lambda: Attention(experts=Experts(4, 5)),
        {"experts": "moe_tp_experts"},
        MESH,
        r"Experts with parameters \['up'\] for \[4\] experts, and num_experts=5",
    ),
    "latent": (Attention, {"q": "mla_kv_a_proj"}, MESH, "q: .* needs the attribute qk_rope_head_dim"),
    "no plan": (Attention, None, MESH, "Attention brings no tensor-parallel plan"),
    "no axis": (
        net,
        None,
        fs.abstract_mesh((2, 2), ("data", "model")),
        r"neither 'tp' for.*Name the axis, axis='model'",
    ),
    "no experts": (net, None, fs.abstract_mesh((2,), ("ep",)), "Net brings no expert-parallel plan"),
    "tied": (
        net,
        {"embed": "embedding_colwise"},
        MESH,
        r"head: a Linear shares weight .* along dim 1, and has no entry",
    ),
    "tied twice": (
        net,
        {"embed": "embedding_colwise", "head": "colwise"},
        MESH,
        r"head\.weight, which is embed\.weight: along dim 0, not 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_plans_that_cannot_be_followed(case: str) -> None:
    make, entries, mesh, message = BAD[case]
    with pytest.raises(PlanError, match=re.compile(message, re.DOTALL)):
        fs.suggest_rules(parallel.parallelize(fs.split(make()), mesh, entries), mesh)


def test_rules_that_leave_leaves_whole_are_refused() -> None:
    model = parallel.parallelize(fs.split(net()), MESH)
    rules = fs.suggest_rules(model, MESH)
    with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight +\[16, 8\]: P\(.*expected 'tp' along dim 0"):
        fs.make_plan(model, MESH, rules[-1:], batch=fs.P("data"))
    with pytest.raises(PlanError, match="expected 'tp' along dim 0"):
        fs.make_plan(model, MESH, rules, batch=fs.P("data")).replace(rules=rules[-1:])
    fs.make_plan(model, fs.abstract_mesh((2,), ("data",)), rules[-1:])  # where the axis is not, nothing is cut


def test_whole_parameters_where_parts_are_expected_are_refused() -> None:
    mesh = fs.virtual_mesh((2,), ("tp",))
    model = parallel.parallelize(fs.split(net()), mesh)

    def called() -> None:
        with fs.collectives.use_mesh(mesh):
            model.apply(model.params, **batch(0))

    with pytest.raises(PlanError, match=r"Embedding\.weight .*\[64, 8\] along dim 0 is not one of 2 parts of 64"):
        mesh.run(called)


def test_parts_of_parameters_without_a_mesh_are_refused() -> None:
    model = parallel.parallelize(fs.split(net()), MESH)
    leaves = dict(fs.tree.paths(model.params))
    with pytest.raises(PlanError, match=r"Embedding\.weight .*\[32, 8\] along dim 0 is not one of 1 parts of 64"):
        model.apply(fs.tree.nest({**leaves, "embed.weight": leaves["embed.weight"][:32]}), **batch(0))
    with pytest.raises(TreeError, match=r"embed\.weight: shape \(30, 8\), expected \(64, 8\)"):
        model.apply(fs.tree.nest({**leaves, "embed.weight": leaves["embed.weight"][:30]}), **batch(0))
    with pytest.raises(TreeError, match=r"embed\.weight: shape \(64, 4\), expected \(64, 8\)"):
        model.apply(fs.tree.nest({**leaves, "embed.weight": leaves["embed.weight"][:, :4]}), **batch(0))


def test_adapters_of_parallel_layers_are_refused() -> None:
    model = parallel.parallelize(fs.split(net()), MESH)
    with pytest.raises(PlanError, match=r"lora\.wrap: layers of the model, such as embed, are cut"):
        fs.lora.wrap(model, r".*up\.weight")
    adapted = fs.lora.wrap(fs.split(net()), r".*up\.weight")
    with pytest.raises(PlanError, match=r"blocks\.0\.up: 'colwise' is for a linear layer.*weight_lora_a"):
        parallel.parallelize(adapted, MESH)


def test_a_plan_that_lacks_an_entry_is_refused_at_the_first_step() -> None:
    """The norm of each rank's heads, whose gradient is a sum over ranks, without the entry that says so."""
    mesh = fs.virtual_mesh((2, 2), ("data", "tp"))
    with pytest.raises(ReplicationError, match=r"blocks\.0\.heads\.weight"):
        mesh.run(train, net(), ("data", "tp"), {"blocks.*.heads": None})


def test_experts_on_an_axis_of_equal_rows_are_refused() -> None:
    pytest.importorskip("transformers")
    from tests.parallel.plan_models import hugging_face

    mesh = fs.virtual_mesh((2, 2), ("data", "ep"))

    def run() -> None:
        model = parallel.parallelize(fs.split(hugging_face("Mixtral")), mesh)
        fs.make_plan(model, mesh, fs.suggest_rules(model, mesh), batch=fs.P("data"))

    with pytest.raises(PlanError, match="'ep'"):
        mesh.run(run)


def test_a_head_that_is_cut_along_its_inputs_has_no_logits_in_chunks() -> None:
    pytest.importorskip("transformers")
    from tests.parallel.plan_models import hugging_face

    with fs.empty_weights():
        module = hugging_face("Llama")
    model = parallel.parallelize(fs.split(module), MESH, {"lm_head": "rowwise_split_input"})
    with pytest.raises(PlanError, match="cuts the inputs of 'lm_head' over 'tp'"):
        fs.causal_lm_loss(model, chunks=2)


def test_replaced_forwards_are_refused() -> None:
    module = net()
    module.blocks[0].up.forward = module.blocks[0].up.forward  # as accelerate's hooks do
    with pytest.raises(PlanError, match=r"blocks\.0\.up: its forward was replaced by an attribute"):
        parallel.parallelize(fs.split(module), MESH)


def test_neither_the_module_nor_the_given_model_is_changed() -> None:
    module = net()
    names = {path: set(vars(below)) for path, below in module.named_modules()}
    given = fs.split(module, units="auto")
    model = parallel.parallelize(given, MESH)
    assert given.around == {} and len(model.around) == 15
    want = module(**batch(0))
    for one in (given, model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one.apply(one.params, **batch(0)), want)  # whole parameters, and no mesh in scope
        assert one.around == (model.around if one is not given else {})
    assert {path: set(vars(below)) for path, below in module.named_modules()} == names
    assert parallel.parallelize(given, fs.abstract_mesh((2, 1), ("data", "tp"))).around == {}


def test_rules_name_layers_once() -> None:
    _, plan = planned(net(), MESH)
    model = parallel.parallelize(fs.split(net()), MESH)
    rules = fs.suggest_rules(model, MESH)
    assert [rule.pattern for rule in rules[:-1]] == [  # type: ignore[union-attr]
        "embed\\.weight",
        "place\\.weight",
        *(f"blocks\\.\\d+\\.{name}" for name in ("up\\.weight", "up\\.bias", "down\\.weight")),
        *(f"blocks\\.\\d+\\.{name}" for name in ("wide\\.weight", "wide\\.bias", "narrow\\.weight")),
        "head\\.bias",
    ]
    assert plan.leaves["blocks.1.down.weight"].at_rest == fs.P(None, "tp", flat="data")
