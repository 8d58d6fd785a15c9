"""Session limits over several workers: the parent counts the sessions of all of them, and workers ask it.

`QuotaCoordinator` counts in the parent. `SharedQuota` runs in each worker and implements `SessionQuota`
(`realtime/serving/quota.py`) with messages to the parent; if the parent does not answer in time, new sessions are
refused. A server with a single process uses `LocalQuota` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from realtime.config import LimitsConfig
from realtime.serving.quota import Counts, Figures, QuotaDecision
from realtime.workers.worker_link import Enter, Entered, Leave, Line, Others, Own

# Interval at which a worker sends its figures.
TELL_S = 1.0
# Timeout for an answer of the parent.
ANSWER_S = 5.0
# Most requests without an answer; beyond it new sessions are refused at once.
MOST_QUESTIONS = 1024


@dataclass(slots=True)
class _Question:
    """A request to admit sessions of a caller. The parent answers every request, and counts the granted sessions."""

    caller: str
    sessions: int
    answer: asyncio.Future[QuotaDecision]
    # The task that asked was cancelled or timed out.
    given_up: bool = False

    @property
    def granted(self) -> bool:
        return self.answer.done() and self.answer.result().reason is None


class SharedQuota:
    """The quota in a worker: asks the parent, and has the last figures of the other workers."""

    def __init__(self, line: Line, clock: Callable[[], float]) -> None:
        self.others = Figures()
        self._line = line
        self._clock = clock
        # Requests stay here until they are answered, also after a timeout or cancellation: a late grant is returned.
        self.asked: dict[int, _Question] = {}
        self._number = 0
        self._told_at = 0.0

    async def enter(self, caller: str, sessions: int) -> QuotaDecision:
        if len(self.asked) >= MOST_QUESTIONS:
            return QuotaDecision("capacity", 1)
        self._number = number = self._number + 1
        question = _Question(caller, sessions, asyncio.get_running_loop().create_future())
        self.asked[number] = question
        self._line.send(Enter(number, caller, sessions))
        try:
            async with asyncio.timeout(ANSWER_S):
                # Shielded, because a cancellation must not cancel the future, which still gets its answer.
                return await asyncio.shield(question.answer)
        except TimeoutError:
            self._give_up(question)
            return QuotaDecision("capacity", 1)
        except BaseException:
            self._give_up(question)
            raise

    def _give_up(self, question: _Question) -> None:
        question.given_up = True
        if question.granted:
            self.leave(question.caller, question.sessions)

    def enter_again(self, caller: str) -> None:
        self._line.send(Enter(0, caller, again=True))

    def leave(self, caller: str, sessions: int = 1) -> None:
        self._line.send(Leave(caller, sessions))

    def tick(self, own: Figures) -> None:
        if self._clock() - self._told_at >= TELL_S:
            self._told_at = self._clock()
            self._line.send(Own(own))

    def on_message(self, message: Entered | Others) -> None:
        """Take a message of the parent."""
        if isinstance(message, Others):
            self.others = message.figures
        elif (question := self.asked.pop(message.number, None)) is not None:
            question.answer.set_result(message.answer)
            if question.given_up:
                self._give_up(question)


class QuotaCoordinator:
    """The quota in the parent: counts the sessions of all workers, which are identified by their numbers."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        self.counts = Counts(limits, clock)
        self._lines: dict[int, Line] = {}
        # The last figures of each worker, plus the sessions granted to it since.
        self._figures: dict[int, Figures] = {}

    def add(self, worker: int, line: Line) -> None:
        self._lines[worker], self._figures[worker] = line, Figures()

    def remove(self, worker: int) -> None:
        self._lines.pop(worker, None)
        self._figures.pop(worker, None)
        self.counts.forget(worker)

    def on_message(self, worker: int, message: Enter | Leave | Own) -> None:
        """Take a message of a worker; ignored if the worker was removed."""
        if worker not in self._lines:
            return
        match message:
            case Enter(again=True):
                self.counts.add(worker, message.caller)
            case Enter():
                self._lines[worker].send(Entered(message.number, self._enter(worker, message)))
            case Leave():
                self.counts.leave(worker, message.caller, message.sessions)
            case Own():
                self._figures[worker] = message.figures
                self.counts.tick()
                for other, line in self._lines.items():
                    line.send(Others(self._others(other)))

    def _enter(self, worker: int, asked: Enter) -> QuotaDecision:
        refused = self.counts.enter(worker, asked.caller, asked.sessions)
        others = self._others(worker)
        if refused is not None:
            return QuotaDecision(*refused, others)
        # Until the worker sends new figures, the granted sessions count as waiting for a stream.
        count = asked.sessions
        self._figures[worker] += Figures(sessions=count, streamless=count, waiting=count)
        return QuotaDecision(others=others)

    def _others(self, worker: int) -> Figures:
        return reduce(Figures.__add__, (figures for key, figures in self._figures.items() if key != worker), Figures())
