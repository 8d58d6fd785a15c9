"""Process supervisors of a fleet: each starts, watches, restarts and drains one engine or gateway.

The process is `tickertape engine` (`EngineSupervisor`) or `tickertape serve` (`GatewaySupervisor`). Supervisors do not
use Ray: `SupervisorActor` in `fleet/cluster/actors.py` runs one on the node of its process; its thread calls `step`,
and the manager calls `report` and `drain`. The supervisor of a gateway also writes the file with the table of engines
that the gateway reads.

A process outlives its supervisor: `Records` keeps a record of each process on the node's disk, and the next supervisor
of the same name finds the process by it and continues with it. The head of Ray is started and recorded in the same way
(`fleet/cluster/connect.py`). Run as a program (`python -m fleet.supervisors LOG PROGRAM ...`) this module starts one
process and prints its id. So the process is no child of the supervisor, and a Ray worker that kills its children when
it ends does not kill it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.fleet_secret import fingerprint
from fleet.plan import FleetPlan
from fleet.state import FleetError, Kind, Table, Unit, UnitState, replace_file, reported_by_others, write_table

# A log larger than this at a start is renamed to NAME.log.1.
LARGE_LOG_BYTES = 10_000_000
# Timeout for the start of a detached process.
LAUNCH_S = 60.0
# Bytes at the end of a log in which its last line is found.
TAIL_BYTES = 4096
# Fields of /proc/PID/stat after the program's name: the state, and the start time of the process in clock ticks.
_STATE, _BEGAN = 0, 19


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that a supervisor needs to continue with a process that it did not start."""

    name: str
    kind: str
    port: int
    generation: int
    pid: int
    # Start time in clock ticks: process ids are reused, and this identifies the process.
    began: int
    is_draining: bool = False
    restarts: int = 0
    # The GPUs of the process (CUDA_VISIBLE_DEVICES): a restart must not take those of another engine.
    gpus: str | None = None

    def unit(self, node: str) -> Unit:
        state = UnitState.DRAINING if self.is_draining else UnitState.STARTING
        return Unit(self.name, Kind(self.kind), node, self.port, self.generation, state)


def start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks; None if it does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[_STATE] in "ZX" else int(fields[_BEGAN])


def is_running(record: Record) -> bool:
    return start_ticks(record.pid) == record.began


def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> tuple[int, int]:
    """Starts a detached process. Returns its process id and start time in clock ticks. Raises FleetError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.is_file() and log.stat().st_size > LARGE_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    starter = [sys.executable, "-m", "fleet.supervisors", str(log), *command]
    done = subprocess.run(starter, env=dict(environment), capture_output=True, text=True, timeout=LAUNCH_S)
    if done.returncode:
        raise FleetError(f"cannot start {command[0]}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    pid = int(done.stdout)
    # A process that has ended already gets the start time 0, so that `is_running` is False for it.
    return pid, start_ticks(pid) or 0


def send(record: Record, number: signal.Signals) -> None:
    """Sends a signal to the process, unless it has ended and another process has its id now."""
    if is_running(record):
        try:
            os.kill(record.pid, number)
        except ProcessLookupError:
            pass


def kill_process_group(record: Record) -> None:
    """Kills the process and its children: it is the leader of its process group."""
    if is_running(record):
        try:
            os.killpg(record.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without Ray's variables: neither its token nor its limit on threads."""
    return {
        name: text for name, text in environment.items() if not name.startswith("RAY_") and name != "OMP_NUM_THREADS"
    }


