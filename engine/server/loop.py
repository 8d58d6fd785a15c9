"""The engine's main loop (`EngineLoop`): each step detects speech, plans, executes and commits.

It runs on the engine's one thread: the host (`engine/server/host.py`) submits commands and sends the outputs of each
step. It owns the scheduler, the runner, the speech detection and everything else that is computed for streams. With an
asynchronous device, one plan is computed while the loop commits the plan before it and makes the next one. A
frame-synchronous step needs nothing from the step before it that is not on the device already.

A bad command ends only its own stream, and so does an unexpected error in the work for one stream. If the runner fails,
or the scheduler's bookkeeping is inconsistent after an error, the engine stops.

`StreamStates` saves and restores the states of windowed models' streams, so that other engines continue exactly. The
next text of a windowed model depends on more than its window: on the hypothesis of the pass before, the utterance
before, where strides begin, and the states of speech detector and gate. Reading the audio of the window again would
sometimes give different words. So the state itself, a few kilobytes of plain data, is sent to the gateway: with every
text, so that the gateway never has a text without the state after it, and now and then in between, so that a replay is
short. Each part of a state is written and read by the module that owns it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

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
    Flushed,
    Open,
    Opened,
    Output,
    Refused,
    Revised,
    Speech,
    StreamState,
    Text,
)
from engine.options import REVISED, SPEAKERS
from engine.runner.base import Detector, Embedder, Runner, TurnDetector
from engine.server.background_process import BackgroundProcess, ProcessTracks, Recipes, SentAudio
from engine.server.metering import RebuildBudget, Shares, StepMeter, UploadBudget
from engine.server.revisions import Revisions
from engine.server.skipped_silence import SilenceSkipper
from engine.server.speakers import SpeakerTracks
from engine.server.speech import Listener, Target
from engine.server.speech_track import GateSettings
from engine.server.turn_questions import LocalTurnAudio, TurnAudio, TurnQuestions

logger = logging.getLogger(__name__)

# Errors that refuse a command and leave an open stream unchanged.
_REFUSALS = (DuplicateStream, UnknownStream, StreamFinished)
# Steps that the device may be computing while the next one is planned, if the runner overlaps steps. With more,
# `EncoderInputs.encode` of the frame-synchronous runner would have to know which streams the plans before have ended.
STEPS_AHEAD = 1


def calm_collector() -> None:
    """Relax the garbage collector; call once, when the model is loaded. Steps leave no reference cycles, so frequent
    collections would walk the bookkeeping of every stream, for milliseconds at a time, and free nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


# (parameter, value) of glibc's mallopt: how much free memory at the top of the heap is not returned to the system, and
# the size of blocks that are mapped one by one (it accepts at most 32 MiB).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 256 * 1024 * 1024), (-3, 32 * 1024 * 1024)


def keep_freed_memory() -> None:
    """Let the allocator keep what a step has freed for the next one, instead of returning it to the system: the audio
    of a step is megabytes, and every page that comes back from the system is cleared first."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(*_TRIM_THRESHOLD)
        library.mallopt(*_MMAP_THRESHOLD)


@dataclass(slots=True)
class StepOutput:
    """The outputs of one step, for all streams. Steps with outputs are numbered from 1."""

    step: int
    outputs: list[Output]


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device may still be computing."""

    plan: StepPlan
    # Waits for the results and returns them.
    wait_for_results: Callable[[], list[DecodeResult]]
    # Number of detector launches before this step.
    launches: int
    # Start time in nanoseconds of the meter's clock.
    began: int


@contextmanager
def _runner_failures() -> Iterator[None]:
    """Turn an error of the runner into EngineDead: it concerns all streams."""
    try:
        yield
    except Exception as error:
        raise EngineDead(f"the model runner failed: {type(error).__name__}: {error}") from error


