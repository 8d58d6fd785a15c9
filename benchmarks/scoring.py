"""Scores of a transcript: word errors, delays, confidence. Pure functions on words and seconds.

Used by the benchmarks that compare texts; the word error rate itself is in `realtime/bench/words.py`. Word error rates
are pooled: the errors of all clips divided by the reference words of all clips. A word's delay counts from the end of
the word in the audio to the moment its last letter was shown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from realtime.bench.words import Errors, align, word_errors


def plain_words(text: str) -> list[str]:
    """Words in lower case without punctuation, one for one. Used to match words, not to count errors."""
    words = ("".join(letter for letter in word.lower() if letter.isalnum()) for word in text.split())
    return [word for word in words if word]


def differing_words(texts: Sequence[str], others: Sequence[str]) -> tuple[int, int]:
    """Words that differ between two runs, case and punctuation aside, and all words of the first."""
    pairs = [(plain_words(text), plain_words(other)) for text, other in zip(texts, others, strict=True)]
    wrong = sum(word_errors(left, right).total for left, right in pairs)
    return wrong, sum(len(left) for left, _ in pairs)


# Errors


def pooled(errors: Iterable[Errors]) -> Errors:
    return sum(errors, Errors())


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


# Words with times


@dataclass(frozen=True, slots=True)
class Word:
    """A word: the seconds of audio it spans, how sure the model is of it if it says so, and when it was shown."""

    text: str
    start: float
    end: float
    confidence: float | None = None
    shown_at: float = 0.0

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


@dataclass(slots=True)
class Emissions:
    """The output of one session in order: text with its arrival times, and words with their times in the audio."""

    text: str = ""
    words: list[Word] = field(default_factory=list)
    # For each piece of text, where it ends in `text`, and when it came.
    ends: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)

    def add(self, at: float, delta: str, words: Sequence[Word]) -> None:
        self.words += words
        if delta:
            self.text += delta
            self.ends.append(len(self.text))
            self.moments.append(at)

    def shown(self) -> list[Word]:
        """Each word with the moment it was there to be read: often before the engine knew that it was complete."""
        shown, cursor = [], 0
        for word in self.words:
            found = self.text.find(word.text, cursor)
            if found < 0:
                raise ValueError(f"the word {word.text!r} was reported but its text was never shown")
            # The last letter counts: punctuation may come with the next word.
            letters = found + max(1, len(word.text.rstrip(".,?!;:")))
            cursor = found + len(word.text)
            shown.append(replace(word, shown_at=self.moments[bisect_left(self.ends, letters)]))
        return shown


def right_words(reference: Sequence[str], shown: Sequence[Word]) -> list[tuple[Word, bool]]:
    """Each word that was shown, and whether it is right."""
    heard = [(word, plain) for word in shown for plain in plain_words(word.text)[:1]]
    pairs = align(reference, [plain for _, plain in heard])
    right = {j for i, j in pairs if i is not None and j is not None and reference[i] == heard[j][1]}
    return [(word, j in right) for j, (word, _) in enumerate(heard)]


def calibration(words: Sequence[tuple[float, bool]]) -> tuple[float, float] | None:
    """Share of wrong words in the lowest tenth of confidence, and in the upper half."""
    if len(words) < 20:
        return None
    wrong = [not right for _, right in sorted(words)]
    lowest, upper = wrong[: len(wrong) // 10], wrong[len(wrong) // 2 :]
    return sum(lowest) / len(lowest), sum(upper) / len(upper)


def times_to_final(spoken: Sequence[tuple[float, float]], shown: Sequence[Word]) -> list[float]:
    """Seconds from the end of each utterance to its last text. Text is never revised, so its last text is final. A word
    belongs to the utterance nearest to its middle. Utterances without text do not count here: they are deletions."""
    if not spoken:
        return []
    borders = [(before[1] + after[0]) / 2 for before, after in pairwise(spoken)]
    last_shown: dict[int, float] = {}
    for word in shown:
        index = bisect_right(borders, word.middle)
        last_shown[index] = max(word.shown_at, last_shown.get(index, 0.0))
    return [moment - spoken[index][1] for index, moment in sorted(last_shown.items())]
