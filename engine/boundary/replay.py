"""The replay of a stream: its recent audio, commands, tokens and state, from which another engine can rebuild it.

`ReplayLog` has the recent commands of one stream in the order sent (audio items, flushes, changes of the turn rule). A
gateway keeps a log per stream in case its engine is lost; an engine keeps one in case the gateway is lost, and gives it
to the gateway that adopts the stream.

In the gateway each `EngineStream` (`engine/client/stream.py`) also has a `Memory`, which decides when audio may be
dropped from the log, and makes the `Replay` that a new engine is sent. For a frame-synchronous model (`TokenMemory`) a
replay is the audio of its attention window, at most `limits.replay_s`, and the tokens for it, which the new engine
repeats without sending their text again; items with known tokens are joined when they are sent (`join_known`), because
to receive an item costs an engine about as much time as to compute a position. For a windowed model (`SavedWindow`) it
is the state that came with its last text, and the audio from which that state continues. Text that was received is not
repeated; text that was lost is produced again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np
from msgspec import structs

from engine.boundary.items import KEY_BYTES
from engine.messages import SKIPPED, ChangeTurns, Feed, Flush, Item, KeptCommand, StreamState, Text, TurnRule, Word
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AskedFlush:
    """A flush was requested at this point."""

    tag: int
    pause: int | None = None
    ends_speech: bool = False


@dataclass(frozen=True, slots=True)
class NewTurns:
    """The rule for turn ends changed at this point."""

    turns: TurnRule | None


ReplayEntry = Item | AskedFlush | NewTurns


class ReplayLog:
    """The last part of a stream's commands. `end` and `end_sample` are where the stream's audio ends."""

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
            came = last.covered_samples(self._spec.samples_per_position)
            self.end_sample = last.sample + came

    def mark_flush(
        self, tag: int, unanswered: Collection[int], pause: int | None = None, ends_speech: bool = False
    ) -> None:
        """Record a flush. It replaces flushes directly before it that are answered."""
        while self._entries and isinstance(last := self._entries[-1], AskedFlush) and last.tag not in unanswered:
            self._entries.pop()
            ends_speech = ends_speech or last.ends_speech
        self._entries.append(AskedFlush(tag, pause, ends_speech))

    def mark_turns(self, turns: TurnRule | None) -> None:
        """Record a change of the turn rule. It replaces one directly before it."""
        if self._entries and isinstance(self._entries[-1], NewTurns):
            self._entries.pop()
        self._entries.append(NewTurns(turns))

    def first(self) -> Item | None:
        return next((entry for entry in self._entries if isinstance(entry, Item)), None)

    def drop_before(self, position: int) -> Item | None:
        """Drop everything before `position`, including flushes; returns the first item that stays.

        An audio item stays whole. A gap is cut at `position`, so that a long gap does not keep more than audio would.
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
        covered = gap.covered_samples(rate)
        passed = min((position - gap.offset) * rate, covered)
        length = gap.offset + gap.length - position
        samples = None if gap.samples is None else covered - passed
        return structs.replace(gap, offset=position, length=length, sample=gap.sample + passed, samples=samples)

    def drop_flushes(self, tag: int) -> None:
        """Drop leading flushes up to `tag`."""
        while self._entries and isinstance(self._entries[0], AskedFlush) and self._entries[0].tag <= tag:
            self._entries.popleft()

    def split(self, position: int, tag: int) -> tuple[list[Item], list[ReplayEntry]]:
        """The items before a position, and the entries after them without the flushes up to `tag`."""
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
        """The sample at which a kept position starts."""
        for entry in self._entries:
            if isinstance(entry, Item) and entry.offset + entry.length > position:
                inside = max(0, position - entry.offset) * self._spec.samples_per_position
                return entry.sample + (inside if entry.samples is None else min(inside, entry.samples))
        return self.end_sample

    def from_beginning(self) -> tuple[int, int, list[ReplayEntry]]:
        """Position and sample of the first kept item, and all entries with positions and samples counted from there."""
        first = self.first()
        positions = (self.end if first is None else first.offset) - self._spec.prefix_positions
        samples = self.end_sample if first is None else first.sample
        entries = [_earlier(entry, positions, samples) for entry in self._entries]
        return positions, samples, entries

    # Conversion to messages, for the way from an engine to the gateway that adopts the stream.

    def give(self) -> list[KeptCommand]:
        """All entries as commands; audio as bytes."""
        commands: list[KeptCommand] = []
        for entry in self._entries:
            if isinstance(entry, AskedFlush):
                commands.append(Flush("", entry.tag, entry.pause, entry.ends_speech))
            elif isinstance(entry, NewTurns):
                commands.append(ChangeTurns("", entry.turns))
            else:
                item = entry if entry.payload is None else structs.replace(entry, payload=entry.payload.tobytes())
                commands.append(Feed("", [item]))
        return commands

    def take(self, commands: Iterable[KeptCommand]) -> None:
        """Continue with the entries that an engine has given."""
        for command in commands:
            if isinstance(command, Flush):
                self._entries.append(AskedFlush(command.tag, command.pause, command.ends_speech))
            elif isinstance(command, ChangeTurns):
                self._entries.append(NewTurns(command.turns))
            else:
                for item in command.items:
                    if item.payload is not None:
                        item.payload = np.frombuffer(item.payload, np.float32)
                self.add(command.items)


