"""Any order of events, any budgets: bookkeeping stays consistent, nothing is lost, and no stream waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pytest import MonkeyPatch

import engine.core.scheduler as scheduler_module
from engine.core.plan import DecodeResult, DecodeTask, StepPlan, TimedToken
from engine.core.scheduler import Limits, Scheduler
from engine.errors import AtCapacity
from engine.messages import Closed, Failed, Flushed, Item, Open, Output, Text
from engine.runner.frames.memory import SPARE_HOST_BUFFERS
from engine.spec import KvGroup, ModelSpec, Vocabulary

VOCABULARY = Vocabulary([b"", b"", *(b" w%d" % index for index in range(50))], word_marker=1)
FRAMES = ModelSpec(
    name="frames",
    sample_rate=16_000,
    samples_per_position=10,
    prefix_positions=3,
    max_delay_positions=4,
    step_positions=2,
    history_positions=6,
    embeds_per_stream=6,
    kv_groups=(KvGroup("encoder", 5, 2, 1), KvGroup("decoder", 9, 4, 1)),
)
WINDOWS = ModelSpec(
    name="windows",
    sample_rate=16_000,
    samples_per_position=10,
    rereads_window=True,
    stride_positions=3,
    window_positions=12,
    embeds_per_stream=16,
    history_positions=6,
)


def build(spec: ModelSpec, streams: int, step_positions: int, step_embeds: int) -> Scheduler:
    pages = tuple(group.ring_pages * streams for group in spec.kv_groups)
    limits = Limits(streams, spec.embeds_for(live=False) * streams, pages, step_positions, step_embeds)
    return Scheduler(spec, limits, VOCABULARY)


def execute(spec: ModelSpec, task: DecodeTask, slide: int) -> DecodeResult:
    """A model that says where it listened: a token for every position, or for every new position of a window."""
    assert len(task.rows) == task.end - task.base
    if not spec.rereads_window:
        return DecodeResult([2 + position % 50 for position in range(task.start, task.end)])
    timed = [TimedToken(2 + position % 50, position, position + 1) for position in range(task.start, task.end)]
    full = task.end - task.base >= spec.window_positions
    return DecodeResult(timed=timed, keep_from=min(task.end, task.base + max(slide, int(full))))


class SchedulerMachine(RuleBasedStateMachine):
    spec = FRAMES

    def __init__(self) -> None:
        super().__init__()
        self.engine = build(self.spec, streams=3, step_positions=max(12, self.spec.window_positions), step_embeds=7)
        self.opened = 0
        self.ends: dict[str, int] = {}
        self.finished: set[str] = set()
        self.heard: dict[str, list[int]] = defaultdict(list)
        self.skipped: set[str] = set()
        self.flushes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.tag = 0

    def name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(set(self.ends) - self.finished)))

    def is_open(self) -> bool:
        return bool(set(self.ends) - self.finished)

    @rule(live=st.booleans())
    def open(self, live: bool) -> None:
        name = f"s{self.opened}"
        self.opened += 1
        try:
            self.engine.admit(Open(name, live))
        except AtCapacity:
            assert len(self.engine.streams) == self.engine.limits.max_streams
        else:
            self.ends[name] = self.spec.prefix_positions

    @precondition(is_open)
    @rule(data=st.data(), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=8), now=st.integers(0, 100))
    def feed(self, data: st.DataObject, lengths: list[int], now: int) -> None:
        name = self.name(data)
        items = []
        for length in lengths:
            offset = self.ends[name]
            sample = (offset - self.spec.prefix_positions) * self.spec.samples_per_position
            mask = data.draw(
                st.sampled_from([None, None, [False] * length, [index % 2 == 0 for index in range(length)]])
            )
            key = data.draw(st.sampled_from([b"silence%d" % length, b"%s at %d" % (name.encode(), offset)]))
            key += b"" if mask is None else b"m%d" % sum(mask)
            items.append(Item(offset, length, sample, key, b"pcm", mask))
            self.ends[name] = offset + length
        self.engine.feed(name, items, now)

    @precondition(is_open)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        name = self.name(data)
        self.tag += 1
        self.flushes[name].append((self.tag, self.ends[name]))
        self.engine.flush(name, self.tag)

    @precondition(is_open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.name(data)
        self.finished.add(name)
        self.engine.finish(name)

    @precondition(is_open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = self.name(data)
        self.engine.abort(name)
        del self.ends[name]
        self.skipped.add(name)

    @rule(slide=st.integers(0, 6), failing=st.integers(0, 20))
    def step(self, slide: int, failing: int) -> None:
        self.run_step(slide, failing)

    def run_step(self, slide: int, failing: int = 99) -> None:
        had_work = bool(self.engine.live or self.engine.uploads)
        plan = self.engine.plan()
        assert bool(plan.decode or plan.encode) == had_work, "a step with work to do does some of it"
        results = [execute(self.spec, task, slide) for task in plan.decode]
        if failing < len(results):
            results[failing] = DecodeResult(error="broken")
        for task, result in zip(plan.decode, results, strict=True):
            if result.error is None:
                expected = self.heard[task.stream][-1] + 1 if self.heard[task.stream] else self.spec.prefix_positions
                assert task.start == expected, "positions are computed once, in order"
                self.heard[task.stream] += range(task.start, task.end)
        self.take(self.engine.commit(plan, results))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Flushed):
                tag, position = self.flushes[output.stream].pop(0)
                assert output.tag == tag
                assert len(self.heard[output.stream]) >= position - self.spec.prefix_positions
            if isinstance(output, Closed | Failed):
                end = self.ends.pop(output.stream, None)
                self.finished.discard(output.stream)
                if isinstance(output, Closed) and output.stream not in self.skipped:
                    assert end == self.spec.prefix_positions + len(self.heard[output.stream])
                self.flushes.pop(output.stream, None)

    @invariant()
    def is_whole(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        """No stream waits for ever: with enough steps every stream has computed all its audio."""
        for name in sorted(set(self.ends) - self.finished):
            self.engine.flush(name, None)
        steps = 0
        while self.engine.has_work():
            self.run_step(slide=3)
            steps += 1
            assert steps < 5_000, "streams wait for each other"
        for name, end in self.ends.items():
            if name in self.engine.streams:
                assert self.engine.streams[name].computed == end
        self.engine.check_integrity()


class WindowMachine(SchedulerMachine):
    spec = WINDOWS

    @precondition(SchedulerMachine.is_open)
    @rule(data=st.data(), back=st.integers(0, 6))
    def pause(self, data: st.DataObject, back: int) -> None:
        name = self.name(data)
        self.engine.pause(name, max(0, self.ends[name] - back))


class OverlapMachine(SchedulerMachine):
    """Plans are committed later, in their order, with any events between."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: deque[StepPlan] = deque()

    @rule()
    def plan(self) -> None:
        under_way = {task.slot for plan in self.plans for task in plan.decode if task.stream in self.engine.streams}
        plan = self.engine.plan()
        for task in plan.decode:
            assert task.slot not in under_way, "no stream is in two plans"
            heard = self.heard[task.stream]
            assert task.start == (heard[-1] + 1 if heard else self.spec.prefix_positions)
            heard += range(task.start, task.end)
        self.plans.append(plan)

    def run_step(self, slide: int, failing: int = 99) -> None:
        if not self.plans:
            self.plan()
        plan = self.plans.popleft()
        results = [execute(self.spec, task, slide) for task in plan.decode]
        if failing < len(results):
            results[failing] = DecodeResult(error="broken")
        self.take(self.engine.commit(plan, results))

    def teardown(self) -> None:
        while self.plans:
            self.run_step(slide=3)
        super().teardown()


