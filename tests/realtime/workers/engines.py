"""An engine at the gateway's rate whose words are a pure function of the audio, and audio for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.core.scheduler import Limits, Scheduler
from engine.runner.base import Embedder
from engine.server.loop import EngineLoop
from engine.server.speech_track import GateSettings
from tests.engine import fakes
from tests.engine.client.test_recovery_labels import Instant

RATE = 16_000


def build(
    windowed: bool = False,
    max_streams: int = 64,
    step_seconds: float = 0.0,
    embedder: Embedder | None = None,
    skipping: GateSettings | None = None,
) -> EngineLoop:
    kind = fakes.FakeWindowed if windowed else fakes.FakeFrames
    spec = replace(kind.spec, sample_rate=RATE, samples_per_position=1280)
    if not windowed:
        spec = replace(spec, look_back_samples=680, look_ahead_samples=40)
    spec = replace(spec, options=replace(spec.options, speakers=embedder is not None))
    limits = Limits(max_streams=max_streams, cache_embeds=max_streams * 100 + 100)
    runner = kind(spec=spec, step_seconds=step_seconds)
    scheduler, detector = Scheduler(spec, limits, fakes.VOCABULARY), fakes.FakeDetector(frame=512)
    return EngineLoop(scheduler, runner, detector, embedder=embedder, skipping=skipping)


def labelling() -> EngineLoop:
    """With speaker labels: a voice is a loudness."""
    return build(windowed=True, embedder=Instant())


def skipping() -> EngineLoop:
    """Silence is skipped after a second of it."""
    return build(skipping=GateSettings(0.02, 0.02, pre_roll_samples=7680, hang_over_samples=RATE, follows_track=True))


def windowed() -> EngineLoop:
    return build(windowed=True)


def talk(seconds: float, seed: int) -> bytes:
    """16-bit samples: a second and a half of sound, a second of silence, and so on."""
    samples = np.random.default_rng(seed).uniform(-32767, 32767, int(seconds * RATE))
    beat = np.arange(len(samples)) % int(2.5 * RATE)
    samples[beat >= 1.5 * RATE] = 0
    return samples.astype("<i2").tobytes()
