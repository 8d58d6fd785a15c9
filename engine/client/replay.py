"""What a gateway keeps of a stream, so that another engine can go on where a dead one stopped.

Kept are the items of one recompute window (bounded), and what was said about them. A frame-synchronous model is
replayed with its tokens forced, so it says nothing twice. A model that rereads its window goes on from its last
state, which came with the last text: what was received is not said again, what was not received is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec import structs

from engine.messages import Item, StreamState, Text, TurnRule, Word
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AskedFlush:
    """A flush was asked for here."""

    tag: int
    pause: int | None = None


@dataclass(frozen=True, slots=True)
class NewTurns:
    """From here on, turns ended by another rule."""

    turns: TurnRule | None


ReplayEntry = Item | AskedFlush | NewTurns


@dataclass(frozen=True, slots=True)
class Replay:
    """All that a new engine needs. It counts positions and samples anew: the old ones minus these."""

    positions: int
    samples: int
    entries: list[ReplayEntry]
    forced_tokens: list[int] = field(default_factory=list)
    state: StreamState | None = None
    # Audio that the state refers to, and audio that is to be heard as if no engine had been lost.
    known: list[Item] = field(default_factory=list)
    catch_up_until: int = 0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much audio of a stream a gateway holds: what a replay needs, and what the engine has not computed yet."""

    keep_positions: int
    ahead_positions: int


def positions_to_keep(spec: ModelSpec, seconds: float) -> int:
    """How much computed audio a replay needs: what the model's caches look back on, within a limit in seconds."""
    limit = int(seconds * spec.sample_rate / spec.samples_per_position)
    window = max((group.window_positions for group in spec.kv_groups), default=limit)
    return min(limit, window)


class Memory(Protocol):
    """What a new engine must know about the kept audio."""

    def trim(self, kept: KeptAudio) -> None:
        """Let go of what no replay needs."""

    def replay(self, kept: KeptAudio) -> Replay:
        """What a new engine needs; all that is heard from now on comes from it."""

    def hear(self, text: Text) -> Text | None:
        """Text from the engine; what of it is new."""

    def take(self, state: StreamState) -> None:
        """The state after all that was heard so far."""

    def go_on(self, position: int, token: int) -> None:
        """Of a stream of another gateway, nothing before `position` is kept; its next token is that of `token`."""

    @property
    def can_replay(self) -> bool:
        """Whether enough is kept for another engine to go on."""

    def is_whole(self, kept: KeptAudio) -> bool:
        """Whether all is kept that decides what comes next: of a stream of another gateway, when it was heard anew."""


class KeptAudio:
    """The end of a stream: items and flushes in the order in which they were sent."""

    def __init__(self, spec: ModelSpec) -> None:
        self.end = spec.prefix_positions
        self.end_sample = 0
        self._spec = spec
        self._entries: deque[ReplayEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Sequence[Item]) -> None:
        self._entries.extend(items)
        if items:
            last = items[-1]
            self.end = last.offset + last.length
            came = last.length * self._spec.samples_per_position if last.samples is None else last.samples
            self.end_sample = last.sample + came

    def mark_flush(self, tag: int, unanswered: Collection[int], pause: int | None = None) -> None:
        """Flushes without audio between them are one flush, unless somebody still waits for the answer."""
        while self._entries and isinstance(self._entries[-1], AskedFlush) and self._entries[-1].tag not in unanswered:
            self._entries.pop()
        self._entries.append(AskedFlush(tag, pause))

    def mark_turns(self, turns: TurnRule | None) -> None:
        """Of changes without anything between them, the last one counts."""
        if self._entries and isinstance(self._entries[-1], NewTurns):
            self._entries.pop()
        self._entries.append(NewTurns(turns))

    def first(self) -> Item | None:
        return next((entry for entry in self._entries if isinstance(entry, Item)), None)

    def drop_before(self, position: int) -> Item | None:
        """Let go of all that lies before `position`, and of the flushes there; the first item that stays.

        An item of audio is kept whole, a gap is cut: however long it is, no more of it is remembered than of audio.
        """
        while (first := self.first()) is not None and first.offset < position:
            if first.offset + first.length > position and first.key:
                break
            while self._entries.popleft() is not first:
                pass
            if first.offset + first.length > position:
                self._entries.appendleft(self._rest_of_gap(first, position))
        return first

    def _rest_of_gap(self, gap: Item, position: int) -> Item:
        rate = self._spec.samples_per_position
        covered = gap.length * rate if gap.samples is None else gap.samples
        passed = min((position - gap.offset) * rate, covered)
        length = gap.offset + gap.length - position
        samples = None if gap.samples is None else covered - passed
        return structs.replace(gap, offset=position, length=length, sample=gap.sample + passed, samples=samples)

    def drop_flushes(self, tag: int) -> None:
        """Let go of the flushes up to this one, as far as no audio is kept from before them."""
        while self._entries and isinstance(self._entries[0], AskedFlush) and self._entries[0].tag <= tag:
            self._entries.popleft()

    def split(self, position: int, tag: int) -> tuple[list[Item], list[ReplayEntry]]:
        """The items before a position, and what follows them without the flushes up to `tag`."""
        before: list[Item] = []
        after: list[ReplayEntry] = []
        for entry in self._entries:
            if isinstance(entry, Item) and entry.offset < position:
                before.append(entry)
                after = [flush for flush in after if isinstance(flush, AskedFlush)]
            elif not isinstance(entry, AskedFlush) or entry.tag > tag:
                after.append(entry)
        return before, after

    def sample_at(self, position: int) -> int:
        """The audio sample at which a kept position starts."""
        for entry in self._entries:
            if isinstance(entry, Item) and entry.offset + entry.length > position:
                inside = max(0, position - entry.offset) * self._spec.samples_per_position
                return entry.sample + (inside if entry.samples is None else min(inside, entry.samples))
        return self.end_sample

    def from_beginning(self) -> Replay:
        """A copy on a clock that starts at the beginning."""
        first = self.first()
        positions = (self.end if first is None else first.offset) - self._spec.prefix_positions
        samples = self.end_sample if first is None else first.sample
        entries = [_earlier(entry, positions, samples) for entry in self._entries]
        return Replay(positions, samples, entries)


