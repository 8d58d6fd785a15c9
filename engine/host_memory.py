"""Main memory (not GPU memory): how much is free on this machine or in this container, and how much a model needs.

`engine/runner/load.py` asks before it loads a model, the frame-synchronous runner before it reserves memory for parked
streams, `tickertape doctor` when it checks a machine. Reads /proc and the control groups; functions without state.
"""

from __future__ import annotations

from pathlib import Path

# Estimated memory of an engine: this many times the size of the weights on disk, plus a constant.
FACTOR = 3.0
BASE_BYTES = 600 * 2**20
# Files of a control group in version 2 and in version 1, and the name of the file cache in `memory.stat`, which the
# system gives up when memory runs short.
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def needed_memory(weights: Path) -> int:
    """Bytes that an engine with these weights needs, about."""
    files = [weights] if weights.is_file() else weights.iterdir()
    return int(BASE_BYTES + FACTOR * sum(file.stat().st_size for file in files if file.is_file()))


def available_memory(system: Path = Path("/")) -> int | None:
    """Bytes of memory that a new process can get; None if the system does not say so."""
    return min([*_of_machine(system, "MemAvailable"), *(left for _, left in _limits(system))], default=None)


def total_memory(system: Path = Path("/")) -> int | None:
    """Bytes of memory, used or not, of the machine or the container; None if the system does not say so."""
    return min([*_of_machine(system, "MemTotal"), *(limit for limit, _ in _limits(system))], default=None)


def memory_to_plan_with(share_of: int, system: Path = Path("/")) -> int:
    """Bytes that an engine plans with for parked streams; 0 if the system does not say. Engines that share a device
    start one after the other, and plan with the same number, so that each can replace another: the memory of the whole
    machine, used or not."""
    total, available = total_memory(system) or 0, available_memory(system) or 0
    return available if share_of == 1 else min(total, available * share_of)


def _of_machine(system: Path, name: str) -> list[int]:
    lines = _read(system / "proc/meminfo").splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def _limits(system: Path) -> list[tuple[int, int]]:
    """Every limit on this process, of its control groups and of those above them, and what is left of it."""
    limits = []
    for line in _read(system / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in FILES:
            continue
        most, used, cache = FILES[controllers]
        group = Path(path.lstrip("/"))
        for folder in [system / "sys/fs/cgroup" / controllers / above for above in (group, *group.parents)]:
            limit, usage = _read(folder / most).strip(), _read(folder / used).strip()
            if limit.isdigit() and usage.isdigit():
                stat = dict(entry.split()[:2] for entry in _read(folder / "memory.stat").splitlines())
                limits.append((int(limit), max(0, int(limit) - int(usage) + int(stat.get(cache, 0)))))
    return limits


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
