"""Gradients that lie on the host between passes stay there from step to step."""

from types import SimpleNamespace

import torch

import fshard as fs
from fshard import tree
from tests.parts.plain import Parts, Plain, PlainState, trained, whole


def test_gradients_on_the_host_are_read_between_passes() -> None:
    rules = [fs.Rule(r".*", fs.fsdp("shard"), memory_kind="unpinned_host", update_on="host")]
    model = SimpleNamespace(params=whole(), units=("gen.0", "gen.1", "dis.0"), frozen=frozenset())
    plan, opt = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), rules), fs.optim.sgd(0.05, momentum=0.9)
    for name in ("sam", "surgery"):
        state, _ = trained(
            Parts(plan, opt), name, fs.init_state(plan, opt, params=whole()), lambda fn: fs.make_step(fn, plan), 3,
            lambda x: x,
        )  # fmt: skip
        plain, _ = trained(Plain(opt), name, PlainState(whole()), lambda fn: fn, 3, lambda x: x)
        got = dict(tree.paths(fs.unshard(state.params, plan)))
        assert all(torch.allclose(got[path], leaf, rtol=0, atol=1e-9) for path, leaf in tree.paths(plain.params)), name
