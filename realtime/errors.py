"""The gateway's exceptions, and its WebSocket close codes.

Two of the exceptions are answers to clients: `ClientFault` becomes an error event on an open socket, and `Refusal` an
HTTP error response. Their texts are sent to clients, so they contain no paths, secrets or internals. The exceptions of
the engine client are in `engine/errors.py`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import IntEnum


class CloseCode(IntEnum):
    """The WebSocket close codes of the gateway."""

    NORMAL = 1000
    # A limit was exceeded (the client does not read, sends nothing, the session is too long), or the model refused the
    # options.
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
    RESTART = 1012
    TRY_LATER = 1013
    # The session was resumed on another socket.
    TAKEN_OVER = 4409


class GatewayError(Exception):
    """Base class of the gateway's exceptions."""


class ClientFault(GatewayError):
    """The client made a mistake. It gets an error event, and the socket stays open.

    `code` is the OpenAI error code; dialects with their own codes translate it.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.event_id = event_id


class OptionsRefused(GatewayError):
    """The engine refuses the options of a session, although each of them is valid."""


class IllegalEvent(GatewayError):
    """An event is not allowed in the current state, which is unchanged. A bug in the gateway, not in the client."""


class UnreadableValue(GatewayError):
    """A saved session cannot be decoded: another version wrote it, or the data is invalid."""


@dataclass(slots=True)
class Refusal(GatewayError):
    """A request or a WebSocket upgrade is refused with an HTTP status."""

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


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_MORE_FILES = frozenset({errno.EMFILE, errno.ENFILE})
STORAGE_RETRY_S = 30


def storage_refusal(error: OSError) -> Refusal:
    """The refusal for a file that cannot be stored."""
    if error.errno in NO_MORE_FILES:
        text = "The server has reached its limit of open files; try again."
        return Refusal(503, "too_many_open_files", text, None, STORAGE_RETRY_S, "server_error")
    if error.errno in DISK_FULL:
        text = "The disk of the server is full; send the file again later, or a smaller one."
        return Refusal(507, "disk_full", text, None, STORAGE_RETRY_S, "server_error")
    return Refusal(507, "storage_failed", "The server cannot store the file; try again later.", kind="server_error")