def _earlier(entry: ReplayEntry, positions: int, samples: int) -> ReplayEntry:
    if isinstance(entry, Item):
        return structs.replace(entry, offset=entry.offset - positions, sample=entry.sample - samples)
    if isinstance(entry, AskedFlush) and entry.pause is not None:
        return replace(entry, pause=max(0, entry.pause - samples))
    return entry


class TokenMemory:
    """For models with one token per position: the tokens themselves are the memory."""

    def __init__(self, spec: ModelSpec, keep_positions: int) -> None:
        self._keep_positions = keep_positions
        # A token speaks of audio before it, and a flush puts silence between the two.
        self._reach_samples = spec.flush_positions_for(spec.max_delay_positions) * spec.samples_per_position
        self._tokens: deque[int] = deque()
        self._first = spec.prefix_positions
        self._words: deque[Word] = deque()
        self._replayed = False
        # Audio before this was with another gateway.
        self._kept_from = 0

    def trim(self, kept: KeptAudio) -> None:
        # Positions whose tokens have not been heard of must be computed again, so their audio stays.
        first = kept.drop_before(min(kept.end - self._keep_positions, self._first + len(self._tokens)))
        start = kept.end if first is None else first.offset
        while self._tokens and self._first < start:
            self._tokens.popleft()
            self._first += 1
        sample = kept.sample_at(start) - self._reach_samples
        while self._words and self._words[0].end_sample < sample:
            self._words.popleft()

    def replay(self, kept: KeptAudio) -> Replay:
        replay = kept.from_beginning()
        self._replayed = self._replayed or bool(replay.entries)
        return replace(replay, forced_tokens=list(self._tokens))

    def hear(self, text: Text) -> Text | None:
        self._tokens.extend(text.tokens)
        if self._replayed:
            # A flush that is replayed completes the word before it once more, or what is left of it.
            text.words = [word for word in text.words if not self._is_known(word)]
        self._words.extend(text.words)
        return text if text.delta or text.words or text.tokens else None

    def _is_known(self, word: Word) -> bool:
        return any(known.end_sample == word.end_sample and known.text.endswith(word.text) for known in self._words)

    def take(self, state: StreamState) -> None:
        raise AssertionError("a model with one token per position saves no states")

    def go_on(self, position: int, token: int) -> None:
        self._first, self._kept_from = token, position

    @property
    def can_replay(self) -> bool:
        return True

    def is_whole(self, kept: KeptAudio) -> bool:
        return not self._kept_from or kept.end - self._kept_from >= self._keep_positions


class SavedWindow:
    """For models that reread their window: the last saved state."""

    def __init__(self) -> None:
        self._state: StreamState | None = None
        # Audio before this was with another gateway.
        self._kept_from = 0

    def trim(self, kept: KeptAudio) -> None:
        if self._state is not None:
            kept.drop_before(self._state.audio_from)
            kept.drop_flushes(self._state.tag)

    def replay(self, kept: KeptAudio) -> Replay:
        state = self._state
        position, tag = (0, 0) if state is None else (state.position, state.tag)
        known, entries = kept.split(position, tag)
        # As much audio again may come while the new engine catches up; from then on, being on time counts for more.
        catch_up_until = kept.end + (kept.end - position)
        return Replay(0, 0, entries, state=state, known=known, catch_up_until=catch_up_until)

    def hear(self, text: Text) -> Text | None:
        return text

    def take(self, state: StreamState) -> None:
        if state.audio_from >= self._kept_from:
            self._state, self._kept_from = state, 0

    def go_on(self, position: int, token: int) -> None:
        self._kept_from = position

    @property
    def can_replay(self) -> bool:
        return not self._kept_from

    def is_whole(self, kept: KeptAudio) -> bool:
        return self.can_replay


def memory_for(spec: ModelSpec, keep_positions: int) -> Memory:
    return SavedWindow() if spec.rereads_window else TokenMemory(spec, keep_positions)
