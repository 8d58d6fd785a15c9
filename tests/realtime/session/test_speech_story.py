"""A session and an engine, in real terms: what a client hears of turns, when noises come between long silences.

The engine's loop, its speech tracks and its skipping of silence are the real ones; the probability of speech is the
loudness of the audio.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import messages
from engine.boundary.items import make_cutter, prepare
from engine.core.scheduler import Limits, Scheduler
from engine.end_of_turn import numeric_eagerness
from engine.runner.base import TurnDetector
from engine.server.loop import EngineLoop
from engine.server.speech_track import GateSettings
from realtime.session.core import Session, SessionLimits
from realtime.session.events import (
    Append,
    Commit,
    Completed,
    Configure,
    Delta,
    Feed,
    FlushEngine,
    FollowTurns,
    Send,
    SpeechStarted,
    SpeechStopped,
)
from realtime.session.settings import Settings, TurnDetection
from realtime.session.turns import Turns
from tests.engine import fakes
from tests.engine.turn_detectors import Answers

RATE, FRAME, POSITION = fakes.RATE, fakes.FRAME, fakes.POSITION
# As the server's own, on the rate of the fakes: five seconds of silence settle.
SKIPPING = GateSettings(
    evidence=0.02,
    conversation_evidence=0.02,
    pre_roll_samples=6 * POSITION,
    pause_samples=2 * FRAME,
    hang_over_samples=5 * RATE,
    hold_samples=5 * RATE,
    follows_track=True,
)
GATE = GateSettings(
    evidence=0.02,
    conversation_evidence=0.02,
    pre_roll_samples=4 * POSITION,
    pause_samples=2 * FRAME,
    hang_over_samples=8 * POSITION,
    hold_samples=5 * RATE,
)


def loop_of(windowed: bool, turn_detector: TurnDetector | None = None) -> EngineLoop:
    runner = fakes.FakeWindowed() if windowed else fakes.FakeFrames()
    scheduler = Scheduler(runner.spec, Limits(max_streams=2, cache_embeds=2000), fakes.VOCABULARY)
    gates: dict[str, Any] = {"gate": GATE} if windowed else {"skipping": SKIPPING}
    return EngineLoop(scheduler, runner, fakes.FakeDetector(), turn_detector=turn_detector, **gates)


class Talk:
    """A client, its session, and an engine that answers at once. `patience`: packets after which the turn detector
    answers a question."""

    def __init__(
        self, windowed: bool, detection: TurnDetection, answers: Answers | None = None, patience: int = 0
    ) -> None:
        self.answers, self.patience, self.packets = answers, patience, 0
        self.loop = loop_of(windowed, answers)
        self.spec = self.loop.scheduler.spec
        numbers = itertools.count(1)
        limits = SessionLimits(stall_seconds=0.0, has_turn_detector=answers is not None)
        self.core = Session(Settings(turn_detection=detection), RATE, lambda: f"item_{next(numbers)}", limits)
        self.cutter = make_cutter(self.spec)
        self.tags = 0
        self.runs = False
        # (second at which it was sent, event)
        self.sent: list[tuple[float, Any]] = []
        self.loop.submit([messages.Open("a", turns=self.core.turn_rule)], 0)

    def play(self, audio: NDArray[np.float32], packet: int = POSITION) -> None:
        for start in range(0, len(audio), packet):
            part = audio[start : start + packet]
            self.do(Append(part, len(part), len(part) * 1000 / RATE))
            self.packets += 1
            if self.answers is not None and self.packets % (self.patience + 1) == 0:
                self.answers.answer()
                self.run()

    def do(self, event: Any) -> None:
        for effect in self.core.handle(event, self.core.appended / RATE):
            match effect:
                case Feed(samples):
                    items = prepare(self.cutter, self.cutter.cut(samples), self.spec)
                    self.loop.submit([messages.Feed("a", items)], 0)
                case FlushEngine(pause, ends_speech, turn_over):
                    self.tags += 1
                    if pause is None:
                        pads = self.spec.flush_positions_for(self.spec.default_delay_positions)
                        rest = prepare(self.cutter, self.cutter.flush(pads), self.spec)
                        self.loop.submit([messages.Feed("a", rest)], 0)
                    self.loop.submit([messages.Flush("a", self.tags, pause, ends_speech, turn_over)], 0)
                case FollowTurns():
                    self.loop.submit([messages.ChangeTurns("a", self.core.turn_rule)], 0)
                case Send(sent):
                    self.sent.append((self.core.appended / RATE, sent))
                case _:
                    pass
        self.run()

    def run(self) -> None:
        if self.runs:
            return  # the outputs of a step are handled in their order
        self.runs = True
        while self.loop.has_work():
            step = self.loop.step()
            for output in [] if step is None else step.outputs:
                if not isinstance(output, messages.StreamState):
                    self.do(output)
        self.runs = False
        self.core.check_integrity()

    def of(self, *kinds: type) -> list[tuple[float, Any]]:
        return [(second, event) for second, event in self.sent if isinstance(event, kinds)]


def sound(seconds: float, probability: float) -> NDArray[np.float32]:
    """Audio that the fake detector takes for speech with this probability."""
    return np.full(round(seconds * RATE), probability, np.float32)


def speech(seconds: float, seed: int) -> NDArray[np.float32]:
    return np.clip(np.abs(fakes.speech(seconds, seed)) + 0.9, 0.9, 1.0).astype(np.float32)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("semantic", [False, True])
@pytest.mark.parametrize("learnt", [False, True])
def test_a_noise_after_a_long_silence_delays_no_final(windowed: bool, semantic: bool, learnt: bool) -> None:
    """A minute of silence, a noise of a tenth of a second that is speech by the client's rule, then a real turn."""
    answers = Answers(instant=True) if learnt else None
    talk = Talk(windowed, TurnDetection(semantic=semantic, eagerness="high"), answers)
    talk.play(sound(60.0, 0.0))
    talk.play(sound(3 * FRAME / RATE, 0.7))
    talk.play(sound(4.0, 0.0))
    first = talk.of(Completed)
    assert len(talk.of(SpeechStarted)) == len(first) == 1, "the noise is a turn, and is answered"
    assert first[0][0] < 60.1 + (2.0 if semantic else 0.5) + 1.5
    before = talk.core.appended / RATE
    talk.play(speech(3.0, 1))
    talk.play(sound(5.0, 0.0))
    finals = talk.of(Completed)
    assert len(finals) == 2
    assert finals[1][1].transcript
    assert finals[1][0] < before + 3.0 + (2.0 if semantic else 0.5) + 1.5
    # Questions only with semantic detection.
    assert answers is None or (answers.asked > 0) == semantic


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("answer", "asked"), [(0.99, 1), (0.001, 3)])
def test_the_turn_detector_is_not_asked_about_a_turn_that_has_ended(windowed: bool, answer: float, asked: int) -> None:
    answers = Answers(instant=True, always=answer)
    talk = Talk(windowed, TurnDetection(semantic=True, eagerness="high"), answers)
    for _ in range(3):
        talk.play(speech(1.0, 1))
        talk.play(sound(4.0, 0.0))
    assert len(talk.of(SpeechStopped)) == 3
    assert answers.asked == 3 * asked


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_turn_is_answered_soon_whatever_opened_it(windowed: bool, seed: int) -> None:
    """Noises and speech of any probability and length, between silences of any length."""
    chance = random.Random(seed)
    silence = chance.choice([200, 500, 1200])
    detection = TurnDetection(threshold=chance.choice([0.3, 0.5, 0.8]), silence_duration_ms=silence)
    talk = Talk(windowed, detection)
    for _ in range(12):
        talk.play(sound(chance.choice([0.1, 0.4, 1.0, 7.0, 20.0]), chance.choice([0.0, 0.1, 0.34])))
        talk.play(sound(chance.choice([0.04, 0.1, 0.4, 2.0]), chance.choice([0.4, 0.55, 0.7, 0.95])))
        if chance.random() < 0.2:
            talk.do(Commit("e"))
        if chance.random() < 0.1:
            talk.do(Configure(talk.core.settings))
    talk.play(sound(10.0, 0.0))
    stops, finals = talk.of(SpeechStopped), talk.of(Completed)
    assert len(talk.of(SpeechStarted)) == len(stops) <= len(finals)
    by_item = {event.item_id: second for second, event in finals}
    for second, event in stops:
        # The delay of the model, a flush that waits for speech to be judged, and less than two positions.
        assert by_item[event.item_id] - second < 1.5


