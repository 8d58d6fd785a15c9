"""uvicorn's HTTP and WebSocket protocol classes with limits and deadlines for clients.

`realtime/app.py` gives these classes to uvicorn, `HttpWithDeadlines` as its subclass in `realtime/http/descriptors.py`;
uvicorn makes one object for each TCP connection. `tests/realtime/serving/test_uvicorn_protocols_internals.py` checks
the internals of uvicorn that they use. Both classes give the application the operations of `socket_extras.py`.

- `HttpWithDeadlines`: deadlines for slow requests and for responses that the client does not read.
- `RealtimeWebSocket`: a liveness check that spares clients which send without reading, long messages in parts, and
  limits on the memory and the CPU time that one client can use without a pause.
- `text_of_whole_frame` and `FrameSplitter` stand before the parser of `websockets` in `RealtimeWebSocket`. The first
  decodes a typical frame without the parser; the other cuts a long frame into fragments, because parsing much at once
  would delay other clients.
- `clean_headers`: response headers without control characters.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import (  # type: ignore[attr-defined]
    Frame,
    apply_mask,
)
from websockets.protocol import State

from realtime.serving.socket_extras import (
    EXTENSION,
    PART,
    Part,
    SocketExtras,
    TextHandler,
    is_reset,
    peer_has_closed,
    seconds_since_data,
    viewer_line,
)

# Proxies refuse responses with large headers.
MAX_HEADER_CHARACTERS = 500

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
# A request target that is a whole URL (absolute form): its host, and its path and query.
_ABSOLUTE_FORM = re.compile(rb"(?i:https?|wss?)://([^/?@]+)((?:[/?].*)?)")

RawHeaders = Iterable[tuple[bytes, bytes]]


def header_text(text: str) -> str:
    """A text that may contain the client's input, made safe as a header value: ASCII, one line, bounded length."""
    return _escaped(text[:MAX_HEADER_CHARACTERS].encode("ascii", "backslashreplace")).decode("ascii")


def clean_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of a response with control characters escaped, so that no value can start another header line."""
    return [(name, _escaped(value)) for name, value in headers]


def _escaped(value: bytes) -> bytes:
    return _CONTROL.sub(lambda found: b"\\x%02x" % found[0][0], value)


# WebSocket frames. Nearly every append is one frame that arrives in one read; it is decoded here, without the parser.


# First two bytes of such a frame: a final text frame; masked, with a length of two bytes.
_WHOLE_TEXT, _MASKED_MIDDLE_LENGTH = 0x81, 0xFE
_HEADER_BYTES = 8
# Shortest payload with a length of two bytes.
_SHORTEST = 126
# The parser gets the payload of a frame in fragments of at most this size, because unmasking, copying and decoding more
# at once would delay other clients. A multiple of the mask's length (4).
PART_BYTES = 64 * 1024
_FINAL, _OPCODE, _MASKED = 0x80, 0x0F, 0x80
_CONTINUED, _FIRST_CONTROL = 0x0, 0x8


def text_of_whole_frame(data: bytes, max_size: int) -> str | None:
    """The text if the data is exactly one final, masked text frame with a two-byte length; else None."""
    length = len(data) - _HEADER_BYTES
    if not _SHORTEST <= length <= max_size or data[0] != _WHOLE_TEXT or data[1] != _MASKED_MIDDLE_LENGTH:
        return None
    if int.from_bytes(data[2:4]) != length:
        return None
    try:
        return str(apply_mask(data[_HEADER_BYTES:], data[4:_HEADER_BYTES]), "utf-8")
    except UnicodeDecodeError:
        return None


class FrameSplitter:
    """Rewrites a client's byte stream so that long frames reach the parser as fragments of `PART_BYTES`.

    RFC 6455 allows intermediaries to fragment messages, so the result is valid. A frame that makes its message longer
    than `max_size` is passed on unchanged: the parser refuses it by its header.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._header = b""
        # Payload bytes left in the current fragment, and in the frame after it.
        self._fragment_left = 0
        self._frame_left = 0
        # FIN bit of the frame that is being split.
        self._final = 0
        self._mask = b""
        self._message_size = 0

    @property
    def at_start(self) -> bool:
        """Whether the next byte is the first byte of a frame."""
        return not self._fragment_left and not self._frame_left and not self._header

    def split(self, data: bytes) -> bytes:
        """The bytes to give to the parser in place of `data`."""
        if len(data) <= self._fragment_left:
            self._fragment_left -= len(data)
            return data
        output, position = [], 0
        while position < len(data):
            if not self._fragment_left and self._frame_left:
                output.append(self._fragment(_CONTINUED))
            if self._fragment_left:
                step = min(self._fragment_left, len(data) - position)
                self._fragment_left -= step
                output.append(data[position : position + step])
            else:
                step = min(_missing(self._header), len(data) - position)
                self._header += data[position : position + step]
                if not _missing(self._header):
                    header, self._header = self._header, b""
                    output.append(self._begin(header))
            position += step
        return b"".join(output)

    def _begin(self, header: bytes) -> bytes:
        """The header to give to the parser: of the whole frame, or of its first fragment."""
        opcode, length = header[0] & _OPCODE, _length(header)
        if opcode < _FIRST_CONTROL:
            self._message_size = length + (self._message_size if opcode == _CONTINUED else 0)
        masked = header[1] & _MASKED
        if length <= PART_BYTES or not masked or self._message_size > self._max_size:
            self._fragment_left = length
            return header
        self._frame_left, self._final, self._mask = length, header[0] & _FINAL, header[-4:]
        return self._fragment(header[0] & ~_FINAL)

    def _fragment(self, first_byte: int) -> bytes:
        """The header of the next fragment; the last one has the FIN bit of the frame."""
        self._fragment_left = min(PART_BYTES, self._frame_left)
        self._frame_left -= self._fragment_left
        if not self._frame_left:
            first_byte |= self._final
        return bytes((first_byte,)) + _masked_length(self._fragment_left) + self._mask


