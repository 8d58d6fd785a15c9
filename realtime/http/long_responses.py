"""HTTP responses that are made and sent in pieces, so that a long one does not block the event loop.

Used for transcripts of files, which may have hours of words. `json_pieces` encodes a bounded number of entries at a
time, and `PiecesResponse` sends a part when the client has read the part before. For a slow client only one part is in
memory, and not the whole response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Entries of a list, and characters of a text, in one piece.
ENTRIES_AT_ONCE = 64
CHARACTERS_AT_ONCE = 16 * 1024
# After this many seconds of work the response yields to the event loop.
MAKING_S = 0.001
# A response of up to this many bytes is sent whole with a Content-Length; a longer one in parts of this size.
PART_BYTES = 32 * 1024

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Entries:
    """A list whose entries are made while the response is encoded. None is left out, but counts as work.

    With `nested`, entries may contain `Entries` and `TextParts` themselves, and are written one by one.
    """

    entries: Iterable[Any]
    nested: bool = False
    at_once: int = ENTRIES_AT_ONCE


@dataclass(frozen=True, slots=True)
class TextParts:
    """A text whose parts are made while the response is encoded. An empty part counts as work."""

    parts: Iterable[str]


@dataclass(frozen=True, slots=True)
class LazyValue:
    """A value that is computed when everything before it in the response has been encoded."""

    value: Callable[[], Any]


def json_pieces(value: Any) -> Iterator[bytes]:
    """A value as JSON in pieces; the work for one piece is bounded."""
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
        case LazyValue():
            yield _encode(value.value())
        case _:
            yield _encode(value)


def _plain(entries: Iterable[Any], at_once: int) -> Iterator[bytes]:
    """Entries encoded in groups of `at_once`."""
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
    """Plain text in pieces; long parts are split."""
    for part in parts:
        for start in range(0, len(part), CHARACTERS_AT_ONCE):
            yield part[start : start + CHARACTERS_AT_ONCE].encode()


async def in_turns(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Join pieces to parts of `PART_BYTES`, and yield to the event loop every `MAKING_S`."""
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


async def steps(work: Iterable[None]) -> None:
    """Do work in steps, and yield to the event loop every `MAKING_S`."""
    clock = asyncio.get_running_loop().time
    began = clock()
    for _ in work:
        if clock() - began > MAKING_S:
            await asyncio.sleep(0)
            began = clock()


class PiecesResponse(Response):
    """Sends pieces as they are made. `at_end` is called after the last one, or when the client has left."""

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
