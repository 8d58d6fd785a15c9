"""More streams than the device has pages for: each gets its turn, and each has its own keys and values in it.

`PagedDevice` is a device whose tokens depend on everything that a stream's pages contain, and whose copies complete
when the test says so. A stream whose pages were lost, mixed up or read too early says something else.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.plan import SILENCE_ROW, DecodeResult, DecodeTask, StepPlan
from engine.core.scheduler import COPY_LIMIT_NS, PARKED_AFTER_NS, STALLED_STEPS, TURN_NS, Limits, Scheduler
from engine.messages import Closed, Flushed, Item, Open, Output
from engine.spec import KvGroup, ModelSpec, Vocabulary

SECOND = 1_000_000_000
FRAME_NS = 80_000_000
VOCABULARY = Vocabulary([b"", b"", *(b" w%d" % index for index in range(50))], word_marker=1)
SPEC = ModelSpec(
    name="frames",
    sample_rate=16_000,
    samples_per_position=10,
    prefix_positions=3,
    max_delay_positions=4,
    replay_positions=8,
    history_positions=6,
    embeds_per_stream=12,
    kv_groups=(KvGroup("encoder", 5, 2, 1), KvGroup("decoder", 9, 4, 1)),
)


@dataclass
class PagedDevice:
    """Computes plans in order, and moves pages. `completes` says whether a copy that is asked for is complete."""

    moves: int
    completes: Callable[[], bool] = lambda: True
    # By group and page: what was written there, by position.
    pages: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    tables: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    host: dict[int, list[list[dict[int, int]]]] = field(default_factory=dict)
    arriving: dict[int, list[list[int]]] = field(default_factory=dict)
    copied: dict[int, list[list[dict[int, int]]]] = field(default_factory=dict)

    def is_restored(self, slot: int) -> bool:
        if slot in self.arriving and self.completes():
            for group, numbers in enumerate(self.arriving.pop(slot)):
                for number, page in zip(numbers, self.copied[slot][group], strict=True):
                    self.pages[group, number] = page
            del self.copied[slot]
        return slot not in self.arriving

    def parking_room(self) -> int:
        return sum(self.completes() for _ in range(self.moves))

    def launch(self, plan: StepPlan) -> list[DecodeResult]:
        for slot in plan.closed:
            for state in (self.host, self.arriving, self.copied, self.tables, self.tokens, self.known):
                state.pop(slot, None)
        for task in plan.parked:
            self.host[task.slot] = [
                [dict(self.pages.get((group, number), {})) for number in numbers]
                for group, numbers in enumerate(task.pages)
            ]
        for task in plan.restored:
            self.copied[task.slot], self.arriving[task.slot] = self.host.pop(task.slot), task.pages
        assert len(self.arriving) <= 2 * self.moves and len(plan.restored) <= self.moves >= len(plan.parked)
        for opened in plan.opened:
            self.tables[opened.slot], self.tokens[opened.slot] = {}, []
            self.known[opened.slot] = list(opened.forced_tokens)
        for encode in plan.encode:
            for row in encode.rows:
                self.rows[row] = zlib.crc32(repr(encode.payload).encode())
        return [self._decode(task) for task in plan.decode]

    def _decode(self, task: DecodeTask) -> DecodeResult:
        assert task.slot not in self.arriving and task.slot not in self.host, "its pages are not on the device"
        table, tokens, found = self.tables[task.slot], self.tokens[task.slot], []
        for group, index, page in task.new_pages:
            table[group, index] = page
            self.pages.setdefault((group, page), {})
        for position, row in zip(range(task.start, task.end), task.rows, strict=True):
            heard = 0 if row == SILENCE_ROW else self.rows[row]
            past = []
            for group, kind in enumerate(SPEC.kv_groups):
                block = position // kind.page_positions
                page = self.pages[group, table[group, block % kind.ring_pages]]
                page[position] = zlib.crc32(b"%d %d" % (heard, tokens[-1] if tokens else 0))
                for earlier in range(max(SPEC.prefix_positions, position - kind.window_positions + 1), position + 1):
                    place = earlier // kind.page_positions % kind.ring_pages
                    past.append(self.pages[group, table[group, place]].get(earlier))
            index = position - SPEC.prefix_positions
            known = self.known[task.slot]
            token = known[index] if index < len(known) else 2 + zlib.crc32(repr(past).encode()) % 50
            tokens.append(token)
            found.append(token)
        return DecodeResult(found)


def item(name: str, index: int) -> Item:
    key = b"%s %d" % (name.encode(), index)
    return Item(SPEC.prefix_positions + index, 1, index * SPEC.samples_per_position, key, key)


def build(resident: int | None, streams: int, moves: int = 2) -> Scheduler:
    pages = tuple(group.ring_pages * (resident or streams) for group in SPEC.kv_groups)
    rows = SPEC.embeds_per_stream * streams
    return Scheduler(SPEC, Limits(streams, rows, pages, 64, 64, 64, resident, moves), VOCABULARY)


class Engine:
    """A scheduler with its device and its clock."""

    def __init__(self, resident: int, streams: int, moves: int = 2, completes: Callable[[], bool] = lambda: True):
        self.device = PagedDevice(moves, completes)
        self.scheduler = build(resident, streams, moves)
        self.scheduler.moves = self.device
        self.now = 100 * SECOND
        self.fed: dict[str, int] = {}
        self.outputs: list[Output] = []
        self.computed: list[set[str]] = []
        self.launched: deque[tuple[StepPlan, list[DecodeResult]]] = deque()
        self.said: dict[str, list[int]] = {}

    def open(self, name: str, live: bool = True) -> None:
        self.scheduler.admit(Open(name, live))
        self.fed[name] = 0

    def feed(self, name: str, count: int = 1) -> None:
        first = self.fed[name]
        self.fed[name] += count
        self.scheduler.feed(name, [item(name, index) for index in range(first, first + count)], self.now)

    def step(self, ahead: int = 0) -> set[str]:
        """One step; up to `ahead` launched steps are not committed. Returns the streams that were computed."""
        self.scheduler.advance_clock(self.now)
        plan = self.scheduler.plan()
        self.launched.append((plan, self.device.launch(plan)))
        while len(self.launched) > ahead:
            committed, results = self.launched.popleft()
            for task, result in zip(committed.decode, results, strict=True):
                stream = self.scheduler.streams.get(task.stream)
                if stream is not None and stream.slot == task.slot:
                    self.said.setdefault(task.stream, []).extend(result.tokens)
            self.outputs += self.scheduler.commit(committed, results)
        self.scheduler.check_integrity()
        return {task.stream for task in plan.decode}

    def run(self, most: int = 500) -> set[str]:
        """Steps while there is work, in no time; returns the streams that were computed."""
        computed = set()
        self.scheduler.advance_clock(self.now)
        while self.scheduler.has_work():
            computed |= self.step()
            most -= 1
            assert most, "there is work, and no step does it"
        return computed

    def speak(self, names: list[str], seconds: float) -> dict[str, int]:
        """These streams speak without a pause; returns how often each was computed."""
        counts = dict.fromkeys(names, 0)
        for _ in range(round(seconds * SECOND / FRAME_NS)):
            self.now += FRAME_NS
            for name in names:
                self.feed(name)
            for _ in range(4):
                for name in self.step():
                    counts[name] = counts.get(name, 0) + 1
        return counts


def expected(name: str, positions: int) -> list[int]:
    """The tokens of a stream that is alone and never leaves the device."""
    device, scheduler, tokens = PagedDevice(1), build(None, 1), list[int]()
    scheduler.admit(Open(name))
    for index in range(positions):
        scheduler.feed(name, [item(name, index)], index)
        plan = scheduler.plan()
        results = device.launch(plan)
        tokens += [token for result in results for token in result.tokens]
        scheduler.commit(plan, results)
    return tokens


def silent(engine: Engine, *names: str) -> None:
    """These streams said something and have been silent since."""
    for name in names:
        engine.open(name)
        engine.feed(name, 3)
        engine.run()
    engine.now += 2 * SECOND
    engine.scheduler.advance_clock(engine.now)


class TestTurns:
    """More streams have work than there is room for."""

    @pytest.mark.parametrize(("resident", "speaking"), [(1, 2), (2, 3), (4, 9), (20, 21)])
    def test_streams_that_all_speak_take_turns(self, resident: int, speaking: int) -> None:
        engine = Engine(resident, 30)
        names = [f"s{index}" for index in range(speaking)]
        for name in names:
            engine.open(name)
        engine.speak(names, 3 * (speaking / resident + 1))
        counts = engine.speak(names, 8 * (speaking / resident + 1))
        assert min(counts.values()) > 0.4 * sum(counts.values()) / speaking
        engine.run(5_000)
        for name in names:
            assert engine.said[name] == expected(name, engine.fed[name])[: len(engine.said[name])]

    def test_a_turn_is_not_ended_while_there_is_room_for_all(self) -> None:
        engine, names = Engine(3, 6), ["a", "b", "c"]
        for name in names:
            engine.open(name)
        engine.speak(names, 10)
        assert engine.scheduler.parked == 0 and all(len(engine.said[name]) == engine.fed[name] for name in names)

    def test_a_turn_begins_when_the_stream_is_rebuilt(self) -> None:
        """After the loss of an engine all wait; who is half rebuilt, or has just been rebuilt, is not moved."""
        engine = Engine(2, 6)
        for name in ("a", "b", "c"):
            known = expected(name, 30)
            engine.scheduler.admit(Open(name, forced_tokens=known))
            engine.fed[name] = 0
            engine.feed(name, 34)
        while engine.scheduler.rebuilding != {"c"}:
            engine.now += SECOND
            computed = engine.step()
            assert "c" not in computed and engine.scheduler.parked == 0
        engine.now += TURN_NS - SECOND
        assert "c" not in engine.step() and engine.scheduler.parked == 0
        for _ in range(40):
            engine.now += SECOND
            for name in ("a", "b"):
                engine.feed(name)
            engine.step()
        assert not engine.scheduler.rebuilding and engine.said["c"] == expected("c", 34)

    def test_a_rebuild_has_its_turn_too(self) -> None:
        engine = Engine(1, 4)
        for name in ("a", "b"):
            engine.open(name)
        engine.speak(["a", "b"], 10)
        engine.scheduler.admit(Open("r", forced_tokens=expected("r", 20)))
        engine.fed["r"] = 0
        engine.feed("r", 24)
        engine.speak(["a", "b"], 10)
        assert engine.said["r"] == expected("r", 24)

    def test_a_stream_that_had_no_step_keeps_its_place(self) -> None:
        """A step has a position for one stream, and another one is late."""
        engine = Engine(2, 4)
        engine.scheduler.limits = replace(engine.scheduler.limits, step_positions=1)
        engine.open("late")
        engine.feed("late", 200)
        engine.now += SECOND
        engine.open("b")
        engine.feed("b")
        engine.step()
        engine.open("c")
        engine.feed("c")
        for _ in range(60):
            engine.now += FRAME_NS
            engine.step()
            assert engine.scheduler.streams["b"].resident or "b" in engine.said
        engine.run()
        assert [engine.said[name] for name in ("late", "b", "c")] == [
            expected(name, count) for name, count in (("late", 200), ("b", 1), ("c", 1))
        ]

    def test_a_live_stream_takes_the_place_of_an_upload_at_once(self) -> None:
        engine = Engine(3, 6)
        for name in ("u", "v"):
            engine.open(name, live=False)
            engine.feed(name, 300)
        for _ in range(5):
            engine.step()
        for name in ("a", "b", "c"):
            engine.open(name)
            engine.feed(name)
        computed = [engine.step() for _ in range(6)]
        assert {"a", "b", "c"} <= set().union(*computed)
        engine.now += 2 * PARKED_AFTER_NS
        engine.run(2_000)
        assert [engine.said[name] for name in "uv"] == [expected(name, 300) for name in "uv"]

    @pytest.mark.parametrize("resident", [1, 2, 16])
    def test_an_upload_has_its_turn_when_the_live_streams_are_silent(self, resident: int) -> None:
        engine = Engine(resident, 2 * resident + 2)
        silent(engine, *(f"s{index}" for index in range(2 * resident)))
        engine.open("u", live=False)
        engine.feed("u", 20)
        assert "u" in engine.run()
        assert engine.said["u"] == expected("u", 20)

    def test_a_stream_without_audio_takes_no_place(self) -> None:
        engine = Engine(2, 8)
        silent(engine, "a", "b")
        engine.feed("a")
        engine.run()
        for index in range(5):
            engine.open(f"new {index}")
        engine.run()
        engine.feed("b")
        assert "b" in engine.run() and engine.scheduler.parked == 0


class TestCopies:
    def test_a_stream_that_was_never_parked_does_not_wait_for_the_copies_of_others(self) -> None:
        is_complete = [True]
        engine = Engine(8, 16, 1, lambda: is_complete[0])
        for index in range(11):
            silent(engine, f"s{index}")
        for name in ("s3", "s4", "s5", "s6"):
            engine.scheduler.abort(name)
        engine.step()
        is_complete[0] = False
        for name in ("s0", "s1", "s2"):
            engine.feed(name)
        for _ in range(4):
            engine.step()
        assert len(engine.device.arriving) == 2, "the third waits for a buffer"
        engine.open("new")
        engine.feed("new")
        assert engine.step() == {"new"}

    def test_while_copies_are_waited_for_there_is_nothing_else_to_do(self) -> None:
        """The engine's thread then waits a little, instead of planning without a pause."""
        is_complete = [True]
        engine = Engine(1, 3, 1, lambda: is_complete[0])
        silent(engine, "a")
        silent(engine, "b")
        engine.feed("a")
        is_complete[0] = False
        engine.step()
        assert engine.scheduler.has_work() and engine.scheduler.waits_for_copies
        is_complete[0] = True
        engine.step()
        engine.open("c")
        assert not engine.scheduler.waits_for_copies
        engine.run()
        assert engine.said["a"] == expected("a", 4)
        assert not engine.scheduler.has_work() and not engine.scheduler.waits_for_copies

    def test_a_copy_that_never_ends_is_the_end_of_the_engine(self) -> None:
        is_complete = [True]
        engine = Engine(1, 2, 1, lambda: is_complete[0])
        silent(engine, "a", "b")
        engine.feed("a")
        for _ in range(3):
            engine.step()
        is_complete[0] = False
        engine.now += 2 * SECOND
        engine.feed("b")
        is_complete[0] = True
        engine.step()
        is_complete[0] = False
        engine.step()
        engine.now += COPY_LIMIT_NS
        with pytest.raises(RuntimeError, match="have not arrived"):
            for _ in range(3):
                engine.step()

    @pytest.mark.parametrize("end", ["abort", "finish"])
    @pytest.mark.parametrize("state", ["parked", "waiting", "arriving"])
    def test_a_stream_may_end_wherever_its_pages_are(self, end: str, state: str) -> None:
        is_complete = [True]
        engine = Engine(1, 2, 1, lambda: is_complete[0])
        silent(engine, "a")
        silent(engine, "b")
        if state != "parked":
            engine.feed("a", 2)
        if state == "arriving":
            engine.step()
            is_complete[0] = False
            engine.step()
        stream = engine.scheduler.streams["a"]
        assert (stream.resident, stream.queued) == (state == "arriving", state != "parked")
        if end == "abort":
            engine.scheduler.abort("a")
        else:
            engine.scheduler.finish("a")
        engine.scheduler.check_integrity()
        is_complete[0] = True
        engine.run()
        outputs = [*engine.outputs, *engine.scheduler.take_replies()]
        assert [output.stream for output in outputs if isinstance(output, Closed)] == ["a"]
        if end == "finish":
            assert engine.said["a"] == expected("a", engine.fed["a"])
        engine.open("c")
        engine.feed("c", 9)
        engine.feed("b", 9)
        engine.run()
        engine.now += 2 * PARKED_AFTER_NS
        engine.run()
        assert engine.said["b"] == expected("b", 12) and engine.said["c"] == expected("c", 9)
        assert engine.scheduler.parked == len(engine.device.host) == 1 and not engine.device.arriving

    def test_a_flush_is_answered_for_a_parked_stream(self) -> None:
        engine = Engine(1, 2, 1)
        silent(engine, "a")
        silent(engine, "b")
        assert not engine.scheduler.streams["a"].resident
        engine.scheduler.flush("a", 1)
        assert engine.scheduler.take_replies()[-1] == Flushed("a", 1, 30), "its audio is computed"
        engine.feed("a")
        engine.scheduler.flush("a", 2)
        engine.run()
        assert Flushed("a", 2, 40) in engine.outputs


