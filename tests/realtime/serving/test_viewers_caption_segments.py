"""WebVTT segments for HLS players: each word once, in the segment of its time, and segments that never change."""

from __future__ import annotations

import re

from realtime.serving.publishing import Added, Begun, Finished, Line
from realtime.serving.viewers import HOLD_S, LISTED_SEGMENTS, MAX_SEGMENT_WORDS, SEGMENT_S, CaptionSegments

# The beginning of a segment.
NOON = 1_800_000_000.0


def first_word(text: str) -> str:
    return text.split("\n\n", 1)[1].splitlines()[1] if "-->" in text else ""


def test_a_word_is_in_the_segment_of_its_time_and_a_segment_waits_for_late_words() -> None:
    segments = CaptionSegments()
    segments.update(Begun(), NOON)
    segments.update(Added("a", " one", [("one", 1.0, 1.5)]), NOON + 1.5)
    segments.update(Added("a", " two", [("two", 5.9, 6.4)]), NOON + 7.0)
    segments.update(Added("a", " three", [("three", 7.0, 7.5)]), NOON + 8.0)
    number = round(NOON / SEGMENT_S)
    assert segments.segment(number, NOON + SEGMENT_S + HOLD_S - 0.1) is None, "not listed yet"
    first = segments.segment(number, NOON + SEGMENT_S + HOLD_S)
    assert first is not None and first.startswith("WEBVTT\nX-TIMESTAMP-MAP=MPEGTS:")
    assert "00:00:01.000 --> 00:00:06.000\none two\n" in first
    second = segments.segment(number + 1, NOON + 2 * SEGMENT_S + HOLD_S)
    assert second is not None and "00:00:01.000 --> 00:00:01.500\nthree\n" in second
    # The final text differs; what was given out stays, and no word comes twice.
    segments.update(Finished(Line("a", "ONE TWO THREE", 1.0, 7.5, [("ONE", 1.0, 1.5), ("TWO", 5.9, 6.4)])), NOON + 20)
    assert segments.segment(number, NOON + 20) == first
    assert segments.segment(number - 20, NOON + 20) is None


def test_final_words_replace_streamed_ones_in_segments_that_were_not_given_out() -> None:
    segments = CaptionSegments()
    segments.update(Added("a", " wun", [("wun", 1.0, 1.5)]), NOON + 1.5)
    segments.update(Finished(Line("a", "one", 1.0, 1.5, [("one", 1.0, 1.5)])), NOON + 3)
    assert first_word(segments.segment(round(NOON / SEGMENT_S), NOON + 12) or "") == "one"


def test_markup_in_words_is_text() -> None:
    segments = CaptionSegments()
    segments.update(Added("a", "", [("<b>&-->", 1.0, 1.5)]), NOON + 1.5)
    text = segments.segment(round(NOON / SEGMENT_S), NOON + 12) or ""
    assert "&lt;b&gt;&amp;--&gt;" in text and text.count("-->") == 1


def test_words_after_a_pause_of_the_client_are_placed_when_they_come() -> None:
    segments = CaptionSegments()
    segments.update(Added("a", " one", [("one", 1.0, 1.5)]), NOON + 1.5)
    # A minute without audio: the session's clock stood still.
    segments.update(Added("b", " two", [("two", 2.0, 2.5)]), NOON + 62.5)
    number = round(NOON / SEGMENT_S) + 10
    assert first_word(segments.segment(number, NOON + 72) or "") == "two"


def test_a_final_that_comes_late_moves_no_words_and_mixes_no_turns() -> None:
    segments = CaptionSegments()
    segments.update(Added("a", "", [("one", 1.0, 1.4), ("two", 1.5, 1.9)]), NOON + 2)
    segments.update(Added("b", "", [("three", 2.0, 2.4), ("four", 2.5, 2.9)]), NOON + 3)
    final = Line("a", "ONE TWO AND", 1.0, 2.2, [("ONE", 1.0, 1.4), ("TWO", 1.5, 1.9), ("AND", 2.0, 2.2)])
    segments.update(Finished(final), NOON + 16)
    segments.update(Added("c", "", [("five", 3.0, 3.4)]), NOON + 16)
    text = segments.segment(round(NOON / SEGMENT_S), NOON + 24) or ""
    assert [line for line in text.splitlines()[2:] if line and "-->" not in line] == ["ONE TWO AND", "three four"]
    text = segments.segment(round(NOON / SEGMENT_S) + 2, NOON + 24) or ""
    assert first_word(text) == "five"


def test_the_playlist_lists_the_newest_segments_also_without_speech() -> None:
    segments = CaptionSegments()
    text = segments.playlist(NOON + 12, "?token=x")
    assert text.startswith("#EXTM3U\n") and "#EXT-X-TARGETDURATION:6\n" in text
    numbers = [int(number) for number in re.findall(r"captions/(\d+)\.vtt\?token=x\n", text)]
    newest = round(NOON / SEGMENT_S)
    assert numbers == list(range(newest - LISTED_SEGMENTS + 1, newest + 1))
    assert f"#EXT-X-MEDIA-SEQUENCE:{numbers[0]}\n" in text
    assert text.count("#EXT-X-PROGRAM-DATE-TIME:20") == LISTED_SEGMENTS
    assert all(segments.segment(number, NOON + 12) is not None for number in numbers)


def test_words_and_segments_are_bounded() -> None:
    segments = CaptionSegments()
    for second in range(4000):
        segments.update(
            Added(f"t{second}", "", [("w", second + part / 10, second + part / 10) for part in range(10)]),
            NOON + second,
        )
        newest = segments.newest(NOON + second)
        segments.segment(newest, NOON + second)
    assert len(segments._words) <= MAX_SEGMENT_WORDS and len(segments._served) <= 11


def test_captions_go_on_when_the_clock_is_set_back() -> None:
    segments = CaptionSegments()
    segments.update(Added("a", "", [("before", 1.0, 1.5)]), NOON + 1.5)
    number = round(NOON / SEGMENT_S)
    assert first_word(segments.segment(number, NOON + 12) or "") == "before"
    earlier = NOON - 3600
    segments.update(Added("b", "", [("after", 13.0, 13.5)]), earlier + 1.5)
    assert first_word(segments.segment(round(earlier / SEGMENT_S), earlier + 12) or "") == "after"
    # When the clock comes to the same time again, what was said there before is not shown again.
    assert first_word(segments.segment(number, NOON + 12) or "") == ""


def test_words_that_come_faster_than_speech_do_not_delay_later_ones() -> None:
    """A recording of an hour that is sent in a minute, and then live speech."""
    segments = CaptionSegments()
    for turn in range(60):
        words = [(f"recorded{turn}", 60.0 * turn + 1, 60.0 * turn + 59)]
        segments.update(Finished(Line(f"r{turn}", "", words[0][1], words[0][2], words)), NOON + turn)
    segments.update(Added("live", "", [("live", 3600.0, 3601.0)]), NOON + 120)
    assert first_word(segments.segment(round((NOON + 120) / SEGMENT_S) - 1, NOON + 132) or "") == "live"
