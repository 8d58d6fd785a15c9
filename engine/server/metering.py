"""What steps cost, measured as the engine runs: a part for the step and a part for each stream or position in it.

How busy an engine is says little about how many more streams it holds: a model that batches is busy all the time long
before it is full, and one that does not is full when it is busy. The two parts tell them apart. They come from least
squares over the last steps, older ones counting less and less: a machine that was busy with something else a while
ago is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.plan import StepPlan
from engine.core.scheduler import Scheduler
from engine.spec import ModelSpec

# Steps that make a measurement.
ENOUGH_STEPS = 8
# How long steps are remembered, about; but not more of them than this, and the newest alone is never believed.
MEMORY_NS = 20e9
LEAST_SHARE_OF_NEWEST, MOST_SHARE_OF_NEWEST = 1 / 256, 1 / ENOUGH_STEPS
# Until batches of different sizes have run, a shared cost cannot be told from the streams' own, and all of it counts as
# the streams' own. At this variance of batch sizes, that assumption and the measured slope weigh the same.
DOUBT = 0.05
# No stream is free, whatever the steps say.
LEAST_SHARE_OF_MEAN = 0.01


class StepCost:
    """Splits the cost of steps of different sizes, in streams or in positions: a fixed part and a part for each."""

    def __init__(self) -> None:
        self._steps = 0
        self._last_ns = 0
        self.mean_size = 0.0
        self._ns = self._size_squared = self._product = 0.0

    def add(self, size: int, ns: float, now_ns: int) -> float:
        """A step of this size took so long. Returns the share that it has in what is known from now on."""
        self._steps += 1
        since_last = (now_ns - self._last_ns) / MEMORY_NS
        self._last_ns = now_ns
        share = max(1 / self._steps, min(max(LEAST_SHARE_OF_NEWEST, since_last), MOST_SHARE_OF_NEWEST))
        self.mean_size += share * (size - self.mean_size)
        self._ns += share * (ns - self._ns)
        self._size_squared += share * (size * size - self._size_squared)
        self._product += share * (size * ns - self._product)
        return share

    def parts(self) -> tuple[float, float] | None:
        """Nanoseconds that a step takes however small it is, and that each of its size adds; None while too little has
        been measured."""
        if self._steps < ENOUGH_STEPS:
            return None
        mean = self._ns / self.mean_size
        variance = max(0.0, self._size_squared - self.mean_size * self.mean_size)
        covariance = self._product - self.mean_size * self._ns
        slope = (covariance + DOUBT * mean) / (variance + DOUBT)
        each = min(max(slope, LEAST_SHARE_OF_MEAN * mean), mean)
        return self._ns - each * self.mean_size, each


class LiveCost:
    """What live streams cost, as shares of the engine's time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was measured so far is not how it will be."""
        self._cost = StepCost()
        self._audio_ns = 0.0

    def add(self, streams: int, ns: float, audio_ns: float, now_ns: int) -> None:
        """A step took so long for so many live streams, which heard so much new audio in it, all together."""
        self._audio_ns += self._cost.add(streams, ns, now_ns) * (audio_ns - self._audio_ns)

    def shares(self) -> tuple[float, float]:
        """Of the engine's time: what steps take however few streams there are, and what each stream adds.

        Both are 0 while too little has been measured.
        """
        parts = self._cost.parts()
        if parts is None:
            return 0.0, 0.0
        # How often a stream that speaks takes part in a step.
        period_ns = self._audio_ns / self._cost.mean_size
        return parts[0] / period_ns, parts[1] / period_ns


# Where the time of steps goes, part by part, and what of it live streams cause.


@dataclass(slots=True)
class StepTimes:
    """Where the last step's time went, in nanoseconds, and what it did."""

    speech_ns: int = 0
    plan_ns: int = 0
    execute_ns: int = 0
    commit_ns: int = 0
    streams: int = 0
    positions: int = 0
    # The part of it that live streams caused, and what of that was listening for speech.
    live_ns: float = 0.0
    live_speech_ns: float = 0.0


