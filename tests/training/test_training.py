from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from audio.containers import read_file
from engine.models.moonshine_streaming import StreamingEncoder
from engine.weights.store import pull
from engine.weights.windowed_models import load_streaming_weights
from tests.cached_models import skip_unless_cached
from tests.training.tiny import SPEC, tiny_model, write_corpus
from training.augment import augment
from training.config import BadConfig, TrainingConfig, read_config
from training.corpora import CorpusError, Utterance, read_corpora, windows
from training.distil import Distillation, Lesson, begin, distil
from training.evaluate import Clip, cut_where_quiet, hear_blocks, hear_masked, score, utterance_cut
from training.export import export
from training.whole_pass import exact

SHIPPED = Path(__file__).parents[2] / "training/configs/moonshine-base-streaming.toml"


def tiny_config() -> TrainingConfig:
    config = read_config(SHIPPED)
    return replace(
        config,
        data=replace(config.data, corpora=("noise",), window_seconds=(1, 2), window_shares=(0.5, 0.5)),
        mask=replace(config.mask, blocks=(5, 10), look_ahead=5, left=20),
        optimiser=replace(config.optimiser, steps=8, audio_seconds_per_step=4, warm_up_steps=2, int8_from=0.5),
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path, "noise", files=3, seconds=12)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Distillation, list[str]]:
    """A run of a few steps, and what it reported."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, "noise", files=3, seconds=12)
    config = tiny_config()
    speech = read_corpora(folder, config.data.corpora, config.data.validation_share)
    lines: list[str] = []
    return distil(tiny_model(), speech, config, lines.append), lines


def test_a_few_steps_bring_the_student_nearer(trained: tuple[Distillation, list[str]]) -> None:
    before, after = (
        float(line.split("5 float ")[1].split("/")[1].split(",")[0]) for line in trained[1] if "validation" in line
    )
    assert after < before


def test_what_was_trained_ships_and_streams(trained: tuple[Distillation, list[str]], tmp_path: Path) -> None:
    run, _ = trained
    file = tmp_path / "tiny.safetensors"
    assert len(export(run.student, run.spec, "tiny", file)) == 64
    shipped = tiny_model(seed=3)
    spec = load_streaming_weights(shipped, file)
    assert spec == run.spec
    encoder = StreamingEncoder(shipped.encoder, spec, 10)
    frames, _ = encoder.step(torch.randn(16_000), encoder.start())
    assert frames.shape == (30, 16) and bool(torch.isfinite(frames).all())


def test_the_first_convolution_and_the_decoder_stay(trained: tuple[Distillation, list[str]]) -> None:
    student = trained[0].student.state_dict()
    for name, value in tiny_model().state_dict().items():
        changes = name.startswith(("encoder.", "cross_kv.")) and not name.startswith("encoder.conv1.")
        assert torch.equal(student[name], value) != changes, name


def test_training_goes_on_from_a_file_and_keeps_its_share_of_it(tmp_path: Path) -> None:
    config, file = tiny_config(), tmp_path / "start.safetensors"
    export(tiny_model(seed=4), SPEC, "tiny", file)
    started = tiny_model()
    load_streaming_weights(started, file)
    lesson = Lesson((torch.randn(2, 16_000) * 3000).to(torch.int16), torch.tensor([[1, 5, 7, 2], [1, 4, 2, 2]]))
    run = begin(tiny_model(), lesson, config, file)
    assert run.spec.norm == SPEC.norm
    name = "encoder.layers.0.mlp.fc1.weight"
    before = run.student.state_dict()[name].clone()
    assert torch.equal(before, started.state_dict()[name])
    run.step(1, lesson, 2, 5)
    trained = run.student.state_dict()[name].clone()
    assert not torch.equal(trained, before)
    run.mix(0.5)
    assert torch.allclose(run.student.state_dict()[name], (before + trained) / 2, atol=1e-6)
    run.mix(1.0)
    assert torch.equal(run.student.state_dict()[name], before)


def test_what_a_block_looks_ahead_to_counts_when_asked(trained: tuple[Distillation, list[str]]) -> None:
    run, _ = trained
    torch.manual_seed(1)
    audio, texts = torch.randn(2, 16_000) * 0.1, torch.tensor([[1, 5, 7, 2], [1, 4, 2, 2]])
    plain = run.losses(audio, texts, 5, exact)
    ahead = run.losses(audio, texts, 5, exact, ahead_share=1.0)
    assert ahead[1] > plain[1] and ahead[0] != plain[0]


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


def test_masked_and_block_by_block_evaluation_agree() -> None:
    model = tiny_model()
    rng = np.random.default_rng(0)
    clips = [
        Clip("read", "seven eight", [(rng.standard_normal(length) * 0.1).astype(np.float32)])
        for length in (9_000, 16_000, 12_345)
    ]
    pieces = [f" w{number}".encode() for number in range(40)]
    blocks = hear_blocks(StreamingEncoder(model.encoder, SPEC, 5))
    results = [score(model, pieces, clips, hear, str.split, batch=2) for hear in (blocks, hear_masked(model, SPEC, 5))]
    assert results[0] == results[1]
    assert results[0]["all"].words == 6


def test_clips_are_cut_where_live_streams_are() -> None:
    skip_unless_cached("sample-two-cities")
    spoken = np.concatenate(list(read_file(pull("sample-two-cities"))))[: 4 * 16_000]
    silence = np.zeros(3 * 16_000, np.float32)
    cut = utterance_cut()
    assert cut(silence) == []
    pieces = cut(np.concatenate([spoken, silence, spoken]))
    assert len(pieces) == 2 * len(cut(spoken))
    assert all(len(piece) <= len(spoken) + 16_000 for piece in pieces)
    # A whole clip has no ends of utterances.
    assert [len(piece) for piece in cut_where_quiet(np.concatenate([spoken, silence, spoken]))] == [11 * 16_000]


def test_unknown_and_missing_keys_are_refused(tmp_path: Path) -> None:
    text = SHIPPED.read_text()
    file = tmp_path / "config.toml"
    file.write_text(text.replace("seed = 0", "seeds = 0"))
    with pytest.raises(BadConfig, match="seed"):
        read_config(file)
    file.write_text("colour = 1\n" + text)
    with pytest.raises(BadConfig, match="colour"):
        read_config(file)
    file.write_text(text.replace("[0.6, 0.4]", "[1.0]"))
    with pytest.raises(BadConfig, match="block_shares"):
        read_config(file)
    file.write_text(text.replace("look_ahead = 13", "look_ahead = 14"))
    with pytest.raises(BadConfig, match="look further ahead"):
        read_config(file)
