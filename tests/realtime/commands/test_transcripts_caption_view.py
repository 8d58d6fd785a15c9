"""Captions in a terminal: lines end where a reader expects it, and delays are those of words."""

from __future__ import annotations

import io

from rich.console import Console

from realtime.commands.transcripts import MOST_CHARACTERS, CaptionView, ShownWord, clock


def view(show_words: bool = False, terminal: bool = False) -> tuple[CaptionView, io.StringIO]:
    file = io.StringIO()
    return CaptionView(Console(file=file, width=60, force_terminal=terminal), show_words=show_words), file


def test_nothing_said_shows_nothing() -> None:
    shown, file = view()
    with shown:
        shown.heard(5.0)
        shown.end_line()
        shown.add("  ", [], 6.0)
    assert file.getvalue() == "" and shown.typical_delay is None


def test_text_without_a_full_stop_is_broken_somewhere() -> None:
    shown, file = view()
    with shown:
        for _ in range(100):
            shown.add(" word", [], 1.0)
    lines = [line.split("  ", 1)[1] for line in file.getvalue().splitlines()]
    assert len(lines) > 1 and all(len(line) <= MOST_CHARACTERS + 5 for line in lines)
    assert " ".join(lines).split() == ["word"] * 100


def test_line_starts_with_the_time_of_its_first_word_and_ends_with_the_turn() -> None:
    shown, file = view(show_words=True)
    with shown:
        shown.add(" Hello", [ShownWord(" Hello", 61.0, 61.5)], 62.0)
        shown.add(" there", [ShownWord(" there", 61.5, 62.0)], 63.0)
        shown.end_line()
        shown.add(" Next", [ShownWord("Next", 64.0, 64.2)], 64.7)
    lines = file.getvalue().splitlines()
    assert lines[0] == "01:01.0  Hello there" and lines[1] == "Hello 61.00-61.50  there 61.50-62.00"
    assert lines[2] == "01:04.0  Next" and "0.50 s after" in lines[4]


def test_word_is_shown_with_its_text_not_when_its_times_come() -> None:
    shown, _ = view()
    with shown:
        shown.add(" Hello", [], 2.0)
        shown.add(", th", [ShownWord("Hello,", 1.0, 1.5)], 3.0)
        shown.add("ere you", [], 3.5)
        shown.add(".", [ShownWord("there", 1.5, 3.0), ShownWord("you.", 3.0, 3.25)], 9.0)
        shown.end_turn()
        shown.add("Next", [ShownWord("Next", 10.0, 10.5)], 11.5)
    assert list(shown.delays) == [0.5, 0.5, 0.25, 1.0]


def test_terminal_shows_the_line_being_spoken_and_the_delay() -> None:
    shown, file = view(terminal=True)
    with shown:
        shown.add(" Hello", [ShownWord(" Hello", 1.0, 1.5)], 2.25)
        shown.note("reconnecting")
        shown._live.refresh()
        text = file.getvalue()
    assert "Hello" in text and "behind 0.75 s" in text and "reconnecting" in text


def test_notes_in_a_pipe_are_written_once() -> None:
    shown, file = view()
    with shown:
        shown.note("reconnecting")
        shown.note("reconnecting")
        shown.note("")
    assert file.getvalue() == "reconnecting\n"


def test_clock_grows_hours_only_when_needed() -> None:
    assert [clock(-1), clock(59.94), clock(3601.5)] == ["00:00.0", "00:59.9", "1:00:01.5"]
