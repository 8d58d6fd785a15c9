"""Crash record: shared memory in which an engine notes the streams of its current step, for the time after a crash.

The engine writes the streams before each step and wipes them after it. The gateway that started the engine reads the
record when the engine has died: the streams in it may have caused the crash (`engine/client/crash_suspects.py`); if it
is empty, none of them did. It is memory and not a message, because a message would be lost with the process that should
have sent it. A gateway has no record of engines that it did not start.
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
    """A stream, by the engine's name for it, and the positions [start, end) that the step computes."""

    name: str
    start: int
    end: int

    def stream_of(self, gateway: str) -> str | None:
        """The gateway's name for the stream; None if the stream belongs to another gateway."""
        mine = f"{gateway}/"
        return self.name.removeprefix(mine).partition("/")[2] if self.name.startswith(mine) else None


_decoder = msgspec.msgpack.Decoder(list[StreamInStep])


class CrashRecord:
    """Written by the engine; read by the gateway after the engine has died."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(_LENGTH.size) if memory is None else memory
        self._grows = memory is None

    @classmethod
    def at(cls, path: Path) -> CrashRecord:
        """The record in a file, which is created if it does not exist. Processes that open the same file share it."""
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
        # The length is written last, so that a reader never sees half a record.
        _LENGTH.pack_into(self._memory, 0, 0)
        self._memory[size : size + len(body)] = body
        _LENGTH.pack_into(self._memory, 0, len(body))

    def wipe(self) -> None:
        _LENGTH.pack_into(self._memory, 0, 0)

    def read(self) -> list[StreamInStep] | None:
        """The streams of the step; None if they are not known (too many to record, or the record is damaged)."""
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
