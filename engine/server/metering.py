"""Measures how long steps take (`StepMeter`), and limits uploads and rebuilds by it (`UploadBudget`, `RebuildBudget`).

A part of the engine loop. `LoadReport` (`engine/server/host.py`) computes from these measurements the load that the
gateways get, and they compute the engine's capacity from it (`engine/client/pool.py`). An upload is a stream that is
not live. A rebuild computes the past audio of a resumed stream again.

The time of a step has a fixed part and a part per stream (or position), which are measured separately (`StepCost`,
`LiveCost`), because load alone does not say how many more streams fit. With batching most of the time is fixed, and an
engine is busy long before it is full. Without batching the time grows with each stream, and a busy engine is full. The
parts are estimated by least squares over the last steps; the weight of a step decreases with its age.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Steps needed for a measurement.
ENOUGH_STEPS = 8
# Time over which steps are averaged, about. The weight of the newest step is kept within these bounds.
AVERAGING_NS = 20e9
MIN_NEWEST_WEIGHT, MAX_NEWEST_WEIGHT = 1 / 256, 1 / ENOUGH_STEPS
# Until batches of different sizes have run, the fixed part cannot be separated, and all cost counts as per-stream cost.
# At this variance of batch sizes, that assumption and the measured slope have equal weight.
PRIOR_VARIANCE = 0.05
# Lower bound of the cost per stream, as a share of the mean cost.
MIN_SHARE_OF_MEAN = 0.01


class StepCost:
    """Splits the cost of steps of different sizes (streams or positions) into a fixed part and a part per unit."""

    def __init__(self) -> None:
        self._steps = 0
        # When the last step was added.
        self._last_ns = 0
        # Weighted averages: of the size, the time, the square of the size, and the product of size and time.
        self.mean_size = 0.0
        self._ns = self._size_squared = self._product = 0.0

    def add(self, size: float, ns: float, now_ns: int) -> float:
        """Add a step of this size that took `ns`. Returns the weight it has in the averages."""
        self._steps += 1
        since_last = (now_ns - self._last_ns) / AVERAGING_NS
        self._last_ns = now_ns
        weight = max(1 / self._steps, min(max(MIN_NEWEST_WEIGHT, since_last), MAX_NEWEST_WEIGHT))
        self.mean_size += weight * (size - self.mean_size)
        self._ns += weight * (ns - self._ns)
        self._size_squared += weight * (size * size - self._size_squared)
        self._product += weight * (size * ns - self._product)
        return weight

    def parts(self) -> tuple[float, float] | None:
        """Return the nanoseconds of the fixed part and per unit of size; None while too little has been measured."""
        if self._steps < ENOUGH_STEPS:
            return None
        mean = self._ns / self.mean_size
        variance = max(0.0, self._size_squared - self.mean_size * self.mean_size)
        covariance = self._product - self.mean_size * self._ns
        slope = (covariance + PRIOR_VARIANCE * mean) / (variance + PRIOR_VARIANCE)
        per_unit = min(max(slope, MIN_SHARE_OF_MEAN * mean), mean)
        return self._ns - per_unit * self.mean_size, per_unit


class LiveCost:
    """The cost of live streams, as shares of the engine's time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discard all measurements, because they do not represent normal operation."""
        self._cost = StepCost()
        self._audio_ns = 0.0

    def add(self, streams: float, ns: float, audio_ns: float, now_ns: int) -> None:
        """Add a step of `ns` for this many live streams, with `audio_ns` of new audio in total."""
        self._audio_ns += self._cost.add(streams, ns, now_ns) * (audio_ns - self._audio_ns)

    def shares(self) -> tuple[float, float]:
        """Return the shares of the engine's time for the fixed part of steps, and per stream.

        Both are 0 while too little has been measured.
        """
        parts = self._cost.parts()
        if parts is None:
            return 0.0, 0.0
        # Nanoseconds between two steps of an active stream.
        period_ns = self._audio_ns / self._cost.mean_size
        return parts[0] / period_ns, parts[1] / period_ns


@dataclass(slots=True)
class StepTimes:
    """The time of the last step by part, in nanoseconds, and its size."""

    speech_ns: int = 0
    plan_ns: int = 0
    execute_ns: int = 0
    commit_ns: int = 0
    streams: int = 0
    positions: int = 0
    # Time spent on live streams, and the part of it that was speech detection.
    live_ns: float = 0.0
    live_speech_ns: float = 0.0

    @property
    def ns(self) -> int:
        return self.speech_ns + self.plan_ns + self.execute_ns + self.commit_ns


