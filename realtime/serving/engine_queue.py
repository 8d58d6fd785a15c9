"""What a session has for its engine stream and the stream has not taken yet: in order, and bounded.

Policy when it is full: the reader of the client's socket waits for room, so a client that sends faster than the engine
listens is slowed by TCP and never costs memory.
"""

from __future__ import annotations

import asyncio
from collections import deque

from realtime.session.events import Feed, FeedGap, FinishEngine, FlushEngine, FollowTurns, Reanchor, Reopen

EngineCommand = Feed | FeedGap | FlushEngine | FinishEngine | Reanchor | Reopen | FollowTurns


class EngineQueue:
    """Commands with one taker; putting never waits. Audio counts as queued until the engine has heard it."""

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
            # Declared silence is audio: a model may have to hear every position of it.
            self.samples += command.samples
        self._commands.append(command)
        self._wake.set()

    def begin_anew(self, reanchor: Reanchor) -> None:
        """In place of all that waits: that audio is in the replay, and what is owed is asked for anew behind it."""
        for command in self._commands:
            if isinstance(command, Feed | FeedGap):
                self.heard(len(command.samples) if isinstance(command, Feed) else command.samples)
        self._commands.clear()
        self.put(reanchor)

    def take(self) -> EngineCommand:
        return self._commands.popleft()

    @property
    def reanchor(self) -> Reanchor | None:
        """The new stream that waits to be begun, if there is one."""
        return next((command for command in self._commands if isinstance(command, Reanchor)), None)

    @property
    def reopen(self) -> Reopen | None:
        """The change of options that waits, if there is one."""
        return next((command for command in self._commands if isinstance(command, Reopen)), None)

    def heard(self, samples: int) -> None:
        """The engine has taken so many samples of a command."""
        self.samples -= samples

    def clear(self) -> None:
        self._commands.clear()
        self.samples = 0
        self._room.set()

    # Waiting, on either side

    def wake(self) -> None:
        """Let the taker look again, although nothing was put."""
        self._wake.set()

    def make_room(self) -> None:
        """Let those who wait for room look again."""
        self._room.set()

    def rest(self) -> None:
        """The taker has looked: what is put from now on wakes it."""
        self._wake.clear()

    async def wait(self) -> None:
        """Wait for something to take since the last `rest`."""
        await self._wake.wait()

    async def wait_for_room(self) -> None:
        """Wait until somebody makes room after this call."""
        self._room.clear()
        await self._room.wait()
