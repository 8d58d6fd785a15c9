"""Log-mel and conv stem: equal to the reference, and the same for every way of cutting the audio."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import VoxtralRealtimeFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from engine.models.layers import Heads
from engine.models.mel import MelFrontEnd, slaney_filters
from engine.models.voxtral_realtime import Stack, VoxtralConfig, VoxtralRealtime, tensor_shapes

LOOK_BACK, STEP, LOOK_AHEAD = 680, 1280, 40
BINS = 128
TINY = VoxtralConfig(
    audio=Stack(24, 1, 16, Heads(2, 2, 8, 40), 1e6, 1e-5, biased=True),
    text=Stack(16, 1, 16, Heads(2, 1, 8, 32), 1e6, 1e-5, biased=False),
    mel_bins=BINS,
    rows_per_position=4,
    vocabulary=64,
    default_delay=6,
)


def loud_and_quiet(samples: int, seed: int) -> torch.Tensor:
    """Tones beside near-silence: the hard case, since leakage of the tone must not lift the floor."""
    random = np.random.default_rng(seed)
    time = np.arange(samples) / 16_000
    tone = 0.8 * np.sin(2 * np.pi * random.uniform(100, 7000) * time) * (np.sin(2 * np.pi * 1.5 * time) > 0)
    return torch.from_numpy((tone + 1e-4 * random.standard_normal(samples)).astype(np.float32))


@pytest.fixture(scope="module")
def model() -> VoxtralRealtime:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * (math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1)
        for name, shape in tensor_shapes(TINY).items()
    }
    return VoxtralRealtime(TINY, tensors)


def test_filters_equal_the_reference() -> None:
    reference = mel_filter_bank(201, BINS, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    assert np.abs(slaney_filters(BINS).numpy() - reference).max() < 1e-12


def test_offline_features_equal_the_reference() -> None:
    audio = 0.05 * torch.randn(16_000, generator=torch.Generator().manual_seed(2))
    reference = VoxtralRealtimeFeatureExtractor()([audio.numpy()], sampling_rate=16_000, return_tensors="pt")
    ours = MelFrontEnd(BINS).offline(audio[None])
    assert ours.shape == (1, 100, BINS)
    assert (ours[0].T - reference.input_features[0]).abs().max() < 1e-5


def test_bins_beside_a_loud_tone_are_exact() -> None:
    """There the reference's own float32 transform is off by more than 1e-5; compare with float64."""
    audio = loud_and_quiet(16_000, seed=1)
    window = torch.hann_window(400, dtype=torch.float64)
    spectrum = torch.stft(audio.double(), 400, 160, window=window, return_complex=True, center=True)[:, :-1]
    mel = (slaney_filters(BINS).T @ spectrum.abs().square()).clamp(min=1e-10).log10().clamp(min=1.5 - 8.0)
    assert (MelFrontEnd(BINS).offline(audio[None])[0].T - (mel + 4.0) / 4.0).abs().max() < 1e-5


def test_silence_is_at_the_floor() -> None:
    features = MelFrontEnd(BINS).frames(torch.zeros(1, 2000))
    assert torch.all(features == (1.5 - 8.0 + 4.0) / 4.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_cutting_gives_the_offline_rows(model: VoxtralRealtime, lengths: list[int], seed: int) -> None:
    """Items of any lengths, encoded alone from their own samples, give what the whole recording gives."""
    positions = sum(lengths)
    lead = 2  # positions of silence before, as every stream has, so that the zero padding of the convs is behind us
    audio = torch.cat([torch.zeros(lead * STEP), loud_and_quiet(positions * STEP, seed), torch.zeros(400)])
    offline = model.stem.offline(model.mel.offline(audio[None, : (lead + positions) * STEP + 400]))[0]
    at = lead
    for length in lengths:
        samples = audio[at * STEP - LOOK_BACK : (at + length) * STEP + LOOK_AHEAD]
        whole = model.stem.item(model.mel.frames(samples[None]))[0]
        windows = samples.unfold(0, LOOK_BACK + STEP + LOOK_AHEAD, STEP)
        one_by_one = model.stem_rows(windows).view(-1, TINY.audio.width)
        wanted = offline[4 * at : 4 * (at + length)]
        assert (whole - wanted).abs().max() < 1e-5
        assert (one_by_one - wanted).abs().max() < 1e-5
        at += length


def test_stem_equals_the_reference_embedder(model: VoxtralRealtime) -> None:
    mel = torch.randn(2, 32, BINS, generator=torch.Generator().manual_seed(3))
    stem = model.stem
    first = stem._first.view(24, 3, BINS).transpose(1, 2)
    second = stem._second.view(24, 3, 24).transpose(1, 2)
    hidden = torch.nn.functional.pad(mel.transpose(1, 2), (2, 0))
    hidden = torch.nn.functional.gelu(torch.nn.functional.conv1d(hidden, first, stem._first_bias))
    hidden = torch.nn.functional.pad(hidden, (1, 0))
    hidden = torch.nn.functional.gelu(torch.nn.functional.conv1d(hidden, second, stem._second_bias, stride=2))
    assert (stem.offline(mel) - hidden.transpose(1, 2)).abs().max() < 1e-5
