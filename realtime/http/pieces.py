"""Answers that are too long to be made at once: made and sent in pieces, and others have their turn in between.

The event loop serves every session. An answer to a file of hours takes hundreds of milliseconds to make, so none is
made in one go: `json_pieces` makes a bounded number of entries at a time, and `PiecesResponse` sends what is made when
the client has read what came before. What waits for a slow client is a piece, not the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Entries of a list, and characters of a text, that are made at once.
ENTRIES_AT_ONCE = 64
CHARACTERS_AT_ONCE = 16 * 1024
# Others have their turn when pieces took so long to make.
MAKING_S = 0.001
# An answer up to this length is sent whole and says how long it is; a longer one goes out in parts of this size.
PART_BYTES = 32 * 1024

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Entries:
    """A list whose entries are made while it is written. None is no entry: it stands for work that led to none.

    With `nested`, entries hold lists and texts of this kind themselves, and are made one by one.
    """

    entries: Iterable[Any]
    nested: bool = False
    at_once: int = ENTRIES_AT_ONCE


@dataclass(frozen=True, slots=True)
class TextParts:
    """A text whose parts are made while it is written. An empty part stands for work that led to none."""

    parts: Iterable[str]


@dataclass(frozen=True, slots=True)
class Later:
    """A value that is known when all that stands before it is written."""

    value: Callable[[], Any]


def json_pieces(value: Any) -> Iterator[bytes]:
    """JSON of a value in pieces. What is between two of them is bounded, whatever the length of the whole."""
    match value:
        case dict():
            for number, (name, content) in enumerate(value.items()):
                yield (b"," if number else b"{") + _encode(name) + b":"
                yield from json_pieces(content)
            yield b"}" if value else b"{}"
        case Entries():
            yield b"["
            yield from _nested(value.entries) if value.nested else _plain(value.entries, value.at_once)
            yield b"]"
        case TextParts():
            yield b'"'
            for part in value.parts:
                yield b""
                yield from _letters(part)
            yield b'"'
        case str() if len(value) > CHARACTERS_AT_ONCE:
            yield b'"'
            yield from _letters(value)
            yield b'"'
        case Later():
            yield _encode(value.value())
        case _:
            yield _encode(value)


def _plain(entries: Iterable[Any], at_once: int) -> Iterator[bytes]:
    """Entries that are encoded together, as many as are made at once."""
    before = b""
    made: list[Any] = []
    for number, entry in enumerate(entries, start=1):
        if entry is not None:
            made.append(entry)
        if number % at_once == 0:
            yield before + _encode(made)[1:-1] if made else b""
            before, made = b"," if before or made else b"", []
    if made:
        yield before + _encode(made)[1:-1]


def _nested(entries: Iterable[Any]) -> Iterator[bytes]:
    before = b""
    for entry in entries:
        if entry is None:
            yield b""
            continue
        yield before
        yield from json_pieces(entry)
        before = b","


def _letters(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), CHARACTERS_AT_ONCE):
        yield _encode(text[start : start + CHARACTERS_AT_ONCE])[1:-1]


def text_pieces(parts: Iterable[str]) -> Iterator[bytes]:
    """Plain text in pieces; a long part is cut."""
    for part in parts:
        for start in range(0, len(part), CHARACTERS_AT_ONCE):
            yield part[start : start + CHARACTERS_AT_ONCE].encode()


async def in_turns(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Parts to send, of many pieces each. Others have their turn while the pieces are made."""
    clock = asyncio.get_running_loop().time
    began = clock()
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
        if clock() - began > MAKING_S:
            await asyncio.sleep(0)
            began = clock()
    if waiting:
        yield b"".join(waiting)


class PiecesResponse(Response):
    """Sends pieces as they are made. `at_end` is called when the last has left, or the client has."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        media_type: str,
        at_end: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(None, media_type=media_type, headers=headers)
        self._pieces = pieces
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parts = in_turns(self._pieces)
            first = await anext(parts, b"")
            second = await anext(parts, None)
            del self.headers["content-length"]
            if second is None:
                self.headers["content-length"] = str(len(first))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": second is not None})
            while second is not None:
                part, second = second, await anext(parts, None)
                await send({"type": "http.response.body", "body": part, "more_body": second is not None})
        finally:
            await self._at_end()
