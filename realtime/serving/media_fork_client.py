"""The gateway's client of a fork server: starts the server, and has it start and kill media processes.

A `ForkServerClient` runs one program, the decoder program or that of WebRTC calls, which forks a process for each file,
stream or call within milliseconds (`media_fork_server.py`). It starts the program at first use, and again if it has
died. Engines have another fork server: `engine/client/fork_server.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import socket
import subprocess
import sys
from contextlib import suppress
from threading import Lock

from realtime.serving.media_protocol import END, ORDER

STOP_S = 2.0


class ForkServerClient:
    """The client of one fork server, which it starts at the first order, and again if the server has died."""

    def __init__(self, module: str) -> None:
        """`module` is run as the fork server; its `main` executes the orders with `media_fork_server.ForkServer`."""
        self._module = module
        self._lock = Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._owner = 0
        atexit.register(self.stop)

    def begin(self, descriptors: list[int], kind: bytes) -> int:
        """Start a process that gets these descriptors; returns its number. Raises OSError."""
        with self._lock:
            number = next(self._numbers)
            order = ORDER.pack(kind, number)
            with suppress(ConnectionError):
                if self._orders is not None and self._owner == os.getpid():
                    socket.send_fds(self._orders, [order], descriptors)
                    return number
            self._start()
            assert self._orders is not None
            socket.send_fds(self._orders, [order], descriptors)
            return number

    async def connect(self, kind: bytes) -> tuple[socket.socket, int]:
        """Start a process; returns the socket to it and its number. A process whose caller is cancelled meanwhile is
        killed. Raises OSError."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._connect, kind))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._give_up)
            raise

    def _connect(self, kind: bytes) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                return ours, self.begin([theirs.fileno()], kind)
            except BaseException:
                ours.close()
                raise

    def _give_up(self, started: asyncio.Future[tuple[socket.socket, int]]) -> None:
        if not started.cancelled() and started.exception() is None:
            line, number = started.result()
            line.close()
            self.end(number)

    def end(self, number: int) -> None:
        """Kill that process; does nothing if it has ended."""
        with suppress(OSError):
            if self._orders is not None and self._owner == os.getpid():
                self._orders.send(ORDER.pack(END, number))

    def stop(self) -> None:
        if self._owner == os.getpid():
            self._stop()

    def _start(self) -> None:
        if self._owner == os.getpid():
            self._stop()
        ours, theirs = socket.socketpair()
        # Do not pass the gateway's secrets to the program.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        # Orders are short and the program reads them at once, so a send never has to wait.
        ours.setblocking(False)
        self._orders, self._owner = ours, os.getpid()

    def _stop(self) -> None:
        orders, self._orders = self._orders, None
        process, self._process = self._process, None
        if orders is not None:
            orders.close()
        if process is not None:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
