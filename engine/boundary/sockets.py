"""ZeroMQ sockets between gateways and engines, and between gateways of a fleet; over tcp encrypted and authenticated.

Addresses are ipc:// by default, tcp:// for a remote engine, inproc:// within one process (`check_address`). A gateway
connects one DEALER per engine (`GatewaySocket`, on its event loop), an engine binds one ROUTER (`EngineSocket`,
blocking, on its one thread). ZeroMQ may lose messages without an error when a connection breaks. So messages are
numbered (`Numbering`), kept until they are acknowledged, and sent again when the receiver misses a number. A side with
too many unacknowledged bytes stops sending. Gateways of a fleet connect to each other in the same way
(`GatewayListener`), without numbers: after a break they begin again (`realtime/serving/fleet_publishing.py`).

With a fleet secret, links over tcp use CURVE: it encrypts them for peers that know the listener's public key, and
`ZapAuthenticator` admits only peers with the callers' key. ZeroMQ buffers a whole frame from a peer before the peer is
authenticated. So both sides limit the size of a frame, and longer frames are sent in pieces (`pieces_of`).
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
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from engine.boundary.codec import Frames
from engine.fleet_secret import derive

logger = logging.getLogger(__name__)

# Address of ZeroMQ's authentication requests (ZAP), and the domain of ours; there is one handler per context.
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"tickertape"
LOOPBACK = ("localhost", "::1")
# Most sockets of a context. A link needs three; ZeroMQ's default of 1023 would allow only 341 links.
MAX_SOCKETS = 30_000

# A dead process is noticed at once by its broken connection. A lost machine or network is noticed by ZeroMQ's own
# heartbeats (interval and timeout in ms), which its I/O threads answer however long a step takes.
ZMQ_HEARTBEAT_MS = 1000
ZMQ_HEARTBEAT_TIMEOUT_MS = 3500
# An idle side sends a message every BEAT_SECONDS. A side without a message for SILENCE_SECONDS is given up: until then
# it may be in a long step, afterwards it is assumed to hang.
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
# A side that has not polled for messages for this long was stopped itself (a suspended machine): the silence of the
# other side counts from then on.
STOPPED_SECONDS = 5.0
# Most unacknowledged bytes in one direction.
WINDOW_BYTES = 64 * 1024 * 1024
# Most bytes of a frame on the socket. ZeroMQ disconnects a peer that announces a longer one. CURVE adds 33 bytes.
FRAME_BYTES = 256 * 1024
CURVE_BYTES = 64
# A connection whose handshake takes longer is closed. An engine answers ZeroMQ's authentication requests between two
# steps, and a step may be long; the event loop of a gateway answers them at once.
HANDSHAKE_MS = 30_000
GATEWAY_HANDSHAKE_MS = 3000

# Events of a socket's monitor that report a refused handshake.
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# Broken handshakes of one socket that count as a refusal. One alone may come from an engine that is just ending.
MIN_BROKEN_HANDSHAKES = 2
WHY_REFUSED = "the two sides have different fleet secrets, or only one of them has a secret"
# Shortest time between two log lines about refusals, and most refusals that are read at a time.
REFUSAL_LOG_SECONDS = 10.0
REFUSALS_READ_AT_ONCE = 500

# Messages that may wait for one gateway at the listener of another one.
MAX_WAITING_MESSAGES = 2000
# Messages that a gateway's listener reads before it returns to the event loop.
MESSAGES_A_TURN = 50

# As an int: comparing with the library's flag objects is slower.
_READABLE = int(zmq.POLLIN)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in the encoding of ZeroMQ (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> KeyPair:
        """The pair of a secret key of 32 bytes."""
        secret = z85.encode(key)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The key pair of all listeners of a fleet, and the key pair of all callers. Engines listen, gateways call; between
    gateways each one listens and calls."""

    listener: KeyPair
    caller: KeyPair

    @classmethod
    def from_secret(cls, secret: bytes) -> LinkKeys:
        """The keys of links between gateways and engines."""
        return cls(KeyPair.of(derive(secret, "engine link")), KeyPair.of(derive(secret, "gateway link")))

    @classmethod
    def between_gateways(cls, secret: bytes) -> LinkKeys:
        """The keys of links between gateways."""
        return cls(KeyPair.of(derive(secret, "gateway listener")), KeyPair.of(derive(secret, "gateway caller")))

    def secure_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a listening socket. Must be called before the socket is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.listener.public, self.listener.secret
        socket.zap_domain = DOMAIN

    def secure_caller(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a calling socket. Must be called before the socket is connected."""
        socket.curve_serverkey = self.listener.public
        socket.curve_publickey, socket.curve_secretkey = self.caller.public, self.caller.secret


class ZapAuthenticator:
    """Answers ZeroMQ's authentication requests for the context of one listener: only the callers' key is admitted."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self._admitted = z85.decode(keys.caller.public)

    def answer_all(self) -> None:
        """Answer the requests that have arrived."""
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            is_admitted = mechanism == b"CURVE" and credentials == [self._admitted]
            status, text = (b"200", b"OK") if is_admitted else (b"400", b"another key")
            self.socket.send_multipart([version, request, status, text, b"", b""])


def link_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process for its links to engines and gateways."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def uses_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def leaves_the_machine(address: str) -> bool:
    """Whether the address is tcp and not of this machine alone, so that other machines can see or send traffic."""
    host = urlsplit(address).hostname or ""
    return uses_tcp(address) and host not in LOOPBACK and not host.startswith("127.")


class CannotListen(ValueError):
    """An engine or a gateway cannot bind its address: the address is in use, belongs to another machine, or has the
    wrong scheme. The text says what to fix."""


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


# Addresses that ZeroMQ can connect to. A wildcard or an empty host passes `check_address`, because a listener may have
# it.
_GATEWAY_ADDRESS = re.compile(r"tcp://[A-Za-z0-9\[:][\w.:%\[\]-]*:[0-9]+", re.ASCII)


def check_gateway_address(address: str) -> str:
    """As `check_address`, for the address that a gateway gives to other gateways: tcp with the name of a host."""
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
        # Numbers of the last message sent and of the last message accepted.
        self.sent = 0
        self.accepted = 0
        self.unacknowledged_bytes = 0
        self._window_bytes = window_bytes
        # Unacknowledged messages: number, frames, bytes.
        self._kept: deque[tuple[int, list[Any], int]] = deque()

    @property
    def may_send(self) -> bool:
        """Whether few enough bytes are unacknowledged to send another message."""
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

    def classify(self, number: int, waiting: int = 0) -> Arrival:
        """Classify an arriving number when `waiting` messages have arrived and are not accepted yet."""
        expected = self.accepted + waiting + 1
        if number == expected:
            return Arrival.NEXT
        return Arrival.REPEATED if number < expected else Arrival.AFTER_A_GAP

    def accept(self, number: int) -> None:
        """Message `number` has been processed; it is acknowledged with the next message that is sent."""
        assert number == self.accepted + 1, f"message {number} accepted after {self.accepted}"
        self.accepted = number


def _set_options(socket: zmq.Socket[bytes]) -> None:
    """Options of both sides: heartbeats, and the limit on the size of a frame."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = ZMQ_HEARTBEAT_MS, ZMQ_HEARTBEAT_TIMEOUT_MS
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
    """Return the frames of a message that was sent in pieces. The first one, the header, is whole. A longer payload
    frame stays a list of its pieces, because each item's part of it is copied in any case (`codec.payload_of`)."""
    if all(len(piece) < FRAME_BYTES for piece in pieces):
        return pieces
    frames: list[Any] = []
    parts: list[Any] = []
    # A last piece is missing only if the peer does not follow the protocol; then the decoder refuses the message.
    for piece in [*pieces, b""] if len(pieces[-1]) == FRAME_BYTES else pieces:
        parts.append(piece)
        if len(piece) < FRAME_BYTES:
            frames.append(parts[0] if len(parts) == 1 else parts if frames else b"".join(parts))
            parts = []
    return frames


class GatewaySocket:
    """A gateway's connection to one engine, on the running event loop.

    `on_frames` is called for every message, `on_disconnect` when the connection breaks, and `on_refused` when one side
    refuses the other one's key.
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
        self._broken_handshakes = 0
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        # `Numbering` bounds the queue. ZeroMQ's high-water mark would drop messages or block without notice.
        self._socket.set_hwm(0)
        self._socket.linger = 0
        if keys is not None and uses_tcp(address):
            keys.secure_caller(self._socket)
        _set_options(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
        self._socket.connect(check_address(address))
        self._closed = False
        self._reading = False
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        # The descriptors are edge-triggered: they report nothing until pending events are read. So a first read is
        # scheduled. It is not done here, because the callbacks may use this object.
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
        """Whether a message has arrived. Checking first is cheaper than catching zmq.Again."""
        events: Any = self._socket.get(zmq.EVENTS)
        return bool(events & _READABLE)

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event & REFUSED:
                # A refused key is final, and ZeroMQ does not retry. A broken handshake may have any cause, so it is
                # counted.
                is_broken = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                self._broken_handshakes += 1 if is_broken else MIN_BROKEN_HANDSHAKES
                if self._broken_handshakes >= MIN_BROKEN_HANDSHAKES:
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

    ZeroMQ's thread waits while a monitor's queue is full, and serves no connection meanwhile: peers without the key
    could stop all links of an engine that is in a long step. So this queue has no limit (`rcvhwm` 0); an event has
    about a hundred bytes.
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
        max_waiting: int = 0,
        handshake_ms: int = HANDSHAKE_MS,
    ) -> None:
        """`max_waiting` limits the messages that wait for one gateway; 0 is no limit."""
        self._authenticator: ZapAuthenticator | None = None
        if keys is not None and uses_tcp(address):
            # A context has only one authenticator.
            context = self._own_context = zmq.Context()
            self._authenticator = ZapAuthenticator(context, keys)
        self._socket = context.socket(zmq.ROUTER)
        if self._authenticator is not None and keys is not None:
            keys.secure_listener(self._socket)
        self._socket.set_hwm(0)
        self._socket.sndhwm = max_waiting
        # Sending to a gateway that is gone raises an error, which is the first sign that it is gone.
        self._socket.router_mandatory = True
        self._socket.linger = 500
        self._socket.handshake_ivl = handshake_ms
        _set_options(self._socket)
        self._monitor = _monitor_of_refusals(context, self._socket)
        self._refusal_logged_at = float("-inf")
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
        """Wait at most `seconds` for an event, and answer authentication requests; returns whether a message is
        ready."""
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
        if now - self._refusal_logged_at > REFUSAL_LOG_SECONDS:
            self._refusal_logged_at = now
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
        assert authenticator is not None, "a tcp address with keys has one"
        sockets = (self._socket, self._monitor, authenticator.socket)
        self._descriptors = [int(socket.fileno()) for socket in sockets]
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
        # If the address cannot be bound, the base constructor closes before there are descriptors.
        for descriptor in getattr(self, "_descriptors", ()):
            self._loop.remove_reader(descriptor)
        self._descriptors = []
        super().close()
