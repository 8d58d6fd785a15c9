"""Speech detectors for many streams at once: they run Silero (`engine/models/silero.py`) on batches of new audio.

The `Listener` of the engine loop (`engine/server/speech.py`) uses one of them and decides what is speech; the detectors
compute probabilities only. `SpeechDetector` keeps the state of its streams on the host, wherever the model runs, so
that it can be saved: it serves windowed models. `DeviceSpeechDetector` keeps it on the GPU, and the host waits only
when it reads results or passes a long silence: it serves frame-synchronous models. `DetectorSlots` assigns the slots of
the state tensors to streams, for both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import AtCapacity, BadItem, DuplicateStream, UnknownStream
from engine.messages import Saved, Speech
from engine.models.silero import CONTEXT_SAMPLES, FRAME_SAMPLES, STATE_SIZE, SileroVad
from engine.runner.base import Detector
from engine.runner.device import Download, SideQueue, StepGraphs, staging, upload

Samples = NDArray[np.float32]


class HasSlot(Protocol):
    """The host's state of a stream, which contains its slot."""

    slot: int


StreamState = TypeVar("StreamState", bound=HasSlot)


class DetectorSlots(Generic[StreamState]):
    """Open streams of a detector: the slot and the host-side state of each."""

    def __init__(self, max_streams: int) -> None:
        self.stream_states: dict[str, StreamState] = {}
        self._free = list(range(max_streams - 1, -1, -1))

    def open(self, stream: str, make_state: Callable[[int], StreamState]) -> int:
        """Assign a slot and return it. The caller clears the slot's tensors. Raises DuplicateStream or AtCapacity."""
        if stream in self.stream_states:
            raise DuplicateStream(stream, "is open in the speech detector already")
        if not self._free:
            raise AtCapacity(stream, f"the speech detector listens to {len(self.stream_states)} streams, its maximum")
        slot = self._free.pop()
        self.stream_states[stream] = make_state(slot)
        return slot

    def close(self, stream: str) -> None:
        """Free the slot of a stream. Raises UnknownStream."""
        stream_state = self.stream_states.pop(stream, None)
        if stream_state is None:
            raise UnknownStream(stream, "is not open in the speech detector")
        self._free.append(stream_state.slot)

    def check(self, batch: list[tuple[str, Samples]]) -> None:
        """Raise UnknownStream or BadItem for a bad batch, before any of it is processed."""
        if len(dict(batch)) < len(batch):
            ((twice, _),) = Counter(stream for stream, _ in batch).most_common(1)
            raise BadItem(twice, "occurs twice in one batch of the speech detector")
        for stream, samples in batch:
            if stream not in self.stream_states:
                raise UnknownStream(stream, "is not open in the speech detector")
            if samples.dtype != np.float32 or samples.ndim != 1:
                raise BadItem(stream, f"speech detection takes one row of float32 samples, not {samples.dtype}")


# After this many frames of digital silence (one second) the probability no longer changes: it is kept, and nothing is
# computed until a sample differs from zero.
SETTLED_FRAMES = 32
# Most frames that the model encodes at once: more take several passes, so that a long piece of an upload fits into CPU
# caches.
_FRAMES_PER_PASS = 256

_SPAN_SAMPLES = CONTEXT_SAMPLES + FRAME_SAMPLES


@dataclass(slots=True)
class _Stream:
    """The state of one stream that is not in the state tensors."""

    # Index in the state tensors.
    slot: int
    # First sample of the next frame.
    sample: int
    # The context of the next frame, and the samples of the frame itself that have arrived.
    carried: Samples
    # Consecutive frames of digital silence so far.
    silent_frames: int = 0
    # Of the last frame.
    probability: float = 0.0


@dataclass(slots=True)
class _Piece:
    """The new frames of one stream in one call."""

    stream_state: _Stream
    # [n, 64 + 512]: the frames that the model must compute, each after its context.
    frames: Samples
    # For every new frame: whether the model must compute it. The others repeat the probability before them.
    due: list[bool]
    # The stream's state after these frames.
    carried: Samples
    silent_frames: int


