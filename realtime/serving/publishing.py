"""Publishes sessions under names: decides which session has a name, and passes its words to the processes with viewers.

A name belongs to an owner: an API key, or all callers of a server without keys. `SessionPublication` turns the events
of one session into updates. `Publisher` is in each gateway process: it sends the updates to the coordinator, and gets
the words of all names that viewers read here (`viewers.py` serves them). `Coordinator` decides who has a name, and
keeps the newest words of each published session. It is in the same process on a server with a single gateway, and in
the parent process of several workers; in a fleet one of the gateways coordinates each name (`fleet_publishing.py`).

`PublishedTranscript` has the newest words of one published session. Every process that has them keeps one, and changes
it by the same updates: the coordinator, and the gateway processes with viewers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from realtime.errors import ClientFault
from realtime.serving.signed_tokens import Revocation, Revocations
from realtime.session.events import Cleared, Committed, Completed, Delta, ItemFailed, ServerEvent, TimedWord
from realtime.session.formatting import FinalFormatter
from realtime.session.settings import NO_FORMATTING, Formatting

log = logging.getLogger("tickertape.viewers")

# Updates of a session that wait until its name is granted; further ones are dropped.
MAX_PENDING_UPDATES = 256
# Seconds to wait for an answer of the coordinator.
ANSWER_S = 5.0


# The words of a published session


# Finished turns that a new viewer gets, and the characters of all of them together.
MAX_LINES = 200
MAX_CHARACTERS = 32_000
# Longest text of one turn; of a longer one the end is shown.
MAX_LINE_CHARACTERS = 4_000
# Open turns of one session that are kept; beyond it the oldest is dropped.
MAX_OPEN_TURNS = 32
# Words with times that are kept of one turn, for caption segments.
MAX_TURN_WORDS = 1_000

# (text, start, end) of a word, in seconds of the session's audio.
Word = tuple[str, float, float]


class Line(msgspec.Struct, array_like=True):
    """A turn: its text, and its start and end in seconds of the session's audio. An open turn has no end."""

    id: str
    text: str
    start: float = 0.0
    end: float = 0.0
    words: list[Word] = []


class Begun(msgspec.Struct, tag="begun", array_like=True):
    """The session is published now."""


class Added(msgspec.Struct, tag="added", array_like=True):
    """Text was added to an open turn."""

    id: str
    text: str
    words: list[Word] = []


class Finished(msgspec.Struct, tag="finished", array_like=True):
    """A turn has its final text, which may differ from what was added to it."""

    line: Line


class Removed(msgspec.Struct, tag="removed", array_like=True):
    """An open turn is dropped: it has no words, or its audio was cleared."""

    id: str


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """The session is not published any more."""


Update = Begun | Added | Finished | Removed | Ended


class State(msgspec.Struct, array_like=True):
    """A `PublishedTranscript` as a value, which messages carry to another process."""

    number: int
    is_live: bool
    lines: list[Line]
    open: list[Line]


