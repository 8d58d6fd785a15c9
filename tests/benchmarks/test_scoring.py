"""Scores against cases small enough to be worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.scoring import (
    Emissions,
    Word,
    bootstrap_interval,
    calibration,
    differing_words,
    plain_words,
    pooled,
    right_words,
    times_to_final,
)
from realtime.bench.words import Errors


def shown(text: str, start: float, end: float, at: float, confidence: float | None = None) -> Word:
    return Word(text, start, end, confidence, at)


def test_the_interval_holds_the_rate_and_narrows_with_more_clips() -> None:
    few = [Errors(hits=8, substitutions=2), Errors(hits=10), Errors(hits=6, deletions=4), Errors(hits=9, deletions=1)]
    low, high = bootstrap_interval(few) or (1.0, 0.0)
    rate = pooled(few).rate
    assert rate is not None and low < rate < high
    narrow_low, narrow_high = bootstrap_interval(few * 25) or (0.0, 1.0)
    assert narrow_high - narrow_low < (high - low) / 3


def test_equal_clips_have_no_spread_and_no_words_have_no_interval() -> None:
    assert bootstrap_interval([Errors(hits=9, deletions=1)] * 5) == pytest.approx((0.1, 0.1))
    assert bootstrap_interval([Errors(insertions=2)]) is None
    assert bootstrap_interval([]) is None


def test_plain_words_keep_their_number() -> None:
    assert plain_words("Twenty-five, don't -- he's  GONE!") == ["twentyfive", "dont", "hes", "gone"]


def test_a_word_is_shown_when_its_last_letter_is() -> None:
    emissions = Emissions()
    emissions.add(1.0, "Hel", [])
    emissions.add(1.5, "lo the", [Word("Hello", 0.1, 0.5)])
    emissions.add(2.0, "re.", [Word("there.", 0.6, 1.0)])
    emissions.add(2.5, "", [])
    assert emissions.shown() == [shown("Hello", 0.1, 0.5, 1.5), shown("there.", 0.6, 1.0, 2.0)]


def test_repeated_words_are_found_in_order() -> None:
    emissions = Emissions()
    emissions.add(1.0, "no", [Word("no", 0.0, 0.2)])
    emissions.add(3.0, " no", [Word("no", 2.0, 2.2)])
    assert [word.shown_at for word in emissions.shown()] == [1.0, 3.0]


def test_a_word_that_was_never_shown_is_an_error() -> None:
    emissions = Emissions()
    emissions.add(1.0, "yes", [Word("no", 0.0, 0.2)])
    with pytest.raises(ValueError, match="'no'"):
        emissions.shown()


def test_words_are_right_or_wrong_one_by_one() -> None:
    said = [("The", 0.9), ("bat", 0.2), ("--", 0.1), ("sat.", 0.8), ("up", 0.3)]
    words = [shown(text, 0.0, 0.2, 1.0, confidence) for text, confidence in said]
    judged = [(word.confidence, is_right) for word, is_right in right_words(plain_words("the cat sat"), words)]
    assert judged == [(0.9, True), (0.2, False), (0.8, True), (0.3, False)]
    assert [is_right for _, is_right in right_words([], words[:2])] == [False, False]


def test_words_that_differ_are_counted_over_all_texts() -> None:
    assert differing_words(["a b c", "A, x c", "a c", ""], ["a b c", "a b c", "a b c", "a"]) == (3, 8)


def test_calibration_compares_unsure_words_with_sure_ones() -> None:
    words = [(number / 100, number >= 8) for number in range(100)]
    assert calibration(words) == (0.8, 0.0)
    assert calibration(words[::-1]) == (0.8, 0.0)
    assert calibration(words[:10]) is None


def test_time_to_final_is_from_the_end_of_speech_to_the_last_text() -> None:
    spoken = [(1.0, 2.0), (5.0, 6.0), (9.0, 9.5)]
    words = [
        shown("a", 0.9, 1.4, 1.9),
        shown("b", 1.4, 2.0, 2.4),
        shown("c", 4.8, 5.1, 6.1),
        shown("d", 5.5, 6.0, 6.6),
    ]
    assert times_to_final(spoken, words) == pytest.approx([0.4, 0.6])


def test_a_word_timed_inside_a_pause_goes_to_the_nearer_utterance() -> None:
    spoken = [(1.0, 2.0), (4.0, 5.0)]
    late, early = shown("a", 2.4, 2.8, 2.9), shown("b", 3.1, 3.3, 5.5)
    assert times_to_final(spoken, [late, early]) == pytest.approx([0.9, 0.5])


def test_without_speech_or_text_there_is_no_time_to_final() -> None:
    assert times_to_final([], [shown("a", 0.0, 0.4, 1.0)]) == []
    assert times_to_final([(5.0, 6.0)], []) == []
