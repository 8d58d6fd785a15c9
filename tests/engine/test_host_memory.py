"""The free memory is what the machine has and what the container may have, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.host_memory import BASE_BYTES, available_memory, memory_to_plan_with, needed_memory, total_memory

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with 16 GiB of free memory."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {20 * 2**20} kB\nMemAvailable: {16 * 2**20} kB\n")
    return tmp_path


def write(system: Path, name: str, text: object) -> None:
    file = system / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_without_a_limit_it_is_the_memory_of_the_machine(system: Path, tmp_path: Path) -> None:
    assert available_memory(system) == 16 * GIB
    write(system, "proc/self/cgroup", "0::/service")
    write(system, "sys/fs/cgroup/service/memory.max", "max")
    write(system, "sys/fs/cgroup/service/memory.current", GIB)
    assert available_memory(system) == 16 * GIB
    assert available_memory(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("group", ["", "service", "slice/service"])
def test_a_container_has_its_own_limit_or_that_of_a_group_above(system: Path, group: str) -> None:
    write(system, "proc/self/cgroup", "3:cpu:/x\n0::/slice/service")
    write(system, f"sys/fs/cgroup/{group}/memory.max", 2 * GIB)
    write(system, f"sys/fs/cgroup/{group}/memory.current", GIB)
    expected = 16 * GIB if group == "service" else GIB
    assert available_memory(system) == expected
    write(system, f"sys/fs/cgroup/{group}/memory.stat", f"anon 5\ninactive_file {GIB // 2}")
    assert available_memory(system) == max(expected, GIB + GIB // 2), "the file cache is given up"


def test_the_older_version_of_control_groups(system: Path) -> None:
    write(system, "proc/self/cgroup", "4:memory:/docker/abc\n0::/")
    # In the container the group is at the root.
    write(system, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    write(system, "sys/fs/cgroup/memory/memory.usage_in_bytes", 3 * GIB)
    assert available_memory(system) == 0
    write(system, "sys/fs/cgroup/memory/memory.stat", f"inactive_file 0\ntotal_inactive_file {2 * GIB}")
    assert available_memory(system) == GIB


def test_engines_that_share_a_device_plan_with_the_same_memory(system: Path, tmp_path: Path) -> None:
    assert total_memory(system) == 20 * GIB
    write(system, "proc/self/cgroup", "0::/")
    write(system, "sys/fs/cgroup/memory.max", 10 * GIB)
    write(system, "sys/fs/cgroup/memory.current", 4 * GIB)
    assert (total_memory(system), available_memory(system)) == (10 * GIB, 6 * GIB)
    assert (memory_to_plan_with(1, system), memory_to_plan_with(2, system)) == (6 * GIB, 10 * GIB)
    assert total_memory(tmp_path / "elsewhere") is None and memory_to_plan_with(1, tmp_path / "elsewhere") == 0


def test_a_model_needs_more_than_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert needed_memory(tmp_path) == needed_memory(tmp_path / "model.safetensors") == BASE_BYTES + 3000
