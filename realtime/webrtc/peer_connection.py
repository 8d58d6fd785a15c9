"""The peer connection of one WebRTC call: SDP offer and answer, ICE over UDP, DTLS, and SCTP with the data channel.

It runs in the process of the call; `Call` in `call_process.py` opens and closes it. aiortc has DTLS and SCTP; the
classes here put bounds on what a client can make it hold or compute.

- `read_offer` reads the client's SDP offer, and `write_answer` writes the server's answer: one audio track in, one data
  channel. The candidates of an offer are ignored.

- `IceLite` is ICE lite (RFC 8445): a UDP port that answers the client's connectivity checks, and sends none. The server
  sends to an address only after a check from it that was signed with the password of the answer, so an offer cannot
  make it send to any other address. Datagrams from all other addresses are dropped.
- `CallDtls` passes RTP to the audio track of the call.
- `BoundedSctp` refuses packets that would cost too much. `EventChannel` is the one data channel that carries JSON
  events in both directions (`oai-events`). The call ends if a bound is exceeded.
"""

from __future__ import annotations

import asyncio
import errno
import random
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
# silent for longest, if that was silent for this many seconds. So another sender cannot replace a source that sends.
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
            # An untrusted message must not raise an exception out of here.
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


# SDP: the offer and its answer

MAX_LINES = 2000
MAX_LINE_CHARACTERS = 1024
# Sections of media in an offer. A browser's offer has one for each track, and one for all data channels.
MAX_SECTIONS = 16
MAX_FINGERPRINTS = 4
OPUS = re.compile(r"opus/48000(?:/[12])?", re.IGNORECASE)
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,64}")
ICE_CHARACTERS = re.compile(r"[A-Za-z0-9+/]{4,256}")
DIGEST = re.compile(r"(sha-256|sha-384|sha-512) ((?:[0-9A-F]{2}:)+[0-9A-F]{2})", re.IGNORECASE)
MEDIA = re.compile(r"([a-z]{1,20}) ([0-9]{1,5})(?:/[0-9]{1,5})? ([A-Z/]{1,30}) ([^ ].*)")
RTP, SCTP = ("UDP/TLS/RTP/SAVPF", "UDP/TLS/RTP/SAVP", "RTP/SAVPF", "RTP/SAVP"), ("UDP/DTLS/SCTP", "DTLS/SCTP")
# What a client without the attribute takes (RFC 8841).
DEFAULT_MESSAGE_BYTES = 65536


class BadOffer(Exception):
    """The offer cannot be answered. The text says why, without words of the offer."""


@dataclass(slots=True)
class Section:
    """One media section (`m=`) of the offer, with its attributes."""

    kind: str
    protocol: str
    formats: list[str]
    is_off: bool
    attributes: list[tuple[str, str]] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        return next((value for known, value in self.attributes if known == name), None)

    def all(self, name: str) -> list[str]:
        return [value for known, value in self.attributes if known == name]


@dataclass(frozen=True, slots=True)
class Offer:
    """The values of an offer that the server needs."""

    sections: tuple[Section, ...]
    audio: Section
    payload_type: int
    # The section of data channels, if there is one.
    data: Section | None
    ufrag: str
    fingerprints: tuple[tuple[str, str], ...]
    # The client begins the DTLS handshake.
    client_begins: bool
    sctp_port: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class Local:
    """The server's own values in an answer."""

    # Addresses at which the client reaches this server, all with the same port.
    addresses: Sequence[str]
    port: int
    ufrag: str
    password: str
    # A digest of the certificate: algorithm, value.
    fingerprint: tuple[str, str]
    message_bytes: int


def read_offer(text: str) -> Offer:
    """Raises BadOffer."""
    common, sections = _sections(text)
    audio = next((section for section in sections if _is_audio(section)), None)
    if audio is None:
        raise BadOffer("the offer has no audio section with Opus that the client sends")
    data = next((section for section in sections if _is_data(section)), None)
    if data is not None and not _is_bundled(common, audio, data):
        raise BadOffer("audio and data channel must share one transport; offer them in one group BUNDLE")
    return Offer(
        sections=tuple(sections),
        audio=audio,
        payload_type=_opus_type(audio) or 0,
        data=data,
        ufrag=_checked(_first(common, audio, "ice-ufrag"), ICE_CHARACTERS, "ice-ufrag"),
        fingerprints=_fingerprints(common, audio),
        client_begins=_first(common, audio, "setup") != "passive",
        sctp_port=_number(data.get("sctp-port") if data else None, 5000, 65535),
        message_bytes=_number(data.get("max-message-size") if data else None, DEFAULT_MESSAGE_BYTES, 2**31),
    )


def write_answer(offer: Offer, local: Local) -> str:
    bundled = [section.get("mid") for section in (offer.audio, offer.data) if section is not None]
    lines = ["v=0", "o=- 1 1 IN IP4 0.0.0.0", "s=-", "t=0 0", "a=ice-lite"]
    if all(bundled):
        lines.append(f"a=group:BUNDLE {' '.join(mid for mid in bundled if mid)}")
    for section in offer.sections:
        if section is offer.audio:
            lines += _audio_lines(offer, local)
        elif section is offer.data:
            lines += _data_lines(offer, local)
        else:
            lines += [f"m={section.kind} 0 {section.protocol} {section.formats[0]}", "c=IN IP4 0.0.0.0", "a=inactive"]
            lines += _mid_lines(section)
    return "".join(f"{line}\r\n" for line in lines)


