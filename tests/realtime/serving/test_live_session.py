"""A live session: audio on its way to the engine, errors from the engine, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import messages
from engine.boundary.replay import StreamLimits
from engine.client.handoff import AdoptedSession
from engine.client.stream import EngineStream
from realtime.dialects.base import SessionFacts
from realtime.dialects.openai import OpenAIDialect
from realtime.serving.handoff import LIVE_VERSION, SavedLive
from realtime.serving.live_session import LiveLimits, LiveSession
from realtime.serving.metrics import Metrics
from realtime.serving.quota import SHARE_S
from realtime.session.core import Session
from realtime.session.events import (
    Append,
    Commit,
    Committed,
    Completed,
    Configure,
    End,
    Event,
    FeedGap,
    Hangup,
    ItemFailed,
    Reanchor,
    Tick,
)
from realtime.session.settings import Settings, TurnDetection
from tests.engine import fakes
from tests.realtime.gateway_doubles import FakeEngine, FakeStream
from tests.waiting import stays

RATE = 16_000


def live_session(engine: FakeEngine) -> LiveSession:
    session = Session(Settings(turn_detection=None), RATE, lambda: "item")
    dialect = OpenAIDialect(SessionFacts("sess", 0, RATE, "m", frozenset(), lambda: "event"))
    return LiveSession("sess", session, dialect, engine, LiveLimits(), Metrics(), lambda: 0.0)


def audio(samples: int, value: float = 0.0) -> Append:
    return Append(np.full(samples, value, np.float32), samples, samples * 1000 / RATE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_a_minute_of_audio_that_waited_for_its_stream_does_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream takes all of it without a wait; others have a turn after each piece that takes its time."""
    feed = FakeStream.feed

    async def costly(stream: FakeStream, samples: NDArray[np.float32]) -> None:
        until = time.perf_counter() + 2 * SHARE_S
        while time.perf_counter() < until:
            pass
        await feed(stream, samples)

    monkeypatch.setattr(FakeStream, "feed", costly)
    engine = FakeEngine()
    live = live_session(engine)
    for _ in range(60):
        live.submit(audio(RATE))
    turns = []
    while not engine.streams or engine.streams[0].samples < 60 * RATE:
        await asyncio.sleep(0)
        turns.append(engine.streams[0].samples if engine.streams else 0)
    assert max(later - earlier for earlier, later in zip(turns, turns[1:], strict=False)) <= RATE
    await live.close()


async def test_audio_that_nothing_stands_before_is_fed_at_once_and_in_order() -> None:
    engine = FakeEngine()
    engine.keep_audio = True
    live = live_session(engine)
    live.submit(audio(100, 0.0))
    await until(lambda: live.runner.is_idle)
    live.submit(audio(100, 1.0))
    assert engine.streams[0].samples == 200, "without a turn of the event loop"
    live.runner.queue.put(FeedGap(100))
    live.submit(audio(100, 2.0))
    assert engine.streams[0].samples == 200, "what waits goes first"
    await until(lambda: engine.streams[0].samples == 400)
    assert [piece[0] for piece in engine.streams[0].heard] == [0.0, 1.0, 2.0] and not live.queued_seconds
    await live.close()


async def test_the_engine_knows_what_ends_a_turn() -> None:
    engine = FakeEngine()
    live = live_session(engine)
    live.submit(audio(100))
    await until(lambda: live.runner.is_idle)
    assert engine.streams[0].turns is None
    for silence_ms in (500, 1500):
        live.submit(Configure(Settings(turn_detection=TurnDetection(silence_duration_ms=silence_ms))))
        rule = messages.TurnRule(0.5, 1024, silence_ms * 16)
        await until(lambda rule=rule: engine.streams[0].turns == rule)  # type: ignore[misc]
    # Another stream of the session has it from the beginning.
    live.submit(Configure(replace(live.session.settings, language="de")))
    live.submit(audio(100))
    await until(lambda: len(engine.streams) == 2)
    assert engine.streams[1].turns == rule
    await live.close()


async def test_a_session_that_ends_while_its_options_change_hears_all_of_its_audio() -> None:
    """The end of the stream with the old options is not the end of the session."""
    engine = FakeEngine()
    engine.output_delay_s = 0.01
    live = live_session(engine)
    live.submit(audio(RATE, 0.5))
    live.submit(Configure(replace(live.session.settings, language="de")))
    live.submit(audio(RATE, 0.5))
    live.submit(End())
    await until(lambda: live.session.closed)
    assert [stream.samples for stream in engine.streams] == [RATE, RATE]
    said = [event for event in iter(live.outbox.pop, None) if isinstance(event, Completed)]
    assert len(said) == 1 and said[0].end == 2 * RATE, said
    await live.close()


