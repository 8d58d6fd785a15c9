"""Supervisors with real processes: they start, restart, adopt, drain and end them, and say what is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fleet import supervisors
from fleet.plan import FleetPlan
from fleet.supervisors import GatewaySupervisor, Place, Records, Supervisor, child_environment, start_ticks
from tests.fleet.conftest import until

Make = Callable[..., Supervisor]


def stepped(supervisor: Supervisor, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        supervisor.step()
        report = supervisor.report()
        return report if wanted(report) else None

    found: dict[str, Any] = until(look, "the report")
    return found


def listens(supervisor: Supervisor) -> bool:
    try:
        socket.create_connection((supervisor.place.host, supervisor.unit.port), 1.0).close()
        return True
    except OSError:
        return False


def test_an_engine_is_nobodys_child_and_is_told_nothing_of_ray(
    supervisor_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pid = stepped(supervisor_of(), lambda report: report["pid"])["pid"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid() and os.getsid(pid) == pid
    environment = Path(f"/proc/{pid}/environ").read_text()
    assert "RAY_" not in environment and "OMP_NUM_THREADS" not in environment and "PATH=" in environment
    assert child_environment({"RAY_X": "1", "A": "2"}) == {"A": "2"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process a higher priority")
@pytest.mark.parametrize(("given", "has"), [(15, 0), (0, 0), (-5, -5)])
def test_a_low_priority_is_taken_off_and_a_high_one_stays(tmp_path: Path, given: int, has: int) -> None:
    """A lower number is a higher priority. The first is what Ray gives its workers."""
    nice = [
        sys.executable,
        "-c",
        f"import os, sys; os.setpriority(os.PRIO_PROCESS, 0, {given}); os.execv(*sys.argv[1:2], sys.argv[1:])",
    ]
    program = [sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)"]
    log = tmp_path / "log"
    subprocess.run(
        [*nice, sys.executable, "-m", "fleet.supervisors", str(log), *program], check=True, capture_output=True
    )
    until(lambda: log.read_text() == f"{has}\n", "the program's priority")


def test_a_second_supervisor_goes_on_with_the_process_of_the_first(supervisor_of: Make) -> None:
    pid = stepped(supervisor_of(), lambda report: report["pid"])["pid"]
    again = supervisor_of()
    assert again.report()["pid"] == pid
    again.step()
    assert again.report()["pid"] == pid


def test_a_process_with_a_used_again_id_is_not_ours(supervisor_of: Make, plan: FleetPlan) -> None:
    stepped(supervisor_of(), lambda report: report["pid"])
    records = Records(plan.node_folder("n1"))
    (record,) = records.running()
    records.write(replace(record, began=record.began - 1))
    assert supervisor_of().report()["pid"] is None
    records.write(record)


def test_a_process_that_dies_is_started_again(supervisor_of: Make) -> None:
    supervisor = supervisor_of()
    pid = stepped(supervisor, lambda report: report["pid"])["pid"]
    os.kill(pid, signal.SIGKILL)
    report = stepped(supervisor, lambda report: report["restarts"] == 1 and report["pid"] not in (None, pid))
    assert "it ended by itself" in report["error"] and report["state"] == "starting"
    until(lambda: listens(supervisor), "listening")


def test_one_that_cannot_start_is_tried_more_and_more_slowly_and_says_why(
    supervisor_of: Make, plan: FleetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "FIRST_WAIT_S", 0.01)
    plan.secret_path.with_name("broken").touch()
    supervisor = supervisor_of()
    report = stepped(supervisor, lambda report: report["restarts"] >= 2)
    assert report["error"] == "it ended by itself: error: this engine does not start"
    assert supervisor._wait_s == 0.01 * 2 ** report["restarts"] or supervisor._wait_s > 0.02


def test_drain_ends_the_process_and_the_record(supervisor_of: Make, plan: FleetPlan) -> None:
    supervisor = supervisor_of()
    stepped(supervisor, lambda report: report["pid"])
    until(lambda: listens(supervisor), "listening")
    supervisor.drain()
    assert supervisor.report()["state"] == "draining"
    assert supervisor_of().report()["state"] == "draining"
    stepped(supervisor, lambda report: report["state"] == "ended")
    assert not Records(plan.node_folder("n1")).running()
    supervisor.step()
    assert supervisor.report()["pid"] is None


def test_one_that_does_not_end_in_time_is_killed(supervisor_of: Make, plan: FleetPlan) -> None:
    supervisor = supervisor_of(plan=replace(plan, engine=replace(plan.engine, drain_s=0.0)))
    pid = stepped(supervisor, lambda report: report["pid"])["pid"]
    os.kill(pid, signal.SIGSTOP)
    now = 100.0
    supervisor._clock = lambda: now
    supervisor.drain()
    supervisor.step()
    assert start_ticks(pid) is not None
    now += supervisors.GRACE_S
    stepped(supervisor, lambda report: report["state"] == "ended")
    assert start_ticks(pid) is None


def test_a_port_that_is_taken_is_the_fleets_to_change(supervisor_of: Make) -> None:
    supervisor = supervisor_of()
    with socket.create_server((supervisor.place.host, supervisor.unit.port)):
        supervisor.step()
    report = supervisor.report()
    assert (report["state"], report["blame"]) == ("failed", "port") and "taken by something else" in report["error"]


def test_another_secret_keeps_a_node_out(supervisor_of: Make, plan: FleetPlan) -> None:
    supervisor = supervisor_of(place=Place("n1", "127.0.0.1", "another"))
    supervisor.step()
    report = supervisor.report()
    assert (report["state"], report["blame"], report["pid"]) == ("failed", "node", None)
    assert report["error"].startswith(f"node n1 has another secret in {plan.secret_path} than the head")


def test_a_gateway_gets_its_table_and_says_what_it_sees(supervisor_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gateway = supervisor_of("e1"), supervisor_of("g1")
    assert isinstance(gateway, GatewaySupervisor)
    address = f"tcp://127.0.0.1:{engine.unit.port}"
    gateway.set_table({"number": 1, "engines": [{"name": "e1", "address": address, "state": "serving"}]})
    assert json.loads(gateway.table_path.read_text())["number"] == 1
    stepped(gateway, lambda report: report["capacity"] is not None)
    assert gateway.report()["state"] == "starting"
    stepped(engine, lambda report: report["pid"])
    report = stepped(gateway, lambda report: report["state"] == "serving")
    assert report["capacity"]["engines"][0]["name"] == "e1" and report["refused"] == 3
    # The old answer does not count for the next process, which cannot take sessions yet.
    os.kill(report["pid"], signal.SIGKILL)
    monkeypatch.setattr(gateway, "observe", lambda: None)
    again = stepped(gateway, lambda now: now["pid"] not in (None, report["pid"]))
    assert (again["state"], again["capacity"]) == ("starting", None)


def test_a_gateway_with_a_certificate_is_understood_too(supervisor_of: Make, tmp_path: Path) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"sessions": 5}')

        def log_message(self, *_: object) -> None:
            pass

    gateway = supervisor_of("g1")
    assert isinstance(gateway, GatewaySupervisor)
    key = tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=other.example"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(key) + ".cert"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(key) + ".cert", key)
    with ThreadingHTTPServer(("127.0.0.1", gateway.unit.port), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def look() -> bool:
            gateway.observe()
            return gateway.facts()["capacity"] == {"sessions": 5}

        until(look, "an answer")
        server.shutdown()
