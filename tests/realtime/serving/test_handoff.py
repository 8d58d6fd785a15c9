"""When a session's handoff is saved, and what one event adds to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine import messages
from engine.client.stream import HandoffTarget
from realtime.serving.handoff import HandoffSettings, SessionHandoff, decode_entry
from realtime.session.events import Acknowledged, Append, Gap, Measured, Send, Tick

SPEECH = messages.Speech("s", 0, 512, [0.5])


class FakeLink:
    """Asks for what is due when a test says so."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.collectors: list[Callable[[], None]] = []
        self.words: list[Any] = []

    def collect(self, collector: Callable[[], None]) -> None:
        self.collectors.append(collector)

    def send(self, word: Any) -> None:
        self.words.append(word)

    async def wait_acknowledged(self) -> None:
        """At once."""

    def flush(self) -> list[Any]:
        collectors, self.collectors, self.words = self.collectors, [], []
        for collect in collectors:
            collect()
        return self.words


class FakeStream:
    """An engine stream that holds audio until a test sends it."""

    id = "s"
    holds_audio = False
    on_held_sent: Callable[[], None] | None = None

    def __init__(self, desk: Desk) -> None:
        self.previous_engine = SimpleNamespace(has_handoff=False)
        self._desk = desk

    def send_held(self) -> None:
        """As `EngineStream` does it."""
        assert self._desk.link is not None
        self.holds_audio = False
        self._desk.link.send("audio")
        if self.on_held_sent is not None:
            self.on_held_sent()


class Desk:
    """Where wills are kept: with this link, or nowhere."""

    def __init__(self) -> None:
        self.link: FakeLink | None = FakeLink()

    def handoff_target(self, stream: object) -> HandoffTarget | None:
        return None if self.link is None else HandoffTarget(cast(Any, self.link))

    def flush(self) -> list[Any]:
        assert self.link is not None
        return self.link.flush()


def append(handoff: SessionHandoff) -> None:
    handoff.record(Append(np.zeros(10, np.float32), 10, 1.0), 1.0, [])


def names(word: Any) -> list[str]:
    return [type(decode_entry(entry)[1]).__name__ for entry in word.entries]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
async def handoff(desk: Desk) -> SessionHandoff:
    """Its first word, the whole value, has been said."""
    settings = HandoffSettings(60.0, 1000)
    handoff = SessionHandoff("sess", 1, cast(Any, desk), settings, lambda: None, lambda last, moves: (b"base", b""))
    append(handoff)
    (first,) = desk.flush()
    assert first.base == b"base"
    return handoff


async def test_all_that_happened_since_the_last_batch_is_one_word(desk: Desk, handoff: SessionHandoff) -> None:
    append(handoff)
    handoff.record(SPEECH, 2.0, [Send(Acknowledged(7))])
    handoff.record_written(2.0)
    assert desk.link is not None and len(desk.link.collectors) == 1
    (word,) = desk.flush()
    assert word.base is None and names(word) == ["Gap", "Speech", "NoneType"]
    assert not desk.flush()


async def test_an_output_that_nobody_has_heard_of_waits_for_the_next_word(desk: Desk, handoff: SessionHandoff) -> None:
    handoff.record(SPEECH, 1.0, [Measured("lag_seconds", 0.1)])
    handoff.record(Tick(), 1.0, [])
    assert desk.link is not None and not desk.link.collectors
    append(handoff)
    (word,) = desk.flush()
    assert names(word) == ["Speech", "Gap"], "in the order in which it happened"


@pytest.fixture
async def holding(desk: Desk) -> tuple[SessionHandoff, FakeStream]:
    """A session whose stream holds audio, and whose whole value was saved."""
    stream, settings = FakeStream(desk), HandoffSettings(60.0, 1000)
    handoff = SessionHandoff(
        "sess", 1, cast(Any, desk), settings, lambda: cast(Any, stream), lambda last, moves: (b"base", b"")
    )
    append(handoff)
    (first,) = desk.flush()
    assert first.base == b"base" and first.stream == "s"
    desk.flush()
    stream.holds_audio = True
    return handoff, stream


async def test_what_is_counted_of_held_audio_leaves_with_it(
    desk: Desk, holding: tuple[SessionHandoff, FakeStream]
) -> None:
    handoff, stream = holding
    for _ in range(3):
        append(handoff)
    assert desk.link is not None and not desk.link.collectors, "not before"
    stream.send_held()
    assert desk.link.words == ["audio"] and len(desk.link.collectors) == 1, "in the batch that is made next"
    (word,) = desk.flush()
    assert word.base is None and names(word) == ["Gap"] * 3
    append(handoff)
    assert names(*desk.flush()) == ["Gap"], "audio that is not held does not wait"


async def test_what_a_client_may_see_does_not_wait_for_held_audio(
    desk: Desk, holding: tuple[SessionHandoff, FakeStream]
) -> None:
    handoff, stream = holding
    append(handoff)
    handoff.record(SPEECH, 2.0, [Measured("lag_seconds", 0.1)])
    assert not desk.flush()
    handoff.record(SPEECH, 2.0, [Send(Acknowledged(7))])
    assert names(*desk.flush()) == ["Gap", "Speech", "Speech"], "in the order in which it happened"
    append(handoff)
    handoff.record_written(2.0)
    assert names(*desk.flush()) == ["Gap", "NoneType"]
    append(handoff)
    handoff.save_base()
    (word,) = desk.flush()
    assert word.base == b"base" and not word.entries
    stream.send_held()
    assert not desk.flush(), "nothing is left"


async def test_audio_that_is_sent_with_what_was_held_leaves_with_all_entries(
    desk: Desk, holding: tuple[SessionHandoff, FakeStream]
) -> None:
    handoff, stream = holding
    append(handoff)
    stream.send_held()  # because of the next append, which is recorded after its effects
    append(handoff)
    assert names(*desk.flush()) == ["Gap", "Gap"]


@pytest.mark.parametrize("is_over", [False, True])
async def test_held_audio_that_is_sent_after_a_handoff_was_dropped_makes_no_new_one(
    desk: Desk, holding: tuple[SessionHandoff, FakeStream], is_over: bool
) -> None:
    handoff, stream = holding
    append(handoff)
    handoff.save_base()
    if is_over:
        handoff.end()
    else:
        handoff.close()
    stream.send_held()
    assert not desk.flush()


async def test_what_was_due_at_an_engine_that_is_lost_begins_anew_at_the_next(
    desk: Desk, handoff: SessionHandoff
) -> None:
    append(handoff)
    old = desk.link
    assert old is not None
    old.lost, desk.link = "gone", None
    append(handoff)
    desk.link = FakeLink()
    handoff.record(Gap(10, 10, 1.0), 2.0, [])
    (word,) = desk.flush()
    assert word.base == b"base" and not word.entries
    assert not old.flush()


async def test_a_will_that_is_over_says_nothing_more(desk: Desk, handoff: SessionHandoff) -> None:
    append(handoff)
    handoff.close()
    assert desk.link is not None
    assert [type(word) for word in desk.link.words[-1:]] == [messages.DropHandoff]
    assert not desk.flush()