@dataclass(slots=True)
class StepTotals:
    """The time of all steps since the start by part, in nanoseconds."""

    steps: int = 0
    speech_ns: int = 0
    plan_ns: int = 0
    execute_ns: int = 0
    commit_ns: int = 0
    live_ns: float = 0.0
    live_speech_ns: float = 0.0
    # Of the time in `execute_ns`: waiting for results, with the time to read them.
    wait_ns: int = 0

    def add(self, times: StepTimes) -> None:
        self.steps += 1
        self.speech_ns += times.speech_ns
        self.plan_ns += times.plan_ns
        self.execute_ns += times.execute_ns
        self.commit_ns += times.commit_ns
        self.live_ns += times.live_ns
        self.live_speech_ns += times.live_speech_ns

    @property
    def ns(self) -> int:
        return self.speech_ns + self.plan_ns + self.execute_ns + self.commit_ns


# A step of a frame-synchronous model that takes longer is logged, at most once in the second time.
SLOW_STEP_NS, LOG_EVERY_NS = 500_000_000, 10_000_000_000


class StepMeter:
    """Measures one step at a time, between `begin` and `end`. `lap` gives the time of a part, `account` records the
    time of a plan, `end` adds the step to the totals."""

    def __init__(self, spec: ModelSpec, clock: Callable[[], int]) -> None:
        self.times = StepTimes()
        self.totals = StepTotals()
        self.live_cost = LiveCost()
        # Cost of steps by the positions they read, of live streams and uploads.
        self.position_cost = StepCost()
        self._position_ns = spec.samples_per_position * 1e9 / spec.sample_rate
        self._clock = clock
        self._is_frame_synchronous = not spec.rereads_window
        self._slow_steps, self._logged_at = 0, -LOG_EVERY_NS
        # Time of the end of the last lap, and of the last commit.
        self.mark = 0
        self._committed_at = 0

    def begin(self) -> None:
        self.times = StepTimes(streams=self.times.streams, positions=self.times.positions)
        self.mark = self._clock()

    def wait_for(self, results: Callable[[], list[DecodeResult]]) -> list[DecodeResult]:
        """Wait for results of the device, and count how long that takes."""
        began = self._clock()
        found = results()
        self.totals.wait_ns += self._clock() - began
        return found

    def lap(self) -> int:
        """Return the nanoseconds since the previous lap."""
        before, self.mark = self.mark, self._clock()
        return self.mark - before

    def account(self, plan: StepPlan, began: int) -> int:
        """Record a plan that was begun at `began` and is committed now; returns its nanoseconds. If plans overlap, the
        common time counts for the first one, because the second had to wait for it."""
        times = self.times
        times.streams = len(plan.decode)
        times.positions = sum(task.end - task.start for task in plan.decode)
        ns = self.mark - max(began, self._committed_at)
        self._committed_at = self.mark
        read = sum(task.end - task.base for task in plan.decode)
        if read and not plan.rebuilt_positions:
            self.position_cost.add(read, ns, self.mark)
        live_ns = ns * _live_part(plan, read)
        times.live_ns += live_ns
        # Streams without new positions cost almost nothing: their text was ready.
        computed = [task.end - task.start for task in plan.decode[: plan.live] if task.end > task.start]
        if computed and not plan.rebuilt_positions:
            # A frame-synchronous stream computes each further position in a further pass, as in a step of its own.
            positions, passes, streams = sum(computed), 1, float(len(computed))
            if self._is_frame_synchronous:
                passes = max(computed)
                streams = positions / passes
            self.live_cost.add(streams, live_ns / passes, positions * self._position_ns / passes, self.mark)
        return ns

    def end(self, live_detection_share: float) -> None:
        """The step is over. `live_detection_share` is the share of speech detection that was for live streams."""
        self.times.live_speech_ns = self.times.speech_ns * live_detection_share
        self.times.live_ns += self.times.live_speech_ns
        self.totals.add(self.times)
        # Steps of windowed models may be long.
        if self._is_frame_synchronous and self.times.ns >= SLOW_STEP_NS:
            self._log_slow_step(self.times)

    def _log_slow_step(self, times: StepTimes) -> None:
        """All streams wait for a step, so the log must say which part of it was slow."""
        self._slow_steps += 1
        if self.mark - self._logged_at < LOG_EVERY_NS:
            return
        self._logged_at = self.mark
        logger.warning(
            "a step took %.2f s: speech detection %.2f, planning %.2f, launch and device %.2f, commit %.2f; "
            "%d streams, %d positions; %d slow steps so far",
            *(ns / 1e9 for ns in (times.ns, times.speech_ns, times.plan_ns, times.execute_ns, times.commit_ns)),
            times.streams,
            times.positions,
            self._slow_steps,
        )


def _live_part(plan: StepPlan, read: int) -> float:
    """Return the share of a plan's work that is for live streams; the whole plan reads `read` positions."""
    live = plan.live
    if live in (0, len(plan.decode)):
        return float(live > 0)
    return sum(task.end - task.base for task in plan.decode[:live]) / read


