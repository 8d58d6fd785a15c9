"""How a windowed model hears: what changes between models that encode a window again and models that hear each frame
once. The runner decodes and commits; an ear turns a task's audio into what the decoder listens to.

All places are positions, absolute on the stream's clock.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.core.plan import SILENCE_ROW, DecodeTask
from engine.messages import Item, Saved
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import EncoderState, StreamingEncoder
from engine.models.seq2seq import Encoded, SpeechModel, at_once
from engine.runner.windowed.memory import SAMPLES_PER_POSITION, AudioSlab, audio_of
from engine.runner.windowed.stability import POSITIONS_PER_SECOND, HypothesisToken, Policy, starts_word


@dataclass(slots=True)
class EncodedAudio:
    """What one pass listens to."""

    encoded: Encoded
    # Where the first frame begins and the last one ends. Behind the edge there may be audio that is not encoded yet.
    origin: float
    edge: float
    # Text of the part before the window, if the sound begins before it.
    said: Sequence[int] = ()
    # Positions until there is more to listen to; None: as many as before.
    stride: int | None = None

    # Which row of `encoded` it is.
    row: int = 0

    @property
    def frames(self) -> int:
        """Frames that hold audio."""
        return self.encoded.audio[self.row]


class StreamEncoder(Protocol):
    """`audio` is always [1, samples] of the task's whole window."""

    def hear(self, task: DecodeTask, audio: Tensor) -> EncodedAudio: ...

    def end(self, task: DecodeTask, audio: Tensor, said: list[HypothesisToken]) -> None:
        """The utterance ends with this task's window; `said` is all that was said in it. The next one's first pass
        comes a stride of the model behind its beginning."""

    def forget(self, slot: int) -> None:
        """The slot's stream is closed. Harmless for a slot that heard nothing."""

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The slot as plain data, whose window is [base, end) now, and the first position whose audio it needs."""

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        """Be where `save` was; `items` hold the audio it needs."""


@dataclass(slots=True)
class Tail:
    """The end of the previous utterance, audio and words: context for the beginning of the next one."""

    audio: Tensor
    tokens: list[int]
    # The position after its last one.
    end: int

    @property
    def positions(self) -> int:
        return self.audio.shape[1] // SAMPLES_PER_POSITION

    @property
    def start(self) -> int:
        return self.end - self.positions

    def up_to(self, base: int) -> Tensor:
        """[1, samples], with the pause before the next utterance: how long it was says whether a sentence ended. Nobody
        speaks in it, and it is heard as silence."""
        return pad(self.audio, (0, (base - self.end) * SAMPLES_PER_POSITION))


class Tails:
    """The ends of the previous utterances of many streams."""

    def __init__(self, pieces: list[bytes], policy: Policy, device: torch.device | str) -> None:
        self._pieces = pieces
        self._policy = policy
        self._device = device
        self._tails: dict[int, Tail] = {}

    def keep(self, task: DecodeTask, audio: Tensor, said: list[HypothesisToken]) -> None:
        """Keep the last words of an utterance that ends, and the audio from a little before them on."""
        self._tails.pop(task.slot, None)
        first = len(said)
        for index, heard in enumerate(said):
            if heard.peak >= task.end - self._policy.tail_length and starts_word(self._pieces[heard.token]):
                first = index
                break
        if first == len(said):
            return
        before = said[first - 1].peak if first else float(task.base)
        start = max(task.base, int((before + said[first].peak) / 2))
        kept = audio[:, (start - task.base) * SAMPLES_PER_POSITION :]
        self._tails[task.slot] = Tail(kept, [heard.token for heard in said[first:]], task.end)

    def forget(self, slot: int) -> None:
        self._tails.pop(slot, None)

    def near(self, slot: int, base: int, end: int) -> Tail | None:
        """The end of the previous utterance, while it is recent and the window too young to speak for itself."""
        tail = self._tails.get(slot)
        near = tail is not None and base - tail.end <= self._policy.tail_gap and end - base <= self._policy.tail_until
        return tail if near else None

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        tail = self.near(slot, base, end)
        if tail is None:
            return {"tail": None}, base
        return {"tail": (tail.start, tail.end, list(tail.tokens))}, tail.start

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        if saved["tail"] is not None:
            start, end, tokens = saved["tail"]
            self._tails[slot] = Tail(audio_of(items, start, end).to(self._device), list(tokens), end)


class WindowEncoder:
    """Encodes the whole window again in every pass, and before a young window the end of the utterance before."""

    def __init__(
        self,
        model: SpeechModel,
        pieces: list[bytes],
        policy: Policy,
        device: torch.device | str = "cpu",
        to_end: SpeechModel | None = None,
    ) -> None:
        self._model = model
        # Hears windows that are heard to their end, one at a time.
        self._to_end = to_end or model
        self._tails = Tails(pieces, policy, device)

    def hear(self, task: DecodeTask, audio: Tensor) -> EncodedAudio:
        return at_once(self.hear_slowly(task, audio))

    def hear_slowly(self, task: DecodeTask, audio: Tensor) -> Generator[None, None, EncodedAudio]:
        """The same in pieces; the caller may do something else between them."""
        tail = self._tails.near(task.slot, task.base, task.end)
        if tail is not None:
            audio = torch.cat((tail.up_to(task.base), audio), dim=1)
        model = self._to_end if task.final or task.pause else self._model
        missing = model.min_samples - audio.shape[1]
        if missing > 0:
            audio = pad(audio, (0, missing))
        encoded = yield from model.encode_slowly(audio, [audio.shape[1]])
        if tail is None:
            return EncodedAudio(encoded, task.base, task.end)
        return EncodedAudio(encoded, tail.start, task.end, tail.tokens)

    def hear_together(self, tasks: Sequence[DecodeTask], slab: AudioSlab) -> list[EncodedAudio]:
        """The same for several windows, as one batch."""
        tails = [self._tails.near(task.slot, task.base, task.end) for task in tasks]
        starts = [task.base if tail is None else tail.start for task, tail in zip(tasks, tails, strict=True)]
        # Silence where the tail will stand, and in the pause behind it.
        rows = [[SILENCE_ROW] * (task.base - start) + task.rows for task, start in zip(tasks, starts, strict=True)]
        audio = slab.gather(rows)
        for place, tail in zip(audio, tails, strict=True):
            if tail is not None:
                place[: tail.audio.shape[1]] = tail.audio[0]
        lengths = [max(len(window) * SAMPLES_PER_POSITION, self._model.min_samples) for window in rows]
        encoded = self._model.encode(pad(audio, (0, max(lengths) - audio.shape[1])), lengths)
        return [
            EncodedAudio(encoded, start, task.end, () if tail is None else tail.tokens, row=row)
            for row, (task, tail, start) in enumerate(zip(tasks, tails, starts, strict=True))
        ]

    def end(self, task: DecodeTask, audio: Tensor, said: list[HypothesisToken]) -> None:
        self._tails.keep(task, audio, said)

    def forget(self, slot: int) -> None:
        self._tails.forget(slot)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        return self._tails.save(slot, base, end)

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        self._tails.resume(slot, saved, items)


# An ear that hears each frame once: blocks are encoded with bounded context, and their frames are kept.
#
# An utterance is heard from its anchor on: the position at which its encoder started. What a frame says depends on
# the audio since the anchor and on nothing else, not on how that audio was cut into tasks; so a stream is rebuilt
# exactly by hearing it again from there. An utterance that goes on for long gets a new anchor where its window
# begins, when that has just been cut and is short: that bounds the audio that a rebuild needs, and little is heard
# twice.
#
# A pass is worth while when a block has come out, so the ear says when the next one will. It hears what the block
# looked ahead to as well, as far as it was understood with the block: words need not wait until that is settled.

# A window that is cut later than this after its anchor gets a new one. The encoder was trained on up to 28 s; a window
# is cut every seven or eight seconds.
LONG_FROM_ANCHOR = int(18 * POSITIONS_PER_SECOND)


@dataclass(slots=True)
class _Utterance:
    """What was heard of one utterance."""

    anchor: int
    # Audio before this position is with the encoder.
    heard: int
    state: EncoderState
    # Frames of the window, the first of which is frame number `first` since the anchor.
    encoded: Encoded
    first: int = 0


class BlockEncoder:
    def __init__(self, model: Moonshine, encoder: StreamingEncoder) -> None:
        self._model = model
        self._encoder = encoder
        self._utterances: dict[int, _Utterance] = {}

    @property
    def first_stride(self) -> int:
        """Positions from the beginning of an utterance to its first block."""
        return self._next_block_at(self._start(0))

    def hear(self, task: DecodeTask, audio: Tensor) -> EncodedAudio:
        utterance = self._utterances.get(task.slot)
        if utterance is None or utterance.heard < task.base or self._is_long(utterance, task):
            utterance = self._utterances[task.slot] = self._start(task.base)
        new = audio[0, (utterance.heard - task.base) * SAMPLES_PER_POSITION :]
        self._take(utterance, new, task.end)
        self._drop_before(utterance, self._frames_before(utterance, task.base))
        # The utterance may go on behind a pause, so what ends there is a copy.
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

    def end(self, task: DecodeTask, audio: Tensor, said: list[HypothesisToken]) -> None:
        self._utterances.pop(task.slot, None)

    def forget(self, slot: int) -> None:
        self._utterances.pop(slot, None)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        utterance = self._utterances.get(slot)
        if utterance is None:
            return {"anchor": None}, base
        return {"anchor": utterance.anchor, "heard": utterance.heard, "first": utterance.first}, utterance.anchor

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        if saved["anchor"] is None:
            return
        utterance = self._utterances[slot] = self._start(saved["anchor"])
        audio = audio_of(items, saved["anchor"], saved["heard"])
        self._take(utterance, audio[0], saved["heard"])
        self._drop_before(utterance, saved["first"])

    def _start(self, anchor: int) -> _Utterance:
        state = self._encoder.start()
        return _Utterance(anchor, anchor, state, self._cross(state.waiting[0]))

    def _next_block_at(self, utterance: _Utterance) -> int:
        """The position at whose beginning the audio of the next block is there."""
        samples = self._encoder.samples_to_next(utterance.state)
        return utterance.anchor + -(-samples // SAMPLES_PER_POSITION)

    def _is_long(self, utterance: _Utterance, task: DecodeTask) -> bool:
        was_cut = self._frames_before(utterance, task.base) > utterance.first
        return was_cut and task.end - utterance.anchor > LONG_FROM_ANCHOR

    def _frames_before(self, utterance: _Utterance, base: int) -> int:
        """Frames since the anchor that begin before the window."""
        samples = (base - utterance.anchor) * SAMPLES_PER_POSITION
        return -(-samples // self._model.samples_per_frame)

    def _take(self, utterance: _Utterance, audio: Tensor, end: int) -> None:
        frames, utterance.state = self._encoder.step(audio, utterance.state)
        utterance.heard = end
        if len(frames):
            utterance.encoded = _join(utterance.encoded, self._cross(frames))

    @staticmethod
    def _drop_before(utterance: _Utterance, first: int) -> None:
        """Let go of frames before the first one of the window."""
        drop = min(first - utterance.first, utterance.encoded.lengths[0])
        if drop > 0:
            encoded = utterance.encoded
            utterance.encoded = Encoded(
                encoded.keys[..., drop:], encoded.values[..., drop:, :], [encoded.lengths[0] - drop]
            )
            utterance.first += drop

    def _cross(self, frames: Tensor) -> Encoded:
        """[frames, width] -> what the decoder listens to."""
        return self._model.cross(frames[None], [len(frames)])


def _join(left: Encoded, right: Encoded) -> Encoded:
    keys = torch.cat((left.keys, right.keys), dim=4)
    values = torch.cat((left.values, right.values), dim=3)
    return Encoded(keys, values, [left.lengths[0] + right.lengths[0]])


def _copy(state: EncoderState) -> EncoderState:
    """A state to use up, without harm to the one it is a copy of."""
    twin = copy(state)
    twin.keys_values = state.keys_values.clone()
    return twin
