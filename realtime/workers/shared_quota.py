"""Who has how many sessions, over all workers: the parent counts, and a worker asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from realtime.config import LimitsConfig
from realtime.serving.quota import Counts, Figures, QuotaDecision
from realtime.workers.worker_link import Enter, Entered, Leave, Line, Others, Own

# How often a worker tells its figures.
TELL_S = 1.0
# A parent that does not answer for so long is gone, and this worker with it.
ANSWER_S = 5.0
# Questions that may wait for an answer; while a parent is that far behind, further sessions are refused at once.
MOST_QUESTIONS = 1024


@dataclass(slots=True)
class _Question:
    """A request for sessions of a caller. The parent answers every request, and counts what it grants."""

    caller: str
    sessions: int
    answer: asyncio.Future[QuotaDecision]
    # The task that asked does not wait any more.
    given_up: bool = False

    @property
    def granted(self) -> bool:
        return self.answer.done() and self.answer.result().reason is None


class SharedQuota:
    """The worker's side."""

    def __init__(self, line: Line, clock: Callable[[], float]) -> None:
        self.others = Figures()
        self._line = line
        self._clock = clock
        # Each stays until its answer has come, also after a timeout or a cancellation: a late grant is given back.
        self._asked: dict[int, _Question] = {}
        self._number = 0
        self._told_at = 0.0

    async def enter(self, caller: str, sessions: int) -> QuotaDecision:
        if len(self._asked) >= MOST_QUESTIONS:
            return QuotaDecision("capacity", 1)
        self._number = number = self._number + 1
        question = _Question(caller, sessions, asyncio.get_running_loop().create_future())
        self._asked[number] = question
        self._line.send(Enter(number, caller, sessions))
        try:
            async with asyncio.timeout(ANSWER_S):
                # Shielded: a cancellation here must not cancel the answer, which still comes.
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

    def hear(self, message: Entered | Others) -> None:
        """What the parent says."""
        if isinstance(message, Others):
            self.others = message.figures
        elif (question := self._asked.pop(message.number, None)) is not None:
            question.answer.set_result(message.answer)
            if question.given_up:
                self._give_up(question)


class QuotaCoordinator:
    """The parent's side; workers are known by numbers of their own."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        self.counts = Counts(limits, clock)
        self._lines: dict[int, Line] = {}
        # The last figures of each worker, and the sessions it was granted since.
        self._figures: dict[int, Figures] = {}

    def add(self, worker: int, line: Line) -> None:
        self._lines[worker], self._figures[worker] = line, Figures()

    def remove(self, worker: int) -> None:
        self._lines.pop(worker, None)
        self._figures.pop(worker, None)
        self.counts.forget(worker)

    def hear(self, worker: int, message: Enter | Leave | Own) -> None:
        """What a worker says. One that has ended may have said something before: nothing of it counts any more."""
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
        # Until the worker says more, these are sessions that will speak.
        count = asked.sessions
        self._figures[worker] += Figures(sessions=count, streamless=count, waiting=count)
        return QuotaDecision(others=others)

    def _others(self, worker: int) -> Figures:
        return reduce(Figures.__add__, (figures for key, figures in self._figures.items() if key != worker), Figures())
