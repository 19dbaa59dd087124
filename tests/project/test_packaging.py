"""Wheel and sdist: built, installed in an environment of their own, and used there."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import fshard as fs
import torch
plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
print(fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(2)}).params, fs.__file__)
"""


def done(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints, without the path to this checkout."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    run = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=170, env=bare)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_all_names_every_extra_but_those_of_developers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = extras["all"]
    named = set(line.removeprefix("fshard[").removesuffix("]").split(","))
    assert named == extras.keys() - {"all", "test", "docs", "bench", "bench-jax", "bench-opacus", "release"}


@pytest.mark.processes
@pytest.mark.long
def test_no_warning_about_numpy() -> None:
    assert "UserWarning" not in done(sys.executable, "-c", WITHOUT_NUMPY, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.processes
def test_wheel_and_sdist_install_in_a_clean_environment(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source, built, home = tmp_path / "source", tmp_path / "dist", tmp_path / "venv"
    ignored = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "build")
    shutil.copytree(ROOT, source, ignore=ignored)
    # setuptools writes its own arguments to sys.argv, so the folder is read once.
    build = "import sys; from setuptools.build_meta import *; to = sys.argv[1]; build_sdist(to); build_wheel(to)"
    done(sys.executable, "-c", build, built, cwd=source)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        held = archive.getnames()
    assert "fshard/py.typed" in names and not [name for name in names if name.startswith(("tests/", "docs/"))]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fshard").rglob("*.py")}
    assert modules <= set(names) and any(name.endswith("/fshard/py.typed") for name in held)
    done(sys.executable, "-m", "venv", "--without-pip", home)
    (site,) = home.glob("lib/python*/site-packages")
    done(sys.executable, "-m", "pip", "--python", home, "install", "--no-deps", "--no-index", wheel)
    # PyTorch and optree are those of this environment: what is after it on the path does not hide what was installed.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(paths))
    told = done(home / "bin" / "python", "-c", WITHOUT_NUMPY, cwd=tmp_path)
    assert str(site) in told and "UserWarning" not in told
    script = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert script and "step 100: loss" in done(home / "bin" / "python", "-c", script[1], cwd=tmp_path)
    assert "fshard 0." in done(home / "bin" / "fshard", "--version", cwd=tmp_path)
