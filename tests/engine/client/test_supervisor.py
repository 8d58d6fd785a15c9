"""Any order of deaths, refusals, slow answers, aborts, ends: each stream continues or ends, and no text is doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.boundary import codec
from engine.boundary.crash_suspects import STRIKES_AFTER_CRASH, StreamInStep
from engine.boundary.items import make_cutter, prepare
from engine.boundary.replay import StreamLimits
from engine.client import recovery, supervisor
from engine.client.client import ClientSettings, EngineClient
from engine.client.pool import EnginePool, PooledEngine
from engine.client.recovery import Recovery
from engine.client.stream import EngineStream
from engine.core import scheduler
from engine.core.plan import Moves
from engine.core.scheduler import Limits, Scheduler
from engine.errors import EngineUnreachable
from engine.messages import Abort, Closed, Dead, Feed, Finish, Flush, Item, Open, Opened, Speech
from engine.server.loop import EngineLoop
from engine.spec import KvGroup
from tests.engine import fakes
from tests.engine.client.loop_links import LoopEngine, LoopLink

STREAMS, ENGINES = 3, 2
PIECE_SECONDS = 0.3
# Events of a stream, of an engine, and of neither.
TO_A_STREAM = ("feed", "flush", "finish", "abort")
TO_AN_ENGINE = ("kill", "revive", "break_link", "fill", "empty", "take_in", "step", "run", "drain", "stay")
Event = tuple[str, int]

events = st.one_of(
    st.tuples(st.sampled_from(TO_A_STREAM), st.integers(0, STREAMS - 1)),
    st.tuples(st.sampled_from(TO_AN_ENGINE), st.integers(0, ENGINES - 1)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "EngineLink", LoopLink)
    monkeypatch.setattr(supervisor, "MIN_BACKOFF_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.001)
    monkeypatch.setattr(recovery, "RETRY_S", 0.001)
    monkeypatch.setattr(recovery, "MIGRATION_POLL_SECONDS", 0.0)
    yield
    LoopEngine.known.clear()


def place_of(running: supervisor.Supervisor, stream: EngineStream) -> str:
    """The one place where the stream is: with the recovery, on an engine, or nowhere any more."""
    waits = running.recovery
    kinds = {"held": waits.held, "waiting": waits.waiting, "being reopened": waits.reopening}
    places = [name for name, streams in kinds.items() if stream in streams]
    pool = [pooled for pooled in running.pool.all if pooled.streams.get(stream.id) is stream]
    if not stream.is_open:
        assert not places and not pool, f"stream {stream.id} has ended and is {places}, on {len(pool)} engines"
        return "ended"
    if places != ["being reopened"]:
        places += ["on an engine"] * len(pool)
    assert len(places) == 1 and len(pool) <= 1, f"stream {stream.id} is {places}, on {len(pool)} engines"
    return places[0]


class Play:
    """Some streams over some engines, and what was done to each stream."""

    def __init__(self, spares: int = 0, build: Callable[[], EngineLoop] = fakes.build) -> None:
        self.engines = [LoopEngine(f"e{number}", build) for number in range(ENGINES)]
        self.client = EngineClient(self.engines, ClientSettings(recovery_timeout_s=600, spares=spares))
        self.streams: list[EngineStream] = []
        self.transcripts = [fakes.Transcript() for _ in range(STREAMS)]
        self.readers: list[asyncio.Task[None]] = []
        self.done: list[list[str]] = [[] for _ in range(STREAMS)]

    async def start(self) -> None:
        await self.client.start()
        for number in range(STREAMS):
            opening = asyncio.create_task(self.client.open(f"s{number}"))
            while not opening.done():
                self.run_all()
                await asyncio.sleep(0)
            self.streams.append(opening.result())
            self.readers.append(asyncio.create_task(self.transcripts[number].collect(self.streams[-1])))

    async def happen(self, what: str, number: int) -> None:
        if what in TO_A_STREAM:
            await self._to_stream(what, number)
        elif what in TO_AN_ENGINE:
            self._to_engine(what, self.engines[number])
        else:
            await self.turns(number)

    async def _to_stream(self, what: str, number: int) -> None:
        stream, done = self.streams[number], self.done[number]
        if "abort" in done or ("finish" in done and what != "abort"):
            return
        done.append(what)
        match what:
            case "feed":
                await stream.feed(fakes.speech(PIECE_SECONDS, 100 * number + len(done)))
            case "flush":
                await stream.flush()
            case "finish":
                await stream.finish()
            case "abort":
                await stream.abort()

    def _to_engine(self, what: str, engine: LoopEngine) -> None:
        match what:
            case "fill" | "empty":
                engine.full = what == "fill"
            case "drain" | "stay":
                engine.status.draining = what == "drain"
            case "take_in":
                engine.take_in()
            case "step" | "run":
                engine.take_in()
                engine.run(1 if what == "step" else 1000)
            case _:
                getattr(engine, what)()

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)
            self.check_places()

    def run_all(self) -> None:
        for engine in self.engines:
            engine.take_in()
            engine.run(1000)

    def check_places(self) -> None:
        pool = self.client.supervisor.pool
        assert len(pool.links()) <= ENGINES - pool.spares
        assert not any(pooled.streams for pooled in pool.all if not pooled.serves), (
            "a stream on an engine that is spare"
        )
        for stream in self.streams:
            place_of(self.client.supervisor, stream)

    async def go_on(self) -> None:
        """From now on all is well."""
        for engine in self.engines:
            engine.full = engine.status.draining = False
            engine.revive()
        for number in range(STREAMS):
            await self._to_stream("finish", number)
        for _ in range(2000):
            self.run_all()
            await asyncio.sleep(0 if _ % 20 else 0.001)
            self.check_places()
            if all(reader.done() for reader in self.readers):
                break
        hanging = [
            (stream.id, place_of(self.client.supervisor, stream))
            for stream, reader in zip(self.streams, self.readers, strict=True)
            if not reader.done()
        ]
        assert not hanging, hanging


def calm(number: int, done: list[str]) -> fakes.Transcript:
    """What the stream says if nothing happens to its engine."""
    loop, transcript, name = fakes.build(), fakes.Transcript(), f"s{number}"
    loop.submit([Open(name)], 0)
    spec = fakes.FRAMES
    cutter, tag = make_cutter(spec), 0
    pads = spec.flush_positions_for(spec.default_delay_positions)
    for count, what in enumerate(done, 1):
        if what == "feed":
            cut = cutter.cut(fakes.speech(PIECE_SECONDS, 100 * number + count))
            loop.submit([Feed(name, prepare(cutter, cut, spec))], 0)
        elif what in ("flush", "finish"):
            loop.submit([Feed(name, prepare(cutter, cutter.flush(pads), spec))], 0)
            tag += what == "flush"
            loop.submit([Flush(name, tag) if what == "flush" else Finish(name)], 0)
        else:
            loop.submit([Abort(name)], 0)
        while loop.has_work():
            result = loop.step()
            transcript.outputs += [] if result is None else result.outputs
    return transcript


async def play(
    happenings: list[Event], in_the_end: str, spares: int, build: Callable[[], EngineLoop] = fakes.build
) -> None:
    play = Play(spares, build)
    try:
        await play.start()
        for what, number in happenings:
            await play.happen(what, number)
            play.check_places()
        if in_the_end == "go on":
            await play.go_on()
    finally:
        await play.client.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*play.readers)
    for number, transcript in enumerate(play.transcripts):
        last, done = transcript.last, play.done[number]
        assert isinstance(last, (Closed, Dead)), last
        assert sum(isinstance(output, (Closed, Dead)) for output in transcript.outputs) == 1
        wanted = calm(number, done)
        if in_the_end == "go on" and "abort" not in done:
            assert isinstance(last, Closed)
            assert transcript.words == wanted.words
            assert transcript.text == wanted.text
            assert transcript.tags == wanted.tags
        else:
            assert wanted.text.startswith(transcript.text)


REFUSED_AND_THEN_LOST: list[Event] = [
    *[("feed", number) for number in range(STREAMS)],
    ("fill", 0),
    ("fill", 1),
    ("break_link", 0),
    ("turns", 6),
    ("turns", 6),
    ("break_link", 1),
    ("take_in", 0),
    ("turns", 6),
]


# It ends between the decision to open it anew and the turn of the task that does.
ENDED_BEFORE_IT_WAS_REOPENED: list[Event] = [("kill", 0), ("turns", 8), ("abort", 0)]

MOVES_AND_MOVES_BACK: list[Event] = [
    *[("feed", number) for number in range(STREAMS)],
    ("run", 0),
    ("run", 1),
    ("drain", 0),
    *[("turns", 6), ("run", 1), ("turns", 6), ("feed", 0), ("run", 1), ("feed", 1), ("turns", 6)] * 2,
    ("stay", 0),
    ("drain", 1),
    *[("turns", 6), ("run", 0), ("feed", 0), ("turns", 6), ("run", 0), ("flush", 1), ("turns", 6)] * 2,
]


@given(st.lists(events, max_size=40), st.sampled_from(["go on", "close"]), st.integers(0, 1))
@example(REFUSED_AND_THEN_LOST, "go on", 0)
@example(ENDED_BEFORE_IT_WAS_REOPENED, "go on", 0)
@example(MOVES_AND_MOVES_BACK, "go on", 0)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_stream_goes_on_or_ends(happenings: list[Event], in_the_end: str, spares: int) -> None:
    asyncio.run(play(happenings, in_the_end, spares))


class SlowCopies(Moves):
    """Copies that are complete when chance says so."""

    def __init__(self) -> None:
        self._chance = Random(1)

    def is_restored(self, slot: int) -> bool:
        return self._chance.random() < 0.4

    def parking_room(self) -> int:
        return self._chance.randint(0, 2)


def parking_loop() -> EngineLoop:
    """An engine with pages for one stream at a time."""
    runner = fakes.FakeFrames(replace(fakes.FRAMES, kv_groups=(KvGroup("decoder", 16, 4, 1),)))
    runner.moves = SlowCopies()
    pages = tuple(group.ring_pages for group in runner.spec.kv_groups)
    limits = Limits(32, 3300, pages, resident_streams=1, moves=1)
    return EngineLoop(Scheduler(runner.spec, limits, fakes.VOCABULARY), runner)


@given(st.lists(events, max_size=40), st.sampled_from(["go on", "close"]), st.integers(0, 1))
@example(REFUSED_AND_THEN_LOST, "go on", 0)
@example(MOVES_AND_MOVES_BACK, "go on", 0)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_stream_goes_on_or_ends_wherever_its_pages_are(
    happenings: list[Event], in_the_end: str, spares: int
) -> None:
    """Engines die and are drained while streams are parked, wait for their pages, or are on their way back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "PARKED_AFTER_NS", 0)
        patch.setattr(scheduler, "TURN_NS", 0)
        asyncio.run(play(happenings, in_the_end, spares, parking_loop))


