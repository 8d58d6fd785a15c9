"""The words of a pulled stream are compared with those of a calm session: in marked gaps nothing counts, else all."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measuring import RunFailed
from benchmarks.pulled_streams import Difference, ServerStream, compare, overlap, told
from benchmarks.scoring import Word
from realtime.client.wire_client import DELTA

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
    assert found.differences == [Difference(pytest.approx(93.0), "", "nonsense")]
    assert found.shifts == [pytest.approx(0.0), pytest.approx(-3.0)]


def test_stream_without_a_known_word_has_no_result() -> None:
    with pytest.raises(RunFailed, match="no word"):
        compare(SPOKEN, [Word("other", 0.0, 1.0)])


def test_gap_belongs_to_the_interruption_that_it_overlaps() -> None:
    assert overlap((98.0, 111.0), (100.0, 110.0))
    assert not overlap((50.0, 60.0), (100.0, 110.0))


def delta(item: str, text: str, *times: float) -> dict[str, Any]:
    """A delta with words of half a second that begin at these times."""
    words = [{"word": word, "start": at, "end": at + 0.5} for word, at in zip(text.split(), times, strict=False)]
    return {"type": DELTA, "item_id": item, "delta": text, "words": words}


def test_streamed_words_have_times_and_the_last_of_a_turn_that_of_the_one_before() -> None:
    found = told([delta("1", " It was", 1.0), delta("1", " so.", 1.5), delta("2", " Was it?", 4.0, 4.5)])
    assert [(word.text, word.start) for word in found] == [
        ("It", 1.0),
        ("was", 1.5),
        ("so.", 1.5),
        ("Was", 4.0),
        ("it?", 4.5),
    ]


def test_session_after_a_restart_tells_again_what_came_after_its_beginning() -> None:
    stream = ServerStream.__new__(ServerStream)
    stream._events = [
        {"type": "stream.session", "stream_seconds": 0.0},
        delta("1", "one two three", 1.0, 2.0, 3.0),
        {"type": "stream.gap", "audio_start_ms": 4000, "audio_end_ms": 5000},
        {"type": "stream.session", "stream_seconds": 2.9},
        {"type": "stream.gap", "audio_start_ms": 0, "audio_end_ms": 10_000},
        delta("2", "four", 10.5),
    ]
    words, gaps = stream.heard()
    assert [(word.text, word.start) for word in words] == [("one", 1.0), ("two", 2.0), ("four", pytest.approx(13.4))]
    assert gaps == [(4.0, 5.0), (2.9, pytest.approx(12.9))]
