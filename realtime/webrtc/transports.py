"""The transports of one WebRTC call: ICE over UDP, DTLS, and SCTP with the data channel for events.

They run in the process of the call; `Call` in `call_process.py` opens and closes them. aiortc has DTLS and SCTP; the
classes here put bounds on what a client can make it hold or compute.

- `IceLite` is ICE lite (RFC 8445): a UDP port that answers the client's connectivity checks, and sends none. The server
  sends to an address only after a check from it that was signed with the password of the answer. Datagrams from all
  other addresses are dropped.
- `CallDtls` passes RTP to the audio track of the call.
- `BoundedSctp` refuses packets that would cost too much. `EventChannel` is the one data channel that carries JSON
  events in both directions (`oai-events`). The call ends if a bound is exceeded.
"""

from __future__ import annotations

import asyncio
import errno
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from struct import unpack_from
from typing import cast

from aioice import stun
from aiortc import RTCDataChannel
from aiortc.rtcdtlstransport import RTCDtlsTransport
from aiortc.rtcsctptransport import (
    AbortChunk,
    DataChunk,
    ErrorChunk,
    HeartbeatAckChunk,
    HeartbeatChunk,
    InboundStream,
    InitAckChunk,
    InitChunk,
    ReconfigChunk,
    RTCSctpTransport,
    SackChunk,
)

from realtime.webrtc.opus_track import Heard, OpusTrack

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


class CallDtls(RTCDtlsTransport):
    """aiortc's DTLS transport; RTP goes to the audio track of the call, and RTCP is dropped."""

    track: OpusTrack
    # Takes what the track has decoded.
    on_heard: Callable[[Heard], None]

    async def _handle_rtp_data(self, data: bytes, arrival_time_ms: int) -> None:
        for heard in self.track.take(data):
            self.on_heard(heard)

    async def _handle_rtcp_data(self, data: bytes) -> None:
        """Reports of the sender are not needed: times come from RTP."""


# SCTP, and the data channel for events

# The name of the channel for events, as OpenAI's clients call it.
LABEL = "oai-events"
# Channels that a client may open; all but the one for events are closed at once.
MAX_CHANNELS = 8
# Chunks of messages that are not complete, or came before others; and the bytes beyond the longest message that they
# may have.
MAX_HELD_CHUNKS = 1024
HELD_MESSAGES = 2
# Bytes that wait to be sent to the client. Beyond it the process stops to read events from the gateway, whose own bound
# then applies.
MAX_UNSENT_BYTES = 256 * 1024
LOOK_S = 0.05
# Chunks that one acknowledgement may name; the library looks at each of them. More do not wait to be sent.
MAX_NAMED_CHUNKS = 4096
HEADER_BYTES, CHUNK_HEADER_BYTES, INIT_BYTES, SACK_BYTES = 12, 4, 16, 12


class TooMuch(Exception):
    """The client has exceeded a bound on memory or computing time. The text names the bound."""


class BoundedSctp(RTCSctpTransport):
    """aiortc's SCTP transport, with a bound on each list that grows with the client's messages."""

    def __init__(
        self,
        transport: RTCDtlsTransport,
        message_bytes: int,
        room: Callable[[], Awaitable[None]],
        on_fault: Callable[[str], None],
    ) -> None:
        """`room` waits until another message can be taken; meanwhile the client's datagrams wait, and then are lost."""
        super().__init__(transport)
        # The receive window that is advertised to the client; clients keep to it.
        self._advertised_rwnd = HELD_MESSAGES * message_bytes
        self._message_bytes = message_bytes
        self._room = room
        self._on_fault = on_fault

    async def _handle_data(self, data: bytes) -> None:
        try:
            check_packet(data)
            await super()._handle_data(data)
        except TooMuch as error:
            self._on_fault(str(error))
        except (AssertionError, ValueError, IndexError, KeyError, ConnectionError) as error:
            # aiortc checks little of what a client says.
            self._on_fault(f"a message of the client is not valid SCTP ({type(error).__name__})")

    async def _receive_data_chunk(self, chunk: DataChunk) -> None:
        held = sum(len(stream.reassembly) for stream in self._inbound_streams.values())
        if max(held, len(self._sack_misordered)) >= MAX_HELD_CHUNKS or self._advertised_rwnd < len(chunk.user_data):
            raise TooMuch(f"a message is longer than {self._message_bytes} bytes, or in too many pieces")
        await super()._receive_data_chunk(chunk)

    def _get_inbound_stream(self, stream_id: int) -> InboundStream:
        if stream_id not in self._inbound_streams and len(self._inbound_streams) >= MAX_CHANNELS:
            raise TooMuch(f"more than {MAX_CHANNELS} data channels were opened")
        return super()._get_inbound_stream(stream_id)

    async def _receive(self, stream_id: int, pp_id: int, data: bytes) -> None:
        if len(data) > self._message_bytes:
            raise TooMuch(f"a message is longer than {self._message_bytes} bytes")
        await self._room()
        await super()._receive(stream_id, pp_id, data)


