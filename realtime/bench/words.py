"""Word error rates: Whisper's English text normaliser, alignment and edit distance of two texts, counts of errors.

Pure functions, used by `tickertape bench`, `benchmarks/` and `training/`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Normaliser = Callable[[str], list[str]]
# One step of an alignment: indices into reference and hypothesis. (i, None) is a deletion, (None, j) an insertion.
Pair = tuple[int | None, int | None]


def english_normaliser(spelling: dict[str, str]) -> Normaliser:
    """Whisper's English text normaliser; `spelling` is its table of British to American spellings."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normalise = EnglishTextNormalizer(spelling)  # type: ignore[no-untyped-call]
    # It can leave a dot of an ellipsis, which is not a word.
    return lambda text: [word for word in normalise(text).split() if any(map(str.isalnum, word))]


@cache
def normaliser() -> Normaliser:
    """The English normaliser without the table of British spellings."""
    return english_normaliser({})


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Pair]:
    """A shortest edit path from reference to hypothesis."""
    costs = np.array(list(_edit_costs(reference, hypothesis)))
    pairs: list[Pair] = []
    i, j = len(reference), len(hypothesis)
    while i or j:
        cost = costs[i, j]
        if i and j and cost == costs[i - 1, j - 1] + (reference[i - 1] != hypothesis[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif i and cost == costs[i - 1, j] + 1:
            i -= 1
            pairs.append((i, None))
        else:
            j -= 1
            pairs.append((None, j))
    pairs.reverse()
    return pairs


def edit_distance(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """The number of edits, without the path: memory grows with one text only, because texts may be hours long."""
    (last,) = deque(_edit_costs(reference, hypothesis), maxlen=1)
    return int(last[-1])


def _edit_costs(reference: Sequence[str], hypothesis: Sequence[str]) -> Iterator[NDArray[np.int32]]:
    """Row i, column j: edits between the first i and the first j words."""
    ids: dict[str, int] = {}
    reference_ids = [ids.setdefault(word, len(ids)) for word in reference]
    hypothesis_ids = np.array([ids.setdefault(word, len(ids)) for word in hypothesis], np.int64)
    steps = row = np.arange(len(hypothesis_ids) + 1, dtype=np.int32)
    yield row
    for word in reference_ids:
        above, row = row, row + 1
        np.minimum(row[1:], above[:-1] + (hypothesis_ids != word), out=row[1:])
        # Insertions along the row: a running minimum over all earlier columns, with one edit per column.
        row = np.minimum.accumulate(row - steps) + steps
        yield row


@dataclass(frozen=True, slots=True)
class Errors:
    """Counts of the words of a reference that were recognised, replaced and left out, and of inserted words."""

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


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    pairs = align(reference, hypothesis)
    deletions = sum(j is None for _, j in pairs)
    matched = [(i, j) for i, j in pairs if i is not None and j is not None]
    hits = sum(reference[i] == hypothesis[j] for i, j in matched)
    return Errors(hits, len(matched) - hits, deletions, len(pairs) - deletions - len(matched))


def error_rate(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Word error rate over all pairs of reference and hypothesis together; None without reference words."""
    normalise = normaliser()
    errors = words = 0
    for reference, hypothesis in pairs:
        expected = normalise(reference)
        words += len(expected)
        errors += edit_distance(expected, normalise(hypothesis))
    return errors / words if words else None
