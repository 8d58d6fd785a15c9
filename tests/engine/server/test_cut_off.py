"""The embedded model when its audio ends in the middle of speech: it outputs only words that were spoken.

Needs the model and a recording in the cache, and is skipped without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from audio.containers import read_file
from engine.boundary.items import make_cutter, prepare
from engine.messages import Command, Feed, Finish, Open, Speech, Text, Word
from engine.options import DEFAULT_MODEL, EngineConfig
from engine.server.loop import EngineLoop
from engine.server.main import build_loop
from engine.server.speech import GRACE_SAMPLES
from engine.weights.store import pull
from tests.cached_models import skip_unless_cached

RECORDING = "sample-two-cities"
SAMPLE_RATE = 16_000
PACKET = 1_280
SPOKEN = (
    "it was the best of times it was the worst of times it was the age of wisdom it was the age of foolishness "
    "it was the epoch of belief it was the epoch of incredulity"
).split()
# Moments in the middle of a word, and how many words have begun by then. With nothing but its own idea of where a text
# ends, the model says between two and thirteen words more at the first four.
MOMENTS = {3.29: 9, 9.11: 27, 11.04: 32, 11.10: 33, 6.00: 18}


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    skip_unless_cached(DEFAULT_MODEL, RECORDING)
    yield build_loop(EngineConfig(DEFAULT_MODEL, "cpu", max_streams=2, threads=1))


@pytest.fixture(scope="module")
def recording() -> NDArray[np.float32]:
    return np.concatenate(list(read_file(pull(RECORDING))))


def play(loop: EngineLoop, name: str, sound: NDArray[np.float32], *, live: bool) -> tuple[list[Word], list[float]]:
    """The words of a sound that is packets and then ends, and the speech detector's probabilities."""
    words: list[Word] = []
    speech: list[float] = []
    spec = loop.scheduler.spec
    cutter = make_cutter(spec)

    def step(*commands: Command) -> None:
        loop.submit(commands, 0)
        while loop.has_work():
            done = loop.step()
            for output in done.outputs if done is not None else []:
                if isinstance(output, Text):
                    words.extend(output.words)
                elif isinstance(output, Speech):
                    speech.extend(output.probabilities)

    step(Open(name, live=live))
    for at in range(0, len(sound), PACKET):
        items = prepare(cutter, cutter.cut(sound[at : at + PACKET]), spec)
        step(*([Feed(name, items)] if items else []))
    items = prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)
    step(*([Feed(name, items)] if items else []), Finish(name))
    return words, speech


def plain(words: list[Word]) -> list[str]:
    return [re.sub(r"[^a-z]", "", word.text.lower()) for word in words]


@pytest.mark.parametrize(("moment", "begun"), MOMENTS.items())
def test_no_words_are_made_up_when_a_speaker_is_cut_off(
    loop: EngineLoop, recording: NDArray[np.float32], moment: float, begun: int
) -> None:
    words, _ = play(loop, f"cut at {moment}", recording[: round(moment * SAMPLE_RATE)], live=True)
    said = plain(words)
    assert begun - 3 <= len(said) <= begun, "no more words than have begun, and not many are lost"
    assert said[:-1] == SPOKEN[: len(said) - 1], "the last one may be half a word"


@pytest.mark.parametrize("live", [True, False])
def test_words_end_with_speech_and_follow_each_other(
    loop: EngineLoop, recording: NDArray[np.float32], live: bool
) -> None:
    sound = np.concatenate((recording[: 13 * SAMPLE_RATE], np.zeros(3 * SAMPLE_RATE, np.float32)))
    words, speech = play(loop, f"whole {live}", sound, live=live)
    frame = 512
    last = max(at for at, probability in enumerate(speech) if probability >= 0.35)
    assert len(words) > 30 and words[-1].end_sample <= (last + 1) * frame + GRACE_SAMPLES
    floor = 0
    for word in words:
        assert floor <= word.start_sample <= word.end_sample
        floor = word.end_sample
