"""The step of each example on shards, beside the same in plain PyTorch."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fshard as fs
from fshard import tree
from tests.parts import plain_examples as plain

OPTIMIZERS = {"adamw": fs.optim.adamw(1e-2, weight_decay=0.1), "sgd": fs.optim.sgd(0.05, momentum=0.9)}


class Sharded:
    """A module on a mesh, and what a step makes of it."""

    def __init__(self, net: nn.Module, mesh: fs.Mesh, units: Sequence[str] = ("0", "2")) -> None:
        self.model = fs.split(net, units=tuple(units))
        self.plan = fs.make_plan(self.model, mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))

    def state(self, opt: Any) -> fs.TrainState:
        """A state of the module's own values."""
        return fs.init_state(self.plan, opt, params=self.model.params)

    def run(self, step: Any, state: Any, batches: Iterable[Any], last: Callable[[Any], Any] = lambda x: x) -> Any:
        """Some steps: whole parameters by path, and metrics in the order of their names.

        Raises:
            AssertionError: a step left its schedule.
        """
        told = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in batches:
                state, metrics = step(state, batch)
                told.append([float(leaf) for leaf in tree.leaves(metrics)])
                assert step.record == step.schedule.ops
        return dict(tree.paths(fs.unshard(last(state).params, self.plan))), told


def sam(mesh: fs.Mesh, opt: str) -> Any:
    on = Sharded(plain.perceptron(), mesh)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return cross_entropy(on.model.apply(params, batch[0]), batch[1][:, 0])

    step = plain.example("sam").sam_step(loss_fn, OPTIMIZERS[opt], on.plan, 0.3)
    return on.run(step, on.state(OPTIMIZERS[opt]), [on.plan.local_batch(plain.rows(i)) for i in range(plain.STEPS)])


def gan(mesh: fs.Mesh, opt: str) -> Any:
    on = Sharded(plain.players(), mesh, ("gen.*", "dis.*"))
    rule = OPTIMIZERS[opt]
    both = fs.optim.partition([(r"gen\..*", rule), (r"dis\..*", rule)])
    step = plain.example("gan").gan_step(on.model, both, on.plan)
    return on.run(step, on.state(both), [on.plan.local_batch(plain.points(i)) for i in range(plain.STEPS)])


def actor_critic(mesh: fs.Mesh, opt: str) -> Any:
    on, rule = Sharded(plain.both_heads(), mesh, ("actor.*", "critic.*")), OPTIMIZERS[opt]
    step = plain.example("actor_critic").ppo_step(on.model, rule, on.plan)
    return on.run(step, on.state(rule), [on.plan.local_batch(plain.turns(i)) for i in range(plain.STEPS)])


def dpo(mesh: fs.Mesh, opt: str) -> Any:
    on, rule = Sharded(plain.writer(0), mesh, ("blocks.*",)), OPTIMIZERS[opt]
    reference = fs.init_state(on.plan, rule, params=fs.split(plain.writer(1)).params)
    step = plain.example("dpo").dpo_step(on.model, rule, on.plan, 0.5)
    batches = [{"pairs": on.plan.local_batch(plain.preferences(i)), "reference": reference} for i in range(plain.STEPS)]
    return on.run(step, on.state(rule), batches)


def distill(mesh: fs.Mesh, opt: str) -> Any:
    on, teacher, rule = Sharded(plain.perceptron(), mesh), Sharded(plain.perceptron(1, 11), mesh), OPTIMIZERS[opt]
    step = plain.example("distill").distill_step((on.model, on.plan), (teacher.model, teacher.plan), rule, 2.0)
    taught = teacher.state(rule)
    batches = [{"images": on.plan.local_batch(plain.rows(i))[0], "teacher": taught} for i in range(plain.STEPS)]
    return on.run(step, on.state(rule), batches)


def pcgrad(mesh: fs.Mesh, opt: str) -> Any:
    on, rule = Sharded(plain.perceptron(), mesh), OPTIMIZERS[opt]

    def of_task(task: int) -> Callable[..., Tensor]:
        return lambda params, batch: cross_entropy(on.model.apply(params, batch[0]), batch[1][:, task])

    step = plain.example("pcgrad").surgery_step([of_task(0), of_task(1)], rule, on.plan)
    return on.run(step, on.state(rule), [on.plan.local_batch(plain.rows(i)) for i in range(plain.STEPS)])


def reptile(mesh: fs.Mesh, opt: str) -> Any:
    on, rule = Sharded(plain.perceptron(), mesh), OPTIMIZERS[opt]

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return cross_entropy(on.model.apply(params, batch[0]), batch[1][:, 0])

    step = plain.example("reptile").reptile_step(loss_fn, rule, on.plan, 0.1)
    return on.run(step, on.state(rule), [on.plan.local_batch(plain.tasks(i)) for i in range(plain.STEPS)])


def lbfgs(mesh: fs.Mesh, opt: str) -> Any:
    on, module, rule = Sharded(plain.perceptron(), mesh), plain.example("lbfgs"), fs.optim.sgd(0.0)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return cross_entropy(on.model.apply(params, batch[0]), batch[1][:, 0])

    mine = on.plan.local_batch(plain.rows(0))
    state = module.begin(loss_fn, on.plan, on.state(rule), mine, 3)
    step = module.lbfgs_step(loss_fn, on.plan, 3)
    return on.run(step, state, itertools.repeat(mine, 8), lambda state: state["point"])


CASES = {f.__name__: f for f in (sam, gan, actor_critic, dpo, distill, pcgrad, reptile, lbfgs)}


def parity(name: str, opt: str) -> tuple[float, float]:
    """The largest differences of parameters and metrics between an example's step on all ranks and plain PyTorch."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        params, told = CASES[name](mesh, opt)
    whole, said = plain.PLAIN[name](opt)
    assert params.keys() == whole.keys() and len(told) == len(said)
    far = max(float((params[path] - leaf).abs().max()) for path, leaf in whole.items())
    pairs = [pair for one, other in zip(told, said, strict=True) for pair in zip(one, other, strict=True)]
    return far, max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