@cache
def turns_of_packets(windowed: bool, size: int) -> list[Any]:
    talk = Talk(windowed, TurnDetection())
    for seed, seconds in enumerate([0.1, 8.0, 0.6, 20.0]):
        talk.play(speech(1.0, seed), size)
        talk.play(sound(seconds, 0.0), size)
    return [event for _, event in talk.of(SpeechStarted, SpeechStopped)]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("packet", [17, 300, 1600])
def test_turns_do_not_depend_on_the_packets(windowed: bool, packet: int) -> None:
    assert turns_of_packets(windowed, packet) == turns_of_packets(windowed, POSITION) != []


SCORED = [
    TurnDetection(semantic=True, eagerness="high"),
    TurnDetection(semantic=True, eagerness="auto"),
    TurnDetection(scored=numeric_eagerness(0.6, 0.4)),
]


def scored_turns(windowed: bool, detection: TurnDetection, size: int, answers: Answers, patience: int) -> list[Any]:
    talk = Talk(windowed, detection, answers, patience)
    for number, seconds in enumerate([0.15, 0.3, 0.7, 1.1, 0.25, 5.0, 9.0]):
        talk.play(sound(1.0, 0.95), size)
        talk.play(sound(seconds, 0.01 * number), size)
    return [event for _, event in talk.of(SpeechStarted, SpeechStopped)]


