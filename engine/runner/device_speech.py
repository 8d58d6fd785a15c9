"""Speech probabilities for many streams at once, on the device that also runs the model.

What a stream has heard stays on the device, by slot: the recurrent state, the samples that do not fill a frame yet, the
length of its digital silence. A round takes at most `ROUND_SAMPLES` new samples of each stream and computes the up to
three frames that they complete, those of all streams side by side, in places that do not move: on CUDA a round is a
recording. The host counts samples and never waits for a probability before somebody asks for it.

Samples are uploaded for this once more, although those of most items lie in the buffers of a step: audio that is in the
encoder cache already, a gap, and audio that no step will read have to be listened to as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import Speech
from engine.models.silero import CONTEXT_SAMPLES, FRAME_SAMPLES, STATE_SIZE, SileroVad
from engine.runner.base import Detector
from engine.runner.detector_slots import DetectorSlots, Samples
from engine.runner.device import Download, staging, upload
from engine.runner.frames.graphs import StepGraphs
from engine.runner.speech import SETTLED_FRAMES

# What a live stream hears at once. Longer pieces, which only backlog has, take several rounds.
ROUND_SAMPLES = 1280
# More streams than this take turns.
LARGEST_ROUND = 512

_SPAN_SAMPLES = CONTEXT_SAMPLES + FRAME_SAMPLES
# A frame may lack one sample before the new ones come.
_ROW_SAMPLES = CONTEXT_SAMPLES + FRAME_SAMPLES - 1 + ROUND_SAMPLES
_MOST_FRAMES = (FRAME_SAMPLES - 1 + ROUND_SAMPLES) // FRAME_SAMPLES


@dataclass(slots=True, eq=False)
class _Ear:
    """What the host knows of one stream."""

    slot: int
    # First sample of the next frame, and how many of its samples are there.
    sample: int
    waiting: int = 0


@dataclass(slots=True)
class _Round:
    """Who took part in a round, where each one's first frame starts, how many frames there were, and the answers."""

    streams: Sequence[str]
    ears: Sequence[_Ear]
    samples: list[int]
    frames: list[int]
    answers: Download


