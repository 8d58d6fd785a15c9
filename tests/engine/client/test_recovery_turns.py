"""A stream that asks the turn detector and loses its engine gets the same answers, at the same samples.

Engines are loops in this process (`test_recovery_rebuilding.py`). An answer depends on every sample of the last eight
seconds, so it shows whether another engine has heard the same audio. Answers come late, at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.core.scheduler import Limits, Scheduler
from engine.messages import Speech, SpeechEvent, TurnRule, TurnScored
from engine.runner.base import TurnDetector
from engine.server.loop import EngineLoop
from tests.engine import fakes
from tests.engine.client.test_recovery_rebuilding import PACKET, EngineDeath, block_ear, build_with, play, window_ear
from tests.engine.server.test_skipped_silence import SETTINGS, SPEC
from tests.engine.turn_detectors import WINDOW, answer_to

RULE = TurnRule(0.5, 1024, 3200, (3200, 9600, 16_000))


class Late(TurnDetector):
    """Answers when it has been asked for news a random number of times: the loop asks at every step."""

    window_samples = WINDOW

    def __init__(self, seed: int | None) -> None:
        self._chance = None if seed is None else random.Random(seed)

    def submit(self, task: Callable[[], NDArray[np.float32]]) -> Future[float]:
        return _LateAnswer(answer_to(task()), 0 if self._chance is None else self._chance.randrange(6))


class _LateAnswer(Future[float]):
    def __init__(self, answer: float, after: int) -> None:
        super().__init__()
        self._answer, self._after = answer, after

    def done(self) -> bool:
        if not super().done():
            self._after -= 1
            if self._after < 0:
                self.set_result(self._answer)
        return super().done()


def events_of(transcript: fakes.Transcript) -> list[SpeechEvent]:
    return [event for output in transcript.outputs if isinstance(output, Speech) for event in output.events]


def talk(seed: int, turns: int) -> NDArray[np.float32]:
    """Noise, loud and soft in turns, of any lengths; pauses are long enough for up to three questions."""
    chance = np.random.default_rng(seed)
    parts = []
    for _ in range(turns):
        for loudness, most in ((1.4, 4.0), (0.01, 2.0)):
            size = int(chance.uniform(0.2, most) * 16_000)
            parts.append(loudness * chance.standard_normal(size, dtype=np.float32))
    whole = np.concatenate([*parts, np.zeros(80_000, np.float32)])
    # Samples of 16 bits, as they are kept for the detector.
    return np.clip(np.rint(whole * 32768), -32768, 32767).astype(np.int16) / np.float32(32768)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ear", [window_ear, block_ear])
async def test_a_windowed_stream_has_the_same_answers_wherever_its_engine_dies(ear: object, seed: int) -> None:
    audio, chance = talk(seed, 8), random.Random(seed)
    # A client that ends the stream does not wait for answers, so that no engine is away then.
    packets = len(audio) // PACKET - 90
    calm = events_of((await play(partial(build_with, ear, None, Late(None)), audio, set(), [], None, RULE)).transcript)
    assert sum(isinstance(event, TurnScored) and event.probability is not None for event in calm) >= 8
    late = partial(build_with, ear, None, Late(seed))
    assert events_of((await play(late, audio, set(), [], None, RULE)).transcript) == calm
    deaths = [
        EngineDeath(packet, chance.randrange(4), away)
        for packet, away in zip(chance.sample(range(packets), 16), [0, 1, 2, 7] * 3 + [0, 0, 2, 30], strict=True)
    ]
    assert events_of((await play(late, audio, set(), deaths, None, RULE)).transcript) == calm


async def test_questions_do_not_keep_more_than_their_window_of_audio() -> None:
    session = await play(partial(build_with, window_ear, None, Late(3)), talk(8, 12), set(), [], None, RULE)
    # Positions: eight seconds before an open question, the wait for its answer, and what comes between two states.
    assert session.most_kept <= 100 + 50 + 25 + 80


def build_frames() -> EngineLoop:
    scheduler = Scheduler(SPEC, Limits(max_streams=3, cache_embeds=900), fakes.VOCABULARY)
    detector = fakes.FakeDetector(frame=512)
    return EngineLoop(scheduler, fakes.FakeFrames(), detector, skipping=SETTINGS, turn_detector=Late(5))


@pytest.mark.parametrize("seed", range(3))
async def test_a_frame_synchronous_stream_is_asked_the_same_questions(seed: int) -> None:
    """Another engine counts from the audio that it is sent, and its frames may begin elsewhere: events are the same but
    for less than two frames."""
    audio, chance = talk(seed + 10, 5), random.Random(seed)
    calm = events_of((await play(build_frames, audio, set(), [], None, RULE)).transcript)
    deaths = [
        EngineDeath(packet, chance.randrange(4), chance.choice([0, 1, 3]))
        for packet in range(5, len(audio) // PACKET, 9)
    ]
    found = events_of((await play(build_frames, audio, set(), deaths, None, RULE)).transcript)
    assert [type(event) for event in found] == [type(event) for event in calm]
    assert max(abs(one.sample - other.sample) for one, other in zip(found, calm, strict=True)) <= 2 * 512
    for event in found:
        if isinstance(event, TurnScored):
            assert event.probability == answer_to(audio[max(0, event.sample - WINDOW) : event.sample])
