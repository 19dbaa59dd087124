"""Every public function says what is wrong where its first two arguments are swapped."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, optim, parallel, tree
from fshard.errors import ShardError
from tests.mistakes.cases import BATCH, MESH, MODEL, NET, OPT, PLAN, RULES, loss, st, step
from tests.project.test_public_names import public_names

X, KEY, RULE = torch.ones(4, 4), fs.random.key(0), [("a", "mean")]
SCHEDULE = step().trace(BATCH).schedule
HERE = Path(__file__).parent

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "abstract_mesh": lambda: ((2,), ("shard",)),
    "averaged": lambda: (st(), "ema"),
    "chunked_cross_entropy": lambda: (torch.ones(6, 4), torch.ones(9, 4), torch.zeros(6, dtype=torch.int64)),
    "func.cg": lambda: (loss, st().params, PLAN),
    "func.clipped_grad": lambda: (loss, PLAN, 1.0),
    "func.differentiable": lambda: (optim.sgd(0.1), PLAN),
    "io.export": lambda: (st().params, PLAN),
    "io.from_dtensor": lambda: ({}, PLAN),
    "io.from_state_dict": lambda: (NET.state_dict(), PLAN, OPT),
    "func.gnvp": lambda: (loss, loss, PLAN),
    "func.hessian_trace_samples": lambda: (loss, PLAN),
    "func.hvp": lambda: (loss, PLAN),
    "init_state": lambda: (PLAN, OPT),
    "func.jvp": lambda: (loss, PLAN),
    "func.lanczos": lambda: (loss, st().params, PLAN, 2),
    "func.linearize": lambda: (loss, PLAN),
    "io.load_dcp": lambda: (HERE, PLAN, OPT),
    "io.load_hf": lambda: (HERE, PLAN, OPT),
    "make_eval_step": lambda: (loss, PLAN),
    "make_mesh": lambda: ((-1,), ("shard",)),
    "make_plan": lambda: (MODEL, MESH, RULES),
    "make_step": lambda: (lambda state, batch: (state, {}), PLAN),
    "make_update": lambda: (OPT, PLAN),
    "make_train_step": lambda: (loss, OPT, PLAN),
    "func.per_sample_grad": lambda: (loss, PLAN),
    "remat": lambda: (loss, fs.checkpoint_policies.dots),
    "reshard_state": lambda: (st(), PLAN, OPT),
    "outer": lambda: (step(), OPT),
    "io.save_dcp": lambda: (st(), HERE, OPT),
    "io.save_hf": lambda: (st(), HERE),
    "shard": lambda: (MODEL.params, PLAN),
    "shard_map": lambda: (loss, MESH, P("shard"), P("shard")),
    "func.sharded_loss": lambda: (loss, PLAN),
    "sim.hardware": lambda: ("h100", "ib400"),
    "sim.search": lambda: (lambda mesh: None, 8, fs.sim.hardware("h100")),
    "sim.simulate": lambda: (SCHEDULE, fs.sim.Costs({})),
    "split": lambda: (NET, "blocks.*"),
    "suggest_rules": lambda: (NET, MESH),
    "parallel.parallelize": lambda: (MODEL, MESH, {}),
    "parallel.document_ids": lambda: (torch.tensor([0, 3, 5]), 6),
    "view.sharding": lambda: (PLAN, "w"),
    "view.step_through": lambda: (None, st(), X),
    "sync_buffers": lambda: ({"a": X}, PLAN),
    "io.to_dtensor": lambda: (st().params, PLAN),
    "io.to_optim_state_dict": lambda: (st(), OPT),
    "io.to_state_dict": lambda: (st().params, PLAN),
    "track": lambda: ([], MESH),
    "generate": lambda: (st(), loss, [[0]]),
    "generation.harness": lambda: (st(), loss),
    "generation.make_generate": lambda: (loss, PLAN),
    "perplexity": lambda: (st(), loss, [X]),
    "train_loop": lambda: (step(), st, lambda start: iter(())),
    "tree.norm": lambda: (st().params, PLAN),
    "tree.norms": lambda: (st().params, PLAN),
    "tree.scale": lambda: (st().params, 2.0),
    "tree.normal": lambda: (KEY, PLAN),
    "tree.rademacher": lambda: (KEY, PLAN),
    "unshard": lambda: (st().params, PLAN),
    "value_and_grad": lambda: (loss, PLAN),
    "verify": lambda: (step(), st(), BATCH),
    "virtual_mesh": lambda: ((2,), ("shard",)),
    "view.record": lambda: ("run", MESH),
    "view.trace": lambda: ("step.json", fs.sim.simulate(SCHEDULE, costs())),
    "view.timeline": lambda: (SCHEDULE, fs.sim.simulate(SCHEDULE, costs())),
    "lora.init": lambda: (MODEL.params, r".*weight"),
    "lora.linear": lambda: ({"weight": X}, X),
    "lora.wrap": lambda: (MODEL, r".*weight"),
    "optim.masked": lambda: (OPT, ".*"),
    "optim.rate": lambda: (optim.schedules.constant(0.1), 1),
    "optim.matrices": lambda: ("w", (2, 2)),
    "random.bernoulli": lambda: (KEY, 0.5),
    "random.dropout": lambda: (KEY, X),
    "random.fold_in": lambda: (KEY, 1),
    "random.normal": lambda: (KEY, (2,)),
    "random.split": lambda: (KEY, 2),
    "random.uniform": lambda: (KEY, (2,)),
    "tree.map": lambda: (torch.neg, {"a": X}),
    "tree.names": lambda: ({"a": X}, "batch"),
    "tree.paths": lambda: ({"a": X}, "a."),
    "tree.unflatten": lambda: (tree.flatten({"a": X})[1], [X]),
    "train": lambda: ("run.toml", ["steps=1"]),
    "parallel.grouped_linear": lambda: (X, torch.ones(2, 4, 4), [2, 2]),
    "parallel.combine": lambda: (X, parallel.dispatch(X, parallel.route(X), axis=None)),
    "parallel.dispatch": lambda: (X, parallel.route(X)),
    "parallel.moe": lambda: (X, parallel.route(X), lambda rows, counts: rows),
    "parallel.route": lambda: (X, 2),
    "parallel.zigzag": lambda: (X, 2),
    "parallel.unzigzag": lambda: (X, 2),
    "parallel.join_sequence": lambda: (X, 1),
    "parallel.split_sequence": lambda: (X, 1),
    "parallel.zigzag_slice": lambda: (X, 1),
    "parallel.column_rule": lambda: (".*", "tp"),
    "parallel.expert_rule": lambda: (".*", "tp"),
    "parallel.row_rule": lambda: (".*", "tp"),
    **{
        f"collectives.{name}": lambda rest=rest: (X, "shard", *rest)  # type: ignore[misc]
        for name, rest in {
            **dict.fromkeys(("all_gather", "all_gather_start", "pmax", "pmean", "psum", "psum_scatter"), ()),
            **dict.fromkeys(("psum_scatter_start", "psum_start", "pvary"), ()),
            **dict.fromkeys(("all_to_all", "all_to_all_start"), (0, 0)),
            **dict.fromkeys(("ppermute", "ppermute_start"), ([(0, 0)],)),
            "ragged_all_to_all": ([4], [4]),
        }.items()
    },
    "collectives.assemble": lambda: (X, P("shard")),
    "collectives.cut": lambda: (X, P("shard")),
}

TEXT = {"encode": list, "decode": str, "eos": 0}
OPTIONS: dict[str, Any] = {
    "chunked_cross_entropy": {"chunks": 2},
    "lora.linear": {"alpha": 1.0},
    "train_loop": {"steps": 1},
    "generation.harness": TEXT,
    "outer": {"every": 2},
}

SAME = {
    # the first two are of one kind, so that nothing could tell; or swapped they mean something as well
    "optim.matrices",  # a question that optimizers ask
    *("tree.add", "tree.vdot", "tree.spread", "func.gnvp", "parallel.padded", "keep"),
    *("parallel.column_linear", "parallel.row_linear", "parallel.layer_norm", "parallel.rms_norm"),
    *("parallel.ring_attention", "parallel.ulysses_attention", "parallel.context_batch"),
    *("parallel.vocab_cross_entropy", "parallel.vocab_embedding", "parallel.linear"),
    *(f"parallel.{name}" for name in ("column_rule", "row_rule", "expert_rule")),  # two strings
}


def costs() -> fs.sim.Costs:
    """Some costs of every op."""
    return fs.sim.Costs({(op.kind, op.target): 1.0 for op in SCHEDULE.ops})


def functions() -> Iterator[tuple[str, Any]]:
    """The public functions of two positional arguments or more."""
    for name in public_names(fs):
        value: Any = fs
        for part in name.split("."):
            value = getattr(value, part)
        if inspect.isfunction(value) and name.partition(".")[0] not in ("init", "errors"):
            parameters = [p for p in inspect.signature(value).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            if len(parameters) > 1:
                yield name, value


def test_every_function_is_called() -> None:
    assert {name for name, _ in functions()} <= CALLS.keys() | SAME


@pytest.mark.parametrize("name", sorted(CALLS.keys() - SAME))
def test_swapped_arguments_are_told(name: str) -> None:
    first, second, *rest = CALLS[name]()
    options = {"mesh": MESH} if name.startswith("collectives.") else OPTIONS.get(name, {})
    with pytest.raises(ShardError):
        list(dict(functions())[name](second, first, *rest, **options))  # of generators, the first item
