"""Streams that resume after their engine was lost, beside a stream that goes on: how much of their audio is encoded
again between two of its steps, and what they say afterwards.

The model is tiny and random, and encodes each frame once. Time is counted in encoded audio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Abort, Closed, Failed, Feed, Finish, Item, Open, Output, StreamState, Text
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import EncoderState, NormPrior, StreamingEncoder, StreamingSpec
from engine.runner.base import never
from engine.runner.windowed.encoders import (
    LONG_FROM_ANCHOR,
    REBUILT_AT_ONCE,
    SAMPLES_PER_POSITION,
    BlockEncoder,
    WindowEncoder,
)
from engine.runner.windowed.runner import WindowedRunner, windowed_spec
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import HostWindows
from engine.server.loop import EngineLoop
from engine.spec import Vocabulary
from tests.engine.client.test_recovery_rebuilding import tiny_model

BLOCK, LOOK_AHEAD = 26, 13
SPEC = StreamingSpec(blocks=(BLOCK,), look_ahead=LOOK_AHEAD, left=40, norm=NormPrior(0.0, -5.84, 75.0))
WINDOW, STREAMS = 60, 3
# Where the engine is lost: nearly all of the longest utterance must be encoded again.
LOST_AT = LONG_FROM_ANCHOR - 5
END = LOST_AT + 40
SECOND = 12


@pytest.fixture(scope="module")
def model() -> Moonshine:
    return tiny_model()


@dataclass
class Work:
    """Counts encoded positions, and is the loop's clock: a position takes as long as its audio lasts. With `limit`
    reached, the encoder fails."""

    positions: float = 0.0
    limit: float = float("inf")

    def now(self) -> int:
        return int(self.positions * 80_000_000)


class CountedEncoder(StreamingEncoder):
    work: Work

    def step(self, audio: Tensor, state: EncoderState) -> tuple[Tensor, EncoderState]:
        self.work.positions += len(audio) / SAMPLES_PER_POSITION
        if self.work.positions > self.work.limit:
            raise RuntimeError("the encoder fails")
        return super().step(audio, state)


class WatchedRunner(WindowedRunner):
    """Notes the work that was done before each step in which the stream `live` is read."""

    work: Work
    marks: list[float]

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        before = self.work.positions
        results = super().compute(plan, time_is_up)
        read = [task for task, result in zip(plan.decode, results, strict=True) if not result.unfinished]
        if any(task.stream == "live" for task in read):
            self.marks += [before, self.work.positions]
        return results


@dataclass
class Engine:
    """A loop without a speech detector: audio goes to the model as it comes."""

    model: Moonshine
    threads: int = 1
    work: Work = field(default_factory=Work)
    texts: dict[str, str] = field(default_factory=lambda: defaultdict(str))
    states: dict[str, StreamState] = field(default_factory=dict)
    ended: dict[str, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pieces = [b"", b"", b""] + [b" w%d" % token if token % 3 else b"x" for token in range(3, 60)]
        policy = Policy(agreed_margin=2.0, lone_margin=4.0, cut_beyond=30.0, doubt=-100.0, tokens_per_second=1.0)
        encoder = CountedEncoder(self.model.encoder, SPEC, BLOCK)
        encoder.work = self.work
        blocks = BlockEncoder(self.model, encoder)
        spec = windowed_spec("tiny", WINDOW, blocks.first_stride)
        streams = STREAMS + 1
        limits = Limits(streams, streams * spec.embeds_for(live=True), step_positions=400, step_embeds=400)
        file_encoder = WindowEncoder(self.model, pieces, policy)
        windows = HostWindows(self.model, blocks, file_encoder, limits.cache_embeds, self.threads)
        self.runner = WatchedRunner(self.model, Vocabulary(pieces), spec, policy, windows)
        self.runner.work, self.runner.marks = self.work, []
        self.loop = EngineLoop(Scheduler(spec, limits, self.runner.vocabulary), self.runner, clock=self.work.now)

    def step(self) -> None:
        """One step, if there is work."""
        if not self.loop.has_work():
            return
        step = self.loop.step()
        self.loop.scheduler.check_integrity()
        for output in [] if step is None else step.outputs:
            if isinstance(output, Text):
                self.texts[output.stream] += output.delta
            elif isinstance(output, StreamState):
                self.states[output.stream] = output
            elif isinstance(output, (Closed, Failed)):
                self.ended[output.stream] = output

    def run(self) -> None:
        while self.loop.has_work():
            self.step()

    def feed(self, name: str, start: int, end: int) -> None:
        self.loop.submit([Feed(name, items(name, start, end))], self.work.now())

    def play(self, name: str, start: int, end: int) -> None:
        """Feed a second at a time, as it is spoken."""
        for at in range(start, end, SECOND):
            self.feed(name, at, min(at + SECOND, end))
            self.run()

    def finish(self, name: str) -> None:
        self.loop.submit([Finish(name)], 0)

    def resume(self, name: str, state: StreamState, heard: int) -> None:
        known = items(name, state.audio_from, state.position)
        again = Open(name, state=structs.replace(state), items=known, catch_up_until=heard)
        self.loop.submit([again, Feed(name, items(name, state.position, heard))], self.work.now())


def items(name: str, start: int, end: int) -> list[Item]:
    sound = sound_of(name)
    found = []
    for at in range(start, end):
        samples = sound[at * SAMPLES_PER_POSITION : (at + 1) * SAMPLES_PER_POSITION]
        found.append(Item(at, 1, at * SAMPLES_PER_POSITION, b"%s-%d" % (name.encode(), at), samples))
    return found


@cache
def sound_of(name: str) -> NDArray[np.float32]:
    """Of the stream `live`; all others have the same."""
    generator = np.random.default_rng(int(name == "live"))
    return generator.normal(0.0, 0.3, 400 * SAMPLES_PER_POSITION).astype(np.float32)


def played(model: Moonshine, name: str, end: int) -> Engine:
    engine = Engine(model)
    engine.loop.submit([Open(name)], 0)
    engine.play(name, 0, end)
    return engine


@pytest.fixture(scope="module")
def lost(model: Moonshine) -> Engine:
    """An engine as it was when it was lost."""
    found = played(model, "lost", LOST_AT)
    state = found.states["lost"]
    anchor = state.parts["runner"]["ear"]["anchor"]
    assert state.position - anchor > 0.8 * LONG_FROM_ANCHOR, "there is little to encode again"
    return found


@pytest.fixture(scope="module")
def calm(model: Moonshine) -> str:
    """The whole text, if no engine is lost."""
    engine = played(model, "lost", END)
    engine.finish("lost")
    engine.run()
    return engine.texts["lost"]


def resume_all(engine: Engine, lost: Engine) -> list[str]:
    names = [f"r{number}" for number in range(STREAMS)]
    for name in names:
        engine.resume(name, lost.states["lost"], LOST_AT + 3)
    return names


@pytest.mark.parametrize("threads", [1, 2])
def test_a_live_stream_waits_for_a_bounded_part_of_those_that_resume(
    model: Moonshine, lost: Engine, calm: str, threads: int
) -> None:
    engine = Engine(model, threads)
    # It reads each of its strides, even if it is late.
    engine.loop.submit([Open("live", catch_up_until=400)], 0)
    engine.play("live", 0, 40)
    engine.runner.marks.clear()
    names = resume_all(engine, lost)
    stride = engine.loop.scheduler.spec.stride_positions
    for at in range(40, 300, stride):
        # Its next audio is always there: the engine has no time to spare.
        engine.feed("live", at, at + stride)
        engine.step()
        engine.step()
    marks = engine.runner.marks
    between = [after - before for before, after in pairwise(marks)]
    assert len(between) > 30 and sum(between) > STREAMS * LOST_AT * 0.8
    assert max(between[1::2]) <= threads * max(REBUILT_AT_ONCE, WINDOW), "between two steps"
    assert max(between[::2]) <= (STREAMS + 1) * WINDOW, "in a step of live streams nothing is rebuilt"
    for name in names:
        engine.play(name, LOST_AT + 3, END)
        engine.finish(name)
    engine.run()
    engine.runner.close()
    assert all(engine.texts[name] and lost.texts["lost"] + engine.texts[name] == calm for name in names)
    assert engine.texts["live"] == played(model, "live", at + stride).texts["live"]


def test_streams_that_resume_are_ready_one_after_the_other(model: Moonshine, lost: Engine) -> None:
    """And the state that is saved of one that waits is the state that it came with."""
    engine = Engine(model)
    names = resume_all(engine, lost)
    engine.step()
    saved = {name: engine.runner.save(engine.loop.scheduler.streams[name].slot, 0, 0) for name in names}
    came = lost.states["lost"].parts["runner"]["ear"]
    assert all(state["ear"] == came and audio_from == came["anchor"] for state, audio_from in saved.values())
    ready: list[list[str]] = []
    while len(ready) < 2 * STREAMS and engine.loop.has_work():
        engine.step()
        waiting = [name for name in names if engine.loop.scheduler.streams[name].computed < LOST_AT]
        if not ready or waiting != ready[-1]:
            ready.append(waiting)
    assert ready == [names, names[1:], names[2:], []]


def test_a_stream_that_ends_while_it_is_rebuilt_leaves_nothing(model: Moonshine, lost: Engine) -> None:
    engine = Engine(model)
    names = resume_all(engine, lost)
    for _ in range(3):
        engine.step()
    engine.loop.submit([Abort(name) for name in names[:-1]], 0)
    engine.step()
    engine.loop.submit([Open("next"), Feed("next", items("lost", 0, SECOND))], 0)
    engine.run()
    assert engine.loop.scheduler.streams.keys() == {"next", names[-1]}
    encoder = engine.runner.windows.stream_encoder(True)
    assert not any(encoder.must_rebuild(stream.slot) for stream in engine.loop.scheduler.streams.values())


def test_an_encoder_that_fails_in_a_rebuild_ends_that_stream_alone(model: Moonshine, lost: Engine, calm: str) -> None:
    engine = Engine(model)
    (name, *others) = resume_all(engine, lost)
    engine.step()
    engine.work.limit = 0.0
    while name not in engine.ended:
        engine.step()
    engine.work.limit = float("inf")
    for other in others:
        engine.play(other, LOST_AT + 3, END)
        engine.finish(other)
    engine.run()
    assert isinstance(engine.ended[name], Failed)
    assert all(lost.texts["lost"] + engine.texts[other] == calm for other in others)


@pytest.mark.parametrize("steps", range(5, 12))
def test_streams_that_resume_at_different_times_lose_nothing(model: Moonshine, calm: str, steps: int) -> None:
    """The first one may be read to its end in a step that has only the second one in its plan."""
    at = 189
    lost = played(model, "lost", at)
    engine = Engine(model, threads=2)
    for name in ("first", "second"):
        engine.resume(name, lost.states["lost"], at + 30)
        for _ in range(steps):
            engine.step()
    for name in ("first", "second"):
        engine.play(name, at + 30, END)
        engine.finish(name)
    engine.run()
    engine.runner.close()
    assert [lost.texts["lost"] + engine.texts[name] for name in ("first", "second")] == [calm, calm]