class SpeechDetector(Detector):
    """Detector with its state on the host; at most `max_streams` streams are open at a time.

    Samples arrive in pieces of any length; those that do not fill a frame are carried over to the next call. The
    complete frames of all streams pass the stateless part of the model in one batch; the recurrent part runs frame by
    frame, with all streams in one batch. A stream without new samples costs nothing.
    """

    def __init__(self, model: SileroVad, max_streams: int) -> None:
        self._model = model
        self._device = model.window.device
        self._hidden = torch.zeros(max_streams, STATE_SIZE)
        self._cell = torch.zeros(max_streams, STATE_SIZE)
        self._slots: DetectorSlots[_Stream] = DetectorSlots(max_streams)
        self._stream_states = self._slots.stream_states

    def open(self, stream: str, sample: int = 0) -> None:
        """Begin to listen to a stream whose next sample is number `sample`."""
        slot = self._slots.open(stream, lambda slot: _Stream(slot, sample, np.zeros(CONTEXT_SAMPLES, np.float32)))
        self._hidden[slot].zero_()
        self._cell[slot].zero_()

    def save(self, stream: str) -> Saved:
        """Return the state of a stream."""
        stream_state = self._stream_states[stream]
        return {
            "sample": stream_state.sample,
            "carried": stream_state.carried.tobytes(),
            "silent_frames": stream_state.silent_frames,
            "probability": stream_state.probability,
            "hidden": self._hidden[stream_state.slot].numpy().tobytes(),
            "cell": self._cell[stream_state.slot].numpy().tobytes(),
        }

    def resume(self, stream: str, saved: Saved) -> None:
        """Restore a saved state in an open stream."""
        stream_state = self._stream_states[stream]
        stream_state.sample, stream_state.silent_frames, stream_state.probability = (
            saved["sample"],
            saved["silent_frames"],
            saved["probability"],
        )
        stream_state.carried = np.frombuffer(saved["carried"], np.float32)
        for state, name in ((self._hidden, "hidden"), (self._cell, "cell")):
            state[stream_state.slot] = torch.from_numpy(np.frombuffer(saved[name], np.float32).copy())

    def close(self, stream: str) -> None:
        self._slots.close(stream)

    @torch.inference_mode()
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """Compute the frames that the new samples complete. The returned function gives the results in the order of the
        batch. If this raises, no stream has changed.
        """
        self._slots.check(batch)
        pieces = [self._cut_frames(stream, samples) for stream, samples in batch]
        with _one_thread():
            computed = self._compute(pieces)
        results = []
        for (stream, _), piece, values in zip(batch, pieces, computed, strict=True):
            stream_state, new_values, probabilities = piece.stream_state, iter(values), []
            stream_state.carried, stream_state.silent_frames = piece.carried, piece.silent_frames
            for due in piece.due:
                stream_state.probability = next(new_values) if due else stream_state.probability
                probabilities.append(stream_state.probability)
            results.append(Speech(stream, stream_state.sample, FRAME_SAMPLES, probabilities))
            stream_state.sample += FRAME_SAMPLES * len(probabilities)
        return lambda: results

    def pass_silence(self, stream: str, samples: int) -> Speech:
        """More of a silence in which nothing changes any more: one long frame, and nothing to compute."""
        stream_state = self._stream_states[stream]
        frames, rest = divmod(len(stream_state.carried) - CONTEXT_SAMPLES + samples, FRAME_SAMPLES)
        stream_state.carried = np.zeros(CONTEXT_SAMPLES + rest, np.float32)
        stream_state.silent_frames += frames
        sample, stream_state.sample = stream_state.sample, stream_state.sample + frames * FRAME_SAMPLES
        return Speech(stream, sample, frames * FRAME_SAMPLES, [stream_state.probability] if frames else [])

    def _cut_frames(self, stream: str, samples: Samples) -> _Piece:
        """Cut the samples into complete frames; the rest is carried over to the next call. Changes no state."""
        stream_state = self._stream_states[stream]
        audio = np.concatenate((stream_state.carried, samples))
        count = (len(audio) - CONTEXT_SAMPLES) // FRAME_SAMPLES
        frames = np.lib.stride_tricks.as_strided(
            audio, (count, _SPAN_SAMPLES), (FRAME_SAMPLES * audio.itemsize, audio.itemsize), writeable=False
        )
        due, silent_frames = [], stream_state.silent_frames
        audible_frames: NDArray[np.bool_] = np.any(frames, axis=1)
        for audible in audible_frames.tolist():
            silent_frames = 0 if audible else silent_frames + 1
            due.append(silent_frames <= SETTLED_FRAMES)
        rest = audio[count * FRAME_SAMPLES :].copy()
        return _Piece(stream_state, frames if all(due) else frames[due], due, rest, silent_frames)

    def _compute(self, pieces: list[_Piece]) -> list[list[float]]:
        """Return the probabilities of each piece's due frames.

        Streams are sorted by frame count, the longest first, and frames by time: frame k of all streams that have one
        is then a slice, and these streams are the first rows of the state.
        """
        order = sorted((i for i, piece in enumerate(pieces) if len(piece.frames)), key=lambda i: -len(pieces[i].frames))
        results: list[list[float]] = [[] for _ in pieces]
        if not order:
            return results
        counts = [len(pieces[i].frames) for i in order]
        # starts[k] is the row of frame k of the first stream; its frame k + 1 follows frame k of all other streams.
        starts = np.zeros(counts[0] + 1, np.int64)
        for count in counts:
            starts[1 : count + 1] += 1
        starts = starts.cumsum()
        frames = np.empty((starts[-1], _SPAN_SAMPLES), np.float32)
        for row, (i, count) in enumerate(zip(order, counts, strict=True)):
            frames[starts[:count] + row] = pieces[i].frames
        slots = torch.tensor([pieces[i].stream_state.slot for i in order])
        values = self._run(torch.from_numpy(frames).to(self._device), starts.tolist(), slots)
        for row, (i, count) in enumerate(zip(order, counts, strict=True)):
            results[i] = values[starts[:count] + row].tolist()
        return results

    def _run(self, frames: Tensor, starts: list[int], slots: Tensor) -> NDArray[np.float32]:
        """The probability of each frame. Rows [starts[k], starts[k + 1]) are frame k of the first streams in
        `slots`."""
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
                # The streams after these have no more frames: their state is final.
                complete.append((slots[streams:], hidden[streams:], cell[streams:]))
                slots, hidden, cell = slots[:streams], hidden[:streams], cell[:streams]
            hidden, cell = self._model.step(gates[start:end], hidden, cell)
            after_each.append(hidden)
        values: NDArray[np.float32] = self._model.probability(torch.cat(after_each)).cpu().numpy()
        # Store the state last, so that an error before this changes nothing.
        for state in [*complete, (slots, hidden, cell)]:
            self._store(*state)
        return values

    def _store(self, slots: Tensor, hidden: Tensor, cell: Tensor) -> None:
        self._hidden.index_copy_(0, slots, hidden.cpu())
        self._cell.index_copy_(0, slots, cell.cpu())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread meanwhile: at this size several threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Most samples of a stream in one round: one position of a live stream.
