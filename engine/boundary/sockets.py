"""Keys of links over tcp: both sides prove that they have the fleet's secret, and nobody else reads what they say.

ZeroMQ's CURVE encrypts a link for whoever knows the server's public key; the doorman lets in the gateways' key alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
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

# Where ZeroMQ asks whether a client may come in; there is one such place in a context.
DOOR = "inproc://zeromq.zap.01"
DOMAIN = b"tickertape"
LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> KeyPair:
        secret = z85.encode(key)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """Those of all engines and those of all gateways of a fleet."""

    engine: KeyPair
    gateway: KeyPair

    @classmethod
    def from_secret(cls, secret: bytes) -> LinkKeys:
        return cls(KeyPair.of(derive(secret, "engine link")), KeyPair.of(derive(secret, "gateway link")))

    def lock_engine(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.engine.public, self.engine.secret
        socket.zap_domain = DOMAIN

    def lock_gateway(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is connected."""
        socket.curve_serverkey = self.engine.public
        socket.curve_publickey, socket.curve_secretkey = self.gateway.public, self.gateway.secret


class ZapAuthenticator:
    """Answers ZeroMQ's question who may come in, for one engine's context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(DOOR)
        self._known = z85.decode(keys.gateway.public)

    def answer_all(self) -> None:
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            welcome = mechanism == b"CURVE" and credentials == [self._known]
            status, text = (b"200", b"OK") if welcome else (b"400", b"another key")
            self.socket.send_multipart([version, request, status, text, b"", b""])


def uses_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def leaves_the_machine(address: str) -> bool:
    """Whether others may see, or reach, what goes over this address."""
    host = urlsplit(address).hostname or ""
    return uses_tcp(address) and host not in LOOPBACK and not host.startswith("127.")


# Numbered messages over ZeroMQ: ipc:// by default, tcp:// for a remote engine, inproc:// within one process.
#
# A gateway connects one DEALER per engine, an engine binds one ROUTER. ZeroMQ may lose a message when a connection
# breaks, and says nothing; so messages are numbered, kept until the other side has taken them, and sent again when a
# number is missing. What is kept is bounded: a side that is owed too many acknowledgements stops sending.

logger = logging.getLogger(__name__)

# A death is noticed at once by the broken connection. Machines that vanish and lines that are cut are noticed by
# ZeroMQ's own beats: its threads answer them however long a step takes. They come so often, and are waited for so long.
PULSE_MS = 1000
PULSE_TIMEOUT_MS = 3500
# How often an idle side says how it is, and after how much silence the other side gives it up: a process whose threads
# still answer may be in a long step, or may hang.
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
# Bytes that may be under way in one direction without being acknowledged.
WINDOW_BYTES = 64 * 1024 * 1024
# As a number: the library's flags are objects, which take longer to compare.
_READABLE = int(zmq.POLLIN)
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# Handshakes cut off in a row before it is no accident: that of an engine that just ended is one.
REFUSALS_BELIEVED = 2
WHY_REFUSED = "its fleet secret is another one, or one of the two sides has none"
# An engine says so often at most that somebody was refused.
REFUSAL_SAID_SECONDS = 10.0


class CannotListen(ValueError):
    """An engine's address is taken, or not this machine's. The text says what to do about it."""


def package_version() -> str:
    try:
        return version("tickertape")
    except PackageNotFoundError:
        return "unknown"


def check_address(address: str) -> str:
    """The address itself, or an error that says what an address looks like."""
    parts = urlsplit(address)
    usable = {
        "ipc": bool(parts.netloc or parts.path),
        "inproc": bool(parts.netloc),
        "tcp": ":" in parts.netloc and _is_port(parts.netloc.rsplit(":", 1)[1]),
    }
    if not usable.get(parts.scheme, False):
        raise ValueError(f"{address!r} is not an engine address; use ipc:///path/to/socket or tcp://host:port")
    return address


def _is_port(text: str) -> bool:
    """ZeroMQ takes the remainder of a number that is too large, and listens there."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


class Arrival(Enum):
    """What a numbered message turns out to be."""

    NEXT = "next"
    REPEATED = "repeated"
    AFTER_A_GAP = "after a gap"


