"""The map of a toy package: each number has one cause in it."""

from pathlib import Path

from tests.project import map as house

TOY = {
    "__init__.py": "from toy.low.a import f\n",
    "low/__init__.py": "",
    "low/a.py": '''
class Box:
    fixed: int

    def __init__(self, other):
        self.x, (self.y, *self.z) = 1, (2, 3)
        object.__setattr__(self, "w", 4)
        other.x = self.x
        other.x += 1
        setattr(other, "y", 1)
        super().__setattr__("v", 5)

def f(a, b):
    """Text
    that does not count."""
    def inner():
        return 1 if a and b or b else 2
    for x in a:
        with b as b.held:
            pass
    return [x for x in a if x]
''',
    "high/__init__.py": "",
    "high/b.py": """
from typing import Any
from toy.low.a import f, Box

def g(x: Any) -> Any:
    return hasattr(x, "y")
""",
}


def test_every_number_of_a_toy(tmp_path: Path) -> None:
    for name, text in TOY.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = house.measure(tmp_path / "toy")
    assert found["classes"] == {"low.a.Box": 5}
    assert found["functions"] == {"low.a.Box.__init__": 1, "low.a.f": 4, "low.a.f.inner": 4, "high.b.g": 1}
    assert found["long"]["low.a.f"] == 7
    wrote = [text.split(": ")[1] for text in found["foreign"]]
    assert wrote == ["other.x", "other.x", "setattr(other, 'y', 1)", "b.held"]
    assert found["imports"] == {"high": {"low": 2}, "top": {"low": 1}}
    assert found["rooms"]["high"] == {"files": 2, "lines": 6, "Any": 2, "hasattr": 1, "foreign": 0}
    assert "low.a.Box" in house.show(found) and "5  ->" in house.show(found, found)
