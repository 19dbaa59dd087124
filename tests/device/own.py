"""Builds the device of our own, and lets a process use it. It must be loaded before the process's first backward."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("own_device.cpp")
DEVICE = "own"
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "d" / "own_device"
"""Where tests build the library."""


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def library(folder: Path) -> Path:
    """Where the library is, or will be."""
    kind = hashlib.sha256(SOURCE.read_bytes() + str(torch.__version__).encode()).hexdigest()[:16]
    return folder / f"own_device-{kind}.so"


def build(folder: Path) -> Path:
    """The library, compiled once for each version of its source and of PyTorch: half a minute."""
    made = library(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            root, part = Path(torch.__file__).parent, made.with_suffix(".part")
            include = root / "include"
            paths = ["-I", str(include), "-I", str(include / "torch/csrc/api/include"), "-L", str(root / "lib")]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
            command = [str(compiler()), "-O0", "-std=c++20", "-shared", "-fPIC", "-w", abi, *paths, str(SOURCE)]
            subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(part)], check=True, timeout=900)
            part.rename(made)
    return made


def found() -> str | None:
    """The device, if tests have built its library: the process can use it from now on."""
    if not library(CACHE).exists():
        return None
    load(str(library(CACHE)))
    return DEVICE


@functools.cache
def load(library: str) -> None:
    """Let this process use the device."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.ops.load_library(library)
    module = types.ModuleType(f"torch.{DEVICE}")
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(module, name, lambda *args, answer=answer: answer)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    module.manual_seed_all = module.synchronize = lambda *args: None  # type: ignore[attr-defined]
    torch._register_device_module(DEVICE, module)
