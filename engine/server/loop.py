"""The engine's heartbeat: drain -> plan -> execute -> commit -> emit.

Synchronous and single-threaded: a shell (a thread, a process) hands commands in and sends one message per step out.
Commands of a stream that is in error end that stream alone; a runner that fails altogether ends the engine, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.core.text import Vocabulary
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
    Speech,
    StepOutput,
)
from engine.server.gate import Begin, Decision, End, GateSettings, Pause, Resume, Skip, SpeechGate
from engine.server.live_cost import LiveCost
from engine.server.stream_state import Checkpoints, SavingDetector, SavingRunner
from engine.server.unheard import Stretch, Unheard
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Errors that say "not now" or "not that one" and leave an open stream as it was.
_REFUSALS = (DuplicateStream, UnknownStream, StreamFinished)


class Runner(Protocol):
    """What owns the model and the accelerator. `execute` answers the plan's decode tasks in their order."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def check_open(self, message: Open) -> None:
        """Raises ValueError if the model does not take these options."""

    def execute(self, plan: StepPlan) -> list[DecodeResult]: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class GuardedRunner(Protocol):
    """A runner that keeps streams from falling silent over speech, and counts the tokens this changed."""

    blank_guard_activations: int


class Detector(SavingDetector, Protocol):
    """Speech probabilities for the new samples of many streams at once."""

    def open(self, stream: str, sample: int = 0) -> None: ...

    def close(self, stream: str) -> None: ...

    def detect(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]: ...

    def pass_silence(self, stream: str, samples: int) -> Speech:
        """So many more samples of a silence that has been listened to for a while: one long frame."""


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
        self.times = StepTimes()
        self.totals = StepTotals()
        spec = scheduler.spec
        self.live_cost = LiveCost()
        self._position_ns = spec.samples_per_position * 1e9 / spec.sample_rate
        self._detector = detector
        self._gate_settings = gate
        self._listened_to: set[str] = set()
        self._gates: dict[str, SpeechGate] = {}
        # Windowed models save their state; one with a token per position is replayed by its tokens.
        self._checkpoints: Checkpoints | None = None
        if isinstance(runner, SavingRunner):
            self._checkpoints = Checkpoints(scheduler, runner, detector, self._gates)
        self._heard: dict[str, Unheard] = {}
        self._live_share_heard = 0.0
        self._clock = clock
        self._outbox: list[Output] = []
        self._dead = False
        # Told who is about to be computed, and where: if that is the end of the engine, these are the suspects.
        self.announce: Callable[[list[tuple[str, int, int]]], None] | None = None
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
        if self._dead:
            raise EngineDead("the engine has failed; start it anew")
        handlers = self._handlers
        for command in commands:
            try:
                handlers[type(command)](command, now)
            except _REFUSALS as error:
                self._outbox.append(Refused(error.stream, type(error).__name__, str(error)))
            except StreamError as error:
                self.scheduler.fail(error)

    def step(self) -> StepOutput | None:
        """Run one step over everything that is due; None if there was nothing to do or say."""
        if self._dead:
            raise EngineDead("the engine has failed; start it anew")
        times, clock = self.times, self._clock
        began = clock()
        if self._heard:
            self._listen()
        planned = executed = heard = clock()
        scheduler = self.scheduler
        outputs, self._outbox = self._outbox, []
        plan: StepPlan | None = None
        live_share = 0.0
        if scheduler.has_work():
            plan = scheduler.plan()
            live_share = self._live_part(plan)
            if self.announce is not None:
                self.announce([(task.stream, task.start, task.end) for task in plan.decode])
            planned = clock()
            try:
                results = self.runner.execute(plan)
            except Exception as error:
                return self._die(outputs, error)
            executed = clock()
            outputs += scheduler.commit(plan, results)
            times.streams = len(plan.decode)
            times.positions = sum(task.end - task.start for task in plan.decode)
        else:
            outputs += scheduler.take_replies()
        times.speech_ns, times.plan_ns, times.execute_ns = heard - began, planned - heard, executed - planned
        ended = clock()
        times.commit_ns = ended - executed
        live_ns = (ended - heard) * live_share
        times.live_speech_ns = times.speech_ns * self._live_share_heard
        times.live_ns = times.live_speech_ns + live_ns
        if live_share:
            self._count_live(plan, live_ns, ended)
        self.totals.add(times)
        if self._checkpoints is not None:
            outputs += self._checkpoints.take(plan, outputs)
        if not outputs:
            return None
        if self._detector is not None:
            self._forget_ended(outputs)
        self._steps += 1
        return StepOutput(self._steps, outputs)

    def has_work(self) -> bool:
        """Whether another step would do something without another command."""
        return bool(self._heard or self._outbox or self.scheduler.has_work() or self.scheduler.has_replies())

    @property
    def silence_is_free(self) -> bool:
        """Whether a stream in which nobody speaks takes part in no steps."""
        return self._gate_settings is not None

    @staticmethod
    def _live_part(plan: StepPlan) -> float:
        """What part of a plan's work is for live streams."""
        live = plan.live
        if live in (0, len(plan.decode)):
            return float(live > 0)
        read = sum(task.end - task.base for task in plan.decode)
        return sum(task.end - task.base for task in plan.decode[:live]) / read

    def _count_live(self, plan: StepPlan | None, live_ns: float, now: int) -> None:
        """Streams that heard nothing new did not cost anything worth counting: their text was there already."""
        assert plan is not None
        heard = [task.end - task.start for task in plan.decode[: plan.live] if task.end > task.start]
        if heard:
            self.live_cost.add(len(heard), live_ns, sum(heard) * self._position_ns, now)

    def _open(self, message: Open, now: int) -> None:
        try:
            self.runner.check_open(message)
        except ValueError as error:
            raise BadOption(message.stream, str(error)) from None
        self.scheduler.admit(message)
        if self._detector is not None:
            self._detector.open(message.stream)
            self._listened_to.add(message.stream)
            if self._gate_settings is not None:
                self._gates[message.stream] = SpeechGate(self._gate_settings)
                self.scheduler.hold(message.stream, True)
        if message.checkpoint is not None:
            if self._checkpoints is None:
                raise BadItem(message.stream, "this model does not go on from checkpoints; send its tokens instead")
            self._checkpoints.resume(message, now)
        self._outbox.append(Opened(message.stream))

    def _feed(self, message: Feed, now: int) -> None:
        self.scheduler.feed(message.stream, message.items, now)
        if self._detector is not None:
            if message.stream not in self._heard:
                self._heard[message.stream] = Unheard(self.scheduler.spec)
            self._heard[message.stream].add(message.items)

    def _flush(self, message: Flush, now: int) -> None:
        name, position = message.stream, None
        if not message.at_pause:
            self._close_gate(name)
        elif name in self._gates and name in self.scheduler.streams:
            position = self._end_at_pause(name)
        self.scheduler.flush(name, message.tag, position)
        if self._checkpoints is not None:
            self._checkpoints.note_flush(message)

    def _finish(self, message: Finish, now: int) -> None:
        self._close_gate(message.stream)
        self.scheduler.finish(message.stream)

    def _end_at_pause(self, name: str) -> int:
        """Nobody is speaking: an utterance that is open ends. Returns up to where the stream is heard then: what the
        gate still holds may be the beginning of the next one."""
        if name in self._heard:
            self._listen()
        gate = self._gates[name]
        self._pass_gate(name, gate.flush_at_pause())
        return self.scheduler.streams[name].clock.position_at(gate.floor)

    def _close_gate(self, name: str) -> None:
        """Text is wanted now: what the gate holds open ends here, and what is in doubt will not be heard."""
        gate, stream = self._gates.get(name), self.scheduler.streams.get(name)
        if gate is None or stream is None or stream.finished:
            return
        if name in self._heard:
            self._listen()
        self._pass_gate(name, gate.flush(stream.clock.end_sample))

    def _listen(self) -> None:
        """Find speech in what has come since the last step, and let the models skip what nobody says."""
        streams = self.scheduler.streams
        heard = {name: unheard for name, unheard in self._heard.items() if name in streams}
        self._heard = {}
        samples = sum(unheard.length for unheard in heard.values())
        live_samples = sum(unheard.length for name, unheard in heard.items() if streams[name].live)
        self._live_share_heard = live_samples / samples if samples else 0.0
        if self.scheduler.suspects:
            for name, unheard in heard.items():
                self._hear({name: unheard.stretches})
        else:
            self._hear({name: unheard.stretches for name, unheard in heard.items()})

    def _hear(self, heard: dict[str, list[Stretch]]) -> None:
        """Listen to streams side by side; almost always all there is of each is one stretch."""
        assert self._detector is not None
        streams = self.scheduler.streams
        if self.announce is not None:
            self.announce([(name, streams[name].computed, streams[name].available) for name in heard])
        for turn in range(max((len(stretches) for stretches in heard.values()), default=0)):
            present = [(name, stretches[turn]) for name, stretches in heard.items() if turn < len(stretches)]
            for speech in self._detector.detect([(name, stretch.samples()) for name, stretch in present]):
                self._take_speech(speech)
            for name, stretch in present:
                if stretch.silence:
                    self._take_speech(self._detector.pass_silence(name, stretch.silence))

    def _take_speech(self, speech: Speech) -> None:
        self._outbox.append(speech)
        gate = self._gates.get(speech.stream)
        if gate is not None and not self.scheduler.streams[speech.stream].finished:
            self._pass_gate(speech.stream, gate.push(speech.probabilities, speech.frame_samples))

    def _pass_gate(self, name: str, decisions: list[Decision]) -> None:
        scheduler = self.scheduler
        clock, rate = scheduler.streams[name].clock, scheduler.spec.samples_per_position
        for decision in decisions:
            match decision:
                case Begin():
                    scheduler.skip(name, clock.position_at(decision.sample))
                    scheduler.hold(name, False)
                case Pause():
                    scheduler.pause(name, clock.position_at(decision.sample + rate - 1))
                    scheduler.hold(name, True)
                case Resume():
                    scheduler.hold(name, False)
                case End():
                    # Audio of a burst may be here already from behind the utterance: that is not part of it.
                    scheduler.flush(name, None, clock.position_at(decision.sample + rate - 1))
                    scheduler.hold(name, True)
                case Skip():
                    scheduler.skip(name, clock.position_at(decision.sample))

    def _forget_ended(self, outputs: list[Output]) -> None:
        assert self._detector is not None
        for output in outputs:
            if not isinstance(output, (Closed, Failed)) or output.stream in self.scheduler.streams:
                continue
            # A stream whose opening was refused was never listened to.
            if output.stream in self._listened_to:
                self._listened_to.remove(output.stream)
                self._detector.close(output.stream)
                self._gates.pop(output.stream, None)

    def _die(self, outputs: list[Output], error: Exception) -> StepOutput:
        self._dead = True
        logger.exception("the runner failed for every stream; the engine stops", exc_info=error)
        self._steps += 1
        return StepOutput(self._steps, [*outputs, Dead(f"the model runner failed: {type(error).__name__}: {error}")])
