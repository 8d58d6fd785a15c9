"""The keeper of one process: starts it, watches it, starts it again, drains it.

`step` does what is due, `report` says how things are; a thread calls the one, the fleet the other. A keeper that comes
back finds the process of the one before it and goes on with it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.keepers.process import (
    Record,
    Records,
    child_environment,
    is_running,
    kill_family,
    launch,
    send,
)
from fleet.plan import FleetPlan
from fleet.secret import fingerprint, read_secret
from fleet.state import FleetError, Table, Unit, UnitState, write_table, write_whole

# Between two starts of a process that ends by itself, at first and at most.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
# A process that ran for so long is well; the next wait is short again.
WELL_S = 60.0
# After the time it may drain for, a process has so long to end.
GRACE_S = 15.0
# Which GPUs a process may use; Ray says so to its workers.
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a keeper works."""

    node: str
    # Where the other machines reach this node.
    host: str
    # What the secret of every node must look like.
    fingerprint: str


class Keeper:
    """The part that engines and gateways have in common. Safe for two threads."""

    def __init__(self, unit: Unit, plan: FleetPlan, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self.unit = unit
        self.plan = plan
        self.place = place
        self._clock = clock
        self._lock = threading.RLock()
        self._records = Records(plan.node_folder(place.node))
        # Why it cannot be: `node` or `port` is to blame, and it is for the fleet to try elsewhere.
        self._blame = ""
        self._error = ""
        self._restarts = 0
        self._gpus = os.environ.get(GPUS)
        self._wait_s = FIRST_WAIT_S
        self._start_at = 0.0
        self._started_at = 0.0
        self._kill_at: float | None = None
        self._has_ended = False
        self._record = self._found()
        if self._record is None:
            self._check_place()

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def drain_s(self) -> float:
        raise NotImplementedError

    def observe(self) -> None:
        """Look at the running process; the lock is not held."""

    def forget(self) -> None:
        """The process that was looked at is gone: what it was like says nothing of the next one."""

    def facts(self) -> dict[str, Any]:
        """What there is to say beside what every keeper says."""
        return {}

    @property
    def serves(self) -> bool:
        return False

    def step(self) -> None:
        with self._lock:
            if self._has_ended or self._blame:
                return
            if self._record is not None and not is_running(self._record):
                self._note_loss(self._record)
            elif self._record is None and self._clock() >= self._start_at:
                self._start()
            if self._record is not None and self._kill_at is not None and self._clock() >= self._kill_at:
                kill_family(self._record)
            watched = self._record is not None
        if watched:
            self.observe()

    def drain(self) -> None:
        """Ask the process to take nothing new and to end when it is empty; asking twice changes nothing."""
        with self._lock:
            if self._record is None:
                self._has_ended = True
                return
            if not self._record.is_draining:
                self._record = self._records.note_draining(self._record)
                send(self._record, signal.SIGTERM)
            self._kill_at = self._kill_at or self._clock() + self.drain_s + GRACE_S

    def end(self) -> None:
        """At once, with everything it started."""
        with self._lock:
            self._has_ended = True
            if self._record is not None:
                kill_family(self._record)
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

    def _found(self) -> Record | None:
        """The process that a keeper of this name left behind, if it runs and is what is wanted now."""
        record = self._records.read(self.unit.name)
        if record is None or not is_running(record):
            return None
        self._restarts, self._gpus = record.restarts, record.gpus
        if record.is_draining:
            self._kill_at = self._clock() + self.drain_s + GRACE_S
        return record

    def _check_place(self) -> None:
        try:
            secret = read_secret(self.plan.secret_path)
        except FleetError as error:
            self._blame, self._error = "node", str(error)
            return
        if fingerprint(secret) != self.place.fingerprint:
            text = f"node {self.place.node} has another secret in {self.plan.secret_path} than the head"
            self._blame, self._error = "node", f"{text}: copy the head's file there"

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
        """The process is gone: it was asked to, or it is started again after a while."""
        self._record = None
        self._records.remove(record.name)
        self.forget()
        if record.is_draining:
            self._has_ended = True
            return
        now = self._clock()
        self._wait_s = FIRST_WAIT_S if now - self._started_at > WELL_S else min(2 * self._wait_s, LONGEST_WAIT_S)
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


# The keeper of an engine. An engine has no HTTP: what it carries is known from the gateways.


class EngineKeeper(Keeper):
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


# The keeper of a gateway: writes its table of engines, and reads what it says of itself and of them.

LOOK_S = 2.0
# Beside the goodbyes, a gateway waits for turns of clients that do not resume.
TURNS_S = 15.0
# Any address of the machine; it is asked for at the one that always works.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_REFUSED = re.compile(r'^tickertape_refused_total\{[^}]*reason="capacity"[^}]*\} (\S+)$', re.MULTILINE)


class GatewayKeeper(Keeper):
    _capacity: dict[str, Any] | None = None
    _is_ready = False
    _speaks_tls = False
    # None until the gateway has said so.
    _refused: int | None = None

    @property
    def drain_s(self) -> float:
        return self.plan.gateway.drain_s + TURNS_S

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

    def take_table(self, table: Table) -> None:
        write_table(self.table_path, table)

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        """Written each time: how old the file is says how old the figures are."""
        write_whole(self.figures_path, json.dumps(figures))

    def observe(self) -> None:
        status, body = self._get("/capacity")
        capacity = _json(body) if status == 200 else None
        ready, _ = self._get("/ready")
        counted, metrics = self._get("/metrics")
        with self._lock:
            self._capacity = capacity
            self._is_ready = ready == 200
            if counted == 200:
                self._refused = sum(int(float(count)) for count in _REFUSED.findall(metrics))

    def forget(self) -> None:
        self._capacity, self._is_ready = None, False

    @property
    def serves(self) -> bool:
        return self._is_ready

    def facts(self) -> dict[str, Any]:
        return {"capacity": self._capacity, "refused": self._refused}

    def _get(self, path: str) -> tuple[int, str]:
        """The status and the text; 0 if nobody answers."""
        connection = self._connection()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (ssl.SSLError, http.client.HTTPException, ConnectionResetError):
            # Somebody is there and speaks the other way; only the configuration knows which.
            self._speaks_tls = not self._speaks_tls
            return 0, ""
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host = _ANY.get(self.plan.gateway.host, self.plan.gateway.host)
        if self._speaks_tls:
            return http.client.HTTPSConnection(host, self.unit.port, timeout=LOOK_S, context=_trusting())
        return http.client.HTTPConnection(host, self.unit.port, timeout=LOOK_S)


def _trusting() -> ssl.SSLContext:
    """The certificate is made for the public name; this is our own process on our own machine."""
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
