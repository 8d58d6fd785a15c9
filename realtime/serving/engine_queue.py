"""The bounded queue of commands from one session to its engine stream: audio, silence, flushes, changes of options.

It belongs to the session's `StreamRunner` (`live_session.py`), which executes the commands in order. When it is full,
the reader of the client's socket waits, so TCP slows down a client that sends faster than the engine takes audio.
`ResentAudio` is for a session whose gateway died: it feeds the audio that the engine never received when the client
sends it again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from realtime.session.core import PendingFlush
from realtime.session.events import Feed, FeedGap, FinishEngine, FlushEngine, FollowTurns, Reanchor, Reopen, Samples

EngineCommand = Feed | FeedGap | FlushEngine | FinishEngine | Reanchor | Reopen | FollowTurns


class EngineQueue:
    """Commands with one consumer; `put` never waits. Audio counts as queued until the engine stream has taken it."""

    def __init__(self, max_samples: int, max_commands: int) -> None:
        self.samples = 0
        self._max_samples = max_samples
        self._max_commands = max_commands
        self._commands: deque[EngineCommand] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def full(self) -> bool:
        return self.samples > self._max_samples or len(self._commands) > self._max_commands

    def put(self, command: EngineCommand) -> None:
        if isinstance(command, Feed):
            self.samples += len(command.samples)
        elif isinstance(command, FeedGap):
            # Declared silence counts as audio: a model may have to process every position of it.
            self.samples += command.samples
        self._commands.append(command)
        self._wake.set()

    def begin_anew(self, reanchor: Reanchor) -> None:
        """Replace all queued commands by one that begins a new stream. It has their audio; flushes are put again after
        it."""
        for command in self._commands:
            if isinstance(command, Feed | FeedGap):
                self.heard(len(command.samples) if isinstance(command, Feed) else command.samples)
        self._commands.clear()
        self.put(reanchor)

    def take(self) -> EngineCommand:
        return self._commands.popleft()

    @property
    def reanchor(self) -> Reanchor | None:
        """The queued command to begin a new stream, if any."""
        return next((command for command in self._commands if isinstance(command, Reanchor)), None)

    @property
    def reopen(self) -> Reopen | None:
        """The queued command to change the stream's options, if any."""
        return next((command for command in self._commands if isinstance(command, Reopen)), None)

    def heard(self, samples: int) -> None:
        """The engine stream has taken this number of samples."""
        self.samples -= samples

    def clear(self) -> None:
        self._commands.clear()
        self.samples = 0
        self._room.set()

    # Waiting

    def wake(self) -> None:
        """Wake the consumer although nothing was put."""
        self._wake.set()

    def make_room(self) -> None:
        """Wake the callers of `wait_for_room`."""
        self._room.set()

    def rest(self) -> None:
        """Called by the consumer when it has emptied the queue: the next `put` wakes it."""
        self._wake.clear()

    async def wait(self) -> None:
        """Wait until something was put since the last `rest`."""
        await self._wake.wait()

    async def wait_for_room(self) -> None:
        """Wait for the next call of `make_room`."""
        self._room.clear()
        await self._room.wait()


class ResentAudio:
    """Audio that a session has counted and its engine never received, because the gateway between them died.

    The client sends it again: samples `start` to `end` of the session. It is fed to the engine, together with the
    flushes at positions in it that the engine was not asked for (`marks`), and not counted a second time.
    """

    def __init__(self, start: int, end: int, marks: Iterable[PendingFlush]) -> None:
        self._next = start
        self._end = end
        self._marks = deque(marks)

    @property
    def is_complete(self) -> bool:
        return self._next >= self._end and not self._marks

    def accept(self, audio: Samples | int) -> tuple[list[EngineCommand], Samples | int]:
        """Returns the commands for the resent part of this audio, and the rest of the audio, which is new."""
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
            mark = self._marks.popleft()
            due.append(FlushEngine(mark.pause, mark.ends_speech))
        return due


def _length(audio: Samples | int) -> int:
    return audio if isinstance(audio, int) else len(audio)


def _split(audio: Samples | int, count: int) -> tuple[Samples | int, Samples | int]:
    if isinstance(audio, int):
        return min(audio, count), max(0, audio - count)
    return audio[:count], audio[count:]
