"""Audio that a session has counted and its engine has not got, because the process between them was lost.

The client sends it again. It is fed, with the flushes that stand in it, and not counted a second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from realtime.serving.engine_queue import EngineCommand
from realtime.session.events import Feed, FeedGap, FlushEngine, Samples
from realtime.session.saved import Mark


class OwedAudio:
    """From sample `start` to `end` of the session; `marks` are the flushes that the engine was not asked for."""

    def __init__(self, start: int, end: int, marks: Iterable[Mark]) -> None:
        self._next = start
        self._end = end
        self._marks = deque(marks)

    @property
    def is_paid(self) -> bool:
        return self._next >= self._end and not self._marks

    def pay(self, audio: Samples | int) -> tuple[list[EngineCommand], Samples | int]:
        """What the engine gets of this audio without counting it, and what is left of the audio."""
        commands: list[EngineCommand] = self._due()
        while self._next < self._end and _length(audio):
            until = min([self._end, *(mark.sample for mark in self._marks if mark.sample > self._next)])
            part, audio = _split(audio, until - self._next)
            commands.append(FeedGap(part) if isinstance(part, int) else Feed(part))
            self._next += _length(part)
            commands += self._due()
        return commands, audio

    def _due(self) -> list[EngineCommand]:
        due: list[EngineCommand] = []
        while self._marks and self._marks[0].sample <= self._next:
            due.append(FlushEngine(self._marks.popleft().pause))
        return due


def _length(audio: Samples | int) -> int:
    return audio if isinstance(audio, int) else len(audio)


def _split(audio: Samples | int, count: int) -> tuple[Samples | int, Samples | int]:
    if isinstance(audio, int):
        return min(audio, count), max(0, audio - count)
    return audio[:count], audio[count:]