ROUND_SAMPLES = 1280
# Most streams in one round; more streams take several rounds.
MAX_ROUND_STREAMS = 512
# Rounds for longer pieces: (positions, most streams). Silence that is skipped comes a few positions at a time, replays
# and uploads come in items of sixteen.
LONGER_ROUNDS = ((4, 128), (16, 32))
LONGER_ROUND_SIZES = (4, 8, 16, 32, 64)
# The detector's rounds go first: they are small, and the host waits for their results.
QUEUE_PRIORITY = -1


@dataclass(slots=True, eq=False)
class _DeviceStream:
    """The host's state of one stream."""

    slot: int
    # First sample of the next frame, and how many of its samples have arrived.
    sample: int
    carried_samples: int = 0


@dataclass(slots=True)
class _Round:
    """The streams of one round, and the transfer of their results."""

    streams: Sequence[str]
    stream_states: Sequence[_DeviceStream]
    # First sample of each stream's first frame.
    samples: list[int]
    # Number of frames that each stream completed.
    frames: list[int]
    probabilities: Download


class _RoundBuffers:
    """Fixed buffers for rounds with at most `samples` new samples of each stream, so that a recorded graph can read and
    write them."""

    def __init__(self, samples: int, capacity: int, padding_slot: int, device: torch.device) -> None:
        self.new_samples, self.capacity = samples, capacity
        self.max_frames = (FRAME_SAMPLES - 1 + samples) // FRAME_SAMPLES
        # For each row: its slot, the number of carried samples, the number of new samples.
        self.indices = torch.zeros(3, capacity, dtype=torch.int64, device=device)
        self.indices[0] = padding_slot
        self.samples = torch.zeros(capacity, samples, device=device)
        self.probabilities = torch.zeros(capacity, self.max_frames, device=device)
        # A row has the context, up to one sample less than a frame that are carried over, and the new samples.
        self.columns = torch.arange(CONTEXT_SAMPLES + FRAME_SAMPLES - 1 + samples, device=device)
        self.frames = torch.arange(self.max_frames, device=device)
        self.graphs: StepGraphs | None = None


