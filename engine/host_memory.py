"""Main memory (not GPU memory): how much is free on this machine or in this container, and how much a model needs.

`engine/runner/load.py` asks before it loads a model, `tickertape doctor` when it checks a machine. Reads /proc and the
control groups; functions without state.
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
    machine = [
        int(line.split()[1]) * 1024
        for line in _read(system / "proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    return min(machine + _rooms(system), default=None)


def _rooms(system: Path) -> list[int]:
    """What is left of every limit on this process: of its control groups and of those above them."""
    rooms = []
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
                rooms.append(max(0, int(limit) - int(usage) + int(stat.get(cache, 0))))
    return rooms


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