class ParkingMachine(OverlapMachine):
    """Five streams, and pages for two: what a stream has written is there whenever it is computed. Copies take until
    chance completes them."""

    def __init__(self) -> None:
        super().__init__()
        spec, resident = self.spec, 2
        pages = tuple(group.ring_pages * resident for group in spec.kv_groups)
        limits = Limits(5, spec.embeds_per_stream * 5, pages, 12, 7, resident_streams=resident, moves=2)
        self.engine = Scheduler(spec, limits, VOCABULARY)
        self.engine.moves = self
        self.chance, self.room = Random(1), 0
        # Owner of each page by group, pages in host memory by slot, and pages that are being copied back.
        self.device: list[dict[int, int]] = [{}, {}]
        self.host: dict[int, list[int]] = {}
        self.coming: dict[int, list[list[int]]] = {}
        self.patch = MonkeyPatch()
        self.patch.setattr(scheduler_module, "PARKED_AFTER_NS", -(1 << 62))

    def is_restored(self, slot: int) -> bool:
        if slot in self.coming and self.chance.random() < 0.5:
            for owners, pages in zip(self.device, self.coming.pop(slot), strict=True):
                owners.update(dict.fromkeys(pages, slot))
        return slot not in self.coming

    def parking_room(self) -> int:
        self.room = self.chance.randint(0, 2)
        return self.room

    def plan(self) -> None:
        super().plan()
        plan = self.plans[-1]
        for slot in plan.closed:
            self.coming.pop(slot, None)
            self.host.pop(slot, None)
        for task in plan.parked:
            for owners, pages in zip(self.device, task.pages, strict=True):
                assert all(owners[page] == task.slot for page in pages), "another stream has written to its pages"
            assert task.slot not in self.host
            self.host[task.slot] = [len(pages) for pages in task.pages]
        for task in plan.restored:
            assert self.host.pop(task.slot) == [len(pages) for pages in task.pages]
            self.coming[task.slot] = task.pages
        assert len(plan.parked) <= self.room and len(plan.restored) <= 2 and len(self.coming) <= 4
        assert len(self.host) <= 3 + 2, "more host memory than there is"
        for task in plan.decode:
            assert task.slot not in self.coming and task.slot not in self.host, "its pages are not on the device"
            for group, _, page in task.new_pages:
                self.device[group][page] = task.slot
            rings = self.engine.streams[task.stream].rings
            for owners, ring in zip(self.device, rings, strict=True):
                assert all(owners[page] == task.slot for page in ring.pages)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
OverlapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
ParkingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestFrames = SchedulerMachine.TestCase
TestParking = ParkingMachine.TestCase
TestOverlap = OverlapMachine.TestCase
TestWindows = WindowMachine.TestCase


def transcript(
    spec: ModelSpec, streams: list[str], chunks: list[int], step_positions: int, step_embeds: int
) -> list[str]:
    """Feed every stream the same 60 positions in the given chunks, and return what each of them said."""
    engine = build(spec, len(streams), step_positions, step_embeds)
    said: dict[str, str] = dict.fromkeys(streams, "")
    for name in streams:
        engine.admit(Open(name))
    position, end = spec.prefix_positions, spec.prefix_positions + 60
    while position < end:
        size = chunks[position % len(chunks)]
        for name in streams:
            sample = (position - spec.prefix_positions) * spec.samples_per_position
            items = [
                Item(
                    place,
                    1,
                    sample + (place - position) * spec.samples_per_position,
                    b"%s%d" % (name.encode(), place),
                    b"pcm",
                )
                for place in range(position, min(end, position + size))
            ]
            engine.feed(name, items, position)
        position += size
        plan = engine.plan()
        for output in engine.commit(plan, [execute(spec, task, 2) for task in plan.decode]):
            if isinstance(output, Text):
                said[output.stream] += output.delta
    for name in streams:
        engine.finish(name)
    while engine.has_work():
        plan = engine.plan()
        for output in engine.commit(plan, [execute(spec, task, 2) for task in plan.decode]):
            if isinstance(output, Text):
                said[output.stream] += output.delta
    return list(said.values())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([FRAMES, WINDOWS]),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(12, 40),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_neighbours_chunks_and_budgets_do_not_change_the_text(
    spec: ModelSpec, chunks: list[int], step_positions: int, step_embeds: int, streams: int
) -> None:
    spec = replace(spec, max_delay_positions=4)
    alone = transcript(spec, ["x"], [1], 64, 64)
    assert (
        transcript(spec, [f"n{index}" for index in range(streams)], chunks, step_positions, step_embeds)
        == alone * streams
    )


def spoken(task: DecodeTask, spec: ModelSpec) -> DecodeResult:
    """A model whose words depend on how its windows are cut: each says where it began and ended."""
    if not spec.rereads_window:
        return execute(spec, task, 0)
    timed = [TimedToken(2 + (7 * task.base + task.end + task.final) % 50, task.end, task.end)]
    return DecodeResult(timed=timed, keep_from=task.end if task.final else task.end - 4)


