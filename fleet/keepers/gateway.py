"""The keeper of a gateway: writes its table of engines, and reads what it says of itself and of them."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.keepers.keeper import Keeper, program
from fleet.table import Table, write_table, write_whole

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