def _earlier(entry: ReplayEntry, positions: int, samples: int) -> ReplayEntry:
    if isinstance(entry, Item):
        return structs.replace(entry, offset=entry.offset - positions, sample=entry.sample - samples)
    if isinstance(entry, AskedFlush) and entry.pause is not None:
        return replace(entry, pause=max(0, entry.pause - samples))
    return entry


# Most positions of joined items: as many as an engine rebuilds of a stream in one pass.
JOINED_POSITIONS = 16
# Sets the hash of joined items apart from that of audio: it is made of their hashes.
_JOINED = b"joined"


def join_known(items: Iterable[Item], tokens: Sequence[int], spec: ModelSpec) -> list[Item]:
    """Join consecutive items of a replay whose tokens are known, up to `JOINED_POSITIONS` each. Every position keeps
    its samples with look-back and look-ahead. Skipped positions are not joined: the engine skips whole items."""
    found: list[Item] = []
    run: list[Item] = []

    def end_run() -> None:
        if run:
            found.append(run[0] if len(run) == 1 else _joined(run, spec))
            run.clear()

    for item in items:
        if not _may_be_joined(item, tokens, spec):
            end_run()
            found.append(item)
            continue
        if run and (len(run) == JOINED_POSITIONS or not _continues(run[-1], item, spec)):
            end_run()
        run.append(item)
    end_run()
    return found


def _may_be_joined(item: Item, tokens: Sequence[int], spec: ModelSpec) -> bool:
    index = item.offset - spec.prefix_positions
    if item.length != 1 or item.mask is not None or item.samples is not None or not 0 <= index < len(tokens):
        return False
    return tokens[index] != SKIPPED and item.payload is not None and item.payload.ndim == 1


def _continues(before: Item, item: Item, spec: ModelSpec) -> bool:
    """Whether an item follows another one in the same segment: the samples that both have are equal."""
    if (before.offset + 1, before.sample + spec.samples_per_position) != (item.offset, item.sample):
        return False
    around = spec.look_back_samples + spec.look_ahead_samples
    return bool(before.payload[spec.samples_per_position :].tobytes() == item.payload[:around].tobytes())


def _joined(run: Sequence[Item], spec: ModelSpec) -> Item:
    own = slice(0, spec.samples_per_position)
    payload = np.concatenate([*(item.payload[own] for item in run[:-1]), run[-1].payload])
    key = blake2b(b"".join(item.key for item in run), digest_size=KEY_BYTES, person=_JOINED).digest()
    return Item(run[0].offset, len(run), run[0].sample, key, payload)


@dataclass(frozen=True, slots=True)
class Replay:
    """The commands and state that a new engine gets to rebuild a stream.

    The new engine counts from zero: its count is the stream's count minus `positions` and `samples`.
    """

    positions: int
    samples: int
    entries: list[ReplayEntry]
    forced_tokens: list[int] = field(default_factory=list)
    state: StreamState | None = None
    # Items before the state's position, and the position until which latency does not matter (the engine catches up).
    known: list[Item] = field(default_factory=list)
    catch_up_until: int = 0
    # The sample at which the entries begin, on the new engine's count.
    sample: int = 0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Most positions a gateway holds of a stream: computed ones for a replay, and ones the engine has not computed."""

    keep_positions: int
    ahead_positions: int


def positions_to_keep(spec: ModelSpec, seconds: float) -> int:
    """Computed positions that a replay needs: the model's attention window, at most `seconds` of audio."""
    limit = int(seconds * spec.sample_rate / spec.samples_per_position)
    window = max((group.window_positions for group in spec.kv_groups), default=limit)
    return min(limit, window)