async def test_a_stream_that_fails_while_its_options_change_takes_nothing_with_it() -> None:
    """What waited for the stream with the new options is in the replay, and is asked for once."""
    engine = FakeEngine()
    engine.output_delay_s = 0.01
    live = live_session(engine)
    live.submit(audio(RATE, 0.5))
    await until(lambda: live.runner.is_idle)
    engine.streams[0].put(messages.Failed("sess.1", "StreamFailed", "numbers went wrong"))
    live.submit(Configure(replace(live.session.settings, language="de")))
    live.submit(Commit())
    live.submit(audio(RATE, 0.5))
    await until(lambda: len(engine.streams) == 2 and live.runner.is_idle)
    assert (engine.streams[1].samples, engine.opened[1]["options"]) == (RATE, {"language": "de"})
    live.submit(Commit())
    live.submit(End())
    await until(lambda: live.session.closed)
    said = [event for event in iter(live.outbox.pop, None) if isinstance(event, Completed | ItemFailed)]
    assert [type(event) for event in said] == [ItemFailed, Completed] and len(engine.streams) == 2
    await live.close()


async def test_a_stream_that_hangs_while_its_options_change_is_left() -> None:
    engine = FakeEngine()
    engine.output_delay_s = 60.0
    live = live_session(engine)
    live.submit(audio(RATE))
    await until(lambda: live.runner.is_idle)
    live.submit(Configure(replace(live.session.settings, language="de")))
    await until(lambda: engine.streams[0].finished)
    live._apply(Reanchor(0, (RATE,)))
    await until(lambda: len(engine.streams) == 2)
    assert engine.opened[1]["options"] == {"language": "de"}
    await live.close()


async def answers_to(steps: list[str], delay_s: float) -> tuple[LiveSession, FakeEngine, list[object]]:
    """What a session that goes through these steps and then ends tells its client."""
    engine = FakeEngine()
    engine.output_delay_s = delay_s
    live = live_session(engine)
    for step in steps:
        stream = engine.streams[-1] if engine.streams else None
        if step in ("de", "fr"):
            live.submit(Configure(replace(live.session.settings, language=step)))
        elif step == "fail" and stream is not None:
            # The last it says: what it is still told is no error and has no answer.
            stream.put(messages.Failed(stream.id, "StreamFailed", "numbers went wrong"))
            stream.put = lambda output: None  # type: ignore[method-assign, misc]
        elif step == "wait":
            await asyncio.sleep(0.002)
        elif step in ("audio", "commit"):
            live.submit(audio(RATE // 2, 0.5) if step == "audio" else Commit())
    live.submit(End())
    await until(lambda: live.session.closed)
    await live.close()
    return live, engine, list(iter(live.outbox.pop, None))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["audio", "audio", "de", "fr", "commit", "wait", "fail"]), max_size=12),
    delay_s=st.sampled_from([0.0, 0.001, 0.003]),
)
def test_whatever_comes_while_options_change_is_answered_once(steps: list[str], delay_s: float) -> None:
    if "fail" in steps:  # a session bears one at a time
        first = steps.index("fail")
        steps = steps[: first + 1] + [step for step in steps[first:] if step != "fail"]
    live, engine, told = asyncio.run(answers_to(steps, delay_s))
    answered = [event.item_id for event in told if isinstance(event, Completed | ItemFailed)]
    assert len(answered) == sum(isinstance(event, Committed) for event in told)
    if "fail" not in steps:
        assert sum(stream.samples for stream in engine.streams) == live.session.appended
        said = [word for event in told if isinstance(event, Completed) for word in event.words]
        assert len(said) == sum(stream._words for stream in engine.streams)


async def test_a_session_taken_over_while_its_options_change_hears_all_of_its_audio() -> None:
    """The former process had its stream run out: audio that it did not hand on belongs to the next one."""
    engine = FakeEngine()
    live, former = live_session(engine), FakeStream(engine, "sess.1")
    core = live.session
    core.handle(audio(2 * RATE), 0.0)
    saved = SavedLive(
        LIVE_VERSION, core.save(), "", 0, 0.0, False, "", {}, True, ("", 0), [], 0, now=0.0,
        **{**live.runner.save(last=False), "reopen": True, "runs_out": True},
    )  # fmt: skip
    adopted = AdoptedSession(1, b"", [], [], former, goes_on_at=RATE)  # type: ignore[arg-type]
    live.take_over(saved, adopted, core, np.zeros(RATE, np.float32))
    live.submit(End())
    await until(lambda: live.session.closed)
    assert (former.samples, [stream.samples for stream in engine.streams]) == (0, [RATE])
    await live.close()


