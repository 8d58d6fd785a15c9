"""How a windowed model hears: what changes between models that encode a window again and models that hear each frame
once. The runner decodes and commits; an ear turns a task's audio into what the decoder listens to.

All places are positions, absolute on the stream's clock.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.core.plan import SILENCE_ROW, DecodeTask
from engine.messages import Item, Saved
from engine.models.seq2seq import Encoded, SpeechModel, at_once
from engine.runner.windowed.audio_slab import SAMPLES_PER_POSITION, AudioSlab, audio_of
from engine.runner.windowed.stability import Heard, Policy, starts_word


@dataclass(slots=True)
class Sound:
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


class Ear(Protocol):
    """`audio` is always [1, samples] of the task's whole window."""

    def hear(self, task: DecodeTask, audio: Tensor) -> Sound: ...

    def end(self, task: DecodeTask, audio: Tensor, said: list[Heard]) -> None:
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

    def keep(self, task: DecodeTask, audio: Tensor, said: list[Heard]) -> None:
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


class WindowEar:
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

    def hear(self, task: DecodeTask, audio: Tensor) -> Sound:
        return at_once(self.hear_slowly(task, audio))

    def hear_slowly(self, task: DecodeTask, audio: Tensor) -> Generator[None, None, Sound]:
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
            return Sound(encoded, task.base, task.end)
        return Sound(encoded, tail.start, task.end, tail.tokens)

    def hear_together(self, tasks: Sequence[DecodeTask], slab: AudioSlab) -> list[Sound]:
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
            Sound(encoded, start, task.end, () if tail is None else tail.tokens, row=row)
            for row, (task, tail, start) in enumerate(zip(tasks, tails, starts, strict=True))
        ]

    def end(self, task: DecodeTask, audio: Tensor, said: list[Heard]) -> None:
        self._tails.keep(task, audio, said)

    def forget(self, slot: int) -> None:
        self._tails.forget(slot)

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        return self._tails.save(slot, base, end)

    def resume(self, slot: int, saved: Saved, items: Sequence[Item]) -> None:
        self._tails.resume(slot, saved, items)
