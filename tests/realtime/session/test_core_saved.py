"""A session as a value: a copy restored at any point continues the same, and the value is bounded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import messages
from realtime.session.core import SavedSession, Session, SessionLimits
from realtime.session.events import Drain, Feed, Reanchor, Send
from realtime.session.settings import Settings
from tests.realtime.session.test_core import RATE, SOME_SETTINGS, Engine, World, actions, append, finish, session, word

LATER = 1000.0


class Ids:
    """Item ids whose place can be handed over."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __call__(self) -> str:
        self.number += 1
        return f"item_{self.number}"


def encoded(core: Session) -> bytes:
    """As it travels, within the value of the live session."""
    return msgspec.msgpack.encode(core.save())


def copy_of(core: Session, ids: Ids, limits: SessionLimits) -> Session:
    saved = msgspec.msgpack.decode(encoded(core), type=SavedSession)
    copy = Session(saved.settings, RATE, ids, limits)
    copy.load(saved, LATER)
    return copy


def plain(effect: Any) -> Any:
    """An effect without the sound in it, which a value does not carry, and without arrays, which do not compare."""
    if isinstance(effect, Reanchor):
        length = sum(piece if isinstance(piece, int) else len(piece) for piece in effect.replay)
        return "reanchor", effect.base, length
    return ("feed", len(effect.samples)) if isinstance(effect, Feed) else effect


class MovingWorld(World):
    """Every event is also given to a copy, which is made anew from its value whenever the test says so."""

    def __init__(self, chosen: Settings, learnt: bool = False) -> None:
        super().__init__(chosen)
        self.limits = SessionLimits(stall_seconds=3.0, max_engine_failures=10_000, has_turn_detector=learnt)
        self.core = Session(chosen, RATE, Ids(), self.limits)
        self.engine = Engine(self.core.turn_rule)
        self.copy_ids = Ids()
        self.copy = Session(chosen, RATE, self.copy_ids, self.limits)
        self.clock = 0.0
        self.moves = 0

    def move(self) -> None:
        self.copy_ids = Ids(self.copy_ids.number)
        self.copy = copy_of(self.copy, self.copy_ids, self.limits)
        self.clock += LATER
        self.moves += 1

    def do(self, event: Any) -> None:
        if self.core.closed:
            return
        handled: list[Any] = []
        original = self.core.handle

        def handle(event: Any, now: float) -> list[Any]:
            handled.extend(original(event, now))
            return handled

        self.core.handle = handle  # type: ignore[method-assign]
        try:
            super().do(event)
        finally:
            del self.core.handle
        if isinstance(event, Drain):
            event = replace(event, deadline=event.deadline + self.clock)
        copied = self.copy.handle(event, self.now + self.clock)
        assert [unshifted(plain(effect), self.clock) for effect in copied] == [plain(effect) for effect in handled]
        self.copy.check_integrity()


def unshifted(effect: Any, clock: float) -> Any:
    """The copy lives by another clock: of what it says, only when a turn ended shows that."""
    event = getattr(effect, "event", None)
    if hasattr(event, "ended_at"):
        return replace(effect, event=replace(event, ended_at=pytest.approx(event.ended_at - clock)))
    return replace(effect, value=pytest.approx(effect.value)) if hasattr(effect, "value") else effect


moves = st.lists(st.one_of(actions, st.tuples(st.just("cut"), st.none())), max_size=60)


@given(st.sampled_from(SOME_SETTINGS), st.booleans(), moves)
@example(SOME_SETTINGS[0], False, [("append", 1024), ("move", True), ("drain", None), ("tick", 2.0), ("fail", None)])
@settings(max_examples=60, deadline=None)
def test_a_session_that_is_cut_anywhere_goes_on_as_if_nothing_had_happened(
    chosen: Settings, learnt: bool, steps: list[tuple[str, Any]]
) -> None:
    world = MovingWorld(chosen, learnt)
    for kind, value in steps:
        world.move() if kind == "cut" else world.act(kind, value)
    world.move()
    finish(world)


@pytest.mark.parametrize("chosen", SOME_SETTINGS)
@pytest.mark.parametrize("learnt", [False, True])
def test_long_sessions_move_at_every_few_events(chosen: Settings, learnt: bool) -> None:
    for seed in range(8):
        dice = random.Random(seed)
        world, loud = MovingWorld(chosen, learnt), False
        for _ in range(120):
            if dice.random() < 0.2:
                loud = not loud
            kind = dice.choices(["append", "move", "commit", "clear", "tick", "configure"], [30, 45, 8, 4, 6, 2])[0]
            value: Any = loud
            if kind == "append":
                value = dice.choice([0, 100, 1600, 8000, 20_000])
            elif kind == "tick":
                value = dice.random()
            elif kind == "configure":
                value = dice.choice(SOME_SETTINGS)
            world.act(kind, value)
            if dice.random() < 0.3:
                world.move()
        finish(world)
        assert world.moves > 10


def test_a_value_does_not_grow_with_the_session_but_for_the_open_turn() -> None:
    core = session()
    sizes = []
    for _ in range(200):
        core.handle(append(1.0), 0.0)
        sizes.append(len(encoded(core)))
    assert max(sizes[100:]) <= max(sizes[:100]) + 64, "silence leaves no trace in a value"
    open_turn = session(Settings(turn_detection=None))
    for number in range(100):
        open_turn.handle(append(1.0), 0.0)
        open_turn.handle(word(f"w{number}", number, number + 1), 0.0)
    assert len(encoded(open_turn)) < 100 * 120, "an open turn costs its words"


def test_the_sound_of_the_stall_guard_stays_behind() -> None:
    core = session(Settings(turn_detection=None), keep_seconds=30.0)
    core.handle(append(30.0), 0.0)
    assert len(encoded(core)) < 2000


def test_the_rest_of_a_word_follows_its_beginning_into_the_copy() -> None:
    ids = Ids()
    core = Session(Settings(turn_detection=None), RATE, ids, SessionLimits())
    core.handle(append(2.0), 0.0)
    begun = core.handle(messages.Text("s", " hel", [], [1]), 0.0)
    copy = copy_of(core, ids, SessionLimits())
    rest = copy.handle(messages.Text("s", "lo", [messages.Word("hello", 0, RATE)], [1]), LATER)
    assert [effect.event.text for effect in (*begun, *rest) if isinstance(effect, Send)] == ["hel", "lo"]