class DeviceSpeechDetector(Detector):
    """Streams are opened, fed in batches, and closed; at most `max_streams` are open at a time."""

    overlaps_steps = True

    def __init__(self, model: SileroVad, max_streams: int, graphs: bool = True) -> None:
        self._model = model
        self._device = device = model.window.device
        rows = max_streams + 1  # the last slot belongs to the empty rows of a padded round
        self._hidden = torch.zeros(rows, STATE_SIZE, device=device)
        self._cell = torch.zeros(rows, STATE_SIZE, device=device)
        # The context of the next frame and what is there of the frame itself, from the left.
        self._carried = torch.zeros(rows, _SPAN_SAMPLES, device=device)
        self._silent_frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self._probability = torch.zeros(rows, device=device)
        self._capacity = min(max_streams, LARGEST_ROUND)
        # Of each row: its slot, the samples that waited, the samples that are new.
        self._numbers = torch.zeros(3, self._capacity, dtype=torch.int64, device=device)
        self._numbers[0] = max_streams
        self._samples = torch.zeros(self._capacity, ROUND_SAMPLES, device=device)
        self._answers = torch.zeros(self._capacity, _MOST_FRAMES, device=device)
        self._columns = torch.arange(_ROW_SAMPLES, device=device)
        self._slots: DetectorSlots[_Ear] = DetectorSlots(max_streams)
        self._ears = self._slots.ears
        self._fresh: list[int] = []
        self._padding_slot = max_streams
        self._graphs: StepGraphs | None = None
        if device.type == "cuda" and graphs:
            self._graphs = StepGraphs(self._round, self._capacity)

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self._graphs is not None:
            self._graphs.capture()

    def open(self, stream: str, sample: int = 0) -> None:
        """Begin to listen to a stream whose next sample is number `sample`."""
        self._fresh.append(self._slots.open(stream, lambda slot: _Ear(slot, sample)))

    def close(self, stream: str) -> None:
        self._slots.close(stream)

    @torch.inference_mode()
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """New samples of some streams, each stream once. Returns at once; the call that it returns waits for what was
        found, and leaves out streams that were closed meanwhile. If it raises, nothing was heard of any stream."""
        self._slots.check(batch)
        self._begin_fresh()
        rounds: list[_Round] = []
        while batch:
            starts = range(0, len(batch), self._capacity)
            rounds += [self._run(batch[start : start + self._capacity]) for start in starts]
            batch = [(stream, samples[ROUND_SAMPLES:]) for stream, samples in batch if len(samples) > ROUND_SAMPLES]
        return lambda: [speech for part in rounds for speech in self._read(part)]

    @torch.inference_mode()
    def pass_silence(self, stream: str, samples: int) -> Speech:
        """More of a silence in which nothing changes any more: one long frame, and nothing to compute."""
        self._begin_fresh()
        ear = self._ears[stream]
        frames, ear.waiting = divmod(ear.waiting + samples, FRAME_SAMPLES)
        self._carried[ear.slot] = 0.0
        self._silent_frames[ear.slot] += frames
        sample, ear.sample = ear.sample, ear.sample + frames * FRAME_SAMPLES
        probabilities = [self._probability[ear.slot].item()] if frames else []
        return Speech(stream, sample, frames * FRAME_SAMPLES, probabilities)

    def _begin_fresh(self) -> None:
        """Streams that were opened since the last round have heard nothing."""
        if self._fresh:
            slots = upload(np.array(self._fresh, np.int64), self._device)
            self._fresh = []
            for state in (self._hidden, self._cell, self._carried, self._silent_frames, self._probability):
                state.index_fill_(0, slots, 0)

    def _run(self, batch: list[tuple[str, Samples]]) -> _Round:
        """One round, with at most `ROUND_SAMPLES` of each stream."""
        streams, pieces = zip(*batch, strict=True)
        ears = [self._ears[stream] for stream in streams]
        count = len(ears)
        numbers = staging((3, self._capacity), torch.int64, self._device)
        view = numbers.numpy()
        view[:, count:] = [[self._padding_slot], [0], [0]]
        view[0, :count] = [ear.slot for ear in ears]
        view[1, :count] = [ear.waiting for ear in ears]
        view[2, :count] = [len(piece) for piece in pieces]
        np.minimum(view[2], ROUND_SAMPLES, out=view[2])
        self._numbers.copy_(numbers, non_blocking=True)
        self._upload_samples(pieces, view[2, :count])
        if self._graphs is not None:
            self._graphs.run(count)
        else:
            self._round(count)
        frames, waiting = np.divmod(view[1, :count] + view[2, :count], FRAME_SAMPLES)
        found = _Round(streams, ears, [ear.sample for ear in ears], frames.tolist(), Download(self._answers[:count]))
        for ear, rest, complete in zip(ears, waiting.tolist(), found.frames, strict=True):
            ear.waiting = rest
            ear.sample += complete * FRAME_SAMPLES
        return found

    def _upload_samples(self, pieces: Sequence[Samples], lengths: NDArray[np.int64]) -> None:
        host = staging((len(pieces), ROUND_SAMPLES), torch.float32, self._device)
        view = host.numpy()
        if int(lengths.min()) == ROUND_SAMPLES == max(map(len, pieces)):
            np.concatenate(pieces, out=view.reshape(-1))
        else:
            for row, piece, length in zip(view, pieces, lengths.tolist(), strict=True):
                row[:length] = piece[:length]
        self._samples[: len(pieces)].copy_(host, non_blocking=True)

    def _read(self, found: _Round) -> list[Speech]:
        rows = found.answers.values().tolist()
        current = self._ears.get
        return [
            Speech(stream, sample, FRAME_SAMPLES, row[:frames])
            for stream, ear, sample, frames, row in zip(
                found.streams, found.ears, found.samples, found.frames, rows, strict=True
            )
            if current(stream) is ear
        ]

    def _round(self, size: int) -> None:
        """The first `size` rows. Reads and writes fixed places only, so that it can be recorded."""
        slots, waiting, new = self._numbers[:, :size].unbind()
        # What waited, then what is new: the new samples move up to where the waiting ones end.
        come = torch.cat([self._carried[slots], self._samples[:size]], dim=1)
        waits_until = (CONTEXT_SAMPLES + waiting)[:, None]
        source = torch.where(self._columns < waits_until, self._columns, self._columns + _SPAN_SAMPLES - waits_until)
        row = come.gather(1, source.clamp_(max=come.shape[1] - 1))  # [n, _ROW_SAMPLES]
        frames = row.unfold(1, _SPAN_SAMPLES, FRAME_SAMPLES)  # [n, 3, 576]
        gates = self._model.encode(frames.reshape(-1, _SPAN_SAMPLES)).view(size, _MOST_FRAMES, -1)
        audible = (frames != 0).any(dim=2)
        complete = (waiting + new) // FRAME_SAMPLES
        hidden, cell, silent = self._hidden[slots], self._cell[slots], self._silent_frames[slots]
        probability = self._probability[slots]
        for frame in range(_MOST_FRAMES):
            is_there = frame < complete
            silent = torch.where(is_there, torch.where(audible[:, frame], 0, silent + 1), silent)
            # A settled silence changes nothing, neither the answer nor what is remembered.
            due = is_there & (silent <= SETTLED_FRAMES)
            next_hidden, next_cell = self._model.step(gates[:, frame], hidden, cell)
            probability = torch.where(due, self._model.probability(next_hidden), probability)
            hidden = torch.where(due[:, None], next_hidden, hidden)
            cell = torch.where(due[:, None], next_cell, cell)
            self._answers[:size, frame] = probability
        rest = self._columns[:_SPAN_SAMPLES] + FRAME_SAMPLES * complete[:, None]
        self._carried.index_copy_(0, slots, row.gather(1, rest.clamp_(max=_ROW_SAMPLES - 1)))
        self._hidden.index_copy_(0, slots, hidden)
        self._cell.index_copy_(0, slots, cell)
        self._silent_frames.index_copy_(0, slots, silent)
        self._probability.index_copy_(0, slots, probability)