def counted(play: Play) -> tuple[int, int, int]:
    metrics = play.client.metrics()
    return metrics.steps, metrics.encoder_hits, metrics.restarts


async def test_an_engine_that_never_died_is_counted_once() -> None:
    play = Play()
    await play.start()
    engine = play.engines[0]

    async def new_link() -> None:
        old = engine.link
        await fakes.until(
            lambda: engine.link not in (None, old) and len(play.client.supervisor.pool.links()) == ENGINES
        )

    assert engine.link is not None
    engine.status = engine.link.status = codec.Status(slots_total=100, steps=5, encoder_hits=3)
    engine.break_link()
    await new_link()
    assert counted(play) == (5, 3, 0), "the same process, and the same life"
    engine.kill()
    assert counted(play) == (5, 3, 0)
    engine.revive()
    engine.status = codec.Status(slots_total=100, steps=1)
    await new_link()
    await fakes.until(lambda: counted(play)[2] == 1)
    assert counted(play) == (6, 3, 1)
    await play.client.close()


@pytest.mark.parametrize("shared", [True, False])
async def test_a_step_shared_with_another_gateways_stream_convicts_nobody(shared: bool) -> None:
    play = Play()
    await play.start()
    stream, client = play.streams[0], play.client.supervisor
    await stream.feed(fakes.speech(PIECE_SECONDS, 1))
    ours, other_gateways = StreamInStep(f"{client._gateway}/1/s0", 3, 5), StreamInStep("another/1/s0", 3, 5)
    for engine in play.engines:
        engine.flights = [ours, other_gateways] if shared else [ours]
    for _ in range(STRIKES_AFTER_CRASH):
        (home,) = [pooled.engine for pooled in client.pool.all if "s0" in pooled.streams]
        assert isinstance(home, LoopEngine)
        home.kill()
        await play.turns(20)
        home.revive()
        # Until it is open elsewhere, and not one step further.
        while place_of(client, stream) not in ("on an engine", "ended"):
            for engine in play.engines:
                engine.take_in()
                engine.run(1)
            await asyncio.sleep(0.001)
    assert place_of(client, stream) == ("on an engine" if shared else "ended")
    assert play.client.metrics().crashing_streams == (not shared)
    await play.client.close()