class EngineLoop:
    """Executes commands and runs steps over all streams of an engine.

    `detector` computes speech probabilities. With `gate` settings, a windowed model only gets audio that passes the
    speech gate. With `skipping` settings, a frame-synchronous model skips long silences. `embedder` is for speaker
    labels, `turn_detector` for the ends of turns. `clock` returns nanoseconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        detector: Detector | None = None,
        gate: GateSettings | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        skipping: GateSettings | None = None,
        embedder: Embedder | None = None,
        turn_detector: TurnDetector | None = None,
    ) -> None:
        self.scheduler = scheduler
        scheduler.moves = runner.moves
        self.runner = runner
        self.meter = StepMeter(scheduler.spec, clock)
        self.launched: deque[LaunchedStep] = deque()
        self._uploads = UploadBudget(scheduler, self.meter.position_cost, runner.pauses_uploads, clock)
        self._rebuild = RebuildBudget(scheduler)
        # Called with the streams and positions about to be computed: if the engine dies meanwhile, they are crash
        # suspects.
        self.announce: Callable[[list[Target]], None] | None = None
        self._outbox: list[Output] = []
        self.silence_skipper = SilenceSkipper(scheduler, None if detector is None else skipping, self._emit)
        # Labels need the detector's frames.
        self._embedder = None if detector is None else embedder
        self._turn_detector = turn_detector
        self._process = self._make_process()
        self._speakers = SpeakerTracks(scheduler.spec, self._embedder, self._end_failed_stream)
        if self._process is not None and self._embedder is not None and self._process.recipes.embedder:
            self._speakers = ProcessTracks(self._process, self._embedder, self._end_failed_stream)
        self._questions = TurnQuestions(self._asked_audio)
        self.listener: Listener | None = None
        if detector is not None:
            self.listener = Listener(
                scheduler,
                detector,
                gate,
                self._emit,
                self._announce,
                self._end_failed_stream,
                self.silence_skipper,
                self._speakers,
                self._questions,
            )
        self.revisions = Revisions(
            scheduler.spec,
            runner.vocabulary,
            runner.reviser,
            self.listener,
            clock,
            self._computed_until,
            self._end_failed_stream,
        )
        # Streams of windowed models are rebuilt from saved states, those of frame-synchronous models from their tokens.
        self._states: StreamStates | None = None
        if runner.saves_state:
            self._states = StreamStates(
                scheduler,
                runner,
                self.listener,
                self._speakers,
                self._questions,
                self.revisions,
                self._end_failed_stream,
            )
        # Whether silent streams take part in no steps.
        self.silence_is_free = gate is not None
        self._dead = False
        # A stream was ended by an unexpected error: the bookkeeping must be checked.
        self._in_doubt = False
        # Why the engine must stop; the next step reports it.
        self._broken: Exception | None = None
        # Number of steps that had outputs.
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
        """Execute commands; `now` is their time of arrival (monotonic, ns). Errors are reported with the next step's
        outputs."""
        self._check_alive()
        handlers = self._handlers
        for command in commands:
            try:
                handlers[type(command)](command, now)
            except _REFUSALS as error:
                self._emit(Refused(error.stream, type(error).__name__, str(error)))
            except StreamError as error:
                self.scheduler.fail(error)
            except EngineDead as error:
                self._broken = error
                return
            except Exception as error:
                self._end_failed_stream(command.stream, error)
            # A stream that has just finished may wait for labels or a revision: its end is sent when they are known.
            if command.stream not in self.scheduler.streams and not isinstance(command, Finish):
                self._forget(command.stream)
        self._check_consistency()

    def step(self) -> StepOutput | None:
        """Run one step over all streams with work. Returns None if there are no outputs."""
        self._check_alive()
        outputs: list[Output] = []
        if self._broken is None:
            try:
                self._run_step(outputs)
                self._check_consistency()
            except Exception as error:
                self._broken = error
        if self._broken is not None:
            return self._die(outputs, self._broken)
        return self._message(outputs) if outputs else None

    def _run_step(self, outputs: list[Output]) -> None:
        """Run one step and append its outputs, also if this raises. An error here concerns all streams."""
        self.meter.begin()
        live_share = self._listen()
        self.meter.times.speech_ns = self.meter.lap()
        outputs += self._take_outbox()
        if self.scheduler.suspect_is_near:
            self._commit(outputs, 0)
        if self.scheduler.has_work():
            plan = self._plan()
            self.launched.append(self._execute(plan))
            committed = self._commit(outputs, self._max_ahead)
        else:
            committed = self._commit(outputs, 0)
            self._append_remaining(outputs)
        self.meter.end(live_share)
        if self.listener is not None:
            self.listener.bound_words(outputs)
        self.silence_skipper.add_skips(outputs)
        self.revisions.add_revisions(outputs)
        if self._process is not None:
            self._process.take_answers()
        self._speakers.add_labels(outputs)
        self._questions.add_answered(outputs)
        if self._process is not None:
            self._process.send()
        if self._states is not None:
            outputs += self._states.states_after_step(committed, outputs)
        self._forget_ended(outputs)

    def _append_remaining(self, outputs: list[Output]) -> None:
        """Append the remaining outputs when no step is being computed and nothing is to be planned."""
        if self.listener is not None:
            self.listener.collect(self.listener.launches)
            outputs += self._take_outbox()
        outputs += self.scheduler.take_replies()
        self.meter.times.commit_ns += self.meter.lap()

    @property
    def _max_ahead(self) -> int:
        """Most launched steps that need not be committed before the next one is planned. A crash suspect is computed
        while no other step is, so that a second crash identifies the stream."""
        if not self.runner.overlaps_steps or self.scheduler.suspect_is_near:
            return 0
        return STEPS_AHEAD

    @property
    def has_launched_step(self) -> bool:
        """Whether a step is not committed: if the engine dies now, its streams are crash suspects."""
        return bool(self.launched)

    def has_work(self) -> bool:
        """Whether another step would do something without a new command."""
        has_audio = self.listener is not None and self.listener.has_work
        has_outputs = self._outbox or self._broken is not None or self.scheduler.has_replies()
        has_answers = self._speakers.has_work or self._questions.has_answered or self.revisions.has_work
        has_answers = has_answers or (self._process is not None and self._process.has_work)
        return bool(self.launched or has_audio or has_outputs or has_answers or self.scheduler.has_work())

    @property
    def replay_room(self) -> int:
        """Positions of replayed audio that should be received before the next step."""
        return self._rebuild.room

    @property
    def replay_positions_under_way(self) -> int:
        """Positions of replayed audio that the gateways together may send ahead; 0: no bound, because a windowed model
        rebuilds nothing from tokens."""
        return 0 if self.scheduler.spec.rereads_window else self._rebuild.positions_under_way

    @property
    def waits_for_copies(self) -> bool:
        """Whether the next step has nothing to do but to see whether copies of pages are complete."""
        return self.scheduler.waits_for_copies and not any(launched.plan.decode for launched in self.launched)

    @property
    def waits_for_results(self) -> bool:
        """Whether speaker embeddings, answers of the turn detector or revisions are being computed: another step will
        have outputs soon."""
        return self._speakers.is_waiting or self._questions.is_waiting or self.revisions.is_waiting

    def start_background(self) -> None:
        """Start the background process, if there is one: it loads its models while this process warms up."""
        if self._process is not None:
            self._process.start()

    def warm_up_background(self) -> None:
        """Warm up the embedder and the turn detector where a later warm-up would stop the streams."""
        if self._process is not None:
            self._process.wait_until_ready()
            return
        for model in (self._embedder, self._turn_detector):
            if model is not None:
                model.warm_up()

    def close(self) -> None:
        """Stop the processes and threads of the models, and free their memory."""
        if self._process is not None:
            self._process.stop()
        if self._embedder is not None:
            self._embedder.close()
        if self._turn_detector is not None:
            self._turn_detector.close()
        self.runner.close()

    def _make_process(self) -> BackgroundProcess | None:
        """On a GPU, labels and the turn detector have a process of their own. Models whose streams are saved as states
        have none, because the parts of a state would be in two processes."""
        recipes = Recipes(*(None if model is None else model.recipe for model in (self._embedder, self._turn_detector)))
        if self.runner.saves_state or not any(recipes):
            return None
        window = 0 if self._turn_detector is None else self._turn_detector.window_samples
        return BackgroundProcess(self.scheduler.spec, recipes, window)

    def _asked_audio(self, name: str) -> TurnAudio | None:
        """The audio of a stream, to ask the turn detector about it; None if there is no detector."""
        if self._turn_detector is None:
            return None
        if self._process is not None and self._process.recipes.turn_detector:
            return SentAudio(self._process, self._speakers.has_labels, name)
        return LocalTurnAudio(self.scheduler.spec, self._turn_detector)

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead("the engine has failed; start it anew")

    def _listen(self) -> float:
        """Run the speech detector. Returns the share of the audio that belongs to live streams."""
        if self.listener is None or not self.listener.has_work:
            return 0.0
        self.listener.detect()
        return self.listener.live_share

    def _plan(self) -> StepPlan:
        rebuild = self._rebuild.positions()
        shares = Shares(live=False, upload_positions=0) if rebuild else self._uploads.shares()
        plan = self.scheduler.plan(shares.live, shares.upload_positions, rebuild)
        self._end_streams_with_errors()
        plans = [*(launched.plan for launched in self.launched), plan]
        self._announce(self._targets(plans))
        self.meter.times.plan_ns = self.meter.lap()
        return plan

    def _targets(self, plans: Sequence[StepPlan]) -> list[Target]:
        """(stream, start, end) of all positions that the runner computes or encodes in these plans.

        A stream that is only opened counts too, because the runner may restore a saved state.
        """
        encoded = {task.stream: task.end for part in plans for task in part.encode}
        found: dict[str, tuple[int, int]] = {}
        for part in plans:
            for task in part.decode:
                # A stream that is rebuilt may be in several plans.
                start, _ = found.get(task.stream, (task.start, 0))
                found[task.stream] = start, max(task.end, encoded.get(task.stream, 0))
        for part in plans:
            for opened in part.opened:
                stream = self.scheduler.streams.get(opened.stream)
                if stream is not None:
                    found.setdefault(opened.stream, (stream.computed, stream.computed + 1))
        return [(name, start, end) for name, (start, end) in found.items()]

    def _execute(self, plan: StepPlan) -> LaunchedStep:
        launches = self.listener.launches if self.listener is not None else 0
        began = self.meter.mark - self.meter.times.plan_ns
        with _runner_failures():
            return LaunchedStep(plan, self.runner.launch(plan, self._uploads.time_is_up), launches, began)

    def _commit(self, outputs: list[Output], max_ahead: int) -> StepPlan | None:
        """Commit the oldest steps until at most `max_ahead` are not committed; returns the plan committed last. Waits
        for the device."""
        meter, plan = self.meter, None
        while len(self.launched) > max_ahead:
            launched = self.launched.popleft()
            plan = launched.plan
            with _runner_failures():
                results = meter.wait_for(launched.wait_for_results)
            meter.times.execute_ns += meter.lap()
            if self.listener is not None:
                self.listener.collect(launched.launches)
                outputs += self._take_outbox()
            outputs += self._with_judgements(plan, self.scheduler.commit(plan, results))
            self._end_streams_with_errors()
            plan.live = sum(not result.unfinished for result in results[: plan.live])
            plan.decode = [task for task, result in zip(plan.decode, results, strict=True) if not result.unfinished]
            meter.times.commit_ns += meter.lap()
            ns = meter.account(plan, launched.began)
            if plan.rebuilt_positions:
                self._rebuild.account(plan.rebuilt_positions, ns)
        return plan

    def _with_judgements(self, plan: StepPlan, outputs: list[Output]) -> list[Output]:
        """Add language and no-speech probability to the texts, if the model provides them. Returns the outputs."""
        if self.runner.judges_windows:
            slots = {task.stream: task.slot for task in plan.decode}
            for output in outputs:
                if isinstance(output, Text) and output.stream in slots:
                    output.language, output.no_speech = self.runner.judgement(slots[output.stream])
        return outputs

    def _announce(self, targets: Iterable[Target]) -> None:
        if self.announce is not None:
            self.announce(self.silence_skipper.on_gateway_count(targets))

    def progress_of(self, name: str) -> int:
        """Return the computed position of an open stream on its gateway's count; skipped silence counts as computed.
        For an upload with late speaker labels it is at most the position of the labels, so that its gateway sends audio
        more slowly."""
        stream, labelled = self.scheduler.streams[name], self._speakers.upload_waits_from(name)
        computed = stream.computed if labelled is None else min(stream.computed, stream.clock.position_at(labelled))
        return self.silence_skipper.gateway_count(name, computed)

    def _computed_until(self, name: str) -> int:
        """The sample up to which the model has computed a stream; 0 if it has ended."""
        stream = self.scheduler.streams.get(name)
        return 0 if stream is None else stream.clock.sample_at(stream.computed)

    # Commands.

    def _open(self, message: Open, now: int) -> None:
        options = message.options
        self._speakers.check(message.stream, options)
        if SPEAKERS in options or REVISED in options:
            # The runner does not know these two.
            for_runner = {name: value for name, value in options.items() if name not in (SPEAKERS, REVISED)}
            message = structs.replace(message, options=for_runner)
        try:
            self.runner.check_open(message)
        except ValueError as error:
            raise BadOption(message.stream, str(error)) from None
        if message.stream not in self.scheduler.streams:
            self._forget(message.stream)
            message = self.silence_skipper.open(message)
        self.scheduler.admit(message)
        if self.listener is not None:
            self.listener.open(message)
        self._questions.set_rule(message.stream, message.turns)
        self._speakers.open(message.stream, options, message.live)
        self.revisions.open(message.stream, options, message.live)
        if message.labels is not None:
            self._speakers.resume(message.stream, message.labels, message.labels_earlier)
        if message.state is not None:
            if self._states is None:
                raise BadItem(message.stream, "this model does not continue from saved states; send its tokens instead")
            self._states.resume(message, now)
        self._emit(Opened(message.stream))

    def _feed(self, message: Feed, now: int) -> None:
        self.silence_skipper.feed(message.stream, message.items, now)
        if self.listener is not None:
            self.listener.add_audio(message.stream, message.items)
        self._speakers.add_audio(message.stream, message.items)
        self._questions.add_audio(message.stream, message.items)
        self.revisions.add_audio(message.stream, message.items)

    def _flush(self, message: Flush, now: int) -> None:
        self.silence_skipper.check_open(message.stream)
        if self._states is not None:
            self._states.note_flush(message)
        if self.listener is not None and message.pause is not None:
            if message.turn_over:
                self.listener.end_questions(message.stream, message.pause)
            self.listener.end_at_pause(message, message.pause, partial(self.silence_skipper.flush, message))
            return
        if self.listener is not None:
            self.listener.end_now(message.stream)
            if message.ends_speech:
                self.listener.end_speech(message.stream)
                self._questions.end_at(message.stream, message.tag)
                self.revisions.mark_turn_end(message.stream, message.tag)
        self.silence_skipper.flush(message)

    def _change_turns(self, message: ChangeTurns, now: int) -> None:
        self.silence_skipper.check_open(message.stream)
        if self.listener is not None:
            self.listener.change_turns(message.stream, message.turns)
            self._questions.set_rule(message.stream, message.turns)

    def _finish(self, message: Finish, now: int) -> None:
        if self.listener is not None:
            self.listener.end_now(message.stream)
        self.silence_skipper.finish(message)

    # Outputs.

    def _emit(self, output: Output) -> None:
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
        """Drop all state of a stream, if any. Done at once: the next command may open a stream of the same name."""
        self.silence_skipper.close(name)
        if self.listener is not None:
            self.listener.close(name)
        self._questions.close(name)
        for delayed_end in (self.revisions.close(name), self._speakers.close(name)):
            if delayed_end is not None:
                self._emit(delayed_end)
        if self._states is not None:
            self._states.forget(name)

    # Unexpected errors.

    def _end_failed_stream(self, name: str, error: Exception) -> None:
        """End the stream whose work raised an unexpected error; other streams continue."""
        logger.error("stream %s ends because of an unexpected error; other streams continue", name, exc_info=error)
        text = f"the engine failed on this stream ({type(error).__name__}); its log says why, other streams continue"
        self._in_doubt = True
        try:
            self.scheduler.fail(StreamFailed(name, text))
            self._forget(name)
        except Exception as error:
            self._broken = error

    def _end_streams_with_errors(self) -> None:
        unexpected_errors, self.scheduler.unexpected_errors = self.scheduler.unexpected_errors, []
        for name, error in unexpected_errors:
            self._end_failed_stream(name, error)

    def _check_consistency(self) -> None:
        """After an unexpected error in one stream: stop the engine if the bookkeeping of the others is inconsistent."""
        if not self._in_doubt:
            return
        self._in_doubt = False
        try:
            self.scheduler.check_integrity()
        except Exception as error:
            self._broken = EngineDead(f"the scheduler's bookkeeping is inconsistent after an error: {error}")

    def _die(self, outputs: list[Output], error: Exception) -> StepOutput:
        self._dead = True
        logger.error("the engine stops, and with it every stream", exc_info=error)
        why = str(error) if isinstance(error, EngineDead) else f"the engine failed: {type(error).__name__}: {error}"
        return self._message([*outputs, Dead(why)])


# States of streams.

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
