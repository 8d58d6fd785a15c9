"""Starts and stops a whole server for a benchmark: one engine process and gateway processes.

`Server` owns the processes of one server and measures their processor time; `Child` is any process with its
descendants.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measuring import RunFailed, cpu_seconds, read_process, with_descendants
from engine.options import DEFAULT_MODEL

READY_S = 180.0
SHOWN_WARNINGS = 20
# In what an engine logs when it is ready.
LISTENS = "listens on"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="real weights: a name that `tickertape pull` knows, or a path")
    parser.add_argument("--voxtral", action="store_true", help="a Voxtral Realtime with random weights")
    parser.add_argument("--whisper", metavar="SIZE", help="a Whisper of this size with random weights")
    parser.add_argument("--null", action="store_true", help="no model: measures the cost of the gateways")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="fp8", help="keys and values of Voxtral")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--engines", type=int, default=1, help="engines that share the device")
    parser.add_argument("--cut-silence", type=float, metavar="S", help="model.cut_silence_s of Voxtral")
    parser.add_argument("--parked-share", type=float, metavar="SHARE", help="model.parked_share of Voxtral")
    parser.add_argument("--workers", type=int, help="gateway processes; default: the server chooses")
    parser.add_argument("--clients", type=int, default=4, help="processes of clients")
    parser.add_argument("--joins-per-second", type=float, default=50.0)
    parser.add_argument("--audio", type=Path, help="a WAV file of speech; default: made-up voices")


def use_default_model(options: argparse.Namespace) -> None:
    """Unless another model, or none, is asked for."""
    if not (options.null or options.voxtral or options.whisper or options.model):
        options.model = DEFAULT_MODEL


def wait_until_ready(origin: str, *children: Child) -> None:
    """Until `/ready` answers. Raises RunFailed if a process ends before, or after `READY_S`."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{origin}/ready", timeout=2):
            return
        for child in children:
            child.check()
        time.sleep(0.1)
    raise RunFailed(f"{origin} was not ready within {READY_S:.0f} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Child:
    """A process with its descendants; they are ended together."""

    def __init__(self, name: str, command: list[str], log: Path, **settings: Any) -> None:
        """`settings` are those of `Popen`: `cwd`, `env`."""
        self.name = name
        self._command, self._log, self._settings = command, log, settings
        self.start()

    def start(self) -> None:
        """Start the command, also again after `kill`."""
        # Its own process group, so that workers and forked engines are ended with it.
        with self._log.open("a") as file:
            self._process = subprocess.Popen(
                self._command, start_new_session=True, stdout=file, stderr=file, **self._settings
            )
        self.pid = self._process.pid

    def check(self) -> None:
        if self._process.poll() is not None:
            raise RunFailed(f"{self.name} ended with {self._process.returncode}:\n{self.said()[-2000:]}")

    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def warnings(self) -> list[str]:
        """The last lines that it has logged as warnings or errors."""
        lines = self.said().splitlines() if self._log.exists() else []
        return [line for line in lines if "WARNING" in line or "ERROR" in line][-SHOWN_WARNINGS:]

    def kill(self) -> None:
        if self._process.poll() is not None:
            return
        # Workers have sessions of their own.
        for pid in with_descendants(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, patience_s: float = 5.0) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.kill()


class Server:
    """Engines and `tickertape serve` by the options, ready when the constructor returns; a context manager that stops
    them. With `counts_streams_only` as many sessions are admitted as the engine has room for, whatever its load. One
    more engine can be started later, and drained."""

    def __init__(self, options: argparse.Namespace, counts_streams_only: bool) -> None:
        # SIGTERM raises here, so that a stopped benchmark leaves its `with` blocks and ends the processes.
        self._on_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        self._children: list[Child] = []
        # How often the first engine was started.
        self._starts = 1
        self._addresses = [f"ipc://{self._folder.name}/engine-{number}" for number in range(options.engines + 1)]
        place = f"127.0.0.1:{free_port()}"
        self._origin, self.url = f"http://{place}", f"ws://{place}/v1/realtime"
        serve = ["realtime.cli", "serve", "--engine", ",".join(self._addresses), "--port", place.rpartition(":")[2]]
        serve += ["--workers", str(options.workers)] if options.workers else []
        serve += ["--limits.max-load", "0"] if counts_streams_only else []
        try:
            command = engine_command(options, options.max_streams)
            engines = self._addresses[:-1]
            self.engines = [self._start("engine", [*command, "--listen", address]) for address in engines]
            self.gateway = self._start("gateway", serve)
            wait_until_ready(self._origin, *self._children)
            self._wait_for_engines(len(engines))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_second_engine(self, options: argparse.Namespace, streams: int) -> None:
        """Start an engine with room for these streams, and wait until the gateway uses it."""
        command = engine_command(options, streams, drains=True)
        self.second_engine = self._start("second engine", [*command, "--listen", self._addresses[-1]])
        self._wait_for_engines(len(self._addresses))

    def _wait_for_engines(self, count: int) -> None:
        """Wait until the gateway uses this many. Raises RunFailed."""
        deadline = time.monotonic() + READY_S
        while len(self.capacity()["engines"]) < count:
            self.check()
            if time.monotonic() > deadline:
                raise RunFailed(f"not all of {count} engines were ready within {READY_S:.0f} s")
            time.sleep(0.1)

    def restart_engine(self) -> None:
        """Kill the first engine and start it again."""
        self.engines[0].kill()
        self.engines[0].start()
        self._starts += 1

    def wait_for_restarted_engine(self) -> None:
        """Wait until the first engine has started again. Raises RunFailed."""
        deadline = time.monotonic() + READY_S
        while self.engines[0].said().count(LISTENS) < self._starts:
            self.check()
            if time.monotonic() > deadline:
                raise RunFailed(f"the engine was not ready within {READY_S:.0f} s")
            time.sleep(0.1)

    def drain_second_engine(self) -> None:
        """Let its sessions move to the first engine."""
        os.kill(self.second_engine.pid, signal.SIGTERM)

    def _start(self, name: str, command: list[str]) -> Child:
        self._children.append(Child(name, [sys.executable, "-m", *command], Path(self._folder.name) / f"{name}.log"))
        return self._children[-1]

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(self._origin + path, timeout=5) as answer:
            return str(answer.read().decode())

    def capacity(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._read("/capacity"))
        return told

    def counter(self, name: str) -> float:
        """A counter of the gateway's metrics."""
        lines = self._read("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tickertape_{name}_total"))

    def cpu_seconds(self) -> dict[str, float]:
        """Processor seconds of the engines, and of each process of the gateway."""
        engine = sum(cpu_seconds(pid) for engine in self.engines for pid in with_descendants(engine.pid))
        return {"engine": engine, **{f"gateway {pid}": cpu_seconds(pid) for pid in with_descendants(self.gateway.pid)}}

    def workers(self) -> list[int]:
        """Process ids of the workers, the oldest first."""
        pids = with_descendants(self.gateway.pid)
        return sorted(pid for pid in pids if "realtime.workers.worker" in read_process(pid, "cmdline"))

    def check(self) -> None:
        for child in self._children:
            child.check()

    def stop(self) -> None:
        for child in reversed(self._children):
            child.stop()
            for line in child.warnings():
                print(f"{child.name}: {line}")
        self._folder.cleanup()
        signal.signal(signal.SIGTERM, self._on_term)


def engine_command(options: argparse.Namespace, streams: int | None, drains: bool = False) -> list[str]:
    """The command of an engine with room for these streams (None: for all that fit). `drains`: on SIGTERM."""
    room = [] if streams is None else [str(streams)]
    if options.model:
        limit = ["--model.max-streams", *room] if room else []
        return ["realtime.cli", "engine", "--model", options.model, *limit]
    command = ["benchmarks.engines", *(["engine"] if drains else []), *(["--max-streams", *room] if room else [])]
    if options.null:
        return command
    if options.whisper:
        command += ["--whisper", options.whisper]
    else:
        command += ["--voxtral", "--kv", options.kv, "--share-of", str(options.engines)]
        command += ["--cut-silence", str(options.cut_silence)] if options.cut_silence is not None else []
        command += ["--parked-share", str(options.parked_share)] if options.parked_share is not None else []
    return [*command, *(["--small"] if options.small else [])]
