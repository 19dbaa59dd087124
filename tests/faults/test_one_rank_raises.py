"""A mistake on one rank, before ranks have met in a call, is told to all of them; the mesh stays whole."""

import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import collectives as fc
from tests.shared.bad import Raised, attempt, place, rule, weights
from tests.shared.workers import Pools

LONG = 20.0
"""Seconds that a rank would wait for another."""

Call = Callable[..., Any]


def loss(params: Any, rows: Tensor) -> Tensor:
    """Of three matrices."""
    x = torch.tanh(rows @ params["first"]["w"].t() + params["first"]["b"])
    return (torch.tanh(x @ params["middle"]["w"].t()) @ params["last"]["w"].t()).square().mean()


def calls_of(mesh: fs.Mesh, folder: str) -> dict[str, tuple[Call, list[Any], list[Any]]]:
    """Every collective call with arguments, and with those of a mistake; an ellipsis stands for an unknown option."""
    plan, opt, rows, even = place(mesh), rule(), torch.ones(4, 6), torch.ones(6, 6)
    state = fs.init_state(plan, opt, params=weights())
    gone, params = fs.init_state(plan, opt, params=weights()), state.params
    following, _ = fs.make_train_step(loss, opt, plan)(gone, rows)
    step = fs.make_train_step(loss, opt, plan, donate=False)
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(opt, plan, donate=False)
    grads = grad(state, rows)[1]

    def parts(state: Any, batch: Any) -> Any:
        value, slopes = grad(state, batch)
        return update(state, slopes)[0], value

    whole, checkpoints = plan.replace(rules=[(".*", fs.P())]), fs.Checkpointer(folder)
    checkpoints.save(state)
    generated = fs.generation.make_generate(lambda p, t, c, at: (p["middle"]["w"][t], ()), plan)
    return {
        "train step": (step, [state, rows], [gone, rows]),
        "train step, state": (step, [state, rows], [None, rows]),
        "train step, batch": (step, [state, rows], [state, torch.ones(4, 5)]),
        "train step, option": (step, [state, rows], [state, rows, ...]),
        "train step, params": (step, [state, rows], [params, rows]),
        "evaluation": (fs.make_eval_step(loss, plan), [state, rows], [gone, rows]),
        "evaluation, option": (fs.make_eval_step(loss, plan), [state, rows], [state, rows, ...]),
        "gradient": (grad, [state, rows], [gone, rows]),
        "gradient of params": (grad, [params, rows], [{"first": params["first"]}, rows]),
        "update": (update, [state, grads], [state, {"first": 3}]),
        "update, state": (update, [state, grads], [gone, grads]),
        "step of parts": (fs.make_step(parts, plan, donate=False), [state, rows], [gone, rows]),
        "step of parts, none": (fs.make_step(parts, plan, donate=False), [state, rows], [[], rows]),
        "sharded loss": (fs.func.sharded_loss(loss, plan), [params, rows], [params, rows, ...]),
        "hvp": (fs.func.hvp(loss, plan), [params, params, rows], [params, {"first": 3}, rows]),
        "linearize": (fs.func.linearize(outputs, plan), [params, rows], [params, {}]),
        "linear map": (fs.func.hvp(loss, plan).linearize(params, rows), [params], [{"first": 3}]),
        "gnvp": (fs.func.gnvp(outputs, total, plan), [params, params, rows], [params, {"first": 3}, rows]),
        "cg": (lambda b: fs.func.cg(lambda v: v, b, plan), [params], [{"first": 3}]),
        "lanczos": (lambda v: fs.func.lanczos(lambda v: v, v, plan, 2), [params], [{"first": 3}]),
        "unshard": (fs.unshard, [params, plan], [{"first": params["first"]}, plan]),
        "reshard_state": (
            lambda *a, _=following: fs.reshard_state(*a),
            [state, whole, opt],
            [gone, whole, opt],
        ),  # held
        "sync_buffers": (fs.sync_buffers, [{"a": rows}, plan], [{"a": rows}, plan, [("b", "mean")]]),
        "restore": (checkpoints.restore, [plan, opt], [plan, opt, "3"]),
        "restore, plan": (checkpoints.restore, [plan, opt], [None, opt]),
        "save, state": (checkpoints.save, [state], [None]),
        "save": (checkpoints.save, [{"a": state}], [{"a": state, "b": None}]),
        "export": (lambda *given: list(fs.io.export(*given)), [params, plan], [{}, plan]),
        "to_state_dict": (fs.io.to_state_dict, [state], [state, ...]),
        "save_hf": (fs.io.save_hf, [state, folder + "/hf"], [state, 3]),
        "verify": (fs.verify, [step, state, rows], [step, None, rows]),
        "perplexity": (fs.perplexity, [state, mean, [rows]], [state, mean, []]),
        "generate": (lambda s, p: generated(s, p, max_new=1), [state, [[1]]], [state, [[]]]),
        "train_loop": (loop(step, state), [lambda n: rows], [lambda n: 1 / 0]),
        "vdot": (fs.tree.vdot, [params, params, plan], [params, {"first": 3}, plan]),
        "psum": (lambda x: fc.psum(x, "shard", mesh=mesh), [rows], ["no tensor"]),
        "shard_map": (fs.shard_map(lambda x: fc.psum(x, "shard"), mesh, fs.P("shard"), fs.P()), [even], [even[:5]]),
    }


