"""The text of live audio reaches the file, with its times."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from realtime.client.wire_client import COMPLETED, DELTA
from realtime.commands.captions import AudioClock, CaptionOutput
from realtime.commands.transcripts import CaptionView, TranscriptFile


def word(text: str, start: float, end: float) -> dict[str, Any]:
    return {"word": text, "start": start, "end": end}


async def test_last_word_of_a_turn_that_comes_with_its_completion_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    file = TranscriptFile(path, "txt", words=False)
    with CaptionView(Console(file=io.StringIO())) as captions:
        listener = CaptionOutput(captions, AudioClock(), file)
        listener.on_event({"type": DELTA, "delta": "One two.", "words": [word("One", 0.0, 0.5)]})
        listener.on_event({"type": COMPLETED, "words": [word("One", 0.0, 0.5), word("two.", 0.5, 1.0)]})
        listener.on_event({"type": DELTA, "delta": "Three.", "words": [word("Three.", 2.0, 2.5)]})
        listener.on_event({"type": COMPLETED, "words": [word("Three.", 2.0, 2.5)]})
    file.close()
    assert path.read_text().split() == ["One", "two.", "Three."]


async def test_gap_is_marked_between_the_words_before_and_after_it(tmp_path: Path) -> None:
    path, shown = tmp_path / "talk.json", io.StringIO()
    file = TranscriptFile(path, "json", words=False)
    with CaptionView(Console(file=shown, width=200)) as captions:
        listener = CaptionOutput(captions, AudioClock(), file)
        listener.on_event({"type": DELTA, "delta": "One", "words": [word("One", 0.0, 0.5)]})
        # The gap is known before the last word in front of it.
        listener.on_gap(1.0, 61.0)
        listener.on_event({"type": COMPLETED, "words": [word("One", 0.0, 0.5), word("two.", 0.5, 1.0)]})
        listener.on_event({"type": DELTA, "delta": "Three.", "words": []})
        listener.on_event({"type": COMPLETED, "words": [word("Three.", 61.2, 61.5)]})
        listener.on_gap(62.0, 70.0)
        listener.show_gaps()
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("text") for line in lines] == ["One two.", None, "Three.", None]
    assert lines[1] == {"gap": True, "start": 1.0, "end": 61.0} and lines[3]["start"] == 62.0
    marks = [line for line in shown.getvalue().splitlines() if "no sound" in line]
    assert marks == ["00:01.0  [no sound until 01:01.0]", "01:02.0  [no sound until 01:10.0]"]
