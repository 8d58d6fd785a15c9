"""Which streams are in the step that runs now, kept where it can be read after the engine process has died of it.

A message would be lost with the process that should have sent it. The record is a few kilobytes of memory that the
engine shares with the gateway that started it: filled before a step, wiped after it. What it holds when an engine is
dead are the streams that may have killed it; if it is empty, none of them did.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

RECORD_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")
_TOO_MANY = 0xFFFF_FFFF


class StreamInStep(NamedTuple):
    """A stream, by the name its engine knows it by, and the positions [start, end) that the step computes."""

    name: str
    start: int
    end: int

    def stream_of(self, gateway: str) -> str | None:
        """What a gateway calls the stream; None if it is another's."""
        mine = f"{gateway}/"
        return self.name.removeprefix(mine).partition("/")[2] if self.name.startswith(mine) else None


_decoder = msgspec.msgpack.Decoder(list[StreamInStep])


class CrashRecord:
    """One writer, and readers when it is gone."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(_LENGTH.size) if memory is None else memory
        self._grows = memory is None

    @classmethod
    def at(cls, path: Path) -> CrashRecord:
        """The record in a file, which is made if need be. Two processes that name the same file share it."""
        with path.open("a+b") as file:
            file.truncate(RECORD_BYTES)
            return cls(mmap.mmap(file.fileno(), RECORD_BYTES))

    def write(self, in_step: Sequence[tuple[str, int, int]]) -> None:
        body = msgspec.msgpack.encode(in_step)
        if self._grows:
            self._memory = bytearray(_LENGTH.size + len(body))
        size = _LENGTH.size
        if size + len(body) > len(self._memory):
            _LENGTH.pack_into(self._memory, 0, _TOO_MANY)
            return
        # The length comes last: a record is whole or not there.
        _LENGTH.pack_into(self._memory, 0, 0)
        self._memory[size : size + len(body)] = body
        _LENGTH.pack_into(self._memory, 0, len(body))

    def wipe(self) -> None:
        _LENGTH.pack_into(self._memory, 0, 0)

    def read(self) -> list[StreamInStep] | None:
        """Who was in flight; None if that is not known."""
        (length,) = _LENGTH.unpack_from(self._memory, 0)
        if length == 0:
            return []
        if length > len(self._memory) - _LENGTH.size:
            return None
        try:
            return _decoder.decode(bytes(self._memory[_LENGTH.size : _LENGTH.size + length]))
        except msgspec.DecodeError:
            return None

    def close(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
