"""The fork server of a gateway's processes for untrusted media (decoders, pulled streams, calls), and their messages.

Two programs read untrusted input: the decoder program (`decoder_process.py`) and the program of WebRTC calls
(`realtime/webrtc/call_process.py`). Each program loads its libraries once, and forks a process for each file, stream or
call within milliseconds. A fork that crashes or hangs affects no other fork.

- `ForkServerClient` runs in the gateway. It owns one program: starts it at first use, starts it again if it has died,
  and sends it the orders for new processes.
- `ForkServer` is the main loop of the programs, and never runs in the gateway. It executes the orders. `set_bounds`
  limits the memory and the open files of a fork.
- The constants at the head of the file define the messages between the gateway and a fork: kinds, layouts and limits.

Engines have another fork server: `engine/client/fork_server.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import BinaryIO, NoReturn

# The modules that are run as programs. The gateway does not import them, so that libav and aiortc are not loaded there.
DECODER_PROGRAM = "realtime.serving.decoder_process"
CALL_PROGRAM = "realtime.webrtc.call_process"

# An order of the gateway to a fork server: its kind, and the number of a process. END kills the process. Every other
# kind starts it, and comes with file descriptors: the socket of the new process, and for an upload the file. BEGIN
# starts a decoder, PULL a process that pulls a stream from the network, CALL the process of a WebRTC call.
ORDER = struct.Struct("<cQ")
END, BEGIN, PULL, CALL = b"e", b"b", b"p", b"c"

# The header of a message: its kind, and the length in bytes of the content that follows.
FRAME = struct.Struct("<cI")
# The longest content of a message of a call or a pulled stream, in either direction.
MAX_FRAME_BYTES = 4 * 1024 * 1024
# Messages of all processes: FAULT is an error, DONE the end.
FAULT, DONE = b"f", b"d"

# Gateway (`isolated_decoder.py`) to decoder (`decoder_process.py`), a piece of the audio: the number of bytes that
# follow, and the bytes. 0 asks for the next samples; NO_MORE means that the stream has ended.
PIECE = struct.Struct("<I")
NO_MORE = 0xFFFF_FFFF
# Decoder to gateway, one frame as the answer to each piece. A FAULT has a text. The others have float32 samples: after
# MORE the decoder has further samples without new bytes, after HUNGRY it needs new bytes, and DONE is the end.
MORE, HUNGRY = b"m", b"h"

# To a pulling process (`decoder_process.py`): the job, one line of JSON with `url`, `open_s` and `read_s`, the longest
# waits for the network; and `hosts`, the allowed hosts, or null for the command of a user, who may contact any host.
MAX_JOB_BYTES = 64 * 1024
# From a pulling process (to `isolated_decoder.py`), as frames. OPENED: JSON with `seconds` and `keeps_time` of
# `StreamKind`. BLOCK: START (`start` and `clock_shift` of `Block`), then float32 samples. FAULT: JSON with `text`, and
# `final` if another attempt is useless. DONE has no content.
OPENED, BLOCK = b"o", b"b"
START = struct.Struct("<dd")

# Gateway (`webrtc_calls.py`) to the process of a call (`realtime/webrtc`), as frames. The first is the JOB (JSON:
# `offer`, `bind`, `addresses`, `ports`, `connect_s`, `message_bytes`), EVENT a text for the data channel, and CLOSE
# ends the call when the texts before it are sent.
JOB, EVENT, CLOSE = b"j", b"e", b"x"
# Process to gateway. The first is the ANSWER (SDP) or a FAULT (JSON: `status`, `code`, `message`, `param`). Then AUDIO
# (16-bit samples at 16 kHz); LOST and SILENCE (a number of such samples): audio that the network lost, and silence that
# the client did not send; MESSAGE (a text of the client, bounded by the job's `message_bytes`); and at the end ENDED
# (text: why).
ANSWER, AUDIO, LOST, SILENCE, MESSAGE, ENDED = b"a", b"s", b"l", b"q", b"m", b"z"
SAMPLES = struct.Struct("<I")
# The longest offer. A browser's offer of audio and a data channel has 2 to 6 KB.
MAX_OFFER_BYTES = 64 * 1024

# Seconds in which the program must end when the gateway stops; after them it is killed.
STOP_S = 2.0
# Seconds between two checks of a fork server for processes that have ended.
REAP_S = 1.0

# The function that a fork runs until it ends. Arguments: the kind of its order, its socket to the gateway, and the file
# that came with the order.
RunFork = Callable[[bytes, socket.socket, BinaryIO | None], None]


class ForkServerClient:
    """The client of one fork server, which it starts at the first order, and again if the server has died."""

    def __init__(self, module: str) -> None:
        """`module` is run as the fork server; its `main` executes the orders with `ForkServer`."""
        self._module = module
        self._lock = Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        # The socket on which the fork server receives orders.
        self._orders: socket.socket | None = None
        # The process that has started the fork server: a worker that was forked later must not use it.
        self._owner_pid = 0
        atexit.register(self.stop)

    def begin(self, descriptors: list[int], kind: bytes) -> int:
        """Start a process that gets these descriptors; returns its number. Raises OSError."""
        with self._lock:
            number = next(self._numbers)
            order = ORDER.pack(kind, number)
            with suppress(ConnectionError):
                if self._orders is not None and self._owner_pid == os.getpid():
                    socket.send_fds(self._orders, [order], descriptors)
                    return number
            self._start()
            assert self._orders is not None
            socket.send_fds(self._orders, [order], descriptors)
            return number

    async def connect(self, kind: bytes) -> tuple[socket.socket, int]:
        """Start a process; returns the socket to it and its number. If this call is cancelled, the process is killed.
        Raises OSError."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._connect, kind))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._discard)
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

    def _discard(self, started: asyncio.Future[tuple[socket.socket, int]]) -> None:
        if not started.cancelled() and started.exception() is None:
            line, number = started.result()
            line.close()
            self.end(number)

    def end(self, number: int) -> None:
        """Kill the process with this number; does nothing if it has ended."""
        with suppress(OSError):
            if self._orders is not None and self._owner_pid == os.getpid():
                self._orders.send(ORDER.pack(END, number))

    def stop(self) -> None:
        """Stop the fork server and all its processes."""
        if self._owner_pid == os.getpid():
            self._stop()

    def _start(self) -> None:
        if self._owner_pid == os.getpid():
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
        self._orders, self._owner_pid = ours, os.getpid()

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


class ForkServer:
    """Executes the gateway's orders: forks processes, which run `run_fork`, and kills them."""

    def __init__(self, orders: socket.socket, run_fork: RunFork) -> None:
        self._orders = orders
        self._run_fork = run_fork
        # Number of a process -> its process id.
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
            if ready and not self._execute_order():
                break
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _execute_order(self) -> bool:
        """Receive an order and execute it; returns False if the gateway has closed the socket."""
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
            self._run_fork(kind, line, file)
        except (OSError, EOFError):
            pass  # the gateway has closed the socket
        except Exception:
            # A bug in this program. The gateway sees that the socket is closed.
            traceback.print_exc()
        finally:
            os._exit(0)


def set_bounds(more_bytes: int, files: int) -> None:
    """Limit this process: address space beyond what it has now, and open files; no written files, no core dumps."""
    for limit, maximum in (
        (resource.RLIMIT_AS, _address_bytes(more_bytes) + more_bytes),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (maximum, maximum))


def _address_bytes(more_bytes: int) -> int:
    """Bytes of address space of this process now; if unknown, a number that makes the limit infinite."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.RLIM_INFINITY - more_bytes
