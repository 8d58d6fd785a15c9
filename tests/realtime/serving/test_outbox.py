"""The outbox: deltas are joined for a slow reader, and a reader that is too slow is detected."""

from __future__ import annotations

import asyncio

import pytest

from realtime.serving.outbox import Outbox
from realtime.session.events import (
    Acknowledged,
    Answered,
    Cleared,
    Delta,
    Hangup,
    Problem,
    ServerEvent,
    SessionUpdated,
    TimedWord,
)
from realtime.session.settings import Settings


def test_outbox_joins_deltas_of_one_item_and_nothing_else() -> None:
    outbox = Outbox(10, 1000)
    word = TimedWord("b", 1, 2)
    for event in (Delta("1", "a"), Delta("1", " b", (word,)), Delta("2", "c"), Cleared(), Delta("2", "d")):
        outbox.put(event)
    outbox.put(Acknowledged(5))
    outbox.put(Acknowledged(9))
    outbox.hang_up(Hangup(1000, "bye", "test"))
    outbox.put(Cleared())

    async def take_all() -> list[object]:
        return [await outbox.get() for _ in range(7)]

    taken = asyncio.run(take_all())
    expected = [Delta("1", "a b", (word,)), Delta("2", "c"), Cleared(), Delta("2", "d"), Acknowledged(9)]
    assert taken == [*expected, Hangup(1000, "bye", "test"), Hangup(1000, "bye", "test")]


@pytest.mark.parametrize("text", [" word", "x" * 600])
def test_outbox_is_overrun_once_by_events_or_by_text(text: str) -> None:
    outbox = Outbox(5, 1000)
    calls = []
    outbox.on_overrun = lambda: calls.append(True)
    for number in range(20):
        outbox.put(Delta(str(number % 2), text))
    assert outbox.overrun and calls == [True] and len(outbox) <= 6


def test_slow_reader_of_one_long_item_holds_one_event() -> None:
    outbox = Outbox(5, 1_000_000)
    for number in range(10_000):
        outbox.put(Delta("1", f" {number}"))
    assert len(outbox) == 1 and not outbox.overrun


@pytest.mark.parametrize(
    "event",
    [
        SessionUpdated(Settings(prompt="p" * 16_000)),
        Problem("invalid_value", "no", event_id="e" * 500),
        Answered({"keyterms": ["t" * 200] * 50}),
        Delta("1", "", (TimedWord("w" * 100, 0, 1),) * 50),
    ],
    ids=lambda event: type(event).__name__,
)
async def test_every_event_counts_with_its_bytes_until_it_is_taken(event: ServerEvent) -> None:
    outbox = Outbox(10_000, 100_000)
    while not outbox.overrun:
        outbox.put(event)
        outbox.put(Cleared())
    held = outbox.bytes
    assert 100_000 < held < 150_000
    while len(outbox):
        await outbox.get()
    assert outbox.bytes == 0


def test_acknowledgements_that_replace_each_other_do_not_add_up() -> None:
    outbox = Outbox(10, 200)
    for number in range(1000):
        outbox.put(Acknowledged(number))
    assert not outbox.overrun and outbox.bytes < 50
