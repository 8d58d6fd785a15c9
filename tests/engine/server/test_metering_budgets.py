"""The share of a step for uploads: counted in positions and pieces of work, on a clock that the test moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from engine.core.plan import DecodeResult, StepPlan, TimedToken
from engine.core.scheduler import (
    FIRST_WORDS_STREAMS,
    MAX_CATCH_UP_POSITIONS,
    PARKED_AFTER_NS,
    STALLED_STEPS,
    Limits,
    Scheduler,
)
from engine.messages import Abort, Closed, Feed, Finish, Item, Open, Output, Text
from engine.runner.base import SynchronousRunner, never
from engine.server.loop import EngineLoop
from engine.server.metering import (
    BACKLOG_STEPS,
    LATE_SHARE,
    LIVE_STEPS_A_REBUILD,
    LONE_REPLAY_STEPS_AHEAD,
    MIN_REBUILD_POSITIONS,
    PROBE_EVERY,
    REPLAY_STEPS_AHEAD,
    SHARE_OF_STRIDE,
    RebuildBudget,
)
from engine.spec import KvGroup, ModelSpec, Vocabulary

FRAMES = ModelSpec(name="frames", sample_rate=16_000, samples_per_position=1280)
WINDOWED = replace(FRAMES, rereads_window=True, stride_positions=10, window_positions=40, embeds_per_stream=60)
STRIDE_NS = 800_000_000
PIECE_NS = 20_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@dataclass
class Batching(SynchronousRunner):
    """A model whose step costs so much, and so much more for every position."""

    clock: Clock
    step_ns: int = 10_000_000
    position_ns: int = 400_000
    # Further cost of a step that rebuilds nothing.
    live_ns: int = 0
    spec: ModelSpec = FRAMES
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary([b"", b" a"]))
    plans: list[StepPlan] = field(default_factory=list)
    # Positions that live streams were behind after each step.
    behind: list[int] = field(default_factory=list)
    # Whether steps overlap, and when the device has finished all of them.
    overlaps_steps: bool = False
    free_at: int = 0

    def check_open(self, message: Open) -> None:
        pass

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        if not self.overlaps_steps:
            return super().launch(plan, time_is_up)
        launched_at = self.clock.now
        results = self.compute(plan, time_is_up)
        done_at = self.free_at = max(self.free_at, launched_at) + (self.clock.now - launched_at)
        self.clock.now = launched_at

        def wait() -> list[DecodeResult]:
            self.clock.now = max(self.clock.now, done_at)
            return results

        return wait

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        self.plans.append(plan)
        self.clock.now += self.step_ns + self.position_ns * sum(task.end - task.start for task in plan.decode)
        if plan.decode and not plan.rebuilt_positions:
            self.clock.now += self.live_ns
        return [DecodeResult([1] * (task.end - task.start)) for task in plan.decode]

    def backlog(self) -> list[int]:
        """Positions of backlog in each step so far."""
        return [sum(task.end - task.base for task in plan.decode[plan.live :]) for plan in self.plans]


@dataclass
class Pausing(Batching):
    """Reads a window of backlog in so many pieces; says where each window began and ended."""

    pauses_uploads = True
    pieces: int = 30
    spec: ModelSpec = WINDOWED
    work: Iterator[None] | None = None
    done: list[int] = field(default_factory=list)
    stints: list[int] = field(default_factory=list)

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        self.plans.append(replace(plan, decode=list(plan.decode)))
        live = [self.read(task.base, task.end) for task in plan.decode[: plan.live]]
        self.clock.now += PIECE_NS * len(live)
        backlog = plan.decode[plan.live :]
        if not backlog:
            return live
        self.work = self.work or iter([None] * self.pieces * len(backlog))
        self.stints.append(0)
        for _ in self.work:
            self.clock.now += PIECE_NS
            self.stints[-1] += 1
            if time_is_up():
                return live + [DecodeResult(unfinished=True) for _ in backlog]
        self.work = None
        return live + [self.read(task.base, task.end) for task in backlog]

    @staticmethod
    def read(base: int, end: int) -> DecodeResult:
        return DecodeResult(timed=[TimedToken(1, base, end)], keep_from=max(base, end - 8))


def loop_of(runner: Batching, streams: int = 40) -> EngineLoop:
    limits = Limits(streams, streams * 60, step_positions=320, step_embeds=320)
    return EngineLoop(Scheduler(runner.spec, limits, runner.vocabulary), runner, clock=runner.clock)


def audio(name: str, start: int, count: int, spec: ModelSpec) -> Feed:
    payload = np.ones(spec.samples_per_position, np.float32)
    keys = [b"%s%d" % (name.encode(), position) for position in range(start, start + count)]
    return Feed(name, [Item(start + i, 1, (start + i) * 1280, key, payload) for i, key in enumerate(keys)])


def upload(loop: EngineLoop, name: str, positions: int) -> None:
    spec = loop.scheduler.spec
    loop.submit([Open(name, live=False), audio(name, 0, positions, spec), Finish(name)], 0)


def drain(loop: EngineLoop) -> list[Output]:
    outputs: list[Output] = []
    while loop.has_work():
        step = loop.step()
        outputs += [] if step is None else step.outputs
    return outputs


class TestPositions:
    """A model that computes a step as one batch."""

    def live_beside(self, uploads: int, steps: int, position_ns: int = 400_000) -> Batching:
        runner = Batching(Clock(), position_ns=position_ns)
        loop = loop_of(runner)
        loop.submit([Open("live")], 0)
        for number in range(uploads):
            upload(loop, f"u{number}", 400)
        for position in range(steps):
            loop.submit([audio("live", position, 1, FRAMES)], position)
            loop.step()
        return runner

    def test_backlog_in_a_step_keeps_to_the_measured_budget(self) -> None:
        runner = self.live_beside(uploads=35, steps=300)
        assert all(plan.live == 1 for plan in runner.plans), "live streams are always in"
        assert all(count >= 1 for count in runner.backlog()), "backlog goes on in every step"
        # 8 ms of the 80 that a live stream gives, at 0.4 ms for a position; now and then twice as much.
        fitting = SHARE_OF_STRIDE * 80e6 / 400_000
        assert fitting * 0.8 <= np.median(runner.backlog()[-40:]) <= fitting * 1.2
        assert sum(count > fitting * 1.2 for count in runner.backlog()) <= 300 / PROBE_EVERY

    def test_a_slow_step_is_logged_by_part_and_not_every_time(self, caplog: pytest.LogCaptureFixture) -> None:
        for step_ns, told in ((499_000_000, 0), (600_000_000, 3)):
            caplog.clear()
            loop = loop_of(Batching(Clock(), step_ns=step_ns, position_ns=0))
            loop.submit([Open("live")], 0)
            for position in range(40):
                loop.submit([audio("live", position, 1, FRAMES)], position)
                loop.step()
            lines = [record.getMessage() for record in caplog.records if "a step took" in record.getMessage()]
            assert len(lines) == told, "24 s of slow steps"
        assert "launch and device 0.60" in lines[0] and "1 streams, 1 positions" in lines[0]

    def test_a_model_whose_positions_cost_more_gets_fewer(self) -> None:
        costs = (400_000, 1_000_000, 50_000_000)
        counts = [np.median(self.live_beside(35, 300, ns).backlog()[-40:]) for ns in costs]
        assert counts[0] > counts[1] > counts[2] == 1

    def test_without_a_live_stream_backlog_fills_the_step(self) -> None:
        runner = Batching(Clock())
        loop = loop_of(runner)
        for number in range(35):
            upload(loop, f"u{number}", 20)
        drain(loop)
        assert runner.backlog()[:20] == [35] * 20

    def test_uploads_progress_alike(self) -> None:
        runner = self.live_beside(uploads=35, steps=400)
        ends = {task.stream: task.end for plan in runner.plans for task in plan.decode[plan.live :]}
        assert len(ends) == 35 and max(ends.values()) - min(ends.values()) <= 2


class TestPieces:
    """A model that lays backlog aside."""

    def test_live_steps_hold_no_backlog_and_backlog_stops_when_its_time_is_up(self) -> None:
        runner = Pausing(Clock())
        loop = loop_of(runner)
        loop.submit([Open("live")], 0)
        for number in range(4):
            upload(loop, f"u{number}", 100)
        most_waited = 0
        for position in range(100):
            loop.submit([audio("live", position, 1, WINDOWED)], position)
            began, until = runner.clock.now, runner.clock.now + 80_000_000
            while loop.has_work() and runner.clock.now < until:
                loop.step()
                if runner.plans[-1].live:
                    most_waited = max(most_waited, runner.clock.now - began)
            runner.clock.now = max(runner.clock.now, until)
        assert all(not plan.live or len(plan.decode) == plan.live for plan in runner.plans)
        # 80 ms of the 800 that a live stream gives, 20 for a piece.
        assert max(runner.stints) == SHARE_OF_STRIDE * STRIDE_NS / PIECE_NS
        assert most_waited <= SHARE_OF_STRIDE * STRIDE_NS + 2 * PIECE_NS

    def test_backlog_goes_on_between_live_steps_that_never_end(self) -> None:
        runner = Pausing(Clock())
        loop = loop_of(runner)
        loop.submit([Open("live"), audio("live", 0, 30, WINDOWED)], 0)
        upload(loop, "file", 100)
        finished = False
        for step in range(3, 600):
            loop.submit([audio("live", step * 10, 10, WINDOWED)], step)
            result = loop.step()
            outputs = [] if result is None else result.outputs
            finished = finished or any(isinstance(output, Closed) for output in outputs)
        assert finished, "an upload ends, however busy live streams are"
        kinds = [bool(plan.live) for plan in runner.plans[:100]]
        assert kinds == [True, False] * 50
        assert max(runner.stints) == 1, "one piece at a time while live audio waits"

    @pytest.mark.parametrize("live", [0, 1, 3])
    @pytest.mark.parametrize("pieces", [1, 7, 30])
    def test_the_words_of_uploads_are_those_of_a_run_without_pauses(self, live: int, pieces: int) -> None:
        def texts(live: int, pieces: int) -> dict[str, list[Text]]:
            runner = Pausing(Clock(), pieces=pieces)
            loop = loop_of(runner)
            for number in range(live):
                name = f"live{number}"
                loop.submit([Open(name), audio(name, 0, 200, WINDOWED), Finish(name)], 0)
            for number in range(4):
                upload(loop, f"u{number}", 90 + 20 * number)
            said: dict[str, list[Text]] = {}
            for output in drain(loop):
                if isinstance(output, Text) and output.stream.startswith("u"):
                    said.setdefault(output.stream, []).append(output)
            return said

        assert texts(live, pieces) == texts(0, 1)

    def test_an_upload_that_is_aborted_half_read_leaves_nothing(self) -> None:
        runner = Pausing(Clock())
        loop = loop_of(runner)
        for number in range(2):
            upload(loop, f"u{number}", 60)
        loop.step()
        loop.submit([Abort("u0")], 0)
        outputs = drain(loop)
        assert {output.stream for output in outputs if isinstance(output, Closed)} == {"u0", "u1"}
        loop.scheduler.check_integrity()
        assert not loop.scheduler.streams


REBUILT = replace(FRAMES, embeds_per_stream=64, replay_positions=64)


class TestRebuilding:
    """Streams whose tokens are known from another engine are computed again beside live ones."""

    def loop(self, streams: int, most: int = 2048, position_ns: int = 30_000) -> tuple[EngineLoop, Batching]:
        runner = Batching(Clock(), position_ns=position_ns, spec=REBUILT)
        limits = Limits(streams, streams * 64, step_positions=4096, step_embeds=4096, rebuild_positions=most)
        return EngineLoop(Scheduler(REBUILT, limits, runner.vocabulary), runner, clock=runner.clock), runner

    def bring_back(self, loop: EngineLoop, names: list[str], positions: int, new: int = 1) -> None:
        for name in names:
            loop.submit([Open(name, forced_tokens=[1] * positions), audio(name, 0, positions + new, REBUILT)], 0)

    def beside_live(
        self, live: int, rebuilt: int, position_ns: int = 30_000, live_ns: int = 0, overlaps: bool = False
    ) -> Batching:
        """Live streams hear a frame every 80 ms of the runner's clock, until the others are rebuilt."""
        loop, runner = self.loop(live + rebuilt, position_ns=position_ns)
        runner.live_ns, runner.overlaps_steps = live_ns, overlaps
        loop.submit([Open(f"l{number}") for number in range(live)], 0)
        loop.step()
        self.bring_back(loop, [f"r{number}" for number in range(rebuilt)], 400)
        frames = 0
        while loop.scheduler.rebuilding:
            while frames * 80_000_000 <= runner.clock.now:
                loop.submit([audio(f"l{number}", frames, 1, REBUILT) for number in range(live)], frames * 80_000_000)
                frames += 1
            loop.scheduler.advance_clock(runner.clock.now)
            is_late, before = loop.scheduler.longest_wait_ns > LATE_SHARE * 80_000_000, runner.plans
            after_rebuilding = bool(before) and before[-1].rebuilt_positions > 0
            loop.step()
            runner.behind += [
                stream.available - stream.computed for name, stream in loop.scheduler.streams.items() if name[0] == "l"
            ]
            if is_late and after_rebuilding:
                assert not runner.plans[-1].rebuilt_positions, "a late live frame waits for one rebuilding step at most"
        behind = [loop.scheduler.streams[f"l{number}"] for number in range(live)]
        assert max(stream.available - stream.computed for stream in behind) <= 2
        return runner

    def test_no_step_has_live_frames_and_known_ones(self) -> None:
        runner = self.beside_live(live=10, rebuilt=20)
        kinds = [
            (plan.rebuilt_positions > 0, {task.stream[0] for task in plan.decode})
            for plan in runner.plans
            if plan.decode
        ]
        assert (True, {"r"}) in kinds
        assert all(names == {"r"} for rebuilds, names in kinds if rebuilds)
        assert all(
            task.end - task.start == 1 for plan in runner.plans if not plan.rebuilt_positions for task in plan.decode
        )

    @pytest.mark.parametrize(("live", "rebuilt", "share"), [(40, 10, 0.25), (10, 40, 0.5)])
    def test_rebuilding_steps_take_no_longer_than_their_share_of_a_frame(
        self, live: int, rebuilt: int, share: float
    ) -> None:
        runner = self.beside_live(live, rebuilt, position_ns=20_000)
        sizes = [plan.rebuilt_positions for plan in runner.plans if plan.rebuilt_positions][3:]
        assert max(runner.step_ns + runner.position_ns * size for size in sizes) <= 1.1 * share * 80_000_000
        assert max(sizes) > MIN_REBUILD_POSITIONS

    def test_long_live_steps_leave_less_time_for_rebuilds(self) -> None:
        """A live step of 73 ms and a rebuilding one of a quarter of a frame do not fit into a frame: the live streams
        would be later with each frame."""
        runner = self.beside_live(live=40, rebuilt=30, live_ns=62_000_000)
        kinds = [plan.rebuilt_positions > 0 for plan in runner.plans if plan.decode]
        first = kinds.index(True)
        rebuilds = [number for number, rebuilds in enumerate(kinds) if rebuilds and number > first + 8]
        apart = {after - before for before, after in itertools.pairwise(rebuilds[:-8])}
        assert apart and max(apart) <= LIVE_STEPS_A_REBUILD + 1, "a rebuild always goes on"

    def budget(self, live: int, rebuilt: int) -> RebuildBudget:
        """The budget of an engine on which live streams and rebuilds always wait; a position takes 10 us."""
        loop, _ = self.loop(live + rebuilt)
        loop.submit([Open(f"l{number}") for number in range(live)], 0)
        self.bring_back(loop, [f"r{number}" for number in range(rebuilt)], 400)
        loop.submit([audio(f"l{number}", 0, 1, REBUILT) for number in range(live)], 0)
        budget = RebuildBudget(loop.scheduler)
        for _ in range(40):
            budget.account(1000, 10_000_000)
        return budget

    def test_nothing_is_rebuilt_while_live_audio_is_late(self) -> None:
        """Whatever made it late: the device, the host, or another engine on the device."""
        budget = self.budget(live=40, rebuilt=10)
        scheduler = budget._scheduler
        assert budget.positions() > 0
        scheduler.advance_clock(int(LATE_SHARE * 80_000_000) + 1)
        assert [budget.positions() > 0 for _ in range(2 * (LIVE_STEPS_A_REBUILD + 1))] == (
            [False] * LIVE_STEPS_A_REBUILD + [True]
        ) * 2, "a rebuild always goes on"

    def test_late_audio_of_recovering_streams_holds_up_no_rebuild(self) -> None:
        """They are late because they were rebuilt."""
        budget = self.budget(live=40, rebuilt=10)
        scheduler = budget._scheduler
        scheduler.recovering |= scheduler.streams.keys() - {"l0"}
        scheduler.advance_clock(1_000_000_000)
        assert scheduler.longest_wait_ns == 1_000_000_000
        scheduler.abort("l0")
        assert scheduler.longest_wait_ns == 0

    def test_audio_that_a_step_under_way_computes_waits_no_longer(self) -> None:
        budget = self.budget(live=2, rebuilt=0)
        scheduler = budget._scheduler
        scheduler.advance_clock(50)
        plan = scheduler.plan()
        assert [task.stream for task in plan.decode] == ["l0", "l1"] and scheduler.longest_wait_ns == 0
        scheduler.feed("l1", audio("l1", 1, 1, REBUILT).items, 60)
        scheduler.advance_clock(100)
        assert scheduler.longest_wait_ns == 40

    def test_live_streams_stay_on_time_where_steps_overlap(self) -> None:
        """All of them may be in the step under way when the next one is planned: that does not make it time for a
        rebuild if they are late."""
        runner = self.beside_live(live=40, rebuilt=30, live_ns=55_000_000, overlaps=True)
        assert max(runner.behind) <= 5

    def test_a_stream_that_waits_for_pages_does_not_wait_for_ever(self) -> None:
        """Streams that are being rebuilt have all pages and keep them until they are rebuilt."""
        spec = replace(REBUILT, kv_groups=(KvGroup("decoder", 64, 16, 1),))
        runner = Batching(Clock(), spec=spec)
        pages = 2 * spec.kv_groups[0].ring_pages
        limits = Limits(4, 256, (pages,), 4096, 4096, 2048, resident_streams=2)
        loop = EngineLoop(Scheduler(spec, limits, runner.vocabulary), runner, clock=runner.clock)
        for name in ("l0", "l1"):
            loop.submit([Open(name), audio(name, 0, 1, spec)], 0)
            drain(loop)
        now = 2 * PARKED_AFTER_NS
        for name in ("r0", "r1"):
            loop.submit([Open(name, forced_tokens=[1] * 2000), audio(name, 0, 2000, spec)], now)
        loop.step()
        loop.submit([audio("l0", 1, 1, spec)], now)
        for _ in range(1000):
            now += 10_000_000
            loop.scheduler.advance_clock(now)
            if loop.has_work():
                loop.step()
        assert not loop.scheduler.rebuilding and loop.scheduler.streams["l0"].computed == 2

    @pytest.mark.parametrize("is_upload", [True, False])
    def test_what_is_not_rebuilt_goes_on_while_the_streams_on_time_are_silent(self, is_upload: bool) -> None:
        """Neither uploads nor streams that have just been rebuilt are late, and still they do not wait for all
        rebuilds."""
        loop, runner = self.loop(60)
        loop.submit([Open(f"l{number}") for number in range(40)], 0)
        self.bring_back(loop, [f"r{number}" for number in range(10)], 1600)
        if is_upload:
            upload(loop, "o", 10)
        else:
            self.bring_back(loop, ["o"], 16, new=10)
        drain(loop)
        kinds = [{task.stream[0] for task in plan.decode if task.start >= 16 or is_upload} for plan in runner.plans]
        others = [number for number, names in enumerate(kinds) if "o" in names]
        last_rebuild = max(number for number, plan in enumerate(runner.plans) if plan.rebuilt_positions)
        assert others[-1] < last_rebuild, "they waited until all others were rebuilt"

    @pytest.mark.parametrize("overlaps", [False, True])
    def test_an_upload_that_lost_its_engine_does_not_wait_for_rebuilds_of_live_streams(self, overlaps: bool) -> None:
        """It is rebuilt among the uploads, and there may be no live stream."""
        loop, runner = self.loop(4)
        runner.overlaps_steps = overlaps
        loop.submit([Open("u", live=False, forced_tokens=[1] * 2000), audio("u", 0, 2000, REBUILT)], 0)
        drain(loop)
        assert not loop.scheduler.rebuilding
        empty = sum(not plan.decode for plan in runner.plans)
        assert empty <= len(runner.plans) - empty

    def test_an_engine_with_a_windowed_model_sets_no_bound_for_replays(self) -> None:
        assert loop_of(Batching(Clock(), spec=WINDOWED)).replay_positions_under_way == 0

    def test_gateways_send_no_more_replays_ahead_than_a_few_steps_rebuild(self) -> None:
        loop, _ = self.loop(160)
        loop.submit([Open(f"r{number}", forced_tokens=[1] * 640) for number in range(160)], 0)
        assert loop.replay_positions_under_way == LONE_REPLAY_STEPS_AHEAD * 2048
        loop.submit([Abort(f"r{number}") for number in range(80, 160)], 0)
        loop.submit([Open(f"l{number}") for number in range(80)], 0)
        assert loop.replay_positions_under_way == REPLAY_STEPS_AHEAD * MIN_REBUILD_POSITIONS, "live audio would wait"

    def test_streams_that_died_together_have_the_whole_device(self) -> None:
        loop, runner = self.loop(160, position_ns=100_000)
        self.bring_back(loop, [f"r{number}" for number in range(160)], 128, new=20)
        drain(loop)
        sizes = [plan.rebuilt_positions for plan in runner.plans if plan.rebuilt_positions]
        assert sizes[:6] == [2048] * 6 and sum(sizes) == 160 * 128

    def test_streams_that_were_just_rebuilt_have_the_next_words(self) -> None:
        """A step of all others would take longer, and has more positions of those that have words already."""
        loop, runner = self.loop(400, position_ns=10_000)
        self.bring_back(loop, [f"first{number}" for number in range(200)], 16, new=400)
        self.bring_back(loop, [f"r{number}" for number in range(100)], 640, new=400)
        while loop.scheduler.rebuilding:
            streams = loop.scheduler.streams
            new = {name: s.computed - s.forced_until for name, s in streams.items() if s.computed >= s.forced_until}
            loop.step()
            plan = runner.plans[-1]
            if plan.rebuilt_positions or not plan.decode:
                continue
            has_more = {task.stream for task in plan.decode}
            assert len(has_more) == min(FIRST_WORDS_STREAMS, len(new))
            assert max(new.pop(name) for name in has_more) <= min(new.values(), default=400)

    def test_the_last_streams_are_rebuilt_without_steps_of_all_others_in_between(self) -> None:
        """While a step under way has all streams with more to rebuild, the next step is empty."""
        loop, runner = self.loop(160, position_ns=100_000)
        runner.overlaps_steps = True
        self.bring_back(loop, [f"done{number}" for number in range(150)], 16, new=1000)
        self.bring_back(loop, [f"r{number}" for number in range(8)], 1024, new=20)
        drain(loop)
        kinds = [plan.rebuilt_positions > 0 for plan in runner.plans if plan.decode]
        last = len(kinds) - kinds[::-1].index(True)
        few = kinds[last - 24 : last]
        assert few.count(False) <= 2, few
        assert any(not plan.decode for plan in runner.plans)

    def test_replayed_audio_is_taken_in_for_a_few_steps_and_no_more(self) -> None:
        loop, _ = self.loop(160)
        room = BACKLOG_STEPS * 2048
        assert loop.replay_room == 0, "nothing is rebuilt"
        loop.submit([Open(f"r{number}", forced_tokens=[1] * 640) for number in range(160)], 0)
        assert loop.replay_room == room
        loop.submit([audio(f"r{number}", 0, 16, REBUILT) for number in range(160)], 0)
        assert loop.replay_room == room - 16 * 160
        loop.submit([audio(f"r{number}", 16, 32, REBUILT) for number in range(160)], 0)
        assert loop.replay_room == 0
        plan = loop.scheduler.plan(live=False, upload_positions=0, rebuild_positions=2048)
        assert plan.rebuilt_positions == 2048
        assert loop.replay_room == room - 48 * 160 + 2048, "what is being computed counts no more"

    def test_no_more_is_taken_in_than_is_still_to_be_replayed(self) -> None:
        """Late audio comes after the replays: to take it in would keep the thread from the last rebuilds."""
        loop, _ = self.loop(160)
        loop.submit([Open(f"r{number}", forced_tokens=[1] * 64) for number in range(10)], 0)
        assert loop.replay_room == 10 * 64
        loop.submit([audio(f"r{number}", 0, 48, REBUILT) for number in range(10)], 0)
        assert loop.replay_room == 10 * 16
        loop.submit([audio(f"r{number}", 48, 20, REBUILT) for number in range(10)], 0)
        assert loop.replay_room == 0 and loop.scheduler.rebuilding

    def test_a_few_new_streams_leave_the_rebuild_most_of_the_device(self) -> None:
        """Their steps have few of the many streams that were rebuilt and are late."""
        loop, runner = self.loop(400, position_ns=35_000)
        loop.submit([Open(f"l{number}") for number in range(3)], 0)
        self.bring_back(loop, [f"first{number}" for number in range(250)], 16, new=400)
        self.bring_back(loop, [f"r{number}" for number in range(100)], 640, new=400)
        frames = 0
        while loop.scheduler.rebuilding:
            while frames * 80_000_000 <= runner.clock.now:
                loop.submit([audio(f"l{number}", frames, 1, REBUILT) for number in range(3)], frames * 80_000_000)
                frames += 1
            loop.scheduler.advance_clock(runner.clock.now)
            loop.step()
            for number in range(3):
                stream = loop.scheduler.streams[f"l{number}"]
                assert stream.available - stream.computed <= 2
        rebuilt = [plan for plan in runner.plans if plan.rebuilt_positions]
        others = [plan for plan in runner.plans if plan.decode and not plan.rebuilt_positions]
        assert all(len(plan.decode) <= 3 + FIRST_WORDS_STREAMS for plan in others)
        assert sum(plan.rebuilt_positions for plan in rebuilt) * 35_000 > 0.55 * runner.clock.now

    def test_the_last_positions_are_no_short_rest_whenever_their_audio_comes(self) -> None:
        """Fewer positions than a part cost up to seven passes."""
        for known in range(64, 129, 3):
            loop, runner = self.loop(1)
            loop.submit([Open("r", forced_tokens=[1] * known)], 0)
            for start in range(0, known, 7):
                loop.submit([audio("r", start, min(7, known - start), REBUILT)], 0)
                drain(loop)
            sizes = [task.end - task.start for plan in runner.plans for task in plan.decode]
            assert sum(sizes) == known and min(sizes) >= 16
            assert all(size % 16 == 0 for size in sizes[:-1])

    def test_each_stream_goes_on_as_soon_as_it_is_rebuilt(self) -> None:
        loop, runner = self.loop(160)
        self.bring_back(loop, [f"r{number}" for number in range(160)], 640)
        drain(loop)
        new = [number for number, plan in enumerate(runner.plans) if any(task.end > 640 for task in plan.decode)]
        rebuilt = [number for number, plan in enumerate(runner.plans) if plan.rebuilt_positions]
        assert new[0] < rebuilt[len(rebuilt) // 2]

    def test_few_positions_are_spread_over_many_streams_and_leave_no_short_rests(self) -> None:
        """A pass over many streams costs little more than one over few."""
        runner = self.beside_live(live=60, rebuilt=40, position_ns=40_000)
        plans = [[task.end - task.start for task in plan.decode] for plan in runner.plans if plan.rebuilt_positions]
        assert all(size % 16 == 0 or size > 16 for plan in plans for size in plan)
        assert min(len(plan) for plan in plans[: len(plans) // 2]) >= 12

    def test_streams_that_are_late_hear_several_frames_in_one_step(self) -> None:
        """Forty frames came while they were rebuilt; others are on time."""
        loop, runner = self.loop(6)
        loop.submit([Open("l")], 0)
        for name in "abc":
            loop.submit([Open(name, forced_tokens=[1] * 64), audio(name, 0, 104, REBUILT)], 0)
        while loop.scheduler.rebuilding:
            loop.step()
        runner.plans.clear()
        drain(loop)
        assert len(runner.plans) <= 11 and not loop.scheduler.recovering
        assert max(task.end - task.start for plan in runner.plans for task in plan.decode) == 4

    def test_rebuilt_streams_catch_up_while_the_rest_is_rebuilt(self) -> None:
        """All streams died together, and twenty frames came since: who is rebuilt first has words first, and the steps
        of the rest do not become smaller when the first have caught up."""
        loop, runner = self.loop(100)
        early, late = [f"a{number}" for number in range(32)], [f"b{number}" for number in range(68)]
        self.bring_back(loop, early, 128, new=20)
        self.bring_back(loop, late, 2560, new=20)
        drain(loop)
        last_rebuild = max(number for number, plan in enumerate(runner.plans) if plan.rebuilt_positions)
        before = runner.plans[:last_rebuild]
        new = [task for plan in before for task in plan.decode if task.stream in early and task.start >= 128]
        assert max(task.end - task.start for task in new) == MAX_CATCH_UP_POSITIONS
        assert {task.stream for task in new if task.end == 148} == set(early), "they had caught up before"
        sizes = [plan.rebuilt_positions for plan in before if plan.rebuilt_positions]
        assert min(sizes[: len(sizes) * 2 // 3]) == 2048 and min(sizes) >= 4 * 64, "at the end four streams are left"
        kinds = [plan.rebuilt_positions > 0 for plan in runner.plans if plan.decode]
        assert [True, True, False] in [kinds[start : start + 3] for start in range(last_rebuild)]
        assert not loop.scheduler.recovering and not loop.scheduler.rebuilding

    def test_streams_without_further_audio_are_on_time_after_the_last_rebuild(self) -> None:
        loop, _ = self.loop(3)
        self.bring_back(loop, ["a"], 64)
        loop.submit([Open("b", forced_tokens=[1] * 64), Open("c", forced_tokens=[1] * 64)], 0)
        drain(loop)
        assert loop.scheduler.recovering == {"a", "b", "c"} and loop.scheduler.rebuilding == {"b", "c"}
        loop.submit([audio("b", 0, 65, REBUILT)], 0)
        drain(loop)
        loop.submit([Abort("c")], 0)
        drain(loop)
        assert not loop.scheduler.recovering and loop.scheduler.on_time_count == 2

    def test_a_rebuild_whose_audio_does_not_come_holds_up_nobody_for_long(self) -> None:
        loop, _ = self.loop(3)
        self.bring_back(loop, ["a"], 64)
        loop.submit([Open("b", forced_tokens=[1] * 64)], 0)
        for position in range(65, 65 + STALLED_STEPS + 5):
            loop.submit([audio("a", position, 1, REBUILT)], 0)
            loop.step()
        assert loop.scheduler.recovering == loop.scheduler.rebuilding == {"b"}

    def test_one_slow_step_does_not_make_the_next_ones_small(self) -> None:
        """A kernel was loaded, or the machine was busy elsewhere."""
        loop, _ = self.loop(4)
        loop.submit([Open("l")], 0)
        self.bring_back(loop, ["r"], 400)
        budget = loop._rebuild
        for _ in range(20):
            budget.account(1000, 20_000_000)
        usual = budget.positions()
        budget.account(1000, 20_000_000_000)
        assert budget.positions() > usual // 2
