"""Speech probabilities for many streams at once.

A stream's samples come in pieces of any length; the detector works in frames, so each stream carries the samples that
do not fill a frame yet. All frames that are due, of all streams, pass the stateless part of the model in one batch; the
recurrent part goes frame by frame with all streams side by side. A stream that sends nothing costs nothing.

What a stream has heard stays on the host, where it is saved from, wherever the model runs. This is the detector of
windowed models, whose streams are saved; `device_speech` is the one for frame-synchronous models on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.messages import Saved, Speech
from engine.models.silero import CONTEXT_SAMPLES, FRAME_SAMPLES, STATE_SIZE, SileroVad
from engine.runner.base import Detector
from engine.runner.detector_slots import DetectorSlots, Samples

# After this many frames of digital silence (one second) the detector's opinion no longer changes; it is kept, and
# nothing is computed until a sample differs from zero. A muted microphone is free.
SETTLED_FRAMES = 32
# More frames than this go through the model in several passes, so that a long backlog piece stays inside CPU caches.
_FRAMES_PER_PASS = 256

_SPAN_SAMPLES = CONTEXT_SAMPLES + FRAME_SAMPLES


@dataclass(slots=True)
class _Ear:
    """What one stream has heard: its place in the state tensors and the samples that wait for a full frame."""

    slot: int
    # First sample of the next frame.
    sample: int
    # The context of the next frame, and what is there of the frame itself.
    carried: Samples
    silent_frames: int = 0
    probability: float = 0.0


@dataclass(slots=True)
class _Piece:
    """The frames of one stream in one call."""

    ear: _Ear
    frames: Samples
    # Which of them the model must see; the others repeat the probability before them.
    due: list[bool]
    # What the ear holds after them.
    carried: Samples
    silent_frames: int


class SpeechDetector(Detector):
    """Streams are opened, fed in batches, and closed; at most `max_streams` are open at a time."""

    def __init__(self, model: SileroVad, max_streams: int) -> None:
        self._model = model
        self._device = model.window.device
        self._hidden = torch.zeros(max_streams, STATE_SIZE)
        self._cell = torch.zeros(max_streams, STATE_SIZE)
        self._slots: DetectorSlots[_Ear] = DetectorSlots(max_streams)
        self._ears = self._slots.ears

    def open(self, stream: str, sample: int = 0) -> None:
        """Begin to listen to a stream whose next sample is number `sample`."""
        slot = self._slots.open(stream, lambda slot: _Ear(slot, sample, np.zeros(CONTEXT_SAMPLES, np.float32)))
        self._hidden[slot].zero_()
        self._cell[slot].zero_()

    def save(self, stream: str) -> Saved:
        """All that decides what is heard next."""
        ear = self._ears[stream]
        return {
            "sample": ear.sample,
            "carried": ear.carried.tobytes(),
            "silent_frames": ear.silent_frames,
            "probability": ear.probability,
            "hidden": self._hidden[ear.slot].numpy().tobytes(),
            "cell": self._cell[ear.slot].numpy().tobytes(),
        }

    def resume(self, stream: str, saved: Saved) -> None:
        """Listen on from a saved state, in a stream that is open."""
        ear = self._ears[stream]
        ear.sample, ear.silent_frames, ear.probability = saved["sample"], saved["silent_frames"], saved["probability"]
        ear.carried = np.frombuffer(saved["carried"], np.float32)
        for state, name in ((self._hidden, "hidden"), (self._cell, "cell")):
            state[ear.slot] = torch.from_numpy(np.frombuffer(saved[name], np.float32).copy())

    def close(self, stream: str) -> None:
        self._slots.close(stream)

    @torch.inference_mode()
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """New samples of some streams, each stream once -> the frames they complete, in the order of the batch.

        If it raises, nothing was heard of any of them: they can be sent again, without the one that is to blame.
        """
        self._slots.check(batch)
        pieces = [self._take(stream, samples) for stream, samples in batch]
        with _one_thread():
            computed = self._compute(pieces)
        answers = []
        for (stream, _), piece, values in zip(batch, pieces, computed, strict=True):
            ear, fresh, probabilities = piece.ear, iter(values), []
            ear.carried, ear.silent_frames = piece.carried, piece.silent_frames
            for due in piece.due:
                ear.probability = next(fresh) if due else ear.probability
                probabilities.append(ear.probability)
            answers.append(Speech(stream, ear.sample, FRAME_SAMPLES, probabilities))
            ear.sample += FRAME_SAMPLES * len(probabilities)
        return lambda: answers

    def pass_silence(self, stream: str, samples: int) -> Speech:
        """More of a silence in which nothing changes any more: one long frame, and nothing to compute."""
        ear = self._ears[stream]
        frames, rest = divmod(len(ear.carried) - CONTEXT_SAMPLES + samples, FRAME_SAMPLES)
        ear.carried = np.zeros(CONTEXT_SAMPLES + rest, np.float32)
        ear.silent_frames += frames
        sample, ear.sample = ear.sample, ear.sample + frames * FRAME_SAMPLES
        return Speech(stream, sample, frames * FRAME_SAMPLES, [ear.probability] if frames else [])

    def _take(self, stream: str, samples: Samples) -> _Piece:
        """Cut the frames that are complete now; the rest is for the next call. Changes nothing."""
        ear = self._ears[stream]
        heard = np.concatenate((ear.carried, samples))
        count = (len(heard) - CONTEXT_SAMPLES) // FRAME_SAMPLES
        frames = np.lib.stride_tricks.as_strided(
            heard, (count, _SPAN_SAMPLES), (FRAME_SAMPLES * heard.itemsize, heard.itemsize), writeable=False
        )
        due, silent_frames = [], ear.silent_frames
        audible_frames: NDArray[np.bool_] = np.any(frames, axis=1)
        for audible in audible_frames.tolist():
            silent_frames = 0 if audible else silent_frames + 1
            due.append(silent_frames <= SETTLED_FRAMES)
        rest = heard[count * FRAME_SAMPLES :].copy()
        return _Piece(ear, frames if all(due) else frames[due], due, rest, silent_frames)

    def _compute(self, pieces: list[_Piece]) -> list[list[float]]:
        """Probabilities of each piece's due frames.

        Streams are put in order of their frame counts, the longest first, and frames in order of time: frame k of all
        streams that have one is then a slice, and those streams are the first rows of the state.
        """
        order = sorted((i for i, piece in enumerate(pieces) if len(piece.frames)), key=lambda i: -len(pieces[i].frames))
        results: list[list[float]] = [[] for _ in pieces]
        if not order:
            return results
        counts = [len(pieces[i].frames) for i in order]
        # starts[k] is the row of frame k of the first stream; its frame k + 1 comes after frame k of all the others.
        starts = np.zeros(counts[0] + 1, np.int64)
        for count in counts:
            starts[1 : count + 1] += 1
        starts = starts.cumsum()
        frames = np.empty((starts[-1], _SPAN_SAMPLES), np.float32)
        for row, (i, count) in enumerate(zip(order, counts, strict=True)):
            frames[starts[:count] + row] = pieces[i].frames
        slots = torch.tensor([pieces[i].ear.slot for i in order])
        values = self._run(torch.from_numpy(frames).to(self._device), starts.tolist(), slots)
        for row, (i, count) in enumerate(zip(order, counts, strict=True)):
            results[i] = values[starts[:count] + row].tolist()
        return results

    def _run(self, frames: Tensor, starts: list[int], slots: Tensor) -> NDArray[np.float32]:
        passes = [
            self._model.encode(frames[first : first + _FRAMES_PER_PASS])
            for first in range(0, len(frames), _FRAMES_PER_PASS)
        ]
        gates = passes[0] if len(passes) == 1 else torch.cat(passes)
        hidden, cell = (state.index_select(0, slots).to(self._device) for state in (self._hidden, self._cell))
        after_each, complete = [], []
        for start, end in pairwise(starts):
            streams = end - start
            if streams < len(hidden):
                # The streams behind these have no more frames: their state is complete.
                complete.append((slots[streams:], hidden[streams:], cell[streams:]))
                slots, hidden, cell = slots[:streams], hidden[:streams], cell[:streams]
            hidden, cell = self._model.step(gates[start:end], hidden, cell)
            after_each.append(hidden)
        values: NDArray[np.float32] = self._model.probability(torch.cat(after_each)).cpu().numpy()
        # Only now: what raised before this has changed nothing.
        for state in [*complete, (slots, hidden, cell)]:
            self._keep(*state)
        return values

    def _keep(self, slots: Tensor, hidden: Tensor, cell: Tensor) -> None:
        self._hidden.index_copy_(0, slots, hidden.cpu())
        self._cell.index_copy_(0, slots, cell.cpu())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Whatever the model uses: at this size threads wait for each other longer than they compute, and the more cores a
    machine has the longer."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
