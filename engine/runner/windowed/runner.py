"""`WindowedRunner`: reads each stream's window again, decodes from committed text on, and commits what is stable.

Encoding and decoding happen in `windows.py`, on a CPU or a device. The runner decides what is read, and makes text of
the tokens; `stability.py` decides what is committed.

Live streams are read first. Two kinds of work take longer than a live stream can wait: windows of uploads, which are
long and are decoded from nothing, and live streams that were restored from a saved state, if their encoder must be
rebuilt. This *deferred* work is done in small steps (an encoder layer, a decoder pass, or two seconds of a rebuild),
after the live streams of the plan and while there is time, restored streams before uploads. On a CPU all threads share
it. A result is returned with the plan in which it is complete.

A batch that fails is repeated stream by stream, so that only the faulty stream ends (`_continue`). The text of a window
and the state of its encoder are saved and restored (`save`, `_restored`). `PromptTokenizer` makes tokens of prompts.
"""

from __future__ import annotations

import logging
import re
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
from engine.runner.bias import KeywordTrees, LazyTree, bpe_merge, single_bytes, wait_briefly
from engine.runner.windowed.decoder import SPARE_TOKENS, LanguageState, Row
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION, EncodedAudio, StreamEncoder, WindowAhead
from engine.runner.windowed.stability import (
    FAR_BACK,
    HypothesisToken,
    Policy,
    Progress,
    UtteranceJoiner,
    before_marks,
    best_cut,
    committable,
    is_noise,
    loop_start,
    rising,
    spans,
    spoken_before_the_end,
    steady,
    surely_ends,
    without_repeat,
    without_second_mark,
)
from engine.runner.windowed.windows import Results, Windows
from engine.spec import ModelSpec, Vocabulary

# Characters at the end of a prompt that are used: a model uses a few hundred tokens of it.
PROMPT_CHARACTERS = 2_000
# Parts of a text that are never merged: words with the space before them, numbers, marks. The same as in GPT-2.
_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class PromptTokenizer:
    """Tokenises prompts. The number of a token is its merge rank."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._ranks = {piece: token for token, piece in enumerate(pieces) if piece}

    def tokens(self, text: str) -> list[int]:
        """The tokens of the end of a prompt, as of text after a space."""
        text = text.strip()[-PROMPT_CHARACTERS:]
        words = _WORDS.findall(f" {text}") if text else []
        parts = (part for word in words for part in bpe_merge(single_bytes(word.encode()), self._ranks))
        return [self._ranks[part] for part in parts if part in self._ranks]


SAMPLE_RATE = 16_000
# An utterance of at least this many seconds has a text. Moonshine's first token may be the end token although there is
# speech; shorter utterances may be a cough or a noise.
SECONDS_WITH_TEXT = 3.0
# Consecutive streams that may fail. If one more fails, the cause is not a stream, and the runner raises.
MAX_FAILED_READINGS = 3

logger = logging.getLogger(__name__)


def windowed_spec(name: str, window_positions: int, stride_positions: int, file_window_positions: int = 1) -> ModelSpec:
    """The sizes of a windowed model for scheduler and gateway. `file_window_positions`: longest window of an upload."""
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
    """The text of a stream's window: committed tokens, and after them the hypothesis of the last pass."""

    live: bool
    language_state: LanguageState
    committed: list[HypothesisToken] = field(default_factory=list)
    hypothesis: list[HypothesisToken] = field(default_factory=list)
    # Text of this utterance has been committed, so it is speech.
    spoken: bool = False
    # The last pass began with the end of the previous utterance (its tail).
    has_tail: bool = False
    # Punctuation marks after the last utterance. If the next task has `pending` set, they were not sent yet.
    marks: list[TimedToken] = field(default_factory=list)
    # If set, the last pass has decoded the window [start, end) to its end: a final pass has nothing to decode.
    decoded_window: tuple[int, int] | None = None
    keywords: LazyTree | None = None

    def restart(self) -> None:
        """Begin an utterance without text."""
        self.committed.clear()
        self.hypothesis.clear()
        self.spoken = False
        self.decoded_window = None


