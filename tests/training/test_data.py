from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.tiny import write_corpus
from training.data import CorpusError, Utterance, augment, read_corpora, windows


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path, "noise", files=3, seconds=12)
    return tmp_path


def test_windows_hold_every_utterance_twice() -> None:
    utterances = [Utterance(f"{number}", np.full(8_000, number + 1, np.int16)) for number in range(6)]
    packed = windows(utterances, 4, np.random.default_rng(0))
    assert packed.shape[1] == 64_000
    assert set(np.unique(packed)) <= set(range(7))
    assert all((packed == number + 1).any() for number in range(6))


def test_files_are_either_trained_on_or_kept_back(corpus: Path) -> None:
    speech = read_corpora(corpus, ["noise"], 0.025)
    trained, kept = ({utterance.id for utterance in side} for side in (speech.training, speech.validation))
    assert trained == {"0-a", "0-b", "1-a", "1-b"} and kept == {"2-a", "2-b"}


def test_a_corpus_that_cannot_be_read_is_named(corpus: Path) -> None:
    with pytest.raises(CorpusError, match=r"index\.other\.json"):
        read_corpora(corpus, ["other"], 0.1)
    (corpus / "noise-0.flac").write_bytes(b"no audio")
    with pytest.raises(CorpusError, match=r"noise-0\.flac"):
        read_corpora(corpus, ["noise"], 0.1)


def test_augmented_audio_is_sound_at_a_sensible_level() -> None:
    torch.manual_seed(0)
    recorded = (torch.randn(16, 32_000) * 3000).to(torch.int16)
    for _ in range(4):
        heard = augment(recorded)
        level = 20 * heard.square().mean(dim=1).sqrt().log10()
        assert bool(torch.isfinite(heard).all())
        assert -42 < level.min().item() and level.max().item() < -12
