"""A live session that is closed stays closed."""

from __future__ import annotations

import asyncio

import numpy as np

from realtime.dialects.base import SessionFacts
from realtime.dialects.openai import OpenAIDialect
from realtime.metrics.gateway import Metrics
from realtime.serving.live_limits import LiveLimits
from realtime.serving.live_session import LiveSession
from realtime.session.core import Session
from realtime.session.events import Append
from realtime.session.settings import Settings
from tests.realtime.gateway_doubles import FakeEngine

RATE = 16_000


async def test_closed_session_starts_nothing_again() -> None:
    """A tick that was on its way when the session ended must not open a new engine stream."""
    engine = FakeEngine()
    session = Session(Settings(turn_detection=None), RATE, lambda: "item")
    dialect = OpenAIDialect(SessionFacts("sess", 0, RATE, "m", frozenset(), lambda: "event"))
    live = LiveSession("sess", session, dialect, engine, LiveLimits(), Metrics(), lambda: 0.0)
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    await asyncio.sleep(0.01)
    await live.close()
    await live.close()
    live.submit(Append(np.zeros(RATE, np.float32), RATE, 1000.0))
    live.tick()
    await asyncio.sleep(0.01)
    assert not engine.active and engine.streams[0].samples == RATE and not live.full