def check_packet(data: bytes) -> None:
    """Raise TooMuch for a packet that the library would compute for seconds, or without end."""
    start = HEADER_BYTES
    while start + CHUNK_HEADER_BYTES <= len(data):
        kind, _, length = unpack_from("!BBH", data, start)
        if length < CHUNK_HEADER_BYTES:
            return  # the library refuses it
        body = data[start + CHUNK_HEADER_BYTES : start + length]
        if kind in (InitChunk.type, InitAckChunk.type):
            _check_parameters(body[INIT_BYTES:])
        elif kind in (
            AbortChunk.type,
            ErrorChunk.type,
            HeartbeatChunk.type,
            HeartbeatAckChunk.type,
            ReconfigChunk.type,
        ):
            _check_parameters(body)
        elif kind == SackChunk.type:
            _check_acknowledgement(body)
        start += length + -length % 4


def _check_parameters(body: bytes) -> None:
    start = 0
    while start + 4 <= len(body):
        (length,) = unpack_from("!H", body, start + 2)
        if length < 4:
            raise TooMuch("a parameter of SCTP is shorter than its header")
        start += length + -length % 4


def _check_acknowledgement(body: bytes) -> None:
    named = 0
    gaps = unpack_from("!H", body, 8)[0] if len(body) >= SACK_BYTES else 0
    for start in range(SACK_BYTES, min(SACK_BYTES + 4 * gaps, len(body) - 3), 4):
        first, last = unpack_from("!HH", body, start)
        named += max(0, last - first + 1)
    if named > MAX_NAMED_CHUNKS:
        raise TooMuch("an acknowledgement names more than was sent")


class EventChannel:
    """The data channel for events: sends JSON texts to the client, and passes its texts to `on_text`."""

    def __init__(self, sctp: BoundedSctp, on_text: Callable[[str], None], on_fault: Callable[[str], None]) -> None:
        self._sctp = sctp
        self._on_text = on_text
        self._on_fault = on_fault
        self._channel: RTCDataChannel | None = None
        self._is_open = asyncio.Event()
        self._opened = 0
        sctp.on("datachannel", self._take_channel)

    async def send(self, text: str) -> None:
        """Send a text when the channel is open and the client has acknowledged most of the texts before it."""
        await self._is_open.wait()
        assert self._channel is not None
        while self._unsent() > MAX_UNSENT_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        try:
            self._channel.send(text)
        except ValueError:
            self._on_fault("an event is longer than the a=max-message-size of the client")

    async def flush(self) -> None:
        """Wait until the client has acknowledged all texts."""
        while self._unsent():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _unsent(self) -> int:
        sctp = self._sctp
        waiting = sum(len(data) for _, _, data in sctp._data_channel_queue)
        return waiting + sum(
            len(chunk.user_data) for queue in (sctp._outbound_queue, sctp._sent_queue) for chunk in queue
        )

    def _take_channel(self, channel: RTCDataChannel) -> None:
        self._opened += 1
        if self._opened > MAX_CHANNELS:
            self._on_fault(f"more than {MAX_CHANNELS} data channels were opened")
        elif channel.label != LABEL or self._channel is not None:
            channel.close()
        else:
            self._channel = channel
            channel.on("message", self._take_message)
            channel.on("close", lambda: self._on_fault("the client has closed its data channel"))
            self._is_open.set()

    def _take_message(self, message: str | bytes) -> None:
        if isinstance(message, str):
            self._on_text(message)
        else:
            self._on_fault("events are texts; the client sent bytes")
