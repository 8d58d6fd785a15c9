"""Finds out which stream crashes the engine: the record of its last step, and the evidence against each stream.

`CrashRecord` is shared memory with the streams of an engine's current step. The engine writes them before each step and
wipes them after it. The gateway that started the engine reads the record when the engine has died: the streams in it
may have caused the crash; if it is empty, no stream did. It is memory and not a message, because a message would be
lost with the process that should have sent it. A gateway has no record of engines that it did not start.

The rest runs in the gateway: the supervisor (`engine/client/supervisor.py`) calls `find_culprit` after each death of an
engine. The streams in the engine's last step are suspects. A suspect's *spot* is the range of positions that this step
computed. Suspects are reopened at once with the other streams. Unless they are many, they are *kept apart*: no step
contains two of them until they are past their spots. If engines die at the same spot of one stream again and again
(two to six times, by the quality of the evidence), that stream alone is ended.

An engine that was killed by a signal from outside counts as weaker evidence than a crash: after the first such death
suspects are not kept apart, because their streams would have to wait for each other. The last step of an engine on
another machine is not known: there every stream with audio to compute is a suspect, and after a second death suspects
are reopened one at a time.

Other gateways may have streams on the same engine. A step shared with another gateway's stream is weaker evidence. The
engine keeps the suspects of all gateways apart, so a guilty stream soon crashes alone, and an innocent one gets past
its spot. If the step is unknown as well, suspects are reopened after a random wait, so that the suspects of two
gateways are not computed together again and again.
"""

from __future__ import annotations

import mmap
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

RECORD_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")
_TOO_MANY = 0xFFFF_FFFF
# Deaths of engines at one spot after which a stream is ended: if the last death was a crash, or a signal that may have
# come from outside (an operator may kill an engine twice just as it comes back).
STRIKES_AFTER_CRASH = 2
STRIKES_AFTER_SIGNAL = 3
# Deaths needed if the last step was shared with other gateways or is unknown, and if both are true.
STRIKES_IF_SHARED_OR_UNKNOWN = 4
STRIKES_IF_SHARED_AND_UNKNOWN = 6
# After one crash with more suspects than this, they are not kept apart: it would delay too many streams.
FEW_SUSPECTS = 16


class StreamInStep(NamedTuple):
    """A stream, by the engine's name for it, and the positions [start, end) that the step computes."""

    name: str
    start: int
    end: int

    def stream_of(self, gateway: str) -> str | None:
        """The gateway's name for the stream; None if the stream belongs to another gateway."""
        prefix = f"{gateway}/"
        return self.name.removeprefix(prefix).partition("/")[2] if self.name.startswith(prefix) else None


_decoder = msgspec.msgpack.Decoder(list[StreamInStep])


class CrashRecord:
    """The streams of the current step. Written by the engine; read by the gateway after the engine has died.

    Without shared memory (an engine in a thread) the record is as large as its content.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(_LENGTH.size) if memory is None else memory
        self._grows = memory is None

    @classmethod
    def at(cls, path: Path) -> CrashRecord:
        """The record in a file, which is created if it does not exist. Processes that open the same file share it."""
        with path.open("a+b") as file:
            file.truncate(RECORD_BYTES)
            return cls(mmap.mmap(file.fileno(), RECORD_BYTES))

    def write(self, streams: Sequence[tuple[str, int, int]]) -> None:
        """Record a step: of each stream its name and the positions [start, end) that the step computes."""
        body = msgspec.msgpack.encode(streams)
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
        """No step is running."""
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


class CrashSuspicion:
    """The evidence against one stream: how many engines in a row died at the same spot of it."""

    __slots__ = ("keep_apart", "must_wait", "not_before", "spot", "strikes")

    def __init__(self) -> None:
        # Engines in a row that died at the spot.
        self.strikes = 0
        # The positions of the stream that all those engines were computing when they died.
        self.spot = range(0)
        # The spot must not be in one step with another suspect's spot.
        self.keep_apart = False
        # The stream must not be reopened while another suspect is computed again.
        self.must_wait = False
        # Earliest time to reopen it, in seconds of the event loop's clock.
        self.not_before = 0.0

    def strike(self, start: int, end: int) -> None:
        """An engine died while it computed these positions of the stream, and perhaps other streams."""
        last, spot = self.spot, range(start, max(start + 1, end))
        common = range(max(spot.start, last.start), min(spot.stop, last.stop))
        if self.strikes and spot.stop <= last.start:
            # It died before it reached the spot: no new evidence.
            return
        self.strikes = self.strikes + 1 if common else 1
        self.spot = common or spot

    def passed(self, computed: int) -> None:
        """The stream is computed up to this position. Once it is past the spot it is no suspect any more."""
        if computed >= self.spot.stop:
            self.strikes, self.keep_apart, self.must_wait, self.not_before = 0, False, False, 0.0


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """The facts that a gateway has about the death of an engine."""

    # When the gateway noticed it, in seconds of the event loop's clock.
    at: float
    # It ended by itself, not by a signal from outside.
    crashed: bool
    # The streams in its last step are known.
    step_known: bool
    # Its last step contained, or may have contained, streams of other gateways.
    other_gateways: bool = False

    @property
    def strikes_needed(self) -> int:
        if self.other_gateways and not self.step_known:
            return STRIKES_IF_SHARED_AND_UNKNOWN
        if self.other_gateways or not self.step_known:
            return STRIKES_IF_SHARED_OR_UNKNOWN
        return STRIKES_AFTER_CRASH if self.crashed else STRIKES_AFTER_SIGNAL


def find_culprit(suspects: Mapping[CrashSuspicion, range], death: EngineDeath) -> CrashSuspicion | None:
    """Add a strike to each suspect; returns the one to blame, or None if there is none or more than one.

    `suspects` maps to the positions that the engine was computing or, if its last step is unknown, may have computed.
    """
    for suspicion, spot in suspects.items():
        suspicion.strike(spot.start, spot.stop)
    for suspicion in suspects:
        is_repeated = suspicion.strikes > 1
        suspicion.keep_apart = is_repeated or (death.crashed and len(suspects) <= FEW_SUSPECTS)
        suspicion.must_wait = is_repeated and not death.step_known
        if suspicion.must_wait and death.other_gateways:
            suspicion.not_before = death.at + random.uniform(0.0, suspicion.strikes)
    guilty = [suspicion for suspicion in suspects if suspicion.strikes >= death.strikes_needed]
    return guilty[0] if len(guilty) == 1 else None
