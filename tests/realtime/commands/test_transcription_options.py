"""Options of the command line for a model, and the notes about options that the model does not take."""

from __future__ import annotations

import pytest

from engine.options import Options
from engine.spec import ModelSpec
from realtime.commands.transcription_options import TranscriptionOptions

MODEL = ModelSpec("m", 16_000, 1280, options=Options(languages=("en",), keywords=500))


def test_what_a_model_does_not_take_is_said_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert TranscriptionOptions(prompt="We talk of mines in the north.").engine_options(MODEL) == {}
    assert "m does not support prompt; continuing without" in capsys.readouterr().err


def test_a_prompt_that_is_a_list_of_words_is_taken_as_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    transcription_options = TranscriptionOptions(prompt="Kittila, Jaroka")
    assert transcription_options.engine_options(MODEL) == {"keywords": "Kittila\t1\nJaroka\t1"}
    known = ("language", "keywords")
    transcription_options.note_unsupported("m", known)
    assert transcription_options.supported(known) == {"prompt": "Kittila, Jaroka"}, "a server reads it itself"
    assert not capsys.readouterr().err
