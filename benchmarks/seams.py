"""Marks and capitals at the seams of a transcript, against those of the same weights on whole clips. Pure.

A seam lies between two words with a pause between them, where a live stream's utterances end and begin. What stands
there is compared where both transcripts have the same word on either side.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from benchmarks.scoring import ShownWord, TimedWord, align, plain_words

_DOUBLED = re.compile(r"[.,?!;:]\s*[,?!;:]|(?<!\.)\.\.(?!\.)")
_SMALL_AFTER_SENTENCE = re.compile(r"(?<=[a-z0-9])[.?!]\s+[a-z]")


@dataclass(frozen=True, slots=True)
class SeamErrors:
    """Places that could be compared, and how many of them are wrong; and what is wrong in any text."""

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


@dataclass(frozen=True, slots=True)
class _Written:
    """A word and how it is written: the kind of mark behind it, and whether it begins with a capital."""

    plain: str
    mark: str
    capital: bool


def seams_of(words: Sequence[ShownWord | TimedWord], spoken: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the words before which one of these utterances ends and the next begins."""
    borders = [(before[1] + after[0]) / 2 for before, after in pairwise(spoken)]
    places = [bisect_right(borders, (word.start + word.end) / 2) for word in words]
    return {index for index in range(1, len(places)) if places[index] != places[index - 1]}


def compare(whole: str, words: Sequence[str], seams: Iterable[int]) -> SeamErrors:
    """Errors of a transcript's words against the text of the whole clip; `seams` are indices of words behind one."""
    reference = [_written(word) for word in whole.split() if plain_words(word)]
    kept = [(index, word) for index, word in enumerate(words) if plain_words(word)]
    heard = [_written(word) for _, word in kept]
    behind = {place for place, (index, _) in enumerate(kept) if index in set(seams)}
    errors = _faults(" ".join(words))
    pairs = align([word.plain for word in reference], [word.plain for word in heard])
    for (i, j), (k, m) in pairwise(pairs):
        if i is None or j is None or k is None or m is None:
            continue
        if reference[i].plain != heard[j].plain or reference[k].plain != heard[m].plain:
            continue
        mark, capital = reference[i].mark != heard[j].mark, reference[k].capital != heard[m].capital
        errors += SeamErrors(1, mark, capital) if m in behind else SeamErrors(0, 0, 0, 1, mark, capital)
    return errors


def _faults(text: str) -> SeamErrors:
    small = len(_SMALL_AFTER_SENTENCE.findall(text))
    return SeamErrors(doubled_marks=len(_DOUBLED.findall(text)), small_letters_behind_sentences=small)


def _written(word: str) -> _Written:
    last = word.rstrip("\"')")[-1:]
    mark = "." if last in tuple(".?!") else "," if last in tuple(",;:") else ""
    return _Written("".join(plain_words(word)), mark, word.lstrip("\"'(")[:1].isupper())
