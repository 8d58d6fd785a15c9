"""Audio for load tests: WAV files, resampling, synthetic voices that a detector takes for speech, and that detector.

Recordings of people are in `benchmarks/recordings.py`.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

SAMPLE_RATE = 16_000
# Pitch in Hz and seconds of each voice.
VOICES = ((95.0, 12.0), (130.0, 12.0), (190.0, 12.0))


def speech(recording: Path | None = None) -> Samples:
    """At 16 kHz: the recording (a WAV file of 16 bits), or 36 s of three voices one after the other."""
    if recording is not None:
        return read_wav(recording)
    return np.concatenate([voice(seconds, pitch, seed) for seed, (pitch, seconds) in enumerate(VOICES)])


def voice(seconds: float, pitch_hz: float, seed: int) -> Samples:
    """Syllables with pauses, over a little noise: harmonics of a pitch, shaped by moving resonances."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(pitch_hz * (1 + 0.1 * np.sin(2 * np.pi * 0.7 * time))) / SAMPLE_RATE
    sound = np.zeros_like(time)
    # Single precision: the exponentials are most of the work.
    resonances = [
        ((centre * (1 + 0.25 * np.sin(2 * np.pi * wobble * time))).astype(np.float32), np.float32(width))
        for centre, width, wobble in ((600.0, 120.0, 2.3), (1400.0, 200.0, 3.1), (2600.0, 300.0, 1.7))
    ]
    for harmonic in range(1, 30):
        gain = sum(np.exp(-(((np.float32(pitch_hz * harmonic) - moving) / width) ** 2)) for moving, width in resonances)
        sound += gain * np.sin(harmonic * phase)
    syllables = (np.sin(2 * np.pi * 4 * time) > -0.3) & (np.sin(2 * np.pi * 0.4 * time) > -0.5)
    noise = 0.003 * np.random.default_rng(seed).standard_normal(len(time))
    return (0.15 * sound * syllables + noise).astype(np.float32)


def read_wav(path: Path) -> Samples:
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path.name} has {8 * file.getsampwidth()} bits a sample; 16 are needed")
        channels, rate = file.getnchannels(), file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, channels)[:, 0]
    return resampled((samples / np.float32(32768)).astype(np.float32), rate, SAMPLE_RATE)


def write_wav(path: Path, samples: Samples) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(pcm16(samples))


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Linear interpolation: a load test needs the right number of samples, not their exact shape."""
    if rate == wanted:
        return samples
    moments = np.arange(len(samples) * wanted // rate) * (rate / wanted)
    return np.asarray(np.interp(moments, np.arange(len(samples)), samples), np.float32)


def pcm16(samples: Samples) -> bytes:
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


@cache
def _detector() -> Any:
    # Here, because others need numpy only.
    from engine.models.silero import load_silero
    from engine.runner.speech import SpeechDetector

    return SpeechDetector(load_silero(), max_streams=1)


def speech_probabilities(samples: Samples) -> tuple[list[float], int]:
    """How likely each frame is speech, by the engine's detector; and the samples of a frame."""
    _detector().open("sound")
    (found,) = _detector().detect([("sound", samples)])
    _detector().close("sound")
    return found.probabilities, found.frame_samples


def utterances(
    probabilities: Sequence[float], frame_s: float, threshold: float = 0.5, pause_s: float = 0.5
) -> list[tuple[float, float]]:
    """Start and end of speech in seconds, by a detector's frames; pauses shorter than `pause_s` count as speech."""
    found: list[tuple[float, float]] = []
    for index, probability in enumerate(probabilities):
        if probability < threshold:
            continue
        start, end = index * frame_s, (index + 1) * frame_s
        if found and start - found[-1][1] < pause_s:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found