@dataclass(slots=True)
class StepTotals:
    """Where all steps' time went since the start, in nanoseconds."""

    steps: int = 0
    speech_ns: int = 0
    plan_ns: int = 0
    execute_ns: int = 0
    commit_ns: int = 0
    live_ns: float = 0.0
    live_speech_ns: float = 0.0

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


class StepMeter:
    """One lap for each part of a step. `account` says what a plan cost, and `end` adds the step to the totals."""

    def __init__(self, spec: ModelSpec, clock: Callable[[], int]) -> None:
        self.times = StepTimes()
        self.totals = StepTotals()
        self.live_cost = LiveCost()
        # What steps cost for the positions they read, whoever's they are.
        self.position_cost = StepCost()
        self._position_ns = spec.samples_per_position * 1e9 / spec.sample_rate
        self._clock = clock
        # The end of the last lap, and of the last plan that was committed.
        self.mark = 0
        self._committed_at = 0

    def begin(self) -> None:
        self.times = StepTimes(streams=self.times.streams, positions=self.times.positions)
        self.mark = self._clock()

    def lap(self) -> int:
        """Nanoseconds since the lap before."""
        before, self.mark = self.mark, self._clock()
        return self.mark - before

    def account(self, plan: StepPlan, began: int) -> int:
        """The plan that was begun then is committed now. Plans may overlap: the time for which two were under way
        counts for the first, which the second had to wait for. Returns the nanoseconds that it took."""
        times = self.times
        times.streams = len(plan.decode)
        times.positions = sum(task.end - task.start for task in plan.decode)
        ns = self.mark - max(began, self._committed_at)
        self._committed_at = self.mark
        read = sum(task.end - task.base for task in plan.decode)
        if read and not plan.rebuilt:
            self.position_cost.add(read, ns, self.mark)
        live_ns = ns * _live_part(plan, read)
        times.live_ns += live_ns
        # Streams that heard nothing new cost nothing worth counting: their text was there already.
        heard = [task.end - task.start for task in plan.decode[: plan.live] if task.end > task.start]
        if heard and not plan.rebuilt:
            self.live_cost.add(len(heard), live_ns, sum(heard) * self._position_ns, self.mark)
        return ns

    def end(self, live_share_heard: float) -> None:
        """The step is over. `live_share_heard` is the part of the listening that was for live streams."""
        self.times.live_speech_ns = self.times.speech_ns * live_share_heard
        self.times.live_ns += self.times.live_speech_ns
        self.totals.add(self.times)


def _live_part(plan: StepPlan, read: int) -> float:
    """What part of a plan's work is for live streams; all of it reads so many positions."""
    live = plan.live
    if live in (0, len(plan.decode)):
        return float(live > 0)
    return sum(task.end - task.base for task in plan.decode[:live]) / read


# What the next step may spend on backlog, so that live streams do not wait for it.
#
# A step is never broken off for a live frame that comes meanwhile: the frame waits until the step is over. So backlog
# gets a small part of the time that live audio takes to come, in one of two ways:
#
# - A runner that can lay backlog aside works on it until its time is up, and goes on in a later step. Live streams
# have their steps to themselves, so that their words do not wait for backlog that runs beside them. When they leave
# no step over, backlog gets one piece of work between two of theirs: it never stands still, and the busier live
# streams are, the longer their steps and the smaller its part. - Other runners compute a step as one batch, in which
# backlog is cheap. There it gets as many positions as measured steps say fit into its time, and at least what one of
# its streams needs.

# Of the time in which a live stream hears what makes its next step.
SHARE_OF_STRIDE = 0.1
# Of the same time, a step that rebuilds streams, between two of live ones: while most live streams are on time, and
# while more of them are rebuilt. And the fewest positions that it rebuilds.
SHARE_FOR_REBUILDING, SHARE_FOR_MOST = 0.25, 0.5
LEAST_REBUILD_POSITIONS = 256
# While nobody is on time, it rebuilds so many for each stream that lost its engine: some streams at a time.
POSITIONS_A_STREAM = 16
# One step in so many takes twice as much: steps of one size do not show what a position costs.
PROBE_EVERY = 16


