"""`tickertape fleet` without a cluster: what it says when something is missing, and its table."""

from __future__ import annotations

import os
import socket
import time
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fleet.cluster import connect
from fleet.cluster.connect import check_ray
from fleet.plan import read_plan
from fleet.state import FleetError
from realtime import cli
from realtime.commands import fleet
from realtime.commands.fleet import screen


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)


def fleet_file(folder: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = folder / "fleet.toml"
    path.write_text(f'cluster = "127.0.0.1:{port}"\nstate_folder = "{folder}"\nsecret_file = "secret"\n')
    (folder / "secret").write_text("x" * 40)
    return str(path)


class Manager:
    """Answers one after the other."""

    def __init__(self, *answers: dict[str, bool] | FleetError) -> None:
        self._answers = list(answers)

    def call(self, method: str) -> dict[str, bool]:
        answer = self._answers.pop(0)
        if isinstance(answer, FleetError):
            raise answer
        return answer


def test_a_manager_that_does_not_answer_now_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    away, up = FleetError("the fleet's manager did not answer within 30 s"), {"up": True}
    found = fleet.wait_for(Manager({"up": False}, away, away, up), lambda status: status["up"], 300.0)  # type: ignore[arg-type]
    assert found == up
    with pytest.raises(FleetError):
        fleet.wait_for(Manager(away), lambda status: True, -1.0)  # type: ignore[arg-type]


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, None)
    assert cli.main(["fleet", "status", "--file", fleet_file(tmp_path)]) == 1
    assert "pip install 'tickertape[fleet]'" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["2.9.3", "3.0.0", "2.6.0"])
def test_another_ray_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(FleetError, match=f"Ray {version} is installed here; a fleet was tested with 2.60"):
        check_ray()


def test_the_tested_ray_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "2.60.3")
    check_ray()


@pytest.mark.parametrize("action", [["status"], ["scale", "2"], ["drain", "e1"], ["upgrade"]])
def test_without_a_cluster_it_says_where_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    pretend(monkeypatch, "2.60.0")
    assert cli.main(["fleet", *action, "--file", fleet_file(tmp_path)]) == 1
    assert "start it there with `tickertape fleet up`" in capsys.readouterr().err


def test_down_without_a_cluster_ends_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, "2.60.0")
    assert cli.main(["fleet", "down", "--file", fleet_file(tmp_path)]) == 0
    assert "nothing of the fleet runs on this machine" in capsys.readouterr().out


def test_a_file_that_is_wrong_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("[engine]\nmots = 1")
    assert cli.main(["fleet", "up", str(path)]) == 2
    assert "did you mean 'engine.most'?" in capsys.readouterr().err


def test_the_table_shows_nodes_units_and_trouble() -> None:
    unit = {
        "name": "e1",
        "kind": "engine",
        "node": "n1",
        "port": 5600,
        "state": "serving",
        "generation": 1,
        "busy": 7,
        "load": 0.25,
        "version": "0.1.0",
        "restarts": 2,
        "error": "it ended by itself",
    }
    room = {"sessions": 9, "streams": 7, "streams_free": 3, "share": 0.7, "load": 0.25}
    status = {
        "name": "captions",
        "capacity": room,
        "nodes": [{"name": "n1"}, {"name": "n2"}],
        "drained": ["n2"],
        "units": [unit],
        "waits_for": ["no node has a GPU"],
        "notes": ["e1 starts on n1"],
    }
    console = Console(width=160, record=True, file=StringIO())
    console.print(screen(status))
    text = console.export_text()
    for part in (
        "captions",
        "9 sessions",
        "70% taken",
        "e1",
        "7 streams",
        "25%",
        "0.1.0",
        "it ended",
        "n2",
        "waits: no",
    ):
        assert part in text


def test_a_machine_that_stands_still_is_missed_in_time_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reads these when the head starts; what it does then is measured by `benchmarks.survival fleet`."""
    pretend(monkeypatch, "2.60.0")
    plan = read_plan(Path(fleet_file(tmp_path)))
    # What it sets is gone after the test.
    for name in {**connect.NODE_HEALTH, **connect.cluster_environment(plan)}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_health_check_failure_threshold", "9")
    connect.set_environment(plan)
    period_ms, timeout_ms, misses = (int(os.environ[name]) for name in connect.NODE_HEALTH)
    assert misses == 9
    assert (period_ms + timeout_ms) * int(connect.NODE_HEALTH["RAY_health_check_failure_threshold"]) == 20_000