class PublishedTranscript:
    """The newest words of one published session; its size is bounded. `number` grows with each update."""

    def __init__(self) -> None:
        self.number = 0
        self.is_live = False
        self.lines: dict[str, Line] = {}
        self.open: dict[str, Line] = {}
        self._characters = 0

    def save(self) -> State:
        # Open turns change, so they are copied.
        copies = [Line(line.id, line.text, line.start, line.end, line.words) for line in self.open.values()]
        return State(self.number, self.is_live, list(self.lines.values()), copies)

    def load(self, state: State) -> None:
        self.number, self.is_live = state.number, state.is_live
        self.lines = {line.id: line for line in state.lines}
        self.open = {line.id: line for line in state.open}
        self._characters = sum(_size(line) for line in self.lines.values())

    def add_earlier(self, state: State) -> bool:
        """Put the finished turns of `state` that are missing here before the turns here. Returns whether there were
        any."""
        missing = {line.id: line for line in state.lines if line.id not in self.lines}
        if not missing:
            return False
        for item in missing:
            self.open.pop(item, None)
        self.lines = missing | self.lines
        self._characters = sum(_size(line) for line in self.lines.values())
        self._trim()
        self.number = max(self.number, state.number) + 1
        return True

    def apply(self, update: Update) -> bool:
        """Apply an update. Returns False, with nothing changed, for text of a turn that is finished: a process that
        adopts a session may handle events again that the process before it has handled."""
        if isinstance(update, Added) and update.id in self.lines:
            return False
        self.number += 1
        self._apply(update)
        return True

    def _apply(self, update: Update) -> None:
        match update:
            case Begun():
                self.lines.clear()
                self.open.clear()
                self._characters, self.is_live = 0, True
            case Added(item, text, words):
                line = self.open.setdefault(item, Line(item, "", words[0][1] if words else 0.0))
                line.text = cut_text(line.text + text)
                line.words = newest_words([*line.words, *words])
                if len(self.open) > MAX_OPEN_TURNS:
                    del self.open[next(iter(self.open))]
            case Finished(line):
                self.open.pop(line.id, None)
                self._append(line)
            case Removed(item):
                self.open.pop(item, None)
            case Ended():
                self.open.clear()
                self.is_live = False

    def _append(self, line: Line) -> None:
        known = self.lines.get(line.id)
        self._characters += _size(line) - (0 if known is None else _size(known))
        self.lines[line.id] = line
        self._trim()

    def _trim(self) -> None:
        while len(self.lines) > MAX_LINES or self._characters > MAX_CHARACTERS:
            self._characters -= _size(self.lines.pop(next(iter(self.lines))))


def cut_text(text: str) -> str:
    return text[-MAX_LINE_CHARACTERS:]


def newest_words(words: list[Word]) -> list[Word]:
    """The last words of a turn: bounded in number, and in characters like its text. A client that replaces words can
    make each of them long."""
    kept: list[Word] = []
    room = MAX_LINE_CHARACTERS
    for text, start, end in reversed(words[-MAX_TURN_WORDS:]):
        text = cut_text(text)
        room -= len(text)
        if room < 0:
            break
        kept.append((text, start, end))
    return kept[::-1]


def _size(line: Line) -> int:
    """Characters by which a turn counts: those of its text, or of its words if they have more."""
    return max(len(line.text), sum(max(1, len(text)) for text, _, _ in line.words))


# Messages between a gateway process and the coordinator. `owner` and `name` together identify a published session.


class Publish(msgspec.Struct, tag="publish"):
    """A claim: the request to publish a session under a name, answered by `Published`. With `state`, the session has
    the name already and these are its words; the coordinator may be new and not know them."""

    number: int
    owner: str
    name: str
    session: str
    state: State | None = None


class Published(msgspec.Struct, tag="published"):
    """The answer to `Publish`; `state` has the words of the session so far."""

    number: int
    is_granted: bool
    state: State | None = None


class Post(msgspec.Struct, tag="post"):
    """An update of a session that this process has published."""

    owner: str
    name: str
    session: str
    update: Update


class Unpublish(msgspec.Struct, tag="unpublish"):
    """The session is not published any more. `moves`: another process is about to continue it."""

    owner: str
    name: str
    session: str
    moves: bool = False


class Follow(msgspec.Struct, tag="follow"):
    """Send this process the words of a name, answered by `Current`; without `wanted`, stop sending them. `state` has
    words of `session` that this process has already; the coordinator may be new and not know them."""

    owner: str
    name: str
    wanted: bool = True
    session: str = ""
    state: State | None = None


class Current(msgspec.Struct, tag="current"):
    """The words of a followed name so far, and the session that has it."""

    owner: str
    name: str
    state: State
    session: str = ""


class News(msgspec.Struct, tag="news"):
    """The next update of a followed name. `session`: another session has the name from now on."""

    owner: str
    name: str
    update: Update
    session: str = ""


class Revoke(msgspec.Struct, tag="revoke"):
    """Viewer links are revoked; the coordinator passes this on to all processes."""

    revocation: Revocation


class LinksFrom(msgspec.Struct, tag="links_from"):
    """Viewer links that were issued before this time, in milliseconds, are not valid."""

    issued_ms: int


ToCoordinator = Publish | Post | Unpublish | Follow | Revoke
FromCoordinator = Published | Current | News | Revoke | LinksFrom
Key = tuple[str, str]


