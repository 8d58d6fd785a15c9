"""What a gateway keeps of a stream, so that another engine can go on where a dead one stopped.

Kept are the items of one recompute window (bounded), and what was said about them. A frame-synchronous model is
replayed with its tokens forced, so it says nothing twice. A model that rereads its window starts again at the window's
first position and repeats itself; what it said before is recognised and dropped, and only the rest is passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.messages import Item, Text, Word
from engine.spec import ModelSpec

# A model misses the first word of audio that begins in the middle of speech. What a replay has before the window was
# said already, so a word missed there is not lost.
CONTEXT_SECONDS = 2


@dataclass(frozen=True, slots=True)
class FlushMark:
    """A flush was asked for here."""

    tag: int


@dataclass(frozen=True, slots=True)
class Replay:
    """All that a new engine needs. It counts positions and samples anew: the old ones minus these."""

    positions: int
    samples: int
    forced_tokens: list[int]
    entries: list[Item | FlushMark]


class Memory(Protocol):
    """What was said about the kept audio, and which part of what a new engine says is new."""

    def keep_from(self, kept: KeptAudio, computed: int, base: int) -> int:
        """First position that a replay must contain."""

    def trimmed(self, position: int, sample: int) -> None:
        """Audio before this is not kept any more."""

    def forced_tokens(self) -> list[int]: ...

    def replayed(self) -> None:
        """What comes now comes from a new engine."""

    def hear(self, text: Text) -> Text | None:
        """Text from the engine; what of it is new."""

    def settle(self, kept: KeptAudio, tag: int) -> Text | None:
        """A flush was answered: all is said about the audio before it. What was held back in doubt comes out."""


class KeptAudio:
    """The end of a stream: items and flushes in the order in which they were sent."""

    def __init__(self, spec: ModelSpec) -> None:
        self.end = spec.prefix_positions
        self.end_sample = 0
        self._spec = spec
        self._entries: deque[Item | FlushMark] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Sequence[Item]) -> None:
        self._entries.extend(items)
        if items:
            last = items[-1]
            self.end = last.offset + last.length
            came = last.length * self._spec.samples_per_position if last.samples is None else last.samples
            self.end_sample = last.sample + came

    def mark_flush(self, tag: int, unanswered: Collection[int]) -> None:
        """Flushes without audio between them are one flush, unless somebody still waits for the answer."""
        while self._entries and isinstance(self._entries[-1], FlushMark) and self._entries[-1].tag not in unanswered:
            self._entries.pop()
        self._entries.append(FlushMark(tag))

    def first(self) -> Item | None:
        return next((entry for entry in self._entries if isinstance(entry, Item)), None)

    def drop_before(self, position: int) -> Item | None:
        """Let go of all items that end before `position`, and of the flushes between them; the first that stays."""
        while (first := self.first()) is not None and first.offset + first.length <= position:
            while self._entries.popleft() is not first:
                pass
        return first

    def drop_through_flush(self, tag: int) -> None:
        """Let go of everything up to a flush, and of the flush."""
        if FlushMark(tag) in self._entries:
            while self._entries.popleft() != FlushMark(tag):
                pass

    def sample_at(self, position: int) -> int:
        """The audio sample at which a kept position starts."""
        for entry in self._entries:
            if isinstance(entry, Item) and entry.offset + entry.length > position:
                inside = max(0, position - entry.offset) * self._spec.samples_per_position
                return entry.sample + (inside if entry.samples is None else min(inside, entry.samples))
        return self.end_sample

    def position_at(self, sample: int) -> int:
        """The kept position that hears an audio sample; the end if none does."""
        for entry in self._entries:
            if isinstance(entry, Item):
                inside = (sample - entry.sample) // self._spec.samples_per_position
                if inside < entry.length:
                    return entry.offset + max(0, inside)
        return self.end

    def replay(self, forced_tokens: list[int]) -> Replay:
        """A copy on a clock that starts at the beginning."""
        first = self.first()
        positions = (self.end if first is None else first.offset) - self._spec.prefix_positions
        samples = self.end_sample if first is None else first.sample
        entries = [
            replace(entry, offset=entry.offset - positions, sample=entry.sample - samples)
            if isinstance(entry, Item)
            else entry
            for entry in self._entries
        ]
        return Replay(positions, samples, forced_tokens, entries)


class TokenMemory:
    """For models with one token per position: the tokens themselves are the memory."""

    def __init__(self, spec: ModelSpec, keep_positions: int) -> None:
        self._keep_positions = keep_positions
        self._tokens: deque[int] = deque()
        self._first = spec.prefix_positions
        self._words: deque[Word] = deque()
        self._replayed = False

    def keep_from(self, kept: KeptAudio, computed: int, base: int) -> int:
        # Positions whose tokens have not been heard of must be computed again, so their audio stays.
        return min(kept.end - self._keep_positions, self._first + len(self._tokens))

    def trimmed(self, position: int, sample: int) -> None:
        while self._tokens and self._first < position:
            self._tokens.popleft()
            self._first += 1
        while self._words and self._words[0].end_sample < sample:
            self._words.popleft()

    def forced_tokens(self) -> list[int]:
        return list(self._tokens)

    def replayed(self) -> None:
        self._replayed = True

    def hear(self, text: Text) -> Text | None:
        self._tokens.extend(text.tokens)
        if self._replayed:
            # A flush that is replayed completes the word before it once more.
            text.words = [word for word in text.words if word not in self._words]
        self._words.extend(text.words)
        return text if text.delta or text.words or text.tokens else None

    def settle(self, kept: KeptAudio, tag: int) -> Text | None:
        return None  # the flush stays: a replay must end words where they ended


class WindowMemory:
    """For models that reread their window: the text since the window's first position."""

    def __init__(self, spec: ModelSpec) -> None:
        self._window_positions = spec.window_positions
        self._context_positions = CONTEXT_SECONDS * spec.sample_rate // spec.samples_per_position
        self._said = ""
        self._words: list[Word] = []
        self._complete_until = 0
        self._again: _Repetition | None = None

    def keep_from(self, kept: KeptAudio, computed: int, base: int) -> int:
        # Until a repetition is over, the engine may die again and must then repeat the same audio.
        if self._again is not None:
            return 0
        start = base - self._context_positions
        if _letters(self._said) > sum(len(word.text) for word in self._words):
            # A word has begun and its time is not known yet: it can only be recognised if its audio is there.
            start = max(base - self._window_positions, min(start, kept.position_at(self._complete_until)))
        return start

    def trimmed(self, position: int, sample: int) -> None:
        """Words that ended before the kept audio are beyond repetition."""
        if self._again is not None:
            return
        while self._words and self._words[0].end_sample <= sample:
            word = self._words.pop(0)
            self._said = self._said[_skip_letters(self._said, len(word.text)) :]

    def forced_tokens(self) -> list[int]:
        return []

    def replayed(self) -> None:
        self._again = _Repetition(self._said, self._words) if self._said.strip() else None

    def hear(self, text: Text) -> Text | None:
        if self._again is None:
            return self._remember(text)
        news = self._again.hear(text)
        if news is None:
            return None
        self._again = None
        return self._remember(news)

    def settle(self, kept: KeptAudio, tag: int) -> Text | None:
        """A segment is over: nothing of it needs to be repeated from here on, neither audio nor text."""
        kept.drop_through_flush(tag)
        news = None if self._again is None else self._again.decide()
        self._again, self._said, self._words = None, "", []
        return news

    def _remember(self, text: Text) -> Text:
        self._said += text.delta
        self._words += text.words
        if text.words:
            self._complete_until = text.words[-1].end_sample
        return text


