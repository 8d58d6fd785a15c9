"""The embedded model with music: music gives no text, and the words of a speaker beside it do not change.

Needs the model and a recording in the cache, and is skipped without them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from audio.containers import read_file
from engine.boundary.items import make_cutter, prepare
from engine.messages import Command, Feed, Finish, Open, Text
from engine.options import DEFAULT_MODEL, EngineConfig
from engine.server.loop import EngineLoop
from engine.server.main import build_loop
from engine.weights.store import pull
from tests.cached_models import skip_unless_cached

RECORDING = "sample-two-cities"
SAMPLE_RATE = 16_000
PACKET = 1_280


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    skip_unless_cached(DEFAULT_MODEL, RECORDING)
    yield build_loop(EngineConfig(DEFAULT_MODEL, "cpu", max_streams=2, threads=1))


def chords_with_a_beat(seconds: int) -> NDArray[np.float32]:
    """Four chords, struck twice a second and dying away, over a beat of noise."""
    at = np.arange(seconds * SAMPLE_RATE) / SAMPLE_RATE
    within = at % 0.5
    sound = np.zeros_like(at)
    for number, root in enumerate((220.0, 174.6, 261.6, 196.0)):
        tones = [root * interval for interval in (1.0, 1.26, 1.5)]
        notes = sum(np.sin(2 * np.pi * tone * order * at) / order for tone in tones for order in (1, 2, 3))
        sound += notes * (at // 1 % 4 == number)
    beat = np.random.default_rng(1).standard_normal(len(at)) * np.exp(-60 * within)
    return (0.08 * sound * np.exp(-3 * within) + 0.1 * beat).astype(np.float32)


def texts(loop: EngineLoop, sounds: dict[str, NDArray[np.float32]]) -> dict[str, str]:
    """Packets of all streams side by side, to the end of each."""
    said = dict.fromkeys(sounds, "")
    spec = loop.scheduler.spec
    cutters = {name: make_cutter(spec) for name in sounds}

    def step(commands: list[Command]) -> None:
        loop.submit(commands, 0)
        while loop.has_work():
            done = loop.step()
            for output in done.outputs if done is not None else []:
                if isinstance(output, Text):
                    said[output.stream] += output.delta

    step([Open(name) for name in sounds])
    for first in range(0, max(map(len, sounds.values())), PACKET):
        commands: list[Command] = []
        for name, sound in sounds.items():
            packet = sound[first : first + PACKET]
            items = prepare(cutters[name], cutters[name].cut(packet), spec) if len(packet) else []
            commands += [Feed(name, items)] if items else []
        step(commands)
    step([Finish(name) for name in sounds])
    return said


def test_music_has_no_words_and_a_speaker_beside_it_keeps_theirs(loop: EngineLoop) -> None:
    speech = np.concatenate(list(read_file(pull(RECORDING))))[: 4 * SAMPLE_RATE]
    alone = texts(loop, {"speaker": speech})["speaker"]
    together = texts(loop, {"speaker": speech, "music": chords_with_a_beat(6)})
    assert len(alone.split()) > 5
    assert together == {"speaker": alone, "music": ""}