class Numbering:
    """Both directions of one conversation, seen from one side. Does no I/O."""

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
        """Remember what was sent under the next number, until it is acknowledged."""
        size = sum(len(memoryview(frame).cast("B")) for frame in frames)
        self.sent += 1
        self.unacknowledged_bytes += size
        self._kept.append((self.sent, frames, size))

    def acknowledged(self, number: int) -> list[int]:
        """The other side has taken everything up to `number`; returns what it had not confirmed before."""
        numbers = []
        while self._kept and self._kept[0][0] <= number:
            kept, _, size = self._kept.popleft()
            self.unacknowledged_bytes -= size
            numbers.append(kept)
        return numbers

    def kept_since(self, number: int) -> list[list[Any]]:
        """What must be sent again when the other side misses `number`."""
        return [frames for kept, frames, _ in self._kept if kept >= number]

    def arrive(self, number: int, waiting: int = 0) -> Arrival:
        """Judge an arriving number, with `waiting` messages arrived but not taken. Changes nothing; `take` does."""
        expected = self.taken + waiting + 1
        if number == expected:
            return Arrival.NEXT
        return Arrival.REPEATED if number < expected else Arrival.AFTER_A_GAP

    def take(self, number: int) -> None:
        assert number == self.taken + 1, f"message {number} taken after {self.taken}"
        self.taken = number


def _feel_pulse(socket: zmq.Socket[bytes]) -> None:
    socket.heartbeat_ivl, socket.heartbeat_timeout = PULSE_MS, PULSE_TIMEOUT_MS


class GatewaySocket:
    """A gateway's connection to one engine on the running event loop. `on_frames` is called for every message,
    `on_refused` when the two sides cannot agree on who they are."""

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
        # `Numbering` bounds what is queued. ZeroMQ's own bound would drop or block, and tell nobody.
        self._socket.set_hwm(0)
        self._socket.linger = 0
        if keys is not None and uses_tcp(address):
            keys.lock_gateway(self._socket)
        _feel_pulse(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
        self._socket.connect(check_address(address))
        self._closed = False
        self._reading = False
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        # The descriptors signal a change, not a state: they stay quiet until what is there has been read. Not now: who
        # is told something has to have this socket first.
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._watch)

    def send(self, frames: list[Any]) -> None:
        if self._closed:
            return
        self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        # Sending may swallow the signal that something has arrived, so look.
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = False
        while not self._closed and self._is_readable():
            self._on_frames(self._socket.recv_multipart(zmq.NOBLOCK))

    def _is_readable(self) -> bool:
        """To ask is cheaper than to be refused, which is an exception."""
        events: Any = self._socket.get(zmq.EVENTS)
        return bool(events & _READABLE)

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event & REFUSED:
                # An answer is final, and ZeroMQ does not try again; a connection that was cut may be any accident.
                self._refusals += 1 if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else REFUSALS_BELIEVED
                if self._refusals >= REFUSALS_BELIEVED:
                    self._on_refused()
            else:
                self._on_disconnect()

    def close(self, last: list[Any] | None = None) -> None:
        """Idempotent. `last` is given a moment to leave."""
        if self._closed:
            return
        if last is not None:
            # If there is nobody to hear it, it does not matter.
            with suppress(zmq.Again):
                self._socket.send_multipart(last, flags=zmq.NOBLOCK)
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0 if last is None else 200)


class EngineSocket:
    """The engine's end: blocking, for a thread of its own; every message comes with the name of its gateway."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: LinkKeys | None = None) -> None:
        self._authenticator: ZapAuthenticator | None = None
        if keys is not None and uses_tcp(address):
            # A context has one doorman.
            context = self._own_context = zmq.Context()
            self._authenticator = ZapAuthenticator(context, keys)
        self._socket = context.socket(zmq.ROUTER)
        if self._authenticator is not None and keys is not None:
            keys.lock_engine(self._socket)
        self._socket.set_hwm(0)
        # A message to a gateway that is gone is an error, not nothing: it is the first sign that it is gone.
        self._socket.router_mandatory = True
        self._socket.linger = 500
        _feel_pulse(self._socket)
        self._monitor = self._socket.get_monitor_socket(REFUSED)
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
                "%s is neither encrypted nor authenticated: whoever reaches it can use the engine and read what is "
                "said. Give engine and gateways the same --fleet-secret-file",
                address,
            )

    @property
    def bound_to(self) -> str:
        """The address itself, with the port chosen by the system where it was left open."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def wait(self, seconds: float) -> bool:
        """Whether a message is there, after at most so long."""
        ready = dict(self._poller.poll(int(seconds * 1000)))
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.answer_all()
        if self._monitor in ready:
            self._note_refusals()
        return self._socket in ready

    def _note_refusals(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
        now = time.monotonic()
        if now - self._refusal_said_at > REFUSAL_SAID_SECONDS:
            self._refusal_said_at = now
            logger.warning("a gateway was refused at %s: %s", self.bound_to, WHY_REFUSED)

    def receive(self) -> tuple[bytes, Frames] | None:
        """The next message, if one is there; payloads stay in the buffers they arrived in."""
        try:
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return name.bytes, [frame.buffer for frame in frames]

    def send(self, name: bytes, frames: list[Any]) -> bool:
        """Whether there is anybody of that name."""
        try:
            self._socket.send_multipart([name, *frames], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
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
