"""The turn detector is asked in pauses: its answers come with the events of speech, in order, and no stream waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import BadItem
from engine.messages import Closed, Flushed, Item, Output, Saved, Speech, Text, TurnRule, TurnScored
from engine.server.recent_audio import PART_SAMPLES
from engine.server.speech_track import DECISIONS, SpeechTrack
from engine.server.turn_questions import WAIT_MESSAGES, LocalTurnAudio, StreamQuestions, TurnAudio, TurnQuestions
from tests.engine.server.test_speakers_tracks import POSITION, SPEC
from tests.engine.turn_detectors import WINDOW, Answers, answer_to

FRAME = 512
RULE = TurnRule(0.5, 2 * FRAME, 3200, (3200, 9600, 16_000))
# Speech and pauses of many lengths, in frames.
PARTS = [(40, 3), (30, 8), (60, 25), (20, 60), (9, 40), (300, 90)]
LOUD = [value for loud, quiet in PARTS for value in [0.9] * loud + [0.05] * quiet]
# Samples of 16 bits, as they are kept.
AUDIO = np.random.default_rng(5).integers(-32768, 32768, len(LOUD) * FRAME).astype(np.float32) / np.float32(32768)


def speeches(step: int = 3, name: str = "s") -> list[Speech]:
    """What a track finds in the audio, in messages of some frames."""
    track, found = SpeechTrack(RULE), []
    for start in range(0, len(LOUD), step):
        frames = LOUD[start : start + step]
        events = [event for event in track.add_frames(frames, FRAME) if not isinstance(event, DECISIONS)]
        found.append(Speech(name, start * FRAME, FRAME, frames, events, track.state))
    return found


ITEMS = [
    Item(at // POSITION, 1, at, b"k", AUDIO[at : at + POSITION], samples=len(AUDIO[at : at + POSITION]))
    for at in range(0, len(AUDIO), POSITION)
]


def scores(messages: list[Any]) -> list[tuple[int, int, int, float | None]]:
    return [
        (event.fell, event.number, event.sample, event.probability)
        for speech in messages
        if isinstance(speech, Speech)
        for event in speech.events
        if isinstance(event, TurnScored)
    ]


class Fed:
    """Questions whose audio comes with the frames."""

    def __init__(self, questions: TurnQuestions) -> None:
        self.questions = questions
        self._fed = 0

    def take(self, speech: Speech) -> list[Speech]:
        while self._fed * POSITION < min(speech.end, len(AUDIO)):
            self.questions.add_audio("s", ITEMS[self._fed : self._fed + 1])
            self._fed += 1
        return self.questions.add(speech)


def questions_of(detector: Answers | None, name: str = "s") -> TurnQuestions:
    questions = asking(detector, name)
    questions.add_audio(name, ITEMS)
    return questions


def audio_of(detector: Answers | None) -> Callable[[str], TurnAudio | None]:
    return lambda name: None if detector is None else LocalTurnAudio(SPEC, detector)


def asking(detector: Answers | None, name: str = "s") -> TurnQuestions:
    questions = TurnQuestions(audio_of(detector))
    questions.set_rule(name, RULE)
    return questions


def answered(questions: TurnQuestions) -> list[Output]:
    outputs: list[Output] = []
    questions.add_answered(outputs)
    return outputs


EXPECTED = scores([speech for one in speeches() for speech in questions_of(Answers(instant=True)).add(one)])


def test_a_pause_has_at_most_three_questions_each_about_the_last_eight_seconds() -> None:
    by_pause: dict[int, list[int]] = {}
    for fell, number, sample, probability in EXPECTED:
        assert sample == fell + (200 + 400 * number) * 16
        assert probability == answer_to(AUDIO[max(0, sample - WINDOW) : sample])
        by_pause.setdefault(fell, []).append(number)
    # 96 and 256 ms, 0.8, 1.92, 1.28 and 2.88 s of silence.
    assert list(by_pause.values()) == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_answers_come_in_order_at_their_samples_however_late_they_are(seed: int) -> None:
    chance, detector = random.Random(seed), Answers()
    questions, found = asking(detector), list[Output]()
    fed = Fed(questions)
    for speech in speeches(chance.randint(1, 9)):
        found += fed.take(speech)
        if chance.random() < 0.5:
            detector.answer(chance.randint(0, 2))
        found += answered(questions)
        assert questions.is_waiting or not questions.has_answered
        # Not so late that answers are left out.
        while questions.delayed_count > WAIT_MESSAGES // 2:
            detector.answer(1)
            found += answered(questions)
    detector.answer()
    found += answered(questions)
    assert not questions.is_waiting
    assert [one.sample for one in found if isinstance(one, Speech)] == sorted(
        one.sample for one in found if isinstance(one, Speech)
    )
    assert scores(found) == EXPECTED
    assert sum(len(one.probabilities) for one in found if isinstance(one, Speech)) == len(LOUD)


def test_an_answer_that_is_late_by_the_messages_is_left_out() -> None:
    detector = Answers()
    fed, found = Fed(asking(detector)), list[Speech]()
    for speech in speeches():
        found += fed.take(speech)
        assert fed.questions.delayed_count <= WAIT_MESSAGES, "no message waits longer than the bound"
    assert len(scores(found)) > 5 and {score[3] for score in scores(found)} == {None}
    assert not any(future.set_running_or_notify_cancel() for _, future in detector.waiting[:5]), "they are not computed"


def test_much_audio_at_once_makes_no_answer_late() -> None:
    """As after a rebuild."""
    detector = Answers()
    questions = questions_of(detector)
    found: list[Output] = [one for speech in speeches(100) for one in questions.add(speech)]
    detector.answer()
    assert scores(found + answered(questions)) == EXPECTED


def test_other_streams_do_not_wait_and_streams_that_do_not_ask_cost_nothing() -> None:
    detector = Answers()
    questions = questions_of(detector)
    questions.set_rule("plain", TurnRule(0.5, 1024, 8000))
    questions.set_rule("none", None)
    questions.add_audio("plain", ITEMS)
    for speech in speeches():
        questions.add(speech)
    asked = detector.asked
    for speech in speeches(name="plain"):
        assert questions.add(speech) == [speech]
    assert detector.asked == asked > 0 and detector.prepared == 1
    assert questions.save("plain") == ({}, None)


def test_without_a_detector_questions_have_no_answers_and_nothing_is_kept() -> None:
    questions = questions_of(None)
    found = [one for speech in speeches() for one in questions.add(speech)]
    assert [score[:3] for score in scores(found)] == [score[:3] for score in EXPECTED]
    assert {score[3] for score in scores(found)} == {None}
    assert questions.save("s")[1] is None


def test_a_detector_that_fails_has_no_answer() -> None:
    detector = Answers()
    questions, found = questions_of(detector), list[Speech]()
    for speech in speeches():
        found += questions.add(speech)
        for _, future in detector.waiting:
            future.set_exception(RuntimeError("broken"))
        detector.waiting.clear()
        found += [one for one in answered(questions) if isinstance(one, Speech)]
    assert len(scores(found)) == len(EXPECTED) and {score[3] for score in scores(found)} == {None}


@pytest.mark.parametrize("end", [Flushed("s", 7, 0), Closed("s", 0)])
def test_a_client_that_ends_the_turn_or_the_stream_does_not_wait(end: Output) -> None:
    questions = questions_of(Answers())
    sent = [one for speech in speeches()[:60] for one in questions.add(speech)]
    assert questions.is_waiting
    other = Flushed("s", 6, 0)
    outputs: list[Output] = [other, Text("s", "a", [], []), end]
    questions.end_at("s", 7)
    questions.add_answered(outputs)
    kept = [one for one in outputs if isinstance(one, Speech)]
    assert outputs == [other, outputs[1], *kept, end], "the flush of a pause does not end the question"
    assert kept and sum(len(one.probabilities) for one in [*sent, *kept]) == 180
    assert not questions.is_waiting


@pytest.mark.parametrize("seed", range(6))
def test_another_engine_asks_again_and_gets_the_same_answers(seed: int) -> None:
    """It is given a saved state, and the audio from the position that the state names."""
    chance, detector, name = random.Random(seed), Answers(), "s"
    questions, found, fed, kept = asking(detector), list[Output](), 0, 0
    for speech in speeches(chance.randint(2, 5)):
        while fed * POSITION < min(speech.end, len(AUDIO)):
            questions.add_audio(name, ITEMS[fed : fed + 1])
            fed += 1
        speech.stream = name
        found += questions.add(speech)
        if chance.random() < 0.2:
            saved, position = questions.save(name)
            assert (
                position is not None
                and speech.end - position * POSITION < WINDOW + PART_SAMPLES + (WAIT_MESSAGES + 2) * 5 * FRAME
            )
            questions.close(name)
            assert not questions.is_waiting
            detector = Answers()
            questions = TurnQuestions(audio_of(detector))
            name += "+"
            questions.resume(name, reread(saved), ITEMS[position:fed])
            kept = len(found)
        if chance.random() < 0.6 or questions.delayed_count > WAIT_MESSAGES // 2:
            detector.answer()
            found += answered(questions)
        assert {one.stream for one in found[kept:]} <= {name}, "it has another name on another engine"
    detector.answer()
    found += answered(questions)
    assert scores(found) == EXPECTED


def reread(parts: dict[str, Saved]) -> dict[str, Saved]:
    """As it comes back from another process."""
    again: dict[str, Saved] = msgspec.msgpack.decode(msgspec.msgpack.encode(parts))
    return again


def test_a_state_that_cannot_be_read_is_refused() -> None:
    for bad in ({}, {"kept": [1]}, {"kept": 5}, {"kept": [["speech", "s"]]}):
        with pytest.raises(BadItem, match="turns"):
            TurnQuestions(audio_of(Answers())).resume("s", {"turns": bad}, [])


def test_the_audio_of_a_stream_is_bounded() -> None:
    audio, most = LocalTurnAudio(SPEC, Answers()), 0
    stream = StreamQuestions(audio)
    for number in range(800):
        start = number * FRAME
        stream.add_audio([Item(number, 1, start, b"k", np.zeros(FRAME, np.float32), samples=FRAME)])
        asked: list[Any] = [TurnScored(start, start + FRAME, start, 0)] if number % 10 == 0 else []
        stream.add(Speech("s", start, FRAME, [0.0], asked))
        most = max(most, audio.recent.kept_samples)
    assert most <= WINDOW + PART_SAMPLES + (WAIT_MESSAGES + 2) * FRAME


def test_declared_silence_is_silence() -> None:
    detector = Answers(instant=True)
    stream = StreamQuestions(LocalTurnAudio(SPEC, detector))
    loud: NDArray[np.float32] = np.full(POSITION, 0.5, np.float32)
    stream.add_audio(
        [Item(0, 1, 0, b"k", loud, samples=POSITION), Item(1, 2, POSITION), Item(3, 1, 3 * POSITION, b"k", loud)]
    )
    (found,) = stream.add(Speech("s", 0, FRAME, [0.0], [TurnScored(3 * POSITION + 100, 0, 0, 0)]))
    expected = np.concatenate([loud, np.zeros(2 * POSITION, np.float32), loud[:100]])
    assert scores([found])[0][3] == answer_to(expected)
