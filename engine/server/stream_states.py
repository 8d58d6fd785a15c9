"""`StreamStates`: saves and restores the states of windowed models' streams, so that other engines continue exactly.

A part of the engine loop. The next text of a windowed model depends on more than its window: on the hypothesis of the
pass before, the utterance before, where strides begin, and the states of speech detector and gate. Reading the audio of
the window again would sometimes give different words. So the state itself, a few kilobytes of plain data, is sent to
the gateway: with every text, so that the gateway never has a text without the state after it, and now and then in
between, so that a replay is short. Each part of a state is written and read by the module that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.plan import StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Flush, Flushed, Open, Output, Revised, Speech, StreamState, Text
from engine.runner.base import Runner
from engine.server.revisions import Revisions
from engine.server.speakers import SpeakerTracks
from engine.server.speech import Listener
from engine.server.turn_questions import TurnQuestions

# Interval at which the state of a stream without text is saved.
QUIET_SECONDS = 1.0


class StreamStates:
    """Saves the states of a loop's streams, and restores them. `end_failed` ends one stream with an error."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        listener: Listener | None,
        speakers: SpeakerTracks,
        questions: TurnQuestions,
        revisions: Revisions,
        end_failed: Callable[[str, Exception], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._listener = listener
        self._speakers = speakers
        self._questions = questions
        self._revisions = revisions
        self._end_failed = end_failed
        spec = scheduler.spec
        self._quiet_positions = int(QUIET_SECONDS * spec.sample_rate / spec.samples_per_position)
        # Per stream: tag of its last flush, and its position when its state was last saved.
        self._tags: dict[str, int] = {}
        self._saved_at: dict[str, int] = {}

    def note_flush(self, message: Flush) -> None:
        self._tags[message.stream] = message.tag

    def resume(self, message: Open, now: int) -> None:
        """Restore the state in the message into a stream that was just opened. Raises BadItem."""
        state, name = message.state, message.stream
        assert state is not None
        if "speakers" in state.parts:
            # Labels and turns come first: `Scheduler.resume` removes audio that only they need.
            self._speakers.resume(name, state.parts["speakers"])
            self._speakers.replay(name, message.items)
        self._questions.resume(name, state.parts, message.items)
        if "revisions" in state.parts:
            self._revisions.resume(name, state.parts["revisions"], message.items)
        self._scheduler.resume(message, now)
        self._tags[name] = state.tag
        self._saved_at[name] = state.position
        if self._listener is not None:
            self._listener.resume(name, state.parts)

    def states_after_step(self, plan: StepPlan | None, outputs: Iterable[Output]) -> list[StreamState]:
        """The states to send after a step: of streams that ran or had outputs, and now and then of quiet ones."""
        streams = self._scheduler.streams
        names = dict.fromkeys(task.stream for task in plan.decode) if plan is not None else {}
        for output in outputs:
            if isinstance(output, (Text, Flushed, Revised)):
                names[output.stream] = None
            elif isinstance(output, Speech) and output.stream in streams:
                position = streams[output.stream].available
                if position - self._saved_at.get(output.stream, 0) >= self._quiet_positions:
                    names[output.stream] = None
        states = []
        for name in names:
            if name in streams:
                try:
                    states.append(self._save(name))
                except Exception as error:
                    self._end_failed(name, error)
        return states

    def forget(self, name: str) -> None:
        """The stream has ended. Does nothing if it is unknown."""
        self._tags.pop(name, None)
        self._saved_at.pop(name, None)

    def _save(self, name: str) -> StreamState:
        stream = self._scheduler.streams[name]
        runner, audio_from = self._runner.save(stream.slot, stream.base, stream.computed)
        parts = {"stream": stream.save(), "runner": runner}
        if self._listener is not None:
            parts |= self._listener.save(name)
        labels, labels_from = self._speakers.save(name)
        turns, turns_from = self._questions.save(name)
        revisions, revised_from = self._revisions.save(name)
        needed = [position for position in (labels_from, turns_from, revised_from) if position is not None]
        audio_from = min(audio_from, stream.base, *needed)
        self._saved_at[name] = stream.available
        parts |= labels | turns | revisions
        return StreamState(name, audio_from, stream.available, self._tags.get(name, 0), parts)
