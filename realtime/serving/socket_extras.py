"""What a socket can do beyond ASGI, and what the connection does without where the server is not ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Where a scope's extensions have it.
EXTENSION = "tickertape.socket"

# Where a received message has a part of a long one, in place of `text` or `bytes`.
PART = "tickertape.part"

# Takes a message at once, or says that it has to be read in its turn.
Taker = Callable[[str], bool]


def _no_abort() -> None:
    """There is no way to cut the socket."""


def _unknown() -> bool:
    """Nothing is known of messages that wait."""
    return True


def _not_known_to_be_gone() -> bool:
    """A client that has left is noticed when its messages have been handled."""
    return False


def _no_wait() -> float:
    """Nobody knows how long a request has waited."""
    return 0.0


def _no_hurry(text: str) -> bool:
    """Everything is sent in its turn."""
    return False


def _nobody_is_asked(taker: Taker) -> None:
    """Everything is read in its turn."""


@dataclass(frozen=True, slots=True)
class Part:
    """The next bytes of a message that is too long to be handled in one go. The others come in order."""

    data: bytes
    is_text: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class SocketExtras:
    """`abort` cuts the socket; `nothing_waits` says that no further message has arrived yet; `gone`, that the client
    has left, and `has_closed` says so even if what it sent before was not read yet. `waited_s` is for how long the last
    bytes have been here. `send_now` sends a text if nothing has to be waited for, and says whether it did. `offer_to`
    names who is asked to take a text message at once when the reader waits for one."""

    abort: Callable[[], None] = _no_abort
    nothing_waits: Callable[[], bool] = _unknown
    gone: Callable[[], bool] = _not_known_to_be_gone
    has_closed: Callable[[], bool] = _not_known_to_be_gone
    waited_s: Callable[[], float] = _no_wait
    send_now: Callable[[str], bool] = _no_hurry
    offer_to: Callable[[Taker], None] = _nobody_is_asked
