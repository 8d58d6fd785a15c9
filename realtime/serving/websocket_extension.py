"""Our ASGI extension, with what ASGI lacks: abort a socket, send without waiting, receive a long message in parts.

`SocketExtras` is in the scope of each request and socket. `websocket.py` provides it for uvicorn, and `calls.py` for
WebRTC calls; with another ASGI server the defaults here apply, which do nothing. `ViewerLine` is for viewers of
published sessions: bytes that are the same for many of them are written directly to each connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Key of the `SocketExtras` in the extensions of an ASGI scope.
EXTENSION = "tickertape.socket"

# Key of a `Part` in a received message, in place of `text` or `bytes`.
PART = "tickertape.part"

# Handles a text message at once, or returns False: then the reader has to read it.
Taker = Callable[[str], bool]


def _no_abort() -> None:
    """The socket cannot be aborted."""


def _unknown() -> bool:
    """It is not known whether messages wait."""
    return True


def _not_known_to_be_gone() -> bool:
    """It is not known that the client has left; the reader finds out after the messages before it."""
    return False


def _no_wait() -> float:
    """It is not known when the last bytes arrived."""
    return 0.0


def _no_hurry(text: str) -> bool:
    """Not sent: every message goes through the ASGI `send`."""
    return False


def _no_write(data: bytes) -> bool:
    """Not written."""
    return False


def _no_offers(taker: Taker) -> None:
    """The taker is never called: every message goes through the ASGI `receive`."""


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
    nothing_waits: Callable[[], bool] = _unknown
    # Whether the client has left.
    gone: Callable[[], bool] = _not_known_to_be_gone
    # The same, but True even while bytes that the client sent before it closed are unread.
    has_closed: Callable[[], bool] = _not_known_to_be_gone
    # Seconds since the last bytes arrived, read or not.
    waited_s: Callable[[], float] = _no_wait
    # Send a text if that needs no waiting; returns whether it was sent.
    send_now: Callable[[str], bool] = _no_hurry
    # The connection as a viewer's; None if the server cannot write bytes that were framed before.
    as_viewer: Callable[[], ViewerLine] | None = None
    # Register the taker that is offered a text message when the reader is waiting for one.
    offer_to: Callable[[Taker], None] = _no_offers
