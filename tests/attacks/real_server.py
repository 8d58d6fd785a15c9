"""The server as its users have it: `tickertape serve` as a process, a real model in an engine process of its own.

What a test wants to know of it comes from outside: its log, `/capacity`, `/metrics`, and what the system says about its
processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.addresses import Addresses

GOOD_KEY = "the-key-of-the-good-client"
BAD_KEY = "the-key-of-the-attacker"
OTHER_KEY = "the-key-of-somebody-else"
MOST_VIEWERS = 200
# What all gateways of the server would sign with.
SIGNING_SECRET = "what-tokens-are-signed-with"
# Everything else is as it comes. Two seconds for a request head, and a session that waits to be resumed for three, are
# there so that a test does not have to wait longer.
SETTINGS = {
    "auth.keys": ",".join((GOOD_KEY, BAD_KEY, OTHER_KEY)),
    "auth.secret": SIGNING_SECRET,
    "server.handshake_s": "2",
    "server.stream_hosts": "127.0.0.1",
    "webhooks.hosts": "127.0.0.1:*",
    "webhooks.per_session": "true",
    "webhooks.secret": "what-webhooks-are-signed-with",
    "webhooks.timeout_s": "1",
    "webhooks.retry_s": "5",
    "webrtc.connect_s": "2",
    "session.resume_s": "3",
    "limits.max_load": "0",
    "session.stall_s": "0",
    "model.name": "moonshine-tiny",
    "model.threads": "1",
    "limits.upload_bytes": str(4 * 1024 * 1024),
    "limits.viewers": str(MOST_VIEWERS),
}
# The server itself, with an event loop that writes down how long it was held.
TIMED_SERVER = Path(__file__).parent / "timed_server.py"
# A server without keys that is soon full: a place that is not given back is missed.
FEW_SESSIONS = 8
WITHOUT_KEYS = {
    "auth.keys": "",
    "limits.max_sessions": str(FEW_SESSIONS),
    "limits.sessions_per_key": str(FEW_SESSIONS),
}
START_S = 120.0
STOP_S = 30.0
SAMPLING_S = 0.02


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of the two processes, and what decoders have for themselves."""

    gateway: int
    engine: int
    decoders: int = 0

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.gateway - other.gateway, self.engine - other.engine, self.decoders - other.decoders)


@dataclass(frozen=True, slots=True)
class Hold:
    """A time in which the gateway's event loop was blocked. See `timed_server`."""

    at: float = 0.0
    wall_ms: float = 0.0
    # Processor time of the loop, of other threads of the gateway, and of the callback that took the largest part.
    loop_ms: float = 0.0
    threads_ms: float = 0.0
    callbacks: int = 0
    longest: str = "nothing"
    longest_ms: float = 0.0
    longest_wall_ms: float = 0.0

    @property
    def ms(self) -> float:
        """How long a single callback held the loop, or a thread that may have kept the interpreter's lock. Not the time
        in which other processes had the processors, and not that of several clients who came at once."""
        return max(self.longest_ms, min(self.wall_ms - self.loop_ms, self.threads_ms))

    @property
    def away_ms(self) -> float:
        """How long the gateway's event loop was blocked, also by several clients in turn."""
        return min(self.wall_ms, self.loop_ms + self.threads_ms)

    def __str__(self) -> str:
        by = self.longest if self.longest_ms == self.ms else "another thread"
        return f"{self.ms:.1f} ms by {by} (in all {self.away_ms:.1f} ms for {self.callbacks} callbacks)"


