"""A fork server for media processes: takes orders from the gateway, and forks a process for each.

It is the main loop of the decoder program (`decoder_process.py`) and the program of WebRTC calls
(`realtime/webrtc/call_process.py`); it never runs in the gateway. The program loads its libraries once, so a fork is
fast, and a fork that crashes or hangs affects no other. `set_bounds` limits the memory and files of a fork.
`media_fork_client.py` is the gateway's side.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, NoReturn

from realtime.serving.media_protocol import END, ORDER

REAP_S = 1.0

# The function that a fork runs until it ends. Arguments: the kind of its order, its socket to the gateway, and the file
# that came with the order.
Live = Callable[[bytes, socket.socket, BinaryIO | None], None]


class ForkServer:
    """Executes the gateway's orders: forks processes, which run `live`, and kills them."""

    def __init__(self, orders: socket.socket, live: Live) -> None:
        self._orders = orders
        self._live = live
        # Number -> process id.
        self._children: dict[int, int] = {}

    def serve(self) -> None:
        """Execute orders until the gateway closes the socket, then kill all processes."""
        for name in (signal.SIGINT, signal.SIGTERM):
            # The program ends when the gateway closes the socket; until then the gateway may have work to finish.
            signal.signal(name, signal.SIG_IGN)
        # Keep the garbage collector from writing to memory pages that the forks share.
        gc.collect()
        gc.freeze()
        while True:
            ready, _, _ = select.select([self._orders], [], [], REAP_S if self._children else None)
            self._reap()
            if ready and not self._take_order():
                break
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _take_order(self) -> bool:
        order, descriptors, _, _ = socket.recv_fds(self._orders, ORDER.size, 2)
        if len(order) < ORDER.size:
            return False
        kind, number = ORDER.unpack(order)
        if kind != END and descriptors:
            self._begin(kind, number, descriptors)
        elif kind == END and number in self._children:
            # The process id cannot have been reused: only `_reap` waits for children, and it forgets their ids.
            os.kill(self._children[number], signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _begin(self, kind: bytes, number: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError:
            return  # the gateway sees that the socket is closed
        if pid == 0:
            self._orders.close()
            line, *files = descriptors
            self._run(kind, socket.socket(fileno=line), os.fdopen(files[0], "rb") if files else None)
        self._children[number] = pid

    def _reap(self) -> None:
        for number, pid in list(self._children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._children[number]

    def _run(self, kind: bytes, line: socket.socket, file: BinaryIO | None) -> NoReturn:
        try:
            self._live(kind, line, file)
        except (OSError, EOFError):
            pass  # the gateway has closed the socket
        except Exception:
            # A bug in this program. The gateway sees that the socket is closed.
            traceback.print_exc()
        finally:
            os._exit(0)


def set_bounds(more_bytes: int, files: int) -> None:
    """Limit this process: address space beyond the shared part, open files, no written files, no core dumps."""
    for kind, most in (
        (resource.RLIMIT_AS, _address_bytes(more_bytes) + more_bytes),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _address_bytes(more_bytes: int) -> int:
    """Bytes of address space of this process now; if unknown, a number that makes the limit infinite."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.RLIM_INFINITY - more_bytes