async def test_the_end_is_not_missed_when_something_else_happens_at_the_same_time() -> None:
    """A wake-up in the very turn in which the recovery is told to stop must not swallow the stop."""
    waits = Recovery(EnginePool([], 0.0), 600, lambda: 0.0)
    stream = EngineStream(Open("s"), fakes.FRAMES, StreamLimits(10, 10), lambda stream: None)
    stream.on_output(Opened("s"))
    stream.detach("lost", 0.0)
    waits.hold([stream])
    waits.release([stream])
    running = asyncio.create_task(waits.run())
    for _ in range(5):
        await asyncio.sleep(0)
    assert waits.waiting == [stream]
    waits.engine_available()
    running.cancel()
    done, _ = await asyncio.wait((running,), timeout=5)
    assert done and running.cancelled()


async def test_streams_with_speech_are_opened_again_before_silent_ones() -> None:
    waits = Recovery(EnginePool([], 0.0), 600, lambda: 0.0)
    streams = [EngineStream(Open(f"s{n}"), fakes.FRAMES, StreamLimits(10, 10), lambda stream: None) for n in range(5)]
    for number, stream in enumerate(streams):
        stream.on_output(Opened(stream.id))
        stream.on_output(Speech(stream.id, 0, fakes.FRAME, [0.1], skipped=number in (0, 2)))
        stream.replay_log.add([Item(position, 1, 0) for position in range(5 - number)])
        stream.detach("lost", 0.0)
    waits.hold(streams)
    waits.release(streams)
    assert [stream.id for stream in waits.waiting] == ["s4", "s3", "s1", "s2", "s0"], "the shortest first"


