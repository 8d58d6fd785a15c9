"""Processes of a benchmark: started together, watched, and ended with all that they started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """A process of the benchmark and all that it starts; ended with it."""

    def __init__(self, name: str, command: list[str], log: Path, **options: Any) -> None:
        self.name = name
        self.log = log
        self._file = log.open("w")
        # A group of its own: workers and forked engines end with it. Whoever reads our output does not wait for them.
        outputs = {"stdout": self._file, "stderr": self._file, **options}
        self.process = subprocess.Popen(command, start_new_session=True, **outputs)

    def cpu_seconds(self) -> float:
        """Of the process and of its descendants that live."""
        return sum(cpu_of(pid) for pid in with_descendants(self.process.pid))

    def check(self) -> None:
        if self.process.poll() is not None:
            tail = self.log.read_text()[-2000:]
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{tail}")

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            self.check()
        return str(line)

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._file.close()


def stat_of(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_of(pid: int) -> float:
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS if fields else 0.0


def with_descendants(pid: int) -> list[int]:
    """By asking all processes for their parents: not every kernel lists children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_of(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def workers_of(parent: int) -> list[int]:
    """Process ids of a server's workers, the oldest first."""
    found = []
    for pid in with_descendants(parent):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "realtime.workers.worker" in command:
            found.append(pid)
    return sorted(found)
