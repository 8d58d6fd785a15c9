"""Engines whose words are a pure function of the audio, so that transcripts can be compared exactly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.boundary.items import hash_payload, split_item
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import EngineHandle, EngineProcess
from engine.client.stream import EngineStream
from engine.core.plan import SILENCE_ROW, DecodeResult, DecodeTask, OpenTask, StepPlan, TimedToken
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Flushed, Item, Open, Output, Saved, Speech, Text, Word
from engine.options import Options
from engine.runner.base import Detector, SynchronousRunner, never
from engine.server.loop import EngineLoop
from engine.server.main import Build
from engine.spec import ModelSpec, Vocabulary

RATE = 1600
POSITION = 128
FRAME = 64
# A sample value that no other audio has: an engine that computes it crashes.
POISON = np.float32(77.0)

FRAMES = ModelSpec(
    name="fake-frames",
    sample_rate=RATE,
    samples_per_position=POSITION,
    look_back_samples=68,
    look_ahead_samples=4,
    prefix_positions=3,
    flush_positions=2,
    default_delay_positions=2,
    max_delay_positions=10,
    step_positions=4,
    replay_positions=16,
    embeds_per_stream=64,
    options=Options(languages=("en",)),
)
WINDOWED = ModelSpec(
    name="fake-windowed",
    sample_rate=RATE,
    samples_per_position=POSITION,
    rereads_window=True,
    stride_positions=3,
    window_positions=40,
    step_positions=40,
    embeds_per_stream=100,
    options=Options(languages=("en",)),
)
VOCABULARY = Vocabulary([b"", *(b" w%d" % i for i in range(1, 82))])


def single_items(items: Iterable[Item], spec: ModelSpec) -> list[Item]:
    """The items with joined audio taken apart: one item for each position, with the key that it has alone."""
    found = []
    for item in map(copy, items):
        while item.length > 1 and item.payload is not None:
            first, item = split_item(item, 1, spec)
            first.key = hash_payload(first.payload)
            found.append(first)
        if item.payload is not None:
            item.key = hash_payload(item.payload)
        found.append(item)
    return found


@dataclass
class FakeFrames(SynchronousRunner):
    """One token per position, from the position's audio and the token before it."""

    spec: ModelSpec = FRAMES
    vocabulary: Vocabulary = VOCABULARY
    die_with: int | None = None
    step_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    rows: dict[int, int] = field(default_factory=dict)
    slots: dict[int, Any] = field(default_factory=dict)

    def check_open(self, message: Open) -> None:
        self.spec.options.check(message.options)

    def warm_up(self) -> None:
        self.is_warm = True

    def close(self) -> None:
        self.rows.clear()

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        time.sleep(self.step_seconds)
        if self.warm_up_seconds and not getattr(self, "is_warm", False):
            time.sleep(self.warm_up_seconds)
            self.is_warm = True
        for slot in plan.closed:
            self.slots.pop(slot, None)
        for opened in plan.opened:
            self.slots[opened.slot] = self.new_state(opened)
        for task in plan.encode:
            self.encode(task.payload, task.rows)
        return [self.decode(task) for task in plan.decode]

    def new_state(self, opened: OpenTask) -> Any:
        return {"previous": 0, "forced": list(opened.forced_tokens[::-1])}

    def encode(self, payload: NDArray[np.float32], rows: list[int]) -> None:
        if self.die_with is not None and (payload == POISON).any():
            os.kill(os.getpid(), self.die_with)
            while True:  # until it has died of it
                time.sleep(0.1)
        size, around = self.spec.samples_per_position, self.spec.look_back_samples + self.spec.look_ahead_samples
        for index, row in enumerate(rows):
            window = payload[index * size : (index + 1) * size + around] if payload.ndim == 1 else payload
            self.rows[row] = zlib.crc32(window.tobytes()) if window.any() else 0

    def decode(self, task: DecodeTask) -> DecodeResult:
        state = self.slots[task.slot]
        tokens = []
        for row in task.rows:
            if state["forced"]:
                token = state["forced"].pop()
            else:
                value = 0 if row == SILENCE_ROW else self.rows[row]
                mixed = zlib.crc32(b"%d %d" % (value, state["previous"]))
                token = 0 if value == 0 or mixed % 3 == 0 else mixed % len(VOCABULARY.pieces)
            state["previous"] = token
            tokens.append(token)
        return DecodeResult(tokens=tokens)


