"""Main memory (not GPU memory): how much is free on this machine or in this container, and how much a model needs.

`engine/runner/load.py` asks before it loads a model, the frame-synchronous runner before it reserves memory for parked
streams, and `tickertape doctor` when it checks a machine. The functions read /proc and the control groups (cgroups) of
this process.
"""

from __future__ import annotations

from pathlib import Path

# Estimated memory of an engine: this many times the size of the weights on disk, plus the base (Python, torch and the
# helper models).
MEMORY_PER_WEIGHT_BYTE = 3.0
BASE_BYTES = 600 * 2**20
# By the controller in /proc/self/cgroup (empty in version 2, `memory` in version 1): the files with the limit and with
# the usage of a control group, and the field of its `memory.stat` with the file cache. The file cache is part of the
# usage but counts as free here, because the system releases it when memory runs short.
CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def needed_memory(weights: Path) -> int:
    """Estimated bytes that an engine with these weights (a file or a folder) needs."""
    files = [weights] if weights.is_file() else weights.iterdir()
    return int(BASE_BYTES + MEMORY_PER_WEIGHT_BYTE * sum(file.stat().st_size for file in files if file.is_file()))


def available_memory(system: Path = Path("/")) -> int | None:
    """Bytes of memory that a new process can get; None if the system does not report it."""
    return min([*_of_machine(system, "MemAvailable"), *(free for _, free in _limits(system))], default=None)


def total_memory(system: Path = Path("/")) -> int | None:
    """Bytes of memory, used or not, of the machine or the container; None if the system does not report it."""
    return min([*_of_machine(system, "MemTotal"), *(limit for limit, _ in _limits(system))], default=None)


def memory_to_plan_with(share_of: int, system: Path = Path("/")) -> int:
    """Host memory in bytes; an engine gives a part of it to parked streams. 0 if the system does not report it.

    An engine alone on its device plans with the free memory. Engines that share a device start one after the other, so
    the free memory shrinks from one to the next, but they should plan with the same number, so that each can replace
    another. They plan with the total memory, but with at most `share_of` times the memory that is free now.
    """
    total, available = total_memory(system) or 0, available_memory(system) or 0
    return available if share_of == 1 else min(total, available * share_of)


def _of_machine(system: Path, name: str) -> list[int]:
    """The bytes of one line of /proc/meminfo; empty if it is missing."""
    lines = _read(system / "proc/meminfo").splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def _limits(system: Path) -> list[tuple[int, int]]:
    """(limit, free) in bytes of every control group of this process, and of the groups above, that has a limit."""
    limits = []
    for line in _read(system / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in CGROUP_FILES:
            continue
        limit_file, usage_file, cache_field = CGROUP_FILES[controllers]
        group = Path(path.lstrip("/"))
        for folder in [system / "sys/fs/cgroup" / controllers / above for above in (group, *group.parents)]:
            limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
            if limit.isdigit() and usage.isdigit():
                stat = dict(entry.split()[:2] for entry in _read(folder / "memory.stat").splitlines())
                limits.append((int(limit), max(0, int(limit) - int(usage) + int(stat.get(cache_field, 0)))))
    return limits


def _read(file: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
