"""Rooms list their public names only, for those who complete them with the Tab key."""

import functools
from types import ModuleType
from typing import Any

import pytest

import fshard
from tests.project.test_public_names import public_names

ROOMS = [""] + [
    name for name in public_names(fshard) if isinstance(functools.reduce(getattr, name.split("."), fshard), ModuleType)
]


@pytest.mark.parametrize("room", ROOMS)
def test_dir_shows_public_names_only(room: str) -> None:
    module: Any = functools.reduce(getattr, room.split("."), fshard) if room else fshard
    listed = {name.removeprefix(f"{room}.") for name in public_names(fshard) if name.startswith(f"{room}.") or not room}
    assert set(dir(module)) == {name for name in listed if "." not in name}
