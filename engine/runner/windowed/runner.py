"""`WindowedRunner`: reads each stream's window again, decodes from committed text on, and commits what is stable.

Encoding and decoding happen in `windows.py`, on a CPU or a device. The runner decides what is read, and makes text of
the tokens.

Live streams are read first. Two kinds of work take longer than a live stream can wait: a window of an upload, which has
no earlier pass to continue from, and a live stream that resumes from a saved state, if its encoder is to be rebuilt.
They are done in pieces (an encoder layer, a decoder pass, or two seconds of a rebuild), only when no live stream is
read in the same step, resumed streams before uploads. All threads do them, and each result is returned when it is
there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from math import inf

import torch

from engine.core.plan import DecodeResult, DecodeTask, OpenTask, StepPlan, TimedToken
from engine.messages import Open, Saved
from engine.models.seq2seq import SpeechModel
from engine.options import MAX_KEYWORDS, Options
from engine.runner.base import Reviser, SynchronousRunner, never
from engine.runner.bias import KeywordTrees, LazyTree
from engine.runner.bpe import PromptTokenizer
from engine.runner.windowed.decoder import Row
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION, EncodedAudio, StreamEncoder
from engine.runner.windowed.language import LanguageState
from engine.runner.windowed.stability import (
    FAR_BACK,
    HypothesisToken,
    Policy,
    Progress,
    UtteranceJoiner,
    before_marks,
    best_cut,
    committable,
    heard_before_the_end,
    is_noise,
    loop_start,
    rising,
    spans,
    steady,
    surely_ends,
    without_repeat,
    without_second_mark,
)
from engine.runner.windowed.windows import Results, Windows
from engine.spec import ModelSpec, Vocabulary

SAMPLE_RATE = 16_000
# An utterance of at least this many seconds has a text. Moonshine's first token may be the end token although there is
# speech; shorter utterances may be a cough or a noise.
SECONDS_WITH_TEXT = 3.0
# Streams in a row that cannot be read: one more, and it is not their fault.
MOST_FAILED_READINGS = 3

logger = logging.getLogger(__name__)


def windowed_spec(name: str, window_positions: int, stride_positions: int, file_window_positions: int = 1) -> ModelSpec:
    return ModelSpec(
        name=name,
        sample_rate=SAMPLE_RATE,
        samples_per_position=SAMPLES_PER_POSITION,
        stride_positions=stride_positions,
        rereads_window=True,
        window_positions=window_positions,
        file_window_positions=file_window_positions,
        history_positions=max(window_positions, file_window_positions),
        # Items may extend beyond both ends of the window.
        embeds_per_stream=window_positions + 64,
        options=Options(keywords=MAX_KEYWORDS),
    )


@dataclass(slots=True)
class _Slot:
    """The text of a stream's window: committed tokens, and the hypothesis of the last pass after them."""

    live: bool
    language_state: LanguageState
    committed: list[HypothesisToken] = field(default_factory=list)
    hypothesis: list[HypothesisToken] = field(default_factory=list)
    # Text of this utterance has been committed, so it is speech.
    spoken: bool = False
    # The last pass read the end of the utterance before together with this one.
    heard_on: bool = False
    # Marks after the last utterance. If a task has `pending` set, they are not committed yet.
    marks: list[TimedToken] = field(default_factory=list)
    # If set, the hypothesis covers the rest of the window [start, end): a final pass has nothing to decode.
    understood: tuple[int, int] | None = None
    keywords: LazyTree | None = None

    def restart(self) -> None:
        self.committed.clear()
        self.hypothesis.clear()
        self.spoken = False
        self.understood = None


