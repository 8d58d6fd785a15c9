"""The queue to the engine: in order, bounded by audio and by number; audio counts until the engine has processed it."""

from __future__ import annotations

import asyncio

import numpy as np

from realtime.serving.live_session import EngineQueue
from realtime.session.events import Feed, FeedGap, FlushEngine


def test_audio_counts_until_the_engine_has_heard_it() -> None:
    queue = EngineQueue(max_samples=100, max_commands=10)
    audio = Feed(np.zeros(101, np.float32))
    queue.put(audio)
    queue.put(FlushEngine())
    assert queue.full and len(queue) == 2
    assert queue.pop() is audio and queue.full
    queue.consumed(101)
    assert not queue.full and queue.pop() == FlushEngine() and len(queue) == 0


def test_declared_silence_is_audio_too() -> None:
    queue = EngineQueue(max_samples=100, max_commands=1000)
    for _ in range(11):
        queue.put(FeedGap(10))
    assert queue.full
    assert queue.pop() == FeedGap(10)
    queue.consumed(10)
    assert not queue.full


def test_commands_are_bounded_too() -> None:
    queue = EngineQueue(max_samples=100, max_commands=2)
    for _ in range(3):
        queue.put(FlushEngine())
    assert queue.full
    queue.clear()
    assert not queue.full and len(queue) == 0


async def test_what_is_put_after_a_rest_wakes_the_taker_and_clearing_makes_room() -> None:
    queue = EngineQueue(max_samples=0, max_commands=0)
    queue.mark_idle()
    taker, reader = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait_for_room())
    await asyncio.sleep(0)
    assert not taker.done() and not reader.done()
    queue.put(FlushEngine())
    await asyncio.wait_for(taker, 1)
    queue.clear()
    await asyncio.wait_for(reader, 1)
