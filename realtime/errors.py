"""What can go wrong at the gateway: whose fault it is, which code goes over the wire, and how a socket is closed.

Every text here is safe to send to a client: no paths, no secrets, no internals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class CloseCode(IntEnum):
    """WebSocket close codes the gateway uses, each for one reason."""

    NORMAL = 1000
    # The client broke a limit that an error event alone cannot answer: it does not read, it stays silent, or no stream
    # can be had with its options.
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
    RESTART = 1012
    TRY_LATER = 1013
    # A newer socket has taken this session over with its resume token.
    TAKEN_OVER = 4409


class GatewayError(Exception):
    """Base of everything the gateway raises on purpose."""


class ClientFault(GatewayError):
    """The client sent something wrong; it is told with an error event and the socket stays open.

    `code` is the OpenAI error code. Dialects that have codes of their own translate it.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.event_id = event_id


class OptionsRefused(GatewayError):
    """The engine does not take the options of a session, although each of them is within its bounds."""


class IllegalEvent(GatewayError):
    """An event came in a state that has no answer to it; the state is unchanged. A bug of ours, not of the client."""


class UnreadableValue(GatewayError):
    """A saved session that this server cannot read: another version wrote it, or it is none."""


@dataclass(slots=True)
class Refusal(GatewayError):
    """A request or an upgrade that is answered with an HTTP status instead of a socket."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    kind: str = "invalid_request_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


# Numbers that clients write as text, in queries and forms.
#
# A text is a number here if it is written in plain digits, and the value that is compared with the bounds is the
# value that is returned. Python's own `int` and `float` also take digits of other scripts, underscores, spaces,
# leading zeros, `nan` and texts of any length.

_WHOLE = re.compile(r"0|[1-9][0-9]{0,18}")
_DECIMAL = re.compile(r"-?(?:(?:0|[1-9][0-9]{0,18})(?:\.[0-9]{0,24})?|\.[0-9]{1,24})(?:[eE][+-]?[0-9]{1,3})?")


def whole_number(name: str, text: str, low: int, high: int) -> int:
    """Raises ValueError with a sentence that names the number; it repeats nothing of the text."""
    if _WHOLE.fullmatch(text):
        value = int(text)
        if low <= value <= high:
            return value
    raise ValueError(f"'{name}' must be a whole number from {low} to {high}, in plain digits.")


def decimal_number(name: str, text: str, low: float, high: float) -> float:
    """The same for a number that may have a fraction."""
    if _DECIMAL.fullmatch(text):
        value = float(text)
        if low <= value <= high:
            return value
    raise ValueError(f"'{name}' must be a number from {low:g} to {high:g}, in plain digits.")
