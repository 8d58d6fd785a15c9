"""Scores of a transcript: word errors, delays, punctuation. Pure functions on words and seconds.

Used by the benchmarks that compare texts; the word error rate itself is in `realtime/bench/words.py`. Word error rates
are pooled: the errors of all clips divided by the reference words of all clips. A word's delay counts from the end of
the word in the audio to the moment its last letter was shown. A seam is a pause between two words, where utterances of
a live stream end and begin: punctuation and capitals there are compared with those of the same weights on whole clips,
if both transcripts have the same word on either side.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
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
    _ends: list[int] = field(default_factory=list)
    _moments: list[float] = field(default_factory=list)

    def add(self, at: float, delta: str, words: Sequence[Word]) -> None:
        self.words += words
        if delta:
            self.text += delta
            self._ends.append(len(self.text))
            self._moments.append(at)

    def moments(self) -> list[tuple[int, float]]:
        """For each piece of text, where it ends in `text`, and when it came."""
        return list(zip(self._ends, self._moments, strict=True))

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
            shown.append(replace(word, shown_at=self._moments[bisect_left(self._ends, letters)]))
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


def utterance_of(words: Sequence[Word], spoken: Sequence[tuple[float, float]]) -> list[int]:
    """The index of the utterance that the middle of each word is nearest to."""
    borders = [(before[1] + after[0]) / 2 for before, after in pairwise(spoken)]
    return [bisect_right(borders, word.middle) for word in words]


def times_to_final(spoken: Sequence[tuple[float, float]], shown: Sequence[Word]) -> list[float]:
    """Seconds from the end of each utterance to its last text. Text is never revised, so its last text is final.
    Utterances without text do not count here: they are deletions."""
    if not spoken:
        return []
    last_shown: dict[int, float] = {}
    for word, index in zip(shown, utterance_of(shown, spoken), strict=True):
        last_shown[index] = max(word.shown_at, last_shown.get(index, 0.0))
    return [moment - spoken[index][1] for index, moment in sorted(last_shown.items())]


# Seams

_DOUBLED = re.compile(r"[.,?!;:]\s*[,?!;:]|(?<!\.)\.\.(?!\.)")
_SMALL_AFTER_SENTENCE = re.compile(r"(?<=[a-z0-9])[.?!]\s+[a-z]")


@dataclass(frozen=True, slots=True)
class SeamErrors:
    """Seams that could be compared and the wrong ones among them; and errors of punctuation in any text."""

    seams: int = 0
    marks_at_seams: int = 0
    capitals_at_seams: int = 0
    elsewhere: int = 0
    marks_elsewhere: int = 0
    capitals_elsewhere: int = 0
    doubled_marks: int = 0
    small_letters_behind_sentences: int = 0

    def __add__(self, other: SeamErrors) -> SeamErrors:
        return SeamErrors(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


def seams_of(words: Sequence[Word], spoken: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the words before which one of these utterances ends and the next begins."""
    return {index for index, (before, after) in enumerate(pairwise(utterance_of(words, spoken)), 1) if before != after}


def compare_seams(whole: str, words: Sequence[str], seams: Iterable[int]) -> SeamErrors:
    """Errors of a transcript's words against the text of the whole clip; `seams` are indices of words behind one."""
    reference = [_written(word) for word in whole.split() if plain_words(word)]
    kept = [(index, word) for index, word in enumerate(words) if plain_words(word)]
    heard = [_written(word) for _, word in kept]
    behind = {place for place, (index, _) in enumerate(kept) if index in set(seams)}
    text = " ".join(words)
    small = len(_SMALL_AFTER_SENTENCE.findall(text))
    errors = SeamErrors(doubled_marks=len(_DOUBLED.findall(text)), small_letters_behind_sentences=small)
    pairs = align([word for word, _, _ in reference], [word for word, _, _ in heard])
    for (i, j), (k, m) in pairwise(pairs):
        if i is None or j is None or k is None or m is None:
            continue
        if reference[i][0] != heard[j][0] or reference[k][0] != heard[m][0]:
            continue
        mark, capital = reference[i][1] != heard[j][1], reference[k][2] != heard[m][2]
        errors += SeamErrors(1, mark, capital) if m in behind else SeamErrors(0, 0, 0, 1, mark, capital)
    return errors


def _written(word: str) -> tuple[str, str, bool]:
    """The word without punctuation, the kind of punctuation after it, and whether it begins with a capital."""
    last = word.rstrip("\"')")[-1:]
    mark = "." if last in tuple(".?!") else "," if last in tuple(",;:") else ""
    return "".join(plain_words(word)), mark, word.lstrip("\"'(")[:1].isupper()
