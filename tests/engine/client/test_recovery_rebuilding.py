"""A stream of a windowed model that loses its engine keeps its text and its times.

Engines are loops in this process, and time is compressed: after each packet of audio the loop runs until it is idle.
A death throws the loop away, mostly in the middle of something, with outputs that were not received.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray

from audio.containers import read_file
from engine.boundary import codec
from engine.boundary.codec import Status
from engine.boundary.replay import StreamLimits
from engine.client.link import PacedSource
from engine.client.stream import EngineStream
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Closed, Command, Feed, Item, Open, Output, TurnRule
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.moonshine_streaming import NormPrior, StreamingEncoder, StreamingSpec
from engine.options import Keyword, keywords_text
from engine.runner.base import Embedder, TurnDetector
from engine.runner.bias import KeywordTree
from engine.runner.load import load_detector
from engine.runner.windowed.encoders import BlockEncoder, StreamEncoder, WindowEncoder
from engine.runner.windowed.runner import WindowedRunner, windowed_spec
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import HostWindows
from engine.server.loop import EngineLoop
from engine.server.speech_track import GateSettings
from engine.spec import Vocabulary
from engine.weights.checkpoint import load_speech_model
from engine.weights.store import pull
from tests.cached_models import skip_unless_cached
from tests.engine import fakes
from tests.engine.server import test_skipped_silence as silence_cut

PACKET = 1280
REAL_MODEL, REAL_SPEECH = "moonshine-tiny", "sample-two-cities"


class LocalLink:
    """A link to a loop in this process; what the loop says comes back as it would from the wire."""

    has_room = True

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.status = Status()

    def send(self, command: Command, items: list[Item] | None = None) -> None:
        carried = [structs.replace(item) for item in items or []]
        if isinstance(command, (Open, Feed)):
            command = structs.replace(command, items=carried)
        self.loop.submit([command], 0)

    def send_paced(self, source: PacedSource) -> None:
        while (piece := source.next_piece()) is not None:
            self.send(cast(Command, piece[0]), piece[1])

    def step(self) -> list[Output]:
        result = self.loop.step()
        outputs = [] if result is None else result.outputs
        update = codec.Update(1, 0, outputs, [], codec.Status())
        received = codec.decode(codec.encode(update), to_engine=False)
        outputs: list[Output] = received.outputs
        return outputs


@dataclass(frozen=True)
class EngineDeath:
    """Before this packet is heard the loop dies: after so many steps whose outputs are lost, for so many packets."""

    packet: int
    steps: int
    away: int


class Session:
    """One stream, its reader, and the loop that carries it at the moment."""

    def __init__(
        self, build: Callable[[], EngineLoop], options: dict[str, str] | None = None, turns: TurnRule | None = None
    ) -> None:
        self.build = build
        self.link: LocalLink | None = None
        spec = build().scheduler.spec
        self.stream = EngineStream(
            Open("s", options=options or {}, turns=turns), spec, StreamLimits(2000, 2000), lambda stream: None
        )
        self.transcript = fakes.Transcript()
        self.most_kept = 0

    async def start(self) -> None:
        self.link = LocalLink(self.build())
        opening = asyncio.create_task(self.stream.open_on(cast(Any, self.link)))
        await asyncio.sleep(0)
        self.run()
        await opening

    def run(self) -> None:
        assert self.link is not None
        while self.link.loop.has_work():
            for output in self.link.step():
                self.stream.on_output(output)
        for name in self.link.loop.scheduler.streams:
            self.stream.progress(self.link.loop.progress_of(name))
        self.link.loop.scheduler.check_integrity()
        self.most_kept = max(self.most_kept, len(self.stream.replay_log))

    def die(self, steps: int) -> None:
        assert self.link is not None
        for _ in range(steps):
            if self.link.loop.has_work():
                self.link.step()
        self.link = None
        self.stream.detach("killed", 0.0)


class Fate:
    """Has the engine of a session die in its packets, and another one begin some packets later."""

    def __init__(self, session: Session, deaths: list[EngineDeath]) -> None:
        self._session = session
        self._waiting, self._back_at = sorted(deaths, key=lambda death: -death.packet), -1

    async def look(self, number: int) -> None:
        session = self._session
        if session.link is not None and self._waiting and self._waiting[-1].packet <= number:
            death = self._waiting.pop()
            session.die(death.steps)
            self._back_at = number + death.away
        if session.link is None and number >= self._back_at:
            await session.start()


async def play(
    build: Callable[[], EngineLoop],
    audio: NDArray[np.float32],
    flushes: set[int],
    deaths: list[EngineDeath],
    options: dict[str, str] | None = None,
    turns: TurnRule | None = None,
) -> Session:
    session = Session(build, options, turns)
    await session.start()
    reader = asyncio.create_task(session.transcript.collect(session.stream))
    fate = Fate(session, deaths)
    for number in range(-(-len(audio) // PACKET)):
        await session.stream.feed(audio[number * PACKET : (number + 1) * PACKET])
        if number in flushes:
            await session.stream.flush()
        await fate.look(number)
        if session.link is not None:
            session.run()
        await asyncio.sleep(0)
    await session.stream.finish()
    if session.link is None:
        await session.start()
    session.run()
    await reader
    assert isinstance(session.transcript.last, Closed)
    return session


def same(one: fakes.Transcript, other: fakes.Transcript) -> None:
    assert one.text == other.text
    assert one.words == other.words
    assert one.tags == other.tags
    assert one.speech == other.speech
    assert one.last == other.last


# A tiny model with random weights: what it says means nothing, but depends on everything.


@cache
def tiny_model() -> Moonshine:
    torch.manual_seed(4)
    model = Moonshine(MoonshineConfig(32, 64, 1, 2, 4, 8, 10_000.0, 60, start_token=1, end_token=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


BLOCKS = StreamingSpec(blocks=(6,), look_ahead=3, left=40, norm=NormPrior(0.0, -5.84, 75.0))


def window_ear(pieces: list[bytes], policy: Policy) -> StreamEncoder:
    return WindowEncoder(tiny_model(), pieces, policy)


def block_ear(pieces: list[bytes], policy: Policy) -> StreamEncoder:
    """Encodes each frame once."""
    return BlockEncoder(tiny_model(), StreamingEncoder(tiny_model().encoder, BLOCKS, 6))


def build_with(
    ear: Callable[[list[bytes], Policy], StreamEncoder],
    embedder: Embedder | None = None,
    turn_detector: TurnDetector | None = None,
) -> EngineLoop:
    kinds = [b"\xc3", b" w%d", b".", b" w%d", b"\xc3\xa4", b","]
    pieces = [b"", b"", b""] + [kinds[token % 6].replace(b"%d", b"%d" % token) for token in range(3, 60)]
    spec = windowed_spec("tiny", 40, 5)
    policy = Policy(agreed_margin=2.0, lone_margin=4.0, cut_beyond=30.0, doubt=-100.0)
    file_encoder = WindowEncoder(tiny_model(), pieces, policy)
    windows = HostWindows(tiny_model(), ear(pieces, policy), file_encoder, 400)
    runner = WindowedRunner(tiny_model(), Vocabulary(pieces), spec, policy, windows)
    limits = Limits(max_streams=2, cache_embeds=400)
    detector = fakes.FakeDetector(frame=512)
    scheduler = Scheduler(spec, limits, runner.vocabulary)
    return EngineLoop(scheduler, runner, detector, GateSettings(), embedder=embedder, turn_detector=turn_detector)


Build = Callable[[], EngineLoop]


@pytest.fixture(params=[window_ear, block_ear])
def build_tiny(request: pytest.FixtureRequest) -> Build:
    """An engine of a tiny model that encodes its window again and again, or each frame once."""
    return partial(build_with, request.param)


def utterances(seed: int, count: int) -> NDArray[np.float32]:
    """Noise, loud and soft in turns, of any lengths."""
    chance = np.random.default_rng(seed)
    parts = []
    for _ in range(count):
        for loudness in (1.4, 0.01):
            size = int(chance.uniform(0.2, 6.0) * 16_000)
            parts.append(loudness * chance.standard_normal(size, dtype=np.float32))
    return np.concatenate(parts)


@pytest.mark.parametrize("seed", range(4))
async def test_the_words_are_the_same_wherever_the_engine_dies(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    audio = utterances(seed, 4)
    packets, chance = len(audio) // PACKET, random.Random(seed)
    flushes = set(chance.sample(range(packets), 4))
    # Half of them expect a few words, which change what is said.
    options = {"keywords": keywords_text([Keyword(f"w{token}", 10.0) for token in range(7, 33, 2)])} if seed % 2 else {}
    choose, changed = KeywordTree.choose, []

    def watched(tree: KeywordTree, state: int, logits: NDArray[np.float32], best: int) -> int:
        token = choose(tree, state, logits, best)
        changed.append(token != best)
        return token

    monkeypatch.setattr(KeywordTree, "choose", watched)
    calm = await play(build_tiny, audio, flushes, [], options)
    assert len(calm.transcript.text) > 10
    assert any(changed) == bool(options)
    deaths = [
        EngineDeath(packet, chance.randrange(4), chance.choice([0, 1, 7, 40]))
        for packet in chance.sample(range(packets), packets // 8)
    ]
    same((await play(build_tiny, audio, flushes, deaths, options)).transcript, calm.transcript)


async def test_an_engine_that_dies_at_every_packet_gets_through(build_tiny: Build) -> None:
    audio = utterances(7, 2)
    calm = await play(build_tiny, audio, set(), [])
    deaths = [EngineDeath(packet, packet % 3, 0) for packet in range(len(audio) // PACKET)]
    same((await play(build_tiny, audio, set(), deaths)).transcript, calm.transcript)


async def test_a_stream_that_goes_on_from_a_saved_state_is_in_that_very_state(build_tiny: Build) -> None:
    audio, session = utterances(7, 2), Session(build_tiny)
    await session.start()
    seen = set()
    for number in range(len(audio) // PACKET):
        await session.stream.feed(audio[number * PACKET : (number + 1) * PACKET])
        session.run()
        replay = session.stream._replay_state.replay(session.stream.replay_log)
        if replay.state is None or replay.state.position != session.stream.replay_log.end:
            continue
        link = LocalLink(build_tiny())
        link.send(Open("s", state=replay.state), replay.before_state)
        link.step()
        states = link.loop._states
        assert states is not None
        assert msgspec.msgpack.encode(states._save("s")) == msgspec.msgpack.encode(replay.state)
        seen.add((replay.state.parts["gate"]["state"], bool(replay.state.parts["runner"]["committed"])))
    assert {("OPEN", True), ("QUIET", False)} <= seen


async def test_what_is_kept_of_a_windowed_stream_is_bounded(build_tiny: Build) -> None:
    """A window, the utterance before it, and what comes between two saved states; not the session."""
    session = await play(build_tiny, utterances(8, 12), set(), [])
    assert session.most_kept <= 40 + 25 + 25 + 80


# The embedded model and a person who reads.


@cache
def real_parts() -> tuple[Any, list[bytes]]:
    model, pieces = load_speech_model(pull(REAL_MODEL))
    model.quantise()
    return model, pieces


def build_real() -> EngineLoop:
    model, pieces = real_parts()
    spec = windowed_spec(REAL_MODEL, 192, 10)
    limits = Limits(max_streams=2, cache_embeds=1024)
    ear = WindowEncoder(model, pieces, Policy())
    file_encoder = WindowEncoder(model, pieces, Policy())
    windows = HostWindows(model, ear, file_encoder, limits.cache_embeds)
    runner = WindowedRunner(model, Vocabulary(pieces), spec, Policy(), windows)
    return EngineLoop(Scheduler(spec, limits, runner.vocabulary), runner, load_detector(runner, 2), GateSettings())


async def test_real_speech_is_the_same_after_twenty_deaths() -> None:
    skip_unless_cached(REAL_MODEL, REAL_SPEECH)
    audio = np.concatenate(list(read_file(pull(REAL_SPEECH))))[: 20 * 16_000]
    packets, chance = len(audio) // PACKET, random.Random(1)
    calm = await play(build_real, audio, {170}, [])
    assert len(calm.transcript.words) > 30
    deaths = [
        EngineDeath(packet, chance.randrange(3), chance.choice([0, 2, 12]))
        for packet in chance.sample(range(packets), 20)
    ]
    same((await play(build_real, audio, {170}, deaths)).transcript, calm.transcript)


# Turns that end at a pause: when the gateway's message comes makes no difference.


async def said_with_a_flush_at(moment: float, build: Build) -> fakes.Transcript:
    """Two seconds of noise, a pause, and more noise, in packets that are not whole positions."""
    chance = np.random.default_rng(3)
    loudness = np.repeat([1.4, 0.01, 1.4, 0.01], [32_000, 14_400, 32_000, 16_000])
    audio = (loudness * chance.standard_normal(len(loudness))).astype(np.float32)
    session = Session(build)
    await session.start()
    reader = asyncio.create_task(session.transcript.collect(session.stream))
    flushed = False
    for start in range(0, len(audio), 1_000):
        await session.stream.feed(audio[start : start + 1_000])
        if start >= moment * 16_000 and not flushed:
            await session.stream.flush(pause=35_000)
            flushed = True
        session.run()
    await session.stream.finish()
    session.run()
    await reader
    return session.transcript


async def test_a_flush_at_a_pause_changes_no_word_whenever_it_comes(build_tiny: Build) -> None:
    first, *others = [await said_with_a_flush_at(moment, build_tiny) for moment in (2.2, 2.31, 2.4, 2.55, 2.7)]
    assert len(first.words) > 3 and first.tags == [1]
    for other in others:
        assert (other.text, other.words) == (first.text, first.words)


# A frame-synchronous model whose silences are cut out.


@pytest.mark.parametrize("seed", range(3))
async def test_silence_that_was_cut_out_is_cut_again_by_another_engine(seed: int) -> None:
    audio, chance = silence_cut.conversation(seed + 20, turns=4), random.Random(seed)
    packets = len(audio) // 1280
    flushes = set(chance.sample(range(packets), 2))
    calm = (await play(silence_cut.build, audio, flushes, [])).transcript
    deaths = [EngineDeath(packet, chance.randrange(4), chance.choice([0, 1, 3])) for packet in range(1, packets, 3)]
    found = (await play(silence_cut.build, audio, flushes, deaths)).transcript
    assert (found.text, found.words, found.tags, found.last) == (calm.text, calm.words, calm.tags, calm.last)
    assert len(calm.words) > 5