def _masked_length(length: int) -> bytes:
    if length < 126:
        return bytes((_MASKED | length,))
    return (
        bytes((_MASKED | 126,)) + length.to_bytes(2) if length < 2**16 else bytes((_MASKED | 127,)) + length.to_bytes(8)
    )


def _missing(header: bytes) -> int:
    """Bytes that are still missing to complete the header of a frame, or to know its length."""
    if len(header) < 2:
        return 2 - len(header)
    mask_bytes = 4 if header[1] & 0x80 else 0
    return 2 + _length_bytes(header) + mask_bytes - len(header)


def _length_bytes(header: bytes) -> int:
    return {126: 2, 127: 8}.get(header[1] & 0x7F, 0)


def _length(header: bytes) -> int:
    size = _length_bytes(header)
    return int.from_bytes(header[2 : 2 + size]) if size else header[1] & 0x7F


# Messages and bytes that may be queued for the application before reading pauses. uvicorn itself pauses after every
# message, which costs two system calls each time.
MAX_WAITING = 32
MAX_WAITING_BYTES = 256 * 1024
# WebSocket bytes are parsed in pieces of this size, for at most this time in seconds before yielding: they may contain
# hundreds of control frames. One append of 80 ms at 16 kHz, or of 50 ms at 24 kHz, fits into a piece.
PIECE_BYTES = 3584
PARSING_S = 0.0005

# Interval in seconds at which a peer is checked, with a ping, while its socket is not read.
PEER_CHECK_S = 2.0

UNREADABLE_HEAD = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\n"
    b"The headers of the upgrade request are too long or too many.\n"
)
# HTTP bytes are parsed in pieces that start with this size and adapt to the parse time, which is long for tiny chunks.
HTTP_PIECE_BYTES = 2048
MIN_HTTP_PIECE_BYTES = 256
MAX_HTTP_PIECE_BYTES = 64 * 1024
# Minimum rate of a request body in bytes per second.
MIN_BODY_RATE = 1024
# A response that the client does not read is cut off after this many times `handshake_s` (seconds).
UNREAD_TIMES = 6