@dataclass(slots=True)
class _Channel:
    """A name under which a session is published, or for which viewers wait."""

    transcript: PublishedTranscript = field(default_factory=PublishedTranscript)
    session: str = ""
    # The process that has the session; None while the session moves from one process to another.
    member: int | None = None
    followers: set[int] = field(default_factory=set)
    expiry: asyncio.TimerHandle | None = None


class Coordinator:
    """Decides who has a name, and passes updates on to the processes that follow it. Processes are members, by number.

    If a process ends, or its session moves, the name is kept for `keep_s`: the process that continues the session
    claims it, and viewers notice nothing. Until then any other session of the same owner may claim it too.
    """

    def __init__(self, keep_s: float, answers_with_state: bool = False) -> None:
        self.channels: dict[Key, _Channel] = {}
        self.revocations = Revocations()
        self._keep_s = keep_s
        # Whether the answer to a claim contains the words so far.
        self._answers_with_state = answers_with_state
        self._members: dict[int, Callable[[FromCoordinator], None]] = {}

    def add(self, member: int, deliver: Callable[[FromCoordinator], None]) -> None:
        self._members[member] = deliver
        for revocation in self.revocations.all():
            deliver(Revoke(revocation))

    def remove(self, member: int) -> None:
        """A process has ended."""
        self._members.pop(member, None)
        for key, channel in list(self.channels.items()):
            channel.followers.discard(member)
            if channel.member == member:
                self._keep_name(key, channel)
            self._drop_unused(key)

    def on_message(self, member: int, message: ToCoordinator) -> None:
        """Handle a message of a process; ignored if the process was removed."""
        if member not in self._members:
            return
        match message:
            case Publish(number, owner, name, session, state):
                is_granted = self._claim(member, (owner, name), session, state)
                state_so_far = (
                    self.channels[owner, name].transcript.save() if is_granted and self._answers_with_state else None
                )
                self._members[member](Published(number, is_granted, state_so_far))
            case Post(owner, name, session, update):
                channel = self.channels.get((owner, name))
                if channel is not None and (channel.member, channel.session) == (member, session):
                    self._publish_update((owner, name), channel, update)
            case Unpublish(owner, name, session, moves):
                self._unpublish(member, (owner, name), session, moves)
            case Follow(owner, name, wanted, session, state):
                self._follow(member, (owner, name), wanted)
                if wanted and state is not None:
                    self._merge_state((owner, name), session, state)
            case Revoke(revocation):
                self.revocations.add(revocation)
                for deliver in self._members.values():
                    deliver(message)

    def _claim(self, member: int, key: Key, session: str, state: State | None) -> bool:
        channel = self.channels.setdefault(key, _Channel())
        live = channel.transcript.is_live
        if live and channel.session != session:
            if channel.member is not None:
                return False
            self._publish_update(key, channel, Ended())
        self._cancel_expiry(channel)
        continues = live and channel.session == session
        channel.member, channel.session = member, session
        if state is not None:
            known = channel.transcript.save()
            channel.transcript.load(state)
            if continues:
                channel.transcript.add_earlier(known)
            self._send_current(key, channel)
        elif not continues:
            self._publish_update(key, channel, Begun())
        return True

    def _merge_state(self, key: Key, session: str, state: State) -> None:
        """Merge words that a follower has and this new coordinator has not. Their session is expected to claim the name
        soon, if it has not claimed it."""
        channel = self.channels[key]
        if not channel.transcript.number and state.is_live:
            channel.session = session
            channel.transcript.load(state)
            self._keep_name(key, channel)
            self._send_current(key, channel)
        elif channel.session == session and channel.transcript.is_live and channel.transcript.add_earlier(state):
            self._send_current(key, channel)
            if channel.member is not None and channel.member not in channel.followers:
                self._members[channel.member](self._current(key, channel))

    def _unpublish(self, member: int, key: Key, session: str, moves: bool) -> None:
        channel = self.channels.get(key)
        if channel is None or (channel.member, channel.session) != (member, session):
            return
        if moves:
            self._keep_name(key, channel)
        else:
            channel.member = None
            self._publish_update(key, channel, Ended())
            self._drop_unused(key)

    def _follow(self, member: int, key: Key, wanted: bool) -> None:
        channel = self.channels.setdefault(key, _Channel())
        if wanted:
            channel.followers.add(member)
            self._members[member](self._current(key, channel))
        else:
            channel.followers.discard(member)
            self._drop_unused(key)

    def _publish_update(self, key: Key, channel: _Channel, update: Update) -> None:
        if not channel.transcript.apply(update):
            return
        news = News(*key, update, channel.session if isinstance(update, Begun) else "")
        for follower in tuple(channel.followers):
            self._members[follower](news)

    def _send_current(self, key: Key, channel: _Channel) -> None:
        current = self._current(key, channel)
        for follower in tuple(channel.followers):
            self._members[follower](current)

    def _current(self, key: Key, channel: _Channel) -> Current:
        return Current(*key, channel.transcript.save(), channel.session)

    def _keep_name(self, key: Key, channel: _Channel) -> None:
        channel.member = None
        self._cancel_expiry(channel)
        channel.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._expire, key)

    def _expire(self, key: Key) -> None:
        channel = self.channels.get(key)
        if channel is not None and channel.member is None and channel.transcript.is_live:
            self._publish_update(key, channel, Ended())
            self._drop_unused(key)

    def _cancel_expiry(self, channel: _Channel) -> None:
        if channel.expiry is not None:
            channel.expiry.cancel()
            channel.expiry = None

    def _drop_unused(self, key: Key) -> None:
        channel = self.channels.get(key)
        if channel is not None and not channel.followers and not channel.transcript.is_live:
            self._cancel_expiry(channel)
            del self.channels[key]


