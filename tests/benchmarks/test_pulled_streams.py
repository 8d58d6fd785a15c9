"""Comparing the words of a pulled stream with those of a calm session: what is in a gap does not count, all else does."""

from __future__ import annotations

import pytest

from benchmarks.measuring import RunFailed
from benchmarks.pulled_streams import Difference, compare, overlap
from benchmarks.scoring import Word

# A word a second, none twice.
SPOKEN = [Word(f"word{number}", number + 0.2, number + 0.8) for number in range(100)]


def stream(first: int, *lost: range) -> list[Word]:
    """Joined `first` seconds late, without the words of these seconds."""
    return [
        Word(word.text.title() + ",", word.start - first, word.end - first)
        for number, word in enumerate(SPOKEN)
        if number >= first and not any(number in part for part in lost)
    ]


def test_same_words_do_not_differ_wherever_the_stream_was_joined() -> None:
    found = compare(SPOKEN, stream(7))
    assert not found.differences and found.shifts == [pytest.approx(7.0)]
    # The words before the stream was joined, and the two seconds at either end.
    assert (found.words, found.left_out) == (89, 11)


def test_words_in_a_marked_gap_do_not_count_and_others_that_are_missing_do() -> None:
    heard = stream(5, range(30, 40), range(70, 72))
    found = compare(SPOKEN, heard, gaps=[(25.0, 35.0)])
    assert [(difference.expected, difference.heard) for difference in found.differences] == [
        ("word70", ""),
        ("word71", ""),
    ]
    assert [round(difference.moment, 1) for difference in found.differences] == [65.5, 66.5]
    assert found.shifts == [pytest.approx(5.0)] * 2


def test_gap_that_is_not_marked_counts_as_so_many_words() -> None:
    assert len(compare(SPOKEN, stream(0, range(30, 40))).differences) == 10


def test_words_that_were_not_spoken_count_and_a_moved_clock_is_seen() -> None:
    heard = stream(0, range(40, 50))
    late = [Word(word.text, word.start + 3, word.end + 3) if word.start > 50 else word for word in heard]
    late.insert(80, Word("nonsense", late[79].end, late[80].start))
    found = compare(SPOKEN, late, gaps=[(40.0, 53.0)])
    assert found.differences == [Difference(pytest.approx(92.5), "", "nonsense")]
    assert found.shifts == [pytest.approx(0.0), pytest.approx(-3.0)]


def test_stream_without_a_known_word_has_no_result() -> None:
    with pytest.raises(RunFailed, match="no word"):
        compare(SPOKEN, [Word("other", 0.0, 1.0)])


def test_gap_belongs_to_the_interruption_that_it_overlaps() -> None:
    assert overlap((98.0, 111.0), (100.0, 110.0))
    assert not overlap((50.0, 60.0), (100.0, 110.0))
