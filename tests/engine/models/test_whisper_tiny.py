"""A real multilingual checkpoint and real voices: languages are detected, used when set, and translated."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from audio.containers import read_file
from engine.models.seq2seq import Encoded
from engine.models.whisper import Whisper
from engine.options import cache_folder
from engine.runner.windowed.decoder import GreedyDecoder, Row, judge
from engine.runner.windowed.runner import PromptTokenizer
from engine.runner.windowed.stability import is_mark
from engine.weights.checkpoint import load_speech_model

NAME = "whisper-tiny"
VOICES = {
    "de": "Guten Morgen meine Damen und Herren. Heute sprechen wir über das Wetter in Deutschland.",
    "es": "Buenos días señoras y señores. Hoy hablamos del tiempo en España y de la economía del país.",
    "fr": "Bonjour mesdames et messieurs. Aujourd'hui nous parlons de la météo en France.",
    "en": "Good morning ladies and gentlemen. Today we talk about the weather in England.",
}

pytestmark = pytest.mark.skipif(not (cache_folder() / NAME).exists(), reason=f"run `tickertape pull {NAME}` first")


@cache
def whisper() -> tuple[Whisper, list[bytes]]:
    model, pieces = load_speech_model(cache_folder() / NAME)
    assert isinstance(model, Whisper)
    model.set_live_padding(full_padding=False)
    return model, pieces


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoded]:
    """What the model hears of each voice."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    model, _ = whisper()
    sounds = {}
    for language, text in VOICES.items():
        file = tmp_path_factory.mktemp("voices") / f"{language}.wav"
        subprocess.run(["espeak-ng", "-v", language, "-s", "140", "-w", str(file), text], check=True)
        audio = torch.from_numpy(np.concatenate(list(read_file(file))))[None]
        with torch.inference_mode():
            sounds[language] = model.encode(audio, [audio.shape[1]])
    return sounds


def said(encoded: Encoded, language: str, task: str = "") -> str:
    model, pieces = whisper()
    row = Row([], [], 12, None, encoded.audio[0], start_tokens=model.prompt_tokens(language, task, []))
    with torch.inference_mode():
        GreedyDecoder(model).run([row], encoded)
    return b"".join(pieces[token] for token in row.tokens).decode(errors="replace")


def test_prompts_have_the_tokens_of_the_published_tokenizer() -> None:
    _, pieces = whisper()
    published = Tokenizer.from_file(str(cache_folder() / NAME / "tokenizer.json"))
    for text in ("Tickertape, Moonshine.", "Übergrößen in Łódź; it's 1234 o'clock", "天気は  良い\n今日"):
        assert PromptTokenizer(pieces).tokens(text) == published.encode(f" {text}", add_special_tokens=False).ids


def test_languages_are_told_apart(heard: dict[str, Encoded]) -> None:
    model, _ = whisper()
    found = {}
    for language, encoded in heard.items():
        with torch.inference_mode():
            (judgement,) = judge(model, encoded)
        found[language] = model.options.languages[int(np.argmax(judgement.languages))]
        assert judgement.no_speech < 0.6
    assert found == {language: language for language in VOICES}


def test_a_language_is_obeyed_and_a_translation_is_english(heard: dict[str, Encoded]) -> None:
    assert "meine Damen und Herren" in said(heard["de"], "de")
    assert "meine Damen und Herren" not in said(heard["de"], "en")
    assert "Buenos días" in said(heard["es"], "es")
    assert said(heard["es"], "es", "translate").strip().startswith("Good")


def test_words_are_found_where_they_are_said(heard: dict[str, Encoded]) -> None:
    """The first frame, before any speech, draws the most attention."""
    model, pieces = whisper()
    for language, encoded in heard.items():
        row = Row([], [], 40, None, encoded.audio[0], start_tokens=model.prompt_tokens(language, "", []))
        with torch.inference_mode():
            GreedyDecoder(model).run([row], encoded)
        words = [peak for token, peak in zip(row.tokens, row.peaks, strict=True) if not is_mark(pieces[token])]
        assert min(words) > 0, language


def test_nobody_speaks_in_silence() -> None:
    model, _ = whisper()
    with torch.inference_mode():
        (silence,) = judge(model, model.encode(torch.zeros(1, 32_000), [32_000]))
        assert silence.no_speech > 0.6