# Time for uploads in a step, as a share of the duration of a stride.
SHARE_OF_STRIDE = 0.1
# Time for a step that rebuilds streams, as a share of the duration of a stride: while most live streams are on time,
# and while most are being rebuilt.
REBUILD_SHARE, MAJORITY_REBUILD_SHARE = 0.25, 0.5
# Such a step rebuilds at least this many positions.
MIN_REBUILD_POSITIONS = 256
# While most live streams are on time, nothing is rebuilt while audio of one of them has waited for longer than this
# share of the duration of a stride: a step that rebuilds would make it later still, whether the device, the host or
# another engine on the same device made it late. A rebuild comes after at most so many live steps in any case.
LATE_SHARE = 0.25
LIVE_STEPS_A_REBUILD = 4
# Positions of replays that gateways may have under way, in rebuilding steps. Live audio waits for them, because the
# commands of a gateway are applied in order. While no stream is on time, the device must not wait for replays.
REPLAY_STEPS_AHEAD, LONE_REPLAY_STEPS_AHEAD = 2, 4
# Rebuilding steps for which the engine has received audio, besides one that is being computed. The next step takes
# streams that are not in that one, and they need a whole part each: two steps of audio are not enough.
BACKLOG_STEPS = 3
# Rebuilding steps before a step of other streams while no stream is on time, half a second on an H200: then the others,
# which have been rebuilt, have about a twentieth of the device. With fewer at the beginning, the first streams would
# go on, and half of all would have their next word later.
REBUILDS_AHEAD_ALONE = 8
# A step with less to rebuild counts as a part of one, at least this part: the last streams are few and soon done.
MIN_REBUILD_PART = 0.25
# Rebuilding steps before such a step while most streams are on time: a stride's time. Uploads and rebuilt streams are
# never late, and the streams on time may all be silent.
MAX_REBUILDS_AHEAD = 4
# One step in this many gets twice the positions, because the cost of a position cannot be measured from steps of equal
# size.
PROBE_EVERY = 16


@dataclass(frozen=True, slots=True)
class Shares:
    """What the next step may contain: whether live streams, and at most how many positions of uploads (None: any)."""

    live: bool = True
    upload_positions: int | None = None


