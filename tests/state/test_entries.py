"""Entries: a state as data, and back."""

import math

import pytest
import torch

import fshard as fs
from fshard import P, tree
from fshard.errors import TreeError
from fshard.sharding.layout import Piece
from fshard.state.entries import assemble, entries, scalars
from fshard.state.init import take
from fshard.state.pieces import Entry

PARAMS = {"a": {"w": torch.randn(7, 6), "b": torch.randn(6)}, "c": torch.randn(4, 8), "s": torch.tensor(3.0)}
RULES = [("a.b", P()), ("a.*", fs.fsdp("shard")), ("c", P(None, "tp", flat="shard")), ("s", fs.fsdp("shard"))]


def plans() -> list[fs.Plan]:
    """The same plan on every rank of an abstract mesh."""
    meshes = [fs.abstract_mesh((3, 2), ("shard", "tp"), rank=rank) for rank in range(6)]
    return [fs.make_plan(PARAMS, mesh, RULES, batch=P("shard")) for mesh in meshes]


def test_the_pieces_of_all_ranks_are_the_whole_tensors() -> None:
    opt = fs.optim.adamw(0.1)
    ranks = [entries(fs.init_state(plan, opt, params=PARAMS)) for plan in plans()]
    whole = {f"params.{path}": leaf for path, leaf in tree.paths(PARAMS)}
    names = [*whole, *(f"opt.{k}.{path}" for k in ("exp_avg", "exp_avg_sq") for path, _ in tree.paths(PARAMS))]
    assert [[entry.name for entry in rank] for rank in ranks] == [names] * 6
    for same in zip(*ranks, strict=True):
        held = [entry.piece for entry in same]
        for rank, entry in enumerate(same):
            expected = whole.get(entry.name, torch.zeros(entry.shape))
            assert torch.equal(entry.tensor, take(expected, entry.piece)), entry.name
            alike = [other for other, piece in enumerate(held) if piece == entry.piece and piece.numel]
            assert rank in entry.holders and (not alike or sorted(entry.holders) == alike)
        once = {entry.holders: entry.piece for entry in same}
        assert sum(piece.numel for piece in once.values()) == math.prod(same[0].shape)


def test_a_state_is_assembled_from_its_entries() -> None:
    opt = fs.optim.sgd(0.1, momentum=0.9)
    for plan in plans():
        state = fs.init_state(plan, opt, seed=5, params=PARAMS)
        for number, entry in enumerate(entries(state)):
            entry.tensor.add_(number)
        held = {entry.name: entry for entry in entries(state)}
        again = assemble(plan, opt, lambda entry, held=held: _copy(entry, held), {"step": 7, "seed": 5})
        assert scalars(again) == {"step": 7, "seed": 5}
        for one, other in zip(entries(state), entries(again), strict=True):
            assert (
                torch.equal(one.tensor, other.tensor)
                and one.tensor.data_ptr() != other.tensor.data_ptr()
                or (not one.piece.numel)
            )


def _copy(entry: Entry, held: dict[str, Entry]) -> None:
    entry.tensor.copy_(held[entry.name].tensor)


def test_a_buffer_of_another_length_is_refused() -> None:
    plan = plans()[0]
    state = fs.init_state(plan, fs.optim.sgd(0.1, momentum=0.9), params=PARAMS)
    state.shards()[1].opt["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(TreeError, match=r"momentum_buffer.*\[3\]"):
        entries(state)


def test_a_piece_of_nothing() -> None:
    state = fs.init_state(plans()[4], fs.optim.sgd(0.1), params=PARAMS)
    empty = next(entry for entry in entries(state) if entry.name == "params.s")
    assert empty.piece == Piece((), (), 0, 0) and empty.tensor.numel() == 0
