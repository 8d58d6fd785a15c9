"""An ear that hears each frame once: blocks are encoded with bounded context, and their frames are kept.

An utterance is heard from its anchor on: the position at which its encoder started. What a frame says depends on the
audio since the anchor and on nothing else, not on how that audio was cut into tasks; so a stream is rebuilt exactly by
hearing it again from there. An utterance that goes on for long gets a new anchor where its window begins, when that has
just been cut and is short: that bounds the audio that a rebuild needs, and little is heard twice.

A pass is worth while when a block has come out, so the ear says when the next one will. It hears what the block looked
ahead to as well, as far as it was understood with the block: words need not wait until that is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.plan import DecodeTask
from engine.messages import Item, Saved
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import EncoderState, StreamingEncoder
from engine.models.seq2seq import Encoded
from engine.runner.windowed.audio_slab import SAMPLES_PER_POSITION, audio_of
from engine.runner.windowed.ears import Sound
from engine.runner.windowed.stability import POSITIONS_PER_SECOND, Heard

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


class BlockEar:
    def __init__(self, model: Moonshine, encoder: StreamingEncoder) -> None:
        self._model = model
        self._encoder = encoder
        self._utterances: dict[int, _Utterance] = {}

    @property
    def first_stride(self) -> int:
        """Positions from the beginning of an utterance to its first block."""
        return self._next_block_at(self._start(0))

    def hear(self, task: DecodeTask, audio: Tensor) -> Sound:
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
        return Sound(
            encoded,
            origin,
            min(float(task.end), origin + encoded.lengths[0] * scale),
            stride=self._next_block_at(utterance) - task.end,
        )

    def end(self, task: DecodeTask, audio: Tensor, said: list[Heard]) -> None:
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
