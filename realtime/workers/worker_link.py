"""The messages between the parent process and its workers, and the connection that carries them.

The messages are msgspec structs; `Line` is one end of a socket pair and sends them as lines of JSON. The parent sends
the configuration and stops workers. Workers ask it to admit sessions, exchange counts of sessions and metrics with it,
and reach the coordinator of published sessions through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from realtime.config import Config, Secret
from realtime.serving.publishing import FromCoordinator, ToCoordinator
from realtime.serving.quota import Figures, QuotaDecision

log = logging.getLogger("tickertape.workers")

# Bytes of the longest message. The words of a published session (`Current`) are bounded well below it.
LONGEST_LINE = 4 * 1024 * 1024


class Start(msgspec.Struct, tag="start"):
    """The parent's first message. `config` is made by `encode_config`."""

    config: msgspec.Raw
    secret: bytes
    engines: list[str]
    port: int
    # The secret of this start of the server that viewer links are signed with.
    link_secret: bytes = b""

    def __repr__(self) -> str:
        return f"Start(port={self.port})"


class Ready(msgspec.Struct, tag="ready"):
    """The worker listens and has an engine."""


class Enter(msgspec.Struct, tag="enter"):
    """Request to admit new sessions of a caller, answered by `Entered`. With `again` the sessions were adopted and are
    only counted, without an answer."""

    number: int
    caller: str
    sessions: int = 1
    again: bool = False


class Entered(msgspec.Struct, tag="entered"):
    """The parent's answer to `Enter`."""

    number: int
    answer: QuotaDecision


class Leave(msgspec.Struct, tag="leave"):
    """Sessions of a caller that were counted have ended, or were not opened."""

    caller: str
    sessions: int = 1


class Own(msgspec.Struct, tag="own"):
    """The session figures of the sending worker."""

    figures: Figures


class Others(msgspec.Struct, tag="others"):
    """The session figures of all other workers."""

    figures: Figures


class Counted(msgspec.Struct, tag="counted"):
    """The metrics of the sending worker, made by `realtime.serving.metrics.report`."""

    report: msgspec.Raw


class Scrape(msgspec.Struct, tag="scrape"):
    """Request for the metrics of all workers, with the sender's own in `report`. Answered by `Scraped`."""

    number: int
    report: msgspec.Raw


class Scraped(msgspec.Struct, tag="scraped"):
    """The parent's answer to `Scrape`: the metrics as Prometheus text."""

    number: int
    text: str


class Reload(msgspec.Struct, tag="reload"):
    """Apply this configuration, made by `encode_config`."""

    config: msgspec.Raw

    def __repr__(self) -> str:
        return "Reload()"


class Retire(msgspec.Struct, tag="retire"):
    """Stop, and hand off resumable sessions to the other workers."""


Message = (
    Start
    | Ready
    | Enter
    | Entered
    | Leave
    | Own
    | Others
    | Counted
    | Scrape
    | Scraped
    | Reload
    | Retire
    | ToCoordinator
    | FromCoordinator
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


def encode_config(config: Config) -> msgspec.Raw:
    """The whole configuration including its secrets; only for a worker."""
    return msgspec.Raw(msgspec.json.encode(config, enc_hook=Secret.reveal))


def decode_config(encoded: msgspec.Raw) -> Config:
    return msgspec.json.decode(encoded, type=Config, dec_hook=lambda kind, text: kind(text))


class Line:
    """One end of the connection between the parent and a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Line:
        return cls(*await asyncio.open_connection(sock=end, limit=LONGEST_LINE))

    def send(self, message: Message) -> None:
        """Send without waiting. The buffer stays small: both sides always read, and messages follow sessions."""
        if not self._writer.is_closing():
            self._writer.write(_encoder.encode(message) + b"\n")

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the other side is gone, or sends a message that is too long to read."""
        while True:
            try:
                line = await self._reader.readline()
            except OSError:
                return
            except ValueError:
                log.error("a message between the parent and a worker has more than %d bytes", LONGEST_LINE)
                return
            if not line:
                return
            yield _decoder.decode(line)

    async def drain(self) -> None:
        """Wait until all messages have been sent, or the other side is gone."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
