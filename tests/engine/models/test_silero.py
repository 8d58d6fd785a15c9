"""The detector is the one that the silero-vad package ships, with its state passed in."""

from __future__ import annotations

import pickle
import shutil
import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.silero import (
    CONTEXT_SAMPLES,
    FRAME_SAMPLES,
    SAMPLE_RATE,
    STATE_SIZE,
    SileroVad,
    SpeechWeightsError,
    load_silero,
)


def voice(seconds: float, pitch_hz: float = 120.0, seed: int = 0) -> Tensor:
    """A buzz through moving resonances, in syllables with pauses, over a little noise: speech to the detector."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * torch.pi * torch.cumsum(pitch_hz * (1 + 0.1 * torch.sin(2 * torch.pi * 0.7 * time)), 0) / SAMPLE_RATE
    sound = torch.zeros_like(time)
    for harmonic in range(1, 30):
        frequency = pitch_hz * harmonic
        gain = torch.zeros_like(time)
        for centre, width, wobble in ((600.0, 120.0, 2.3), (1400.0, 200.0, 3.1), (2600.0, 300.0, 1.7)):
            moving = centre * (1 + 0.25 * torch.sin(2 * torch.pi * wobble * time))
            gain += torch.exp(-(((frequency - moving) / width) ** 2))
        sound += gain * torch.sin(harmonic * phase)
    syllables = (torch.sin(2 * torch.pi * 4 * time) > -0.3).float() * (torch.sin(2 * torch.pi * 0.4 * time) > -0.5)
    return 0.15 * sound * syllables + 0.003 * torch.randn(len(time), generator=generator)


@pytest.fixture(scope="module")
def model() -> SileroVad:
    return load_silero()


def run(model: SileroVad, streams: Tensor) -> Tensor:
    """Streams [b, samples] from the start -> probabilities [b, frames]."""
    count = streams.shape[1] // FRAME_SAMPLES
    behind = torch.nn.functional.pad(streams, (CONTEXT_SAMPLES, 0))
    hidden = cell = torch.zeros(len(streams), STATE_SIZE)
    probabilities = []
    with torch.inference_mode():
        for start in range(0, count * FRAME_SAMPLES, FRAME_SAMPLES):
            gates = model.encode(behind[:, start : start + CONTEXT_SAMPLES + FRAME_SAMPLES])
            hidden, cell = model.step(gates, hidden, cell)
            probabilities.append(model.probability(hidden))
    return torch.stack(probabilities, dim=1)


def run_package(samples: Tensor) -> Tensor:
    package = find_spec("silero_vad")
    assert package is not None and package.origin is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        reference = torch.jit.load(Path(package.origin).parent / "data" / "silero_vad.jit")
    frames = samples[: len(samples) // FRAME_SAMPLES * FRAME_SAMPLES].view(-1, 1, FRAME_SAMPLES)
    with torch.inference_mode():
        return torch.cat([reference(frame, SAMPLE_RATE).view(1) for frame in frames])


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "silero_vad.jit"
    broken.write_bytes(b"this is not an archive")
    with pytest.raises(SpeechWeightsError, match=r"cannot read .* silero_vad\.jit; reinstall silero-vad"):
        load_silero(broken)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpeechWeightsError, match=r"cannot read .* nothing\.jit"):
        load_silero(tmp_path / "nothing.jit")


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    package = find_spec("silero_vad")
    assert package is not None and package.origin is not None
    cut = tmp_path / "cut.jit"
    shutil.copy(Path(package.origin).parent / "data" / "silero_vad.jit", cut)
    with cut.open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(SpeechWeightsError):
        load_silero(cut)


def test_an_archive_that_names_other_classes_is_refused_and_nothing_of_it_is_called(tmp_path: Path) -> None:
    hostile, touched = tmp_path / "silero_vad.jit", tmp_path / "touched"
    with zipfile.ZipFile(hostile, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(touched.touch))
    with pytest.raises(SpeechWeightsError, match=r"cannot read .* silero_vad\.jit"):
        load_silero(hostile)
    assert not touched.exists()


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(SpeechWeightsError, match="these are not the speech detector's weights"):
        SileroVad({"stft.forward_basis_buffer": torch.zeros(258, 1, 256)})


@pytest.mark.parametrize(
    "samples",
    [voice(6.0), 0.05 * torch.randn(3 * SAMPLE_RATE), torch.zeros(SAMPLE_RATE), torch.ones(SAMPLE_RATE)],
    ids=["voice", "noise", "silence", "clipped"],
)
def test_probabilities_are_those_of_the_package(model: SileroVad, samples: Tensor) -> None:
    assert torch.allclose(run(model, samples[None])[0], run_package(samples), atol=1e-4, rtol=0)


def test_voice_is_speech_and_silence_is_not(model: SileroVad) -> None:
    assert run(model, voice(4.0)[None]).max() > 0.9
    assert run(model, torch.zeros(1, 2 * SAMPLE_RATE)).max() < 0.05


def test_streams_side_by_side_are_heard_as_alone(model: SileroVad) -> None:
    streams = torch.stack([voice(3.0), voice(3.0, pitch_hz=210.0, seed=1), torch.zeros(3 * SAMPLE_RATE)])
    together = run(model, streams)
    for row, alone in enumerate(streams):
        assert torch.allclose(together[row], run(model, alone[None])[0], atol=1e-5, rtol=0)
