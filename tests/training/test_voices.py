"""The model of voices is estimated from embeddings of known speakers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.options import EMBEDDING_SIZE
from training.data import SAMPLE_RATE, CorpusError, Utterance
from training.voices import estimate, speaker_of, voices_of, write


def drawn(speakers: int, pieces: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    mean = random.normal(0, 0.02, EMBEDDING_SIZE)
    centres = mean + random.normal(0, 0.05, (speakers, EMBEDDING_SIZE))
    return [centre + random.normal(0, 0.04, (pieces, EMBEDDING_SIZE)) for centre in centres]


def test_the_variances_and_the_mean_are_found_again() -> None:
    model = estimate(drawn(speakers=200, pieces=6))
    assert model.within == pytest.approx(0.04**2, rel=0.02)
    assert model.between == pytest.approx(0.05**2, rel=0.02)
    expected = np.random.default_rng(3).normal(0, 0.02, EMBEDDING_SIZE)
    assert np.abs(model.mean / 1024 - expected).max() < 0.02


def test_speakers_with_few_pieces_are_left_out() -> None:
    few = [np.full((3, EMBEDDING_SIZE), 9.0)] * 50
    assert estimate([*drawn(20, 6), *few]).between < 0.01
    with pytest.raises(CorpusError, match="1 speakers have enough speech"):
        estimate([*drawn(1, 6), *few])


@pytest.mark.parametrize(("utterance", "speaker"), [("103-1240-0000.flac", "103"), ("000260001.WAV", "00026")])
def test_the_speaker_is_in_the_name_of_the_utterance(utterance: str, speaker: str) -> None:
    assert speaker_of(utterance) == speaker


def test_speakers_with_little_speech_are_left_out() -> None:
    five = np.zeros(5 * SAMPLE_RATE, np.int16)
    voices = voices_of([Utterance(name, five) for name in ("7-1-0.flac", "7-1-1.flac", "8-1-0.flac")])
    assert {name: len(recordings) for name, recordings in voices.items()} == {"7": 2}


def test_the_file_is_what_labels_read(tmp_path: Path) -> None:
    model = estimate(drawn(20, 6))
    write(model, tmp_path / "voices.json")
    saved = json.loads((tmp_path / "voices.json").read_text())
    assert saved["mean"] == model.mean.tolist() and saved["within"] == pytest.approx(model.within, abs=1e-6)
