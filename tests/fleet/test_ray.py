"""A fleet on a real Ray cluster, with processes that stand in for engines and gateways: run by `make test-fleet`.

One cluster serves the whole file; the tests go through its life in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.supervisors import Record, Records, is_running, kill_process_group, start_ticks
from tests.fleet.conftest import STAND_IN, two_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 300.0
STOPPED_S = 3.0
Told = dict[str, Any]


class Operator:
    """Runs `tickertape fleet` as people do, in a process of its own. It looks often, and for that reads what the
    manager wrote down: a command takes seconds to reach the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        engines, gateways = two_ports()
        program = json.dumps(list(STAND_IN))
        self.head_port = engines % 1000 + 6400
        (folder / "fleet.toml").write_text(
            f'name = "test"\ncluster = "127.0.0.1:{self.head_port}"\nstate_folder = "{folder}/state"\nlook_s = 0.2\n'
            f"[engine]\nmost = 3\ncpus = 0.1\nport = {engines}\ndrain_s = 5\nprogram = {program}\n"
            f"[gateway]\ncpus = 0.1\nport = {gateways}\ndrain_s = 1\nprogram = {program}\n"
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "realtime.cli", "fleet", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)

    def status(self) -> Told:
        """As the manager wrote it down after this moment."""
        called = time.time()
        path = self.folder / "state" / "test" / "status.json"
        return self._soon(lambda: json.loads(path.read_text()) if path.stat().st_mtime > called else None)

    def until(self, wanted: Callable[[Told], bool]) -> Told:
        return self._soon(lambda: status if wanted(status := self.status()) else None)

    @staticmethod
    def _soon(look: Callable[[], Told | None]) -> Told:
        deadline = time.monotonic() + PATIENCE_S
        while (found := look()) is None:
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)
        return found

    @property
    def head(self) -> Record:
        found = Records(self.folder / "state" / "test" / "cluster").read("head")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    operator = Operator(tmp_path_factory.mktemp("fleet"))
    done = operator("up")
    try:
        assert done.returncode == 0, done.stderr
        yield operator
    finally:
        state = operator.folder / "state" / "test"
        for folder in (state / "cluster", *(state / "nodes").glob("*")):
            for record in Records(folder).running():
                kill_process_group(record)


def pids(status: Told) -> dict[str, int]:
    return {unit["name"]: unit["pid"] for unit in status["units"]}


def actors_of(record: Record) -> list[int]:
    """Ray's workers below the head that run our actors."""
    return [*below(record, "ray::SupervisorActor"), *below(record, "ray::ManagerActor")]


def below(record: Record, program: str) -> list[int]:
    """Processes of the head's session whose program has a name that begins so."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "cmdline").read_text()
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, ValueError):
            continue
        if session == record.pid and Path(name.partition("\0")[0]).name.startswith(program):
            found.append(int(path.name))
    return found


@contextmanager
def node_that_waits(head_port: int) -> Iterator[None]:
    """Looks to Ray like another node on the head's machine, which is still there when the head is not."""
    from ray._private.utils import read_ray_address

    last_head = read_ray_address()
    assert last_head.endswith(f":{head_port}")
    command = ["raylet", "-c", "read anything", f"--gcs-address={last_head}"]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE):
        yield


