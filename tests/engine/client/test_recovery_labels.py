"""A stream with speaker labels that loses its engine goes on with the same labels.

Engines are loops in this process (`test_recovery_rebuilding.py`). Voices differ in loudness; every sample of a piece
changes its embedding a little, so a label shows whether another engine has heard the same pieces.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.core.scheduler import Limits, Scheduler
from engine.messages import Labels, LabelSpan
from engine.options import SPEAKERS, speakers_text
from engine.runner.base import Embedder
from engine.server.loop import EngineLoop
from tests.engine import fakes
from tests.engine.client.test_recovery_rebuilding import PACKET, EngineDeath, block_ear, build_with, play, window_ear
from tests.engine.server.test_skipped_silence import SETTINGS, SPEC
from tests.engine.server.test_speakers_tracks import embeddings_of

ON = {SPEAKERS: speakers_text()}


class Instant(Embedder):
    """Embeddings that are ready at once."""

    def submit(self, audio: NDArray[np.float32]) -> Future[NDArray[np.float32]]:
        found: Future[NDArray[np.float32]] = Future()
        found.set_result(embeddings_of(audio))
        return found


def two_voices(seed: int, turns: int) -> NDArray[np.float32]:
    """Noise of two loudnesses in turns, of any lengths, with pauses."""
    chance = np.random.default_rng(seed)
    parts = []
    for number in range(turns):
        for loudness, most in ((0.6 + 0.28 * (number % 2), 5.0), (0.01, 1.5)):
            size = int(chance.uniform(0.4, most) * 16_000)
            parts.append(loudness * chance.uniform(0.9, 1.1, size).astype(np.float32) * (-1) ** np.arange(size))
    return np.concatenate(parts).astype(np.float32)


def decided(transcript: fakes.Transcript) -> list[LabelSpan]:
    """What a gateway takes: labels that come again change nothing."""
    found: list[LabelSpan] = []
    for output in transcript.outputs:
        if isinstance(output, Labels):
            until = found[-1][1] if found else 0
            found += [span for span in output.decided if span[0] >= until]
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ear", [window_ear, block_ear])
async def test_a_windowed_stream_has_the_same_labels_wherever_its_engine_dies(ear: object, seed: int) -> None:
    build = partial(build_with, ear, Instant())
    audio, chance = two_voices(seed, 5), random.Random(seed)
    packets = len(audio) // PACKET
    calm = decided((await play(build, audio, set(), [], ON)).transcript)
    assert {speaker for _, _, speaker, _ in calm} == {0, 1}
    deaths = [
        EngineDeath(packet, chance.randrange(4), chance.choice([0, 1, 7, 40]))
        for packet in chance.sample(range(packets), packets // 6)
    ]
    assert decided((await play(build, audio, set(), deaths, ON)).transcript) == calm


async def test_labels_do_not_keep_more_than_a_few_seconds_of_audio() -> None:
    session = await play(partial(build_with, window_ear, Instant()), two_voices(8, 12), set(), [], ON)
    assert session.most_kept <= 40 + 25 + 25 + 80 + 25


def build_frames() -> EngineLoop:
    scheduler = Scheduler(SPEC, Limits(max_streams=3, cache_embeds=900), fakes.VOCABULARY)
    detector = fakes.FakeDetector(frame=512)
    return EngineLoop(scheduler, fakes.FakeFrames(), detector, skipping=SETTINGS, embedder=Instant())


@pytest.mark.parametrize("seed", range(3))
async def test_a_frame_synchronous_stream_goes_on_with_the_same_voices(seed: int) -> None:
    """Another engine counts from the audio that it is sent, and its frames may begin elsewhere: labels are the same but
    for less than two frames at their edges."""
    audio, chance = two_voices(seed + 10, 5), random.Random(seed)
    packets = len(audio) // PACKET
    calm = decided((await play(build_frames, audio, set(), [], ON)).transcript)
    assert {speaker for _, _, speaker, _ in calm} == {0, 1}
    deaths = [EngineDeath(packet, chance.randrange(4), chance.choice([0, 1, 3])) for packet in range(5, packets, 9)]
    found = decided((await play(build_frames, audio, set(), deaths, ON)).transcript)

    def voices(spans: list[LabelSpan]) -> NDArray[np.int64]:
        told = np.full(len(audio), -1)
        for start, end, speaker, _ in spans:
            told[start:end] = speaker
        return told

    differs = voices(calm) != voices(found)
    assert differs.mean() < 0.05
    # No part as long as a word has another speaker.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], differs, [False]]).astype(np.int8))).reshape(-1, 2)
    assert max((end - start for start, end in edges), default=0) <= 2 * 512
