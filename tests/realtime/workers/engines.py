"""An engine at the gateway's rate whose words are a pure function of the audio, and audio for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.core.scheduler import Limits, Scheduler
from engine.server.loop import EngineLoop
from tests.engine import fakes

RATE = 16_000


def build(windowed: bool = False, max_streams: int = 64, step_seconds: float = 0.0) -> EngineLoop:
    kind = fakes.FakeWindowed if windowed else fakes.FakeFrames
    spec = replace(kind.spec, sample_rate=RATE, samples_per_position=1280)
    if not windowed:
        spec = replace(spec, look_back_samples=680, look_ahead_samples=40)
    limits = Limits(max_streams=max_streams, cache_embeds=max_streams * 100 + 100)
    runner = kind(spec=spec, step_seconds=step_seconds)
    return EngineLoop(Scheduler(spec, limits, fakes.VOCABULARY), runner, fakes.FakeDetector(frame=512))


def windowed() -> EngineLoop:
    return build(windowed=True)


def talk(seconds: float, seed: int) -> bytes:
    """16-bit samples: a second and a half of sound, a second of silence, and so on."""
    samples = np.random.default_rng(seed).uniform(-32767, 32767, int(seconds * RATE))
    beat = np.arange(len(samples)) % int(2.5 * RATE)
    samples[beat >= 1.5 * RATE] = 0
    return samples.astype("<i2").tobytes()
