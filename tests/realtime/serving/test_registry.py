"""The registry: one clock for all sessions, which none of them can stop, and counts that stay bounded."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import EngineUnreachable
from realtime.config import Config, LimitsConfig
from realtime.dialects.openai import OpenAIDialect
from realtime.errors import CloseCode, Refusal
from realtime.serving import quota
from realtime.serving.connection import Connection
from realtime.serving.quota import Caller, FairTurns
from realtime.serving.registry import TAKEN_OVER, Sessions
from realtime.serving.socket_extras import SocketExtras
from realtime.session.settings import Settings
from tests.realtime.gateway_doubles import FakeEngine


def sessions(**limits: int) -> Sessions:
    return Sessions(FakeEngine(), Config(limits=LimitsConfig(**limits)), lambda: 0.0, lambda: 0.0)


async def never(*_: object) -> None:
    raise AssertionError("nothing is sent or received")


async def test_a_session_that_fails_in_a_tick_ends_and_the_others_tick_on(caplog: pytest.LogCaptureFixture) -> None:
    entries = sessions()
    async with (
        entries.open(Caller("bad"), Settings(), [OpenAIDialect]) as (bad,),
        entries.open(Caller("good"), Settings(), [OpenAIDialect]) as (good,),
    ):
        socket = Connection(bad.live, bad.inbox, never, never, SocketExtras(), FairTurns())  # type: ignore[arg-type]
        entries.attach((bad,), socket)
        ticks = []
        good.live.tick = lambda: ticks.append(True)  # type: ignore[method-assign]

        def fail() -> None:
            raise ValueError("a bug")

        bad.live.tick = fail  # type: ignore[method-assign]
        await entries.tick()
        await entries.tick()
        assert len(ticks) == 2 and len(entries) == 1
        assert socket.hangup is not None and socket.hangup.code == CloseCode.INTERNAL
        assert [record.message for record in caplog.records] == [f"session {bad.live.id} failed"]
    assert len(entries) == 0, "the good one had no socket"


class BrokenHandoff:
    """A handoff whose last save fails, as after the loss of its engine."""

    number, owned, can_be_saved, last_saved_stream = 1, None, True, None

    def send_last_save(self) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def wait_until_sent(self) -> None:
        raise EngineUnreachable("the engine is gone")


async def test_a_session_whose_last_save_fails_is_released_and_its_client_hears_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = sessions()
    async with entries.open(Caller("one"), Settings(), [OpenAIDialect]) as (entry,):
        socket = Connection(entry.live, entry.inbox, never, never, SocketExtras(), FairTurns())  # type: ignore[arg-type]
        entries.attach((entry,), socket)
        entry.live.handoff = BrokenHandoff()  # type: ignore[assignment]
        entries._save_and_release(entry, TAKEN_OVER)
        await asyncio.gather(*entries._releases)
        assert socket.hangup == TAKEN_OVER and len(entries) == 0
        assert entries.quota.counts.total() == 0  # type: ignore[attr-defined]
    assert [record.message for record in caplog.records] == [
        f"the last save of session {entry.live.id} failed; the session is released nevertheless"
    ]


async def test_callers_that_come_once_are_counted_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_COUNTED_CALLERS", 50)
    entries = sessions(new_sessions_per_minute=1)
    for number in range(500):
        async with entries.open(Caller(f"address {number}"), Settings(), [OpenAIDialect]):
            pass
    counts = entries.quota.counts  # type: ignore[attr-defined]
    assert len(counts._arrivals) == 50 and not counts._by_process[0]
    with pytest.raises(Refusal):
        async with entries.open(Caller("address 499"), Settings(), [OpenAIDialect]):
            pass