class _Repetition:
    """Tells what a new engine repeats from what it adds."""

    def __init__(self, said: str, words: list[Word]) -> None:
        self._said = said
        self._complete = len(words)
        self._said_until = words[-1].end_sample if words else 0
        self._heard = ""
        self._words: list[Word] = []
        self._last: Text | None = None

    def hear(self, text: Text) -> Text | None:
        """What goes beyond; None while it may still be repetition."""
        self._last = text
        self._heard += text.delta
        self._words += text.words
        said, heard = "".join(self._said.split()), "".join(self._heard.split())
        if heard.startswith(said):
            return self._from(_skip_letters(self._heard, len(said)), self._complete)
        if said.startswith(heard):
            return None
        # The engine heard it differently this time; wait until it has passed what was said, then find the place.
        passed = self._words and self._words[-1].start_sample >= self._said_until
        return self.decide() if passed else None

    def decide(self) -> Text | None:
        """Pass on what follows the words that match best what was said."""
        if self._last is None:
            return None
        said, heard = "".join(self._said.split()), "".join(self._heard.split())
        if said.startswith(heard):
            return None
        spoken = self._heard.split()
        repeated = repeated_words(self._said.split(), spoken)
        letters = sum(map(len, spoken[:repeated]))
        if repeated == len(spoken):
            return None
        return self._from(_skip_letters(self._heard, letters), min(repeated, len(self._words)))

    def _from(self, index: int, words: int) -> Text:
        assert self._last is not None
        return replace(self._last, delta=self._heard[index:], words=self._words[words:])


def _skip_letters(text: str, letters: int) -> int:
    """The index behind so many characters that are not spaces."""
    for index, character in enumerate(text):
        if letters == 0:
            return index
        letters -= not character.isspace()
    return len(text)


def _letters(text: str) -> int:
    return sum(map(len, text.split()))


def repeated_words(said: list[str], heard: list[str]) -> int:
    """How many of the heard words stand for what was said: the prefix with the smallest edit distance."""
    row = list(range(len(heard) + 1))
    for count, word in enumerate(said, 1):
        diagonal, row[0] = row[0], count
        for index, other in enumerate(heard, 1):
            best = min(diagonal + (_plain(word) != _plain(other)), row[index] + 1, row[index - 1] + 1)
            diagonal, row[index] = row[index], best

    def doubt(index: int) -> tuple[int, bool, int]:
        # Of equally likely places, the one behind the word that was said last; else the one after as many words.
        ends_alike = bool(index and said and _plain(heard[index - 1]) == _plain(said[-1]))
        return row[index], not ends_alike, abs(index - len(said))

    return min(range(len(row)), key=doubt)


def _plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())


def memory_for(spec: ModelSpec, keep_positions: int) -> Memory:
    return WindowMemory(spec) if spec.rereads_window else TokenMemory(spec, keep_positions)