def uploaded(spec: ModelSpec, budgets: list[int | None], laid_aside: list[int], live: int) -> list[str]:
    """What two uploads of different length say beside live streams, under these budgets, one for each plan in turn;
    some tasks are laid aside so often."""
    engine = build(spec, 2 + live, step_positions=16, step_embeds=16)
    lengths = {"u0": 70, "u1": 45} | {f"l{index}": 60 for index in range(live)}
    said = dict.fromkeys(lengths, "")
    for name in lengths:
        engine.admit(Open(name, live=name.startswith("l")))
    fed, steps, patience = dict.fromkeys(lengths, 0), 0, dict.fromkeys(lengths, 0)
    while engine.streams:
        for name, length in lengths.items():
            # Live audio comes position by position, an upload as fast as it goes.
            until = min(length, fed[name] + (1 if name.startswith("l") else 30))
            places = range(fed[name], until)
            items = [
                Item(place + spec.prefix_positions, 1, place * 10, b"%s%d" % (name.encode(), place), b"pcm")
                for place in places
            ]
            if name in engine.streams and items:
                fed[name] = until
                engine.feed(name, items, steps)
                if until == length:
                    engine.finish(name)
        plan = engine.plan(upload_positions=budgets[steps % len(budgets)])
        results = []
        for task in plan.decode:
            patience[task.stream] += 1
            later = spec.rereads_window and patience[task.stream] <= laid_aside[task.end % len(laid_aside)]
            lays_aside = later and not task.stream.startswith("l")
            patience[task.stream] *= lays_aside
            results.append(DecodeResult(unfinished=True) if lays_aside else spoken(task, spec))
        for output in engine.commit(plan, results):
            if isinstance(output, Text):
                said[output.stream] += output.delta
        engine.check_integrity()
        steps += 1
        assert steps < 3_000, "an upload waits for ever"
    return [said["u0"], said["u1"]]


@settings(max_examples=60, deadline=None)
@given(
    known=st.integers(1, 40),
    replay_positions=st.sampled_from([4, 8, 16]),
    items=st.lists(st.integers(1, 5), min_size=1, max_size=14),
    flushes=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=5),
    tokens=st.randoms(use_true_random=False),
    fed_at_once=st.integers(1, 4),
    ahead=st.integers(0, 3),
)
def test_a_rebuild_in_chunks_says_what_one_position_at_a_time_says(
    known: int,
    replay_positions: int,
    items: list[int],
    flushes: list[tuple[int, bool]],
    tokens: Random,
    fed_at_once: int,
    ahead: int,
) -> None:
    """Chunks of known tokens reach beyond flushes; the text is ended there all the same. Plans with the next chunks are
    made while earlier ones are under way."""
    prefix, length = FRAMES.prefix_positions, sum(items)
    model = [tokens.choice([0, 0, 1, 2 + number % 50]) for number in range(length)]
    marks = sorted((min(position, length), ends_text) for position, ends_text in flushes)

    def run(positions: int, batch: int, ahead: int) -> tuple[list[object], list[int]]:
        spec = replace(FRAMES, replay_positions=positions, embeds_per_stream=48)
        engine = build(spec, streams=1, step_positions=64, step_embeds=64)
        engine.admit(Open("a", forced_tokens=model[:known]))
        said: list[object] = []
        lengths: list[int] = []

        def hear(outputs: list[Output]) -> None:
            for output in outputs:
                if isinstance(output, Text):
                    said.extend((word.text, word.start_sample, word.end_sample) for word in output.words)
                else:
                    said.append(output)

        def drain() -> None:
            under_way: deque[StepPlan] = deque()
            while engine.has_work() or engine.rebuild_backlog or under_way:
                plan = engine.plan()
                lengths.extend(task.end - task.start for task in plan.decode)
                under_way.append(plan)
                engine.check_integrity()
                while len(under_way) > (ahead if plan.decode else 0):
                    plan = under_way.popleft()
                    answers = [DecodeResult(model[task.start - prefix : task.end - prefix]) for task in plan.decode]
                    hear(engine.commit(plan, answers))
                    engine.check_integrity()
            hear(engine.take_replies())

        for tag, (position, ends_text) in enumerate(marks):
            engine.flush("a", tag if ends_text else None, prefix + position)
        offset = 0
        for number, count in enumerate(items):
            key = b"%d" % number
            engine.feed("a", [Item(prefix + offset, count, offset * FRAMES.samples_per_position, key, b"pcm")], 0)
            offset += count
            if number % batch == batch - 1:
                drain()
        engine.finish("a")
        drain()
        assert not engine.streams
        return said, lengths

    said, lengths = run(replay_positions, fed_at_once, ahead)
    assert said == run(1, 1, 0)[0]
    assert max(lengths) <= max(replay_positions, scheduler_module.MAX_CATCH_UP_POSITIONS)


