"""The events of a call: those of OpenAI's API without audio."""

from __future__ import annotations

import pytest

from realtime.dialects.base import SessionFacts, Update
from realtime.dialects.openai import CALL_FORMAT, CallDialect
from realtime.errors import ClientFault
from realtime.session.events import Answered, Clear, Commit
from realtime.session.settings import INCLUDE_RESUME, INCLUDE_WORDS, Settings


@pytest.fixture
def dialect() -> CallDialect:
    return CallDialect(SessionFacts("sess_1", 1, 16_000, "model", frozenset(), lambda: "event_1", "token", 120))


def test_the_format_is_that_of_calls_whatever_the_client_says(dialect: CallDialect) -> None:
    settings = dialect.start_settings(Settings(include=(INCLUDE_RESUME, INCLUDE_WORDS)))
    assert settings.format == CALL_FORMAT and settings.include == (INCLUDE_WORDS,)
    audio = {"input": {"format": {"type": "audio/pcmu"}}}
    session = {"type": "transcription", "audio": audio, "include": [INCLUDE_RESUME]}
    request = dialect.read({"type": "session.update", "session": session}, settings)
    assert isinstance(request, Update)
    assert request.settings.format == CALL_FORMAT and not request.settings.wants(INCLUDE_RESUME)
    shown = dialect.created(settings)["session"]
    assert shown["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 16_000} and "resume" not in shown


def test_what_a_client_may_send(dialect: CallDialect) -> None:
    assert isinstance(dialect.read({"type": "input_audio_buffer.commit"}, Settings()), Commit)
    assert isinstance(dialect.read({"type": "input_audio_buffer.clear"}, Settings()), Clear)
    for message in (
        {"type": "input_audio_buffer.append", "audio": "AAAA"},
        {"type": "input_audio_buffer.gap", "samples": 5},
    ):
        with pytest.raises(ClientFault, match="Opus"):
            dialect.read(message, Settings())


def test_gaps_and_the_end_are_events(dialect: CallDialect) -> None:
    gap = dialect.gap(20.4, 40.6)
    assert gap == {"type": "call.gap", "event_id": "event_1", "audio_start_ms": 20, "audio_end_ms": 41}
    assert dialect.write(Answered(gap), Settings()) == [gap]
    assert dialect.ended(1012, "restart")["reason"] == "restart"
