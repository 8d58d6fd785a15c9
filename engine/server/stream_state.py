"""Checkpoints: the state of windowed streams as plain data, so that another engine can go on exactly there.

What a windowed model says next depends on more than its window: on what it said in the pass before, on the utterance
before, on where strides fall, on the speech detector's memory and the gate's. Hearing the audio of the window again
gives other words now and then. So the state itself goes to the gateway, a few kilobytes at a time: with all that is
said, so that no text is without the state after it, and now and then in between, so that little has to be heard again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from engine.core.plan import StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Checkpoint, Closed, Failed, Flush, Flushed, Open, Output, Saved, Speech, Text
from engine.server.gate import SpeechGate

# Audio in which nothing happens is checkpointed so often.
QUIET_SECONDS = 1.0


@runtime_checkable
class SavingRunner(Protocol):
    """A runner of a windowed model."""

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """A slot whose window is [base, end) now, and the first position whose audio it needs."""


class SavingDetector(Protocol):
    def save(self, stream: str) -> Saved: ...

    def resume(self, stream: str, saved: Saved) -> None: ...


class Checkpoints:
    """Takes checkpoints of the streams of one loop, and lets streams go on from them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: SavingRunner,
        detector: SavingDetector | None,
        gates: dict[str, SpeechGate],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._detector = detector
        self._gates = gates
        spec = scheduler.spec
        self._quiet_positions = int(QUIET_SECONDS * spec.sample_rate / spec.samples_per_position)
        # Of each stream: the last flush that came, and where the last checkpoint was.
        self._tags: dict[str, int] = {}
        self._taken_at: dict[str, int] = {}

    def note_flush(self, message: Flush) -> None:
        self._tags[message.stream] = message.tag

    def resume(self, message: Open, now: int) -> None:
        """Put a stream that was just opened into the state of its checkpoint. Raises BadItem."""
        checkpoint, name = message.checkpoint, message.stream
        assert checkpoint is not None
        self._scheduler.resume(message, now)
        self._tags[name] = checkpoint.tag
        self._taken_at[name] = checkpoint.position
        if self._detector is not None:
            self._detector.resume(name, checkpoint.parts["detector"])
        if name in self._gates:
            self._gates[name].resume(checkpoint.parts["gate"])

    def take(self, plan: StepPlan | None, outputs: Iterable[Output]) -> list[Checkpoint]:
        """After a step: of all streams that ran or said something, and now and then of those that were listened to."""
        streams = self._scheduler.streams
        names = dict.fromkeys(task.stream for task in plan.decode) if plan is not None else {}
        for output in outputs:
            if isinstance(output, (Text, Flushed)):
                names[output.stream] = None
            elif isinstance(output, Speech) and output.stream in streams:
                position = streams[output.stream].available
                if position - self._taken_at.get(output.stream, 0) >= self._quiet_positions:
                    names[output.stream] = None
            elif isinstance(output, (Closed, Failed)) and output.stream not in streams:
                self._tags.pop(output.stream, None)
                self._taken_at.pop(output.stream, None)
        return [self._take(name) for name in names if name in streams]

    def _take(self, name: str) -> Checkpoint:
        stream = self._scheduler.streams[name]
        runner, audio_from = self._runner.save(stream.slot, stream.base, stream.computed)
        parts = {"stream": stream.save(), "runner": runner}
        if self._detector is not None:
            parts["detector"] = self._detector.save(name)
        if name in self._gates:
            parts["gate"] = self._gates[name].save()
        self._taken_at[name] = stream.available
        return Checkpoint(name, min(audio_from, stream.base), stream.available, self._tags.get(name, 0), parts)