def _audio_lines(offer: Offer, local: Local) -> list[str]:
    kind = offer.payload_type
    return [
        f"m=audio {local.port} {offer.audio.protocol} {kind}",
        *_transport_lines(offer, local),
        *_mid_lines(offer.audio),
        "a=recvonly",
        "a=rtcp-mux",
        f"a=rtpmap:{kind} opus/48000/2",
        f"a=fmtp:{kind} minptime=10;useinbandfec=1;stereo=0",
    ]


def _data_lines(offer: Offer, local: Local) -> list[str]:
    assert offer.data is not None
    old = offer.data.protocol == "DTLS/SCTP"
    lines = ["a=sctpmap:5000 webrtc-datachannel 16"] if old else ["a=sctp-port:5000"]
    return [
        f"m=application {local.port} {offer.data.protocol} {'5000' if old else 'webrtc-datachannel'}",
        *_transport_lines(offer, local),
        *_mid_lines(offer.data),
        *lines,
        f"a=max-message-size:{local.message_bytes}",
    ]


def _transport_lines(offer: Offer, local: Local) -> Iterable[str]:
    family = "IP6" if ":" in local.addresses[0] else "IP4"
    yield f"c=IN {family} {local.addresses[0]}"
    for number, address in enumerate(local.addresses, start=1):
        # The priority of a host candidate; the first address has the highest.
        priority = (126 << 24) + ((65536 - number) << 8) + 255
        yield f"a=candidate:{number} 1 udp {priority} {address} {local.port} typ host"
    yield "a=end-of-candidates"
    yield f"a=ice-ufrag:{local.ufrag}"
    yield f"a=ice-pwd:{local.password}"
    yield f"a=fingerprint:{local.fingerprint[0]} {local.fingerprint[1]}"
    yield f"a=setup:{'passive' if offer.client_begins else 'active'}"


def _mid_lines(section: Section) -> list[str]:
    mid = section.get("mid")
    return [] if mid is None else [f"a=mid:{mid}"]


def _sections(text: str) -> tuple[list[tuple[str, str]], list[Section]]:
    """The attributes of the whole session, and the sections."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        raise BadOffer(f"the offer has more than {MAX_LINES} lines")
    if lines[0].rstrip("\r") != "v=0":
        raise BadOffer("the offer is no SDP: it must begin with the line v=0")
    common: list[tuple[str, str]] = []
    sections: list[Section] = []
    for line in lines[1:]:
        line = line.rstrip("\r")
        if len(line) > MAX_LINE_CHARACTERS or not line.isprintable():
            raise BadOffer(f"a line of the offer is longer than {MAX_LINE_CHARACTERS} characters, or not printable")
        if line.startswith("m="):
            sections.append(_section(line[2:]))
            if len(sections) > MAX_SECTIONS:
                raise BadOffer(f"the offer has more than {MAX_SECTIONS} sections of media")
        elif line.startswith("a="):
            name, _, value = line[2:].partition(":")
            if name == "mid" and not TOKEN.fullmatch(value):
                raise BadOffer("a=mid is no token")
            (sections[-1].attributes if sections else common).append((name, value))
    return common, sections


def _section(line: str) -> Section:
    found = MEDIA.fullmatch(line)
    if found is None:
        raise BadOffer("an m= line of the offer is not valid")
    kind, port, protocol, formats = found.groups()
    names = formats.split()
    if not all(TOKEN.fullmatch(name) for name in names):
        raise BadOffer("an m= line of the offer is not valid")
    return Section(kind, protocol, names, is_off=port == "0")


def _is_audio(section: Section) -> bool:
    sends = section.get("recvonly") is None and section.get("inactive") is None
    is_rtp = section.kind == "audio" and section.protocol in RTP
    return is_rtp and sends and not section.is_off and _opus_type(section) is not None


def _is_data(section: Section) -> bool:
    return section.kind == "application" and section.protocol in SCTP and not section.is_off


def _is_bundled(common: list[tuple[str, str]], audio: Section, data: Section) -> bool:
    wanted = {audio.get("mid"), data.get("mid")}
    groups = [value.split() for name, value in common if name == "group"]
    return None not in wanted and any(mids[:1] == ["BUNDLE"] and wanted <= set(mids[1:]) for mids in groups)


def _opus_type(section: Section) -> int | None:
    for value in section.all("rtpmap"):
        kind, _, codec = value.partition(" ")
        if OPUS.fullmatch(codec.strip()) and kind in section.formats and kind.isdecimal() and len(kind) <= 3:
            return int(kind) if int(kind) < 128 else None
    return None


def _first(common: list[tuple[str, str]], section: Section, name: str) -> str | None:
    """An attribute of the section, or else of the whole session."""
    return section.get(name) or next((value for known, value in common if known == name), None)


def _fingerprints(common: list[tuple[str, str]], section: Section) -> tuple[tuple[str, str], ...]:
    given = section.all("fingerprint") or [value for name, value in common if name == "fingerprint"]
    found = [DIGEST.fullmatch(value) for value in given[:MAX_FINGERPRINTS]]
    digests = tuple((match[1].lower(), match[2].upper()) for match in found if match)
    if not digests:
        raise BadOffer("the offer has no a=fingerprint with sha-256, sha-384 or sha-512")
    return digests


def _checked(value: str | None, pattern: re.Pattern[str], name: str) -> str:
    if value is None or not pattern.fullmatch(value):
        raise BadOffer(f"the offer has no valid a={name}")
    return value


def _number(value: str | None, otherwise: int, most: int) -> int:
    if value is None or not (value.isascii() and value.isdecimal()) or len(value) > 10:
        return otherwise
    return min(int(value), most)
