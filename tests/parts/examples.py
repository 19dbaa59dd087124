"""The step of each example on shards, beside the same in plain PyTorch."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fshard as fs
from fshard import tree
from tests.parts import plain_examples as plain

OPTIMIZERS = {"adamw": fs.optim.adamw(1e-2, weight_decay=0.1), "sgd": fs.optim.sgd(0.05, momentum=0.9)}


@dataclass(frozen=True)
class Case:
    """An example's step, and what it is given.

    Attributes:
        plan: of the trained model.
        step: the step.
        start: makes what the first step takes.
        batch: this rank's batch of a step.
        frozen: the states in the batches.
        last: the state, of what a step returns, that is compared with plain PyTorch.
        steps: how many are compared.
    """

    plan: fs.Plan
    step: Any
    start: Callable[[], Any]
    batch: Callable[[int], Any]
    frozen: Sequence[fs.TrainState] = ()
    last: Callable[[Any], fs.TrainState] = lambda state: state
    steps: int = plain.STEPS


class Sharded:
    """A module on a mesh."""

    def __init__(self, net: nn.Module, mesh: fs.Mesh, units: Sequence[str] = ("0", "2")) -> None:
        self.model = fs.split(net, units=tuple(units))
        self.plan = fs.make_plan(self.model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))

    def state(self, opt: Any) -> fs.TrainState:
        """A state of the module's own values."""
        return fs.init_state(self.plan, opt, params=self.model.params)

    def case(self, step: Any, opt: Any, batch: Callable[[int], Any]) -> Case:
        """The case of a step with global batches."""
        return Case(self.plan, step, lambda: self.state(opt), lambda i: self.plan.local_batch(batch(i)))

    def of_task(self, task: int) -> Callable[..., Tensor]:
        """The loss of one of the labels of a row."""
        return lambda params, batch: cross_entropy(self.model.apply(params, batch[0]), batch[1][:, task])


def sam(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.perceptron(), mesh)
    return on.case(plain.example("sam").sam_step(on.of_task(0), opt, on.plan, 0.3), opt, plain.rows)


def gan(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.players(), mesh, ("gen.*", "dis.*"))
    both = fs.optim.partition([(r"gen\..*", opt), (r"dis\..*", opt)])
    return on.case(plain.example("gan").gan_step(on.model, both, on.plan), both, plain.points)


def actor_critic(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.both_heads(), mesh, ("actor.*", "critic.*"))
    return on.case(plain.example("actor_critic").ppo_step(on.model, opt, on.plan), opt, plain.turns)


def dpo(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.writer(0), mesh, ("blocks.*",))
    reference = fs.init_state(on.plan, opt, params=fs.split(plain.writer(1)).params)
    step = plain.example("dpo").dpo_step(on.model, opt, on.plan, 0.5)

    def batch(i: int) -> Any:
        return {"pairs": on.plan.local_batch(plain.preferences(i)), "reference": reference}

    return Case(on.plan, step, lambda: on.state(opt), batch, [reference])


def distill(mesh: fs.Mesh, opt: Any) -> Case:
    on, teacher = Sharded(plain.perceptron(), mesh), Sharded(plain.perceptron(1, 11), mesh)
    step = plain.example("distill").distill_step((on.model, on.plan), (teacher.model, teacher.plan), opt, 2.0)
    taught = teacher.state(opt)

    def batch(i: int) -> Any:
        return {"images": on.plan.local_batch(plain.rows(i))[0], "teacher": taught}

    return Case(on.plan, step, lambda: on.state(opt), batch, [taught])


def pcgrad(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.perceptron(), mesh)
    step = plain.example("pcgrad").surgery_step([on.of_task(0), on.of_task(1)], opt, on.plan)
    return on.case(step, opt, plain.rows)


def reptile(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.perceptron(), mesh)
    return on.case(plain.example("reptile").reptile_step(on.of_task(0), opt, on.plan, 0.1), opt, plain.tasks)


def lbfgs(mesh: fs.Mesh, opt: Any) -> Case:
    on, module, rule = Sharded(plain.perceptron(), mesh), plain.example("lbfgs"), fs.optim.sgd(0.0)
    mine = on.plan.local_batch(plain.rows(0))

    def start() -> Any:
        return module.begin(on.of_task(0), on.plan, on.state(rule), mine, 3)

    step = module.lbfgs_step(on.of_task(0), on.plan, 3)
    return Case(on.plan, step, start, lambda i: mine, last=lambda state: state["point"], steps=8)


def newton_cg(mesh: fs.Mesh, opt: Any) -> Case:
    on = Sharded(plain.perceptron(), mesh)

    def predict(params: Any, batch: Any) -> Any:
        return on.model.apply(params, batch[0])

    def batch(i: int) -> Any:
        x, y = plain.rows(i)
        return x, y[:, 0]

    return on.case(plain.example("newton_cg").newton_step(predict, opt, on.plan, 0.1, 3), opt, batch)


CASES = {f.__name__: f for f in (sam, gan, actor_critic, dpo, distill, pcgrad, reptile, lbfgs, newton_cg)}


def parity(name: str, opt: str) -> tuple[float, float]:
    """The largest differences of parameters and metrics between an example's step on all ranks and plain PyTorch.

    Raises:
        AssertionError: a step left its schedule.
    """
    with fs.make_mesh((-1,), ("data",)) as mesh, warnings.catch_warnings():
        warnings.simplefilter("error")
        case, told = CASES[name](mesh, OPTIMIZERS[opt]), []
        state = case.start()
        for number in range(case.steps):
            state, metrics = case.step(state, case.batch(number))
            told.append([float(leaf) for leaf in tree.leaves(metrics)])
            assert case.step.record == case.step.schedule.ops
        params = dict(tree.paths(fs.unshard(case.last(state).params, case.plan)))
    whole, said = plain.PLAIN[name](opt)
    assert params.keys() == whole.keys() and len(told) == len(said)
    far = max(float((params[path] - leaf).abs().max()) for path, leaf in whole.items())
    pairs = [pair for one, other in zip(told, said, strict=True) for pair in zip(one, other, strict=True)]
    return far, max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
