"""What a parent and a worker say to each other: messages over a socket pair, in order, until either side is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from realtime.config import Config, Secret
from realtime.serving.quota import Figures, QuotaDecision

# The longest message is the first: the configuration.
LONGEST_LINE = 1024 * 1024


class Start(msgspec.Struct, tag="start"):
    """First word of a parent. `config` is the whole configuration, as `encode_config` writes it."""

    config: msgspec.Raw
    secret: bytes
    engines: list[str]
    port: int

    def __repr__(self) -> str:
        return f"Start(port={self.port})"


class Ready(msgspec.Struct, tag="ready"):
    """The worker listens, and an engine is there."""


class Enter(msgspec.Struct, tag="enter"):
    """May so many more sessions of this caller come? `again`: they are there already. Answered by `Entered` if not."""

    number: int
    caller: str
    sessions: int = 1
    again: bool = False


class Entered(msgspec.Struct, tag="entered"):
    number: int
    answer: QuotaDecision


class Leave(msgspec.Struct, tag="leave"):
    caller: str
    sessions: int = 1


class Own(msgspec.Struct, tag="own"):
    """Figures of the worker that says it."""

    figures: Figures


class Others(msgspec.Struct, tag="others"):
    """Figures of all other workers."""

    figures: Figures


class Counted(msgspec.Struct, tag="counted"):
    """The metrics of the worker that says it, as `realtime.serving.totals.report` writes them."""

    report: msgspec.Raw


class Scrape(msgspec.Struct, tag="scrape"):
    """The worker is asked for the metrics of the server; these are its own. Answered by `Scraped`."""

    number: int
    report: msgspec.Raw


class Scraped(msgspec.Struct, tag="scraped"):
    number: int
    text: str


class Reload(msgspec.Struct, tag="reload"):
    """Take over this configuration, as `encode_config` writes it."""

    config: msgspec.Raw

    def __repr__(self) -> str:
        return "Reload()"


class Retire(msgspec.Struct, tag="retire"):
    """Stop, and leave sessions that can be resumed to the other workers."""


Message = Start | Ready | Enter | Entered | Leave | Own | Others | Counted | Scrape | Scraped | Reload | Retire

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


def encode_config(config: Config) -> msgspec.Raw:
    """The whole configuration with its secrets, for a worker and for nobody else."""
    return msgspec.Raw(msgspec.json.encode(config, enc_hook=Secret.reveal))


def decode_config(encoded: msgspec.Raw) -> Config:
    return msgspec.json.decode(encoded, type=Config, dec_hook=lambda kind, text: kind(text))


class Line:
    """One end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Line:
        return cls(*await asyncio.open_connection(sock=end, limit=LONGEST_LINE))

    def send(self, message: Message) -> None:
        """Both sides read all the time, and what they say is bounded by what sessions come and go."""
        if not self._writer.is_closing():
            self._writer.write(_encoder.encode(message) + b"\n")

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Until the other side is gone."""
        while True:
            try:
                line = await self._reader.readline()
            except OSError:
                return
            if not line:
                return
            yield _decoder.decode(line)

    async def drain(self) -> None:
        """Until what was said has left, or the other side is gone."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
