"""Where the time of steps goes, part by part, and what of it live streams cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.plan import StepPlan
from engine.server.live_cost import LiveCost, StepCost
from engine.spec import ModelSpec


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

    def account(self, plan: StepPlan, began: int) -> None:
        """The plan that was begun then is committed now. Plans may overlap: the time for which two were under way
        counts for the first, which the second had to wait for."""
        times = self.times
        times.streams = len(plan.decode)
        times.positions = sum(task.end - task.start for task in plan.decode)
        ns = self.mark - max(began, self._committed_at)
        self._committed_at = self.mark
        read = sum(task.end - task.base for task in plan.decode)
        if read:
            self.position_cost.add(read, ns, self.mark)
        live_ns = ns * _live_part(plan, read)
        times.live_ns += live_ns
        # Streams that heard nothing new cost nothing worth counting: their text was there already.
        heard = [task.end - task.start for task in plan.decode[: plan.live] if task.end > task.start]
        if heard:
            self.live_cost.add(len(heard), live_ns, sum(heard) * self._position_ns, self.mark)

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
