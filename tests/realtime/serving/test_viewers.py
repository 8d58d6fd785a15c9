"""The viewers of this process: whatever is done for all of them leaves the event loop to other clients in between."""

from __future__ import annotations

import asyncio

import pytest

from realtime.serving import viewers
from realtime.serving.metrics import Metrics
from realtime.serving.publishing import Added, Ended, Finished, Line, Publisher, State
from realtime.serving.viewers import WRITTEN_AT_ONCE, Audience, Channel, Framing, Viewer
from tests.waiting import until

MANY = 6 * WRITTEN_AT_ONCE
KEY = ("", "talk")


class Crowd:
    """Viewers, and how often any of them was served in one round of the event loop."""

    def __init__(self) -> None:
        self.most_at_once = 0
        self.asked = 0
        self.received: list[bytearray] = []
        self._now = 0

    def viewer(self) -> Viewer:
        received = bytearray()
        self.received.append(received)

        def write(data: bytes) -> bool:
            self._count()
            received.extend(data)
            return True

        return Viewer(Framing.PLAIN, write, lambda: None, self._is_allowed)

    def forget(self) -> None:
        self.most_at_once = self.asked = 0

    def _is_allowed(self) -> bool:
        self.asked += 1
        self._count()
        return True

    def _count(self) -> None:
        if not self._now:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)

    def _next_round(self) -> None:
        self._now = 0


def many_viewers() -> tuple[Crowd, Audience, Channel]:
    """Many viewers of `KEY`."""
    crowd, audience = Crowd(), Audience(Publisher.alone(5.0), Metrics())
    for _ in range(MANY):
        channel = audience.join(KEY, crowd.viewer())
    return crowd, audience, channel


@pytest.mark.parametrize("names", [1, MANY])
async def test_a_tick_serves_some_viewers_at_a_time(monkeypatch: pytest.MonkeyPatch, names: int) -> None:
    monkeypatch.setattr(viewers, "TICK_S", 0.01)
    crowd, audience = Crowd(), Audience(Publisher.alone(5.0), Metrics())
    for number in range(MANY):
        audience.join(("", f"talk{number % names}"), crowd.viewer())
    await asyncio.sleep(0)
    crowd.forget()
    ticking = asyncio.create_task(audience.run())
    await until(lambda: crowd.asked >= 2 * MANY)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    assert crowd.most_at_once <= WRITTEN_AT_ONCE


async def test_a_viewer_that_fails_costs_the_others_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "TICK_S", 0.01)
    crowd, audience = Crowd(), Audience(Publisher.alone(5.0), Metrics())

    def fails() -> bool:
        raise RuntimeError("a broken viewer")

    audience.join(KEY, Viewer(Framing.PLAIN, lambda data: True, lambda: None, fails))
    audience.join(KEY, crowd.viewer())
    ticking = asyncio.create_task(audience.run())
    await until(lambda: crowd.asked >= 2)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)


async def test_new_words_for_all_are_written_to_some_viewers_at_a_time() -> None:
    crowd, audience, channel = many_viewers()
    await asyncio.sleep(0)
    crowd.forget()
    for received in crowd.received:
        received.clear()
    audience.on_current(KEY, State(7, True, [Line("a", "said before", 0.0, 1.0)], []))
    # What comes meanwhile is not lost, and nobody gets it before the words so far.
    audience.on_update(KEY, Added("b", "added"))
    await until(lambda: all(received for received in crowd.received))
    audience.on_update(KEY, Finished(Line("b", "added later", 1.0, 2.0)))
    await until(lambda: all(b"added later" in received for received in crowd.received))
    assert crowd.most_at_once <= WRITTEN_AT_ONCE
    for received in crowd.received:
        assert received.startswith(b"event: snapshot\n") and received.count(b"event: snapshot") == 1
        assert b"said before" in received and received.count(b'"added"') == 1
    await channel.close()


async def test_words_of_an_earlier_state_are_not_written_after_a_newer_one() -> None:
    """Another state comes while a round of writing runs."""
    crowd, audience, channel = many_viewers()
    for number in range(8):
        audience.on_update(KEY, Added("a", f"old{number}"))
    await until(lambda: b"old7" in crowd.received[0])
    for received in crowd.received:
        received.clear()
    audience.on_current(KEY, State(4, True, [Line("n", "new", 0.0, 1.0)], []))
    await until(lambda: all(b"new" in received for received in crowd.received))
    assert not any(b"old" in received for received in crowd.received)
    await channel.close()


async def test_every_viewer_is_told_the_end_that_follows_new_words_at_once() -> None:
    """The gateway of a speaker dies: the words so far and the end of the session may come in one message. A snapshot in
    which the session is over already would keep the end from those who wait for it."""
    crowd, audience, channel = many_viewers()
    for received in crowd.received:
        received.clear()
    audience.on_current(KEY, State(7, True, [Line("a", "said before", 0.0, 1.0)], []))
    audience.on_update(KEY, Ended())
    await until(lambda: all(b"event: end" in received for received in crowd.received))
    assert all(b'"live":true' in received and b'"live":false' not in received for received in crowd.received)
    await channel.close()


async def test_a_burst_while_a_state_is_written_leaves_no_viewer_behind() -> None:
    """The updates that wait are dropped when there are too many, and each viewer gets a snapshot instead."""
    crowd, audience, channel = many_viewers()
    for received in crowd.received:
        received.clear()
    audience.on_current(KEY, State(5, True, [], []))
    for _ in range(viewers.MAX_PENDING):
        audience.on_update(KEY, Added("b", "x"))
    audience.on_update(KEY, Ended())
    ticking = asyncio.create_task(audience.run())
    await until(lambda: all(b'"live":false' in received for received in crowd.received))
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    await channel.close()