async def test_a_session_taken_over_before_its_new_stream_was_begun_asks_that_one_for_what_is_owed() -> None:
    """What the former stream still says, and how much it was asked for, is nothing to the new one."""
    engine = FakeEngine()
    live, former = live_session(engine), FakeStream(engine, "sess.1")
    core = live.session
    for event in (audio(RATE, 0.5), Commit()):
        core.handle(event, 0.0)
    saved = SavedLive(
        LIVE_VERSION, core.save(), "", 0, 0.0, False, "", {}, True, ("", 0), [], 0, now=0.0,
        **{**live.runner.save(last=False), "reanchor": (0, RATE // 2)},
    )  # fmt: skip
    for tag in (1, 2):
        former.put(messages.Flushed("sess.1", tag, RATE))
    adopted = AdoptedSession(1, b"", [], [], former, goes_on_at=RATE, flushes=2)  # type: ignore[arg-type]
    live.take_over(saved, adopted, core, np.zeros(0, np.float32))
    await until(lambda: not core.marks)
    assert [stream.flushes for stream in engine.streams] == [[RATE]]
    for samples in (2 * RATE, 3 * RATE):
        live.submit(audio(RATE, 0.5))
        live.submit(Commit())
        await until(lambda: not core.marks)
        assert engine.streams[0].flushes[-1] == samples
    said = [event for event in iter(live.outbox.pop, None) if isinstance(event, Completed)]
    assert [event.end for event in said] == [RATE, 2 * RATE, 3 * RATE]
    await live.close()


async def test_a_session_taken_over_before_its_first_audio_hears_by_the_last_settings() -> None:
    engine = FakeEngine()
    live = live_session(engine)
    core = live.session
    saved = SavedLive(
        LIVE_VERSION, core.save(), "", 0, 0.0, False, "", {}, True, ("", 0), [], 0, now=0.0,
        **live.runner.save(last=False),
    )  # fmt: skip
    live.take_over(saved, AdoptedSession(1, b"", [], []), core, np.zeros(0, np.float32))
    live.submit(Configure(replace(core.settings, language="de")))
    live.submit(audio(100))
    await until(lambda: bool(engine.streams))
    assert (engine.opened[0]["options"] or {})["language"] == "de"
    await live.close()


async def test_an_error_over_an_output_ends_this_session_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    live, other = live_session(engine), live_session(engine)
    for session in (live, other):
        session.submit(audio(100))
        await until(lambda session=session: session.runner.is_idle)  # type: ignore[misc]
    # The core did not ask for these answers and reports an error.
    for _ in range(3):
        engine.streams[0].put(messages.Flushed("sess", 7, 0))
    await until(lambda: live.session.closed)
    assert isinstance(await live.outbox.get(), Hangup) and "session sess failed" in caplog.text
    other.submit(audio(100))
    assert engine.streams[1].samples == 200 and not other.session.closed
    await other.close()


async def test_closed_session_starts_nothing_again() -> None:
    """A tick that was on its way when the session ended must not open a new engine stream."""
    engine = FakeEngine()
    live = live_session(engine)
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    await until(lambda: engine.streams and engine.streams[0].samples == RATE)
    await live.close()
    await live.close()
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    live.tick()
    await stays(lambda: not engine.active and engine.streams[0].samples == RATE and not live.full, 0.05)


async def test_a_tick_says_how_much_audio_the_engine_has_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    live = live_session(engine)
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    await until(lambda: engine.streams and engine.streams[0].samples == RATE)
    spec, fed = fakes.FRAMES, live.runner.stream
    late = EngineStream(messages.Open("late"), spec, StreamLimits(10, 10), lambda stream: None)
    late.replay_log.add([messages.Item(spec.prefix_positions, 50, 0)])
    seen: list[Event] = []
    with monkeypatch.context() as patch:
        patch.setattr(live.runner, "stream", late)
        patch.setattr(live, "submit", seen.append)
        live.tick()
    assert seen == [Tick(50 * spec.samples_per_position / spec.sample_rate)] and live.runner.stream is fed
    await live.close()
