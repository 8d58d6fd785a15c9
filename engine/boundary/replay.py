"""The replay of a stream: its recent audio, commands, tokens and state, from which another engine can rebuild it.

`ReplayLog` has the recent commands of one stream in the order sent (audio items, flushes, changes of the turn rule). A
gateway keeps a log per stream in case its engine is lost. An engine keeps one in case the gateway is lost, and sends it
to the gateway that adopts the stream.

In the gateway each `EngineStream` (`engine/client/stream.py`) also has a `ReplayState`. It keeps what the old engine
has computed and a new one needs, decides when audio may be dropped from the log, and makes the `Replay` that a new
engine is sent. Text that was received is not repeated; text that was lost is produced again.

- Frame-synchronous models (`TokenHistory`): a replay is the audio of the attention window, at most `limits.replay_s`,
  and the tokens for it, which the new engine repeats without sending their text again. Items are joined when they are
  sent (`join_replayed`), because receiving an item costs an engine about as much time as computing a position.
- Windowed models (`SavedWindow`): a replay is the state that came with the last text, and the audio from which that
  state continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from engine.boundary.items import KEY_BYTES, split_item
from engine.messages import SKIPPED, ChangeTurns, Feed, Flush, Item, ReplayCommand, StreamState, Text, TurnRule, Word
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class FlushRequest:
    """A flush was requested at this point of the log; the fields are those of `messages.Flush`."""

    tag: int
    pause: int | None = None
    ends_speech: bool = False


@dataclass(frozen=True, slots=True)
class TurnRuleChange:
    """The turn rule changed at this point of the log."""

    turns: TurnRule | None


ReplayEntry = Item | FlushRequest | TurnRuleChange


class ReplayLog:
    """The last commands of a stream."""

    def __init__(self, spec: ModelSpec) -> None:
        # Position and sample at which the stream's audio ends.
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
            self.end_sample = last.sample + last.covered_samples(self._spec.samples_per_position)

    def mark_flush(
        self, tag: int, unanswered: Collection[int], pause: int | None = None, ends_speech: bool = False
    ) -> None:
        """Record a flush. It replaces flushes directly before it that are not in `unanswered`."""
        while self._entries and isinstance(last := self._entries[-1], FlushRequest) and last.tag not in unanswered:
            self._entries.pop()
            ends_speech = ends_speech or last.ends_speech
        self._entries.append(FlushRequest(tag, pause, ends_speech))

    def mark_turns(self, turns: TurnRule | None) -> None:
        """Record a change of the turn rule. It replaces one directly before it."""
        if self._entries and isinstance(self._entries[-1], TurnRuleChange):
            self._entries.pop()
        self._entries.append(TurnRuleChange(turns))

    def first(self) -> Item | None:
        return next((entry for entry in self._entries if isinstance(entry, Item)), None)

    def drop_before(self, position: int) -> Item | None:
        """Drop everything before `position`, including flushes; returns the first item that is kept.

        An audio item that contains `position` is kept whole. A gap is cut at `position`, so that a long gap does not
        keep the log longer than audio would.
        """
        while (first := self.first()) is not None and first.offset < position:
            if first.offset + first.length > position and first.key:
                break
            while self._entries.popleft() is not first:
                pass
            if first.offset + first.length > position:
                self._entries.appendleft(split_item(first, position - first.offset, self._spec)[1])
        return first

    def drop_flushes(self, tag: int) -> None:
        """Drop leading flushes up to `tag`."""
        while self._entries and isinstance(self._entries[0], FlushRequest) and self._entries[0].tag <= tag:
            self._entries.popleft()

    def split(self, position: int, tag: int) -> tuple[list[Item], list[ReplayEntry]]:
        """Split the log at the position of a saved state, which includes the answers to the flushes up to `tag`.

        Returns the items before the position, and what must be sent again: later items and rule changes, and all
        flushes after `tag`, also those before the position.
        """
        before: list[Item] = []
        after: list[ReplayEntry] = []
        for entry in self._entries:
            if isinstance(entry, Item) and entry.offset < position:
                before.append(entry)
                # The saved state has the turn rule, so changes of the rule before it are dropped.
                after = [flush for flush in after if isinstance(flush, FlushRequest)]
            elif not isinstance(entry, FlushRequest) or entry.tag > tag:
                after.append(entry)
        return before, after

    def sample_at(self, position: int) -> int:
        """The sample at which a kept position starts."""
        for entry in self._entries:
            if isinstance(entry, Item) and entry.offset + entry.length > position:
                inside = max(0, position - entry.offset) * self._spec.samples_per_position
                return entry.sample + (inside if entry.samples is None else min(inside, entry.samples))
        return self.end_sample

    def rebased(self) -> tuple[int, int, list[ReplayEntry]]:
        """All entries with positions and samples counted as if the stream began with the first kept item. Returns how
        much was subtracted from positions and from samples, and the entries."""
        first = self.first()
        positions = (self.end if first is None else first.offset) - self._spec.prefix_positions
        samples = self.end_sample if first is None else first.sample
        entries = [_rebased(entry, positions, samples) for entry in self._entries]
        return positions, samples, entries

    # Conversion to messages, with which an engine sends the log to the gateway that adopts the stream.

    def to_commands(self) -> list[ReplayCommand]:
        """All entries as commands; payloads as bytes."""
        commands: list[ReplayCommand] = []
        for entry in self._entries:
            if isinstance(entry, FlushRequest):
                commands.append(Flush("", entry.tag, entry.pause, entry.ends_speech))
            elif isinstance(entry, TurnRuleChange):
                commands.append(ChangeTurns("", entry.turns))
            else:
                item = entry if entry.payload is None else structs.replace(entry, payload=entry.payload.tobytes())
                commands.append(Feed("", [item]))
        return commands

    def load_commands(self, commands: Iterable[ReplayCommand]) -> None:
        """Append the entries of a log that an engine has sent."""
        for command in commands:
            if isinstance(command, Flush):
                self._entries.append(FlushRequest(command.tag, command.pause, command.ends_speech))
            elif isinstance(command, ChangeTurns):
                self._entries.append(TurnRuleChange(command.turns))
            else:
                for item in command.items:
                    if item.payload is not None:
                        item.payload = np.frombuffer(item.payload, np.float32)
                self.add(command.items)


def _rebased(entry: ReplayEntry, positions: int, samples: int) -> ReplayEntry:
    if isinstance(entry, Item):
        return structs.replace(entry, offset=entry.offset - positions, sample=entry.sample - samples)
    if isinstance(entry, FlushRequest) and entry.pause is not None:
        return replace(entry, pause=max(0, entry.pause - samples))
    return entry


# Most positions of joined items: the unit in which a scheduler plans rebuilds (a quarter of
# `ModelSpec.replay_positions`).
JOINED_POSITIONS = 16
# The key of a joined item is a hash of the keys of its parts. This label keeps it apart from hashes of audio.
_JOINED = b"joined"


def join_replayed(items: Iterable[Item], tokens: Sequence[int], spec: ModelSpec) -> list[Item]:
    """Join consecutive items of a replay: those whose tokens are known, and those whose tokens are not. Skipped
    positions are not joined: the engine passes over whole items faster."""

    def is_known(item: Item) -> bool | None:
        index = item.offset - spec.prefix_positions
        if not 0 <= index < len(tokens):
            return False
        return True if tokens[index] != SKIPPED else None

    return join(items, spec, is_known)


def join(items: Iterable[Item], spec: ModelSpec, kind_of: Callable[[Item], Any] = lambda item: True) -> list[Item]:
    """Join consecutive items of one position and of the same kind, up to `JOINED_POSITIONS` each; none whose kind is
    None.

    The payload of a joined item has the samples of all its positions once, with the look-back before the first and the
    look-ahead after the last.
    """
    joined: list[Item] = []
    run: list[Item] = []
    run_kind: Any = None

    def end_run() -> None:
        if run:
            joined.append(run[0] if len(run) == 1 else _joined(run, spec))
            run.clear()

    for item in items:
        kind = kind_of(item) if _may_be_joined(item) else None
        if kind is None:
            end_run()
            joined.append(item)
            continue
        if run and (len(run) == JOINED_POSITIONS or kind != run_kind or not _continues(run[-1], item, spec)):
            end_run()
        run.append(item)
        run_kind = kind
    end_run()
    return joined


def _may_be_joined(item: Item) -> bool:
    if item.length != 1 or item.mask is not None or item.samples is not None:
        return False
    return item.payload is not None and item.payload.ndim == 1


def _continues(before: Item, item: Item, spec: ModelSpec) -> bool:
    """Whether `item` follows `before` in the same segment, so that the samples in both payloads are equal."""
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
    """The commands and state that a new engine gets to rebuild a stream."""

    # The stream's counts minus the new engine's, in positions and in samples. Both are 0 for windowed models.
    positions: int
    samples: int
    # Commands to send again, with the new engine's counts.
    entries: list[ReplayEntry]
    # Frame-synchronous models: the tokens of the first positions.
    forced_tokens: list[int] = field(default_factory=list)
    # Windowed models: the state, and the items before its position that it still needs.
    state: StreamState | None = None
    before_state: list[Item] = field(default_factory=list)
    # Below this position the new engine computes single strides although they are late (`Open.catch_up_until`).
    catch_up_until: int = 0
    # The sample at which the entries begin, on the new engine's count.
    sample: int = 0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much of a stream's audio a gateway keeps and sends, in positions."""

    # Computed positions that are kept for a replay.
    keep_positions: int
    # Most positions that the engine has been sent and has not computed.
    ahead_positions: int


