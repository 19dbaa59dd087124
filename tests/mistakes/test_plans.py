"""What a new user gets wrong with models, rules, meshes and trees: each mistake is refused, with what was meant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, errors
from fshard import collectives as c
from tests.mistakes.cases import BATCH, MESH, MODEL, NET, OPT, PLAN, RULES, VIRTUAL, Net, loss, st, v2

MISTAKES: list[tuple[str, Callable[[], Any], type[errors.ShardError], str]] = [
    (
        "in_specs short",
        lambda: fs.shard_map(lambda x, y: x, VIRTUAL, (P("shard"),), P("shard"))(torch.ones(2), torch.ones(2)),
        errors.TreeError,
        "2 args: give one spec for each, or one fs.P for all of them",
    ),
    (
        "units regex",
        lambda: fs.split(NET, units=(r"blocks\..*",)),
        errors.PlanError,
        "not regular expressions: write 'blocks.*'. The module has:",
    ),
    (
        "units regex2",
        lambda: fs.split(NET, units=(r"blocks\.\d+",)),
        errors.PlanError,
        "not regular expressions: write 'blocks.*'. The module has:",
    ),
    (
        "units typo",
        lambda: fs.split(NET, units=("block.*",)),
        errors.PlanError,
        "no submodule; the closest is 'blocks.*'. The module has:",
    ),
    (
        "units deep",
        lambda: fs.split(NET, units=("blocks",)),
        errors.PlanError,
        "blocks: ModuleList; its children are blocks.*",
    ),
    (
        "units weight",
        lambda: fs.split(NET, units=("blocks.*.weight",)),
        errors.PlanError,
        "are modules, not parameters: write 'blocks.*'. The module has:",
    ),
    (
        "units module inst",
        lambda: fs.split(NET, units=(NET.inp,)),
        errors.PlanError,
        "Linear; give globs ('blocks.*') or subclasses of nn.Module",
    ),
    (
        "rules glob",
        lambda: fs.make_plan(MODEL, MESH, [("blocks.*.weight", P()), ("*", fs.fsdp("shard"))]),
        errors.PlanError,
        "'*' is a glob, not a regular expression: write r'.*'",
    ),
    (
        "rules glob2",
        lambda: fs.make_plan(MODEL, MESH, [("*.weight", fs.fsdp("shard")), (".*", P())]),
        errors.PlanError,
        "is a glob, not a regular expression: write r'.*\\.weight'",
    ),
    (
        "rules partial",
        lambda: fs.make_plan(MODEL, MESH, [("weight", fs.fsdp("shard")), (".*", P())]),
        errors.PlanError,
        "no path: r'.*weight.*' matches 4, such as 'inp.weight'",
    ),
    (
        "rules partial2",
        lambda: fs.make_plan(MODEL, MESH, [("blocks", fs.fsdp("shard")), (".*", P())]),
        errors.PlanError,
        "no path: r'blocks.*' matches 4, such as 'blocks.0.weight'",
    ),
    (
        "rules bad regex",
        lambda: fs.make_plan(MODEL, MESH, [("(blocks", fs.fsdp("shard")), (".*", P())]),
        errors.PlanError,
        "missing ), unterminated subpattern at position 0",
    ),
    (
        "rules nomatch",
        lambda: fs.make_plan(MODEL, MESH, [("layers.*", fs.fsdp("shard"))]),
        errors.PlanError,
        "such as (r'.*', P()) for replicated",
    ),
    (
        "rules tuple",
        lambda: fs.make_plan(MODEL, MESH, (".*", fs.fsdp("shard"))),
        errors.PlanError,
        "ignore=pattern) does, and trainable=False freezes one",
    ),
    (
        "rules str spec",
        lambda: fs.make_plan(MODEL, MESH, [(".*", "shard")]),
        errors.PlanError,
        "ignore=pattern) does, and trainable=False freezes one",
    ),
    (
        "rules fsdp class",
        lambda: fs.make_plan(MODEL, MESH, [(".*", fs.fsdp)]),
        errors.PlanError,
        "the class fs.fsdp itself: name the axis, fs.fsdp('data')",
    ),
    (
        "rules axis",
        lambda: fs.make_plan(MODEL, MESH, [(".*", fs.fsdp("data"))]),
        errors.PlanError,
        "P(flat='data'): no axis 'data' in the mesh, which has shard",
    ),
    (
        "P too many",
        lambda: fs.make_plan(
            MODEL, fs.abstract_mesh((2,), ("shard",)), [(".*bias|norm.*", P(None, "shard")), (".*", P())]
        ),
        errors.PlanError,
        "entries for 1 dims; give at most one entry a dim, or flat=",
    ),
    (
        "P indivisible",
        lambda: fs.make_plan(MODEL, fs.abstract_mesh((3,), ("shard",)), [(".*", P("shard"))]),
        errors.PlanError,
        "pad the leaf to 9, or use flat='shard', which cuts any size",
    ),
    ("P int", lambda: P(0), errors.PlanError, "entry is the name of a mesh axis, a tuple of names, or None"),
    (
        "fsdp none",
        lambda: fs.make_plan(MODEL, MESH, [(".*", fs.fsdp(None))]),
        errors.PlanError,
        "names no axis: give one, or write fs.P() for replicated",
    ),
    (
        "fsdp minsize",
        lambda: fs.make_plan(MODEL, MESH, [(".*", fs.fsdp("shard", min_size="100"))]),
        errors.PlanError,
        "give a number of elements, an int >= 0",
    ),
    (
        "apply shards",
        lambda: v2(lambda m, p, s: MODEL.apply(s.params, BATCH["x"])),
        errors.TreeError,
        "These look like shards, this rank's parts of flat-sharded le",
    ),
    (
        "apply state",
        lambda: MODEL.apply(st(), BATCH["x"]),
        errors.TreeError,
        "Give the whole tensors of it, model.params or fs.unshard(sta",
    ),
    ("apply plan", lambda: MODEL.apply(PLAN, BATCH["x"]), errors.TreeError, "a Plan was given, not a nested dict"),
    (
        "apply no params",
        lambda: MODEL.apply(BATCH["x"]),
        errors.TreeError,
        "The parameters come first: model.apply(params, *args).",
    ),
    (
        "apply flat",
        lambda: MODEL.apply(dict(NET.state_dict()), BATCH["x"]),
        errors.TreeError,
        "such as a state dict, becomes a tree by fs.tree.nest(flat)",
    ),
    (
        "module as model",
        lambda: fs.make_plan(NET, MESH, RULES),
        errors.PlanError,
        "module Net itself: call fs.split(module, units=...) first",
    ),
    (
        "module init_state",
        lambda: fs.init_state(NET, OPT),
        errors.PlanError,
        "plan is a Net: give what fs.make_plan returned",
    ),
    (
        "batch axis unknown",
        lambda: fs.make_plan(MODEL, MESH, RULES, batch=P("data")),
        errors.PlanError,
        "data axis once, by tensor dim, such as batch=P('shard')",
    ),
    (
        "batch tuple",
        lambda: fs.make_plan(MODEL, MESH, RULES, batch=("shard",)),
        errors.PlanError,
        'batch is a tuple: give a spec, batch=fs.P("data")',
    ),
    (
        "mesh product",
        lambda: fs.make_mesh((2,), ("shard",)),
        errors.PlanError,
        "(torchrun --nproc-per-node 2), or write -1 for one axis",
    ),
    (
        "mesh len",
        lambda: fs.make_mesh((1,), ("a", "b")),
        errors.PlanError,
        "distinct name an axis: got sizes (1,) and names ('a', 'b')",
    ),
    (
        "psum no mesh",
        lambda: c.psum(torch.ones(2), "shard"),
        errors.AxisError,
        "runs, or under fs.collectives.use_mesh(mesh), or pass mesh=",
    ),
    (
        "psum bad axis",
        lambda: c.psum(torch.ones(2), "data", mesh=MESH),
        errors.AxisError,
        "the mesh: give one of 'shard'; dims of torch.vmap have no names",
    ),
    (
        "psum mesh pos",
        lambda: c.psum(torch.ones(2), MESH),
        errors.AxisError,
        "give the name of a mesh axis; a mesh goes by name, mesh=",
    ),
    (
        "precision bf16",
        lambda: fs.make_plan(MODEL, MESH, RULES, precision="bf16"),
        errors.PlanError,
        "precision='bf16' must be fs.Precision(...)",
    ),
    (
        "precision dtype",
        lambda: fs.make_plan(MODEL, MESH, RULES, precision=torch.bfloat16),
        errors.PlanError,
        "precision=torch.bfloat16 must be fs.Precision(...)",
    ),
    (
        "Precision str",
        lambda: fs.Precision(compute="bfloat16"),
        errors.PlanError,
        "torch.float16, torch.float32, torch.float64, or None",
    ),
    ("seed None", lambda: fs.init_state(PLAN, OPT, seed=None), errors.PlanError, "seed is None: give an int"),
    ("seed float", lambda: fs.init_state(PLAN, OPT, seed=0.5), errors.PlanError, "seed is 0.5, a float: give an int"),
    (
        "params statedict",
        lambda: fs.init_state(PLAN, OPT, params=NET.state_dict()),
        errors.TreeError,
        "such as a state dict, becomes a tree by fs.tree.nest(flat)",
    ),
    (
        "params model",
        lambda: fs.init_state(PLAN, OPT, params=MODEL),
        errors.TreeError,
        "is a Model, not a nested dict of tensors: give state.params",
    ),
    (
        "params shards",
        lambda: v2(lambda m, p, s: fs.init_state(p, OPT, params=s.params)),
        errors.TreeError,
        "These are shards, this rank's parts: give fs.unshard(params,",
    ),
    ("params pos", lambda: fs.init_state(PLAN, OPT, MODEL.params), errors.PlanError, "seed is a dict: give an int"),
    (
        "init_state model",
        lambda: fs.init_state(MODEL, PLAN, OPT),
        errors.PlanError,
        "plan is a Model: give what fs.make_plan returned",
    ),
    (
        "unshard full",
        lambda: v2(lambda m, p, s: fs.unshard(MODEL.params, p)),
        errors.TreeError,
        "These are whole tensors: give fs.shard(params, plan), this r",
    ),
    (
        "unshard missing",
        lambda: fs.unshard({"inp": st().params["inp"]}, PLAN),
        errors.TreeError,
        "missing  blocks.0.weight  [8, 8]",
    ),
    (
        "unshard state",
        lambda: fs.unshard(st(), PLAN),
        errors.TreeError,
        "TrainState, not a nested dict of tensors: give state.params",
    ),
    (
        "unshard mesh",
        lambda: fs.unshard(st().params, MESH),
        errors.PlanError,
        "plan is a Mesh: give what fs.make_plan returned",
    ),
    (
        "shard shards",
        lambda: v2(lambda m, p, s: fs.shard(s.params, p)),
        errors.TreeError,
        "These are shards, this rank's parts: give fs.unshard(full, p",
    ),
    (
        "shard statedict",
        lambda: fs.shard(NET.state_dict(), PLAN),
        errors.TreeError,
        "such as a state dict, becomes a tree by fs.tree.nest(flat)",
    ),
    ("shard extra", lambda: fs.shard({**MODEL.params, "x": torch.ones(1)}, PLAN), errors.TreeError, "unknown  x"),
    (
        "lora nomatch",
        lambda: fs.lora.wrap(
            MODEL,
            "blocks.*.q_proj",
        ),
        errors.PlanError,
        "'blocks.*.q_proj'",
    ),
    (
        "lora glob",
        lambda: fs.lora.wrap(MODEL, "*.weight"),
        errors.PlanError,
        "is a glob, not a regular expression: write r'.*\\.weight'",
    ),
    (
        "lora rank",
        lambda: fs.lora.wrap(MODEL, ".*weight", rank=0),
        errors.PlanError,
        "lora: rank=0 must be an int >= 1",
    ),
    (
        "lora twice",
        lambda: fs.lora.wrap(fs.lora.wrap(MODEL, r".*blocks.*weight"), ".*weight"),
        errors.PlanError,
        "norm.weight  [8]  torch.float32",
    ),
    (
        "sharded_loss state",
        lambda: fs.func.sharded_loss(loss, PLAN)(st(), BATCH),
        errors.TreeError,
        "TrainState, not a nested dict of tensors: give state.params",
    ),
    (
        "sharded_loss full",
        lambda: v2(lambda m, p, s: fs.func.sharded_loss(loss, p)(MODEL.params, BATCH)),
        errors.TreeError,
        "These are whole tensors: give fs.shard(params, plan), this r",
    ),
    ("split cls", lambda: fs.split(Net), errors.PlanError, "Net(...); pass a tree of tensors directly to fs.make_plan"),
    (
        "replicated no batch",
        lambda: fs.make_plan(MODEL, fs.abstract_mesh((2, 2), ("data", "shard")), RULES),
        errors.PlanError,
        "'shard') needs batch=P('...'), which names the data axes",
    ),
    (
        "unit class",
        lambda: fs.unit(nn.Linear),
        errors.PlanError,
        "*args); modules become units by fs.split(module, units=...)",
    ),
]


@pytest.mark.parametrize(("name", "call", "error", "says"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_told(name: str, call: Callable[[], Any], error: type[errors.ShardError], says: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)