@dataclass(slots=True)
class _Reading:
    """Windows that are encoded and decoded together, in steps of `work`. `results` is complete when `is_done`."""

    live: bool
    tasks: Sequence[DecodeTask]
    # Slots whose streams are still open.
    open_slots: set[int]
    rows: dict[int, Row] = field(default_factory=dict)
    work: Iterator[None] = iter(())
    results: dict[int, DecodeResult] = field(default_factory=dict)
    # Streams are read one by one, because reading them together failed.
    one_by_one: bool = False
    is_done: bool = False

    def run(self, time_is_up: Callable[[], bool]) -> bool:
        """Do one step of the work, and more while there is time; True if all is done."""
        for _ in self.work:
            if time_is_up():
                return False
        self.is_done = True
        return True

    def fail(self, slot: int, error: str) -> None:
        """A stream cannot be read: end it, and no other."""
        self.open_slots.discard(slot)
        self.results[slot] = DecodeResult(error=error)

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
        self._joiner = UtteranceJoiner(vocabulary.pieces)
        self._keywords = KeywordTrees(vocabulary)
        self._prompts = PromptTokenizer(vocabulary.pieces)
        self.slots: dict[int, _Slot] = {}
        # Readings that are done in small steps, by slot, the oldest first.
        self._readings: dict[int, _Reading] = {}
        # Slots of streams that could not be opened: slot -> error text.
        self._unusable: dict[int, str] = {}
        # Consecutive failed readings of single streams.
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
        deferred: list[DecodeTask] = []
        without_keywords = self._without_keywords(plan.decode)
        for task in plan.decode:
            if task.slot not in results and task.slot not in without_keywords:
                is_begun = task.slot in self._readings
                is_live = self.slots[task.slot].live and not is_begun and not self._must_rebuild(task)
                (live if is_live else deferred).append(task)
        if live:
            results |= self.windows.run_in_parts(live, self._read_at_once)
        if deferred and not (live and time_is_up()):
            results |= self._read_in_steps(deferred, plan.ahead, time_is_up)
        return [results.get(task.slot) or DecodeResult(unfinished=True) for task in plan.decode]

    def _without_keywords(self, tasks: Sequence[DecodeTask]) -> set[int]:
        """The slots whose keywords are still being prepared: only they wait."""
        trees = {task.slot: tree.future for task in tasks if (tree := self.slots[task.slot].keywords) is not None}
        wait_briefly([tree for tree in trees.values() if not tree.done()])
        return {slot for slot, tree in trees.items() if not tree.done()}

    @torch.inference_mode()
    def _read_at_once(self, tasks: Sequence[DecodeTask]) -> Results:
        """Read windows of live streams without a break."""
        reading = self._new_reading(tasks, live=True)
        self._continue(reading, never)
        return reading.results

    def _must_rebuild(self, task: DecodeTask) -> bool:
        """Whether the encoder of a live stream must be rebuilt for this task."""
        return self._encoder_of(task.slot).must_rebuild(task.slot) and not self._is_decoded(task)

    def _read_in_steps(
        self, tasks: Sequence[DecodeTask], ahead: Sequence[DecodeTask], time_is_up: Callable[[], bool]
    ) -> Results:
        """Continue these tasks until the time is up. Returns the results of those that are done. `ahead`: the windows
        that follow in uploads. Threads that have nothing else to do encode them."""
        ends = {task.slot: task.end for task in tasks}
        encoder = self.windows.upload_encoder
        for task in ahead:
            if task.slot in ends:
                encoder.begin_ahead(task, self.windows.audio(task), ends[task.slot])
        new = [task for task in tasks if task.slot not in self._readings]
        if not self.windows.batches_uploads:
            started = [
                self._new_restored_reading(task) if self._must_rebuild(task) else self._new_reading([task], live=False)
                for task in new
            ]
        else:
            started = [self._new_reading(new, live=False)] if new and not self._readings else []
        self._readings |= {slot: reading for reading in started for slot in reading.open_slots}
        # Only readings of the plan's tasks: the result of another one would have no task in the plan.
        planned = [self._readings[task.slot] for task in tasks if task.slot in self._readings]
        readings = list({id(reading): reading for reading in planned}.values())
        readings.sort(key=lambda reading: not reading.live)
        work = [partial(self._continue, reading, time_is_up) for reading in readings]

        def is_over() -> bool:
            return time_is_up() or all(reading.is_done for reading in readings)

        begun = [encoder.window_ahead(slot, end) for slot, end in ends.items()]
        work += [partial(_encode_ahead, window, is_over) for window in begun if window is not None]
        self.windows.run_in_pieces(work, time_is_up)
        results: Results = {}
        for reading in readings:
            if reading.is_done:
                results |= reading.results
        self._readings = {slot: reading for slot, reading in self._readings.items() if not reading.is_done}
        return results

    @torch.inference_mode()
    def _continue(self, reading: _Reading, time_is_up: Callable[[], bool]) -> bool:
        """As `_Reading.run`. If that fails, the streams are read one by one, so that only the stream with the fault
        ends."""
        try:
            is_done = reading.run(time_is_up)
            if not reading.one_by_one:
                self._failed_readings = 0
            return is_done
        except Exception as error:
            if reading.one_by_one:
                raise
            logger.warning("streams are read one by one, because reading them together failed: %r", error)
        reading.one_by_one = True
        reading.rows.clear()
        remaining = [task for task in reading.tasks if task.slot in reading.open_slots - reading.results.keys()]
        reading.work = self._read_steps_one_by_one(remaining, reading)
        return reading.run(time_is_up)

    def _read_steps_one_by_one(self, tasks: Sequence[DecodeTask], reading: _Reading) -> Iterator[None]:
        failed: list[Exception] = []
        for task in tasks:
            if task.slot not in reading.open_slots:
                continue
            alone = _Reading(reading.live, [task], {task.slot})
            try:
                yield from self._read_steps([task], alone)
            except Exception as error:
                logger.error("stream %s cannot be read; the others continue", task.stream, exc_info=error)
                failed.append(error)
                reading.fail(task.slot, f"its audio cannot be read ({type(error).__name__})")
            else:
                self._failed_readings = 0
                reading.results |= alone.results
        self._failed_readings += len(failed)
        if failed and self._failed_readings > MAX_FAILED_READINGS:
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
                logger.error("stream %s cannot be opened; the others continue", opened.stream, exc_info=error)
                # The slot gets an empty text; the stream ends with its first task.
                self.slots[opened.slot] = _Slot(opened.live, LanguageState.of(self.spec.options, {}, []))
                self._encoder_of(opened.slot).forget(opened.slot)
                what = "state" if opened.saved is not None else "options"
                self._unusable[opened.slot] = f"its {what} cannot be used ({type(error).__name__})"
        self.windows.write(plan.encode)

    def _open(self, opened: OpenTask) -> None:
        prompt = self._prompts.tokens(opened.options.get("prompt", ""))
        language_state = LanguageState.of(self.spec.options, opened.options, prompt)
        self.slots[opened.slot] = (
            _Slot(opened.live, language_state) if opened.saved is None else _restored(opened, language_state)
        )
        self.slots[opened.slot].keywords = self._keywords.lazy_tree(opened.options)
        if opened.saved is not None:
            self._encoder_of(opened.slot).resume(opened.slot, opened.saved["ear"], opened.saved_items)

    def _new_reading(self, tasks: Sequence[DecodeTask], live: bool) -> _Reading:
        """A new reading of the tasks' windows, with all its work still to do. The texts of the slots change only in its
        last step."""
        reading = _Reading(live, tasks, {task.slot for task in tasks})
        reading.work = self._read_steps(tasks, reading)
        return reading

    def _new_restored_reading(self, task: DecodeTask) -> _Reading:
        """As `_new_reading`, for a live stream whose encoder is rebuilt first. After that, its window is read in one
        step."""
        reading = _Reading(True, [task], {task.slot})

        def steps() -> Iterator[None]:
            yield from self._encoder_of(task.slot).rebuild(task.slot)
            for _ in self._read_steps([task], reading):
                pass

        reading.work = steps()
        return reading

    def _read_steps(self, tasks: Sequence[DecodeTask], reading: _Reading) -> Iterator[None]:
        """Read the windows together; each `yield` ends a step of the work."""
        # 1. Leave out windows that are still too short, and those that are already decoded to their end.
        waiting = {task.slot for task in tasks if self._waits(task)}
        unread = [task for task in tasks if task.slot not in waiting and not self._is_decoded(task)]
        for task in unread:
            if self.windows.is_broken(task):
                reading.fail(task.slot, "its audio has NaN or infinite values")
        # 2. Encode.
        sounds: dict[int, EncodedAudio] = {}
        for live in (True, False):
            due = [task for task in unread if task.slot in reading.open_slots and self.slots[task.slot].live == live]
            if due:
                # Streams that are closed meanwhile are left out: their slots may belong to other streams by then.
                sounds |= yield from self.windows.encode(due, live, reading.open_slots)
        # 3. Detect language and speech.
        self._detect_language_and_speech(
            [task for task in unread if task.slot in sounds and task.slot in reading.open_slots], sounds
        )
        # 4. Decode.
        rows = {
            task.slot: self._row(task, sounds[task.slot])
            for task in unread
            if task.slot in sounds and task.slot in reading.open_slots
        }
        reading.rows |= {slot: row for slot, row in rows.items() if sounds[slot].frames}
        if reading.rows:
            row_sounds = [sounds[slot] for slot in reading.rows]
            yield from self.windows.passes(list(reading.rows.values()), row_sounds, reading.live)
        # 5. Commit.
        for task in tasks:
            slot = task.slot
            if slot in waiting and slot in reading.open_slots:
                reading.results[slot] = DecodeResult(keep_from=task.base)
            elif slot in reading.open_slots:
                is_decoded = slot not in rows
                result = self._finish(task) if is_decoded else self._result(task, sounds[slot], rows[slot])
                reading.results[slot] = result

    def _waits(self, task: DecodeTask) -> bool:
        """Whether the window should grow before it is read."""
        return not (task.final or task.pause) and self.slots[task.slot].language_state.waits(task.end - task.base)

    def _detect_language_and_speech(self, tasks: list[DecodeTask], sounds: dict[int, EncodedAudio]) -> None:
        """Detect language and speech in windows without committed text."""
        new = [task for task in tasks if not self.slots[task.slot].spoken and sounds[task.slot].frames]
        if self._model.detection_tokens is None or not new:
            return
        for task, detection in zip(new, self.windows.judge([sounds[task.slot] for task in new]), strict=True):
            self.slots[task.slot].language_state.update(detection, self.spec.options, task.end - task.base)

    def judgement(self, slot: int) -> tuple[str, float | None]:
        language_state = self.slots[slot].language_state
        return language_state.language, language_state.no_speech

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The slot's state as plain data, and the first position whose audio the state needs."""
        state = self.slots.get(slot) or _Slot(True, LanguageState.of(self.spec.options, {}, []))
        encoder_state, audio_from = self._encoder_of(slot).save(slot, base, end)
        # Keys with older names: `heard_on` is `has_tail`, `understood` `decoded_window`, `mind` the language state and
        # `ear` the state of the encoder.
        saved: Saved = {
            "committed": [(token.token, token.peak, token.log_probability) for token in state.committed],
            "hypothesis": [(token.token, token.peak, token.log_probability) for token in state.hypothesis],
            "spoken": state.spoken,
            "heard_on": state.has_tail,
            "marks": [astuple(timed) for timed in state.marks],
            "understood": state.decoded_window,
            "mind": state.language_state.save(),
            "ear": encoder_state,
        }
        return saved, audio_from

    def warm_up(self) -> None:
        self.windows.warm_up()

    def close(self) -> None:
        self.slots.clear()
        self.windows.close()
        self._keywords.close()
        if self.reviser is not None:
            self.reviser.close()

    def _encoder_of(self, slot: int) -> StreamEncoder:
        state = self.slots.get(slot)
        return self.windows.stream_encoder(state is None or state.live)

    def _row(self, task: DecodeTask, sound: EncodedAudio) -> Row:
        """The row of a decoding batch for this window."""
        slot, model, policy = self.slots[task.slot], self._model, self._policy
        seconds = sound.frames * model.samples_per_frame / SAMPLE_RATE
        committed_marks = [] if task.pending else slot.marks
        committed = self._joiner.prefix(sound.tail_tokens, committed_marks, [token.token for token in slot.committed])
        start_tokens = model.prompt_tokens(
            slot.language_state.language, slot.language_state.task, slot.language_state.prompt
        )
        room = model.max_tokens - len(start_tokens) - len(committed) - 1
        speech_tokens = round(seconds * policy.tokens_per_second) + SPARE_TOKENS
        max_tokens = max(1, min(room, speech_tokens - len(committed)))
        frames_per_position = SAMPLES_PER_POSITION / model.samples_per_frame
        text_until = slot.committed[-1].peak if slot.committed else float(task.base)
        return Row(
            committed=committed,
            draft=[token.token for token in slot.hypothesis[:max_tokens]],
            max_tokens=max_tokens,
            stop_frame=None if task.final or task.pause else sound.frames - policy.agreed_margin * frames_per_position,
            frames=sound.frames,
            # An upload's window is read once, as a whole: there is no earlier text to repeat.
            progress=Progress(
                (text_until - sound.origin) * frames_per_position,
                FAR_BACK * frames_per_position if slot.live else inf,
            ),
            keywords=None if slot.keywords is None else slot.keywords.tree,
            start_tokens=start_tokens,
            has_text=self._must_have_text(task, sound),
        )

    def _must_have_text(self, task: DecodeTask, sound: EncodedAudio) -> bool:
        """Whether a window that ends an utterance, which has no text so far, must have a text. Not if the window is
        read with the tail of the last utterance, because the text may repeat the tail. Not if the model finds no speech
        in it. Not for a translation, because its log-probabilities say little about the audio."""
        slot = self.slots[task.slot]
        if not task.final or slot.spoken or sound.tail_tokens:
            return False
        if slot.language_state.task or slot.language_state.finds_no_speech:
            return False
        return self._is_long(task)

    @staticmethod
    def _is_long(task: DecodeTask) -> bool:
        return (task.end - task.base) * SAMPLES_PER_POSITION >= SECONDS_WITH_TEXT * SAMPLE_RATE

    def _result(self, task: DecodeTask, sound: EncodedAudio, row: Row) -> DecodeResult:
        """Commit what is stable in a decoded row, and cut the window if it is long."""
        slot = self.slots[task.slot]
        # 1. Give each token a time.
        floor = slot.committed[-1].peak if slot.committed else float(task.base)
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        # Raw attention peaks, which may go backwards, and the same made monotonic.
        raw_peaks = [sound.origin + peak * scale for peak in row.peaks]
        is_complete = task.final and not slot.live
        peaks = steady(raw_peaks, floor) if is_complete else rising(raw_peaks, floor)
        new = [HypothesisToken(*each) for each in zip(row.tokens, peaks, row.log_probabilities, strict=True)]
        # 2. Drop what the audio does not have: words behind its end, loops, repeats, noise.
        if task.cut_off:
            new = new[: spoken_before_the_end(row.tokens, raw_peaks, (floor, sound.edge), self.vocabulary.pieces)]
        committed = [token.token for token in slot.committed]
        loop = loop_start(committed + row.tokens)
        if loop is not None:
            new = new[: max(0, loop - len(committed))]
        if not is_complete:
            bounds = (floor, sound.edge - self._policy.agreed_margin)
            new = without_repeat(committed, new, raw_peaks, bounds, self.vocabulary.pieces)
        new = without_second_mark(row.committed, new, self.vocabulary.pieces)
        text = b"".join(self.vocabulary.pieces[token] for token in row.tokens)
        # After pending marks, the first token's log-probability is low if the marks are doubtful: it does not count.
        first = 1 if task.pending and sound.tail_tokens else 0
        log_probabilities = row.log_probabilities[first:] or row.log_probabilities
        doubt = slot.language_state.doubt(self._policy, task.final or task.pause, self._is_long(task))
        if row.is_forced:
            doubt = max(doubt, self._policy.sure)
        if not slot.spoken and is_noise(text, log_probabilities, doubt):
            new = []
        slot.has_tail = bool(sound.tail_tokens)
        if task.final:
            slot.hypothesis = new
            return self._finish(task)
        # 3. Commit what is stable, and cut the window.
        window = (float(task.base), sound.edge)
        previous = [token.token for token in slot.hypothesis]
        count = committable(new, row.ended, previous, window, self.vocabulary.pieces, self._policy)
        if task.pause and row.ended and surely_ends(new, self.vocabulary.pieces, self._policy):
            count = len(new)
        count = before_marks(new, count, self.vocabulary.pieces)
        next_peak = new[count].peak if count < len(new) else sound.edge
        timed, joined = self._joined(task, new[:count], floor, next_peak)
        slot.committed += joined
        slot.hypothesis = new[count:]
        repeats_only = bool(row.tokens) and not new and sound.edge - floor > FAR_BACK
        keep_from = self._cut(task, slot, next_peak, repeats_only)
        # A window without text is read again when the utterance ends (`_must_have_text`).
        slot.decoded_window = (keep_from, task.end) if task.pause and (slot.spoken or new) else None
        return DecodeResult(timed=timed, keep_from=keep_from, stride=sound.stride)

    def _is_decoded(self, task: DecodeTask) -> bool:
        """Whether the task ends a window that the last pass has decoded to its end."""
        return task.final and self.slots[task.slot].decoded_window == (task.base, task.end)

    def _finish(self, task: DecodeTask) -> DecodeResult:
        """Commit the slot's hypothesis, the rest of a window that ends. Marks at its end stay pending."""
        slot = self.slots[task.slot]
        floor = slot.committed[-1].peak if slot.committed else float(task.base)
        rest = slot.hypothesis
        count = before_marks(rest, len(rest), self.vocabulary.pieces)
        marks = self._timed(rest[count:], rest[count - 1].peak if count else floor, float(task.end))
        timed, joined = self._joined(task, rest[:count], floor, rest[count].peak if marks else float(task.end))
        text = slot.committed + joined
        words = before_marks(text, len(text), self.vocabulary.pieces)
        self._encoder_of(task.slot).end(task, self.windows.audio(task), text[:words])
        if text or marks:
            slot.marks = marks or self._timed(text[words:], floor, float(task.end))
        slot.restart()
        return DecodeResult(timed=timed, pending=marks, keep_from=task.end, stride=self.spec.stride_positions)

    def _joined(
        self, task: DecodeTask, new: list[HypothesisToken], before: float, after: float
    ) -> tuple[list[TimedToken], list[HypothesisToken]]:
        """The tokens to send, with their times, and the tokens for `_Slot.committed`. The first list may begin with the
        pending marks between two utterances, which are decided when the second one has words. `before`, `after`: peaks
        of the tokens next to `new`."""
        slot = self.slots[task.slot]
        if new and slot.committed:
            new = self._joiner.capitalised(slot.committed[-1].token, new)
        if not new or slot.spoken:
            return self._timed(new, before, after), new
        slot.spoken = True
        slot.marks, new = self._joiner.join(slot.marks, new, task.pending, slot.has_tail)
        return [*(slot.marks if task.pending else ()), *self._timed(new, before, after)], new

    def _timed(self, tokens: list[HypothesisToken], before: float, after: float) -> list[TimedToken]:
        return [
            TimedToken(token.token, start, end, token.log_probability)
            for token, (start, end) in zip(tokens, spans(tokens, before, after), strict=True)
        ]

    def _cut(self, task: DecodeTask, slot: _Slot, next_peak: float, repeats_only: bool) -> int:
        """First position that the next window needs; the text before it is removed from the slot. `next_peak`: peak of
        the first token that is not committed. With `repeats_only` (the pass repeated old text and found none for the
        new audio) the window is cut after its whole text."""
        length = task.end - task.base
        if length < min(self._policy.cut_beyond, self.spec.window_positions) and not repeats_only:
            return task.base
        first = max(0, len(slot.committed) - 1) if repeats_only else 0
        found = best_cut(slot.committed[first:], next_peak, task.end, self.vocabulary.pieces, self._policy)
        if found is not None:
            count, position = found
            cut = min(max(task.base, int(position)), task.end)
            if cut > task.base:
                del slot.committed[: first + count]
                return cut
        if length < self.spec.window_positions:
            return task.base
        slot.restart()  # nothing could be committed in a window of the longest length: it has no speech
        return task.end - length // 2


@torch.inference_mode()
def _encode_ahead(window: WindowAhead, is_over: Callable[[], bool]) -> bool:
    """Encode the next window of an upload until `is_over`; True if nothing is left to do."""
    return window.run(is_over)


def _restored(opened: OpenTask, language_state: LanguageState) -> _Slot:
    """The slot as it was when `save` was called."""
    saved = opened.saved
    assert saved is not None
    committed = [HypothesisToken(*token) for token in saved["committed"]]
    hypothesis = [HypothesisToken(*token) for token in saved["hypothesis"]]
    decoded_window = None if saved["understood"] is None else tuple(saved["understood"])
    marks = [TimedToken(*timed) for timed in saved["marks"]]
    language_state.resume(saved["mind"])
    return _Slot(
        opened.live, language_state, committed, hypothesis, saved["spoken"], saved["heard_on"], marks, decoded_window
    )
