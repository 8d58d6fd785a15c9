"""Word errors: Whisper's English normaliser on both sides, then the shortest edit path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

Normaliser = Callable[[str], list[str]]


def english_normaliser(spelling: dict[str, str]) -> Normaliser:
    """Whisper's English text normaliser; `spelling` is its table of British to American spellings."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normalise = EnglishTextNormalizer(spelling)  # type: ignore[no-untyped-call]
    # It leaves a dot of an ellipsis behind, which is no word.
    return lambda text: [word for word in normalise(text).split() if any(map(str.isalnum, word))]


@cache
def normaliser() -> Normaliser:
    """Numbers, contractions and punctuation are made alike; without a table of British spellings."""
    return english_normaliser({})


def word_errors(reference: Sequence[str], heard: Sequence[str]) -> int:
    """Fewest substitutions, deletions and insertions that turn one into the other."""
    costs = list(range(len(heard) + 1))
    for row, expected in enumerate(reference, 1):
        diagonal, costs[0] = costs[0], row
        for column, word in enumerate(heard, 1):
            best = min(diagonal + (expected != word), costs[column] + 1, costs[column - 1] + 1)
            diagonal, costs[column] = costs[column], best
    return costs[-1]


def error_rate(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Pooled over all (reference, heard): errors of all over words of all; None without reference words."""
    normalise = normaliser()
    errors = words = 0
    for reference, heard in pairs:
        expected = normalise(reference)
        words += len(expected)
        errors += word_errors(expected, normalise(heard))
    return errors / words if words else None