def positions_to_keep(spec: ModelSpec, seconds: float) -> int:
    """Computed positions that a replay needs: the model's attention window, at most `seconds` of audio."""
    limit = int(seconds * spec.sample_rate / spec.samples_per_position)
    window = max((group.window_positions for group in spec.kv_groups), default=limit)
    return min(limit, window)


class ReplayState(Protocol):
    """What the old engine has computed and a new one needs besides the audio in the log: tokens, or a saved state."""

    def trim(self, log: ReplayLog) -> None:
        """Drop from the log what no replay needs."""

    def replay(self, log: ReplayLog) -> Replay:
        """Make the replay for a new engine. All later text comes from that engine."""

    def on_text(self, text: Text) -> Text | None:
        """Record text from the engine; returns the part of it that is new, or None."""

    def on_state(self, state: StreamState) -> None:
        """Record the state after all text so far."""

    def start_at(self, position: int, next_token_position: int) -> None:
        """Begin with an adopted stream. None of its audio before `position` is kept."""

    @property
    def can_replay(self) -> bool:
        """Whether enough is kept for another engine to continue."""

    def replays_exactly(self, log: ReplayLog) -> bool:
        """Whether a replay gives exactly the same text. For an adopted stream that needs a full window of new audio."""


class TokenHistory:
    """For models with one token per position: keeps the tokens of the audio in the log."""

    def __init__(self, spec: ModelSpec, keep_positions: int) -> None:
        self._keep_positions = keep_positions
        # A token can refer to audio that lies up to this much before it: the delay and the silence of a flush.
        self._reach_samples = spec.flush_positions_for(spec.max_delay_positions) * spec.samples_per_position
        self._tokens: deque[int] = deque()
        # Position of the first token.
        self._first = spec.prefix_positions
        # The last words received.
        self._words: deque[Word] = deque()
        self._replayed = False
        # First position kept of an adopted stream, else 0.
        self._kept_from = 0

    def trim(self, log: ReplayLog) -> None:
        # Positions whose tokens have not arrived must be computed again, so their audio is kept.
        first = log.drop_before(min(log.end - self._keep_positions, self._first + len(self._tokens)))
        start = log.end if first is None else first.offset
        while self._tokens and self._first < start:
            self._tokens.popleft()
            self._first += 1
        sample = log.sample_at(start) - self._reach_samples
        while self._words and self._words[0].end_sample < sample:
            self._words.popleft()

    def replay(self, log: ReplayLog) -> Replay:
        positions, samples, entries = log.rebased()
        self._replayed = self._replayed or bool(entries)
        return Replay(positions, samples, entries, forced_tokens=list(self._tokens))

    def on_text(self, text: Text) -> Text | None:
        self._tokens.extend(text.tokens)
        if self._replayed:
            # A replayed flush emits the word before it again, or the end of that word.
            text.words = [word for word in text.words if not self._was_received(word)]
        self._words.extend(text.words)
        return text if text.delta or text.words or text.tokens else None

    def _was_received(self, word: Word) -> bool:
        return any(other.end_sample == word.end_sample and other.text.endswith(word.text) for other in self._words)

    def on_state(self, state: StreamState) -> None:
        raise AssertionError("a model with one token per position sends no states")

    def start_at(self, position: int, next_token_position: int) -> None:
        self._first, self._kept_from = next_token_position, position

    @property
    def can_replay(self) -> bool:
        return True

    def replays_exactly(self, log: ReplayLog) -> bool:
        return not self._kept_from or log.end - self._kept_from >= self._keep_positions