@dataclass(slots=True)
class RealServer(Addresses):
    """A server that is ready."""

    process: subprocess.Popen[str]
    port: int
    engine_pid: int
    log_path: Path
    holds_path: Path

    def engine_is_the_same(self) -> bool:
        return _engine_of(self.process.pid) == self.engine_pid

    def memory(self, decoders: bool = False) -> Memory:
        """Decoders come and go, and take a while to find."""
        found = _decoder_bytes(self) if decoders else 0
        return Memory(resident_bytes(self.process.pid), resident_bytes(self.engine_pid), found)

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def capacity(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get("/capacity"))
        return found

    def metric(self, name: str) -> float:
        """A metric without labels, or the sum over its labels."""
        lines = re.findall(rf"^tickertape_{name}(?:{{.*}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, lines))

    def log_lines(self) -> list[str]:
        """The log so far, cut at ends of lines as a terminal or a collector of logs would, and nowhere else."""
        return self.log_path.read_text(errors="replace").split("\n")[:-1]

    def complaints(self) -> list[str]:
        """Lines of the log that say that something broke."""
        return [
            line for line in self.log_lines() if re.match(r"\S+ \S+ (ERROR|CRITICAL) |ERROR|CRITICAL|Traceback", line)
        ]

    def longest_hold(self, since: float = 0.0, until: float = float("inf")) -> Hold:
        """The longest hold of the gateway's event loop that ended between two moments."""
        holds = [
            Hold(**json.loads(line))
            for line in self.holds_path.read_text().splitlines(keepends=True)
            if line[-1] == "\n"
        ]
        return max((hold for hold in holds if since <= hold.at <= until), key=lambda hold: hold.ms, default=Hold())

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.http + path, timeout=30) as answer:
            text: str = answer.read().decode()
        return text


@contextmanager
def real_server(source: Path | None = None, settings: dict[str, str] | None = None) -> Iterator[RealServer]:
    """Start it and wait until it is ready. `source` is the checkout to run, if it is not this one."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TICKERTAPE_") or name == "TICKERTAPE_CACHE"
    }
    environment["PYTHONPATH"] = str(source or Path(__file__).parents[2])
    flags = [part for key, value in {**SETTINGS, **(settings or {})}.items() for part in (_flag(key), value)]
    with tempfile.TemporaryDirectory() as folder:
        log_path, holds_path = Path(folder) / "log", Path(folder) / "holds"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", str(TIMED_SERVER), str(holds_path), "serve", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=environment["PYTHONPATH"],
            )
        try:
            yield RealServer(process, _port(process, log_path), _engine_of(process.pid), log_path, holds_path)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def watched_memory(server: RealServer) -> Iterator[list[Memory]]:
    """Fills a list with what the processes held, all the while."""
    seen = [server.memory()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLING_S):
            seen.append(server.memory(decoders=len(seen) % 10 == 0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        seen.append(server.memory())


def peak_growth(seen: list[Memory]) -> Memory:
    """How far the processes went above what they held at the start."""
    return Memory(
        max(m.gateway for m in seen) - seen[0].gateway,
        max(m.engine for m in seen) - seen[0].engine,
        max(m.decoders for m in seen),
    )


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _decoder_bytes(server: RealServer) -> int:
    """Of the program that forks decoders, and of those there are: all children of the gateway but the engine's."""
    engines_parent = _parent(server.engine_pid)
    programs = [pid for pid in _below(server.process.pid) if pid != engines_parent]
    return sum(private_bytes(pid) for program in programs for pid in (program, *_below(program)))


def private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _parent(pid: int) -> int:
    try:
        # The name of a process may hold anything; what follows it is a state and the parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _below(pid: int) -> list[int]:
    return _children().get(pid, [])


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _port(process: subprocess.Popen[str], log_path: Path) -> int:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
            return int(found[1])
        if not line:
            break
    raise AssertionError(f"the server did not start:\n{log_path.read_text()}")


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if parent := _parent(int(folder.name)):
            children.setdefault(parent, []).append(int(folder.name))
    return children


def _engine_of(gateway: int) -> int:
    """The engine is forked from the process that has imported its modules, and has no children itself."""
    children = _children()
    found = [pid for child in children.get(gateway, []) for pid in children.get(child, [])]
    return max(found, key=resident_bytes, default=0)
