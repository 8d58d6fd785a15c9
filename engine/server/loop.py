"""The engine's heartbeat: listen -> plan -> execute -> commit.

Single-threaded: a shell (a thread, a process) hands commands in and sends one message per step out. A device that works
by itself computes a plan while the one before it is committed and the next one is made: a frame-synchronous step needs
nothing from the step before that is not on the device already, and no stream is in both.

A command that is in error ends its own stream alone, and so does an error nobody foresaw in work for one stream. A
runner that fails altogether ends the engine, once, and so do books that do not add up any more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.errors import (
    BadItem,
    BadOption,
    DuplicateStream,
    EngineDead,
    StreamError,
    StreamFailed,
    StreamFinished,
    UnknownStream,
)
from engine.messages import (
    Abort,
    ChangeTurns,
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
    Text,
)
from engine.runner.base import Detector, Runner
from engine.server.metering import RebuildBudget, Shares, StepMeter, UploadBudget
from engine.server.skipped_silence import SilenceSkipper
from engine.server.speech import GateSettings, Listener, Target
from engine.server.stream_state import StreamStates

logger = logging.getLogger(__name__)

# Errors that say "not now" or "not that one" and leave an open stream as it was.
_REFUSALS = (DuplicateStream, UnknownStream, StreamFinished)
# Steps that may be under way while the next one is planned, if the runner can do that.
STEPS_AHEAD = 1
# The same while all streams are rebuilt or late. A rebuilding step takes the host long to begin: the device has another
# one to do by then, and nobody is on time who would have to wait for both.
STEPS_AHEAD_FOR_NOBODY = 2


@dataclass(slots=True)
class LaunchedStep:
    """A step that may still be computed: its plan, the answers to wait for, how often the detector had been told to
    listen by then, and when it began."""

    plan: StepPlan
    answers: Callable[[], list[DecodeResult]]
    launches: int
    began: int


@contextmanager
def _runner_failures() -> Iterator[None]:
    """What the runner raises concerns all streams."""
    try:
        yield
    except Exception as error:
        raise EngineDead(f"the model runner failed: {type(error).__name__}: {error}") from error


class EngineLoop:
    """`detector` hears speech for turn detection; with `gate` settings, a model hears only what the gate lets by. With
    `cut` settings, a frame-synchronous model does not hear long silences."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        detector: Detector | None = None,
        gate: GateSettings | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        cut: GateSettings | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.meter = StepMeter(scheduler.spec, clock)
        self._launched: deque[LaunchedStep] = deque()
        self._uploads = UploadBudget(scheduler, self.meter.position_cost, runner.pauses_uploads, clock)
        self._rebuild = RebuildBudget(scheduler)
        # Called with the streams and positions about to be computed: if the engine dies now, they are the suspects.
        self.announce: Callable[[list[Target]], None] | None = None
        self._outbox: list[Output] = []
        self._cut = SilenceSkipper(scheduler, None if detector is None else cut, self._say)
        self._listener: Listener | None = None
        if detector is not None:
            hear = self._cut.judge
            self._listener = Listener(scheduler, detector, gate, self._say, self._announce, self._blame, hear)
        # Windowed models save their state; one with a token per position is replayed by its tokens.
        self._states: StreamStates | None = None
        if runner.saves_state:
            self._states = StreamStates(scheduler, runner, self._listener, self._blame)
        # Whether a stream in which nobody speaks takes part in no steps.
        self.silence_is_free = gate is not None
        self._dead = False
        # Somebody was blamed: the books are to be checked. If they do not add up, this is why.
        self._in_doubt = False
        self._broken: Exception | None = None
        self._steps = 0
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            Open: self._open,
            Feed: self._feed,
            Flush: self._flush,
            ChangeTurns: self._change_turns,
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
            except EngineDead as error:
                self._broken = error  # the next step says so
                return
            except Exception as error:
                self._blame(command.stream, error)
            if command.stream not in self.scheduler.streams:
                self._forget(command.stream)
        self._check_books()

    def step(self) -> StepOutput | None:
        """Run one step over everything that is due; None if there was nothing to do or say."""
        self._check_alive()
        outputs: list[Output] = []
        if self._broken is None:
            try:
                self._run_step(outputs)
                self._check_books()
            except Exception as error:
                self._broken = error
        if self._broken is not None:
            return self._die(outputs, self._broken)
        return self._message(outputs) if outputs else None

    def _run_step(self, outputs: list[Output]) -> None:
        """All there is to say comes into `outputs`, also if this raises: then nobody in particular is to blame."""
        self.meter.begin()
        live_share = self._listen()
        self.meter.times.speech_ns = self.meter.lap()
        outputs += self._take_outbox()
        if self.scheduler.suspect_is_near:
            self._commit(outputs, 0)
        if self.scheduler.has_work():
            plan = self._plan()
            self._launched.append(self._execute(plan))
            committed = self._commit(outputs, self._most_ahead)
        else:
            committed = self._commit(outputs, 0)
            self._say_the_rest(outputs)
        self.meter.end(live_share)
        if self._listener is not None:
            self._listener.bound_words(outputs)
        self._cut.tell(outputs)
        if self._states is not None:
            outputs += self._states.take(committed, outputs)
        self._forget_ended(outputs)

    def _say_the_rest(self, outputs: list[Output]) -> None:
        """Nothing is under way and nothing is to be planned."""
        if self._listener is not None:
            self._listener.collect(self._listener.launches)
            outputs += self._take_outbox()
        outputs += self.scheduler.take_replies()
        self.meter.times.commit_ns += self.meter.lap()

    @property
    def _most_ahead(self) -> int:
        """Steps that may be under way after one was planned. A stream that may have killed an engine is computed while
        nothing else is: if the engine dies again, it is clear who it was."""
        if not self.runner.overlaps_steps or self.scheduler.suspect_is_near:
            return 0
        return STEPS_AHEAD_FOR_NOBODY if self._rebuild.has_the_device else STEPS_AHEAD

    @property
    def is_flying(self) -> bool:
        """Whether a step is under way: what it holds may still be the end of the engine."""
        return bool(self._launched)

    def has_work(self) -> bool:
        """Whether another step would do something without another command."""
        listening = self._listener is not None and self._listener.has_work
        saying = self._outbox or self._broken is not None or self.scheduler.has_replies()
        return bool(self._launched or listening or saying or self.scheduler.has_work())

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
        rebuild = self._rebuild.positions()
        shares = Shares(live=False, upload_positions=0) if rebuild else self._uploads.shares()
        plan = self.scheduler.plan(shares.live, shares.upload_positions, rebuild)
        self._blame_surprises()
        plans = [*(launched.plan for launched in self._launched), plan]
        self._announce(self._targets(plans))
        self.meter.times.plan_ns = self.meter.lap()
        return plan

    def _targets(self, plans: Iterable[StepPlan]) -> list[Target]:
        """What the runner is about to do, or does: positions to compute, and streams to open, which may have states."""
        found = [(task.stream, task.start, task.end) for part in plans for task in part.decode]
        computed = {name for name, *_ in found}
        for part in plans:
            for opened in part.opened:
                stream = self.scheduler.streams.get(opened.stream)
                if stream is not None and opened.stream not in computed:
                    found.append((opened.stream, stream.computed, stream.computed + 1))
        return found

    def _execute(self, plan: StepPlan) -> LaunchedStep:
        launches = self._listener.launches if self._listener is not None else 0
        began = self.meter.mark - self.meter.times.plan_ns
        with _runner_failures():
            return LaunchedStep(plan, self.runner.launch(plan, self._uploads.time_is_up), launches, began)

    def _commit(self, outputs: list[Output], most_ahead: int) -> StepPlan | None:
        """Take in the oldest steps until so many are under way; the last one that was. Waits for the device."""
        meter, plan = self.meter, None
        while len(self._launched) > most_ahead:
            launched = self._launched.popleft()
            plan = launched.plan
            with _runner_failures():
                results = launched.answers()
            meter.times.execute_ns += meter.lap()
            if self._listener is not None:
                self._listener.collect(launched.launches)
                outputs += self._take_outbox()
            outputs += self._judged(plan, self.scheduler.commit(plan, results))
            self._blame_surprises()
            plan.decode = [task for task, result in zip(plan.decode, results, strict=True) if not result.unfinished]
            meter.times.commit_ns += meter.lap()
            ns = meter.account(plan, launched.began)
            if plan.rebuilt:
                self._rebuild.account(plan.rebuilt, ns)
        return plan

    def _judged(self, plan: StepPlan, outputs: list[Output]) -> list[Output]:
        """The same outputs; texts say what the model thinks of what it heard, if it does."""
        if self.runner.judges_windows:
            slots = {task.stream: task.slot for task in plan.decode}
            for output in outputs:
                if isinstance(output, Text) and output.stream in slots:
                    output.language, output.no_speech = self.runner.judgement(slots[output.stream])
        return outputs

    def _announce(self, targets: Iterable[Target]) -> None:
        if self.announce is not None:
            self.announce(self._cut.on_gateway_count(targets))

    def reached(self, name: str) -> int:
        """How far an open stream is on its gateway's count; what was cut out of it is done."""
        return self._cut.gateway_count(name, self.scheduler.streams[name].computed)

    # Commands.

    def _open(self, message: Open, now: int) -> None:
        try:
            self.runner.check_open(message)
        except ValueError as error:
            raise BadOption(message.stream, str(error)) from None
        if message.stream not in self.scheduler.streams:
            message = self._cut.open(message)
        self.scheduler.admit(message)
        if self._listener is not None:
            self._listener.open(message.stream, message.turns)
        if message.state is not None:
            if self._states is None:
                raise BadItem(message.stream, "this model does not go on from saved states; send its tokens instead")
            self._states.resume(message, now)
        self._say(Opened(message.stream))

    def _feed(self, message: Feed, now: int) -> None:
        self._cut.feed(message.stream, message.items, now)
        if self._listener is not None:
            self._listener.take(message.stream, message.items)

    def _flush(self, message: Flush, now: int) -> None:
        self._cut.check_open(message.stream)
        if self._states is not None:
            self._states.note_flush(message)
        if self._listener is not None and message.pause is not None:
            self._listener.end_at_pause(message, message.pause, partial(self._cut.flush, message))
            return
        if self._listener is not None:
            self._listener.end_now(message.stream)
        self._cut.flush(message, None)

    def _change_turns(self, message: ChangeTurns, now: int) -> None:
        self._cut.check_open(message.stream)
        if self._listener is not None:
            self._listener.change_turns(message.stream, message.turns)

    def _finish(self, message: Finish, now: int) -> None:
        if self._listener is not None:
            self._listener.end_now(message.stream)
        self._cut.finish(message)

    # Outputs.

    def _say(self, output: Output) -> None:
        self._outbox.append(output)

    def _take_outbox(self) -> list[Output]:
        outputs, self._outbox = self._outbox, []
        return outputs

    def _message(self, outputs: list[Output]) -> StepOutput:
        self._steps += 1
        return StepOutput(self._steps, outputs)

    def _forget_ended(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, (Closed, Failed)) and output.stream not in self.scheduler.streams:
                self._forget(output.stream)

    def _forget(self, name: str) -> None:
        """Harmless for a stream that was never there. At once: the next command may open another of this name."""
        self._cut.close(name)
        if self._listener is not None:
            self._listener.close(name)
        if self._states is not None:
            self._states.forget(name)

    # Errors nobody foresaw.

    def _blame(self, name: str, error: Exception) -> None:
        """It came up in work for this stream, so this stream ends; the others do not notice."""
        logger.error("stream %s ends because of an error nobody foresaw; the others go on", name, exc_info=error)
        text = f"the engine failed on this stream ({type(error).__name__}); its log says why, other streams go on"
        self._in_doubt = True
        try:
            self.scheduler.fail(StreamFailed(name, text))
            self._forget(name)
        except Exception as error:
            self._broken = error

    def _blame_surprises(self) -> None:
        surprises, self.scheduler.surprises = self.scheduler.surprises, []
        for name, error in surprises:
            self._blame(name, error)

    def _check_books(self) -> None:
        """Between steps, after somebody was blamed: go on only if nothing of the other streams was touched."""
        if not self._in_doubt:
            return
        self._in_doubt = False
        try:
            self.scheduler.check_integrity()
        except Exception as error:
            self._broken = EngineDead(f"the scheduler's books do not add up after an error: {error}")

    def _die(self, outputs: list[Output], error: Exception) -> StepOutput:
        self._dead = True
        logger.error("the engine stops, for every stream", exc_info=error)
        why = str(error) if isinstance(error, EngineDead) else f"the engine failed: {type(error).__name__}: {error}"
        return self._message([*outputs, Dead(why)])
