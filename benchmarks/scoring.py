"""How good a transcript is, and how soon it came. Pure functions on words and seconds.

Word error rates are pooled: errors of all clips over reference words of all clips. A word's delay counts from the end
of the word in the audio to the moment its last letter was shown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np

# One step of an alignment: indices into reference and hypothesis. (i, None) is a deletion, (None, j) an insertion.
Pair = tuple[int | None, int | None]


def plain_words(text: str) -> list[str]:
    """Words as they were said, one for one: lower case, no punctuation. Used to match words, not to count errors."""
    words = ("".join(letter for letter in word.lower() if letter.isalnum()) for word in text.split())
    return [word for word in words if word]


# Alignment


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Pair]:
    """A shortest edit path from reference to hypothesis."""
    costs = _edit_costs(reference, hypothesis)
    pairs: list[Pair] = []
    i, j = len(reference), len(hypothesis)
    while i or j:
        here = costs[i, j]
        if i and j and here == costs[i - 1, j - 1] + (reference[i - 1] != hypothesis[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif i and here == costs[i - 1, j] + 1:
            i -= 1
            pairs.append((i, None))
        else:
            j -= 1
            pairs.append((None, j))
    pairs.reverse()
    return pairs


def _edit_costs(reference: Sequence[str], hypothesis: Sequence[str]) -> np.ndarray:
    """costs[i, j]: edits between the first i and the first j words; a row at a time."""
    ids: dict[str, int] = {}
    left = [ids.setdefault(word, len(ids)) for word in reference]
    right = np.array([ids.setdefault(word, len(ids)) for word in hypothesis], np.int64)
    steps = np.arange(len(right) + 1, dtype=np.int32)
    costs = np.empty((len(left) + 1, len(right) + 1), np.int32)
    costs[0] = steps
    for i, word in enumerate(left, 1):
        above = costs[i - 1]
        row = above + 1
        np.minimum(row[1:], above[:-1] + (right != word), out=row[1:])
        # Insertions run along the row: each place may come from any place before it, one edit a step.
        costs[i] = np.minimum.accumulate(row - steps) + steps
    return costs


# Errors


@dataclass(frozen=True, slots=True)
class Errors:
    hits: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def words(self) -> int:
        """Reference words."""
        return self.hits + self.substitutions + self.deletions

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """Word error rate; None without reference words."""
        return self.total / self.words if self.words else None

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.hits + other.hits,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )


def pooled(errors: Sequence[Errors]) -> Errors:
    return reduce(add, errors, Errors())


def error_of(pair: Pair, reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    i, j = pair
    if i is None:
        return Errors(insertions=1)
    if j is None:
        return Errors(deletions=1)
    return Errors(hits=1) if reference[i] == hypothesis[j] else Errors(substitutions=1)


@dataclass(frozen=True, slots=True)
class ClipScore:
    """Errors of one clip; those that hit its first or last reference word apart from those inside it."""

    edges: Errors
    inside: Errors

    @property
    def errors(self) -> Errors:
        return self.edges + self.inside


def score(reference: Sequence[str], hypothesis: Sequence[str]) -> ClipScore:
    """Insertions count as inside: they hit no reference word."""
    last = len(reference) - 1
    edges: list[Errors] = []
    inside: list[Errors] = []
    for pair in align(reference, hypothesis):
        (edges if pair[0] in (0, last) else inside).append(error_of(pair, reference, hypothesis))
    return ClipScore(pooled(edges), pooled(inside))


def bootstrap_interval(clips: Sequence[Errors], draws: int = 2000, seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the pooled error rate if the same number of clips were drawn again; None without words."""
    wrong = np.array([clip.total for clip in clips], np.float64)
    words = np.array([clip.words for clip in clips], np.float64)
    if not words.sum():
        return None
    chosen = np.random.default_rng(seed).integers(len(clips), size=(draws, len(clips)))
    drawn_words = words[chosen].sum(axis=1)
    rates = wrong[chosen].sum(axis=1)[drawn_words > 0] / drawn_words[drawn_words > 0]
    low, high = np.percentile(rates, [2.5, 97.5])
    return float(low), float(high)


