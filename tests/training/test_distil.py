from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.models.moonshine_streaming import StreamingEncoder
from engine.weights.checkpoint import load_streaming_weights
from tests.training.tiny import SPEC, tiny_model, write_corpus
from training.data import read_corpora
from training.distil import BadConfig, Distillation, Lesson, TrainingConfig, begin, distil, export, read_config
from training.model import exact

SHIPPED = Path(__file__).parents[2] / "training/configs/moonshine-base-streaming.toml"


def tiny_config() -> TrainingConfig:
    config = read_config(SHIPPED)
    return replace(
        config,
        data=replace(config.data, corpora=("noise",), window_seconds=(1, 2), window_shares=(0.5, 0.5)),
        mask=replace(config.mask, blocks=(5, 10), look_ahead=5, left=20),
        optimiser=replace(config.optimiser, steps=8, audio_seconds_per_step=4, warm_up_steps=2, int8_from=0.5),
    )


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
