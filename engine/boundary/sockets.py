"""ZeroMQ sockets between gateways and engines, and between gateways of a fleet; over tcp encrypted and authenticated.

Addresses are ipc:// by default, tcp:// for a remote engine, inproc:// within one process. A gateway connects one DEALER
per engine (`GatewaySocket`, on its event loop), an engine binds one ROUTER (`EngineSocket`, blocking, on its one
thread). ZeroMQ may silently lose messages when a connection breaks; so messages are numbered (`Numbering`), kept until
they are acknowledged, and sent again when the receiver misses a number. A side that has too many unacknowledged bytes
stops sending. Gateways of a fleet connect to each other in the same way (`GatewayListener`), without numbers: after a
break they begin again (`realtime/serving/fleet_publishing.py`).

With a fleet secret, links over tcp use CURVE: it encrypts them for clients that know the engine's public key, and
`ZapAuthenticator` admits only the gateways' key. ZeroMQ holds a frame of a peer that is not authenticated yet, so both
sides limit the size of a frame, and longer frames are sent in pieces (`pieces_of`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from engine.boundary.codec import Frames
from engine.fleet_secret import derive

# Address of ZeroMQ's authentication requests (ZAP); there is one handler per context.
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"tickertape"
LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, encoded as ZeroMQ wants it."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> KeyPair:
        secret = z85.encode(key)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The key pair of all engines and the key pair of all gateways of a fleet. On links between gateways, `engine` is
    the pair of the side that listens."""

    engine: KeyPair
    gateway: KeyPair

    @classmethod
    def from_secret(cls, secret: bytes) -> LinkKeys:
        return cls(KeyPair.of(derive(secret, "engine link")), KeyPair.of(derive(secret, "gateway link")))

    @classmethod
    def between_gateways(cls, secret: bytes) -> LinkKeys:
        return cls(KeyPair.of(derive(secret, "gateway listener")), KeyPair.of(derive(secret, "gateway caller")))

    def lock_engine(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of an engine's socket. Must be called before the socket is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.engine.public, self.engine.secret
        socket.zap_domain = DOMAIN

    def lock_gateway(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a gateway's socket. Must be called before the socket is connected."""
        socket.curve_serverkey = self.engine.public
        socket.curve_publickey, socket.curve_secretkey = self.gateway.public, self.gateway.secret


class ZapAuthenticator:
    """Answers ZeroMQ's authentication requests for one engine's context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self._known = z85.decode(keys.gateway.public)

    def answer_all(self) -> None:
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            welcome = mechanism == b"CURVE" and credentials == [self._known]
            status, text = (b"200", b"OK") if welcome else (b"400", b"another key")
            self.socket.send_multipart([version, request, status, text, b"", b""])


# A link needs three of them. ZeroMQ's own limit of 1023 would end at 341 links.
MAX_SOCKETS = 30_000


def link_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process for its links to engines and gateways."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def uses_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def leaves_the_machine(address: str) -> bool:
    """Whether traffic to this address can be seen or sent from other machines."""
    host = urlsplit(address).hostname or ""
    return uses_tcp(address) and host not in LOOPBACK and not host.startswith("127.")


logger = logging.getLogger(__name__)

# A dead process is noticed at once by its broken connection. A lost machine or network is noticed by ZeroMQ's
# heartbeats (interval and timeout in ms); its I/O threads answer them however long a step takes.
PULSE_MS = 1000
PULSE_TIMEOUT_MS = 3500
# An idle side sends a message every BEAT_SECONDS. After SILENCE_SECONDS without a message the other side gives it up:
# until then it may be in a long step, afterwards it is taken to hang.
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
# A side that has not looked for messages for this long was stopped itself (a suspended machine): the silence of the
# other side counts from then on.
STOPPED_SECONDS = 5.0
# Most unacknowledged bytes in one direction.
WINDOW_BYTES = 64 * 1024 * 1024
# Most bytes of a frame on the socket. ZeroMQ disconnects a peer that announces a longer one. CURVE adds 33 bytes.
FRAME_BYTES = 256 * 1024
CURVE_BYTES = 64
# As an int: comparing with the library's flag objects is slower.
_READABLE = int(zmq.POLLIN)
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# Broken handshakes in a row that count as a refusal. One alone may come from an engine that is just ending.
REFUSALS_BELIEVED = 2
WHY_REFUSED = "the two sides have different fleet secrets, or only one of them has a secret"
# Refusals are logged at most this often, and this many are read at a time.
REFUSAL_SAID_SECONDS = 10.0
REFUSALS_READ_AT_ONCE = 500


# A connection whose handshake takes longer is closed. An engine answers ZeroMQ's authentication requests between two
# steps, and a step may be long; the event loop of a gateway answers them at once.
HANDSHAKE_MS = 30_000
GATEWAY_HANDSHAKE_MS = 3000


class CannotListen(ValueError):
    """An engine or a gateway cannot bind its address: it is in use, of another machine, or of the wrong kind. The text
    says what to fix."""


def package_version() -> str:
    """The installed version of tickertape, for greetings."""
    try:
        return version("tickertape")
    except PackageNotFoundError:
        return "unknown"


def check_address(address: str) -> str:
    """Returns the address if it is valid. Raises ValueError with an example of an address if it is not."""
    parts = urlsplit(address)
    usable = {
        "ipc": bool(parts.netloc or parts.path),
        "inproc": bool(parts.netloc),
        "tcp": ":" in parts.netloc and _is_port(parts.netloc.rsplit(":", 1)[1]),
    }
    if not usable.get(parts.scheme, False):
        raise ValueError(f"{address!r} is not an engine address; use ipc:///path/to/socket or tcp://host:port")
    return address


# What ZeroMQ can connect to: a wildcard or no host would pass `check_address`.
_GATEWAY_ADDRESS = re.compile(r"tcp://[A-Za-z0-9\[:][\w.:%\[\]-]*:[0-9]+", re.ASCII)


def check_gateway_address(address: str) -> str:
    """As `check_address`, for the address at which the other gateways reach one: it has to be tcp, and name a host."""
    if _GATEWAY_ADDRESS.fullmatch(address) is None or not _is_port(address.rsplit(":", 1)[1]):
        raise ValueError(f"{address!r} is not a gateway address; use tcp://host:port")
    return address


def _is_port(text: str) -> bool:
    """Whether the text is a port. ZeroMQ itself would accept too large a number and listen on another port."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


class Arrival(Enum):
    """How the number of an arriving message compares with the expected one."""

    NEXT = "next"
    REPEATED = "repeated"
    AFTER_A_GAP = "after a gap"


class Numbering:
    """Message numbers and unacknowledged messages of both directions of one link, from one side. Does no I/O."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.sent = 0
        self.taken = 0
        self.unacknowledged_bytes = 0
        self._window_bytes = window_bytes
        self._kept: deque[tuple[int, list[Any], int]] = deque()

    @property
    def may_send(self) -> bool:
        return self.unacknowledged_bytes < self._window_bytes

    @property
    def acknowledged_until(self) -> int:
        return self._kept[0][0] - 1 if self._kept else self.sent

    @property
    def next_number(self) -> int:
        return self.sent + 1

    def keep(self, frames: list[Any]) -> None:
        """Store the frames just sent, under the next number, until they are acknowledged."""
        size = sum(len(memoryview(frame).cast("B")) for frame in frames)
        self.sent += 1
        self.unacknowledged_bytes += size
        self._kept.append((self.sent, frames, size))

    def acknowledged(self, number: int) -> list[int]:
        """The other side has received everything up to `number`; returns the newly acknowledged numbers."""
        numbers = []
        while self._kept and self._kept[0][0] <= number:
            kept, _, size = self._kept.popleft()
            self.unacknowledged_bytes -= size
            numbers.append(kept)
        return numbers

    def kept_since(self, number: int) -> list[list[Any]]:
        """The messages to send again when the other side misses `number`."""
        return [frames for kept, frames, _ in self._kept if kept >= number]

    def arrive(self, number: int, waiting: int = 0) -> Arrival:
        """Classify an arriving number when `waiting` messages have arrived but are not taken yet. Changes nothing."""
        expected = self.taken + waiting + 1
        if number == expected:
            return Arrival.NEXT
        return Arrival.REPEATED if number < expected else Arrival.AFTER_A_GAP

    def take(self, number: int) -> None:
        assert number == self.taken + 1, f"message {number} taken after {self.taken}"
        self.taken = number


def _set_options(socket: zmq.Socket[bytes]) -> None:
    """Options of both sides: heartbeats, and the limit on the size of a frame."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = PULSE_MS, PULSE_TIMEOUT_MS
    socket.maxmsgsize = FRAME_BYTES + CURVE_BYTES


def pieces_of(frames: Sequence[Any]) -> Sequence[Any]:
    """Return the frames cut into pieces of at most `FRAME_BYTES`; `join_pieces` is the inverse.

    A piece of exactly `FRAME_BYTES` is continued by the next one; a shorter piece is the last one of its frame.
    """
    if all(memoryview(frame).nbytes < FRAME_BYTES for frame in frames):
        return frames
    pieces: list[memoryview] = []
    for frame in frames:
        view = memoryview(frame).cast("B")
        pieces += [view[start : start + FRAME_BYTES] for start in range(0, view.nbytes + 1, FRAME_BYTES)]
    return pieces


def join_pieces(pieces: Sequence[Any]) -> Frames:
    """Return the frames of a message that was sent in pieces. A frame of one piece is not copied."""
    if all(len(piece) < FRAME_BYTES for piece in pieces):
        return pieces
    frames: list[Any] = []
    parts: list[Any] = []
    for piece in pieces:
        parts.append(piece)
        if len(piece) < FRAME_BYTES:
            frames.append(b"".join(parts) if len(parts) > 1 else piece)
            parts = []
    # The last piece is missing only if the peer does not keep to the rule; then the decoder refuses the message.
    return [*frames, b"".join(parts)] if parts else frames


class GatewaySocket:
    """A gateway's connection to one engine, on the running event loop.

    `on_frames` is called for every message, `on_refused` when the engine refuses this gateway's key or the reverse.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_frames: Callable[[Frames], None],
        on_disconnect: Callable[[], None],
        on_refused: Callable[[], None],
        keys: LinkKeys | None = None,
    ) -> None:
        self._on_frames = on_frames
        self._on_disconnect = on_disconnect
        self._on_refused = on_refused
        self._refusals = 0
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        # `Numbering` bounds the queue. ZeroMQ's high-water mark would drop messages or block without notice.
        self._socket.set_hwm(0)
        self._socket.linger = 0
        if keys is not None and uses_tcp(address):
            keys.lock_gateway(self._socket)
        _set_options(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
        self._socket.connect(check_address(address))
        self._closed = False
        self._reading = False
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        # The descriptors are edge-triggered: they stay quiet until pending events are read, so read once now. Not in
        # the constructor, because the callbacks may use this object.
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._watch)

    def send(self, frames: list[Any]) -> None:
        if self._closed:
            return
        self._socket.send_multipart(pieces_of(frames), flags=zmq.NOBLOCK, copy=True)
        # Sending may clear the edge of an arrived message, so check for one.
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = False
        while not self._closed and self._is_readable():
            self._on_frames(join_pieces(self._socket.recv_multipart(zmq.NOBLOCK)))

    def _is_readable(self) -> bool:
        """Asking first is cheaper than catching zmq.Again."""
        events: Any = self._socket.get(zmq.EVENTS)
        return bool(events & _READABLE)

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event & REFUSED:
                # A refused key is final, and ZeroMQ does not retry. A cut connection may have any cause, so count it.
                self._refusals += 1 if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else REFUSALS_BELIEVED
                if self._refusals >= REFUSALS_BELIEVED:
                    self._on_refused()
            else:
                self._on_disconnect()

    def close(self, last: list[Any] | None = None) -> None:
        """Close the connection; `last` is sent first. Idempotent."""
        if self._closed:
            return
        if last is not None:
            # Without a peer the message is not needed.
            with suppress(zmq.Again):
                self._socket.send_multipart(pieces_of(last), flags=zmq.NOBLOCK)
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0 if last is None else 200)


def _monitor_of_refusals(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that receives an event for each refused handshake of `socket`.

    ZeroMQ's thread waits while a monitor is full, and serves no connection meanwhile: clients without the key could
    stop all links of an engine that is in a long step. So this monitor is never full; an event has about a hundred
    bytes.
    """
    address = f"inproc://refusals-{socket.fileno()}"
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    socket.monitor(address, REFUSED)
    monitor.connect(address)
    return monitor


class EngineSocket:
    """The engine's socket: blocking, used by one thread; every message comes with the name of its gateway."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: LinkKeys | None = None,
        most_waiting: int = 0,
        handshake_ms: int = HANDSHAKE_MS,
    ) -> None:
        """`most_waiting` limits the messages that wait for one gateway; 0 is no limit."""
        self._authenticator: ZapAuthenticator | None = None
        if keys is not None and uses_tcp(address):
            # A context has only one authenticator.
            context = self._own_context = zmq.Context()
            self._authenticator = ZapAuthenticator(context, keys)
        self._socket = context.socket(zmq.ROUTER)
        if self._authenticator is not None and keys is not None:
            keys.lock_engine(self._socket)
        self._socket.set_hwm(0)
        self._socket.sndhwm = most_waiting
        # Sending to a gateway that is gone raises an error, which is the first sign that it is gone.
        self._socket.router_mandatory = True
        self._socket.linger = 500
        self._socket.handshake_ivl = handshake_ms
        _set_options(self._socket)
        self._monitor = _monitor_of_refusals(context, self._socket)
        self._refusal_said_at = float("-inf")
        self._poller = zmq.Poller()
        for socket in (
            self._socket,
            self._monitor,
            *([] if self._authenticator is None else [self._authenticator.socket]),
        ):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._socket.bind(check_address(address))
        except zmq.ZMQError as error:
            self.close()
            raise CannotListen(f"cannot listen on {address!r}: {error}; choose another address") from None
        if keys is None and leaves_the_machine(address):
            logger.warning(
                "%s is neither encrypted nor authenticated: every host that can connect to it can use the engine and "
                "read the transcripts. Give engine and gateways the same --fleet-secret-file",
                address,
            )

    @property
    def bound_to(self) -> str:
        """The bound address, with the port that the system chose if none was given."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether a message is ready."""
        ready = dict(self._poller.poll(int(seconds * 1000)))
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.answer_all()
        if self._monitor in ready:
            self._note_refusals()
        return self._socket in ready

    def _note_refusals(self) -> None:
        with suppress(zmq.Again):
            for _ in range(REFUSALS_READ_AT_ONCE):
                self._monitor.recv_multipart(zmq.NOBLOCK)
        now = time.monotonic()
        if now - self._refusal_said_at > REFUSAL_SAID_SECONDS:
            self._refusal_said_at = now
            logger.warning("a gateway was refused at %s: %s", self.bound_to, WHY_REFUSED)

    def receive(self) -> tuple[bytes, Frames] | None:
        """The next message (gateway name, frames) or None; a frame of one piece is the buffer in which it arrived."""
        try:
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return name.bytes, join_pieces([frame.buffer for frame in frames])

    def send(self, name: bytes, frames: list[Any]) -> bool:
        """Send to the gateway of this name; returns False if it is not connected, or if too much waits for it."""
        try:
            self._socket.send_multipart([name, *pieces_of(frames)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.socket.close()
            self._own_context.term()


# Messages that may wait for one gateway at the listener of another one.
MAX_WAITING_MESSAGES = 2000
# Messages that the listener reads before the rest of the event loop has its turn.
MESSAGES_A_TURN = 50


class GatewayListener(EngineSocket):
    """The socket at which a gateway listens to the other gateways of its fleet, on the running event loop."""

    def __init__(self, address: str, keys: LinkKeys, on_frames: Callable[[bytes, Frames], None]) -> None:
        if not uses_tcp(address):
            raise CannotListen(f"a gateway cannot listen on {address!r}; use tcp://host:port")
        super().__init__(zmq.Context.instance(), address, keys, MAX_WAITING_MESSAGES, GATEWAY_HANDSHAKE_MS)
        self._socket.linger = 0
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._will_read = False
        authenticator = self._authenticator
        assert authenticator is not None, "there is one for every tcp address with keys"
        self._descriptors = [int(one.fileno()) for one in (self._socket, self._monitor, authenticator.socket)]
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._read)
        # The descriptors are edge-triggered; see `GatewaySocket`.
        self._read_soon()

    def send(self, name: bytes, frames: list[Any]) -> bool:
        sent = super().send(name, frames)
        # Sending may clear the edge of an arrived message, so check for one.
        self._read_soon()
        return sent

    def _read_soon(self) -> None:
        if not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._will_read = False
        for _ in range(MESSAGES_A_TURN):
            if not self._descriptors or not self.wait(0):
                return
            received = self.receive()
            if received is None:
                return
            self._on_frames(received[0], [bytes(frame) for frame in received[1]])
        self._read_soon()

    def close(self) -> None:
        for descriptor in getattr(self, "_descriptors", ()):
            self._loop.remove_reader(descriptor)
        self._descriptors = []
        super().close()
