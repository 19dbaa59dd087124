"""Models of Hugging Face: safetensors read into shards, and written so that ``transformers`` loads them."""

import copy
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.arguments import Want, bytes_of, expect
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.errors import PlanError, TreeError, lines
from fshard.interchange.export import deliver, export_entries, on_one_replica, stream
from fshard.interchange.export_plan import ROLE, ExportItem, plan_export
from fshard.interchange.hf_files import HfFiles, HfWriter
from fshard.interchange.hf_names import Converted, family, persistent, to_files, unsaved
from fshard.interchange.rename import RenameLike, apply_rules, decided
from fshard.interchange.source import MemorySource, PartSource, TensorSource, load
from fshard.interchange.woven import Woven
from fshard.model.initial_values import Initializer
from fshard.optim.base import Optimizer
from fshard.played.everywhere import called_on_each_rank
from fshard.runtime.comm import collective_call, first_rank_or_raise, mesh_communicator
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.init import Inits
from fshard.state.train_state import TrainState


@called_on_each_rank
def load_hf(
    path: str | os.PathLike[str],
    plan: Plan,
    opt: Optimizer | None = None,
    *,
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    cast: bool = False,
    buffers: Mapping[str, Any] | None = None,
) -> TrainState:
    """A train state with the parameters of a Hugging Face model. Local: ranks do not communicate.

    Each rank reads its own part of the files: no rank reads or holds the whole model. If the plan is that of a
    ``transformers`` module, names and layouts in the files become the module's as in ``from_pretrained``: the tensors
    of experts are stacked, other prefixes are taken for those of the module, and tables that files lack are computed.

    Args:
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json``, or one ``.safetensors`` file.
        plan: the plan, of what ``fs.split`` returned or of a tree. That of a tree has the names in the files.
        opt: the optimizer, whose state starts anew; None for parameters alone: a state for eval steps, such as a frozen
            reference model, whose ``params`` are the tree of shards.
        rename: rules from names in the files to paths: ``(pattern, path)`` or ``fs.io.Rename``. The first rule that
            matches a whole name applies, in place of what ``transformers`` would; ``(pattern, None)`` leaves a tensor
            out.
        init: ``(pattern, initializer)`` rules for leaves that the files do not have, such as a new head.
        seed: the seed of these values, and of random numbers inside of steps.
        cast: whether floating-point tensors may be rounded to the leaf's dtype. Widening is always allowed.
        buffers: a tree of tensors to fill with what the files hold of them, ``model.buffers``: running statistics, or
            the biases of experts that no gradient trains. Without it such tensors must be what the module holds.

    Raises:
        CheckpointError: the files do not exist or cannot be read; ``DamagedError`` if they are incomplete.
        PlanError: an invalid rule, or one that matches nothing.
        TreeError: tensors are missing, unexpected, misshapen or would be rounded, all in one report; rules give two
            tensors one name; tied leaves have different values.

    >>> import safetensors.torch, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> safetensors.torch.save_file({"net.w": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    >>> plan = fs.make_plan({"w": torch.empty(2, 3)}, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.io.load_hf(folder, plan, fs.optim.sgd(0.1), rename=[(r"net\\.(.*)", r"\\1")]).params["w"].sum()
    tensor(6.)
    """
    expect(
        "load_hf(path, plan, opt)",
        [("path", path, (str, os.PathLike), "a folder or a file"), ("plan", plan, Plan, "what fs.make_plan returned")],
    )
    source: TensorSource = HfFiles(path)
    module = family(plan)
    if module is not None:
        source = Converted(source, module, rename)
        init = (*init, *own_values(module, plan, source, rename))
    source = read_buffers(source, module, buffers, decided(rename, source.tensors))
    return load(plan, opt, source, rename=rename, init=init, seed=seed, cast=cast)


