"""`ReplayLog`: the recent commands of one stream in the order sent (audio items, flushes, changes of the turn rule).

A new engine that is sent these commands rebuilds the stream. A gateway keeps such a log per stream in case its engine
is lost; an engine keeps one in case the gateway is lost, and gives it to the gateway that adopts the stream.
`engine/client/replay.py` decides how much of the log a gateway keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from engine.messages import ChangeTurns, Feed, Flush, Item, KeptCommand, TurnRule
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