class Memory(Protocol):
    """The results of the kept audio that a new engine needs besides the audio: tokens, or a saved state."""

    def trim(self, kept: ReplayLog) -> None:
        """Drop what no replay needs."""

    def replay(self, kept: ReplayLog) -> Replay:
        """Make the replay for a new engine. All later text comes from that engine."""

    def on_text(self, text: Text) -> Text | None:
        """Record text from the engine; returns the part of it that is new, or None."""

    def on_state(self, state: StreamState) -> None:
        """Record the state after all text so far."""

    def start_at(self, position: int, token: int) -> None:
        """An adopted stream: nothing before `position` is kept, and its next token belongs to position `token`."""

    @property
    def can_replay(self) -> bool:
        """Whether enough is kept for another engine to continue."""

    def is_whole(self, kept: ReplayLog) -> bool:
        """Whether a replay gives exactly the same text. An adopted stream must first be fed a full window again."""


class TokenMemory:
    """For models with one token per position: keeps the tokens of the kept audio."""

    def __init__(self, spec: ModelSpec, keep_positions: int) -> None:
        self._keep_positions = keep_positions
        # A token is about audio before it, by up to the delay and the silence of a flush.
        self._reach_samples = spec.flush_positions_for(spec.max_delay_positions) * spec.samples_per_position
        self._tokens: deque[int] = deque()
        self._first = spec.prefix_positions
        self._words: deque[Word] = deque()
        self._replayed = False
        # First position kept of an adopted stream, else 0.
        self._kept_from = 0

    def trim(self, kept: ReplayLog) -> None:
        # Positions whose tokens have not arrived must be computed again, so their audio stays.
        first = kept.drop_before(min(kept.end - self._keep_positions, self._first + len(self._tokens)))
        start = kept.end if first is None else first.offset
        while self._tokens and self._first < start:
            self._tokens.popleft()
            self._first += 1
        sample = kept.sample_at(start) - self._reach_samples
        while self._words and self._words[0].end_sample < sample:
            self._words.popleft()

    def replay(self, kept: ReplayLog) -> Replay:
        positions, samples, entries = kept.from_beginning()
        self._replayed = self._replayed or bool(entries)
        return Replay(positions, samples, entries, forced_tokens=list(self._tokens))

    def on_text(self, text: Text) -> Text | None:
        self._tokens.extend(text.tokens)
        if self._replayed:
            # A replayed flush completes the word before it once more, or the rest of that word.
            text.words = [word for word in text.words if not self._is_known(word)]
        self._words.extend(text.words)
        return text if text.delta or text.words or text.tokens else None

    def _is_known(self, word: Word) -> bool:
        return any(known.end_sample == word.end_sample and known.text.endswith(word.text) for known in self._words)

    def on_state(self, state: StreamState) -> None:
        raise AssertionError("a model with one token per position sends no states")

    def start_at(self, position: int, token: int) -> None:
        self._first, self._kept_from = token, position

    @property
    def can_replay(self) -> bool:
        return True

    def is_whole(self, kept: ReplayLog) -> bool:
        return not self._kept_from or kept.end - self._kept_from >= self._keep_positions


class SavedWindow:
    """For windowed models: keeps the last state that the engine sent."""

    def __init__(self) -> None:
        self._state: StreamState | None = None
        # First position kept of an adopted stream until a state lies entirely after it, else 0.
        self._kept_from = 0

    def trim(self, kept: ReplayLog) -> None:
        if self._state is not None:
            kept.drop_before(self._state.audio_from)
            kept.drop_flushes(self._state.tag)

    def replay(self, kept: ReplayLog) -> Replay:
        state = self._state
        position, tag = (0, 0) if state is None else (state.position, state.tag)
        known, entries = kept.split(position, tag)
        # The new engine may fall behind by as much audio again while it catches up; after that, latency counts.
        catch_up_until = kept.end + (kept.end - position)
        sample = kept.sample_at(position)
        return Replay(0, 0, entries, state=state, known=known, catch_up_until=catch_up_until, sample=sample)

    def on_text(self, text: Text) -> Text | None:
        return text

    def on_state(self, state: StreamState) -> None:
        is_newer = self._state is None or state.position >= self._state.position
        if is_newer and state.audio_from >= self._kept_from:
            self._state, self._kept_from = state, 0

    def start_at(self, position: int, token: int) -> None:
        self._kept_from = position

    @property
    def can_replay(self) -> bool:
        return not self._kept_from

    def is_whole(self, kept: ReplayLog) -> bool:
        return self.can_replay


def memory_for(spec: ModelSpec, keep_positions: int) -> Memory:
    """The memory for this kind of model."""
    return SavedWindow() if spec.rereads_window else TokenMemory(spec, keep_positions)
