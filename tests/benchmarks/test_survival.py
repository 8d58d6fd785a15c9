"""The figures of clients that resume, and the kinds of losses that the command accepts."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks.clients import speaker_summary, summary
from benchmarks.survival import SERVER_LOSSES, kinds_of


def outcome(text: str, **changes: Any) -> dict[str, Any]:
    calm = {"failure": "", "begun": 1, "resumed_s": [], "longest_wait_s": 0.1, "wrong_numbers": 0, "wrong_items": 0}
    return {"text": text, **calm, "samples_lost": 0, **changes}


def test_outcomes_are_summed_up_and_texts_compared_word_by_word() -> None:
    outcomes = [
        outcome("A b.", resumed_s=[0.5, 2.0], wrong_numbers=1),
        outcome("c", resumed_s=[1.0], longest_wait_s=2.5, failure="gone"),
        outcome("e f", begun=2, samples_lost=7),
    ]
    figures = summary(outcomes, ["a b", "d", "e f"])
    assert (figures["sessions"], figures["lost"], figures["connections_lost"]) == (3, 2, 3)
    assert (figures["words"], figures["words_that_differ"], figures["sessions_that_differ"]) == (5, 1, 1)
    assert (figures["reconnected_s_p50"], figures["reconnected_s_max"], figures["longest_wait_s"]) == (1.0, 2.0, 2.5)
    assert (figures["wrong_numbers"], figures["samples_lost"], figures["failures"]) == (1, 7, ["gone"])


def test_speakers_are_compared_where_the_words_are_as_many() -> None:
    calm = [outcome("a b", speakers=["A", "B"]), outcome("c", speakers=["A"]), outcome("d", speakers=[None])]
    other = [outcome("a b", speakers=["A", "C"]), outcome("", speakers=[]), outcome("d", speakers=[None])]
    assert speaker_summary(calm, calm) == {"speakers": 2, "words_with_speaker": 3, "speakers_that_differ": 0}
    assert speaker_summary(other, calm) == {"speakers": 2, "words_with_speaker": 2, "speakers_that_differ": 1}


def test_kinds_are_names_with_numbers_behind() -> None:
    assert kinds_of(["calm", "worker"])("calm:2,worker") == [("calm", 2), ("worker", 1)]
    with pytest.raises(ArgumentTypeError, match="unknown: node; known: calm, engine, worker, restart"):
        kinds_of(list(SERVER_LOSSES))("node:3")
    assert {kind for kind, _ in kinds_of(list(fleet.LOSSES))(fleet.DEFAULT_KINDS)} == set(fleet.LOSSES)
