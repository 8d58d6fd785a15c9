"""Starts the server with an event loop that writes down how long it was held.

    python -P timed_server.py HOLDS_FILE serve --port 0 ...

A heartbeat runs on the gateway's loop every 2 ms. When it comes late, the loop was blocked meanwhile: a callback took
long, many short ones came in a row, or another thread kept the interpreter's lock. Each such stretch becomes a line of
the file: when it ended, how long it lasted, how much processor time the loop and other threads of the process spent in
it, and the same of the callback that took the largest part. On a busy machine a loop is also late because others had
the processors; processor time tells these apart.

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
    """Measures callbacks, and records the times in which the loop was blocked."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._callback: Any = None
        self._callback_cpu = self._callback_wall = 0.0
        self._callbacks = 0
        self._wall = self._loop_cpu = self._all_cpu = 0.0

    def timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return callback(*args)
            finally:
                self._callbacks += 1
                cpu = time.thread_time() - cpu
                if cpu >= self._callback_cpu:
                    self._callback, self._callback_cpu = callback, cpu
                    self._callback_wall = time.perf_counter() - wall

        return call

    def begin(self) -> None:
        self._callback, self._callback_cpu, self._callback_wall, self._callbacks = None, 0.0, 0.0, 0
        self._wall, self._loop_cpu, self._all_cpu = time.perf_counter(), time.thread_time(), time.process_time()

    def beat(self) -> None:
        held = time.perf_counter() - self._wall - BEAT_S
        if held > WORTH_NOTING_S:
            loop_cpu = time.thread_time() - self._loop_cpu
            line = {
                "at": time.time(),
                "wall_ms": held * 1e3,
                "loop_ms": loop_cpu * 1e3,
                "threads_ms": (time.process_time() - self._all_cpu - loop_cpu) * 1e3,
                "callbacks": self._callbacks,
                "longest": _name(self._callback),
                "longest_ms": self._callback_cpu * 1e3,
                "longest_wall_ms": self._callback_wall * 1e3,
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
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
    from realtime.serving.uvicorn_protocols import HttpWithDeadlines, RealtimeWebSocket

    for protocol in (HttpWithDeadlines, RealtimeWebSocket):
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
