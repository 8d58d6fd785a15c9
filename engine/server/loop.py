"""The engine's heartbeat: listen -> plan -> execute -> commit.

Synchronous and single-threaded: a shell (a thread, a process) hands commands in and sends one message per step out.
A command that is in error ends its own stream alone; a runner that fails altogether ends the engine, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from engine.core.plan import StepPlan
from engine.core.scheduler import Scheduler
from engine.errors import BadItem, BadOption, DuplicateStream, EngineDead, StreamError, StreamFinished, UnknownStream
from engine.messages import (
    Abort,
    Closed,
    Command,
    Dead,
    Failed,
    Feed,
    Finish,
    Flush,
    Open,
    Opened,
    Output,
    Refused,
    StepOutput,
)
from engine.runner.base import Detector, Runner, SavingRunner
from engine.server.gate import GateSettings
from engine.server.listener import Listener, Target
from engine.server.step_meter import StepMeter
from engine.server.stream_state import StreamStates

logger = logging.getLogger(__name__)

# Errors that say "not now" or "not that one" and leave an open stream as it was.
_REFUSALS = (DuplicateStream, UnknownStream, StreamFinished)


class EngineLoop:
    """`detector` hears speech for turn detection; with `gate` settings, a model hears only what the gate lets by."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        detector: Detector | None = None,
        gate: GateSettings | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.meter = StepMeter(scheduler.spec, clock)
        # Called with the streams and positions about to be computed: if the engine dies now, they are the suspects.
        self.announce: Callable[[list[Target]], None] | None = None
        self._outbox: list[Output] = []
        self._listener: Listener | None = None
        if detector is not None:
            self._listener = Listener(scheduler, detector, gate, self._say, self._announce)
        # Windowed models save their state; one with a token per position is replayed by its tokens.
        self._states: StreamStates | None = None
        if isinstance(runner, SavingRunner):
            self._states = StreamStates(scheduler, runner, self._listener)
        # Whether a stream in which nobody speaks takes part in no steps.
        self.silence_is_free = gate is not None
        self._dead = False
        self._steps = 0
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            Open: self._open,
            Feed: self._feed,
            Flush: self._flush,
            Finish: self._finish,
            Abort: lambda message, now: scheduler.abort(message.stream),
        }

    def submit(self, commands: Iterable[Command], now: int) -> None:
        """Take commands in; `now` is their arrival and decides who goes first. Errors come out with the next step."""
        self._check_alive()
        handlers = self._handlers
        for command in commands:
            try:
                handlers[type(command)](command, now)
            except _REFUSALS as error:
                self._say(Refused(error.stream, type(error).__name__, str(error)))
            except StreamError as error:
                self.scheduler.fail(error)

    def step(self) -> StepOutput | None:
        """Run one step over everything that is due; None if there was nothing to do or say."""
        self._check_alive()
        meter, times, plan = self.meter, self.meter.times, None
        meter.begin()
        live_share = self._listen()
        times.speech_ns = meter.lap()
        times.plan_ns = times.execute_ns = 0
        outputs, self._outbox = self._outbox, []
        if self.scheduler.has_work():
            plan = self._plan()
            times.plan_ns = meter.lap()
            try:
                results = self.runner.execute(plan)
            except Exception as error:
                return self._die(outputs, error)
            times.execute_ns = meter.lap()
            outputs += self.scheduler.commit(plan, results)
        else:
            outputs += self.scheduler.take_replies()
        times.commit_ns = meter.lap()
        meter.end(plan, live_share)
        if self._states is not None:
            outputs += self._states.take(plan, outputs)
        self._forget_ended(outputs)
        return self._message(outputs) if outputs else None

    def has_work(self) -> bool:
        """Whether another step would do something without another command."""
        listening = self._listener is not None and self._listener.has_work
        return bool(listening or self._outbox or self.scheduler.has_work() or self.scheduler.has_replies())

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead("the engine has failed; start it anew")

    def _listen(self) -> float:
        """Returns what part of the listening was for live streams."""
        if self._listener is None or not self._listener.has_work:
            return 0.0
        self._listener.listen()
        return self._listener.live_share

    def _plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        self._announce((task.stream, task.start, task.end) for task in plan.decode)
        return plan

    def _announce(self, targets: Iterable[Target]) -> None:
        if self.announce is not None:
            self.announce(list(targets))

    # Commands.

    def _open(self, message: Open, now: int) -> None:
        try:
            self.runner.check_open(message)
        except ValueError as error:
            raise BadOption(message.stream, str(error)) from None
        self.scheduler.admit(message)
        if self._listener is not None:
            self._listener.open(message.stream)
        if message.state is not None:
            if self._states is None:
                raise BadItem(message.stream, "this model does not go on from saved states; send its tokens instead")
            self._states.resume(message, now)
        self._say(Opened(message.stream))

    def _feed(self, message: Feed, now: int) -> None:
        self.scheduler.feed(message.stream, message.items, now)
        if self._listener is not None:
            self._listener.take(message.stream, message.items)

    def _flush(self, message: Flush, now: int) -> None:
        position = None
        if self._listener is not None and message.at_pause:
            position = self._listener.end_at_pause(message.stream)
        elif self._listener is not None:
            self._listener.end_now(message.stream)
        self.scheduler.flush(message.stream, message.tag, position)
        if self._states is not None:
            self._states.note_flush(message)

    def _finish(self, message: Finish, now: int) -> None:
        if self._listener is not None:
            self._listener.end_now(message.stream)
        self.scheduler.finish(message.stream)

    # Outputs.

    def _say(self, output: Output) -> None:
        self._outbox.append(output)

    def _message(self, outputs: list[Output]) -> StepOutput:
        self._steps += 1
        return StepOutput(self._steps, outputs)

    def _forget_ended(self, outputs: list[Output]) -> None:
        if self._listener is None:
            return
        for output in outputs:
            if isinstance(output, (Closed, Failed)) and output.stream not in self.scheduler.streams:
                self._listener.close(output.stream)

    def _die(self, outputs: list[Output], error: Exception) -> StepOutput:
        self._dead = True
        logger.exception("the runner failed for every stream; the engine stops", exc_info=error)
        return self._message([*outputs, Dead(f"the model runner failed: {type(error).__name__}: {error}")])
