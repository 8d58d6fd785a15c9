"""An ear that hears each frame once: blocks are encoded with bounded context, and their frames are kept.

An utterance is heard from its anchor on: the position at which its encoder started. What a frame says depends on the
audio since the anchor and on nothing else, not on how that audio was cut into tasks; so a stream is rebuilt exactly by
hearing it again from there. An utterance that goes on for long gets a new anchor where its window begins, which bounds
both the audio that a rebuild needs and what the encoder has to remember.
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
from engine.runner.windowed.ears import SAMPLES_PER_POSITION, Sound, audio_of
from engine.runner.windowed.stability import POSITIONS_PER_SECOND, Heard

# The encoder was trained on stretches of up to 28 s.
LONGEST_FROM_ANCHOR = int(28 * POSITIONS_PER_SECOND)


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

    def hear(self, task: DecodeTask, audio: Tensor) -> Sound:
        utterance = self._utterances.get(task.slot)
        if utterance is None or utterance.heard < task.base or self._is_long(utterance, task):
            utterance = self._utterances[task.slot] = self._start(task.base)
        new = audio[0, (utterance.heard - task.base) * SAMPLES_PER_POSITION :]
        self._take(utterance, new, task.end)
        self._drop_before(utterance, task.base)
        encoded = utterance.encoded
        if task.final or task.pause:
            # The utterance may go on behind a pause, so what ends here is a copy.
            rest = self._encoder.finish(_copy(utterance.state))
            encoded = _join(encoded, self._cross(rest))
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        origin = utterance.anchor + utterance.first * scale
        return Sound(encoded, origin, min(float(task.end), origin + encoded.lengths[0] * scale))

    def end(self, task: DecodeTask, audio: Tensor, said: list[Heard]) -> None:
        self._utterances.pop(task.slot, None)

    def forget(self, slot: int) -> None:
        self._utterances.pop(slot, None)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        utterance = self._utterances.get(slot)
        if utterance is None:
            return {"anchor": None}, base
        return {"anchor": utterance.anchor, "heard": utterance.heard, "base": base}, utterance.anchor

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        if saved["anchor"] is None:
            return
        utterance = self._utterances[slot] = self._start(saved["anchor"])
        audio = audio_of(items, saved["anchor"], saved["heard"])
        self._take(utterance, audio[0], saved["heard"])
        self._drop_before(utterance, saved["base"])

    def _start(self, anchor: int) -> _Utterance:
        state = self._encoder.start()
        return _Utterance(anchor, anchor, state, self._cross(state.waiting[0]))

    @staticmethod
    def _is_long(utterance: _Utterance, task: DecodeTask) -> bool:
        return task.base > utterance.anchor and task.end - utterance.anchor > LONGEST_FROM_ANCHOR

    def _take(self, utterance: _Utterance, audio: Tensor, end: int) -> None:
        frames, utterance.state = self._encoder.step(audio, utterance.state)
        utterance.heard = end
        if len(frames):
            utterance.encoded = _join(utterance.encoded, self._cross(frames))

    def _drop_before(self, utterance: _Utterance, base: int) -> None:
        """Let go of frames that begin before the window."""
        samples = (base - utterance.anchor) * SAMPLES_PER_POSITION
        first = -(-samples // self._model.samples_per_frame)
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