class SavedWindow:
    """For windowed models: keeps the last state that the engine sent."""

    def __init__(self) -> None:
        self._state: StreamState | None = None
        # First position kept of an adopted stream until a state lies entirely after it, else 0.
        self._kept_from = 0

    def trim(self, log: ReplayLog) -> None:
        if self._state is not None:
            log.drop_before(self._state.audio_from)
            log.drop_flushes(self._state.tag)

    def replay(self, log: ReplayLog) -> Replay:
        state = self._state
        position, tag = (0, 0) if state is None else (state.position, state.tag)
        before_state, entries = log.split(position, tag)
        # While the new engine computes the replay, about as much new audio arrives, and it computes that in single
        # strides too.
        catch_up_until = log.end + (log.end - position)
        sample = log.sample_at(position)
        return Replay(
            0, 0, entries, state=state, before_state=before_state, catch_up_until=catch_up_until, sample=sample
        )

    def on_text(self, text: Text) -> Text | None:
        return text

    def on_state(self, state: StreamState) -> None:
        is_newer = self._state is None or state.position >= self._state.position
        if is_newer and state.audio_from >= self._kept_from:
            self._state, self._kept_from = state, 0

    def start_at(self, position: int, next_token_position: int) -> None:
        self._kept_from = position

    @property
    def can_replay(self) -> bool:
        return not self._kept_from

    def replays_exactly(self, log: ReplayLog) -> bool:
        return self.can_replay


def replay_state_for(spec: ModelSpec, keep_positions: int) -> ReplayState:
    """The replay state for this kind of model."""
    return SavedWindow() if spec.rereads_window else TokenHistory(spec, keep_positions)
