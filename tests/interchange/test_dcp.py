"""Folders of torch.distributed.checkpoint: those of FSDP2 jobs are read, and FSDP2 jobs read those written here."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P
from tests.shared.workers import Pools

WIDTH = 6
ADAMW = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
NO_BUFFER = [("scale", None)]


class Net(nn.Module):
    """A net with a tied table, dims that two ranks cannot share evenly, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.odd = nn.Linear(WIDTH, 3)
        self.back = nn.Linear(3, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.gain
        return self.head(self.back(torch.relu(self.odd(x))))


def net() -> Net:
    """The same net every time."""
    torch.manual_seed(3)
    return Net()


def tokens(step: int) -> Tensor:
    """The global batch of a step."""
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(100 + step))


def objective(logits: Tensor, batch: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, 11), batch[:, 1:].reshape(-1))


def make_plan(mesh: fs.Mesh, rules: Any = None) -> tuple[fs.Plan, Any]:
    """The net's plan, and its loss."""
    model = fs.split(net(), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, rules or [(r".*", fs.fsdp("shard"))], batch=P("shard"))
    return plan, lambda params, batch: objective(model.apply(params, batch), batch)


def adamw() -> fs.optim.adamw:
    """The optimizer of every job here."""
    return fs.optim.adamw(**ADAMW)


def fshard_steps(state: Any, plan: fs.Plan, loss: Any, steps: range) -> Any:
    """Train on this rank's part of each batch."""
    step = fs.make_train_step(loss, adamw(), plan)
    for number in steps:
        state, _ = step(state, tokens(number).chunk(plan.mesh.size)[plan.mesh.rank])
    return state


def fsdp_job(opt: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, Any]:
    """The net and its optimizer under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    module = net()
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    return module, opt(module.parameters(), **(settings or ADAMW))


def fsdp_steps(module: nn.Module, opt: Any, steps: range) -> None:
    """Train as a plain FSDP2 job does."""
    for number in steps:
        batch = tokens(number).chunk(dist.get_world_size())[dist.get_rank()]
        opt.zero_grad()
        objective(module(batch), batch).backward()
        opt.step()


def fsdp_full(module: nn.Module, opt: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whole state dicts of an FSDP2 job, on every rank."""
    from torch.distributed.checkpoint import state_dict as sd

    return sd.get_state_dict(module, opt, options=sd.StateDictOptions(full_state_dict=True))  # type: ignore[return-value]


def fsdp_save(folder: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """On a rank: train under FSDP2, save as its jobs do; returns whole state dicts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    module, opt = fsdp_job()
    fsdp_steps(module, opt, range(steps))
    model, optim = get_state_dict(module, opt)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    return fsdp_full(module, opt)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal up to the order of sums."""
    for name, leaf in b.items():
        torch.testing.assert_close(a[name], leaf, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def read_fsdp(folder: str, axes: Any, rules: Any) -> Any:
    """On a rank: read a folder of an FSDP2 job; returns whole state dicts, the step, and elements read and held."""
    with fs.make_mesh(*axes) as mesh:
        plan, _ = make_plan(mesh, rules)
        state = fs.io.load_dcp(folder, plan, adamw(), rename=NO_BUFFER)
        return fs.io.to_state_dict(state), fs.io.to_optim_state_dict(state, adamw()), state.step


def equal(found: Any, expected: Any) -> None:
    """Bit for bit: parameters, optimizer state and the number of updates."""
    params, optim, step = found
    for name, leaf in expected[0].items():
        assert name == "scale" or torch.equal(params[name], leaf), name
    assert set(params) == set(expected[0]) - {"scale"}
    assert set(optim["state"]) == set(expected[1]["state"])
    for name, row in expected[1]["state"].items():
        assert set(row) == set(optim["state"][name])
        for key, leaf in row.items():
            assert torch.equal(optim["state"][name][key], leaf), (name, key)
        assert step == int(row["step"])
    assert optim["param_groups"] == expected[1]["param_groups"]


RULES = {
    "flat": None,
    "replicated": [(r".*", P())],
    "rows": [(r"blocks\..*", P("shard")), (r".*", fs.fsdp("shard"))],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pool: Pools) -> tuple[str, Any]:
    """A folder that an FSDP2 job on two ranks wrote after three steps, and its whole state dicts."""
    folder = str(tmp_path_factory.mktemp("dcp") / "fsdp2")
    return folder, pool(2).run(fsdp_save, folder, 3)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("world", "rules"),
    [(world, rules) for world in (1, 2, 3) for rules in RULES if (world, rules) != (3, "rows")],  # 3 divides no rows
)
def test_a_folder_of_an_fsdp2_job_is_read(saved: tuple[str, Any], pool: Pools, world: int, rules: str) -> None:
    for found in pool(world).run(read_fsdp, saved[0], ((-1,), ("shard",)), RULES[rules]):
        equal(found, saved[1])


def go_on(folder: str) -> Any:
    """On a rank: read a folder of an FSDP2 job, train two more steps; returns whole state dicts."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, loss = make_plan(mesh)
        state = fshard_steps(fs.io.load_dcp(folder, plan, adamw(), rename=NO_BUFFER), plan, loss, range(3, 5))
        return fs.io.to_state_dict(state), state.step


def test_training_goes_on_as_the_fsdp2_job_would(saved: tuple[str, Any], pool: Pools, tmp_path: Path) -> None:
    params, step = pool(2).run(go_on, saved[0])[0]
    there = pool(2).run(fsdp_save, str(tmp_path / "five"), 5)[0][0]
    there.pop("scale")
    assert step == 5
    close(params, there)


def write_here(folder: str, axes: Any, rules: Any, world: int) -> Any:
    """On a rank: train here, write a folder, and return whole state dicts."""
    with fs.make_mesh(*axes) as mesh:
        plan, loss = make_plan(mesh, rules)
        state = fs.init_state(plan, adamw(), params=fs.split(net()).params)
        state = fshard_steps(state, plan, loss, range(3))
        fs.io.save_dcp(state, folder, adamw(), buffers={"scale": torch.full((2,), 5.0)})
        return fs.io.to_state_dict(state), fs.io.to_optim_state_dict(state, adamw()), state.step


def fsdp_load(folder: str) -> Any:
    """On a rank: an FSDP2 job that has not trained loads a folder as its jobs do; returns whole state dicts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    module, opt = fsdp_job(torch.optim.AdamW, lr=0.7)
    model, optim = get_state_dict(module, opt)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(module, opt, model_state_dict=model, optim_state_dict=optim)
    return fsdp_full(module, opt)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("world", [1, 2])
def test_an_fsdp2_job_reads_what_is_written_here(pool: Pools, tmp_path: Path, world: int, rules: str) -> None:
    folder = str(tmp_path / "here")
    found = pool(world).run(write_here, folder, ((-1,), ("shard",)), RULES[rules], world)[0]
    expected = pool(2).run(fsdp_load, folder)[0]
    equal(found, expected)
    assert torch.equal(expected[0]["scale"], torch.full((2,), 5.0))
    # And it comes back here bit for bit, on another number of ranks.
    equal(pool(3).run(read_fsdp, folder, ((-1,), ("shard",)), None)[2], expected)
