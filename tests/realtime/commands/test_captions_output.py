"""Text of live audio reaches the terminal and the file: streamed words at once, those of finals in their place."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realtime.client.wire_client import COMPLETED, DELTA, FAILED
from realtime.commands.captions import MAX_OPEN_CHARACTERS, MAX_OPEN_TURNS, AudioClock, CaptionOutput
from realtime.commands.transcripts import CaptionView, TranscriptFile

SPOKEN_S = 0.5


def word(text: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"word": text, "start": start, "end": end, **more}


def words(text: str, start: float = 0.0) -> list[dict[str, Any]]:
    return [word(part, start + SPOKEN_S * at, start + SPOKEN_S * (at + 1)) for at, part in enumerate(text.split())]


def delta(item: str, text: str, start: float = 0.0) -> dict[str, Any]:
    return {"type": DELTA, "item_id": item, "delta": text, "words": words(text, start)}


def completed(item: str, text: str, start: float = 0.0) -> dict[str, Any]:
    return {"type": COMPLETED, "item_id": item, "transcript": text, "words": words(text, start)}


class Shown:
    """Captions without a terminal, and a file beside them."""

    def __init__(self, path: Path, *, speakers: bool = False) -> None:
        self.path = path
        self.screen = io.StringIO()
        self.file = TranscriptFile(path, path.suffix[1:], words=False)
        self.view = CaptionView(Console(file=self.screen, width=2000))
        self.output = CaptionOutput(self.view, AudioClock(), self.file, speakers)

    def lines(self) -> list[str]:
        return [line.split("  ", 1)[-1] for line in self.screen.getvalue().splitlines()]

    def saved(self) -> str:
        return " ".join(self.path.read_text().split())


@contextmanager
def captions(path: Path, **options: bool) -> Iterator[Shown]:
    shown = Shown(path, **options)
    yield shown
    shown.output.end()
    shown.file.close()


async def test_the_words_of_the_final_take_the_place_of_the_streamed_ones(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event(delta("a", "Ensure the period"))
        assert shown.saved() == "Ensure the period" and shown.lines() == []
        shown.output.on_event(completed("a", "In short, the period."))
        assert shown.saved() == "In short, the period." and shown.lines() == ["In short, the period."]


async def test_last_word_of_a_turn_that_comes_with_its_completion_is_saved(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event({"type": DELTA, "item_id": "a", "delta": "One two.", "words": words("One")})
        shown.output.on_event(completed("a", "One two."))
        shown.output.on_event(delta("b", "Three.", 2.0))
        shown.output.on_event(completed("b", "Three.", 2.0))
    assert shown.saved() == "One two. Three." and shown.lines() == ["One two.", "Three."]


async def test_turns_stand_in_their_order_whichever_is_final_first(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event(delta("a", "One too."))
        shown.output.on_event(delta("b", "Three.", 2.0))
        assert shown.saved() == "One too. Three."
        shown.output.on_event(completed("b", "Tree.", 2.0))
        assert shown.lines() == []
        shown.output.on_event(completed("a", "One two."))
        assert shown.lines() == ["One two.", "Tree."] and shown.saved() == "One two. Tree."


async def test_a_turn_that_fails_keeps_what_was_streamed(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event(delta("a", "One"))
        shown.output.on_event({"type": FAILED, "item_id": "a", "error": {"message": "no engine"}})
        shown.output.on_event(delta("b", "two", 2.0))
    assert shown.lines()[:2] == ["One", "a turn failed: no engine"] and shown.saved() == "One two"


async def test_a_session_that_begins_anew_sends_no_finals_of_the_one_before(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event({"type": "session.updated", "session": {"id": "s1"}})
        shown.output.on_event(delta("a", "One"))
        shown.output.on_event({"type": "session.updated", "session": {"id": "s1"}})
        assert shown.lines() == [], "the same session: its finals come"
        shown.output.on_event({"type": "session.updated", "session": {"id": "s2"}})
        assert shown.lines() == ["One"]
        shown.output.on_event(delta("b", "two", 2.0))
        shown.output.on_event(completed("b", "two.", 2.0))
    assert shown.lines() == ["One", "two."] and shown.saved() == "One two."


@pytest.mark.parametrize("final", ["number", "word"])
async def test_a_long_turn_scrolls_and_its_final_repeats_and_loses_no_word(tmp_path: Path, final: str) -> None:
    """What has scrolled away stays as it was streamed; the rest has the words of the final."""
    with captions(tmp_path / "talk.txt") as shown:
        streamed = [f"number{at:03}" for at in range(200)]
        for at, text in enumerate(streamed):
            shown.output.on_event(delta("a", f" {text}", SPOKEN_S * at))
            assert shown.saved() == " ".join(streamed[: at + 1])
        scrolled = sum(len(line.split()) for line in shown.lines())
        assert len(" ".join(streamed[scrolled:])) <= MAX_OPEN_CHARACTERS
        shown.output.on_event(completed("a", " ".join(streamed).replace("number", final)))
    expected = streamed[:scrolled] + [text.replace("number", final) for text in streamed[scrolled:]]
    assert " ".join(shown.lines()).split()[:200] == expected and shown.saved().split() == expected


async def test_without_word_times_the_text_is_shown_and_saved(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event({"type": DELTA, "item_id": "a", "delta": "One too"})
        assert shown.saved() == "One too"
        shown.output.on_event({"type": COMPLETED, "item_id": "a", "transcript": "One two."})
        assert shown.lines() == ["One two."] and shown.saved() == "One two."
        long = " ".join(f"number{at:03}" for at in range(200))
        shown.output.on_event({"type": DELTA, "item_id": "b", "delta": long})
        shown.output.on_event({"type": COMPLETED, "item_id": "b", "transcript": long})
    assert " ".join(shown.lines()) == f"One two. {long}" and shown.saved() == f"One two. {long}"


async def test_turns_without_finals_are_bounded(tmp_path: Path) -> None:
    """A server that opens turns and never completes them takes no memory, and no text is lost."""
    with captions(tmp_path / "talk.txt") as shown:
        for number in range(100):
            shown.output.on_event(delta(f"item{number}", f"word{number}.", 2.0 * number))
        assert len(shown.lines()) == 100 - MAX_OPEN_TURNS
    assert shown.lines() == [f"word{number}." for number in range(100)]
    assert shown.saved() == " ".join(f"word{number}." for number in range(100))


async def test_a_huge_delta_without_times_scrolls_at_once(tmp_path: Path) -> None:
    text = " ".join(f"number{number}" for number in range(50_000))
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_event({"type": DELTA, "item_id": "a", "delta": text})
        shown.output.on_event({"type": COMPLETED, "item_id": "a", "transcript": text})
    assert " ".join(shown.lines()) == text


async def test_lines_name_the_speaker_when_it_changes(tmp_path: Path) -> None:
    def said(text: str, start: float, speaker: str) -> list[dict[str, Any]]:
        return [one | {"speaker": speaker} for one in words(text, start)]

    with captions(tmp_path / "talk.txt", speakers=True) as shown:
        shown.output.on_event(delta("a", "Hello. Hi. How are you?"))
        both = [*said("Hello.", 0.0, "A"), *said("Hi. How are you?", 0.5, "B")]
        shown.output.on_event(
            {"type": COMPLETED, "item_id": "a", "transcript": "Hello. Hi. How are you?", "words": both}
        )
        shown.output.on_event(
            {"type": COMPLETED, "item_id": "b", "transcript": "Well.", "words": said("Well.", 9.0, "B")}
        )
    assert shown.lines() == ["Speaker 1: Hello.", "Speaker 2: Hi. How are you?", "Well."]


async def test_gap_is_marked_between_the_words_before_and_after_it(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.json") as shown:
        shown.output.on_event({"type": DELTA, "item_id": "a", "delta": "One", "words": [word("One", 0.0, 0.5)]})
        # The gap is known before the last word in front of it.
        shown.output.on_gap(1.0, 61.0)
        last = [word("One", 0.0, 0.5), word("two.", 0.5, 1.0)]
        shown.output.on_event({"type": COMPLETED, "item_id": "a", "transcript": "One two.", "words": last})
        shown.output.on_event({"type": DELTA, "item_id": "b", "delta": "Three.", "words": []})
        after = [word("Three.", 61.2, 61.5)]
        shown.output.on_event({"type": COMPLETED, "item_id": "b", "transcript": "Three.", "words": after})
        shown.output.on_gap(62.0, 70.0)
    lines = [json.loads(line) for line in shown.path.read_text().splitlines()]
    assert [line.get("text") for line in lines] == ["One two.", None, "Three.", None]
    assert lines[1] == {"gap": True, "start": 1.0, "end": 61.0} and lines[3]["start"] == 62.0
    marks = [line for line in shown.screen.getvalue().splitlines() if "no sound" in line]
    assert marks == ["00:01.0  [no sound until 01:01.0]", "01:02.0  [no sound until 01:10.0]"]


async def test_gap_within_a_turn_divides_it(tmp_path: Path) -> None:
    with captions(tmp_path / "talk.txt") as shown:
        shown.output.on_gap(1.0, 9.0)
        both = [*words("One two"), *words("three four.", 9.0)]
        shown.output.on_event({"type": COMPLETED, "item_id": "a", "transcript": "One two three four.", "words": both})
    assert shown.lines() == ["One two", "[no sound until 00:09.0]", "three four."]
    assert shown.saved() == "One two [no sound from 00:01.0 to 00:09.0] three four."
