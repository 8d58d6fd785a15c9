"""Sessions and uploads played into a real loop with a stand-in model: causal, complete, and failures are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import playing
from benchmarks.measuring import RunFailed
from benchmarks.playing import Played, Run, VirtualClock
from benchmarks.recordings import Clip, Part, Session
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Feed, Finish, Open, Speech
from engine.runner.base import Detector, SynchronousRunner, never
from engine.server.loop import EngineLoop
from engine.spec import ModelSpec, Vocabulary

POSITION_SECONDS = 0.08
SPEC = ModelSpec("stand-in", 16_000, 1280, default_delay_positions=2, max_delay_positions=2)


class EveryFifth(SynchronousRunner):
    """Says a word at every fifth position."""

    def __init__(self, broken: str = "") -> None:
        self.spec = SPEC
        self.vocabulary = Vocabulary([b"", b" tick"])
        self._broken = broken

    def check_open(self, message: Open) -> None:
        pass

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        if self._broken == "dead":
            raise RuntimeError("out of luck")
        if self._broken == "failed":
            return [DecodeResult(error="out of tune") for _ in plan.decode]
        return [
            DecodeResult([int(position % 5 == 2) for position in range(task.start, task.end)]) for task in plan.decode
        ]


class Ears(Detector):
    """Hears speech in every frame."""

    def open(self, stream: str, sample: int = 0) -> None:
        pass

    def close(self, stream: str) -> None:
        pass

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Callable[[], list[Speech]]:
        return lambda: [Speech(stream, 0, 512, [0.9] * (len(samples) // 512)) for stream, samples in batch]

    def pass_silence(self, stream: str, samples: int) -> Speech:
        return Speech(stream, 0, samples, [0.0])


def make_loop(broken: str = "") -> EngineLoop:
    runner = EveryFifth(broken)
    scheduler = Scheduler(SPEC, Limits(max_streams=8, cache_embeds=256), runner.vocabulary)
    return EngineLoop(scheduler, runner, Ears())


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Three sessions of different length, without files."""
    lengths = {"a": 3.0, "b": 2.01, "c": 0.9, "long": 70.0}

    def load(session: Session) -> tuple[NDArray[np.float32], list[Part]]:
        seconds = lengths[session.name]
        samples = np.random.default_rng(0).standard_normal(round(seconds * 16_000)).astype(np.float32)
        return samples, [Part(session.clips[0], 0.0, seconds)]

    monkeypatch.setattr(playing.Session, "load", load)
    return [Session(name, (Clip(Path(name), "tick", 1.0, "clips"),)) for name in "abc"]


def play(sessions: list[Session], streams: int, broken: str = "") -> list[Played]:
    return Run(make_loop(broken), streams).play(sessions)


def send(sessions: list[Session], at_once: int, broken: str = "") -> list[Played]:
    return Run(make_loop(broken), at_once, live=False).play(sessions)


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_every_session_is_heard_to_its_end(sessions: list[Session], streams: int) -> None:
    runs = play(sessions, streams)
    assert sorted(run.session.name for run in runs) == ["a", "b", "c"]
    for run in runs:
        # A word at positions 2, 7, 12 ...: audio that began two positions before.
        positions = int(np.ceil(run.seconds / POSITION_SECONDS))
        assert run.emissions.text == " tick" * ((positions + 4) // 5)
        assert run.closed_at is not None and run.closed_at >= run.seconds
        assert run.probabilities


@pytest.mark.parametrize("streams", [1, 3])
def test_no_word_is_shown_before_it_was_heard(sessions: list[Session], streams: int) -> None:
    for run in play(sessions, streams):
        for word in run.emissions.shown():
            spoken_by = min(word.end + 2 * POSITION_SECONDS, run.seconds)
            assert word.shown_at >= spoken_by - 1e-6


def test_one_stream_at_a_time_means_one_after_the_other(sessions: list[Session]) -> None:
    assert [run.session.name for run in play(sessions, streams=1)] == ["a", "b", "c"]
    assert [run.session.name for run in play(sessions, streams=3)] == ["c", "b", "a"]


@pytest.mark.parametrize(("broken", "message"), [("dead", "out of luck"), ("failed", "out of tune")])
def test_an_engine_that_fails_ends_the_run(sessions: list[Session], broken: str, message: str) -> None:
    for start in (play, send):
        with pytest.raises(RunFailed, match=message):
            start(sessions, 2, broken)


def test_more_streams_than_the_engine_has_room_for_are_an_error(sessions: list[Session]) -> None:
    runner = EveryFifth()
    scheduler = Scheduler(SPEC, Limits(max_streams=1, cache_embeds=64), runner.vocabulary)
    with pytest.raises(RunFailed, match="'b'"):
        Run(EngineLoop(scheduler, runner), 2).play(sessions)


def test_virtual_time_moves_by_work_and_jumps_over_idleness() -> None:
    clock = VirtualClock()

    def work() -> str:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        return "done"

    assert clock.run(work) == "done"
    assert clock.now == pytest.approx(clock.cpu_seconds, rel=0.01) and clock.cpu_seconds >= 0.02
    assert clock.now <= clock.cpu_seconds, "the smaller of the two clocks"
    began = time.perf_counter()
    clock.wait_until(3600.0)
    assert clock.now == 3600.0
    clock.wait_until(1.0)
    assert clock.now == 3600.0
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_upload_is_heard_to_its_end(sessions: list[Session], at_once: int) -> None:
    long = Session("long", (Clip(Path("long"), "tick", 70.0, "clips"),), 0.0)
    runs = send([*sessions, long], at_once)
    assert sorted(run.seconds for run in runs) == [0.9, 2.01, 3.0, 70.0]
    for run in runs:
        # The model says a word at positions 2, 7, 12 ... of 80 ms.
        positions = int(np.ceil(run.seconds / POSITION_SECONDS))
        assert run.emissions.text == " tick" * ((positions + 4) // 5)
        assert len(run.emissions.words) == (positions + 4) // 5


def test_uploads_send_no_more_than_may_wait(sessions: list[Session]) -> None:
    player = playing.Player(Session("long", sessions[0].clips, 0.0), SPEC, 0.0, live=False)
    opened, *fed = player.due(0.0, computed=0)
    assert isinstance(opened, Open) and not opened.live
    ends = [command.items[-1].offset + command.items[-1].length for command in fed if isinstance(command, Feed)]
    # A minute may wait, 750 positions; a second of audio is 12.5 of them.
    assert 750 <= ends[-1] < 750 + 13 and not list(player.due(0.0, computed=0))
    assert isinstance(list(player.due(0.0, computed=ends[-1]))[-1], Finish)
