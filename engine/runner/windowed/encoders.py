"""Encoders of windowed models: turn the audio of a stream's window into encoder output for the decoder.

`AudioSlab` holds the audio of all streams on the device, one row per position; the scheduler assigns the rows.
`WindowEncoder` encodes the whole window again in every pass; before a short window it puts the end of the last
utterance. It serves all uploads, and live streams of Whisper and of Moonshine as published. `BlockEncoder` encodes only
new audio, in blocks with bounded context. It serves live streams of models with a streaming encoder, on a CPU. Times
are positions of the stream (80 ms).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.core.plan import SILENCE_ROW, DecodeTask, EncodeTask
from engine.messages import Item, Saved
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import EncoderState, StreamingEncoder
from engine.models.seq2seq import Encoded, SpeechModel, run_to_end
from engine.runner.device import upload
from engine.runner.windowed.stability import POSITIONS_PER_SECOND, HypothesisToken, Policy, starts_word

logger = logging.getLogger(__name__)

SAMPLES_PER_POSITION = 1_280


class AudioSlab:
    """Audio of all streams on the device, one row per position. Row 0 is silence and is never written."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        # numpy.zeros allocates memory that the system clears when it is first used; torch.zeros would write all of it.
        self.rows = torch.from_numpy(np.zeros((rows + 1, SAMPLES_PER_POSITION), np.float32)).to(device)
        self._device = self.rows.device
        # Rows with NaN or infinite values.
        self._not_finite: set[int] = set()

    def write(self, tasks: Sequence[EncodeTask]) -> None:
        """Write the samples of the items in one copy."""
        if not tasks:
            return
        samples = np.concatenate([_samples(task) for task in tasks])
        rows = [row for task in tasks for row in task.rows]
        for row, finite in zip(rows, np.isfinite(samples).all(axis=1).tolist(), strict=True):
            (self._not_finite.discard if finite else self._not_finite.add)(row)
        self.rows[upload(np.array(rows, np.int64), self._device)] = upload(samples, self._device)

    def is_broken(self, task: DecodeTask) -> bool:
        """Whether the window has NaN or infinite values."""
        return bool(self._not_finite) and not self._not_finite.isdisjoint(task.rows)

    def audio(self, task: DecodeTask) -> Tensor:
        """[1, samples] of the task's whole window."""
        return self.gather([task.rows])

    def gather(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """[windows, samples]: the rows of each window, shorter ones padded with silence."""
        length = max(map(len, windows))
        rows = np.zeros((len(windows), length), np.int64)
        for row, window in zip(rows, windows, strict=True):
            row[: len(window)] = window
        return self.rows[upload(rows, self._device)].view(len(windows), -1)


def _samples(task: EncodeTask) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """[rows, samples]: the samples of the positions to be stored."""
    samples: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.asarray(task.payload, np.float32)
    samples = samples.reshape(-1, SAMPLES_PER_POSITION)
    return samples if task.mask is None else samples[np.array(task.mask)]


def audio_of(items: Sequence[Item], start: int, end: int) -> Tensor:
    """[1, samples] of positions [start, end); silence where there is no item."""
    audio = torch.zeros(end - start, SAMPLES_PER_POSITION)
    for item in items:
        if item.payload is None:
            continue
        rows = torch.from_numpy(np.array(item.payload)).view(-1, SAMPLES_PER_POSITION)
        for index, row in enumerate(rows):
            position = item.offset + index
            if start <= position < end and (item.mask is None or item.mask[index]):
                audio[position - start] = row
    return audio.view(1, -1)


@dataclass(slots=True)
class EncodedAudio:
    """Encoder output for one pass of one stream."""

    encoded: Encoded
    # Positions at which the first frame begins and the last one ends. After `edge` there may be audio not encoded yet.
    origin: float
    edge: float
    # If the encoded audio begins before the window, with the end of the last utterance (tail): the tokens of the tail.
    tail_tokens: Sequence[int] = ()
    # New positions after which a next pass is worthwhile; None: as before.
    stride: int | None = None
    # The row in `encoded`.
    row: int = 0

    @property
    def frames(self) -> int:
        """Number of frames with audio."""
        return self.encoded.audio[self.row]


class StreamEncoder(Protocol):
    """Encodes the windows of many streams, by slot. `audio` is always [1, samples] of the task's whole window."""

    def encode(self, task: DecodeTask, audio: Tensor) -> EncodedAudio:
        """Encode the window of a task."""

    def end(self, task: DecodeTask, audio: Tensor, text: list[HypothesisToken]) -> None:
        """The utterance ends with this task's window. `text`: the words of the window."""

    def forget(self, slot: int) -> None:
        """The slot's stream is closed. Does nothing for an unused slot."""

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The state of a slot with the window [base, end), and the first position whose audio the state needs."""

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        """Restore a saved state; `items` contain the audio it needs. Encodes nothing."""

    def must_rebuild(self, slot: int) -> bool:
        """Whether audio of a restored state must be encoded again before the next window."""

    def rebuild(self, slot: int) -> Iterator[None]:
        """Encode that audio, yielding after each part. If it was not called, `encode` does all of it."""


@dataclass(slots=True)
class Tail:
    """The end of the previous utterance: context for the beginning of the next one."""

    # [1, samples]
    audio: Tensor
    tokens: list[int]
    # The position after the audio.
    end: int

    @property
    def positions(self) -> int:
        return self.audio.shape[1] // SAMPLES_PER_POSITION

    @property
    def start(self) -> int:
        return self.end - self.positions

    def up_to(self, base: int) -> Tensor:
        """[1, samples] up to `base`: the tail, and silence for the pause after it. From the length of the pause the
        model concludes whether a sentence has ended."""
        return pad(self.audio, (0, (base - self.end) * SAMPLES_PER_POSITION))


class Tails:
    """The tails of many streams, by slot."""

    def __init__(self, pieces: list[bytes], policy: Policy, device: torch.device | str) -> None:
        self._pieces = pieces
        self._policy = policy
        self._device = device
        self._tails: dict[int, Tail] = {}

    def store(self, task: DecodeTask, audio: Tensor, text: list[HypothesisToken]) -> None:
        """Store the last words of an utterance that ends, and the audio from a little before them on."""
        self._tails.pop(task.slot, None)
        first = len(text)
        for index, token in enumerate(text):
            if token.peak >= task.end - self._policy.tail_length and starts_word(self._pieces[token.token]):
                first = index
                break
        if first == len(text):
            return
        # From halfway between the word before the tail and its first word.
        before = text[first - 1].peak if first else float(task.base)
        start = max(task.base, int((before + text[first].peak) / 2))
        tail_audio = audio[:, (start - task.base) * SAMPLES_PER_POSITION :]
        self._tails[task.slot] = Tail(tail_audio, [token.token for token in text[first:]], task.end)

    def forget(self, slot: int) -> None:
        self._tails.pop(slot, None)

    def context(self, slot: int, base: int, end: int) -> Tail | None:
        """The tail, if it is recent and the window [base, end) too short to be decoded well without it; else None."""
        tail = self._tails.get(slot)
        return tail if tail is not None and self.may_need(tail.end, base, end) else None

    def may_need(self, tail_end: int, base: int, end: int) -> bool:
        """Whether a tail that ends at `tail_end` is recent for the window [base, end), and the window short."""
        return base - tail_end <= self._policy.tail_gap and end - base <= self._policy.tail_until

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        tail = self.context(slot, base, end)
        if tail is None:
            return {"tail": None}, base
        return {"tail": (tail.start, tail.end, list(tail.tokens))}, tail.start

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        if saved["tail"] is not None:
            start, end, tokens = saved["tail"]
            self._tails[slot] = Tail(audio_of(items, start, end).to(self._device), list(tokens), end)


@dataclass(slots=True)
class WindowAhead:
    """The next window of an upload, which is encoded while the window before it is decoded."""

    span: tuple[int, int]
    work: Generator[None, None, EncodedAudio]
    encoded: EncodedAudio | None = None
    failed: bool = False

    def rest(self) -> Generator[None, None, EncodedAudio]:
        """Do what is left, yielding after each piece of work. May be abandoned and called again: without `yield from`,
        which would end `work` too."""
        while self.encoded is None:
            try:
                next(self.work)
            except StopIteration as done:
                self.encoded = done.value
            else:
                yield
        return self.encoded

    def run(self, is_over: Callable[[], bool]) -> bool:
        """Encode until `is_over`; True if nothing is left to do."""
        try:
            if not is_over():
                for _ in self.rest():
                    if is_over():
                        break
        except Exception:
            # The window is encoded again when it is read, and then the error ends its stream.
            logger.warning("a window cannot be encoded ahead", exc_info=True)
            self.failed = True
        return self.failed or self.encoded is not None


class WindowEncoder:
    """Encodes the whole window again in every pass; in front of a short window also the tail of the last utterance.

    The next window of an upload may be encoded ahead, by another thread than the one that decodes. `encode_in_pieces`
    then uses the result, which is the same.
    """

    def __init__(
        self,
        model: SpeechModel,
        pieces: list[bytes],
        policy: Policy,
        device: torch.device | str = "cpu",
        at_pause: SpeechModel | None = None,
    ) -> None:
        self._model = model
        # The model with the padding for windows that end at a pause (`SpeechModel.set_live_padding`).
        self._at_pause = at_pause or model
        self._tails = Tails(pieces, policy, device)
        # By slot: the window that is read and the one after it, as far as they were begun ahead.
        self._ahead: dict[int, deque[WindowAhead]] = {}

    def begin_ahead(self, task: DecodeTask, audio: Tensor, end: int) -> None:
        """Prepare to encode this window, which follows one that ends at `end`. Does nothing if it may need that
        window's text."""
        if not self._tails.may_need(end, task.base, task.end):
            ahead = WindowAhead((task.base, task.end), self._encode_in_pieces(task, audio))
            self._ahead.setdefault(task.slot, deque()).append(ahead)

    def window_ahead(self, slot: int, end: int) -> WindowAhead | None:
        """The window behind `end` that was begun and is not complete, if any."""
        windows = self._ahead.get(slot)
        if not windows or windows[-1].span[0] < end or windows[-1].failed or windows[-1].encoded is not None:
            return None
        return windows[-1]

    def _begun_ahead(self, task: DecodeTask) -> WindowAhead | None:
        """Remove and return the window of a task that is read now, if it was begun ahead."""
        windows = self._ahead.get(task.slot)
        while windows and windows[0].span[0] <= task.base:
            ahead = windows.popleft()
            if ahead.span == (task.base, task.end) and not ahead.failed:
                return ahead
        return None

    def encode(self, task: DecodeTask, audio: Tensor) -> EncodedAudio:
        return run_to_end(self.encode_in_pieces(task, audio))

    def encode_in_pieces(self, task: DecodeTask, audio: Tensor) -> Generator[None, None, EncodedAudio]:
        """As `encode`, yielding after each piece of work."""
        ahead = self._begun_ahead(task)
        if ahead is not None:
            return (yield from ahead.rest())
        return (yield from self._encode_in_pieces(task, audio))

    def _encode_in_pieces(self, task: DecodeTask, audio: Tensor) -> Generator[None, None, EncodedAudio]:
        tail = self._tails.context(task.slot, task.base, task.end)
        if tail is not None:
            audio = torch.cat((tail.up_to(task.base), audio), dim=1)
        model = self._at_pause if task.final or task.pause else self._model
        missing = model.min_samples - audio.shape[1]
        if missing > 0:
            audio = pad(audio, (0, missing))
        encoded = yield from model.encode_in_pieces(audio, [audio.shape[1]])
        if tail is None:
            return EncodedAudio(encoded, task.base, task.end)
        return EncodedAudio(encoded, tail.start, task.end, tail.tokens)

    def encode_batch(self, tasks: Sequence[DecodeTask], slab: AudioSlab) -> list[EncodedAudio]:
        """As `encode`, for several windows in one batch."""
        tails = [self._tails.context(task.slot, task.base, task.end) for task in tasks]
        starts = [task.base if tail is None else tail.start for task, tail in zip(tasks, tails, strict=True)]
        # First silence for the tail and for the pause after it; then the tail is written over it.
        rows = [[SILENCE_ROW] * (task.base - start) + task.rows for task, start in zip(tasks, starts, strict=True)]
        audio = slab.gather(rows)
        for row_audio, tail in zip(audio, tails, strict=True):
            if tail is not None:
                row_audio[: tail.audio.shape[1]] = tail.audio[0]
        lengths = [max(len(window) * SAMPLES_PER_POSITION, self._model.min_samples) for window in rows]
        encoded = self._model.encode(pad(audio, (0, max(lengths) - audio.shape[1])), lengths)
        return [
            EncodedAudio(encoded, start, task.end, () if tail is None else tail.tokens, row=row)
            for row, (task, tail, start) in enumerate(zip(tasks, tails, starts, strict=True))
        ]

    def end(self, task: DecodeTask, audio: Tensor, text: list[HypothesisToken]) -> None:
        self._tails.store(task, audio, text)

    def forget(self, slot: int) -> None:
        self._tails.forget(slot)
        self._ahead.pop(slot, None)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        return self._tails.save(slot, base, end)

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        self._tails.resume(slot, saved, items)

    def must_rebuild(self, slot: int) -> bool:
        return False

    def rebuild(self, slot: int) -> Iterator[None]:
        return iter(())


# Encoding in blocks: only new audio is encoded, with bounded context.
#
# An utterance is encoded from its anchor on, the position at which its encoder started. A frame depends only on the
# audio since the anchor, not on how it was split into tasks, so a stream is rebuilt exactly by encoding it again from
# there. When the window of a long utterance has just been cut, the utterance gets a new anchor at the start of the
# window. This bounds the audio that a rebuild needs, and little is encoded twice.
#
# A pass is worthwhile when a block is complete, so the encoder says when the next one will be. The pass also gets the
# block's look-ahead frames, so that words need not wait until these are final.

# An utterance gets a new anchor when its window is cut and ends more than this many positions after the anchor. The
# encoder was trained on up to 28 s; a window is cut every seven or eight seconds.
LONG_FROM_ANCHOR = int(18 * POSITIONS_PER_SECOND)
# Positions that are encoded in one piece when an utterance is rebuilt. Live streams wait for one piece at most.
REBUILT_AT_ONCE = int(2 * POSITIONS_PER_SECOND)


@dataclass(slots=True)
class _Utterance:
    """The encoder state and output of one utterance."""

    anchor: int
    # The encoder has got the audio before this position.
    audio_until: int
    state: EncoderState
    # Frames of the window; the first has the number `first`, counted from the anchor.
    encoded: Encoded
    first: int = 0


@dataclass(frozen=True, slots=True)
class _RestoredState:
    """A saved utterance whose audio has not been encoded again yet. Fields as in `_Utterance`, except `audio`."""

    anchor: int
    audio_until: int
    first: int
    # [samples] from the anchor to `audio_until`.
    audio: Tensor


class BlockEncoder:
    """Encodes audio in blocks. See the comment above."""

    def __init__(self, model: Moonshine, encoder: StreamingEncoder) -> None:
        self._model = model
        self._encoder = encoder
        self._utterances: dict[int, _Utterance] = {}
        self._restored: dict[int, _RestoredState] = {}

    @property
    def first_stride(self) -> int:
        """Positions from the beginning of an utterance to its first complete block."""
        return self._next_block_at(self._start(0))

    def encode(self, task: DecodeTask, audio: Tensor) -> EncodedAudio:
        for _ in self.rebuild(task.slot):
            pass
        utterance = self._utterances.get(task.slot)
        if utterance is None or utterance.audio_until < task.base or self._needs_new_anchor(utterance, task):
            utterance = self._utterances[task.slot] = self._start(task.base)
        new = audio[0, (utterance.audio_until - task.base) * SAMPLES_PER_POSITION :]
        self._append(utterance, new, task.end)
        self._drop_before(utterance, self._frames_before(utterance, task.base))
        # The utterance may continue after a pause, so a copy of the state is finished.
        ends = task.final or task.pause
        ahead = self._encoder.finish(_copy(utterance.state)) if ends else utterance.state.ahead
        encoded = _join(utterance.encoded, self._cross(ahead))
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        origin = utterance.anchor + utterance.first * scale
        return EncodedAudio(
            encoded,
            origin,
            min(float(task.end), origin + encoded.lengths[0] * scale),
            stride=self._next_block_at(utterance) - task.end,
        )

    def end(self, task: DecodeTask, audio: Tensor, text: list[HypothesisToken]) -> None:
        self.forget(task.slot)

    def forget(self, slot: int) -> None:
        self._utterances.pop(slot, None)
        self._restored.pop(slot, None)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        utterance = self._restored.get(slot) or self._utterances.get(slot)
        if utterance is None:
            return {"anchor": None}, base
        saved = {"anchor": utterance.anchor, "heard": utterance.audio_until, "first": utterance.first}
        return saved, utterance.anchor

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        if saved["anchor"] is None:
            return
        anchor, audio_until, first = int(saved["anchor"]), int(saved["heard"]), int(saved["first"])
        audio = audio_of(items, anchor, audio_until)[0]
        if not bool(torch.isfinite(audio).all()):
            raise ValueError("the audio contains NaN or infinite values")
        self._restored[slot] = _RestoredState(anchor, audio_until, first, audio)

    def must_rebuild(self, slot: int) -> bool:
        return slot in self._restored

    def rebuild(self, slot: int) -> Iterator[None]:
        restored = self._restored.get(slot)
        if restored is None:
            return
        # The utterance is stored when it is complete. An iterator that is abandoned before changes nothing.
        utterance = self._start(restored.anchor)
        for start in range(restored.anchor, restored.audio_until, REBUILT_AT_ONCE):
            end = min(start + REBUILT_AT_ONCE, restored.audio_until)
            first, last = ((position - restored.anchor) * SAMPLES_PER_POSITION for position in (start, end))
            self._append(utterance, restored.audio[first:last], end)
            yield
        self._drop_before(utterance, restored.first)
        self._utterances[slot] = utterance
        del self._restored[slot]

    def _start(self, anchor: int) -> _Utterance:
        """An utterance without audio."""
        state = self._encoder.start()
        return _Utterance(anchor, anchor, state, self._cross(state.waiting[0]))

    def _next_block_at(self, utterance: _Utterance) -> int:
        """The position from which on the audio of the next block is complete."""
        samples = self._encoder.samples_to_next(utterance.state)
        return utterance.anchor + -(-samples // SAMPLES_PER_POSITION)

    def _needs_new_anchor(self, utterance: _Utterance, task: DecodeTask) -> bool:
        was_cut = self._frames_before(utterance, task.base) > utterance.first
        return was_cut and task.end - utterance.anchor > LONG_FROM_ANCHOR

    def _frames_before(self, utterance: _Utterance, base: int) -> int:
        """Number of frames since the anchor that begin before the window."""
        samples = (base - utterance.anchor) * SAMPLES_PER_POSITION
        return -(-samples // self._model.samples_per_frame)

    def _append(self, utterance: _Utterance, audio: Tensor, end: int) -> None:
        """Encode more audio of an utterance, up to the position `end`."""
        frames, utterance.state = self._encoder.step(audio, utterance.state)
        utterance.audio_until = end
        if len(frames):
            utterance.encoded = _join(utterance.encoded, self._cross(frames))

    @staticmethod
    def _drop_before(utterance: _Utterance, first: int) -> None:
        """Drop the frames before the window's first one."""
        drop = min(first - utterance.first, utterance.encoded.lengths[0])
        if drop > 0:
            encoded = utterance.encoded
            utterance.encoded = Encoded(
                encoded.keys[..., drop:], encoded.values[..., drop:, :], [encoded.lengths[0] - drop]
            )
            utterance.first += drop

    def _cross(self, frames: Tensor) -> Encoded:
        """[frames, width] -> keys and values for the decoder's cross-attention."""
        return self._model.cross(frames[None], [len(frames)])


def _join(first: Encoded, second: Encoded) -> Encoded:
    """The frames of two pieces, one after the other, of one row each."""
    keys = torch.cat((first.keys, second.keys), dim=4)
    values = torch.cat((first.values, second.values), dim=3)
    return Encoded(keys, values, [first.lengths[0] + second.lengths[0]])


def _copy(state: EncoderState) -> EncoderState:
    """A copy of the state that can be changed without changing the original: all tensors but `keys_values` are
    replaced, not written."""
    copied = copy(state)
    copied.keys_values = state.keys_values.clone()
    return copied
