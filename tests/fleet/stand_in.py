"""Stands in for `tickertape` in tests of supervisors: a real process with the same flags, up in a moment.

An engine listens on its port and ends when told to. A gateway answers what supervisors ask for; the engines it shows
are those of its table that accept a connection.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def engine(options: argparse.Namespace) -> None:
    if Path(options.fleet_secret_file).with_name("broken").exists():
        sys.exit("error: this engine does not start")
    address = urlsplit(options.listen)
    with socket.create_server((address.hostname, address.port)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        stopped.wait()


def accept(listening: socket.socket) -> None:
    while True:
        listening.accept()[0].close()


def unwanted(table: Path) -> list[dict[str, Any]]:
    """Engines that the gateway will not have, as a file beside its table says."""
    problem = table.with_name("problem")
    engines = json.loads(table.read_text())["engines"] if problem.exists() else []
    return [{"name": engine["name"], "problem": problem.read_text()} for engine in engines]


def seen(table: Path) -> list[dict[str, Any]]:
    if unwanted(table):
        return []
    try:
        engines = json.loads(table.read_text())["engines"]
    except (OSError, ValueError):
        return []
    shown = []
    for listed in engines:
        address = urlsplit(listed["address"])
        try:
            socket.create_connection((address.hostname, address.port), 1.0).close()
            age: float | None = 0.1
        except OSError:
            age = None
        shown.append({**listed, "streams": 0, "streams_free": 10, "load": 0.0, "version": "1", "beat_age_s": age})
    return shown


def serve(options: argparse.Namespace) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            engines = seen(Path(options.engine_table))
            missing = unwanted(Path(options.engine_table))
            capacity = {"sessions": 0, "engines": engines, "engines_missing": missing}
            body = {"/capacity": capacity, "/ready": {}}.get(self.path, {})
            ready = any(shown["beat_age_s"] is not None for shown in engines)
            self.send_response(503 if self.path == "/ready" and not ready else 200)
            self.end_headers()
            path = Path(options.engine_table).with_name("refused")
            count = path.read_text() if path.exists() else "3"
            line = "tickertape_refused_total"
            refused = f'{line}{{reason="capacity"}} {count}.0\n{line}{{reason="rate"}} 9.0\n'
            self.wfile.write(refused.encode() if self.path == "/metrics" else json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((options.host, options.port), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stopped.wait()


stopped = threading.Event()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stopped.set())
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("what", choices=("engine", "serve"))
for flag in ("--listen", "--fleet-secret-file", "--drain-s", "--config", "--host", "--engine-table"):
    parser.add_argument(flag)
for flag in ("--fleet.figures", "--fleet.gateway", "--server.drain-spread-s"):
    parser.add_argument(flag)
parser.add_argument("--port", type=int)
given = parser.parse_args()
{"engine": engine, "serve": serve}[given.what](given)