def outputs(params: Any, rows: Tensor) -> Tensor:
    """Of one matrix."""
    return rows @ params["first"]["w"].t()


def total(out: Tensor, rows: Tensor) -> Tensor:
    """A loss of outputs."""
    return out.square().mean()


def mean(params: Any, rows: Tensor) -> fs.Mean:
    """The loss of a data set."""
    return fs.Mean(loss(params, rows) * len(rows), len(rows))


def loop(step: Any, state: Any) -> Call:
    """One step of a loop, with batches that are given."""
    return lambda batches: [s.step for s, _ in fs.train_loop(step, lambda: state, batches, steps=1)]


def made(call: Call, given: list[Any]) -> Any:
    """The call with these arguments; an ellipsis is an option that it does not have."""
    options = {"nonsense": 1} if given[-1] is ... else {}
    return call(*[one for one in given if one is not ...], **options)


def on_rank(folder: str) -> dict[str, tuple[Raised | None, float, Raised | None, Raised | None]]:
    """What each call raises: rank 1 alone makes the mistake, with its seconds; then none does; then all do."""
    out = {}
    with fs.make_mesh((-1,), ("shard",), timeout=LONG) as mesh:
        for name, (call, right, wrong) in calls_of(mesh, folder).items():
            if name in CUT:
                call(*right)  # a rank can cut off only what it has begun to use
            began = time.monotonic()
            one = attempt(lambda: made(call, wrong if mesh.rank == 1 else right))  # noqa: B023
            took = time.monotonic() - began
            overwrite = {"overwrite": True} if name.startswith("save") else {}
            alone = attempt(lambda: call(*right, **overwrite))  # noqa: B023
            everyone = attempt(lambda: made(call, wrong))  # noqa: B023
            out[name] = (one, took, alone, everyone)
    return out


CUT = {"vdot", "psum", "shard_map"}
"""Calls of collectives alone, which an exception cuts off."""


def check(ranks: list[dict[str, tuple[Raised | None, float, Raised | None, Raised | None]]]) -> None:
    """Rank 1 raised its own error, the others were told of it at once, and the mesh is as it was."""
    wrong = []
    for name, (own, _, _, everyone) in ranks[1].items():
        first = own.text.splitlines()[0] if own else "?"
        for rank, (one, took, right, alike) in enumerate(row[name] for row in ranks):
            if took > LONG / 2 or right is not None:
                wrong.append(f"{name}, rank {rank}: {took:.1f} s, then {right}")
            if own is None or everyone is None or alike is None or alike.text != everyone.text:
                wrong.append(f"{name}, rank {rank}: where all ranks are wrong: {alike}")
            if rank == 1:
                continue
            kinds = ("CommError",) if name in CUT else ("PeerError",)
            if one is None or not set(kinds) & set(one.kinds) or first not in one.text:
                wrong.append(f"{name}, rank {rank}: {one}, not {first}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.processes
def test_what_one_rank_raises_before_a_call_is_told_to_all(pool: Pools) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(pool(2).run(on_rank, folder, timeout=120.0))


def test_what_one_played_rank_raises_before_a_call_is_told_to_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(fs.virtual_mesh((3,), ("any",)).run(on_rank, folder))


def test_every_call_that_says_it_is_collective_tells_of_mistakes() -> None:
    rooms = {"fs": fs, "fs.io": fs.io, "fs.generation": fs.generation}
    entries = {f"{room}.{name}": getattr(module, name) for room, module in rooms.items() for name in dir(module)}
    entries |= {f"{kind.__name__}.{name}": getattr(kind, name) for kind in (fs.Checkpointer,) for name in dir(kind)}
    said = {name: one for name, one in entries.items() if re.search(r"[.:] Collective\b", str(one.__doc__)[:400])}
    for name in ("fs.settle", "fs.make_mesh", "fs.generation.harness"):  # no call, or one that may exchange nothing
        said.pop(name, None)
    assert {"fs.unshard", "fs.io.export", "Checkpointer.save"} <= said.keys()
    assert not [name for name, one in said.items() if not _wrapped(one)]


def _wrapped(entry: Any) -> bool:
    """Whether a function is decorated by ``collective_call``, or calls one that is."""
    entry = entry.__call__ if isinstance(entry, type) else entry
    while entry is not None:
        if getattr(getattr(entry, "__code__", None), "co_qualname", "").startswith("collective_call."):
            return True
        entry = getattr(entry, "__wrapped__", None)
    return False
