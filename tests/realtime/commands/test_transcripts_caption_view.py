"""Captions in a terminal: lines end where a reader expects it, and delays are those of words."""

from __future__ import annotations

import io
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from realtime.commands.transcripts import MAX_CHARACTERS, CaptionView, ShownWord, caption_lines, clock, split_at_word


def view(show_words: bool = False, terminal: bool = False) -> tuple[CaptionView, io.StringIO]:
    file = io.StringIO()
    return CaptionView(Console(file=file, width=60, force_terminal=terminal), show_words=show_words), file


def words_of(text: str) -> list[ShownWord]:
    return [ShownWord(word, float(at), at + 0.5) for at, word in enumerate(text.split())]


def test_nothing_said_shows_nothing() -> None:
    shown, file = view()
    with shown:
        shown.advance(5.0)
        shown.add_line("  ", [])
        shown.show_open("still open")
    assert file.getvalue() == "" and shown.typical_delay is None


def test_text_without_a_full_stop_is_broken_somewhere() -> None:
    lines = [line for line, _ in caption_lines(" word" * 100, [])]
    assert len(lines) > 1 and all(len(line) <= MAX_CHARACTERS + 5 for line in lines)
    assert " ".join(lines).split() == ["word"] * 100


@given(st.lists(st.text(st.sampled_from("ab.é"), min_size=1, max_size=90), max_size=60), st.integers(0, 60))
def test_lines_and_parts_have_every_word_once(tokens: list[str], count: int) -> None:
    text = " ".join(tokens)
    words = words_of(text)
    lines = caption_lines(text, words)
    assert " ".join(line for line, _ in lines) == text
    assert [word for _, line_words in lines for word in line_words] == words
    assert all(line.split() == [word.text for word in line_words] for line, line_words in lines)
    head, tail = split_at_word(text, words, count)
    assert head.split() == tokens[:count] and tail.split() == tokens[count:]


def test_a_line_of_words_that_are_written_in_another_way_has_all_of_them() -> None:
    """Formatted finals: the text has other words than the list."""
    words = words_of("twenty five dollars were enough")
    assert caption_lines("$25 were enough", words) == [("$25 were enough", words)]


def test_line_starts_with_the_time_of_its_first_word() -> None:
    shown, file = view(show_words=True)
    with shown:
        shown.add_line("Hello there", [ShownWord("Hello", 61.0, 61.5), ShownWord("there", 61.5, 62.0)])
        shown.add_line(" Next", [ShownWord("Next", 64.0, 64.2)])
    lines = file.getvalue().splitlines()
    assert lines[0] == "01:01.0  Hello there" and lines[1] == "Hello 61.00-61.50  there 61.50-62.00"
    assert lines[2] == "01:04.0  Next"


def test_word_is_shown_with_its_text_not_when_its_times_come() -> None:
    shown, _ = view()
    first, second = deque[float](), deque[float]()
    shown.measure_delays(first, " Hello", [], 2.0)
    shown.measure_delays(first, ", th", [ShownWord("Hello,", 1.0, 1.5)], 3.0)
    shown.measure_delays(first, "ere you", [], 3.5)
    # The next turn begins before the last words of this one have their times.
    shown.measure_delays(second, "Next", [ShownWord("Next", 10.0, 10.5)], 11.5)
    shown.measure_delays(first, ".", [ShownWord("there", 1.5, 3.0), ShownWord("you.", 3.0, 3.25)], 12.0)
    assert list(shown.delays) == [0.5, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_shows_the_open_text_and_the_delay(terminal: bool) -> None:
    shown, file = view(terminal=terminal)
    with shown:
        shown.measure_delays(deque(), " Hello", [ShownWord(" Hello", 1.0, 1.5)], 2.25)
        shown.show_open(" Hello \x1b[31m")
        shown.note("reconnecting")
        shown._live.refresh()
        text = file.getvalue()
    assert ("Hello" in text and "behind 0.75 s" in text) == terminal and "reconnecting" in text
    assert "\x1b[31m" not in text


def test_notes_in_a_pipe_are_written_once() -> None:
    shown, file = view()
    with shown:
        shown.note("reconnecting")
        shown.note("reconnecting")
        shown.note("")
    assert file.getvalue() == "reconnecting\n"


def test_clock_grows_hours_only_when_needed() -> None:
    assert [clock(-1), clock(59.94), clock(3601.5)] == ["00:00.0", "00:59.9", "1:00:01.5"]
