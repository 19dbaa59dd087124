"""The memory that a rank could still take, before something else has to go."""

from pathlib import Path

import torch


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """The bytes that are free on a device, or on this host for all of its processes; None if that is not known.

    What PyTorch's allocator keeps of a device without using it is free, and so is what the kernel caches of files. A
    limit of the process' control group (version 2) counts as the size of the host.

    Args:
        device: the device.
        root: where ``proc`` and ``sys`` are.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu":
        return None
    known = [_of_host(root), _of_group(root)]
    return min((free for free in known if free is not None), default=None)


def _of_host(root: Path) -> int | None:
    rows = _numbers(root / "proc/meminfo")
    return rows["MemAvailable:"] * 1024 if "MemAvailable:" in rows else None


def _of_group(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        folder = root / "sys/fs/cgroup" / path
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except (OSError, StopIteration):
        return None
    if not (limit.isdigit() and used.isdigit()):
        return None  # "max"
    rows = _numbers(folder / "memory.stat")
    return max(int(limit) - int(used) + rows.get("inactive_file", 0) + rows.get("active_file", 0), 0)


def _numbers(file: Path) -> dict[str, int]:
    """The number behind each first word of a file's lines."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
