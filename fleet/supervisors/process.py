"""Starts detached processes, and keeps a record of each on the node's disk. Used by keepers and for the head of Ray.

A process outlives the keeper that started it; with the record (`Records`) the next keeper finds it. Run as a program
(`python -m fleet.supervisors.process LOG PROGRAM ...`) this module starts one process and prints its id. So the process
is no child of the keeper, and a Ray worker that kills its children when it ends does not kill it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fleet.state import FleetError, Kind, Unit, UnitState

# A log larger than this at a start is renamed to NAME.log.1.
MOST_LOG_BYTES = 10_000_000
LAUNCH_S = 60.0
TAIL_BYTES = 4096
# Fields of /proc/PID/stat after the program's name: the state, and the start time of the process in clock ticks.
_STATE, _BEGAN = 0, 19


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that a keeper needs to continue with a process that it did not start."""

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
    if log.is_file() and log.stat().st_size > MOST_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    starter = [sys.executable, "-m", "fleet.supervisors.process", str(log), *command]
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


def kill_family(record: Record) -> None:
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
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(asdict(record)))
        os.replace(beside, path)

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