class DeviceSpeechDetector(Detector):
    """Detector on the device that also runs the model; at most `max_streams` streams are open at a time.

    The device has, by slot, the recurrent state, the samples that do not fill a frame yet, and the length of the
    digital silence. A round takes new samples of many streams and computes the frames that they complete, in one batch
    and in fixed buffers: on CUDA a round is a recorded graph. There are rounds for one position of each stream, and
    longer ones (`LONGER_ROUNDS`), because many short rounds in a row would keep host and device from live streams. The
    host counts samples, and waits for probabilities only when they are read. On CUDA the rounds have a queue of the
    device of their own: they are small, need nothing from the model's steps, and run beside them.

    Samples are uploaded separately, although the step's buffers have most of them: audio that is already in the encoder
    cache, gaps, and audio that no step reads must be processed, too.
    """

    overlaps_steps = True

    def __init__(self, model: SileroVad, max_streams: int, graphs: bool = True) -> None:
        self._model = model
        self._device = device = model.window.device
        rows = max_streams + 1  # the last slot belongs to the empty rows of a padded round
        self._hidden = torch.zeros(rows, STATE_SIZE, device=device)
        self._cell = torch.zeros(rows, STATE_SIZE, device=device)
        # The context of the next frame and its samples so far, left-aligned.
        self._carried = torch.zeros(rows, _SPAN_SAMPLES, device=device)
        self._silent_frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self._probability = torch.zeros(rows, device=device)
        # From the shortest round to the longest.
        self._rounds = [
            _RoundBuffers(positions * ROUND_SAMPLES, min(max_streams, capacity), max_streams, device)
            for positions, capacity in ((1, MAX_ROUND_STREAMS), *LONGER_ROUNDS)
        ]
        self._slots: DetectorSlots[_DeviceStream] = DetectorSlots(max_streams)
        self._stream_states = self._slots.stream_states
        # Slots that were opened since the last round.
        self._new_slots: list[int] = []
        self._padding_slot = max_streams
        if device.type == "cuda" and graphs:
            for buffers in self._rounds:
                longer = [size for size in LONGER_ROUND_SIZES if size < buffers.capacity]
                sizes = [*longer, buffers.capacity] if buffers.new_samples > ROUND_SAMPLES else ()
                buffers.graphs = StepGraphs(partial(self._round, buffers), buffers.capacity, sizes)
        self._queue = SideQueue(device, "speech detection", QUEUE_PRIORITY)

    @torch.inference_mode()
    def warm_up(self) -> None:
        with self._queue.used():
            for buffers in self._rounds:
                if buffers.graphs is not None:
                    buffers.graphs.capture(self._rounds[0].graphs, self._queue)

    def open(self, stream: str, sample: int = 0) -> None:
        """Begin to listen to a stream whose next sample is number `sample`."""
        self._new_slots.append(self._slots.open(stream, lambda slot: _DeviceStream(slot, sample)))

    def close(self, stream: str) -> None:
        self._slots.close(stream)

    @torch.inference_mode()
    def launch(self, batch: list[tuple[str, Samples]]) -> Callable[[], list[Speech]]:
        """Start on new samples without waiting for the device. The returned function waits for the results, and leaves
        out streams that were closed meanwhile. If the check of the batch raises, no stream has changed; a later error
        may leave streams between two rounds."""
        self._slots.check(batch)
        rounds: list[_Round] = []
        with self._queue.used():
            self._clear_new_slots()
            while batch:
                rest: list[tuple[str, Samples]] = []
                for buffers, part in self._by_length(batch):
                    starts = range(0, len(part), buffers.capacity)
                    rounds += [self._run(buffers, part[start : start + buffers.capacity]) for start in starts]
                    size = buffers.new_samples
                    rest += [(stream, samples[size:]) for stream, samples in part if len(samples) > size]
                batch = rest
        return lambda: self._read_all(rounds)

    def _by_length(self, batch: list[tuple[str, Samples]]) -> Iterator[tuple[_RoundBuffers, list[tuple[str, Samples]]]]:
        """Yield the batch in parts: each stream is in the part with the shortest round that takes all of its samples,
        or else with the longest round."""
        limits = [buffers.new_samples for buffers in self._rounds[:-1]]
        parts: list[list[tuple[str, Samples]]] = [[] for _ in self._rounds]
        for stream, samples in batch:
            parts[bisect_left(limits, len(samples))].append((stream, samples))
        return ((buffers, part) for buffers, part in zip(self._rounds, parts, strict=True) if part)

    @torch.inference_mode()
    def pass_silence(self, stream: str, samples: int) -> Speech:
        """More of a silence in which nothing changes any more: one long frame, and nothing to compute."""
        stream_state = self._stream_states[stream]
        frames, stream_state.carried_samples = divmod(stream_state.carried_samples + samples, FRAME_SAMPLES)
        sample, stream_state.sample = stream_state.sample, stream_state.sample + frames * FRAME_SAMPLES
        with self._queue.used():
            self._clear_new_slots()
            self._carried[stream_state.slot] = 0.0
            self._silent_frames[stream_state.slot] += frames
            probabilities = [self._probability[stream_state.slot].item()] if frames else []
        return Speech(stream, sample, frames * FRAME_SAMPLES, probabilities)

    def _clear_new_slots(self) -> None:
        """Clear the state of streams that were opened since the last round."""
        if self._new_slots:
            slots = upload(np.array(self._new_slots, np.int64), self._device)
            self._new_slots = []
            for state in (self._hidden, self._cell, self._carried, self._silent_frames, self._probability):
                state.index_fill_(0, slots, 0)

    def _run(self, buffers: _RoundBuffers, batch: list[tuple[str, Samples]]) -> _Round:
        """Run one round, with at most as many samples of each stream as it takes."""
        streams, pieces = zip(*batch, strict=True)
        stream_states = [self._stream_states[stream] for stream in streams]
        count = len(stream_states)
        indices = staging((3, buffers.capacity), torch.int64, self._device)
        view = indices.numpy()
        view[:, count:] = [[self._padding_slot], [0], [0]]
        view[0, :count] = [stream_state.slot for stream_state in stream_states]
        view[1, :count] = [stream_state.carried_samples for stream_state in stream_states]
        view[2, :count] = [len(piece) for piece in pieces]
        np.minimum(view[2], buffers.new_samples, out=view[2])
        buffers.indices.copy_(indices, non_blocking=True)
        self._upload_samples(buffers, pieces, view[2, :count])
        if buffers.graphs is not None:
            buffers.graphs.run(count)
        else:
            self._round(buffers, count)
        frames, carried = np.divmod(view[1, :count] + view[2, :count], FRAME_SAMPLES)
        launched = _Round(
            streams,
            stream_states,
            [stream_state.sample for stream_state in stream_states],
            frames.tolist(),
            Download(buffers.probabilities[:count]),
        )
        for stream_state, rest, complete in zip(stream_states, carried.tolist(), launched.frames, strict=True):
            stream_state.carried_samples = rest
            stream_state.sample += complete * FRAME_SAMPLES
        return launched

    def _upload_samples(self, buffers: _RoundBuffers, pieces: Sequence[Samples], lengths: NDArray[np.int64]) -> None:
        """Upload the first `lengths` samples of each piece."""
        host = staging((len(pieces), buffers.new_samples), torch.float32, self._device)
        view = host.numpy()
        if int(lengths.min()) == buffers.new_samples == max(map(len, pieces)):
            np.concatenate(pieces, out=view.reshape(-1))
        else:
            for row, piece, length in zip(view, pieces, lengths.tolist(), strict=True):
                row[:length] = piece[:length]
        buffers.samples[: len(pieces)].copy_(host, non_blocking=True)

    def _read_all(self, rounds: Sequence[_Round]) -> list[Speech]:
        """Return one Speech per stream, joined over all rounds."""
        joined: dict[str, Speech] = {}
        for part in rounds:
            for speech in self._read(part):
                first = joined.setdefault(speech.stream, speech)
                if first is not speech:
                    first.probabilities += speech.probabilities
        return list(joined.values())

    def _read(self, launched: _Round) -> list[Speech]:
        """The results of one round, of the streams that are still open. Waits for the device."""
        rows = launched.probabilities.values().tolist()
        current = self._stream_states.get
        return [
            Speech(stream, sample, FRAME_SAMPLES, row[:frames])
            for stream, stream_state, sample, frames, row in zip(
                launched.streams, launched.stream_states, launched.samples, launched.frames, rows, strict=True
            )
            if current(stream) is stream_state
        ]

    def _round(self, buffers: _RoundBuffers, size: int) -> None:
        """Compute the first `size` rows. Reads and writes fixed buffers only, so that it can be recorded."""
        slots, carried, new = buffers.indices[:, :size].unbind()
        # The new samples are moved to where the carried samples end: row = context, carried samples, new samples.
        parts = torch.cat([self._carried[slots], buffers.samples[:size]], dim=1)
        carried_end = (CONTEXT_SAMPLES + carried)[:, None]
        source = torch.where(
            buffers.columns < carried_end, buffers.columns, buffers.columns + _SPAN_SAMPLES - carried_end
        )
        row = parts.gather(1, source.clamp_(max=parts.shape[1] - 1))
        frames = row.unfold(1, _SPAN_SAMPLES, FRAME_SAMPLES)  # [n, max_frames, 576]
        gates = self._model.encode(frames.reshape(-1, _SPAN_SAMPLES)).view(size, buffers.max_frames, -1)
        complete = (carried + new) // FRAME_SAMPLES
        silent = self._silence_after(buffers, (frames != 0).any(dim=2), self._silent_frames[slots])
        # A settled silence changes neither the probability nor the state.
        due = (buffers.frames < complete[:, None]) & (silent <= SETTLED_FRAMES)
        after_each, cell = self._model.steps(gates, self._hidden[slots], self._cell[slots], due)
        probabilities = self._model.probability(after_each.flatten(0, 1)).view(size, -1)
        buffers.probabilities[:size] = probabilities
        rest = buffers.columns[:_SPAN_SAMPLES] + FRAME_SAMPLES * complete[:, None]
        self._carried.index_copy_(0, slots, row.gather(1, rest.clamp_(max=len(buffers.columns) - 1)))
        self._hidden.index_copy_(0, slots, after_each[:, -1])
        self._cell.index_copy_(0, slots, cell)
        last = (complete - 1).clamp_(min=0)[:, None]
        has_frames = complete > 0
        silent = torch.where(has_frames, silent.gather(1, last)[:, 0], self._silent_frames[slots])
        probability = torch.where(has_frames, probabilities.gather(1, last)[:, 0], self._probability[slots])
        self._silent_frames.index_copy_(0, slots, silent)
        self._probability.index_copy_(0, slots, probability)

    @staticmethod
    def _silence_after(buffers: _RoundBuffers, audible: Tensor, before: Tensor) -> Tensor:
        """How many frames of digital silence in a row there are after each frame [n, max_frames]; `before` is their
        number before the first one."""
        last_audible = torch.where(audible, buffers.frames, -1).cummax(dim=1).values
        return torch.where(last_audible >= 0, 0, before[:, None] + 1) + buffers.frames - last_audible.clamp(min=0)