class UpdateReader(Protocol):
    """Receives the words of followed names."""

    def on_current(self, key: Key, state: State) -> None: ...

    def on_update(self, key: Key, update: Update) -> None: ...


class Publisher:
    """The side of a gateway process: claims names, posts updates, and follows names. `send` sends a message to the
    coordinator."""

    def __init__(self, send: Callable[[ToCoordinator], None]) -> None:
        self.revocations = Revocations()
        # Set by the part of this process that serves viewers.
        self.reader: UpdateReader | None = None
        self._send = send
        self._claims: dict[int, tuple[asyncio.Future[bool], Key, str]] = {}
        self._number = 0

    @classmethod
    def alone(cls, keep_s: float) -> Publisher:
        """The publisher of a server with a single process, with its coordinator."""
        coordinator = Coordinator(keep_s)
        publisher = cls(lambda message: coordinator.on_message(0, message))
        coordinator.add(0, publisher.on_message)
        return publisher

    async def claim(self, key: Key, session: str) -> bool | None:
        """Whether the session has the name now. None: the coordinator does not answer."""
        self._number = number = self._number + 1
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._claims[number] = (answer, key, session)
        self._send(Publish(number, *key, session))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.result():
                self.unpublish(key, session)
            raise

    def post(self, key: Key, session: str, update: Update) -> None:
        self._send(Post(*key, session, update))

    def unpublish(self, key: Key, session: str, moves: bool = False) -> None:
        self._send(Unpublish(*key, session, moves))

    def follow(self, key: Key) -> None:
        self._send(Follow(*key))

    def unfollow(self, key: Key) -> None:
        self._send(Follow(*key, wanted=False))

    def revoke(self, revocation: Revocation) -> None:
        """Revoke links in all processes; in this one they are revoked when this returns."""
        self.revocations.add(revocation)
        self._send(Revoke(revocation))

    def on_message(self, message: FromCoordinator) -> None:
        match message:
            case LinksFrom(issued_ms):
                self.revocations.links_from_ms = issued_ms
            case Published(number, is_granted):
                answer, key, session = self._claims.pop(number)
                if not answer.done():
                    answer.set_result(is_granted)
                elif is_granted:
                    # The answer comes too late: nothing waits for it any more.
                    self.unpublish(key, session)
            case Revoke(revocation):
                self.revocations.add(revocation)
            case Current(owner, name, state):
                if self.reader is not None:
                    self.reader.on_current((owner, name), state)
            case News(owner, name, update):
                if self.reader is not None:
                    self.reader.on_update((owner, name), update)


