"""ICE lite (RFC 8445) for one WebRTC call: a UDP port that answers the client's connectivity checks, and sends none.

It runs in the process of the call, and is the transport under aiortc's DTLS. The server sends to an address only after
a check from it that was signed with the password of the answer. Datagrams from all other addresses are dropped.
"""

from __future__ import annotations

import asyncio
import errno
import random
import secrets
import socket
import time
from contextlib import suppress
from typing import cast

from aioice import stun

# Datagrams that wait to be handled; further ones are dropped. 200 datagrams are 4 s of audio.
MAX_WAITING_DATAGRAMS = 200
# Addresses of one client: its networks, and the ports of its NAT when these change.
MAX_PEER_ADDRESSES = 16
# Sources of RTP that are looked at; the library keeps a state for each of them. A new source replaces the one that was
# silent for longest, if that was silent for this many seconds. So a stranger cannot replace a source that sends.
MAX_RTP_SOURCES = 16
SOURCE_SILENT_S = 5.0
# Datagrams per second from all addresses, beyond which the process sleeps: a flood costs little CPU time. A call has 50
# of audio and a few of data.
MAX_DATAGRAMS_PER_S = 1000
NAP_S = 0.05
# A client that has not checked for this long has left (RFC 7675).
CONSENT_S = 30.0
# The longest datagram that is read; a network passes 1500 bytes.
MAX_DATAGRAM_BYTES = 2048


class NoPort(Exception):
    """No UDP port can be opened."""


class IceLite(asyncio.DatagramProtocol):
    """The transport of a call, with the methods that aiortc's DTLS transport uses."""

    role = "controlled"

    def __init__(self, client_ufrag: str) -> None:
        self.ufrag = secrets.token_hex(4)
        self.password = secrets.token_hex(16)
        self.port = 0
        self.connected = asyncio.Event()
        self._username = f"{self.ufrag}:{client_ufrag}"
        self.datagrams: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._peer: tuple[str, int] | None = None
        self.known: set[tuple[str, int]] = set()
        # When a packet of each source came last.
        self._sources: dict[bytes, float] = {}
        self._checked_at = time.monotonic()
        self._transport: asyncio.DatagramTransport | None = None
        self._allowance, self._counted_at = float(MAX_DATAGRAMS_PER_S), time.monotonic()

    async def open(self, host: str, ports: tuple[int, int] | None) -> None:
        """Listen on this address, on a port of the range (both ends included) or on any. Raises NoPort."""
        bound = _bound(host, ports)
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=bound)
        self.port = bound.getsockname()[1]

    @property
    def state(self) -> str:
        return "completed" if self.connected.is_set() else "checking"

    @property
    def is_gone(self) -> bool:
        """Whether the client has stopped sending checks."""
        return time.monotonic() - self._checked_at > CONSENT_S

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self.datagrams.put_nowait(None)

    # For the DTLS transport

    async def _recv(self) -> bytes:
        datagram = await self.datagrams.get()
        if datagram is None:
            raise ConnectionError
        return datagram

    async def _send(self, data: bytes) -> None:
        if self._transport is None or self._peer is None:
            raise ConnectionError
        self._transport.sendto(data, self._peer)

    # For asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._count()
        address = (addr[0], addr[1])
        if not data or len(data) > MAX_DATAGRAM_BYTES:
            return
        if data[0] < 4:
            # Nothing in a message of a stranger may raise out of here.
            with suppress(Exception):
                self._take_check(stun.parse_message(data), address)
        elif address in self.known and self.datagrams.qsize() < MAX_WAITING_DATAGRAMS and self._is_wanted(data):
            self.datagrams.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        """The client's port is closed: ignored, because `is_gone` notices the missing checks."""

    def _count(self) -> None:
        now = time.monotonic()
        self._allowance += (now - self._counted_at) * MAX_DATAGRAMS_PER_S
        self._allowance = min(self._allowance, float(MAX_DATAGRAMS_PER_S)) - 1
        self._counted_at = now
        if self._allowance < 0:
            # The process has one call only, so no other waits. The system drops datagrams that do not fit its buffer.
            time.sleep(NAP_S)

    def _is_wanted(self, data: bytes) -> bool:
        """False for RTP of one source too many, and for RTCP, known by its second byte: nothing reads it, and the
        library keeps a state for each of its sources."""
        if data[0] < 128:
            return True
        if len(data) < 12 or 192 <= data[1] <= 223:
            return False
        source, now = data[8:12], time.monotonic()
        if source not in self._sources and len(self._sources) >= MAX_RTP_SOURCES:
            silent = min(self._sources, key=self._sources.__getitem__)
            if now - self._sources[silent] < SOURCE_SILENT_S:
                return False
            del self._sources[silent]
        self._sources[source] = now
        return True

    def _take_check(self, message: stun.Message, address: tuple[str, int]) -> None:
        """Answer a signed check; others get no answer."""
        if message.message_class is not stun.Class.REQUEST or message.message_method is not stun.Method.BINDING:
            return
        attributes = message.attributes
        if attributes.get("USERNAME") != self._username or not message.check_message_integrity(self.password.encode()):
            return
        if address not in self.known:
            if len(self.known) >= MAX_PEER_ADDRESSES:
                self.known = {self._peer} if self._peer is not None else set()
            self.known.add(address)
        self._checked_at = time.monotonic()
        answer = stun.Message(stun.Method.BINDING, stun.Class.RESPONSE, message.transaction_id)
        answer.attributes["XOR-MAPPED-ADDRESS"] = address
        answer.add_message_integrity(self.password.encode())
        if self._transport is not None:
            self._transport.sendto(bytes(answer), address)
        if "USE-CANDIDATE" in attributes:
            self._peer = address
            self.connected.set()


def _bound(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A UDP socket. Raises NoPort."""
    choices = [0] if ports is None else list(range(ports[0], ports[1] + 1))
    random.shuffle(choices)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = "all ports of webrtc.ports are in use"
    try:
        bound = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        raise NoPort(error.strerror or str(error)) from error
    bound.setblocking(False)
    for port in choices:
        try:
            bound.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
            continue
        return bound
    bound.close()
    raise NoPort(reason)