async def drain_first_engine(play: Play) -> int:
    """Let all streams leave the first engine for the second one. Returns the most that were interrupted at a time."""
    await play.start()
    for number, stream in enumerate(play.streams):
        await stream.feed(fakes.speech(PIECE_SECONDS, number))
    play.run_all()
    await play.turns(6)
    leaving, staying = play.engines
    leaving.status.draining = True
    most = 0

    def is_empty() -> bool:
        nonlocal most
        play.run_all()
        most = max(most, sum(stream.placement.lost_at is not None for stream in play.streams))
        assert leaving.loop is not None
        return not leaving.loop.scheduler.streams

    async with asyncio.timeout(20):
        await fakes.until(is_empty)
    assert staying.loop is not None and len(staying.loop.scheduler.streams) == STREAMS
    await play.client.close()
    return most


async def test_streams_leave_an_engine_that_drains_and_it_forgets_them() -> None:
    assert await drain_first_engine(Play()) <= recovery.MAX_MIGRATING


async def test_few_streams_leave_an_engine_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is interrupted until the other engine has rebuilt it, so those that would wait there stay where they are."""
    monkeypatch.setattr(recovery, "MAX_MIGRATING", 1)
    assert await drain_first_engine(Play()) == 1


async def test_a_migration_that_does_not_end_holds_up_the_others_for_a_bounded_time() -> None:
    """Its engine computes nothing new, for example because its client sends no audio."""
    pool, now = EnginePool([], 0.0), 100.0
    waits = Recovery(pool, 600, lambda: now)
    stream = EngineStream(Open("s"), fakes.FRAMES, StreamLimits(10, 10), lambda stream: None)
    stream.placement.lose(now, 5)
    waits.waiting.append(stream)
    migrations = recovery.Migrations(pool, waits, lambda stream: stream, lambda: now)
    assert migrations._migrating_count(now) == 1
    assert migrations._migrating_count(now + recovery.MIGRATION_COUNTS_SECONDS) == 0


@pytest.mark.parametrize(
    ("attempt_s", "pauses"),
    [(0.0, [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]), (1.5, [0.25] * 3 + [0.5, 2.5, 3.5]), (10.0, [0.25] * 4)],
)
async def test_a_pause_before_the_next_attempt_is_shorter_by_the_time_of_the_last_one(
    attempt_s: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt waits until the engine answers, for up to ten seconds. In a pause nobody would hear it."""
    client = EngineClient([LoopEngine("e0", fakes.build)], ClientSettings())
    await client.start()
    running, absent = client.supervisor, PooledEngine(LoopEngine("e1", fakes.build))
    running.pool.all.append(absent)
    now, slept = [0.0], list[float]()

    async def connect(pooled: Any) -> None:
        now[0] += attempt_s
        raise EngineUnreachable("no engine answers")

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        slept.append(seconds)
        if len(slept) == len(pauses):
            raise asyncio.CancelledError

    monkeypatch.setattr(supervisor, "MIN_BACKOFF_S", 0.25)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 5.0)
    monkeypatch.setattr(running, "_clock", lambda: now[0])
    monkeypatch.setattr(running, "_connect", connect)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await running._keep_connected(absent)
    assert slept == pytest.approx(pauses)
    await client.close()
