"""Labels and answers about turns from a process of their own are those of the loop; what fails there ends one stream,
or the engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import EngineDead
from engine.messages import Closed, Item, Labels, LabelSpan, Output, Saved, Speech
from engine.runner.base import Embedder
from engine.server import background_process
from engine.server.background_process import (
    FAILURES_OF_A_LOST_DEVICE,
    BackgroundProcess,
    ProcessTracks,
    Recipes,
    SentAudio,
)
from engine.server.speaker_labels import FRAME_SAMPLES, Samples
from engine.server.turn_questions import TurnQuestions
from tests.engine.server.test_speakers_tracks import (
    AUDIO,
    EXPECTED,
    ON,
    POSITION,
    PROBABILITIES,
    SPEC,
    embeddings_of,
    heard,
)
from tests.engine.server.test_turn_questions import EXPECTED as EXPECTED_SCORES
from tests.engine.server.test_turn_questions import ITEMS, RULE, scores, speeches
from tests.engine.turn_detectors import WINDOW, Answers

PATIENCE_S = 60.0

InstantAnswers = partial(Answers, instant=True)


class ReadyEmbeddings(Embedder):
    """Ready at once. With `waits` never; a voice that is too loud has none."""

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits

    def submit(self, task: Samples) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        if np.abs(task).max() > 0.9:
            future.set_exception(RuntimeError("no weights"))
        elif not self._waits:
            future.set_result(embeddings_of(task))
        return future


class Loop:
    def __init__(self, make: Callable[[], Embedder] = ReadyEmbeddings) -> None:
        self.failed: list[tuple[str, str]] = []
        self.process = BackgroundProcess(SPEC, Recipes(make, InstantAnswers), WINDOW)
        self.tracks = ProcessTracks(self.process, make(), self._end_failed)
        self.questions = TurnQuestions(partial(SentAudio, self.process, self.tracks.has_labels))

    def _end_failed(self, name: str, error: Exception) -> None:
        self.failed.append((name, str(error)))
        self.tracks.close(name)

    def feed(self, name: str, positions: int, chunk: int = 7, louder: float = 1.0) -> None:
        """Audio from the beginning, in items and messages as a loop gets them."""
        sent = judged = 0
        for start in range(0, positions, chunk):
            for place in range(start, min(start + chunk, positions)):
                own = louder * AUDIO[place * POSITION : (place + 1) * POSITION]
                self.tracks.add_audio(name, [Item(place, 1, place * POSITION, b"k", own, samples=len(own))])
                sent += len(own)
            until = sent // FRAME_SAMPLES
            frames = Speech(name, judged * FRAME_SAMPLES, FRAME_SAMPLES, PROBABILITIES[judged:until])
            self.tracks.add_frames(*heard(frames))
            judged = until

    def until(self, done: Callable[[list[Output]], bool], *first: Output) -> list[Output]:
        """Steps of the loop until `done`: all outputs."""
        outputs, deadline = list[Output](), time.monotonic() + PATIENCE_S
        step: list[Output] = list(first)
        while True:
            self.process.take_answers()
            self.tracks.add_labels(step)
            self.questions.add_answered(step)
            self.process.send()
            outputs += step
            if done(outputs):
                return outputs
            assert time.monotonic() < deadline, outputs
            step = []
            time.sleep(0.005)


@pytest.fixture
def make() -> Callable[[], Embedder]:
    return ReadyEmbeddings


@pytest.fixture
def loop(make: Callable[[], Embedder]) -> Iterator[Loop]:
    running = Loop(make)
    yield running
    running.process.stop()


def has_closed(outputs: list[Output]) -> bool:
    return any(isinstance(output, Closed) for output in outputs)


def decided(outputs: list[Output], name: str) -> list[LabelSpan]:
    labels = [output for output in outputs if isinstance(output, Labels) and output.stream == name]
    return [span for one in labels for span in one.decided]


POSITIONS = -(-len(AUDIO) // POSITION)
ITEMS_OF_SPEECH = [
    Item(at // POSITION, 1, at, b"k", AUDIO[at : at + POSITION], samples=len(AUDIO[at : at + POSITION]))
    for at in range(0, len(AUDIO), POSITION)
]


@pytest.mark.parametrize("chunk", [1, 40])
def test_the_labels_are_those_of_the_loop_and_the_end_comes_last(loop: Loop, chunk: int) -> None:
    loop.tracks.open("s", ON, live=True)
    loop.feed("s", POSITIONS, chunk)
    outputs = loop.until(has_closed, Closed("s", len(AUDIO)))
    assert decided(outputs, "s") == EXPECTED
    assert isinstance(outputs[-1], Closed)
    states = [output.state for output in outputs if isinstance(output, Labels) and output.state]
    assert states


def test_another_process_goes_on_from_a_state(loop: Loop) -> None:
    loop.tracks.open("s", ON, live=True)
    loop.feed("s", POSITIONS // 2)

    def has_state(outputs: list[Output]) -> bool:
        return any(isinstance(output, Labels) and output.state for output in outputs)

    before = loop.until(has_state)
    state = next(output.state for output in reversed(before) if isinstance(output, Labels) and output.state)
    known = decided(before, "s")
    other = Loop()
    try:
        other.tracks.open("s", ON, live=True)
        other.tracks.resume("s", state)
        other.feed("s", POSITIONS)
        after = decided(other.until(has_closed, Closed("s", len(AUDIO))), "s")
    finally:
        other.process.stop()
    assert known + [span for span in after if not known or span[0] >= known[-1][1]] == EXPECTED


def test_streams_without_labels_start_no_process(loop: Loop) -> None:
    loop.tracks.open("s", {}, live=True)
    loop.feed("s", 20)
    end = Closed("s", 1)
    assert loop.until(has_closed, end) == [end]
    assert loop.process.pid is None
    assert not loop.tracks.has_labels("s")


@pytest.mark.parametrize("state", [{}, {"cutter": 3}, {"cutter": {}, "labels": {}, "waiting": []}])
def test_a_state_that_cannot_be_read_ends_its_stream_alone(loop: Loop, state: Saved) -> None:
    for name in ("bad", "good"):
        loop.tracks.open(name, ON, live=True)
    loop.tracks.resume("bad", state)
    loop.feed("good", POSITIONS)
    outputs = loop.until(has_closed, Closed("good", 1))
    assert decided(outputs, "good") == EXPECTED
    ((name, message),) = loop.failed
    assert name == "bad" and "speaker labels" in message


def test_an_embedding_that_fails_ends_its_stream_alone(loop: Loop) -> None:
    loop.tracks.open("bad", ON, live=True)
    loop.feed("bad", POSITIONS, louder=4.0)
    loop.until(lambda outputs: bool(loop.failed))
    assert loop.failed[0][0] == "bad" and "no weights" in loop.failed[0][1]
    loop.tracks.open("good", ON, live=True)
    loop.feed("good", POSITIONS)
    assert decided(loop.until(has_closed, Closed("good", 1)), "good") == EXPECTED


def test_a_stream_that_is_dropped_gets_no_labels(loop: Loop) -> None:
    loop.tracks.open("s", ON, live=True)
    loop.feed("s", POSITIONS)
    loop.tracks.add_labels([end := Closed("s", 1)])
    loop.process.send()
    assert loop.tracks.close("s") is end
    assert loop.tracks.close("s") is None
    loop.tracks.open("t", ON, live=True)
    loop.feed("t", POSITIONS)
    outputs = loop.until(has_closed, Closed("t", 1))
    assert {output.stream for output in outputs if isinstance(output, Labels)} == {"t"}


@pytest.mark.parametrize("make", [partial(ReadyEmbeddings, waits=True)])
def test_an_upload_waits_for_its_labels(loop: Loop) -> None:
    loop.tracks.open("u", ON, live=False)
    audio = np.full(2000 * FRAME_SAMPLES, 0.5, np.float32)
    loop.tracks.add_audio("u", [Item(0, 1, 0, b"k", audio, samples=len(audio))])
    loop.tracks.add_frames(*heard(Speech("u", 0, FRAME_SAMPLES, [0.9] * 2000)))
    loop.until(lambda outputs: loop.tracks.upload_waits_from("u") == 0)


def test_a_process_that_is_overloaded_gets_silence(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_process, "MAX_QUEUED_BYTES", -1)
    loop.tracks.open("s", ON, live=True)
    loop.feed("s", POSITIONS)
    outputs = loop.until(has_closed, Closed("s", len(AUDIO)))
    assert not decided(outputs, "s")


def test_audio_that_one_stream_was_not_sent_has_no_voice_there(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the process keeps up again when the detector's frames come."""
    loop.tracks.open("s", ON, live=True)
    loop.tracks.open("t", ON, live=True)
    monkeypatch.setattr(background_process, "MAX_QUEUED_BYTES", -1)
    loop.tracks.add_audio("s", ITEMS_OF_SPEECH)
    monkeypatch.undo()
    loop.tracks.add_audio("t", ITEMS_OF_SPEECH)
    for name in ("s", "t"):
        loop.tracks.add_frames(*heard(Speech(name, 0, FRAME_SAMPLES, PROBABILITIES[: len(AUDIO) // FRAME_SAMPLES])))
    outputs = loop.until(
        lambda found: sum(isinstance(one, Closed) for one in found) == 2, Closed("s", 1), Closed("t", 1)
    )
    assert not decided(outputs, "s") and decided(outputs, "t") == EXPECTED


class Odd(ReadyEmbeddings):
    """Fails for one voice with an error of its own."""

    def submit(self, task: Samples) -> Future[NDArray[np.float32]]:
        if np.abs(task).max() > 0.9:
            raise KeyError("a defect")
        return super().submit(task)


@pytest.mark.parametrize("make", [Odd])
def test_an_unexpected_error_ends_its_stream_alone(loop: Loop) -> None:
    for name in ("bad", "good"):
        loop.tracks.open(name, ON, live=True)
    loop.feed("bad", POSITIONS, louder=4.0)
    loop.feed("good", POSITIONS)
    assert decided(loop.until(has_closed, Closed("good", 1)), "good") == EXPECTED
    assert [name for name, _ in loop.failed] == ["bad"]


class Broken(ReadyEmbeddings):
    """As if its device were lost."""

    consecutive_failures = FAILURES_OF_A_LOST_DEVICE


@pytest.mark.parametrize("make", [Broken])
def test_a_lost_device_ends_the_process(loop: Loop) -> None:
    loop.process.start()
    with pytest.raises(EngineDead, match="speaker labels"):
        loop.until(lambda outputs: False)


def test_the_engine_waits_until_the_models_are_loaded(loop: Loop) -> None:
    loop.process.start()
    loop.process.wait_until_ready()
    loop.tracks.open("s", ON, live=True)
    loop.feed("s", POSITIONS)
    assert decided(loop.until(has_closed, Closed("s", 1)), "s") == EXPECTED


def test_a_process_that_takes_nothing_is_lost(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.process.start()
    loop.process.wait_until_ready()
    assert loop.process.pid is not None
    os.kill(loop.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(background_process, "MAX_QUEUED_MESSAGES", 20)
    loop.tracks.open("s", ON, live=True)
    with pytest.raises(EngineDead, match="accepts no messages"):
        for _ in range(2000):
            loop.feed("s", 20)
            loop.process.send()


def test_the_engine_ends_with_its_process(loop: Loop) -> None:
    loop.tracks.open("s", ON, live=True)
    assert loop.process.pid is not None
    os.kill(loop.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="speaker labels"):
        loop.until(lambda outputs: False)


# Questions about turns


def ask_everything(loop: Loop, name: str, step: int) -> list[Output]:
    """The audio and the messages of a stream with a rule that asks; each message when the one before is answered."""
    fed, outputs = 0, list[Output]()
    for speech in speeches(step, name):
        while fed < len(ITEMS) and ITEMS[fed].sample < speech.end:
            loop.questions.add_audio(name, ITEMS[fed : fed + 1])
            loop.tracks.add_audio(name, ITEMS[fed : fed + 1])
            fed += 1
        outputs += loop.until(lambda found: not loop.questions.is_waiting, *loop.questions.add(speech))
    return outputs


@pytest.mark.parametrize("options", [{}, ON])
@pytest.mark.parametrize("step", [3, 40])
def test_the_answers_are_those_of_the_loop_with_labels_and_without(
    loop: Loop, options: dict[str, str], step: int
) -> None:
    loop.questions.set_rule("s", RULE)
    loop.tracks.open("s", options, live=True)
    found = scores(ask_everything(loop, "s", step))
    assert found == EXPECTED_SCORES


def test_a_stream_that_ends_is_asked_no_more_and_its_name_can_be_used_again(loop: Loop) -> None:
    for _ in range(2):
        loop.questions.set_rule("s", RULE)
        assert scores(ask_everything(loop, "s", 10)) == EXPECTED_SCORES
        loop.questions.close("s")


def test_questions_of_an_overloaded_process_have_no_answer(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_process, "MAX_QUEUED_BYTES", -1)
    loop.questions.set_rule("s", RULE)
    found = scores(ask_everything(loop, "s", 10))
    assert len(found) == len(EXPECTED_SCORES) and {score[3] for score in found} == {None}


def test_too_many_questions_have_no_answer(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_process, "MAX_QUESTIONS", 1)
    audio = SentAudio(loop.process, loop.tracks.has_labels, "s")
    audio.add(ITEMS[:20])
    first, second = audio.ask(10_000), audio.ask(11_000)
    assert isinstance(second.exception(0), RuntimeError)
    loop.until(lambda outputs: first.done())
    third = audio.ask(11_000)
    loop.until(lambda outputs: third.done())
    assert first.result() != third.result()


def fails() -> Answers:
    return Answers(fails=True)


def test_a_turn_detector_that_fails_leaves_questions_without_an_answer() -> None:
    process = BackgroundProcess(SPEC, Recipes(None, fails), WINDOW)
    audio = SentAudio(process, lambda name: False, "s")
    try:
        audio.add(ITEMS[:20])
        question, deadline = audio.ask(10_000), time.monotonic() + PATIENCE_S
        process.send()
        while not question.done() and time.monotonic() < deadline:
            process.take_answers()
            time.sleep(0.005)
        assert isinstance(question.exception(0), RuntimeError)
    finally:
        process.stop()