class TestSuspects:
    def test_a_suspect_that_is_silent_does_not_keep_steps_from_overlapping(self) -> None:
        engine = Engine(4, 4)
        engine.scheduler.admit(Open("a", suspect=(3, 5)))
        engine.fed["a"] = 0
        assert not engine.scheduler.suspect_is_near
        engine.feed("a", 3)
        assert engine.scheduler.suspect_is_near
        engine.run()
        assert not engine.scheduler.suspect_is_near

    def test_two_suspects_are_not_computed_together_wherever_their_pages_are(self) -> None:
        engine = Engine(1, 3, 1)
        for name in ("a", "b"):
            engine.scheduler.admit(Open(name, suspect=(3, 6)))
            engine.fed[name] = 0
            engine.feed(name, 4)
        engine.open("c")
        engine.feed("c")
        for _ in range(200):
            engine.now += FRAME_NS
            assert not {"a", "b"} <= engine.step()
        assert [len(engine.said[name]) for name in "abc"] == [4, 4, 1]


def test_copies_that_are_waited_for_do_not_count_as_steps_without_a_rebuild() -> None:
    """Else recovered streams would no longer be preferred while others are being rebuilt."""
    is_complete = [True]
    engine = Engine(1, 3, 1, lambda: is_complete[0])
    silent(engine, "a")
    silent(engine, "b")
    engine.scheduler.admit(Open("r", forced_tokens=[2] * 8))
    engine.feed("a")
    engine.step()
    is_complete[0] = False
    for _ in range(2 * STALLED_STEPS):
        engine.step()
    assert engine.scheduler._steps_without_rebuild < STALLED_STEPS