class _Mailbox:
    """A queue of received messages with one reader; replaces uvicorn's asyncio queue because it is faster."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.bytes = 0

    def put_nowait(self, message: Any) -> None:
        self._messages.append(message)
        self.bytes += _size(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self.bytes -= _size(message)
        return message

    def empty(self) -> bool:
        return not self._messages

    @property
    def is_waited_for(self) -> bool:
        """The queue is empty and the reader waits in `get`."""
        return not self._messages and self._waiter is not None and not self._waiter.done()

    @property
    def full(self) -> bool:
        return len(self._messages) >= MAX_WAITING or self.bytes >= MAX_WAITING_BYTES


def _size(message: Any) -> int:
    part = message.get(PART)
    return len(message.get("text") or message.get("bytes") or "") if part is None else len(part.data)


class _Incoming:
    """A WebSocket message whose last fragment has not arrived."""

    def __init__(self, is_text: bool) -> None:
        self.is_text = is_text
        # Bytes not passed on yet; one buffer, so that thousands of tiny fragments take no more than their bytes.
        self.buffer = bytearray()
        # The message is longer than `whole_bytes`: it is passed on in parts.
        self.is_long = False
        self._decoder: codecs.IncrementalDecoder | None = None

    def check(self, data: bytes, *, final: bool) -> None:
        """Raise UnicodeDecodeError if the message is a text and these next bytes are not valid UTF-8."""
        if not self.is_text or (self._decoder is None and data.isascii()):
            return
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._decoder.decode(data, final)


class RealtimeWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with limits for each client.

    Any byte from the client counts as a sign of life and not only a pong: a client that sends without reading answers
    no pings, but it is alive.

    Bytes that were read and not parsed yet are kept, and reading pauses until they are parsed. If the client does not
    read, only the pong to its latest ping is sent when it reads again.

    A message longer than `whole_bytes` is passed on in parts as it arrives, so neither memory nor the time without a
    yield grows with its length.
    """

    whole_bytes = PART_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_data_at = 0.0
        self._mailbox = _Mailbox()
        self.queue = self._mailbox  # type: ignore[assignment]
        self._unparsed = b""
        self._parsing_later: asyncio.Handle | None = None
        self._unsent_pong = b""
        self._text_handler: TextHandler | None = None
        # Only the first message of each read may be offered to the handler; the others wait for the reader and its
        # share.
        self._may_be_offered = False
        self._max_size = self.config.ws_max_size
        self._splitter = FrameSplitter(self._max_size)
        self._incoming: _Incoming | None = None
        # Bytes received since the deadline of an incomplete message was set.
        self._message_bytes = 0
        self._message_deadline: asyncio.TimerHandle | None = None
        self._peer_check: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._last_data_at = self.loop.time()
        if self.handshake_initiated and not self.handshake_complete:
            # RFC 6455 (4.1): a client sends nothing before the handshake is complete. The parser cannot refuse it yet.
            return
        self._may_be_offered = True
        if self.handshake_initiated and self._handled_whole_frame(data):
            return
        self._message_bytes += len(data)
        self._unparsed = self._unparsed + data if self._unparsed else data
        if self._parsing_later is None and not self.read_paused:
            self._parse()

    def _parse(self) -> None:
        """Parse the bytes that were read, until the mailbox is full or `PARSING_S` has passed."""
        self._parsing_later = None
        started, parsed = self.loop.time(), 0
        data = self._unparsed
        while parsed < len(data) and self._accepts_more:
            if parsed and self.loop.time() - started > PARSING_S:
                self._parsing_later = self.loop.call_soon(self._parse)
                break
            piece = data[parsed : parsed + PIECE_BYTES]
            super().data_received(self._splitter.split(piece) if self.handshake_initiated else piece)
            parsed += PIECE_BYTES
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A header that h11 accepts and `websockets` refuses: uvicorn would never answer it.
            self.transport.write(UNREADABLE_HEAD)
            self.transport.close()
        self._unparsed = data[parsed:]
        if self.transport.is_closing():
            self._unparsed = b""
        elif self._accepts_more and not self._unparsed:
            self._resume_reading()
        else:
            self._pause_reading()
        self._watch_message()

    def _watch_message(self) -> None:
        """Set or cancel the deadline of an incomplete message, which must arrive at `MIN_BODY_RATE` like a body."""
        if self._incoming is None and self._splitter.at_start:
            if self._message_deadline is not None:
                self._message_deadline.cancel()
                self._message_deadline = None
        elif self._message_deadline is None and self.ping_timeout is not None:
            self._message_bytes = 0
            self._message_deadline = self.loop.call_later(self.ping_timeout, self._message_is_late)

    def _message_is_late(self) -> None:
        self._message_deadline = None
        if self.close_sent or self.transport.is_closing():
            return
        assert self.ping_timeout is not None
        # While reading is paused, missing bytes are not the client's fault.
        if self.read_paused or self._message_bytes >= MIN_BODY_RATE * self.ping_timeout:
            self._watch_message()
        else:
            self.conn.fail(1008, "the rest of a message did not arrive in time")
            self.handle_parser_exception()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._message_deadline is not None:
            self._message_deadline.cancel()
        if self._peer_check is not None:
            self._peer_check.cancel()
        super().connection_lost(exc)

    @property
    def _accepts_more(self) -> bool:
        # After our close frame messages are discarded, and reading continues until the peer's close frame.
        return (self.close_sent or not self._mailbox.full) and not self.transport.is_closing()

    def _resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
            if self._peer_check is None:
                self._peer_check = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    def _check_peer(self) -> None:
        """Notice a client that left while its socket is not read, before the ordinary pings do.

        Its end of stream comes after bytes for which the system's buffer has no room. But a peer that has closed its
        socket answers a ping with a reset, and one that has only finished sending does not.
        """
        self._peer_check = None
        if not self.read_paused or self.transport.is_closing():
            return
        if is_reset(self.transport):
            self.transport.abort()
            return
        if self.ping_interval is not None and self._may_write():
            self.conn.send_ping(b"")
            self.transport.write(b"".join(self.conn.data_to_send()))
        self._peer_check = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    def _may_write(self) -> bool:
        is_open = self.handshake_complete and self.conn.state is State.OPEN
        return is_open and self.writable.is_set() and not self.close_sent and not self.transport.is_closing()

    async def receive(self) -> Any:
        message = await self._mailbox.get()
        if self.read_paused and self._mailbox.empty() and self._parsing_later is None:
            self._parse()
        return message

    def handle_text(self, event: Frame) -> None:
        self._incoming = _Incoming(is_text=True)
        self._add_fragment(self._incoming, event)

    def handle_bytes(self, event: Frame) -> None:
        self._incoming = _Incoming(is_text=False)
        self._add_fragment(self._incoming, event)

    def handle_cont(self, event: Frame) -> None:
        # The parser refuses a continuation without a first frame.
        assert self._incoming is not None
        self._add_fragment(self._incoming, event)

    def _add_fragment(self, message: _Incoming, fragment: Frame) -> None:
        if fragment.fin:
            self._incoming = None
        if self.close_sent:
            return
        message.buffer += fragment.data
        message.is_long = message.is_long or len(message.buffer) > self.whole_bytes
        try:
            if message.is_long:
                self._deliver_parts(message, fragment.fin)
            elif fragment.fin:
                self._deliver(message)
        except UnicodeDecodeError:
            self.conn.fail(1007, "text frames must be UTF-8")
            self.handle_parser_exception()
            return
        if self._mailbox.full:
            self._pause_reading()

    def _deliver(self, message: _Incoming) -> None:
        if not message.is_text:
            self._mailbox.put_nowait({"type": "websocket.receive", "bytes": bytes(message.buffer)})
            return
        text = str(message.buffer, "utf-8")
        if not self._handled_now(text):
            self._mailbox.put_nowait({"type": "websocket.receive", "text": text})

    def _deliver_parts(self, message: _Incoming, is_complete: bool) -> None:
        buffer = message.buffer
        while len(buffer) >= PART_BYTES or is_complete:
            data = bytes(buffer[:PART_BYTES])
            del buffer[:PART_BYTES]
            is_last = is_complete and not buffer
            message.check(data, final=is_last)
            self._mailbox.put_nowait({"type": "websocket.receive", PART: Part(data, message.is_text, is_last)})
            if is_last:
                return

    def handle_ping(self) -> None:
        pongs = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(pongs))
        elif pongs:
            self._unsent_pong = pongs[-1]

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unsent_pong:
            self.transport.write(self._unsent_pong)
            self._unsent_pong = b""

    def _handled_whole_frame(self, data: bytes) -> bool:
        """Fast path: whether the data was exactly one text frame and the handler handled it. The parser is bypassed,
        which is possible only between two frames."""
        if not self._splitter.at_start or self._unparsed or self._incoming or self.conn.state is not State.OPEN:
            return False
        text = None if self.close_sent or self.read_paused else text_of_whole_frame(data, self._max_size)
        return text is not None and self._handled_now(text)

    def _handled_now(self, text: str) -> bool:
        """Offer a text to the handler; returns whether it was handled without waking the reader."""
        may_be_offered, self._may_be_offered = self._may_be_offered, False
        return (
            may_be_offered
            and self._text_handler is not None
            and self._mailbox.is_waited_for
            and self._text_handler(text)
        )

    def _offer_to(self, handler: TextHandler) -> None:
        self._text_handler = handler

    def keepalive_timeout(self) -> None:
        silent_for = self.loop.time() - self._last_data_at
        timeout = self.ping_timeout
        if timeout is not None and silent_for < timeout or self.read_paused:
            # The client sent something lately, or reading is paused and its silence says nothing.
            self.pong_timer = None
            self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()

    async def send(self, message: Any) -> None:
        # The transport knows of a lost peer before the protocol does, and an invalid frame closes the socket.
        if self.transport.is_closing() or self.close_sent:
            # Keep uvicorn from logging an error for a client that left before the handshake was complete.
            self.handshake_complete = True
            raise ClientDisconnected
        if "headers" in message:
            message = {**message, "headers": clean_headers(message["headers"])}
        await super().send(message)
        if self.close_sent and self._unparsed and self._parsing_later is None:
            self._parse()
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            # Keep uvicorn from logging an error for each refused handshake.
            self.handshake_complete = True

    def _send_now(self, text: str) -> bool:
        if not self.handshake_complete or not self.writable.is_set() or self.close_sent or self.transport.is_closing():
            return False
        try:
            self.conn.send_text(text.encode())
        except InvalidState:
            return False  # the peer is closing; the ordinary `send` reports that
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions[EXTENSION] = SocketExtras(
            abort=self.transport.abort,
            nothing_waits=self._mailbox.empty,
            has_left=self.transport.is_closing,
            has_closed=lambda: self.transport.is_closing() or peer_has_closed(self.transport),
            waited_s=lambda: seconds_since_data(self.transport),
            send_now=self._send_now,
            offer_to=self._offer_to,
            as_viewer=lambda: viewer_line(self.transport, self._may_write),
        )
        await super().run_asgi()


