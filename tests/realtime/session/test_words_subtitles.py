"""Subtitles break where readers expect it, and are written with the right times."""

from __future__ import annotations

from realtime.session.events import TimedWord
from realtime.session.words import subtitles, to_srt, to_vtt

RATE = 16_000


def test_subtitles_break_at_sentences_and_before_they_grow_too_long() -> None:
    words = [TimedWord("Yes.", 0, RATE)]
    words += [TimedWord("word", RATE * n, RATE * n + RATE // 2) for n in range(2, 40)]
    lines = subtitles(words, RATE)
    assert lines[0].text == "Yes." and all(line.end - line.start <= 6.0 for line in lines)
    assert " ".join(line.text for line in lines) == " ".join(word.text for word in words)
    assert subtitles([], RATE) == [] and to_srt([]) == "" and to_vtt([]) == "WEBVTT\n\n"
    marks = subtitles([TimedWord("R&D", 0, RATE), TimedWord("<i>", RATE, RATE), TimedWord("-->", RATE, RATE)], RATE)
    assert to_vtt(marks) == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nR&amp;D &lt;i&gt; --&gt;\n"
    assert "R&D <i> -->" in to_srt(marks), "SubRip knows no escapes"
    late = subtitles([TimedWord("late", 3_661 * RATE, 3_662 * RATE)], RATE)
    assert to_srt(late) == "1\n01:01:01,000 --> 01:01:02,000\nlate\n"
