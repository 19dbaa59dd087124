"""What a format, or a plan, has no place for is said aloud, and the way out that an error names is one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main as command
from fshard.errors import CheckpointWarning, TreeError
from tests.training import test_packed as packed
from tests.training.test_feedback import WIRE, kept, mesh_of, plan_of, same
from tests.training.wire_cases import batch, loss_fn, start

LOW = fs.Wire(reduce={"replica": "powersgd"}, rank=2)


@pytest.mark.parametrize(("wire", "count"), [(WIRE, 6), (LOW, 9)], ids=["int4", "powersgd"])
def test_formats_of_other_libraries_say_what_they_leave_out(
    wire: fs.Wire, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning names it; the rest comes back, and begins with nothing left."""
    mesh, opt, folder = mesh_of(2, 1), fs.optim.adamw(1e-2), str(tmp_path / "dcp")
    says = rf"leaves out opt\.residual\.one\.w and {count - 1} more: .*fs\.Checkpointer has it"

    def main() -> bool:
        plan = plan_of(mesh, wire)
        step, state = fs.make_train_step(loss_fn, opt, plan), fs.init_state(plan, opt, params=start())
        state, _ = step(state, batch(0, mesh.rank))
        fs.Checkpointer(tmp_path / "own").save(state)
        fs.io.save_dcp(state, folder, opt)
        optim = fs.io.to_optim_state_dict(state, opt)
        one = fs.io.from_state_dict(fs.io.to_state_dict(state), plan, opt, optim)
        other = fs.io.load_dcp(folder, plan, opt)
        assert same(kept(one), kept(other))
        want, lost = kept(state), [name for name, leaf in kept(one).items() if not torch.equal(leaf, kept(state)[name])]
        assert {name.partition(".")[0] for name in lost} == ({"residual", "basis"} if wire is LOW else {"residual"})
        assert not any(leaf.any() for name, leaf in kept(one).items() if name.startswith("residual."))
        return one.step == 1 and any(leaf.any() for name, leaf in want.items() if name.startswith("residual."))

    with pytest.warns(CheckpointWarning, match=says) as told:
        assert all(mesh.run(main))
    calls = {str(one.message).partition(" ")[0] for one in told if one.category is CheckpointWarning}
    assert calls == {"save_dcp", "to_optim_state_dict"}
    with pytest.warns(CheckpointWarning, match=says):
        assert command(["ckpt", "convert", str(tmp_path / "own"), str(tmp_path / "other"), "--to", "dcp"]) == 0
    assert "without param_groups" in capsys.readouterr().out
    back = mesh.run(lambda: kept(fs.io.load_dcp(tmp_path / "other", plan_of(mesh, wire), opt)))
    assert same(back[0], mesh.run(lambda: kept(fs.io.load_dcp(folder, plan_of(mesh, wire), opt)))[0])


@pytest.mark.parametrize("text", packed.FORMATS[:3])
def test_packed_leaves_are_restored_in_their_format_and_then_moved(text: str, tmp_path: Path) -> None:
    """Both ways: to exact leaves, and back."""
    one, folder, loose = fs.virtual_mesh((1,), ("data",)), str(tmp_path / "packed"), str(tmp_path / "loose")
    want = one.run(lambda: packed.saved(text, folder, one))[0]

    def remedied(there: str | None, here: str | None, folder: str) -> Any:
        plan = packed.plan_of(here, one)
        state = fs.Checkpointer(folder).restore(packed.plan_of(there, one), packed.OPT)
        state = fs.reshard_state(state, plan, packed.OPT)
        return state, fs.unshard(state.params, plan)

    state, whole = one.run(lambda: remedied(text, None, folder))[0]
    assert packed.same(whole, want)
    one.run(lambda: fs.Checkpointer(loose).save(state))
    missing = rf"missing  params\.one\.w:{text}(?s:.*)change it with fs\.reshard_state"
    with pytest.raises(TreeError, match=missing):
        one.run(lambda: packed.restored(text, loose, one))
    twice = {
        unit: {name: packed.reference(x, text) if name == "w" else x for name, x in leaves.items()}
        for unit, leaves in want.items()
    }
    assert packed.same(one.run(lambda: remedied(None, text, loose))[0][1], twice)
