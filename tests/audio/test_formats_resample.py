"""The streaming resampler: same bits for any split, exact length, and clean sound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from audio.errors import AudioError, UnsupportedRate
from audio.formats import MODEL_RATE, Resampler

RATES = [8000, 16000, 22050, 24000, 44100, 48000]
HELD_BACK_SAMPLES = {8000: 240, 16000: 0, 22050: 886, 24000: 878, 44100: 1773, 48000: 1757}


def noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-0.9, 0.9, count).astype(np.float32)


def sine(frequency: float, rate: int, seconds: float) -> NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def resample(resampler: Resampler, samples: NDArray[np.float32], edges: list[int]) -> NDArray[np.float32]:
    parts = [resampler.resample(samples[a:b]) for a, b in pairwise(edges)]
    return np.concatenate([*parts, resampler.flush()])


def whole(rate: int, samples: NDArray[np.float32]) -> NDArray[np.float32]:
    return resample(Resampler(rate), samples, [0, len(samples)])


def decibels(amplitude: float) -> float:
    return 20 * float(np.log10(amplitude + 1e-12))


@pytest.mark.parametrize("rate", [0, -16000, 7999, 192001])
def test_a_rate_out_of_range_is_refused(rate: int) -> None:
    with pytest.raises(UnsupportedRate, match=f"{rate} Hz is not supported; send 8000") as error:
        Resampler(rate)
    assert isinstance(error.value, AudioError)


def test_equal_rates_pass_the_array_itself() -> None:
    resampler = Resampler(MODEL_RATE)
    samples = noise(100)
    assert resampler.resample(samples) is samples
    assert len(resampler.flush()) == 0


@pytest.mark.parametrize("rate", RATES)
def test_flush_without_input_gives_nothing(rate: int) -> None:
    assert len(Resampler(rate).flush()) == 0


@pytest.mark.parametrize("rate", RATES)
def test_one_sample_at_a_time_gives_the_same_bits(rate: int) -> None:
    samples = noise(rate // 4 + 7)
    one_by_one = resample(Resampler(rate), samples, list(range(len(samples) + 1)))
    assert one_by_one.tobytes() == whole(rate, samples).tobytes()


@pytest.mark.parametrize("rate", RATES)
@settings(max_examples=15, deadline=None)
@given(count=st.integers(0, 20_000), cuts=st.lists(st.integers(0, 20_000), max_size=12))
def test_any_split_gives_the_same_bits(rate: int, count: int, cuts: list[int]) -> None:
    samples = noise(count)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    assert resample(Resampler(rate), samples, edges).tobytes() == whole(rate, samples).tobytes()


@settings(max_examples=60, deadline=None)
@given(rate=st.sampled_from([*RATES, 32000, 96000]) | st.integers(8000, 48000), count=st.integers(0, 20_000))
def test_the_length_is_exact(rate: int, count: int) -> None:
    rounded_half_up = (2 * count * MODEL_RATE + rate) // (2 * rate)
    assert len(whole(rate, noise(count))) == rounded_half_up


@pytest.mark.parametrize("rate", RATES)
def test_after_a_flush_a_new_signal_starts(rate: int) -> None:
    resampler = Resampler(rate)
    resample(resampler, noise(5000, seed=1), [0, 5000])
    samples = noise(5000, seed=2)
    assert resample(resampler, samples, [0, 5000]).tobytes() == whole(rate, samples).tobytes()


@pytest.mark.parametrize("rate", RATES)
def test_no_more_is_held_back_than_documented(rate: int) -> None:
    resampler = Resampler(rate)
    samples = noise(rate)
    held_back, out = 0.0, 0
    for taken in range(len(samples)):
        held_back = max(held_back, taken - out * rate / MODEL_RATE)
        out += len(resampler.resample(samples[taken : taken + 1]))
    assert held_back <= HELD_BACK_SAMPLES[rate]


@pytest.mark.parametrize(
    ("rate", "frequency"), [(r, f) for r in RATES for f in (100, 440, 1000, 3500, 7000) if f < 0.9 * r / 2]
)
def test_a_sine_keeps_its_frequency_amplitude_and_place(rate: int, frequency: int) -> None:
    resampled = whole(rate, sine(frequency, rate, 1.0)).astype(np.float64)
    # Away from the ends, where the signal is cut off and the filter rings.
    middle = slice(2000, 14000)
    # A thousandth of the amplitude, or 0.01 dB.
    assert np.abs(resampled - sine(frequency, MODEL_RATE, 1.0))[middle].max() < 5e-4


@pytest.mark.parametrize(
    ("rate", "frequency"), [(r, f) for r in RATES for f in (8200, 9500, 11000, 15000, 20000) if f < r / 2]
)
def test_what_16_khz_cannot_carry_does_not_fold_back(rate: int, frequency: int) -> None:
    resampled = whole(rate, sine(frequency, rate, 1.0))[2000:14000]
    assert decibels(float(np.abs(resampled).max()) / 0.5) < -80


@pytest.mark.parametrize("frequency", [500, 2000, 3500, 3900])
def test_doubling_the_rate_leaves_no_mirror_image(frequency: int) -> None:
    resampled = whole(8000, sine(frequency, 8000, 2.0))[8000:24000]
    spectrum = np.abs(np.fft.rfft(resampled * np.blackman(16000))) / (0.42 * 8000)
    image = spectrum[8000 - frequency - 5 : 8000 - frequency + 5].max()
    assert decibels(float(image) / 0.5) < -80