@dataclass(frozen=True, slots=True)
class Shares:
    """Who takes part in the next step: live streams or not, and backlog with how many positions (None: any number)."""

    live: bool = True
    upload_positions: int | None = None


class RebuildBudget:
    """Streams that lost their engine are computed again in steps of their own, between two of live streams: a live
    frame never waits for more than one of them. While nobody else is live, or was rebuilt and has not caught up, such a
    step takes all that its limit allows; beside streams that are on time, what keeps it short, by what the last ones
    took."""

    def __init__(self, scheduler: Scheduler) -> None:
        spec = scheduler.spec
        self._scheduler = scheduler
        self._most = scheduler.limits.rebuild_positions
        self._stride_ns = spec.stride_positions * spec.samples_per_position * 1e9 / spec.sample_rate
        # What a position costs, by the last steps; the first one is small.
        self._position_ns = SHARE_FOR_REBUILDING * self._stride_ns / LEAST_REBUILD_POSITIONS
        self._is_next = False

    def positions(self) -> int:
        """Positions that the step about to be planned rebuilds, and nothing else; 0: it rebuilds none."""
        scheduler = self._scheduler
        if not scheduler.rebuild_waits:
            self._is_next = False
            return 0
        if scheduler.others_wait and not self._is_next:
            self._is_next = True
            return 0
        self._is_next = False
        on_time = scheduler.on_time
        if not on_time:
            # Few streams take turns in smaller steps: else all of them would be rebuilt at the end, and none before.
            return min(self._most, max(self._most // 4, POSITIONS_A_STREAM * len(scheduler.recovering)))
        share = SHARE_FOR_REBUILDING if on_time >= len(scheduler.rebuilding) else SHARE_FOR_MOST
        return min(self._most, max(LEAST_REBUILD_POSITIONS, int(share * self._stride_ns / self._position_ns)))

    @property
    def has_the_device(self) -> bool:
        """Whether streams are rebuilt and nobody is on time."""
        return bool(self._scheduler.rebuilding) and not self._scheduler.on_time

    def account(self, rebuilt: int, ns: int) -> None:
        """A step that rebuilt so many positions took so long. One step that took much longer than those before, such as
        one that loaded a kernel, changes little."""
        if rebuilt >= LEAST_REBUILD_POSITIONS // 2:
            found = min(max(ns / rebuilt, 0.5 * self._position_ns), 2.0 * self._position_ns)
            self._position_ns += 0.5 * (found - self._position_ns)


class UploadBudget:
    def __init__(self, scheduler: Scheduler, position_cost: StepCost, pauses: bool, clock: Callable[[], int]) -> None:
        spec = scheduler.spec
        self._scheduler = scheduler
        self._pauses = pauses
        self._clock = clock
        self._stride_ns = spec.stride_positions * spec.samples_per_position * 1e9 / spec.sample_rate
        self._least_positions = spec.window_for(live=False) if spec.rereads_window else 1
        self._position_cost = position_cost
        self._upload_is_next = False
        self._stop_at = 0
        self._bounded_steps = 0

    def shares(self) -> Shares:
        """For the step that is about to be planned."""
        scheduler = self._scheduler
        if not scheduler.uploads_wait:
            return Shares()
        if not self._pauses:
            return Shares(upload_positions=self._positions())
        if scheduler.live_waits and not self._upload_is_next:
            self._upload_is_next = True
            return Shares(upload_positions=0)
        self._upload_is_next = False
        patience = 0.0 if scheduler.live_waits else SHARE_OF_STRIDE * self._stride_ns
        self._stop_at = self._clock() + int(patience)
        return Shares(live=False)

    def time_is_up(self) -> bool:
        return self._clock() >= self._stop_at

    def _positions(self) -> int | None:
        if not any(stream.live for stream in self._scheduler.streams.values()):
            return None
        parts = self._position_cost.parts()
        fitting = 0 if parts is None else int(SHARE_OF_STRIDE * self._stride_ns / parts[1])
        bound = max(fitting, self._least_positions)
        self._bounded_steps += 1
        return 2 * bound if self._bounded_steps % PROBE_EVERY == 0 else bound
