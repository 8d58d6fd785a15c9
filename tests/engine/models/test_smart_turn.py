"""The turn detector: its file is read completely, features are those it was trained with, batches change nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.models.smart_turn import WINDOW_SAMPLES, SmartTurn
from engine.options import cache_folder
from engine.weights.checkpoint import BadCheckpoint, load_smart_turn
from engine.weights.registry import TURN_DETECTOR, TURN_DETECTOR_FILE

FILE = cache_folder() / TURN_DETECTOR / TURN_DETECTOR_FILE
RECORDING = cache_folder() / "sample-two-cities" / "two_cities.wav"

needs_weights = pytest.mark.skipif(not FILE.exists(), reason="run `tickertape pull turn-detector` first")
needs_speech = pytest.mark.skipif(not RECORDING.exists(), reason="run `tickertape pull sample-two-cities` first")

Sound = NDArray[np.float32]


@cache
def published(quantised: bool = False) -> SmartTurn:
    model = load_smart_turn(FILE)
    if quantised:
        model.quantise()
    return model


@pytest.fixture(scope="module")
def random_weights() -> SmartTurn:
    torch.manual_seed(0)
    model = SmartTurn()
    with torch.no_grad():
        model.encoder.positional_embedding.normal_(std=0.1)
    return model.eval()


def noise(seconds: float, seed: int = 0) -> Sound:
    return np.random.default_rng(seed).standard_normal(round(seconds * 16_000)).astype(np.float32) * 0.1


def reference_features(window: Sound) -> Sound:
    """Whisper's features with normalised samples, written out in float64 after the published description."""
    level = (window - window.mean()) / np.sqrt(window.var() + 1e-7)
    padded = np.pad(level.astype(np.float64), 200, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([padded[start : start + 400] * hann for start in range(0, len(window) + 1, 160)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    from engine.models.mel import slaney_filters

    log_mel = np.log10(np.maximum(power @ slaney_filters(80).numpy(), 1e-10)).T[:, :-1]
    found: Sound = ((np.maximum(log_mel, log_mel.max() - 8) + 4) / 4).astype(np.float32)
    return found


def test_features_are_those_of_the_training(random_weights: SmartTurn) -> None:
    window = np.concatenate((np.zeros(WINDOW_SAMPLES - 40_000, np.float32), noise(2.5)))
    with torch.inference_mode():
        found = random_weights.log_mel(torch.from_numpy(window)[None])[0].numpy()
    assert found.shape == (80, WINDOW_SAMPLES // 160)
    np.testing.assert_allclose(found, reference_features(window), atol=1e-3)


def test_a_batch_equals_each_alone(random_weights: SmartTurn) -> None:
    sounds = [noise(4, 1), noise(2.5, 2), noise(0.3, 3), np.zeros(8000, np.float32)]
    together = random_weights.judge(sounds)
    assert together == [random_weights.judge([sound])[0] for sound in sounds]
    assert all(0 < probability < 1 for probability in together)
    # One pass over all rows, as on a GPU.
    windows = np.stack([np.pad(sound, (WINDOW_SAMPLES - len(sound), 0)) for sound in sounds])
    with torch.inference_mode():
        at_once = random_weights(torch.from_numpy(windows)).tolist()
    np.testing.assert_allclose(at_once, together, atol=1e-4)


def test_only_the_last_seconds_count(random_weights: SmartTurn) -> None:
    sound = noise(11)
    assert random_weights.judge([sound]) == random_weights.judge([sound[-WINDOW_SAMPLES:]])


def test_nothing_to_judge(random_weights: SmartTurn) -> None:
    assert random_weights.judge([]) == []


def test_a_file_that_holds_no_detector_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / TURN_DETECTOR_FILE
    broken.write_bytes(b"this is not an archive")
    with pytest.raises(BadCheckpoint, match=r"turn-detector.safetensors is not a turn detector .* pull turn-detector"):
        load_smart_turn(broken)
    save_file({"encoder.conv1.weight": torch.zeros(384, 80, 3)}, broken)
    with pytest.raises(BadCheckpoint, match="is not a turn detector"):
        load_smart_turn(broken)
    with pytest.raises(BadCheckpoint, match="is not a turn detector"):
        load_smart_turn(tmp_path / "nowhere")


@needs_weights
def test_a_window_stands_at_the_end_of_those_of_the_training() -> None:
    """The published file has places for 8 seconds."""
    places = load_file(FILE)["encoder.embed_positions.weight"]
    assert len(places) == 400
    kept = published().encoder.positional_embedding
    torch.testing.assert_close(kept.detach(), places[-len(kept) :].float())
    assert len(kept) == WINDOW_SAMPLES // 320


@needs_weights
def test_a_file_with_too_few_places_is_refused(tmp_path: Path) -> None:
    tensors = load_file(FILE)
    tensors["encoder.embed_positions.weight"] = tensors["encoder.embed_positions.weight"][:50].clone()
    save_file(tensors, tmp_path / TURN_DETECTOR_FILE)
    with pytest.raises(BadCheckpoint, match="is not a turn detector"):
        load_smart_turn(tmp_path / TURN_DETECTOR_FILE)


@needs_weights
@needs_speech
def test_a_finished_sentence_is_more_complete_than_one_cut_off() -> None:
    from audio.containers import read_file

    speech = np.concatenate(list(read_file(RECORDING)))
    # Cut at many places, nearly all of which are inside words; the end of the recording is the end of a sentence.
    inside = [speech[: round(seconds * 16_000)] for seconds in (3.1, 7.3, 12.7, 19.9)]
    answers = published().judge([*inside, speech])
    assert answers[-1] > 0.5 > float(np.median(answers[:-1]))


@needs_weights
def test_8_bits_change_little() -> None:
    for seed in range(3):
        sound = noise(4, seed)
        (exact,), (rounded,) = published().judge([sound]), published(quantised=True).judge([sound])
        assert abs(exact - rounded) < 0.05