@dataclass
class LaunchingFrames(FakeFrames):
    """A device with a queue: launched plans are computed in order, at random times or when results are collected."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    queue: deque[tuple[StepPlan, list[DecodeResult]]] = field(default_factory=deque)
    overlaps_steps = True
    # The largest number of uncollected plans when another one was launched.
    most_ahead: int = 0
    unasked: int = 0

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        self.most_ahead = max(self.most_ahead, self.unasked)
        self.unasked += 1
        results: list[DecodeResult] = []
        self.queue.append((plan, results))
        for _ in range(self.chance.randint(0, len(self.queue))):
            self.compute_next()

        def answers() -> list[DecodeResult]:
            self.unasked -= 1
            while any(mine is results for _, mine in self.queue):
                self.compute_next()
            return results

        return answers

    def compute_next(self) -> None:
        plan, results = self.queue.popleft()
        results += self.compute(plan)


@dataclass
class FakeWindowed(FakeFrames):
    """Reads its window again and again; commits what is not too near its end, and keeps some of it."""

    spec: ModelSpec = WINDOWED
    saves_state = True
    edge: int = 4
    overlap: int = 9

    def new_state(self, opened: OpenTask) -> Any:
        return {"done": 0} if opened.saved is None else dict(opened.saved)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        return dict(self.slots.get(slot, {"done": 0})), base

    def decode(self, task: DecodeTask) -> DecodeResult:
        state = self.slots[task.slot]
        stop = task.end if task.final else task.end - self.edge
        timed = []
        for position in range(max(task.base, state["done"]), stop):
            row = task.rows[position - task.base]
            value = 0 if row == SILENCE_ROW else self.rows[row]
            if value % 3 == 1:
                timed.append(TimedToken(1 + value % 79, position, position + 1))
        state["done"] = max(state["done"], stop)
        return DecodeResult(timed=timed, keep_from=max(task.base, stop - self.overlap))


@dataclass
class FakeDetector(Detector):
    """The probability of speech in a frame is a function of the frame."""

    frame: int = FRAME
    ears: dict[str, tuple[int, NDArray[np.float32]]] = field(default_factory=dict)

    def open(self, stream: str, sample: int = 0) -> None:
        self.ears[stream] = (sample, np.zeros(0, np.float32))

    def close(self, stream: str) -> None:
        self.ears.pop(stream, None)

    def pass_silence(self, stream: str, samples: int) -> Speech:
        start, rest = self.ears[stream]
        self.ears[stream] = (start + samples, rest)
        return Speech(stream, start, samples, [0.0])

    def save(self, stream: str) -> Saved:
        sample, rest = self.ears[stream]
        return {"sample": sample, "rest": rest.tobytes()}

    def resume(self, stream: str, saved: Saved) -> None:
        self.ears[stream] = saved["sample"], np.frombuffer(saved["rest"], np.float32)

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Callable[[], list[Speech]]:
        found = self.listen(batch)
        return lambda: found

    def listen(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        found = []
        for stream, samples in batch:
            start, rest = self.ears[stream]
            rest = np.concatenate([rest, samples])
            frames = len(rest) // self.frame
            self.ears[stream] = (start + frames * self.frame, rest[frames * self.frame :])
            if frames:
                loud = np.abs(rest[: frames * self.frame]).reshape(frames, self.frame).mean(axis=1)
                found.append(Speech(stream, start, self.frame, [float(value) for value in np.minimum(loud, 1)]))
        return found


@dataclass
class LaunchingFakeDetector(FakeDetector):
    """Listens at once and answers when it is asked, but not for a stream that was closed meanwhile."""

    overlaps_steps = True
    openings: dict[str, object] = field(default_factory=dict)

    def open(self, stream: str, sample: int = 0) -> None:
        super().open(stream, sample)
        self.openings[stream] = object()

    def close(self, stream: str) -> None:
        super().close(stream)
        self.openings.pop(stream, None)

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Callable[[], list[Speech]]:
        found = [(self.openings[speech.stream], speech) for speech in self.listen(batch)]
        return lambda: [speech for opening, speech in found if self.openings.get(speech.stream) is opening]


def build(
    windowed: bool = False,
    max_streams: int = 32,
    die_with: int | None = None,
    step_seconds: float = 0.0,
    warm_up_seconds: float = 0.0,
    name: str | None = None,
    detects: bool = False,
    weights: str = "",
) -> EngineLoop:
    kind = FakeWindowed if windowed else FakeFrames
    runner = kind(die_with=die_with, step_seconds=step_seconds, warm_up_seconds=warm_up_seconds)
    runner.spec = replace(runner.spec, name=name or runner.spec.name, weights=weights)
    limits = Limits(max_streams=max_streams, cache_embeds=max_streams * 100 + 100)
    return EngineLoop(Scheduler(runner.spec, limits, VOCABULARY), runner, FakeDetector() if detects else None)


def process(build: Build, address: str | None = None) -> EngineProcess:
    """An engine process without the modules of real models."""
    return EngineProcess(build, address, preload=())


def speech(seconds: float, seed: int) -> NDArray[np.float32]:
    """Audio unlike any other seed's."""
    return np.random.default_rng(seed).standard_normal(int(seconds * RATE), dtype=np.float32)


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@dataclass
class Transcript:
    """Everything a stream said."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(output.delta for output in self.outputs if isinstance(output, Text))

    @property
    def words(self) -> list[Word]:
        return [word for output in self.outputs if isinstance(output, Text) for word in output.words]

    @property
    def tags(self) -> list[int]:
        return [output.tag for output in self.outputs if isinstance(output, Flushed)]

    @property
    def speech(self) -> list[tuple[int, float]]:
        """Each frame's first sample and probability."""
        return [
            (output.sample + i * output.frame_samples, round(probability, 5))
            for output in self.outputs
            if isinstance(output, Speech)
            for i, probability in enumerate(output.probabilities)
        ]

    @property
    def last(self) -> Output:
        return self.outputs[-1]

    async def collect(self, stream: EngineStream) -> None:
        async for output in stream:
            self.outputs.append(output)


async def transcribe(
    client: EngineClient,
    name: str,
    audio: NDArray[np.float32],
    between: Callable[[int], Awaitable[None]] | None = None,
    flush_every: int = 40,
    **options: Any,
) -> Transcript:
    """Feed a whole session in pieces of uneven size, with a flush now and then; what came back."""
    stream = await client.open(name, **options)
    transcript = Transcript()
    reader = asyncio.create_task(transcript.collect(stream))
    start, count = 0, 0
    while start < len(audio):
        size = 100 + 37 * (count % 5)
        await stream.feed(audio[start : start + size])
        start, count = start + size, count + 1
        if count % flush_every == 0:
            await stream.flush()
        if between is not None:
            await between(count)
    await stream.finish()
    await reader
    return transcript


@contextlib.asynccontextmanager
async def running(*engines: EngineHandle, **settings: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(engines, ClientSettings(**settings))
    await client.start()
    try:
        await client.wait_until_ready()
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    """Look now and then: what tests wait for has no event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