@given(
    st.sampled_from([FRAMES, WINDOWS]),
    st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_no_budget_changes_the_words_of_an_upload(
    spec: ModelSpec, budgets: list[int | None], laid_aside: list[int], live: int
) -> None:
    alone = uploaded(spec, [None], [0], 0)
    assert all(alone)
    # One plan in so many lets a whole window in: without that no upload could end.
    assert uploaded(spec, [*budgets, spec.window_positions], laid_aside, live) == alone


def full_engine(resident: int, streams: int, uploads: int = 0) -> Scheduler:
    """A scheduler with this many open live streams, room for uploads, and pages for some of them."""
    pages = tuple(group.ring_pages * resident for group in FRAMES.kv_groups)
    slots = streams + uploads
    limits = Limits(slots, FRAMES.embeds_per_stream * slots, pages, 4096, 4096, resident_streams=resident)
    engine = Scheduler(FRAMES, limits, VOCABULARY)
    for number in range(streams):
        engine.admit(Open(f"s{number}"))
    return engine


def one_item(name: str, position: int) -> Item:
    return Item(FRAMES.prefix_positions + position, 1, position * 10, b"%s%d" % (name.encode(), position), b"pcm")


def test_a_full_engine_parks_no_more_streams_than_the_host_has_buffers_for() -> None:
    """Pages are kept free, also for uploads, so more streams are parked than are too many for the device; and a step
    parks before it brings back."""
    resident, streams, uploads = 160, 300, 18
    engine, parked, most = full_engine(resident, streams, uploads), set[int](), 0
    second = scheduler_module.PARKED_AFTER_NS

    def run() -> None:
        nonlocal most
        while engine.has_work():
            plan = engine.plan()
            parked.difference_update(plan.closed)
            parked.update(task.slot for task in plan.parked)
            most = max(most, len(parked))
            parked.difference_update(task.slot for task in plan.restored)
            engine.commit(plan, [execute(FRAMES, task, 0) for task in plan.decode])
            engine.check_integrity()
            assert engine.parked == len(parked)

    for turn in range(3 * streams):
        name = f"s{turn * 7 % streams}"
        position = engine.streams[name].available - FRAMES.prefix_positions
        engine.feed(name, [one_item(name, position)], turn * 2 * second)
        if turn % 50 == 0:
            engine.admit(Open(f"u{turn}", live=False))
            engine.feed(f"u{turn}", [one_item(f"u{turn}", 0)], turn * 2 * second)
        if turn % 4 == 0:
            run()
    run()
    assert len(engine.streams) == streams + uploads
    too_many = streams + uploads - resident
    assert too_many + engine.limits.moves < most <= too_many + SPARE_HOST_BUFFERS


def test_streams_without_pages_get_them_when_the_others_have_fallen_silent() -> None:
    """All clients send at once and wait for their text: no further audio tells the time."""
    engine = full_engine(32, 48)
    now = 10 * scheduler_module.PARKED_AFTER_NS
    for name in list(engine.streams):
        engine.feed(name, [one_item(name, 0)], now)
        engine.flush(name, 1)
    flushed: set[str] = set()
    for _ in range(2):
        while engine.has_work():
            plan = engine.plan()
            outputs = engine.commit(plan, [execute(FRAMES, task, 0) for task in plan.decode])
            flushed |= {output.stream for output in outputs if isinstance(output, Flushed)}
        now += 2 * scheduler_module.PARKED_AFTER_NS
        engine.advance_clock(now)
    assert len(flushed) == 48