class _Sends(Enum):
    """What the server expects from an HTTP client now."""

    HEAD = auto()
    BODY = auto()
    # The rest of a body whose response was already sent, usually a refusal.
    UNWANTED_BODY = auto()
    NOTHING = auto()


class _HeldFlow(FlowControl):
    """Flow control with a second reason to pause reading: bytes that were read wait to be parsed (`hold`)."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._holds = False

    def hold(self, holds: bool) -> None:
        if holds != self._holds and not self.read_paused:
            self._transport.pause_reading() if holds else self._transport.resume_reading()
        self._holds = holds

    def pause_reading(self) -> None:
        if not self.read_paused and not self._holds:
            self._transport.pause_reading()
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused and not self._holds:
            self._transport.resume_reading()
        self.read_paused = False


class _OriginForm(h11.Connection):
    """h11's parser, for clients that send a whole URL as the target of a request, as to a proxy. A server must accept
    that form (RFC 9112, 3.2.2); the host of the URL counts, not that of the header."""

    def next_event(self) -> Any:
        event = super().next_event()
        if not isinstance(event, h11.Request) or not (match := _ABSOLUTE_FORM.fullmatch(event.target)):
            return event
        host, rest = match.groups()
        headers = [(name, value) for name, value in event.headers if name != b"host"]
        return h11.Request(
            method=event.method,
            headers=[(b"host", host), *headers],
            target=rest if rest.startswith(b"/") else b"/" + rest,
            http_version=event.http_version,
        )


class _WithExtras:
    """ASGI wrapper that adds our extension to HTTP requests: `as_viewer`, for the body of a response. The response must
    have begun, and be in chunks if the request is of HTTP/1.1."""

    def __init__(self, app: Any, transport: asyncio.Transport) -> None:
        self._app = app
        self._transport = transport

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        transport = self._transport
        extras = SocketExtras(as_viewer=lambda: viewer_line(transport, lambda: not transport.is_closing()))
        scope.setdefault("extensions", {})[EXTENSION] = extras
        await self._app(scope, receive, send)


class HttpWithDeadlines(H11Protocol):
    """uvicorn's HTTP protocol with deadlines: for the header of a request, for slow bodies, and for unread responses.

    uvicorn limits only the pause between two requests. It also parses everything that was read at once, so a body of
    one-byte chunks would delay all clients. Here bytes are parsed in pieces whose size adapts to the parse time.
    """

    # Seconds for the header of a request.
    handshake_s = 10.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _OriginForm(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._held_flow = _HeldFlow(transport)
        self._unparsed = b""
        self._parsing_later: asyncio.Handle | None = None
        self._piece_bytes = HTTP_PIECE_BYTES
        self._sends = _Sends.NOTHING
        self._no_longer_http = False
        self._bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._read_deadline: asyncio.TimerHandle | None = None
        self.app = _WithExtras(self.app, transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_longer_http = True
        self._unparsed = b""
        if self._parsing_later is not None:
            self._parsing_later.cancel()
        self._watch()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        self._unparsed = self._unparsed + data if self._unparsed else data
        if self._parsing_later is None:
            self._parse()

    def _parse(self) -> None:
        """Parse the bytes that were read, for at most `PARSING_S`."""
        self._parsing_later = None
        data, parsed = self._unparsed, 0
        began = started = self.loop.time()
        while parsed < len(data) and not self._no_longer_http and not self.transport.is_closing():
            if parsed and started - began > PARSING_S:
                self._parsing_later = self.loop.call_soon(self._parse)
                break
            piece = data[parsed : parsed + self._piece_bytes]
            super().data_received(piece)
            parsed += len(piece)
            took, started = self.loop.time() - started, self.loop.time()
            if took > PARSING_S:
                self._piece_bytes = max(MIN_HTTP_PIECE_BYTES, self._piece_bytes // 2)
            elif took < PARSING_S / 4:
                self._piece_bytes = min(MAX_HTTP_PIECE_BYTES, self._piece_bytes * 2)
        # Bytes after an upgrade request are dropped, as `RealtimeWebSocket` drops those that arrive later.
        self._unparsed = data[parsed:] if self._parsing_later is not None else b""
        if not self._no_longer_http and not self.transport.is_closing():
            self._held_flow.hold(bool(self._unparsed))
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._no_longer_http = True
        self._held_flow.hold(False)
        self._watch()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request. If its body is invalid, the application runs already and must not answer too."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            # The response to a HEAD request has no body; its head was sent.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_deadline is None:
            self._read_deadline = self.loop.call_later(UNREAD_TIMES * self.handshake_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None
        super().resume_writing()

    def _watch(self) -> None:
        """Set the deadline for what the client has to send now; if that has not changed, the deadline stays."""
        sends = self._now_sends()
        if sends is not self._sends:
            self._sends = sends
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            if sends is not _Sends.NOTHING:
                self._set_deadline()

    def _now_sends(self) -> _Sends:
        # Between two requests uvicorn's own deadline applies, until the first byte of the next request.
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None and not self._no_longer_http:
            return _Sends.HEAD
        if self.conn.their_state is h11.SEND_BODY and not self._no_longer_http:
            return _Sends.UNWANTED_BODY if self.cycle.response_complete else _Sends.BODY
        return _Sends.NOTHING

    def _set_deadline(self) -> None:
        self._bytes = 0
        self._deadline = self.loop.call_later(self.handshake_s, self._time_is_over)

    def _time_is_over(self) -> None:
        fast_enough = self._bytes >= MIN_BODY_RATE * self.handshake_s
        # While reading is paused, missing bytes are not the client's fault.
        if self._sends is _Sends.BODY and (fast_enough or self.flow.read_paused or self._unparsed):
            self._set_deadline()
        else:
            self.transport.abort()


def realtime_websocket(control_bytes: int) -> type[RealtimeWebSocket]:
    """The WebSocket protocol class for uvicorn; messages of up to `control_bytes` bytes are passed on whole."""
    return type("RealtimeWebSocket", (RealtimeWebSocket,), {"whole_bytes": max(PART_BYTES, control_bytes)})
