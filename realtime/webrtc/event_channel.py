"""The data channel of a WebRTC call: JSON events in both directions, over aiortc's SCTP with bounded memory.

It runs in the process of the call. `BoundedSctp` refuses packets that would make aiortc hold or compute too much;
`EventChannel` is the one channel that carries events (`oai-events`). The call ends if a bound is exceeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from struct import unpack_from

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
