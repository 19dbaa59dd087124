"""Arguments of the wrong type or meaning: an error of this library that says what to give."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import AxisError, BatchError, CollectiveError, LossError, PlanError, ShardError, TreeError
from fshard.runtime.steps.batch_rows import BatchRows, uneven_rows

RULES = [(r".*", fs.fsdp("shard"))]


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """All of it."""
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


MESH = fs.make_mesh((-1,), ("shard",))
MODEL = fs.split(Net(), units="auto")
PLAN = fs.make_plan(MODEL, MESH, RULES)
OPT = fs.optim.sgd(0.1)
BATCH = {"x": torch.ones(2, 4)}


def _loss(params: Any, batch: Any) -> Tensor:
    return MODEL.apply(params, batch["x"]).square().mean()


def _state() -> fs.TrainState:
    return fs.init_state(PLAN, OPT)


def _step(loss: Any = _loss, **options: Any) -> Any:
    return fs.make_train_step(loss, OPT, PLAN, **options)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: fs.make_mesh(2, ("shard",)), r"sizes is 2, an int: give one size an axis"),
    (lambda: fs.make_mesh((-1,), "shard"), r"axis_names is 'shard', a str: give one name an axis, such as \("),
    (lambda: fs.make_mesh((-1,), (3,)), "one distinct name an axis"),
    (lambda: fs.virtual_mesh(2, "shard"), "sizes is 2, an int(?s:.*)axis_names is 'shard'"),
    (lambda: fs.abstract_mesh(2, ("shard",)), "sizes is 2, an int"),
    (lambda: fs.make_plan(MODEL, MESH, ".*"), r"rules is '\.\*', a str: give a list of \(pattern, spec\) pairs"),
    (lambda: fs.make_plan(MODEL, MESH, {".*": fs.fsdp("shard")}), "rules is a dict: give a list"),
    (lambda: fs.make_plan(MODEL, MESH, None), "rules is None: give a list"),
    (lambda: fs.make_plan(MODEL, MESH, RULES, batch="shard"), r"batch is 'shard', a str: give a spec, batch=fs\.P\("),
    (
        lambda: fs.make_plan(MESH, MODEL, RULES),
        "model is a Mesh: give what fs.split(?s:.*)mesh is a Model: give",
    ),
    (lambda: fs.make_plan(MODEL, None, RULES), "mesh is None: give a mesh"),
    (lambda: fs.make_plan(Net, MESH, RULES), "model is the class Net: give what fs.split returned"),
    (lambda: fs.init_state(PLAN, torch.optim.AdamW(Net().parameters())), r"from_torch\(torch\.optim\.AdamW, \.\.\.\)"),
    (lambda: fs.init_state(PLAN, 3), r"opt is 3, an int, not an optimizer of fs\.optim"),
    (lambda: fs.init_state(OPT, PLAN), "plan is a sgd: give what fs.make_plan returned"),
    (lambda: fs.init_state(PLAN, OPT, seed="a"), "seed is 'a', a str: give an int"),
    (lambda: fs.init_state(PLAN, OPT, seed=1.5), "seed is 1.5, a float: give an int"),
    (lambda: fs.init_state(PLAN, OPT, seed=True), "seed is True, a bool: give an int"),
    (lambda: fs.init_state(PLAN, OPT, init={".*": fs.init.zeros()}), "init= is a dict: give a list"),
    (lambda: fs.init_state(PLAN, OPT, init=[(".*", 0.02)]), r"init\[0\] is 0.02, a float: give an initializer"),
    (
        lambda: fs.init_state(PLAN, OPT, init=[(".*", nn.init.normal_)]),
        r"init\[0\] is .*an initializer of fs.init",
    ),
    (lambda: fs.init_state(PLAN, OPT, init=[(3, fs.init.zeros())]), r"init\[0\] pattern is 3, an int"),
    (lambda: fs.init_state(PLAN, OPT, init=[".*"]), r"init\[0\] is '\.\*', a str: give a list"),
    (lambda: _step(Net()), r"loss_fn is Net, not a function \(params, batch\) that calls model\.apply"),
    (lambda: _step(clip_norm="1"), "clip_norm is '1', a str: give a number that is positive"),
    (lambda: fs.make_eval_step(PLAN, _loss), "fn is a Plan: give a function(?s:.*)plan is a function"),
    (lambda: fs.make_eval_step(_loss, PLAN, schedule="fast"), "schedule='fast' must be fs.Policy"),
    (lambda: fs.io.load_hf(PLAN, OPT, "folder"), "path is a Plan(?s:.*)plan is a sgd: give what fs.make_plan returned"),
    (
        lambda: fs.io.load_dcp(PLAN, OPT, "folder"),
        "path is a Plan(?s:.*)plan is a sgd: give what fs.make_plan returned",
    ),
    (lambda: fs.io.save_dcp(MODEL.params, "folder", OPT), "state is a dict: give what a step returned"),
    (lambda: fs.reshard_state(PLAN, _state(), OPT), "state is a Plan(?s:.*)plan is a TrainState"),
    (lambda: fs.averaged(MODEL.params), "state is a dict"),
    (lambda: fs.func.hvp(PLAN, _loss), "loss_fn is a Plan(?s:.*)plan is a function"),
    (lambda: fs.func.per_sample_grad(PLAN, _loss), "loss_fn is a Plan(?s:.*)plan is a function"),
    (lambda: fs.sim.simulate(_step(), fs.sim.Costs()), "schedule is a TrainStep: give step.schedule"),
    (lambda: fs.sync_buffers(PLAN, {}), "plan is a dict"),
    (lambda: fs.io.to_state_dict(MODEL.params), "a dict is not a state: give plan= with a tree"),
    (lambda: fs.sim.Costs(link=5), "link=5 is not an fs.sim.Link"),
    (lambda: fs.optim.adamw(torch.optim.lr_scheduler.LinearLR), "or a function of the step"),
    (lambda: fs.io.from_state_dict(PLAN, OPT, Net().state_dict()), "params is a Plan(?s:.*)plan is a sgd"),
    (
        lambda: fs.io.from_state_dict(Net().state_dict(), PLAN, None, {}),
        "optim= is the state of an optimizer: give opt",
    ),
    (lambda: fs.view.timeline(_step()), "schedule is a TrainStep: give step.schedule"),
    (lambda: fs.make_plan({"a": torch.ones(3).to_sparse()}, MESH, RULES), r"a: torch\.float32, torch\.sparse_coo"),
    (lambda: fs.Auto(memory="1GB"), "memory='1GB' is not a positive number"),
    (lambda: fs.optim.from_torch(torch.optim.SGD(Net().parameters())), "cls is a SGD: give a class of torch.optim"),
    (
        lambda: _step(schedule=fs.Auto(memory=9, compute=1.0, wire=1.0)).trace(BATCH),
        r"reshard=true update=deferred\. Most of it is:\n",
    ),
    (lambda: fs.lora.wrap(Net(), ".*"), r"model is a Net: give what fs\.split\(module\) returned"),
    (
        lambda: _step(remat=[("block", "all")])(_state(), BATCH),
        r"match no unit:\n  'block'; the closest is 'blocks\.\*'\n(?s:.*)blocks\.0, blocks\.1",
    ),
]


X, KEY, COSTS = torch.ones(4, 4), fs.random.key(0), {("forward", "root"): 1.0}
WRONG += [
    (lambda: fs.unit(3), "fn is 3, an int: give a function"),
    (lambda: fs.remat(3), "fn is 3, an int: give a function"),
    (lambda: fs.Checkpointer(3), "directory is 3, an int: give the path of a folder"),
    (lambda: fs.Checkpointer("a").save(_state(), schedule="a"), "schedule is 'a', a str: give step.schedule"),
    (lambda: fs.Checkpointer("a").restore(PLAN, OPT, into=MODEL), "into is a Model: give a train state"),
    (lambda: fs.Checkpointer("a").restore(PLAN, OPT, rules=3), "rules is 3, an int: give a list of"),
    (lambda: list(fs.train_loop(_step(), _state, [], steps=1, checkpoints="a")), "checkpoints is 'a'"),
    (lambda: list(fs.train_loop(_step(), dict, [], steps=1)), "what start.. returned is a dict: give a state"),
    (lambda: fs.init.normal("0.02"), "std is '0.02', a str: give a number"),
    (lambda: fs.init.kaiming_normal(mode="in"), "mode='in'.: give 'fan_in'"),
    (
        lambda: fs.init_state(PLAN, OPT, init=[(".*", fs.init.xavier_uniform())]),
        r"these have none:\n  inp\.bias  \[8\]\n  blocks\.0\.bias",
    ),
    (lambda: fs.random.key("a"), "seed='a'.: a seed is an int"),
    (lambda: fs.random.key(torch.ones(2)), "a seed is an int"),
    (lambda: fs.random.split(3), r"a key is an int64 tensor of shape \[2\], this is int"),
    (lambda: fs.random.split(KEY, "a"), "num='a'.: give the number of keys"),
    (lambda: fs.random.fold_in(KEY, "a"), "data='a'.: give an int"),
    (lambda: fs.random.normal(KEY, 3), r"shape=3: give a tuple of ints"),
    (lambda: fs.random.bernoulli(KEY, (3,)), r"p=\(3,\).: give a probability, a number or a tensor"),
    (lambda: fs.random.dropout(X, KEY), "a key is an int64 tensor"),
    (lambda: fs.tree.normal(0, PLAN), "a key is an int64 tensor of shape .2., this is int"),
    (lambda: fs.tree.normal(PLAN, KEY), "this is Plan"),
    (lambda: fs.tree.vdot(MODEL.params, MODEL.params, MESH), "plan is a Mesh: give what fs.make_plan"),
    (lambda: fs.shard(PLAN, MODEL.params), "plan is a dict: give what fs.make_plan"),
    (lambda: fs.unshard(_state().params, MODEL), "plan is a Model: give what fs.make_plan"),
    (lambda: fs.func.clipped_grad(_loss, PLAN, None), "clip_norm is None: give a positive number"),
    (lambda: fs.abstract_mesh((2,), ("shard",), rank="0"), "rank is '0', a str"),
    (lambda: fs.virtual_mesh((2,), ("shard",)).run(3), "fn is 3, an int: give a function"),
    (lambda: fs.make_plan(MODEL, MESH, RULES, units=None), "units is None: give a list of globs"),
    (lambda: fs.make_plan(MODEL, MESH, [(".*", lambda shape: 3)]), r"inp\.weight .*returned 3, an int"),
    (lambda: PLAN.replace(rules=3), "rules is 3, an int: give a list"),
    (lambda: fs.split(Net(), ignore=3), "ignore is 3, an int"),
    (lambda: fs.optim.partition(3), "rules is 3, an int: give a list"),
    (lambda: fs.Auto(memory=[1]), r"memory=\[1\] is not a positive number"),
    (lambda: fs.sim.Link("1 Gbit/s"), "bytes_per_s is '1 Gbit/s', a str: give a number"),
    (lambda: fs.sim.Costs(1.0), "seconds is 1.0, a float: give a dict"),
    (lambda: fs.io.export(_state(), rename=3), "rules is 3, an int: give a list of"),
    (lambda: fs.io.export(_state(), callback=3), "callback is 3, an int"),
    (lambda: fs.io.to_optim_state_dict(OPT, _state()), "state is a sgd"),
    (lambda: fs.io.to_optim_state_dict(_state(), torch.optim.SGD(Net().parameters())), "not an optimizer of fs.optim"),
    (lambda: fs.io.from_state_dict(Net().state_dict(), PLAN, OPT, OPT), "optim is a sgd"),
    (lambda: fs.io.save_dcp(_state(), OPT, "folder"), "path is a sgd: give a folder"),
    (lambda: fs.io.save_hf(_state(), PLAN), "path is a Plan: give a folder"),
    (lambda: fs.sync_buffers({}, PLAN, "mean"), "rules is 'mean', a str"),
    (lambda: fs.lora.absorb(MODEL.params, alpha=1.0), "state is a dict"),
    (lambda: fs.lora.wrap(MODEL, None), "targets=None: give a regular expression"),
    (lambda: fs.lora.wrap(MODEL, ".*weight", alpha="1"), "alpha is '1', a str"),
    (lambda: fs.parallel.dispatch(X, X, axis=None), "routing is a Tensor: give what fs.parallel.route"),
    (lambda: fs.parallel.moe(X, fs.parallel.route(X), X, axis=None), "experts is a Tensor: give a function"),
    (lambda: fs.parallel.zigzag(X, 0), "parts=0"),
    (lambda: fs.view.timeline(_step().trace(BATCH).schedule, COSTS), "simulation is a dict"),
]


@pytest.mark.parametrize(("call", "says"), WRONG)
def test_wrong_arguments(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        call()


TREES: list[tuple[Callable[[], Any], str]] = [
    (lambda: fs.init_state(PLAN, OPT, params=Net()), r"params is a Net, not.*give the params of fs\.split\(module\)"),
    (lambda: fs.unshard(_state(), PLAN), r"params is a TrainState, not a nested dict.*give state\.params"),
    (lambda: fs.shard(Net(), PLAN), r"full is a Net, not.*give the params of fs\.split\(module\)"),
    (lambda: fs.shard([1], PLAN), r"full is a list, not a nested dict"),
]


@pytest.mark.parametrize(("call", "says"), TREES)
def test_what_is_no_tree(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(TreeError, match=says):
        call()


OTHERS: list[tuple[Callable[[], Any], type[ShardError], str]] = [
    (lambda: MESH.axis_size("x"), AxisError, "axis 'x' is not in the mesh: give one of 'shard'"),
    (lambda: MESH.ranks(("x",)), AxisError, "axis 'x' is not in the mesh"),
    (lambda: MESH.index(3), AxisError, "axis=3 is not the name"),
    (lambda: fs.collectives.psum(X, "shard", mesh=PLAN), AxisError, "a Plan, not a mesh: give what fs.make_mesh"),
    (lambda: fs.collectives.psum_start([X], "shard", mesh=MESH), CollectiveError, "takes tensors, not list"),
    (lambda: fs.collectives.all_gather(X, "shard", dim="x", mesh=MESH), CollectiveError, "dim='x' is a str"),
    (lambda: fs.collectives.ppermute(X, "shard", [0], mesh=MESH), CollectiveError, r"perm=\[0\] must be a list of"),
    (lambda: fs.collectives.ragged_all_to_all(X, "shard", 4, 4, mesh=MESH), CollectiveError, "send=4 must be one int"),
    (lambda: fs.collectives.cut(X, "shard", mesh=MESH), CollectiveError, r"is 'shard', a str: give one, .*fs\.P\("),
    (lambda: fs.collectives.done(X), CollectiveError, "not a Tensor"),
    (lambda: fs.tree.stack([]), TreeError, "of no trees"),
    (lambda: fs.tree.nest({"a": 1, "a.b": 2}), TreeError, r"'a\.b' lies below a leaf"),
    (lambda: fs.tree.nest({"a.b": 2, "a": 1}), TreeError, r"'a' is a leaf, and others lie below it"),
    (lambda: fs.tree.nest({3: 1}), TreeError, "the path 3 is an int"),
    (lambda: fs.lora.merge(MODEL, alpha=1.0), TreeError, "this is a Model: give such as the params"),
    (lambda: fs.lora.linear({"w": X}, X, alpha=1.0), TreeError, r"has \['w'\] and no \['weight'"),
    (
        lambda: _step(accumulate=2)(_state(), fs.Microbatches(BATCH)),
        BatchError,
        "takes a list of batches, and was given a dict",
    ),
]


@pytest.mark.parametrize(("call", "error", "says"), OTHERS)
def test_other_kinds_of_errors(call: Callable[[], Any], error: type[ShardError], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_an_axis_needs_no_tuple() -> None:
    mesh = fs.abstract_mesh((2, 4), ("replica", "shard"), rank=6)
    for axis in mesh.axis_names:
        assert mesh.axis_size(axis) == mesh.axis_size((axis,)) and mesh.index(axis) == mesh.index((axis,))
        assert mesh.ranks(axis) == mesh.ranks((axis,)) and mesh.partition(axis) == mesh.partition((axis,))


def test_a_loss_of_the_module_itself_is_refused() -> None:
    net = Net()
    with pytest.raises(LossError, match=r"on none of the step's parameters.*model\.apply\(params"):
        _step(lambda params, batch: net(batch["x"]).mean())(_state(), BATCH)


@pytest.mark.parametrize(
    ("batch", "note"),
    [
        ({"x": torch.ones(2, 5)}, r"batch\['x'\]: float32 \[2, 5\]"),
        ({"x": torch.ones(2, 4).numpy()}, r"batch\['x'\]: a ndarray, which is not a tensor"),
        ({"y": torch.ones(2, 4)}, r"batch\['y'\]: float32 \[2, 4\]"),
        ([torch.ones(1)] * 20, r"\.\.\. and 8 more"),
    ],
)
def test_what_the_loss_raises_comes_with_the_batch(batch: Any, note: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: B017 - torch's and Python's own
        _step()(_state(), batch)
    text = "\n".join(getattr(caught.value, "__notes__", []))
    assert re.search(note, text) and "to find its schedule" in text


def test_what_cannot_be_cut_is_named() -> None:
    batch = {"x": torch.ones(6, 4), "table": torch.ones(3)}
    with pytest.raises(BatchError, match=r"batch\['table'\] has shape \[3\]\n  batch\['x'\] has shape \[6, 4\]"):
        _step(accumulate=2)(_state(), batch)
    for x, says in (
        (torch.ones(6, 4).numpy(), "a ndarray, no tensor"),
        (torch.eye(6, 4).to_sparse(), "a tensor of torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(n, 4) for n in (1, 2)], layout=torch.jagged), "a nested tensor"),
    ):
        with pytest.raises(BatchError, match=rf"(?s)accumulate=2.*batch\['x'\]: {says}"):
            _step(accumulate=2)(_state(), {"x": x})


def test_what_is_uneven_is_said() -> None:
    """Unequal samples on any ranks, and unequal parts of samples on ranks that share them."""
    rows = BatchRows((1,), (0, 0, 1, 1))
    same, other = [1, 2, 8, 0, 4], [2, 2, 8, 0, 4]
    text = str(uneven_rows(rows.uneven([same, other, same, same])))
    assert "first tensor has 8 rows on every rank, but others differ" in text
    assert "rank 1: 9 rows" in str(uneven_rows(rows.uneven([same, [2, 2, 9, 0, 4]])))
    assert "rank 0: 2 tensors\n  rank 1: 3 tensors" in str(uneven_rows(rows.uneven([same, [2, 3, 8, 0, 4]])))
    assert not rows.uneven([[1, 2, 8, 5, 4], [1, 2, 8, 5, 4], [1, 2, 8, 6, 7], [1, 2, 8, 6, 7]])
    text = str(uneven_rows(rows.uneven([[1, 2, 8, 5, 4], [1, 2, 8, 6, 3], [1, 2, 8, 7, 9], [1, 2, 8, 7, 9]])))
    assert "rank 1: 3 along dim 1" in text


def test_parameters_of_another_model_are_refused() -> None:
    other = fs.split(nn.Sequential(nn.Linear(4, 6)))
    narrow = fs.split(nn.Sequential(nn.Linear(4, 5)))
    plan = fs.make_plan(other, MESH, RULES)
    step = fs.make_train_step(lambda params, batch: narrow.apply(params, batch["x"]).mean(), OPT, plan)
    with pytest.raises(TreeError, match=r"0\.weight: shape \(6, 4\), expected \(5, 4\)"):
        step(fs.init_state(plan, OPT), BATCH)
    loss = fs.func.sharded_loss(lambda params, batch: narrow.apply(params, batch["x"]).mean(), plan)
    with pytest.raises(TreeError, match=r"0\.weight: shape \(6, 4\), expected \(5, 4\)"):
        loss(fs.init_state(plan, OPT).params, BATCH)


def test_states_that_are_none() -> None:
    """Parameters instead of a state, in train and eval steps."""
    for call in (_step(), fs.make_eval_step(_loss, PLAN)):
        with pytest.raises(TreeError, match=r"the first argument is a dict: (step|evaluate)\(state, batch\) takes"):
            call(MODEL.params, BATCH)


def test_parameters_without_values_are_named() -> None:
    """A tree on the meta device holds nothing to start from."""
    with torch.device("meta"):
        empty = fs.split(Net(), units="auto")
    for call in (lambda: fs.init_state(PLAN, OPT, params=empty.params), lambda: fs.shard(empty.params, PLAN)):
        with pytest.raises(TreeError, match=r"no values  inp\.weight: on the meta device"):
            call()


def test_steps_are_not_copied() -> None:
    """A copy would share memory with the original; what they are made of can be pickled."""
    for step in (_step(), fs.make_eval_step(_loss, PLAN)):
        for again in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="> cannot be copied or pickled: make it again from"):
                again(step)
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


def test_what_prints() -> None:
    """Objects say what they are, in a line."""
    assert repr(_step()) == f"<train step of 6 leaves in 3 groups, {OPT!r}>"
    assert repr(fs.make_eval_step(_loss, PLAN)) == "<eval step of 6 leaves in 3 groups>"
    rule = fs.Rule(".*", fs.P(), trainable=False, memory_kind="pinned_host")
    assert repr(rule) == "Rule('.*', P(), trainable=False, memory_kind='pinned_host')"
    assert repr(PLAN) == "<Plan: 6 leaves in 3 groups on {'shard': 1}>"
    assert repr(fs.value_and_grad(_loss, PLAN)) == "<value and grad of _loss>"


def test_long_reports_keep_their_ends() -> None:
    """A hundred problems are listed, and how many more there are; the remedy stands behind them."""
    whole = {str(i): torch.ones(1) for i in range(120)}
    with pytest.raises(PlanError, match=r"120 of 120(?s:.*)  99  \[1\]\n  \.\.\. and 20 more\nSay where they live"):
        fs.make_plan(whole, MESH, [("other", fs.fsdp("shard"))])


def test_what_is_wrong_with_many_leaves_is_said_once() -> None:
    """With how many they are, and the first of them; a leaf of its own stands beside them."""
    whole = {**{str(i): torch.ones(1) for i in range(120)}, "one": torch.ones(3, 3)}
    rules = [("one", fs.P("a")), (".*", fs.fsdp("other"))]
    many = r"\n  0  \[1\], 1  \[1\], 2  \[1\] and 117 others  P\(flat='other'\): no axis 'other' in the mesh"
    with pytest.raises(PlanError, match=rf"121 problems .*{many}.*\n  one  \[3, 3\]  P\('a'\): no axis 'a'.*\nCorrect"):
        fs.make_plan(whole, MESH, rules)
    muon, whole = fs.optim.muon(0.1), {str(i): torch.ones(2, 2) for i in range(7)}
    with pytest.raises(PlanError, match=r"0  \[2, 2\], 1  \[2, 2\], 2  \[2, 2\] and 4 others  P.*align=\"leaf\""):
        fs.init_state(fs.make_plan(whole, MESH, RULES), muon, params=whole)


WRONG_TYPES: list[tuple[str, Callable[[], Any]]] = [
    ("plan", lambda: fs.func.differentiable(OPT, MODEL)),  # type: ignore[arg-type]
    ("has_aux", lambda: fs.func.sharded_loss(_loss, PLAN, has_aux=1)),  # type: ignore[call-overload]
    ("reshard", lambda: fs.func.sharded_loss(_loss, PLAN, reshard="no")),  # type: ignore[call-overload]
    ("has_aux", lambda: fs.value_and_grad(_loss, PLAN, has_aux="no")),  # type: ignore[call-overload]
    ("params", lambda: fs.io.from_dtensor(MODEL, PLAN)),  # type: ignore[arg-type]
    ("device_mesh", lambda: fs.io.to_dtensor(_state().params, PLAN, device_mesh=MESH)),  # type: ignore[arg-type]
    ("rename", lambda: fs.io.save_hf(_state(), "never", rename=None)),  # type: ignore[arg-type]
    ("plan", lambda: fs.io.save_hf(_state().params, "never", MODEL)),  # type: ignore[arg-type]
    ("step", lambda: fs.io.from_state_dict(Net().state_dict(), PLAN, step="3")),  # type: ignore[arg-type]
    ("stages", lambda: fs.make_plan(MODEL, MESH, RULES, stages=lambda: 4)),  # type: ignore[arg-type]
    ("shared_memory", lambda: fs.make_mesh((-1,), ("shard",), shared_memory="no")),  # type: ignore[arg-type]
    ("microbatches", lambda: fs.sync_buffers({}, PLAN, microbatches=None)),  # type: ignore[arg-type]
    ("patience", lambda: fs.track([], PLAN, patience=None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "call"), WRONG_TYPES)
def test_arguments_of_the_wrong_type_are_named(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(PlanError, match=rf"(?s)of the wrong type:.*  {name} is .*: give "):
        call()


@pytest.mark.parametrize("p", [-0.5, 1.5, float("nan")])
def test_a_probability_is_from_0_to_1(p: float) -> None:
    with pytest.raises(PlanError, match="from 0 to 1"):
        fs.random.bernoulli(fs.random.key(0), p, (2,))
