"""Sound in which a speech detector hears somebody speak: a recording, or a voice made of buzz and moving resonances."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
VOICES = ((95.0, 12.0), (130.0, 12.0), (190.0, 12.0))
# The probability from which on a frame is speech, and the pause that ends a turn, as the server has them by default.
SPEECH = 0.5
TURN_PAUSE_S = 0.5


def speech(recording: Path | None = None) -> NDArray[np.float32]:
    """Half a minute and more at 16 kHz: the recording (a WAV file of 16 bits) or three voices one after the other."""
    if recording is not None:
        return read_wav(recording)
    return np.concatenate([voice(seconds, pitch, seed) for seed, (pitch, seconds) in enumerate(VOICES)])


def spans(probabilities: list[float], frame_s: float, seconds: float) -> list[tuple[float, float]]:
    """Where somebody speaks, in seconds, by a detector's frames; pauses too short to end a turn are speech."""
    found: list[tuple[float, float]] = []
    for number, probability in enumerate(probabilities):
        if probability < SPEECH:
            continue
        start, end = number * frame_s, min(seconds, (number + 1) * frame_s)
        if found and start - found[-1][1] < TURN_PAUSE_S:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def read_wav(path: Path) -> NDArray[np.float32]:
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path.name} has {8 * file.getsampwidth()} bits a sample; 16 are needed")
        channels, rate = file.getnchannels(), file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, channels)[:, 0]
    return resampled((samples / np.float32(32768)).astype(np.float32), rate, SAMPLE_RATE)


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """By straight lines between samples: a load test needs the right number of samples, not their finest shape."""
    if rate == wanted:
        return samples
    moments = np.arange(len(samples) * wanted // rate) * (rate / wanted)
    return np.interp(moments, np.arange(len(samples)), samples).astype(np.float32)


def voice(seconds: float, pitch_hz: float, seed: int) -> NDArray[np.float32]:
    """Syllables with pauses, over a little noise."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(pitch_hz * (1 + 0.1 * np.sin(2 * np.pi * 0.7 * time))) / SAMPLE_RATE
    sound = np.zeros_like(time)
    for harmonic in range(1, 30):
        gain = np.zeros_like(time)
        for centre, width, wobble in ((600.0, 120.0, 2.3), (1400.0, 200.0, 3.1), (2600.0, 300.0, 1.7)):
            moving = centre * (1 + 0.25 * np.sin(2 * np.pi * wobble * time))
            gain += np.exp(-(((pitch_hz * harmonic - moving) / width) ** 2))
        sound += gain * np.sin(harmonic * phase)
    syllables = (np.sin(2 * np.pi * 4 * time) > -0.3) & (np.sin(2 * np.pi * 0.4 * time) > -0.5)
    noise = 0.003 * np.random.default_rng(seed).standard_normal(len(time))
    return (0.15 * sound * syllables + noise).astype(np.float32)
