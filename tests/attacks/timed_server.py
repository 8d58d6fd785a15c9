"""Starts the server with an event loop that writes down how long it was held.

    python -P timed_server.py HOLDS_FILE serve --port 0 ...

A heartbeat runs on the gateway's loop every 2 ms. When it comes late, nobody else was served meanwhile: a callback took
long, many short ones came in a row, or another thread kept the interpreter's lock. Each such hold becomes a line of the
file: when it ended, how long it lasted, how much processor time this process spent meanwhile, and which callback took
the largest part of it. On a busy machine a loop is also late because others had the processors; the processor time
tells these apart.

It imports nothing of the tests: it must be able to start the server of another checkout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import uvloop

BEAT_S = 0.002
# Holds shorter than this are not written down.
WORTH_NOTING_S = 0.004
PROTOCOL_CALLS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "pause_writing",
    "resume_writing",
)


class HoldRecorder:
    """Times callbacks, and notes the stretches in which the loop served nobody else."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._longest = 0.0
        self._callback: Any = None
        self._beat_at = self._beat_cpu = 0.0

    def timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return callback(*args)
            finally:
                took = time.perf_counter() - began
                if took > self._longest:
                    self._longest, self._callback = took, callback

        return call

    def begin(self) -> None:
        self._beat_at, self._beat_cpu = time.perf_counter(), time.process_time()

    def beat(self) -> None:
        held = time.perf_counter() - self._beat_at - BEAT_S
        if held > WORTH_NOTING_S:
            computed = time.process_time() - self._beat_cpu
            # A callback that is a small part of it did not hold the loop: another thread or another process did.
            by = _name(self._callback) if self._longest > held / 4 else "no single callback"
            line = {"at": time.time(), "wall_ms": held * 1e3, "cpu_ms": computed * 1e3, "by": by}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        self._longest, self._callback = 0.0, None
        self.begin()


def _name(callback: Any) -> str:
    """What the callback belongs to: the coroutine of a task, or the method of a protocol."""
    owner = getattr(callback, "__self__", None)
    coroutine = owner.get_coro() if hasattr(owner, "get_coro") else None
    return str(getattr(coroutine or callback, "__qualname__", None) or repr(callback))[:120]


class TimedLoop(uvloop.Loop):
    recorder: HoldRecorder

    def run_forever(self) -> None:
        self.recorder.begin()
        self._beat()
        super().run_forever()

    def _beat(self) -> None:
        super().call_later(BEAT_S, self._beat)
        self.recorder.beat()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self.recorder.timed(callback), *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon_threadsafe(self.recorder.timed(callback), *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_later(delay, self.recorder.timed(callback), *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self.recorder.timed(callback), *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        return super().add_reader(fd, self.recorder.timed(callback), *args)


def time_protocols(recorder: HoldRecorder) -> None:
    """The loop calls the methods of a connection's protocol directly."""
    from realtime.serving.uvicorn_patch import PatientHttp, RealtimeWebSocket

    for protocol in (PatientHttp, RealtimeWebSocket):
        for name in PROTOCOL_CALLS:
            setattr(protocol, name, _timed_method(recorder, getattr(protocol, name)))


def _timed_method(recorder: HoldRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    timed = recorder.timed(method)
    return lambda *args: timed(*args)


def main() -> None:
    holds = sys.argv.pop(1)
    with open(holds, "w", encoding="utf-8") as file:
        recorder = TimedLoop.recorder = HoldRecorder(file)
        uvloop.new_event_loop = TimedLoop  # type: ignore[assignment]
        time_protocols(recorder)
        from realtime.cli import main as command_line

        sys.exit(command_line())


if __name__ == "__main__":
    main()