class Sessions:
    """Random sessions on an engine that dies now and then: they speak, are silent, flush, end, and upload."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.resident = chance.randint(1, 5)
        self.streams = self.resident + chance.randint(1, 5)
        self.moves, self.ahead = chance.randint(1, 3), chance.randint(0, 1)
        self.patience = chance.choice([0.15, 0.5, 1.0])
        self.engine = self.new_engine(100 * SECOND)
        self.opened = 0
        # Until when each session speaks or, if negative, is silent; and when its next frame comes.
        self.until: dict[str, int] = {}
        self.next_frame: dict[str, int] = {}
        # When each live stream with work was last computed, or got work.
        self.served: dict[str, int] = {}

    def new_engine(self, now: int) -> Engine:
        engine = Engine(self.resident, self.streams, self.moves, lambda: self.chance.random() < self.patience)
        engine.now = now
        return engine

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.now += self.chance.choice([12, 25, 60]) * 1_000_000
            self.happen()
            self.step()
        for name in [name for name, stream in self.engine.scheduler.streams.items() if not stream.finished]:
            self.engine.scheduler.finish(name)
        for _ in range(20_000):
            self.engine.now += 12_000_000
            self.step()
            if not self.engine.scheduler.streams and not self.engine.launched:
                break
        assert not self.engine.scheduler.streams, "streams that have ended wait for ever"
        self.engine.step()
        device, scheduler = self.engine.device, self.engine.scheduler
        assert not (device.host or device.arriving or scheduler.parked or any(p.reserved for p in scheduler.pools))

    def step(self) -> None:
        engine = self.engine
        computed = engine.step(self.ahead)
        with_work = {name for name, stream in engine.scheduler.streams.items() if stream.live and stream.queued}
        self.served = {name: self.served.get(name, engine.now) for name in with_work}
        self.served |= dict.fromkeys(computed & with_work, engine.now)
        for name, since in self.served.items():
            # Everybody else may have a turn first; each begins when its copies are complete.
            turns = 2 + -(-len(engine.scheduler.streams) // self.resident)
            assert engine.now - since <= turns * (TURN_NS + SECOND), f"{name} waits for ever"

    def happen(self) -> None:
        """What clients do between two steps."""
        engine, chance = self.engine, self.chance
        streams = engine.scheduler.streams
        if len(streams) < self.streams and chance.random() < 0.1:
            name = f"s{self.opened}"
            self.opened += 1
            engine.open(name, live=chance.random() < 0.8)
            self.until[name], self.next_frame[name] = engine.now, engine.now
        for name in [name for name in self.until if name not in streams]:
            del self.until[name], self.next_frame[name]
        for name in [name for name in self.until if not streams[name].finished]:
            if streams[name].live:
                self.speak(name)
            elif engine.fed[name] < 60:
                engine.feed(name, chance.randint(1, 30))
            if chance.random() < 0.01:
                engine.scheduler.flush(name, None)
            elif chance.random() < 0.003:
                engine.scheduler.finish(name)
        if streams and chance.random() < 0.005:
            engine.scheduler.abort(chance.choice(sorted(streams)))
        if chance.random() < 0.004:
            self.die()

    def speak(self, name: str) -> None:
        """A live session speaks for a while, and is silent for a while."""
        engine = self.engine
        if engine.now >= abs(self.until[name]):
            length = round(self.chance.choice([0.3, 2, 6]) * SECOND)
            self.until[name] = (engine.now + length) * (1 if self.until[name] < 0 else -1)
        while self.until[name] > 0 and self.next_frame[name] <= engine.now:
            engine.feed(name)
            self.next_frame[name] += FRAME_NS
        self.next_frame[name] = max(self.next_frame[name], engine.now - FRAME_NS)

    def die(self) -> None:
        """The engine dies; all streams are opened again on another one, some of them as suspects."""
        old, chance = self.engine, self.chance
        self.engine = new = self.new_engine(old.now)
        new.said, new.outputs = old.said, old.outputs
        for name, stream in old.scheduler.streams.items():
            known = list(old.said.get(name, ()))
            at = SPEC.prefix_positions + len(known)
            suspect = (at, at + 1) if chance.random() < 0.3 else None
            new.scheduler.admit(Open(name, stream.live, forced_tokens=known, suspect=suspect))
            old.said.pop(name, None)
            new.fed[name] = 0
            if old.fed[name]:
                new.feed(name, old.fed[name])
            if stream.finished:
                new.scheduler.finish(name)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9))
def test_any_sessions_say_what_they_would_say_alone_and_none_waits_for_ever(seed: int) -> None:
    sessions = Sessions(seed)
    sessions.run(400)
    for name, tokens in sessions.engine.said.items():
        assert tokens == expected(name, len(tokens))