def test_a_fleet_is_up_and_runs_beside_ray(fleet: Operator) -> None:
    done = fleet("status", "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert {unit["kind"]: unit["state"] for unit in status["units"]} == {"engine": "serving", "gateway": "serving"}
    assert status["capacity"]["streams_possible"] == 10
    for pid in pids(status).values():
        assert "RAY_" not in Path(f"/proc/{pid}/environ").read_text()
        # A lower number is a higher priority; Ray gives its own workers a low one. These tests may have a high one.
        assert os.getpriority(os.PRIO_PROCESS, pid) <= max(0, os.getpriority(os.PRIO_PROCESS, 0))


def test_a_look_is_one_call_to_each_supervisor(fleet: Operator) -> None:
    """Whatever the fleet carries: nothing else calls."""
    first = fleet.status()
    second = fleet.until(lambda status: status["looks"] >= first["looks"] + 3)
    looks = second["looks"] - first["looks"]
    assert second["actor_calls"] - first["actor_calls"] == looks * len(second["units"])


def test_lost_actors_come_back_to_the_same_processes(fleet: Operator) -> None:
    before = pids(fleet.status())
    killed = actors_of(fleet.head)
    assert len(killed) == 3
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    after = fleet.until(lambda status: len(status["units"]) == 2 and pids(status) == before)
    assert all(unit["restarts"] == 0 for unit in after["units"])


def test_actors_and_ray_that_are_stopped_and_go_on_change_nothing(fleet: Operator) -> None:
    """Ray misses a node after 20 s; meanwhile, and after it, the same processes run."""
    before = fleet.status()
    stopped = [*actors_of(fleet.head), *below(fleet.head, "raylet")]
    assert len(stopped) == 4
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    after = fleet.until(lambda status: status["looks"] > before["looks"] + 2 and pids(status) == pids(before))
    assert all(unit["restarts"] == 0 and unit["state"] == "serving" for unit in after["units"])
    assert actors_of(fleet.head) == stopped[:3]


def test_scaling_says_what_it_does_and_does_it(fleet: Operator) -> None:
    dry = fleet("scale", "2", "--dry-run")
    assert "1 engines now, 2 wanted (asked for)" in dry.stdout and "start engine e" in dry.stdout
    assert fleet("scale", "9").returncode == 1
    assert fleet("scale", "2").returncode == 0
    fleet.until(lambda status: [unit["state"] for unit in status["units"]] == ["serving"] * 3)


def test_a_drained_engine_is_replaced_and_goes(fleet: Operator) -> None:
    name = next(unit["name"] for unit in fleet.status()["units"] if unit["kind"] == "engine")
    done = fleet("drain", name, "--wait", "120")
    assert done.returncode == 0, done.stderr
    assert name not in pids(fleet.status())
    assert fleet("drain", "e99").returncode == 1


def test_a_head_that_dies_comes_back_and_nothing_that_runs_noticed(fleet: Operator) -> None:
    before = pids(fleet.until(lambda status: [unit["state"] for unit in status["units"]] == ["serving"] * 3))
    head = fleet.head
    kill_process_group(head)
    down = fleet("status")
    assert down.returncode == 1 and "no cluster answers" in down.stderr
    assert all(map(start_ticks, before.values()))
    with node_that_waits(fleet.head_port):
        done = fleet("up")
    assert done.returncode == 0, done.stderr
    after = fleet.until(lambda status: pids(status) == before)
    assert after["engines_wanted"] == 2 and all(unit["restarts"] == 0 for unit in after["units"])


def test_another_secret_is_not_let_in(fleet: Operator, tmp_path: Path) -> None:
    text = (fleet.folder / "fleet.toml").read_text()
    (tmp_path / "secret").write_text("another" * 10)
    other = tmp_path / "fleet.toml"
    other.write_text('secret_file = "secret"\n' + text)
    done = fleet("status", "--file", str(other))
    assert done.returncode == 1 and "has another secret" in done.stderr, done.stderr


def test_another_fleet_on_the_same_cluster_is_another(fleet: Operator, tmp_path: Path) -> None:
    """It has its own name, and knows nothing of ours; asking changes nothing."""
    before = pids(fleet.status())
    secret = fleet.folder / "state" / "test" / "secret"
    text = (
        (fleet.folder / "fleet.toml").read_text().replace('name = "test"', f'name = "other"\nsecret_file = "{secret}"')
    )
    other = tmp_path / "fleet.toml"
    other.write_text(text)
    done = fleet("drain", "e1", "--file", str(other))
    assert done.returncode == 1 and "has no fleet 'other'" in done.stderr, done.stderr
    assert pids(fleet.status()) == before


def test_a_fleet_goes_down_and_leaves_nothing(fleet: Operator) -> None:
    running = pids(fleet.status())
    head = fleet.head
    done = fleet("down")
    assert done.returncode == 0 and "its cluster too" in done.stdout, done.stderr
    assert not any(map(start_ticks, running.values()))
    assert not is_running(head)