@dataclass(slots=True)
class _Reading:
    """Windows that are read together, piece by piece. `results` is complete when no piece is left."""

    live: bool
    tasks: Sequence[DecodeTask]
    # Slots whose streams are still open.
    open_slots: set[int]
    rows: dict[int, Row] = field(default_factory=dict)
    work: Iterator[None] = iter(())
    results: dict[int, DecodeResult] = field(default_factory=dict)
    # Streams are read one by one, because it failed to read them together.
    apart: bool = False
    is_done: bool = False

    def run(self, time_is_up: Callable[[], bool]) -> bool:
        """Do one piece of work, and more while there is time; True if all is done."""
        for _ in self.work:
            if time_is_up():
                return False
        self.is_done = True
        return True

    def refuse(self, slot: int, why: str) -> None:
        """A stream cannot be read: end it alone."""
        self.open_slots.discard(slot)
        self.results[slot] = DecodeResult(error=why)

    def on_closed(self, slot: int) -> None:
        """A stream was closed: stop decoding for it, and drop its result, because its slot may have another stream."""
        self.open_slots.discard(slot)
        self.results.pop(slot, None)
        if slot in self.rows:
            self.rows[slot].done = True


class WindowedRunner(SynchronousRunner):
    """The runner of windowed models. `windows` encodes and decodes."""

    pauses_uploads = True
    saves_state = True
    judges_windows = True

    def __init__(
        self,
        model: SpeechModel,
        vocabulary: Vocabulary,
        spec: ModelSpec,
        policy: Policy,
        windows: Windows,
        reviser: Reviser | None = None,
    ) -> None:
        self.spec = spec
        self.vocabulary = vocabulary
        self.device = windows.device
        self._model = model
        self._policy = policy
        self.windows = windows
        self.reviser = reviser
        self._seams = UtteranceJoiner(vocabulary.pieces)
        self._keywords = KeywordTrees(vocabulary)
        self._prompts = PromptTokenizer(vocabulary.pieces)
        self.slots: dict[int, _Slot] = {}
        # Readings that are done in pieces, by slot, the oldest first.
        self._readings: dict[int, _Reading] = {}
        # Slots of streams that could not be opened, and why; and readings of single streams that failed in a row.
        self._unusable: dict[int, str] = {}
        self._failed_readings = 0

    def check_open(self, message: Open) -> None:
        if message.delay_positions is not None:
            raise ValueError("this model has no delay to choose; leave delay out")
        self.spec.options.check(message.options)
        self._keywords.check(message.options)

    @torch.inference_mode()
    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        self._prepare(plan)
        unusable = self._unusable
        results = {t.slot: DecodeResult(error=unusable[t.slot]) for t in plan.decode if t.slot in unusable}
        live: list[DecodeTask] = []
        later: list[DecodeTask] = []
        for number, task in enumerate(plan.decode):
            if task.slot not in results:
                at_once = number < plan.live and not self._must_rebuild(task)
                (live if at_once else later).append(task)
        if live:
            results |= self.windows.run_in_parts(live, self._read_whole)
        if later and not (live and time_is_up()):
            results |= self._read_in_pieces(later, time_is_up)
        return [results.get(task.slot) or DecodeResult(unfinished=True) for task in plan.decode]

    @torch.inference_mode()
    def _read_whole(self, tasks: Sequence[DecodeTask]) -> Results:
        reading = self._read(tasks, live=True)
        self._go_on(reading, never)
        return reading.results

    def _must_rebuild(self, task: DecodeTask) -> bool:
        """Whether the encoder of a live stream must be rebuilt for this task."""
        return self._encoder_of(task.slot).must_rebuild(task.slot) and not self._is_understood(task)

    def _read_in_pieces(self, tasks: Sequence[DecodeTask], time_is_up: Callable[[], bool]) -> Results:
        """Go on with these tasks until the time is up. Returns the results of those that are done."""
        new = [task for task in tasks if task.slot not in self._readings]
        if not self.windows.batches_uploads:
            begun = [
                self._read_resumed(task) if self._must_rebuild(task) else self._read([task], live=False) for task in new
            ]
        else:
            begun = [self._read(new, live=False)] if new and not self._readings else []
        self._readings |= {slot: reading for reading in begun for slot in reading.open_slots}
        # Only those of the plan: the result of another one would have no task to go to.
        planned = [self._readings[task.slot] for task in tasks if task.slot in self._readings]
        readings = list({id(reading): reading for reading in planned}.values())
        readings.sort(key=lambda reading: not reading.live)
        self.windows.run_in_pieces([partial(self._go_on, reading, time_is_up) for reading in readings], time_is_up)
        results: Results = {}
        for reading in readings:
            if reading.is_done:
                results |= reading.results
        self._readings = {slot: reading for slot, reading in self._readings.items() if not reading.is_done}
        return results

    @torch.inference_mode()
    def _go_on(self, reading: _Reading, time_is_up: Callable[[], bool]) -> bool:
        """As `_Reading.run`. If that fails, the streams are read one by one: it is one of them that ends."""
        try:
            is_done = reading.run(time_is_up)
            if not reading.apart:
                self._failed_readings = 0
            return is_done
        except Exception as error:
            if reading.apart:
                raise
            logger.warning("streams are read one by one, because reading them together failed: %r", error)
        reading.apart = True
        reading.rows.clear()
        left = [task for task in reading.tasks if task.slot in reading.open_slots - reading.results.keys()]
        reading.work = self._pieces_apart(left, reading)
        return reading.run(time_is_up)

    def _pieces_apart(self, tasks: Sequence[DecodeTask], reading: _Reading) -> Iterator[None]:
        failed: list[Exception] = []
        for task in tasks:
            if task.slot not in reading.open_slots:
                continue
            alone = _Reading(reading.live, [task], {task.slot})
            try:
                yield from self._pieces([task], alone)
            except Exception as error:
                logger.error("stream %s cannot be read; the others go on", task.stream, exc_info=error)
                failed.append(error)
                reading.refuse(task.slot, f"its audio cannot be read ({type(error).__name__})")
            else:
                self._failed_readings = 0
                reading.results |= alone.results
        self._failed_readings += len(failed)
        if failed and self._failed_readings > MOST_FAILED_READINGS:
            raise RuntimeError("no stream can be read any more") from failed[-1]

    def _prepare(self, plan: StepPlan) -> None:
        """Close and open slots, and store the new audio of a plan."""
        for slot in plan.closed:
            self.slots.pop(slot, None)
            self._unusable.pop(slot, None)
            for live in (True, False):
                self.windows.stream_encoder(live).forget(slot)
            if slot in self._readings:
                self._readings.pop(slot).on_closed(slot)
        for opened in plan.opened:
            try:
                self._open(opened)
            except Exception as error:
                logger.error("stream %s cannot be opened; the others go on", opened.stream, exc_info=error)
                # It has nothing to go on from, and ends when it is to be read.
                self.slots[opened.slot] = _Slot(opened.live, LanguageState.of(self.spec.options, {}, []))
                self._encoder_of(opened.slot).forget(opened.slot)
                what = "state" if opened.saved is not None else "options"
                self._unusable[opened.slot] = f"its {what} cannot be used ({type(error).__name__})"
        self.windows.write(plan.encode)

    def _open(self, opened: OpenTask) -> None:
        prompt = self._prompts.tokens(opened.options.get("prompt", ""))
        language_state = LanguageState.of(self.spec.options, opened.options, prompt)
        self.slots[opened.slot] = (
            _Slot(opened.live, language_state) if opened.saved is None else _resumed(opened, language_state)
        )
        self.slots[opened.slot].keywords = self._keywords.lazy_tree(opened.options)
        if opened.saved is not None:
            self._encoder_of(opened.slot).resume(opened.slot, opened.saved["ear"], opened.saved_items)

    def _read(self, tasks: Sequence[DecodeTask], live: bool) -> _Reading:
        """The work of reading the tasks' windows, to be done piece by piece. Slots change only with the last piece."""
        reading = _Reading(live, tasks, {task.slot for task in tasks})
        reading.work = self._pieces(tasks, reading)
        return reading

    def _read_resumed(self, task: DecodeTask) -> _Reading:
        """The same for a live stream whose encoder is rebuilt first. After that, its window is read as one piece."""
        reading = _Reading(True, [task], {task.slot})

        def pieces() -> Iterator[None]:
            yield from self._encoder_of(task.slot).rebuild(task.slot)
            for _ in self._pieces([task], reading):
                pass

        reading.work = pieces()
        return reading

    def _pieces(self, tasks: Sequence[DecodeTask], reading: _Reading) -> Iterator[None]:
        # 1. Leave out windows that are too short yet, and those that are decoded to their end already.
        waiting = {task.slot for task in tasks if self._waits(task)}
        unread = [task for task in tasks if task.slot not in waiting and not self._is_understood(task)]
        for task in unread:
            if self.windows.is_broken(task):
                reading.refuse(task.slot, "its audio holds values that are not numbers")
        # 2. Encode.
        sounds: dict[int, EncodedAudio] = {}
        for live in (True, False):
            due = [task for task in unread if task.slot in reading.open_slots and self.slots[task.slot].live == live]
            if due:
                # Streams closed meanwhile are left out: their slots may belong to others by then.
                sounds |= yield from self.windows.encode(due, live, reading.open_slots)
        # 3. Detect language and speech.
        self._judge([task for task in unread if task.slot in sounds and task.slot in reading.open_slots], sounds)
        # 4. Decode.
        rows = {
            task.slot: self._row(task, sounds[task.slot])
            for task in unread
            if task.slot in sounds and task.slot in reading.open_slots
        }
        reading.rows |= {slot: row for slot, row in rows.items() if sounds[slot].frames}
        if reading.rows:
            heard = [sounds[slot] for slot in reading.rows]
            yield from self.windows.passes(list(reading.rows.values()), heard, reading.live)
        # 5. Commit.
        for task in tasks:
            slot = task.slot
            if slot in waiting and slot in reading.open_slots:
                reading.results[slot] = DecodeResult(keep_from=task.base)
            elif slot in reading.open_slots:
                understood = slot not in rows
                done = self._finish(task) if understood else self._result(task, sounds[slot], rows[slot])
                reading.results[slot] = done

    def _waits(self, task: DecodeTask) -> bool:
        """Whether the window should grow before it is read."""
        return not (task.final or task.pause) and self.slots[task.slot].language_state.waits(task.end - task.base)

    def _judge(self, tasks: list[DecodeTask], sounds: dict[int, EncodedAudio]) -> None:
        """Detect language and speech in windows without committed text."""
        new = [task for task in tasks if not self.slots[task.slot].spoken and sounds[task.slot].frames]
        if self._model.detection_tokens is None or not new:
            return
        for task, judgement in zip(new, self.windows.judge([sounds[task.slot] for task in new]), strict=True):
            self.slots[task.slot].language_state.update(judgement, self.spec.options, task.end - task.base)

    def judgement(self, slot: int) -> tuple[str, float | None]:
        language_state = self.slots[slot].language_state
        return language_state.language, language_state.no_speech

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The slot's state as plain data, and the first position whose audio the state needs."""
        held = self.slots.get(slot) or _Slot(True, LanguageState.of(self.spec.options, {}, []))
        stream_encoder, audio_from = self._encoder_of(slot).save(slot, base, end)
        saved: Saved = {
            "committed": [(heard.token, heard.peak, heard.log_probability) for heard in held.committed],
            "hypothesis": [(heard.token, heard.peak, heard.log_probability) for heard in held.hypothesis],
            "spoken": held.spoken,
            "heard_on": held.heard_on,
            "marks": [astuple(timed) for timed in held.marks],
            "understood": held.understood,
            "mind": held.language_state.save(),
            "ear": stream_encoder,
        }
        return saved, audio_from

    def warm_up(self) -> None:
        self.windows.warm_up()

    def close(self) -> None:
        self.slots.clear()
        self.windows.close()
        if self.reviser is not None:
            self.reviser.close()

    def _encoder_of(self, slot: int) -> StreamEncoder:
        held = self.slots.get(slot)
        return self.windows.stream_encoder(held is None or held.live)

    def _row(self, task: DecodeTask, sound: EncodedAudio) -> Row:
        slot, model, policy = self.slots[task.slot], self._model, self._policy
        seconds = sound.frames * model.samples_per_frame / SAMPLE_RATE
        said_marks = [] if task.pending else slot.marks
        committed = self._seams.prefix(sound.said, said_marks, [heard.token for heard in slot.committed])
        opening = model.prompt_tokens(
            slot.language_state.language, slot.language_state.task, slot.language_state.prompt
        )
        room = model.max_tokens - len(opening) - len(committed) - 1
        most = max(1, min(room, round(seconds * policy.tokens_per_second) + 4 - len(committed)))
        frames_per_position = SAMPLES_PER_POSITION / model.samples_per_frame
        said_until = slot.committed[-1].peak if slot.committed else float(task.base)
        return Row(
            committed=committed,
            draft=[heard.token for heard in slot.hypothesis[:most]],
            most=most,
            stop_frame=None if task.final or task.pause else sound.frames - policy.agreed_margin * frames_per_position,
            frames=sound.frames,
            # An upload's window is read once, as a whole: there is no earlier text to repeat.
            progress=Progress(
                (said_until - sound.origin) * frames_per_position,
                FAR_BACK * frames_per_position if slot.live else inf,
            ),
            keywords=None if slot.keywords is None else slot.keywords.tree,
            opening=opening,
            has_text=self._has_text(task, sound),
        )

    def _has_text(self, task: DecodeTask, sound: EncodedAudio) -> bool:
        """Whether a window that ends an utterance without any text so far must have a text. A window that is read with
        the end of the last utterance may repeat that; of a translation, the doubt of the model says little."""
        slot = self.slots[task.slot]
        if not task.final or slot.spoken or sound.said:
            return False
        if slot.language_state.task or slot.language_state.finds_no_speech:
            return False
        return self._is_long(task)

    @staticmethod
    def _is_long(task: DecodeTask) -> bool:
        return (task.end - task.base) * SAMPLES_PER_POSITION >= SECONDS_WITH_TEXT * SAMPLE_RATE

    def _result(self, task: DecodeTask, sound: EncodedAudio, row: Row) -> DecodeResult:
        slot = self.slots[task.slot]
        floor = slot.committed[-1].peak if slot.committed else float(task.base)
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        places = [sound.origin + peak * scale for peak in row.peaks]
        whole = task.final and not slot.live
        steps = steady(places, floor) if whole else rising(places, floor)
        new = [HypothesisToken(*each) for each in zip(row.tokens, steps, row.log_probabilities, strict=True)]
        if task.cut_off:
            new = new[: heard_before_the_end(row.tokens, places, (floor, sound.edge), self.vocabulary.pieces)]
        said = [heard.token for heard in slot.committed]
        loop = loop_start(said + row.tokens)
        if loop is not None:
            new = new[: max(0, loop - len(said))]
        if not whole:
            bounds = (floor, sound.edge - self._policy.agreed_margin)
            new = without_repeat(said, new, places, bounds, self.vocabulary.pieces)
        new = without_second_mark(row.committed, new, self.vocabulary.pieces)
        text = b"".join(self.vocabulary.pieces[token] for token in row.tokens)
        # After pending marks, the first token's log-probability includes the doubt about the marks.
        chances = row.log_probabilities[1 if task.pending and sound.said else 0 :] or row.log_probabilities
        doubt = slot.language_state.doubt(self._policy, task.final or task.pause, self._is_long(task))
        if row.is_forced:
            doubt = max(doubt, self._policy.sure)
        if not slot.spoken and is_noise(text, chances, doubt):
            new = []
        slot.heard_on = bool(sound.said)
        if task.final:
            slot.hypothesis = new
            return self._finish(task)
        window = (float(task.base), sound.edge)
        previous = [heard.token for heard in slot.hypothesis]
        count = committable(new, row.ended, previous, window, self.vocabulary.pieces, self._policy)
        if task.pause and row.ended and surely_ends(new, self.vocabulary.pieces, self._policy):
            count = len(new)
        count = before_marks(new, count, self.vocabulary.pieces)
        upcoming = new[count].peak if count < len(new) else sound.edge
        timed, joined = self._joined(task, new[:count], floor, upcoming)
        slot.committed += joined
        slot.hypothesis = new[count:]
        stuck = bool(row.tokens) and not new and sound.edge - floor > FAR_BACK
        keep_from = self._cut(task, slot, upcoming, stuck)
        # A window without text is read once more at its end (`_has_text`).
        slot.understood = (keep_from, task.end) if task.pause and (slot.spoken or new) else None
        return DecodeResult(timed=timed, keep_from=keep_from, stride=sound.stride)

    def _is_understood(self, task: DecodeTask) -> bool:
        """Whether the last pass has decoded all of a window that now ends."""
        return task.final and self.slots[task.slot].understood == (task.base, task.end)

    def _finish(self, task: DecodeTask) -> DecodeResult:
        """Commit the slot's hypothesis, the rest of a window that ends. Marks at its end stay pending."""
        slot = self.slots[task.slot]
        floor = slot.committed[-1].peak if slot.committed else float(task.base)
        rest = slot.hypothesis
        count = before_marks(rest, len(rest), self.vocabulary.pieces)
        marks = self._timed(rest[count:], rest[count - 1].peak if count else floor, float(task.end))
        timed, said = self._joined(task, rest[:count], floor, rest[count].peak if marks else float(task.end))
        said = slot.committed + said
        words = before_marks(said, len(said), self.vocabulary.pieces)
        self._encoder_of(task.slot).end(task, self.windows.audio(task), said[:words])
        if said or marks:
            slot.marks = marks or self._timed(said[words:], floor, float(task.end))
        slot.restart()
        return DecodeResult(timed=timed, pending=marks, keep_from=task.end, stride=self.spec.stride_positions)

    def _joined(
        self, task: DecodeTask, new: list[HypothesisToken], before: float, after: float
    ) -> tuple[list[TimedToken], list[HypothesisToken]]:
        """Tokens to commit with their times, and the same as the slot remembers them. The punctuation
        between two utterances is decided when the second one has words."""
        slot = self.slots[task.slot]
        if new and slot.committed:
            new = self._seams.begun(slot.committed[-1].token, new)
        if not new or slot.spoken:
            return self._timed(new, before, after), new
        slot.spoken = True
        slot.marks, new = self._seams.join(slot.marks, new, task.pending, slot.heard_on)
        return [*(slot.marks if task.pending else ()), *self._timed(new, before, after)], new

    def _timed(self, tokens: list[HypothesisToken], before: float, after: float) -> list[TimedToken]:
        return [
            TimedToken(heard.token, start, end, heard.log_probability)
            for heard, (start, end) in zip(tokens, spans(tokens, before, after), strict=True)
        ]

    def _cut(self, task: DecodeTask, slot: _Slot, upcoming: float, stuck: bool) -> int:
        """First position that the next window needs; the slot forgets the text before it. If a pass is `stuck` (it
        repeated old text instead of the new audio), that is all of the text."""
        length = task.end - task.base
        if length < min(self._policy.cut_beyond, self.spec.window_positions) and not stuck:
            return task.base
        first = max(0, len(slot.committed) - 1) if stuck else 0
        found = best_cut(slot.committed[first:], upcoming, task.end, self.vocabulary.pieces, self._policy)
        if found is not None:
            behind, place = found
            cut = min(max(task.base, int(place)), task.end)
            if cut > task.base:
                del slot.committed[: first + behind]
                return cut
        if length < self.spec.window_positions:
            return task.base
        slot.restart()  # nothing could be committed in a whole window: there is no speech in it
        return task.end - length // 2


def _resumed(opened: OpenTask, language_state: LanguageState) -> _Slot:
    """The slot as it was when `save` was called."""
    saved = opened.saved
    assert saved is not None
    committed = [HypothesisToken(*heard) for heard in saved["committed"]]
    hypothesis = [HypothesisToken(*heard) for heard in saved["hypothesis"]]
    understood = None if saved["understood"] is None else tuple(saved["understood"])
    marks = [TimedToken(*timed) for timed in saved["marks"]]
    language_state.resume(saved["mind"])
    return _Slot(
        opened.live, language_state, committed, hypothesis, saved["spoken"], saved["heard_on"], marks, understood
    )
