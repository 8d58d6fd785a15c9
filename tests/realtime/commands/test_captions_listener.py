"""The text of live audio reaches the file, with its times."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from realtime.client.wire_client import COMPLETED, DELTA
from realtime.commands.caption_view import CaptionView
from realtime.commands.captions import AudioClock, Listener
from realtime.commands.transcripts import TranscriptFile


def word(text: str, start: float, end: float) -> dict[str, Any]:
    return {"word": text, "start": start, "end": end}


async def test_last_word_of_a_turn_that_comes_with_its_completion_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    file = TranscriptFile(path, "txt", words=False)
    with CaptionView(Console(file=io.StringIO())) as captions:
        listener = Listener(captions, AudioClock(), file)
        listener.on_event({"type": DELTA, "delta": "One two.", "words": [word("One", 0.0, 0.5)]})
        listener.on_event({"type": COMPLETED, "words": [word("One", 0.0, 0.5), word("two.", 0.5, 1.0)]})
        listener.on_event({"type": DELTA, "delta": "Three.", "words": [word("Three.", 2.0, 2.5)]})
        listener.on_event({"type": COMPLETED, "words": [word("Three.", 2.0, 2.5)]})
    file.close()
    assert path.read_text().split() == ["One", "two.", "Three."]