@called_on_each_rank
@collective_call
def save_hf(
    state: TrainState | Mapping[str, Any],
    path: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    rename: Sequence[RenameLike] = (),
    config: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    buffers: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters as a folder that ``from_pretrained`` of ``transformers`` loads. Collective.

    If the plan is that of a ``transformers`` module, names and layouts are those of its ``save_pretrained``: one tensor
    an expert, where the module has all in one. Rank 0 writes each tensor when it is gathered, and holds one at a time,
    or those of which a tensor in the files consists. The files get their names when all of them
    are complete. Tied leaves are written once, under their first name, as ``transformers`` does. Replicas that train
    apart (``fs.outer``) write what they agree on: ``fs.averaged(state, "anchor")``.

    Args:
        state: a state, or a tree such as ``state.params`` together with ``plan``.
        path: the folder, which rank 0 makes if it does not exist.
        plan: the plan of a tree.
        rename: rules from paths to names in the files.
        config: a ``transformers`` config, or a dict, to write as ``config.json``.
        dtype: the dtype to which floating-point leaves are cast, such as ``torch.bfloat16``.
        max_shard_size: the most bytes of a file, such as ``"5GB"``; a larger model gets several files and an index.
        overwrite: whether weights in the folder may be removed once the new ones are complete.
        buffers: a tree of whole tensors to write, such as ``model.buffers``. For a ``transformers`` module, None writes
            those that its state dict has, as the module holds them.

    Raises:
        CheckpointError: the folder holds weights, or cannot be written to; equal on all ranks. The folder's files are
            as they were.
        PlanError, TreeError: as ``export``.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.io.save_hf({"w": w.flatten()}, folder, plan, config={"model_type": "mine"})
    ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    wants: list[Want] = [
        ("path", path, (str, os.PathLike), "a folder"),
        ("plan", plan, (Plan, type(None)), "what fs.make_plan returned"),
        ("rename", rename, (list, tuple), "a list of (pattern, name)"),
        ("max_shard_size", max_shard_size, (int, str), "bytes, or a size such as '5GB'"),
    ]
    expect("save_hf(state, path)", wants)
    limit = bytes_of(str(max_shard_size), "max_shard_size=")
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    if settings is not None and not isinstance(settings, Mapping):
        raise PlanError(f"config={type(settings).__name__} must be a config of transformers, or a dict")
    plan, listed, check_alive = export_entries(state, plan, "params")

    def write() -> None:
        items = plan_export(plan, listed, to=0, axes="all", dtype=dtype, rename=rename)
        items.sort(key=lambda item: -item.dtype.itemsize)  # aligns every element of a file
        outputs = HfOutputs(family(plan), items, buffers, decided(rename, plan.leaves))
        _write(plan.mesh, outputs, HfWriter(Path(path), outputs.tensors, limit, overwrite), settings, check_alive)

    on_one_replica(plan, listed, "save_hf", write)


def _write(
    mesh: Mesh,
    outputs: "HfOutputs",
    writer: HfWriter,
    settings: Mapping[str, Any] | None,
    check_alive: Callable[[], object],
) -> None:
    """Write the outputs as their leaves arrive. Collective."""
    comm, rank = mesh_communicator(mesh, ROLE), mesh.rank

    def publish() -> None:
        if failure is not None:
            raise failure
        writer.publish(settings)

    def write(arrived: tuple[str, Tensor]) -> None:
        for name, tensor in outputs.take(*arrived):
            writer.write(name, tensor)

    try:
        first_rank_or_raise(comm, rank, writer.prepare)
        failure = deliver(stream(outputs.items, check_alive), write)
        first_rank_or_raise(comm, rank, publish)
    finally:
        writer.discard()


class HfOutputs:
    """The tensors that are written, in the order in which their leaves arrive.

    Attributes:
        items: the leaves to gather.
        tensors: what is written, by name.
    """

    def __init__(
        self, module: Any, items: Sequence[ExportItem], buffers: Mapping[str, Any] | None, renamed: frozenset[str]
    ) -> None:
        """Plan the outputs; names in ``renamed`` are those of leaves that a user's rule decided."""
        given = _buffers(module, buffers)
        skipped = frozenset[str]() if module is None else unsaved(module)
        self.items = [item for item in items if item.name not in skipped or item.entry.name in renamed]
        if both := sorted({item.name for item in self.items} & given.keys()):
            raise TreeError(lines("buffers= has names of leaves:", both, "Leave them out."))
        self._made = _made(module, self.items, given, renamed)
        self._held: dict[str, Tensor] = dict(given)
        self._outputs = _in_order(self._made, [*given], [item.name for item in self.items])
        self._left = {item.name: sum(item.name in x.names for x in self._made.values()) for item in self.items}
        ordered = [(name, self._made[name]) for names in self._outputs.values() for name in names]
        self.tensors = {name: TensorMeta(tuple(one.shape), one.dtype) for name, one in ordered}

    def take(self, name: str, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors to write, now that a leaf has arrived; leaves that nothing needs any more are dropped."""
        self._held[name] = leaf
        for output in self._outputs.pop(name, ()):
            one = self._made[output]
            yield (
                output,
                leaf
                if one.boxes == Woven.of(name, leaf.shape, leaf.dtype).boxes
                else one.whole(MemorySource("leaves", self._held).read),
            )
            for used in one.names & self._left.keys():
                self._left[used] -= 1
                if not self._left[used]:
                    del self._held[used]


def _buffers(module: Any, given: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The buffers to write by name."""
    own = {} if module is None else persistent(module)
    if given is None:
        return own
    return {path: buffer for path, buffer in tree.paths(given) if module is None or path in own}


def _made(
    module: Any, items: Sequence[ExportItem], buffers: Mapping[str, Tensor], renamed: frozenset[str]
) -> dict[str, Woven]:
    """The tensors of files, made of leaves and buffers; those that users renamed stay what they are."""
    own = {item.name: TensorMeta(item.shape, item.dtype) for item in items if item.entry.name in renamed}
    rest = {item.name: TensorMeta(item.shape, item.dtype) for item in items if item.entry.name not in renamed}
    rest |= {name: TensorMeta(tuple(x.shape), x.dtype) for name, x in buffers.items()}
    return _plain(own) | (_plain(rest) if module is None else to_files(module, rest))


def _plain(metas: Mapping[str, TensorMeta]) -> dict[str, Woven]:
    return {name: Woven.of(name, meta.shape, meta.dtype) for name, meta in metas.items()}


def _in_order(made: Mapping[str, Woven], before: Sequence[str], arrivals: Sequence[str]) -> dict[str, list[str]]:
    """The outputs that each arrival completes; those of nothing else come with the first."""
    number = {name: 0 for name in before} | {name: i for i, name in enumerate(arrivals)}
    out: dict[str, list[str]] = {name: [] for name in arrivals}
    for name, one in made.items():
        out[arrivals[max((number[used] for used in one.names), default=0)]].append(name)
    return out


@dataclass(frozen=True, eq=False)
class ModuleTable:
    """Values that a whole leaf begins with.

    >>> ModuleTable(torch.arange(6.0).view(2, 3))(0, (2, 3), torch.tensor([1, 4]))
    tensor([1., 4.])
    """

    values: Tensor

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        return self.values.reshape(-1)[index.to(self.values.device)].to(index.device, torch.float32)


def read_buffers(
    source: TensorSource, module: Any, buffers: Mapping[str, Any] | None, decided: Container[str]
) -> TensorSource:
    """Fill buffers from a source, or compare them with it; returns the rest of the source.

    Args:
        source: the tensors, under the module's names.
        module: the module of ``transformers``, whose buffers a call finds; None for none.
        buffers: the tree to fill; None to compare the module's own.
        decided: names that rules of ``rename=`` decide, which are no buffers.

    Raises:
        TreeError: buffers are misshapen, or not what the files hold.
    """
    held = {} if module is None else persistent(module)
    given = held if buffers is None else {**held, **dict(tree.paths(buffers))}
    found = [name for name in source.tensors if name in given and name not in decided]
    wrong = []
    for name in found:
        here = given[name]
        if tuple(here.shape) != source.tensors[name].shape:
            wrong.append(f"{name}: {list(source.tensors[name].shape)}, the module has {list(here.shape)}")
        elif here.device.type != "meta":
            value = torch.empty(here.shape, dtype=here.dtype, device="cpu")
            source.read(name, [((0,) * here.ndim, value)])
            if buffers is not None:
                here.copy_(value)
            elif not torch.equal(value, here.cpu()):
                wrong.append(f"{name}  {list(here.shape)}")
    if wrong:
        head = f"{source.name} holds other values of buffers, which are no leaves, than the module:"
        remedy = "Give buffers=model.buffers to fill them, or leave them out: rename=[(pattern, None)]."
        raise TreeError(lines(head, wrong, remedy))
    return PartSource(source, frozenset(found))


def own_values(
    module: Any, plan: Plan, source: TensorSource, rename: Sequence[RenameLike]
) -> list[tuple[str, Initializer]]:
    """Rules for leaves that files of a module of ``transformers`` lack, with the values that its own code computes."""
    there = apply_rules(rename, source.tensors, source.name)
    lacking = [path for path in unsaved(module) if path in plan.leaves and path not in there]
    values = {path: _own_value(module, path) for path in sorted(lacking)}
    return [(re.escape(path), ModuleTable(value)) for path, value in values.items() if value is not None]


def _own_value(module: Any, path: str) -> Tensor | None:
    """The values that the module's code gives a parameter; None if its owner has others below it."""
    owner, _, name = path.rpartition(".")
    below = module.get_submodule(owner)
    if any(True for _ in below.children()):
        return None
    twin = copy.deepcopy(below).to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module._init_weights(twin)
    value = getattr(twin, name)
    return value.detach() if isinstance(value, nn.Parameter) else None