class Records:
    """The records of one node, one file each. A record is written before a signal is sent to its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def last_line(self, name: str) -> str:
        """The last line of a process's log."""
        try:
            with self.log_of(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "its log is empty"

    def write(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(record.name)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(record)))
        os.replace(new, path)

    def read(self, name: str) -> Record | None:
        try:
            return Record(**json.loads(self._path(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def running(self) -> list[Record]:
        """The records of running processes; records of ended processes are deleted."""
        found = []
        for path in sorted(self.folder.glob("*.unit")):
            record = self.read(path.stem)
            if record is not None and is_running(record):
                found.append(record)
            else:
                path.unlink(missing_ok=True)
        return found

    def note_draining(self, record: Record) -> Record:
        record = replace(record, is_draining=True)
        self.write(record)
        return record

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.unit"


# Supervisors

# Seconds before a process that ended by itself is started again: after a stable run, and at most. Each shorter run
# doubles the wait.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
# A run is stable after this many seconds.
STABLE_S = 60.0
# Seconds that a process has to end after its drain time, before it is killed.
GRACE_S = 15.0
# The variable with which Ray assigns GPUs to its workers.
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """The node of a supervisor."""

    node: str
    # The address at which other machines reach the node.
    host: str
    # The fingerprint of the head's secret, which the node's secret must have too.
    fingerprint: str


class Supervisor:
    """Supervises one process: the common part of the supervisors of engines and gateways. Safe for two threads."""

    def __init__(self, unit: Unit, plan: FleetPlan, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self.unit = unit
        self.plan = plan
        self.place = place
        self._clock = clock
        self._lock = threading.RLock()
        self._records = Records(plan.node_folder(place.node))
        # `node` or `port` if the process cannot run because of it: the manager then tries another one.
        self._blame = ""
        self._error = ""
        self._restarts = 0
        self._gpus = os.environ.get(GPUS)
        self._wait_s = FIRST_WAIT_S
        self._start_at = 0.0
        self._started_at = 0.0
        self._kill_at: float | None = None
        self._has_ended = False
        self._record = self._find_process()
        if self._record is None:
            self._check_place()

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def drain_s(self) -> float:
        raise NotImplementedError

    def observe(self) -> None:
        """Query the running process; called without the lock."""

    def forget(self) -> None:
        """Clear the observations of a process that has ended."""

    def facts(self) -> dict[str, Any]:
        """Fields that this kind of supervisor adds to the report."""
        return {}

    @property
    def serves(self) -> bool:
        return False

    def step(self) -> None:
        """Start, restart or kill the process if it is time for that, then observe it."""
        with self._lock:
            if self._has_ended or self._blame:
                return
            if self._record is not None and not is_running(self._record):
                self._note_loss(self._record)
            elif self._record is None and self._clock() >= self._start_at:
                self._start()
            if self._record is not None and self._kill_at is not None and self._clock() >= self._kill_at:
                kill_process_group(self._record)
            watched = self._record is not None
        if watched:
            self.observe()

    def drain(self) -> None:
        """Make the process accept nothing new and end when it has no streams or sessions. A second call changes
        nothing."""
        with self._lock:
            if self._record is None:
                self._has_ended = True
                return
            if not self._record.is_draining:
                self._record = self._records.note_draining(self._record)
                send(self._record, signal.SIGTERM)
            self._kill_at = self._kill_at or self._clock() + self.drain_s + GRACE_S

    def end(self) -> None:
        """Kill the process and its children at once."""
        with self._lock:
            self._has_ended = True
            if self._record is not None:
                kill_process_group(self._record)
                self._records.remove(self.unit.name)

    def report(self) -> dict[str, Any]:
        with self._lock:
            return {
                "name": self.unit.name,
                "kind": str(self.unit.kind),
                "node": self.place.node,
                "time": time.time(),
                "port": self.unit.port,
                "generation": self.unit.generation,
                "state": str(self._state()),
                "pid": None if self._record is None else self._record.pid,
                "restarts": self._restarts,
                "error": self._error,
                "blame": self._blame,
                **self.facts(),
            }

    def _state(self) -> UnitState:
        if self._has_ended:
            return UnitState.ENDED
        if self._blame:
            return UnitState.FAILED
        if self._record is not None and self._record.is_draining:
            return UnitState.DRAINING
        return UnitState.SERVING if self._record is not None and self.serves else UnitState.STARTING

    def _find_process(self) -> Record | None:
        """The running process of an earlier supervisor of this name, if there is one."""
        record = self._records.read(self.unit.name)
        if record is None or not is_running(record):
            return None
        self._restarts, self._gpus = record.restarts, record.gpus
        if record.is_draining:
            self._kill_at = self._clock() + self.drain_s + GRACE_S
        return record

    def _check_place(self) -> None:
        try:
            secret = self.plan.read_secret()
        except FleetError as error:
            self._blame, self._error = "node", str(error)
            return
        if fingerprint(secret) != self.place.fingerprint:
            text = f"node {self.place.node} has another secret in {self.plan.secret_path} than the head"
            self._blame, self._error = "node", f"{text}: copy the head's file to that node"

    def _start(self) -> None:
        if not _is_free(self.place.host, self.unit.port):
            self._blame, self._error = "port", f"port {self.unit.port} of {self.place.host} is taken by something else"
            return
        log = self._records.log_of(self.unit.name)
        try:
            environment = child_environment(os.environ) | ({} if self._gpus is None else {GPUS: self._gpus})
            pid, since = launch(self.command(), environment, log)
        except FleetError as error:
            self._blame, self._error = "node", str(error)
            return
        self._record = Record(
            self.unit.name,
            str(self.unit.kind),
            self.unit.port,
            self.unit.generation,
            pid,
            since,
            restarts=self._restarts,
            gpus=self._gpus,
        )
        self._records.write(self._record)
        self._started_at = self._clock()

    def _note_loss(self, record: Record) -> None:
        """The process has ended. If it was not drained, it is started again after a wait."""
        self._record = None
        self._records.remove(record.name)
        self.forget()
        if record.is_draining:
            self._has_ended = True
            return
        now = self._clock()
        self._wait_s = FIRST_WAIT_S if now - self._started_at > STABLE_S else min(2 * self._wait_s, LONGEST_WAIT_S)
        self._start_at = now + self._wait_s
        self._restarts += 1
        self._error = f"it ended by itself: {self._records.last_line(record.name)}"


def program(given: tuple[str, ...]) -> list[str]:
    return list(given) or [sys.executable, "-m", "realtime.cli"]


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


class EngineSupervisor(Supervisor):
    """The supervisor of an engine. An engine has no HTTP: gateways report its load."""

    @property
    def drain_s(self) -> float:
        return self.plan.engine.drain_s

    def command(self) -> list[str]:
        address = f"tcp://{self.place.host}:{self.unit.port}"
        settings = ["--config", self.plan.config] if self.plan.config else []
        return [
            *program(self.plan.engine.program),
            "engine",
            *("--listen", address),
            *("--fleet-secret-file", str(self.plan.secret_path)),
            *("--drain-s", f"{self.drain_s:g}"),
            *settings,
        ]


# Timeout of a request to the gateway, in seconds.
REQUEST_TIMEOUT_S = 2.0
# Seconds for the turns of clients that do not resume to finish, in addition to the time for closing sockets.
TURN_END_S = 15.0
# A gateway that listens on all addresses is queried at the loopback address.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_REFUSED = re.compile(r'^tickertape_refused_total\{[^}]*reason="capacity"[^}]*\} (\S+)$', re.MULTILINE)


class GatewaySupervisor(Supervisor):
    """The supervisor of a gateway: writes its table and the fleet's figures, and queries its state over HTTP."""

    # The number of the table that was written last, and the engines that other gateways report.
    _table_number: int | None = None
    _reported_by_others: frozenset[str] = frozenset()
    _capacity: dict[str, Any] | None = None
    _is_ready = False
    _is_up = False
    _uses_tls = False
    # Sessions refused for lack of room since the gateway's start; None before the first answer.
    _refused: int | None = None

    @property
    def drain_s(self) -> float:
        return self.plan.gateway.drain_s + TURN_END_S

    @property
    def table_path(self) -> Path:
        return self.plan.node_folder(self.place.node) / f"{self.unit.name}.table.json"

    @property
    def figures_path(self) -> Path:
        return self.plan.node_folder(self.place.node) / f"{self.unit.name}.fleet.json"

    def command(self) -> list[str]:
        settings = ["--config", self.plan.config] if self.plan.config else []
        return [
            *program(self.plan.gateway.program),
            "serve",
            *("--host", self.plan.gateway.host),
            *("--port", str(self.unit.port)),
            *("--engine-table", str(self.table_path)),
            *("--fleet.figures", str(self.figures_path)),
            *("--fleet.gateway", self.unit.name),
            *("--fleet-secret-file", str(self.plan.secret_path)),
            *("--server.drain-spread-s", f"{self.plan.gateway.drain_s:g}"),
            *settings,
        ]

    def set_table(self, table: Table) -> None:
        write_table(self.table_path, table)
        left = reported_by_others(self.unit.name, table)
        with self._lock:
            self._table_number, self._reported_by_others = int(table["number"]), left

    def set_figures(self, figures: Mapping[str, Any]) -> None:
        """Writes the fleet's figures every time: the age of the file is the age of the figures."""
        replace_file(self.figures_path, json.dumps(figures))

    def observe(self) -> None:
        status, body = self._get("/capacity")
        capacity = _json(body) if status == 200 else None
        ready, _ = self._get("/ready")
        counted, metrics = self._get("/metrics")
        with self._lock:
            self._capacity = capacity
            self._is_ready = ready == 200
            self._is_up |= capacity is not None
            if counted == 200:
                self._refused = sum(int(float(count)) for count in _REFUSED.findall(metrics))

    def forget(self) -> None:
        self._capacity, self._is_ready, self._is_up = None, False, False

    @property
    def serves(self) -> bool:
        return self._is_ready

    def facts(self) -> dict[str, Any]:
        return {
            # None: the supervisor has no table, or its file was removed. Then the manager sends the table again.
            "table": self._table_number if self.table_path.is_file() else None,
            "is_up": self._is_up,
            "capacity": self._without_others_engines(self._capacity),
            "refused": self._refused,
        }

    def _without_others_engines(self, capacity: dict[str, Any] | None) -> dict[str, Any] | None:
        """The figures of the gateway, without the engines that other gateways report."""
        if capacity is None or "engines" not in capacity:
            return capacity
        engines = [engine for engine in capacity["engines"] if engine.get("name") not in self._reported_by_others]
        return capacity | {"engines": engines}

    def _get(self, path: str) -> tuple[int, str]:
        """Returns status and body of the answer; status 0 without an answer."""
        connection = self._connection()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (ssl.SSLError, http.client.HTTPException, ConnectionResetError):
            # A server listens there. It may use the other protocol (http or https), which only its configuration names.
            self._uses_tls = not self._uses_tls
            return 0, ""
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host = _ANY.get(self.plan.gateway.host, self.plan.gateway.host)
        if self._uses_tls:
            return http.client.HTTPSConnection(
                host, self.unit.port, timeout=REQUEST_TIMEOUT_S, context=_unverified_context()
            )
        return http.client.HTTPConnection(host, self.unit.port, timeout=REQUEST_TIMEOUT_S)


def _unverified_context() -> ssl.SSLContext:
    """A TLS context that checks no certificate: it is for the public name, and the gateway is on this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _json(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def main() -> None:
    log, *command = sys.argv[1:]
    # Ray gives its workers a low priority, which engines and gateways must not inherit. Raising it needs a privilege.
    # A higher priority that the operator has set stays.
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
    with open(log, "ab") as file:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    sys.stdout.write(f"{started.pid}\n")


if __name__ == "__main__":
    main()
