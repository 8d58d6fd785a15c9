"""Scores against cases small enough to be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scoring import (
    Emissions,
    Errors,
    ShownWord,
    TimedWord,
    align,
    bootstrap_interval,
    calibration,
    emission_delays,
    errors_by_minute,
    judged,
    percentile,
    plain_words,
    pooled,
    score,
    spread_times,
    times_to_final,
    utterances,
)
from realtime.bench.words import english_normaliser

some_words = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8)


def distance(reference: list[str], hypothesis: list[str]) -> int:
    """Edit distance by definition."""
    if not reference or not hypothesis:
        return len(reference) + len(hypothesis)
    return min(
        distance(reference[1:], hypothesis[1:]) + (reference[0] != hypothesis[0]),
        distance(reference[1:], hypothesis) + 1,
        distance(reference, hypothesis[1:]) + 1,
    )


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("", "", Errors()),
        ("one two three", "one two three", Errors(hits=3)),
        ("one two three", "", Errors(deletions=3)),
        ("", "one two", Errors(insertions=2)),
        ("one two three", "one too three", Errors(hits=2, substitutions=1)),
        ("one two three", "one three", Errors(hits=2, deletions=1)),
        ("one two three", "one two two three", Errors(hits=3, insertions=1)),
        ("the cat sat on the mat", "cat sat on a mat today", Errors(4, substitutions=1, deletions=1, insertions=1)),
    ],
)
def test_errors_are_counted(reference: str, hypothesis: str, expected: Errors) -> None:
    assert score(reference.split(), hypothesis.split()).errors == expected


def test_rates_are_pooled_over_clips_and_not_averaged() -> None:
    clips = [Errors(hits=9, deletions=1), Errors(substitutions=1)]
    assert pooled(clips).rate == pytest.approx(2 / 11)
    assert Errors(insertions=3).rate is None


@settings(max_examples=60, deadline=None)
@given(reference=some_words.filter(lambda words: len(words) < 6), hypothesis=some_words.filter(lambda w: len(w) < 6))
def test_an_alignment_is_complete_in_order_and_shortest(reference: list[str], hypothesis: list[str]) -> None:
    pairs = align(reference, hypothesis)
    assert [i for i, _ in pairs if i is not None] == list(range(len(reference)))
    assert [j for _, j in pairs if j is not None] == list(range(len(hypothesis)))
    assert score(reference, hypothesis).errors.total == distance(reference, hypothesis)


def test_errors_at_the_edges_of_a_clip_are_kept_apart() -> None:
    clip = score("so we begin here today".split(), "we began here right".split())
    # "so" is lost, "today" became "right"; inside, "begin" became "began".
    assert clip.edges == Errors(deletions=1, substitutions=1)
    assert clip.inside == Errors(hits=2, substitutions=1)


def test_a_clip_of_one_word_is_all_edge() -> None:
    assert score(["yes"], []).edges == Errors(deletions=1)


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


def test_both_sides_are_normalised_as_whisper_does() -> None:
    normalise = english_normaliser({"colour": "color"})
    assert normalise("Um, the COLOUR isn't twenty-five percent!") == ["the", "color", "is", "not", "25%"]
    assert normalise(" ...  ") == []


def test_plain_words_keep_their_number() -> None:
    assert plain_words("Twenty-five, don't -- he's  GONE!") == ["twentyfive", "dont", "hes", "gone"]


def test_errors_fall_into_the_minute_they_were_heard_in() -> None:
    reference = "a b c d e f".split()
    hypothesis = "a x d e z f".split()
    seconds = [10.0, 50.0, 70.0, 80.0, 130.0, 131.0]
    assert errors_by_minute(reference, hypothesis, seconds) == {
        0: Errors(hits=1, substitutions=1, deletions=1),
        1: Errors(hits=2),
        2: Errors(hits=1, insertions=1),
    }


def test_normalised_words_get_times_by_their_place() -> None:
    assert spread_times([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 3.0]
    assert spread_times([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]
    assert spread_times([], 2) == [0.0, 0.0]


def test_a_word_is_shown_when_its_last_letter_is() -> None:
    emissions = Emissions()
    emissions.add(1.0, "Hel", [])
    emissions.add(1.5, "lo the", [TimedWord("Hello", 0.1, 0.5)])
    emissions.add(2.0, "re.", [TimedWord("there.", 0.6, 1.0)])
    emissions.add(2.5, "", [])
    assert emissions.shown() == [ShownWord("Hello", 0.1, 0.5, 1.5), ShownWord("there.", 0.6, 1.0, 2.0)]


def test_repeated_words_are_found_in_order() -> None:
    emissions = Emissions()
    emissions.add(1.0, "no", [TimedWord("no", 0.0, 0.2)])
    emissions.add(3.0, " no", [TimedWord("no", 2.0, 2.2)])
    assert [word.shown_at for word in emissions.shown()] == [1.0, 3.0]


def test_a_word_that_was_never_shown_is_an_error() -> None:
    emissions = Emissions()
    emissions.add(1.0, "yes", [TimedWord("no", 0.0, 0.2)])
    with pytest.raises(ValueError, match="'no'"):
        emissions.shown()


def test_delays_are_those_of_words_heard_right() -> None:
    shown = [
        ShownWord("The", 0.0, 0.2, 1.2),
        ShownWord("bat", 0.3, 0.6, 1.2),
        ShownWord("--", 0.6, 0.6, 1.2),
        ShownWord("sat.", 0.7, 1.0, 2.5),
    ]
    assert emission_delays(plain_words("the cat sat"), shown) == pytest.approx([1.0, 1.5])
    assert emission_delays([], shown) == []


def test_words_are_judged_right_or_wrong_with_their_confidence() -> None:
    said = [("The", 0.9), ("bat", 0.2), ("--", 0.1), ("sat.", 0.8), ("up", 0.3)]
    shown = [ShownWord(text, 0.0, 0.2, 1.0, confidence) for text, confidence in said]
    assert judged(plain_words("the cat sat"), shown) == [(0.9, True), (0.2, False), (0.8, True), (0.3, False)]
    assert judged(["the"], [ShownWord("the", 0.0, 0.2, 1.0)]) == []


def test_calibration_compares_unsure_words_with_sure_ones() -> None:
    words = [(number / 100, number >= 8) for number in range(100)]
    assert calibration(words) == (0.8, 0.0)
    assert calibration(words[::-1]) == (0.8, 0.0)
    assert calibration(words[:10]) is None


def test_utterances_are_parted_by_pauses() -> None:
    probabilities = [0.1, 0.9, 0.9, 0.1, 0.6, 0.1, 0.1, 0.1, 0.8, 0.2]
    assert utterances(probabilities, 0.25, pause_seconds=0.5) == [(0.25, 1.25), (2.0, 2.25)]
    assert utterances([0.1, 0.2], 0.25) == []


def test_time_to_final_is_from_the_end_of_speech_to_the_last_text() -> None:
    spoken = [(1.0, 2.0), (5.0, 6.0), (9.0, 9.5)]
    shown = [
        ShownWord("a", 0.9, 1.4, 1.9),
        ShownWord("b", 1.4, 2.0, 2.4),
        ShownWord("c", 4.8, 5.1, 6.1),
        ShownWord("d", 5.5, 6.0, 6.6),
    ]
    assert times_to_final(spoken, shown) == pytest.approx([0.4, 0.6])


def test_a_word_timed_inside_a_pause_goes_to_the_nearer_utterance() -> None:
    spoken = [(1.0, 2.0), (4.0, 5.0)]
    late, early = ShownWord("a", 2.4, 2.8, 2.9), ShownWord("b", 3.1, 3.3, 5.5)
    assert times_to_final(spoken, [late, early]) == pytest.approx([0.9, 0.5])


def test_without_speech_or_text_there_is_no_time_to_final() -> None:
    assert times_to_final([], [ShownWord("a", 0.0, 0.4, 1.0)]) == []
    assert times_to_final([(5.0, 6.0)], []) == []


def test_percentiles() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([], 95) is None
