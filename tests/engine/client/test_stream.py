"""Since when a stream goes on after it lost its engine."""

from __future__ import annotations

from typing import Any, cast

from engine.boundary.replay import Replay
from engine.client.stream import Placement
from tests.engine import fakes

LINK = cast(Any, object())
PREFIX = fakes.FRAMES.prefix_positions


def lost(computed: int, end: int) -> Placement:
    place = Placement(fakes.FRAMES)
    place.begin(LINK, Replay(0, 0, []))
    place.progress(PREFIX + computed)
    place.lose(1.0, PREFIX + end)
    return place


def test_a_stream_goes_on_when_the_new_engine_has_rebuilt_it_not_when_it_was_handed_over() -> None:
    """All audio had been computed when the engine died."""
    place = lost(computed=40, end=40)
    assert not place.is_recovered
    place.begin(LINK, Replay(0, 0, []))
    assert not place.is_recovered
    place.progress(PREFIX + 39)
    assert not place.is_recovered
    place.progress(PREFIX + 40)
    assert place.is_recovered


def test_a_stream_that_was_behind_goes_on_with_the_first_new_position() -> None:
    place = lost(computed=40, end=50)
    place.begin(LINK, Replay(10, 0, []))
    place.progress(PREFIX + 30)
    assert place.computed == PREFIX + 40 and not place.is_recovered
    place.progress(PREFIX + 31)
    assert place.is_recovered


def test_new_words_say_that_a_stream_goes_on() -> None:
    place = lost(computed=40, end=50)
    place.begin(LINK, Replay(0, 0, []))
    place.note_new_words()
    assert place.is_recovered
    place.lose(2.0, PREFIX + 60)
    place.begin(LINK, Replay(0, 0, []))
    assert not place.is_recovered