class RebuildBudget:
    """Decides how many positions the next step rebuilds.

    Rebuilds run in steps of their own, which their measured cost keeps short. Live audio that is not late yet may wait
    for a few of them, and late audio for the one that is under way; under load one comes after every
    `LIVE_STEPS_A_REBUILD` live steps all the same. While no stream is on time, only the scheduler's limit
    (`_max_positions`) bounds a step, and several come before the rebuilt streams compute their next positions.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        spec = scheduler.spec
        self._scheduler = scheduler
        self._max_positions = scheduler.limits.rebuild_positions
        self._stride_ns = spec.stride_positions * spec.samples_per_position * 1e9 / spec.sample_rate
        # Measured nanoseconds per position. The initial value keeps the first step small.
        self._position_ns = REBUILD_SHARE * self._stride_ns / MIN_REBUILD_POSITIONS
        # Consecutive steps that rebuilt streams. This value lets the other streams go first.
        self._steps = 1.0
        # Live steps since the last one that rebuilt streams.
        self._live_steps = 0

    def positions(self) -> int:
        """Return the positions of a step that only rebuilds; 0: the next step rebuilds nothing."""
        scheduler = self._scheduler
        if not scheduler.rebuild_waits and not self._rebuild_goes_on:
            self._steps = 1.0
            return 0
        if self._others_go_first():
            self._steps = 0.0
            # Late live streams may all be in a step that is under way: the next one is theirs too.
            self._live_steps += scheduler.others_wait
            return 0
        part = 1.0 if scheduler.on_time_count else scheduler.rebuild_backlog / self._max_positions
        self._steps += min(1.0, max(MIN_REBUILD_PART, part))
        self._live_steps = 0
        return self._step_limit

    @property
    def room(self) -> int:
        """Positions of replayed audio to receive before the next step."""
        scheduler = self._scheduler
        if not scheduler.rebuilding:
            return 0
        # Behind the last of the replays there is late audio, which takes the thread's time from the last rebuilds.
        missing = BACKLOG_STEPS * self._step_limit - scheduler.rebuild_backlog
        return max(0, min(missing, scheduler.rebuild_to_come))

    @property
    def positions_under_way(self) -> int:
        """Positions of replayed audio that all gateways together may have sent without an acknowledgement."""
        ahead = REPLAY_STEPS_AHEAD if self._scheduler.on_time_count else LONE_REPLAY_STEPS_AHEAD
        return ahead * self._step_limit

    @property
    def _rebuild_goes_on(self) -> bool:
        """Whether all streams with more to rebuild are in a step that is being computed, while no stream is on time.
        Then the next step goes on with these few, or is empty: a step of the many others would take longer."""
        return not self._scheduler.on_time_count and bool(self._scheduler.rebuilt_further())

    def _others_go_first(self) -> bool:
        """Whether the next step is for streams that are not rebuilt."""
        if not self._scheduler.on_time_count:
            return self._scheduler.others_wait and self._steps >= REBUILDS_AHEAD_ALONE
        if not self._most_are_on_time:
            return self._scheduler.others_wait and self._steps > 0
        if self._steps >= MAX_REBUILDS_AHEAD and self._scheduler.others_wait:
            return True
        is_late = self._scheduler.longest_wait_ns > LATE_SHARE * self._stride_ns
        return is_late and self._live_steps < LIVE_STEPS_A_REBUILD

    @property
    def _most_are_on_time(self) -> bool:
        return self._scheduler.on_time_count >= len(self._scheduler.rebuilding)

    @property
    def _step_limit(self) -> int:
        """Most positions of a step that rebuilds."""
        if not self._scheduler.on_time_count:
            return self._max_positions
        if self._most_are_on_time:
            limit = int(REBUILD_SHARE * self._stride_ns / self._position_ns)
        else:
            limit = int(MAJORITY_REBUILD_SHARE * self._stride_ns / self._position_ns)
        return min(self._max_positions, max(MIN_REBUILD_POSITIONS, limit))

    def account(self, rebuilt: int, ns: int) -> None:
        """Record a step that rebuilt this many positions in `ns`. An outlier, such as a step that loaded a kernel,
        changes the estimate by a bounded factor."""
        if rebuilt >= MIN_REBUILD_POSITIONS // 2:
            measured = min(max(ns / rebuilt, 0.5 * self._position_ns), 2.0 * self._position_ns)
            self._position_ns += 0.5 * (measured - self._position_ns)


class UploadBudget:
    """Decides how much of the next step uploads get, so that live streams do not wait for them.

    A step is not interrupted for live audio that arrives meanwhile, so uploads get a small share of a stride's time.
    Live streams whose encoder state is rebuilt before they continue count as uploads here; the runner computes them
    first.

    - A runner that can pause uploads works on them until the time is up, and continues in a later step. Live streams
      have steps of their own, so their words do not wait for uploads. When live streams always wait, one piece of
      uploads runs between two of their steps: uploads always make progress, and less of it the busier live streams are.
    - Other runners compute a step as one batch, in which uploads are cheap. They get as many positions as fit into
      their time by the measured cost, and at least what one upload needs.
    """

    def __init__(self, scheduler: Scheduler, position_cost: StepCost, pauses: bool, clock: Callable[[], int]) -> None:
        spec = scheduler.spec
        self._scheduler = scheduler
        self._pauses = pauses
        self._clock = clock
        self._stride_ns = spec.stride_positions * spec.samples_per_position * 1e9 / spec.sample_rate
        self._min_positions = spec.window_for(live=False) if spec.rereads_window else 1
        self._position_cost = position_cost
        # With waiting live streams: whether the next step is for uploads.
        self._upload_is_next = False
        # When the runner must stop the work on uploads.
        self._stop_at = 0
        # Steps whose uploads were bounded, for `PROBE_EVERY`.
        self._bounded_steps = 0

    def shares(self) -> Shares:
        """Return what the step that is planned next may contain."""
        scheduler = self._scheduler
        # 0: the time is up at once, so live streams do not wait for other work in their step.
        self._stop_at = 0
        if not scheduler.uploads_wait:
            return Shares()
        if not self._pauses:
            return Shares(upload_positions=self._positions())
        if scheduler.live_waits and not self._upload_is_next:
            self._upload_is_next = True
            return Shares(upload_positions=0)
        self._upload_is_next = False
        duration_ns = 0.0 if scheduler.live_waits else SHARE_OF_STRIDE * self._stride_ns
        self._stop_at = self._clock() + int(duration_ns)
        return Shares(live=False)

    def time_is_up(self) -> bool:
        """Whether the runner must stop the work on uploads in this step."""
        return self._clock() >= self._stop_at

    def _positions(self) -> int | None:
        """Most positions of uploads in a step that is one batch; None: any number, because no stream is live."""
        if not any(stream.live for stream in self._scheduler.streams.values()):
            return None
        parts = self._position_cost.parts()
        fitting = 0 if parts is None else int(SHARE_OF_STRIDE * self._stride_ns / parts[1])
        bound = max(fitting, self._min_positions)
        self._bounded_steps += 1
        return 2 * bound if self._bounded_steps % PROBE_EVERY == 0 else bound
