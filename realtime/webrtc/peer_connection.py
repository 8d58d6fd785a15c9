"""The transport of one WebRTC call: ICE over UDP, DTLS, and SCTP with the data channel for events.

It runs in the process of the call; `Call` in `call_process.py` opens and closes it. ICE is our own. DTLS and SCTP are
those of aiortc, in subclasses that bound the memory and the CPU time that a client can use.

- `IceLite` is ICE lite (RFC 8445): a UDP port that answers the client's connectivity checks, and sends no checks. The
  server sends to an address only after a check from it that was signed with the password of the answer, so an offer
  cannot make the server send to any other address. Datagrams from all other addresses are dropped.
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

from realtime.webrtc.opus_track import OpusTrack, TrackAudio

# ICE

# Datagrams that wait to be handled; further ones are dropped. 200 datagrams are 4 s of audio.
MAX_WAITING_DATAGRAMS = 200
# Source addresses that are accepted for one client: it may have several networks, and its NAT may change its port.
MAX_PEER_ADDRESSES = 16
# RTP sources (SSRCs) whose packets are passed on; aiortc keeps a state for each of them. A new source replaces the one
# that was silent for longest, if that one was silent for at least `SOURCE_SILENT_S`. So a new source cannot replace one
# that sends.
MAX_RTP_SOURCES = 16
SOURCE_SILENT_S = 5.0
# Datagrams per second from all addresses. Above this rate the process sleeps `THROTTLE_S` for each datagram, so a flood
# costs little CPU time. A call needs 50 for audio and a few for data.
MAX_DATAGRAMS_PER_S = 1000
THROTTLE_S = 0.05
# A client that has sent no connectivity check for this many seconds has left (RFC 7675).
CONSENT_S = 30.0
# The longest datagram that is accepted. Networks carry up to 1500 bytes.
MAX_DATAGRAM_BYTES = 2048


class NoPort(Exception):
    """No UDP port can be opened."""


class IceLite(asyncio.DatagramProtocol):
    """The ICE transport of a call, with the methods that aiortc's DTLS transport uses."""

    role = "controlled"

    def __init__(self, client_ufrag: str) -> None:
        self.ufrag = secrets.token_hex(4)
        self.password = secrets.token_hex(16)
        self.port = 0
        self.connected = asyncio.Event()
        # The user name that the client's checks must have.
        self._username = f"{self.ufrag}:{client_ufrag}"
        # DTLS, SRTP and SCTP datagrams for the DTLS transport; None: the port is closed.
        self.datagrams: asyncio.Queue[bytes | None] = asyncio.Queue()
        # The address that the client has nominated; the server sends to it.
        self._peer: tuple[str, int] | None = None
        # Addresses that have sent a signed check.
        self.checked_addresses: set[tuple[str, int]] = set()
        # RTP source (SSRC) -> time of its last packet.
        self._sources: dict[bytes, float] = {}
        self._last_check_at = time.monotonic()
        self._transport: asyncio.DatagramTransport | None = None
        # Token bucket of datagrams: those that may still come now, and when that was computed.
        self._allowance, self._counted_at = float(MAX_DATAGRAMS_PER_S), time.monotonic()

    async def open(self, host: str, ports: tuple[int, int] | None) -> None:
        """Listen on this address, on a port of the range (both ends included) or on any. Raises NoPort."""
        bound_socket = _bind_udp_socket(host, ports)
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=bound_socket)
        self.port = bound_socket.getsockname()[1]

    @property
    def state(self) -> str:
        return "completed" if self.connected.is_set() else "checking"

    @property
    def client_has_left(self) -> bool:
        """Whether the client has stopped sending checks."""
        return time.monotonic() - self._last_check_at > CONSENT_S

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
        self._throttle()
        address = (addr[0], addr[1])
        if not data or len(data) > MAX_DATAGRAM_BYTES:
            return
        # The first byte tells STUN (0 to 3) from DTLS and RTP (RFC 7983).
        if data[0] < 4:
            # An untrusted message must not raise an exception out of here.
            with suppress(Exception):
                self._answer_check(stun.parse_message(data), address)
        elif (
            address in self.checked_addresses
            and self.datagrams.qsize() < MAX_WAITING_DATAGRAMS
            and self._is_accepted(data)
        ):
            self.datagrams.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        """The client's port is closed: ignored, because `client_has_left` notices the missing checks."""

    def _throttle(self) -> None:
        """Count a datagram; sleep if more than `MAX_DATAGRAMS_PER_S` come."""
        now = time.monotonic()
        self._allowance += (now - self._counted_at) * MAX_DATAGRAMS_PER_S
        self._allowance = min(self._allowance, float(MAX_DATAGRAMS_PER_S)) - 1
        self._counted_at = now
        if self._allowance < 0:
            # This blocks the event loop, which serves this call only. The system drops datagrams that do not fit into
            # the socket's buffer.
            time.sleep(THROTTLE_S)

    def _is_accepted(self, data: bytes) -> bool:
        """False for RTCP, and for RTP from more than `MAX_RTP_SOURCES` sources. Nothing reads RTCP, and aiortc keeps a
        state for each of its sources."""
        if data[0] < 128:
            return True  # DTLS
        # The second byte of RTCP is its packet type (RFC 5761).
        if len(data) < 12 or 192 <= data[1] <= 223:
            return False
        source, now = data[8:12], time.monotonic()
        if source not in self._sources and len(self._sources) >= MAX_RTP_SOURCES:
            longest_silent = min(self._sources, key=self._sources.__getitem__)
            if now - self._sources[longest_silent] < SOURCE_SILENT_S:
                return False
            del self._sources[longest_silent]
        self._sources[source] = now
        return True

    def _answer_check(self, message: stun.Message, address: tuple[str, int]) -> None:
        """Answer a connectivity check that is signed with our password; ignore all other STUN messages."""
        if message.message_class is not stun.Class.REQUEST or message.message_method is not stun.Method.BINDING:
            return
        attributes = message.attributes
        if attributes.get("USERNAME") != self._username or not message.check_message_integrity(self.password.encode()):
            return
        if address not in self.checked_addresses:
            if len(self.checked_addresses) >= MAX_PEER_ADDRESSES:
                # Forget all but the nominated address; addresses in use are added again by their next check.
                self.checked_addresses = {self._peer} if self._peer is not None else set()
            self.checked_addresses.add(address)
        self._last_check_at = time.monotonic()
        answer = stun.Message(stun.Method.BINDING, stun.Class.RESPONSE, message.transaction_id)
        answer.attributes["XOR-MAPPED-ADDRESS"] = address
        answer.add_message_integrity(self.password.encode())
        if self._transport is not None:
            self._transport.sendto(bytes(answer), address)
        if "USE-CANDIDATE" in attributes:
            self._peer = address
            self.connected.set()


