"""What the next step may spend on backlog, so that live streams do not wait for it.

A step is never broken off for a live frame that comes meanwhile: the frame waits until the step is over. So backlog
gets a small part of the time that live audio takes to come, in one of two ways:

- A runner that can lay backlog aside works on it until its time is up, and goes on in a later step. Live streams have
  their steps to themselves, so that their words do not wait for backlog that runs beside them. When they leave no step
  over, backlog gets one piece of work between two of theirs: it never stands still, and the busier live streams are,
  the longer their steps and the smaller its part.
- Other runners compute a step as one batch, in which backlog is cheap. There it gets as many positions as measured
  steps say fit into its time, and at least what one of its streams needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.scheduler import Scheduler
from engine.server.live_cost import StepCost

# Of the time in which a live stream hears what makes its next step.
SHARE_OF_STRIDE = 0.1
# One step in so many takes twice as much: steps of one size do not show what a position costs.
PROBE_EVERY = 16


@dataclass(frozen=True, slots=True)
class Shares:
    """Who takes part in the next step: live streams or not, and backlog with how many positions (None: any number)."""

    live: bool = True
    backlog_positions: int | None = None


class BacklogBudget:
    def __init__(self, scheduler: Scheduler, position_cost: StepCost, pauses: bool, clock: Callable[[], int]) -> None:
        spec = scheduler.spec
        self._scheduler = scheduler
        self._pauses = pauses
        self._clock = clock
        self._stride_ns = spec.stride_positions * spec.samples_per_position * 1e9 / spec.sample_rate
        self._least_positions = spec.window_for(live=False) if spec.rereads_window else 1
        self._position_cost = position_cost
        self._backlog_is_next = False
        self._stop_at = 0
        self._bounded_steps = 0

    def shares(self) -> Shares:
        """For the step that is about to be planned."""
        scheduler = self._scheduler
        if not scheduler.backlog_waits:
            return Shares()
        if not self._pauses:
            return Shares(backlog_positions=self._positions())
        if scheduler.live_waits and not self._backlog_is_next:
            self._backlog_is_next = True
            return Shares(backlog_positions=0)
        self._backlog_is_next = False
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