@cache
def turns_with_instant_answers(windowed: bool, detection: TurnDetection) -> list[Any]:
    return scored_turns(windowed, detection, POSITION, Answers(instant=True), 0)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("detection", SCORED)
@pytest.mark.parametrize(("packet", "patience"), [(POSITION, 0), (POSITION, 1), (POSITION, 7), (17, 40), (300, 5)])
def test_scored_turns_depend_neither_on_packets_nor_on_when_the_turn_detector_answers(
    windowed: bool, detection: TurnDetection, packet: int, patience: int
) -> None:
    """Messages wait for their answers, so that the session reads the same events in the same order."""
    expected = turns_with_instant_answers(windowed, detection)
    assert scored_turns(windowed, detection, packet, Answers(), patience) == expected != []


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("detection", SCORED)
@pytest.mark.parametrize("patience", [1, 3, 7])
def test_words_are_in_their_turn_whenever_the_turn_detector_answers(
    windowed: bool, detection: TurnDetection, patience: int
) -> None:
    """A client sends faster than real time: the words of the next turn come before the report of the pause before it,
    which waits for an answer."""
    talk = Talk(windowed, detection, Answers(), patience)
    for seed, seconds in enumerate([2.9, 2.7, 3.1, 2.6, 9.0]):
        talk.play(speech(1.5, seed), RATE)
        talk.play(sound(seconds, 0.0), RATE)
    finals = [event for _, event in talk.of(Completed)]
    assert any(final.words for final in finals)
    for final, following in itertools.pairwise(finals):
        assert all(word.start < following.start + RATE // 2 for word in final.words), (final, following)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("detection", [TurnDetection(), *SCORED])
def test_no_text_waits_while_a_speaker_goes_on(windowed: bool, detection: TurnDetection) -> None:
    """Also with short pauses, in which the turn detector is asked and answers half a second later."""

    def deltas() -> list[tuple[float, str]]:
        talk = Talk(windowed, detection, Answers(always=0.001), 5)
        for seed in range(6):
            talk.play(speech(2.0, seed))
            talk.play(sound(0.4, 0.0))
        return [(second, event.text) for second, event in talk.of(Delta)]

    with_reports = deltas()
    with mock.patch.multiple(Turns, _is_unreported=lambda *_: False, _holds_partial=False):
        assert with_reports == deltas() != []
