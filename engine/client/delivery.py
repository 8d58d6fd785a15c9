"""The way of one stream's commands to the engine that carries it.

Commands arrive in the order in which they were sent. An engine is asked whether it takes the stream before it is sent
what was heard so far, and a replay leaves in pieces, when the link has time for it; what comes later waits behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from engine import messages
from engine.client.link import EngineLink
from engine.client.outbox import Queued
from engine.client.replay import AskedFlush, Entry, NewTurns, Replay
from engine.messages import Item

# Items of a replay that travel in one command: small enough for many streams to take turns.
REPLAY_ITEMS = 16


class Delivery:
    """Asks the engine for a place at once. A source of the link's outbox while something waits. `on_done` is called
    when the engine has been sent all of the replay."""

    def __init__(
        self,
        link: EngineLink,
        opening: messages.Open,
        replay: Replay,
        finished: bool,
        on_done: Callable[[], None],
    ) -> None:
        # The engine has said yes.
        self.is_open = False
        self._stream = opening.stream
        self._link = link
        self._on_done = on_done
        self._opening: Queued | None = None
        self._waiting = deque(_commands(opening.stream, replay.entries, finished))
        if replay.known:
            # A saved state travels with audio that it refers to, and takes its turn.
            self._opening = (opening, replay.known)
            link.pace(self)
        else:
            link.send(opening)

    @classmethod
    def of_open_stream(cls, link: EngineLink, stream: str) -> Delivery:
        """To an engine that runs the stream already."""
        delivery = cls.__new__(cls)
        delivery.is_open, delivery._stream, delivery._link = True, stream, link
        delivery._opening, delivery._waiting = None, deque()
        # Nothing is replayed, so nobody waits for the end of it.
        delivery._on_done = lambda: None
        return delivery

    @property
    def is_done(self) -> bool:
        """The engine has been sent all that came so far."""
        return self.is_open and not self._waiting

    def send(self, command: messages.Command, items: list[Item] | None = None) -> None:
        if self.is_open and not self._waiting:
            self._link.send(command, items)
        else:
            self._waiting.append((command, items or []))

    def opened(self) -> None:
        """The engine has a place: now it is sent what it needs."""
        self.is_open = True
        if self._waiting:
            self._link.pace(self)
        else:
            self._on_done()

    def take(self) -> Queued | None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return opening
        if not self.is_open or not self._waiting:
            return None
        next_one = self._waiting.popleft()
        if not self._waiting:
            self._on_done()
        return next_one

    def abort(self) -> bool:
        """Send nothing more and have the engine forget the stream; False if it never heard of it."""
        self._waiting.clear()
        if self._opening is not None:
            self._opening = None
            return False
        self._link.send(messages.Abort(self._stream))
        return True


def _commands(stream: str, entries: Iterable[Entry], finished: bool) -> Iterable[Queued]:
    """A replay as commands."""
    run: list[Item] = []
    for entry in entries:
        if run and (not isinstance(entry, Item) or len(run) == REPLAY_ITEMS):
            yield messages.Feed(stream, []), run
            run = []
        if isinstance(entry, AskedFlush):
            yield messages.Flush(stream, entry.tag, entry.pause), []
        elif isinstance(entry, NewTurns):
            yield messages.ChangeTurns(stream, entry.turns), []
        else:
            run.append(entry)
    if run:
        yield messages.Feed(stream, []), run
    if finished:
        yield messages.Finish(stream), []