def owner_of(caller: str) -> str:
    """The owner of what a caller publishes. Without keys callers are addresses, which do not identify a client: they
    share one set of names."""
    return "" if caller.startswith("address ") else caller


class SessionPublication:
    """Publishes one session: under no name at first, then under one name at a time."""

    def __init__(
        self,
        publisher: Publisher | None,
        caller: str,
        session: str,
        sample_rate: int,
        finals: FinalFormatter | None = None,
    ) -> None:
        # Whether the client may change the name; one with a client secret has the name of its secret.
        self.may_change = True
        # None: publishing is off.
        self._publisher = publisher
        self._owner = owner_of(caller)
        self._session = session
        self._rate = sample_rate
        self._finals = finals or FinalFormatter()
        self._key: Key | None = None
        self._is_closed = False
        # Open turns, and whether the client or the server has ended them; clearing the audio drops the others.
        self._open: dict[str, bool] = {}
        # Updates that wait until the name is granted: an adopted session may have words before that.
        self._pending: list[Update] | None = None

    async def change(self, name: str | None) -> ClientFault | None:
        """Publish under this name, or under none. Returns the fault for the client if that is not possible; then the
        session keeps its name."""
        if name is None:
            self.end()
            return None
        if self._publisher is None:
            return _refused("publishing_off", "Publishing is off on this server; its operator can set limits.viewers.")
        key = (self._owner, name)
        if key == self._key:
            return None
        self._pending = []
        try:
            answer = await self._publisher.claim(key, self._session)
        finally:
            pending, self._pending = self._pending, None
        if answer is None:
            return _refused("server_busy", "The server is too busy to publish the session; try again.")
        if not answer:
            return _refused("name_taken", f"Another session is published as '{name}'; choose another name.")
        if self._is_closed:
            self._publisher.unpublish(key, self._session)
            return None
        self.end()
        self._key = key
        for update in pending:
            self._publisher.post(key, self._session, update)
        return None

    def on_event(self, event: ServerEvent, formatting: Formatting = NO_FORMATTING) -> None:
        """An event was sent to the client; viewers get its words, written as the client asked for."""
        if self._publisher is None or (self._key is None and self._pending is None):
            return
        for update in self.updates(event, formatting):
            if self._key is not None:
                self._publisher.post(self._key, self._session, update)
            if self._pending is not None and len(self._pending) < MAX_PENDING_UPDATES:
                self._pending.append(update)

    def updates(self, event: ServerEvent, formatting: Formatting) -> Iterator[Update]:
        match event:
            case Delta():
                self._open.setdefault(event.item_id, False)
                yield Added(event.item_id, cut_text(event.text), self._words(event.words))
            case Committed():
                if event.item_id in self._open:
                    self._open[event.item_id] = True
            case Completed():
                self._open.pop(event.item_id, None)
                yield Finished(self._line(event, formatting)) if event.transcript.strip() else Removed(event.item_id)
            case ItemFailed():
                self._open.pop(event.item_id, None)
                yield Removed(event.item_id)
            case Cleared():
                for item in [item for item, is_committed in self._open.items() if not is_committed]:
                    del self._open[item]
                    yield Removed(item)

    def _line(self, event: Completed, formatting: Formatting) -> Line:
        start, end = round(event.start / self._rate, 2), round(event.end / self._rate, 2)
        final = self._finals.format(event.transcript, event.words, formatting)
        return Line(event.item_id, cut_text(final.text), start, end, self._words(final.words))

    def _words(self, words: tuple[TimedWord, ...]) -> list[Word]:
        rate = self._rate
        return newest_words(
            [
                (word.text.strip(), round(word.start / rate, 2), round(word.end / rate, 2))
                for word in words[-MAX_TURN_WORDS:]
            ]
        )

    def end(self, moves: bool = False) -> None:
        """The session is not published any more. `moves`: another process is about to continue it."""
        key, self._key = self._key, None
        self._open.clear()
        if key is not None and self._publisher is not None:
            self._publisher.unpublish(key, self._session, moves)

    def close(self, moves: bool = False) -> None:
        """The session has ended here; it is not published again."""
        self._is_closed = True
        self.end(moves)


def _refused(code: str, message: str) -> ClientFault:
    return ClientFault(code, message, param="session.publish")