def _bind_udp_socket(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A UDP socket on a port of the range, or on any if there is none. Raises NoPort."""
    candidates = [0] if ports is None else list(range(ports[0], ports[1] + 1))
    random.shuffle(candidates)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = "all ports of webrtc.ports are in use"
    try:
        udp_socket = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        raise NoPort(error.strerror or str(error)) from error
    udp_socket.setblocking(False)
    for port in candidates:
        try:
            udp_socket.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
            continue
        return udp_socket
    udp_socket.close()
    raise NoPort(reason)


# DTLS


class CallDtls(RTCDtlsTransport):
    """aiortc's DTLS transport; RTP goes to the audio track of the call, and RTCP is dropped."""

    track: OpusTrack
    # Called with the samples and gaps that the track has decoded.
    on_audio: Callable[[TrackAudio], None]

    async def _handle_rtp_data(self, data: bytes, arrival_time_ms: int) -> None:
        for audio in self.track.receive(data):
            self.on_audio(audio)

    async def _handle_rtcp_data(self, data: bytes) -> None:
        """Sender reports are not needed: times come from RTP."""


# SCTP, and the data channel for events

# The label of the channel for events in OpenAI's clients.
LABEL = "oai-events"
# Channels that a client may open; all but the one for events are closed at once.
MAX_CHANNELS = 8
# Chunks that wait for the rest of their message, or for chunks before them.
MAX_WAITING_CHUNKS = 1024
# The receive window, in messages of the longest length.
WINDOW_MESSAGES = 2
# Bytes that the client has not acknowledged. Above this bound the process stops reading events from the gateway, and
# the bound of the gateway's outbox applies.
MAX_UNSENT_BYTES = 256 * 1024
# Interval in seconds at which a sender checks whether the client has acknowledged more.
POLL_S = 0.05
# Chunks that the gap blocks of one acknowledgement (SACK) may cover: aiortc loops over them. The server never has this
# many in flight.
MAX_NAMED_CHUNKS = 4096
# Bytes of an SCTP packet's header, of a chunk's header, and of the fixed part of an INIT chunk and of a SACK chunk.
HEADER_BYTES, CHUNK_HEADER_BYTES, INIT_BYTES, SACK_BYTES = 12, 4, 16, 12


class RefusedPacket(Exception):
    """A packet exceeds a bound on memory or CPU time, or would make aiortc loop without end. The text says why."""


class BoundedSctp(RTCSctpTransport):
    """aiortc's SCTP transport, with a bound on each list that grows with the client's messages."""

    def __init__(
        self,
        transport: RTCDtlsTransport,
        message_bytes: int,
        wait_for_room: Callable[[], Awaitable[None]],
        on_fault: Callable[[str], None],
    ) -> None:
        """`message_bytes` is the longest message of the client. `wait_for_room` waits until another message can be
        accepted; meanwhile the client's datagrams queue up, and above `MAX_WAITING_DATAGRAMS` they are dropped."""
        super().__init__(transport)
        # The receive window that is advertised to the client; clients do not send more.
        self._advertised_rwnd = WINDOW_MESSAGES * message_bytes
        self._message_bytes = message_bytes
        self._wait_for_room = wait_for_room
        self._on_fault = on_fault

    async def _handle_data(self, data: bytes) -> None:
        try:
            check_packet(data)
            await super()._handle_data(data)
        except RefusedPacket as error:
            self._on_fault(str(error))
        except (AssertionError, ValueError, IndexError, KeyError, ConnectionError) as error:
            # aiortc checks little of what a client says.
            self._on_fault(f"a message of the client is not valid SCTP ({type(error).__name__})")

    async def _receive_data_chunk(self, chunk: DataChunk) -> None:
        waiting = sum(len(stream.reassembly) for stream in self._inbound_streams.values())
        if max(waiting, len(self._sack_misordered)) >= MAX_WAITING_CHUNKS or self._advertised_rwnd < len(
            chunk.user_data
        ):
            raise RefusedPacket(f"a message is longer than {self._message_bytes} bytes, or in too many pieces")
        await super()._receive_data_chunk(chunk)

    def _get_inbound_stream(self, stream_id: int) -> InboundStream:
        if stream_id not in self._inbound_streams and len(self._inbound_streams) >= MAX_CHANNELS:
            raise RefusedPacket(f"more than {MAX_CHANNELS} data channels were opened")
        return super()._get_inbound_stream(stream_id)

    async def _receive(self, stream_id: int, pp_id: int, data: bytes) -> None:
        if len(data) > self._message_bytes:
            raise RefusedPacket(f"a message is longer than {self._message_bytes} bytes")
        await self._wait_for_room()
        await super()._receive(stream_id, pp_id, data)


def check_packet(data: bytes) -> None:
    """Raise RefusedPacket for a packet on which aiortc would compute for seconds, or without end."""
    start = HEADER_BYTES
    while start + CHUNK_HEADER_BYTES <= len(data):
        kind, _, length = unpack_from("!BBH", data, start)
        if length < CHUNK_HEADER_BYTES:
            return  # aiortc refuses it
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
    # A parameter of length 0 would be read again and again.
    start = 0
    while start + 4 <= len(body):
        (length,) = unpack_from("!H", body, start + 2)
        if length < 4:
            raise RefusedPacket("a parameter of SCTP is shorter than its header")
        start += length + -length % 4


def _check_acknowledgement(body: bytes) -> None:
    # Gap blocks may overlap, so a short chunk can name very many.
    named = 0
    gaps = unpack_from("!H", body, 8)[0] if len(body) >= SACK_BYTES else 0
    for start in range(SACK_BYTES, min(SACK_BYTES + 4 * gaps, len(body) - 3), 4):
        first, last = unpack_from("!HH", body, start)
        named += max(0, last - first + 1)
    if named > MAX_NAMED_CHUNKS:
        raise RefusedPacket("an acknowledgement names more than was sent")


class EventChannel:
    """The data channel for events: sends JSON texts to the client, and passes its texts to `on_text`."""

    def __init__(self, sctp: BoundedSctp, on_text: Callable[[str], None], on_fault: Callable[[str], None]) -> None:
        self._sctp = sctp
        self._on_text = on_text
        self._on_fault = on_fault
        self._channel: RTCDataChannel | None = None
        self._is_open = asyncio.Event()
        # Number of channels that the client has opened, also ones that were closed.
        self._opened = 0
        sctp.on("datachannel", self._accept_channel)

    async def send(self, text: str) -> None:
        """Send a text when the channel is open and at most `MAX_UNSENT_BYTES` before it are not acknowledged."""
        await self._is_open.wait()
        assert self._channel is not None
        while self._unsent() > MAX_UNSENT_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        try:
            self._channel.send(text)
        except ValueError:
            self._on_fault("an event is longer than the a=max-message-size of the client")

    async def flush(self) -> None:
        """Wait until the client has acknowledged all texts."""
        while self._unsent():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    def _unsent(self) -> int:
        """Bytes that the client has not acknowledged: in aiortc's queues, or in flight."""
        sctp = self._sctp
        waiting = sum(len(data) for _, _, data in sctp._data_channel_queue)
        return waiting + sum(
            len(chunk.user_data) for queue in (sctp._outbound_queue, sctp._sent_queue) for chunk in queue
        )

    def _accept_channel(self, channel: RTCDataChannel) -> None:
        self._opened += 1
        if self._opened > MAX_CHANNELS:
            self._on_fault(f"more than {MAX_CHANNELS} data channels were opened")
        elif channel.label != LABEL or self._channel is not None:
            channel.close()
        else:
            self._channel = channel
            channel.on("message", self._on_message)
            channel.on("close", lambda: self._on_fault("the client has closed its data channel"))
            self._is_open.set()

    def _on_message(self, message: str | bytes) -> None:
        if isinstance(message, str):
            self._on_text(message)
        else:
            self._on_fault("events are texts; the client sent bytes")
