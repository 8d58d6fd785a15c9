"""Our ASGI extension: `SocketExtras`, the operations of a connection that ASGI lacks.

It is in the scope of each request and socket. With it the application aborts a socket, sends without waiting, takes an
append without waking its reader task, receives a long message in parts, bounds what is buffered for a viewer, and sees
whether the peer has left. The classes of `uvicorn_protocols.py` provide it, and so does `webrtc_calls.py` for WebRTC
calls; with another ASGI server the defaults apply, which do nothing. The functions here read the state of a connection
from the kernel. `ViewerLine` is for viewers of published sessions: bytes that are the same for many of them are written
directly to each connection.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

# Key of the `SocketExtras` in the extensions of an ASGI scope.
EXTENSION = "tickertape.socket"

# Key of a `Part` in a received message, in place of `text` or `bytes`.
PART = "tickertape.part"

# Handles a text message at once and returns True; or returns False, and the reader has to receive the message.
TextHandler = Callable[[str], bool]


def _no_abort() -> None:
    """The socket cannot be aborted."""


def _maybe_waiting() -> bool:
    """It is not known whether messages wait."""
    return True


def _not_known_to_have_left() -> bool:
    """It is not known that the client has left; the reader finds out after the messages before it."""
    return False


def _no_wait() -> float:
    """It is not known when the last bytes arrived."""
    return 0.0


def _not_sent(text: str) -> bool:
    """The text is not sent: every message goes through the ASGI `send`."""
    return False


def _no_write(data: bytes) -> bool:
    """The bytes are not written."""
    return False


def _no_offers(handler: TextHandler) -> None:
    """The handler is never called: every message goes through the ASGI `receive`."""


@dataclass(frozen=True, slots=True)
class Part:
    """The next bytes of a message that is too long to be handled as a whole. Parts come in order."""

    data: bytes
    is_text: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class ViewerLine:
    """The connection of a viewer, to which bytes are written that were framed for many viewers at once."""

    # Write bytes if hardly anything waits to be sent; returns whether they were written.
    write: Callable[[bytes], bool] = _no_write
    # Close the connection at once.
    abort: Callable[[], None] = _no_abort


@dataclass(frozen=True, slots=True)
class SocketExtras:
    """Operations of a socket that ASGI does not have."""

    # Close the socket without a close frame.
    abort: Callable[[], None] = _no_abort
    # Whether no further message has arrived.
    nothing_waits: Callable[[], bool] = _maybe_waiting
    # Whether the client has left.
    has_left: Callable[[], bool] = _not_known_to_have_left
    # The same, but True even while bytes that the client sent before it closed are unread.
    has_closed: Callable[[], bool] = _not_known_to_have_left
    # Seconds since the last bytes arrived, read or not.
    waited_s: Callable[[], float] = _no_wait
    # Send a text if that needs no waiting; returns whether it was sent.
    send_now: Callable[[str], bool] = _not_sent
    # The connection as a viewer's; None if the server cannot write bytes that were framed before.
    as_viewer: Callable[[], ViewerLine] | None = None
    # Register the handler that gets a text message while the reader is waiting for one.
    offer_to: Callable[[TextHandler], None] = _no_offers


# Socket state from the kernel. After a standstill of this process a request may wait in a socket that its client has
# closed since; the kernel knows that even while bytes are unread.

# `tcpi_last_data_recv` of Linux's `struct tcp_info`: milliseconds since the last data, after 8 bytes and 11 integers.
_LAST_DATA = struct.Struct("8x44xI")


def peer_has_closed(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer has closed the connection, or its sending half. False where the system cannot tell."""
    return bool(_events(transport))


def is_reset(transport: asyncio.BaseTransport) -> bool:
    """Whether the connection is lost in both directions. False where the system cannot tell."""
    return bool(_events(transport) & (select.POLLERR | select.POLLHUP))


def _events(transport: asyncio.BaseTransport) -> int:
    found = transport.get_extra_info("socket")
    if found is None or not hasattr(select, "POLLRDHUP"):
        return 0
    if found.fileno() < 0:
        return select.POLLHUP
    poll = select.poll()
    poll.register(found.fileno(), select.POLLRDHUP)
    seen = poll.poll(0)
    return seen[0][1] if seen else 0


def seconds_since_data(transport: asyncio.BaseTransport) -> float:
    """Seconds since the last bytes arrived, read or not. 0 where the system cannot tell."""
    found = transport.get_extra_info("socket")
    if found is None or found.fileno() < 0 or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
    except OSError:
        return 0.0
    return float(_LAST_DATA.unpack(info)[0]) / 1000 if len(info) == _LAST_DATA.size else 0.0


# A viewer is written to while no more than this waits in its connection. The send buffer of the system is small,
# because what is in it cannot be replaced by newer words.
VIEWER_WAITING_BYTES = 16 * 1024
VIEWER_SEND_BUFFER_BYTES = 32 * 1024


def viewer_line(transport: asyncio.Transport, may_write: Callable[[], bool]) -> ViewerLine:
    """The connection of a viewer, written to only while `may_write`."""
    found = transport.get_extra_info("socket")
    if found is not None and found.fileno() >= 0:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, VIEWER_SEND_BUFFER_BYTES)

    def write(data: bytes) -> bool:
        if not may_write() or transport.get_write_buffer_size() > VIEWER_WAITING_BYTES:
            return False
        transport.write(data)
        return True

    return ViewerLine(write, transport.abort)
