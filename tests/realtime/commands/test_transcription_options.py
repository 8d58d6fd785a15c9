"""Options of the command line for a model, and the notes about options that the model does not take."""

from __future__ import annotations

import re

import pytest

from engine.options import Options
from engine.spec import ModelSpec
from realtime.cli import build_parser
from realtime.commands.terminal import UsageError
from realtime.commands.transcription_options import TranscriptionOptions, check_caption_options

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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mic", "--publish", "talk"], "--publish needs a server"),
        (["mic", "--server", "http://a", "--publish", "a/b"], "--publish must be a name. A name has 1 to 64"),
        (["listen", "http://radio", "--publish", "talk"], "--publish needs a server"),
    ],
)
def test_words_are_published_at_a_server_and_under_a_name(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        check_caption_options(build_parser().parse_args(arguments))
    check_caption_options(build_parser().parse_args(["mic", "--server", "http://a", "--publish", "talk"]))