def errors_by_minute(
    reference: Sequence[str], hypothesis: Sequence[str], hypothesis_seconds: Sequence[float]
) -> dict[int, Errors]:
    """Errors by minute of the session. Words that were not heard count where their neighbours were."""
    minutes: dict[int, Errors] = {}
    now = 0.0
    for pair in align(reference, hypothesis):
        if pair[1] is not None:
            now = hypothesis_seconds[pair[1]]
        minute = int(now // 60)
        minutes[minute] = minutes.get(minute, Errors()) + error_of(pair, reference, hypothesis)
    return minutes


def spread_times(seconds: Sequence[float], count: int) -> list[float]:
    """Times for `count` normalised words from those of the words as shown, of which there may be more or fewer."""
    if not seconds:
        return [0.0] * count
    return [seconds[min(index * len(seconds) // count, len(seconds) - 1)] for index in range(count)]


# Delays


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word as the engine reports it: the seconds of audio it spans, and how sure the model is of it, if it tells."""

    text: str
    start: float
    end: float
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class ShownWord:
    """A word and the moment its last letter was shown."""

    text: str
    start: float
    end: float
    shown_at: float
    confidence: float | None = None


@dataclass(slots=True)
class Emissions:
    """What one session showed, in order: text with the moment it came, and words with their times in the audio."""

    text: str = ""
    words: list[TimedWord] = field(default_factory=list)
    # For each piece of text, where it ends in `text`, and when it came.
    _ends: list[int] = field(default_factory=list)
    _moments: list[float] = field(default_factory=list)

    def add(self, at: float, delta: str, words: Sequence[TimedWord]) -> None:
        self.words += words
        if delta:
            self.text += delta
            self._ends.append(len(self.text))
            self._moments.append(at)

    def shown(self) -> list[ShownWord]:
        """Each word with the moment it was there to be read: often before the engine knew that it was complete."""
        shown, cursor = [], 0
        for word in self.words:
            found = self.text.find(word.text, cursor)
            if found < 0:
                raise ValueError(f"the word {word.text!r} was reported but its text was never shown")
            # Its last letter: a mark may come with the next word, and nobody waits for it.
            letters = found + max(1, len(word.text.rstrip(".,?!;:")))
            cursor = found + len(word.text)
            moment = self._moments[bisect_left(self._ends, letters)]
            shown.append(ShownWord(word.text, word.start, word.end, moment, word.confidence))
        return shown


def emission_delays(reference: Sequence[str], shown: Sequence[ShownWord]) -> list[float]:
    """Seconds from the end of each word that was heard right to the moment it was shown."""
    heard = [(word, plain) for word in shown for plain in plain_words(word.text)[:1]]
    pairs = align(reference, [plain for _, plain in heard])
    matched = ((i, heard[j]) for i, j in pairs if i is not None and j is not None)
    return [word.shown_at - word.end for i, (word, plain) in matched if reference[i] == plain]


def judged(reference: Sequence[str], shown: Sequence[ShownWord]) -> list[tuple[float, bool]]:
    """How sure the model was of each word that it showed, and whether the word is right."""
    heard = [(word, plain) for word in shown for plain in plain_words(word.text)[:1]]
    pairs = align(reference, [plain for _, plain in heard])
    right = {j for i, j in pairs if i is not None and j is not None and reference[i] == heard[j][1]}
    return [(word.confidence, j in right) for j, (word, _) in enumerate(heard) if word.confidence is not None]


def calibration(words: Sequence[tuple[float, bool]]) -> tuple[float, float] | None:
    """Share of wrong words in the lowest tenth of confidence, and in the upper half."""
    if len(words) < 20:
        return None
    wrong = [not right for _, right in sorted(words)]
    lowest, upper = wrong[: len(wrong) // 10], wrong[len(wrong) // 2 :]
    return sum(lowest) / len(lowest), sum(upper) / len(upper)


def utterances(
    probabilities: Sequence[float], frame_seconds: float, threshold: float = 0.5, pause_seconds: float = 0.5
) -> list[tuple[float, float]]:
    """Start and end of what was said, by the speech detector: stretches between pauses of at least this length."""
    found: list[tuple[float, float]] = []
    for index, probability in enumerate(probabilities):
        if probability < threshold:
            continue
        start, end = index * frame_seconds, (index + 1) * frame_seconds
        if found and start - found[-1][1] < pause_seconds:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def times_to_final(spoken: Sequence[tuple[float, float]], shown: Sequence[ShownWord]) -> list[float]:
    """Seconds from the end of each utterance to its last text. Text is never revised, so its last text is final.

    A word belongs to the utterance its middle is nearest to. Utterances without text do not count here: they are
    deletions.
    """
    if not spoken:
        return []
    borders = [(before[1] + after[0]) / 2 for before, after in pairwise(spoken)]
    last_shown: dict[int, float] = {}
    for word in shown:
        index = bisect_right(borders, (word.start + word.end) / 2)
        last_shown[index] = max(word.shown_at, last_shown.get(index, 0.0))
    return [moment - spoken[index][1] for index, moment in sorted(last_shown.items())]


def percentile(values: Sequence[float], share: float) -> float | None:
    """None without values."""
    return float(np.percentile(values, share)) if values else None
