"""The answer to a file in Deepgram's shape."""

from __future__ import annotations

import json

import pytest

from realtime.dialects.deepgram import read_file_query
from realtime.http.file_transcription import Transcript
from realtime.http.listen_route import write_listen_answer
from realtime.session.events import TimedWord


@pytest.mark.parametrize(
    ("query", "shown"), [({}, "de"), ({"language": "multi"}, "de"), ({"language": "de"}, None)], ids=str
)
def test_a_language_that_was_found_out_is_told(query: dict[str, str], shown: str | None) -> None:
    transcript = Transcript(16_000, "de", "Guten Tag.", samples=16_000)
    transcript.add_words([TimedWord("Guten", 0, 8000, language="de")])
    answer = json.loads(b"".join(write_listen_answer(transcript, read_file_query(query), "whisper-tiny", "id", "0")))
    assert answer["results"]["channels"][0].get("detected_language") == shown
