"""The audio of all streams on the device (`AudioSlab`), and how much memory a windowed model needs (`plan_windows`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import DecodeTask, EncodeTask
from engine.messages import Item
from engine.models.moonshine import Moonshine
from engine.models.whisper import Whisper
from engine.runner.device import GIB, NotEnoughMemory, gib, upload
from engine.runner.windowed.stability import Policy
from engine.spec import ModelSpec

SAMPLES_PER_POSITION = 1_280


class AudioSlab:
    """Audio of all streams, one row per position. Row 0 is silence and is never written."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        # By numpy: it takes memory that the system clears when it is first used.
        self.rows = torch.from_numpy(np.zeros((rows + 1, SAMPLES_PER_POSITION), np.float32)).to(device)
        self._device = self.rows.device
        # Rows with NaN or infinite values.
        self._broken: set[int] = set()

    def write(self, tasks: Sequence[EncodeTask]) -> None:
        """Write the samples of the items in one copy."""
        if not tasks:
            return
        samples = np.concatenate([_samples(task) for task in tasks])
        rows = [row for task in tasks for row in task.rows]
        for row, finite in zip(rows, np.isfinite(samples).all(axis=1).tolist(), strict=True):
            (self._broken.discard if finite else self._broken.add)(row)
        self.rows[upload(np.array(rows, np.int64), self._device)] = upload(samples, self._device)

    def is_broken(self, task: DecodeTask) -> bool:
        return bool(self._broken) and not self._broken.isdisjoint(task.rows)

    def audio(self, task: DecodeTask) -> Tensor:
        """[1, samples] of the task's whole window."""
        return self.gather([task.rows])

    def gather(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """[windows, samples]: the rows of each window, shorter ones padded with silence."""
        length = max(map(len, windows))
        rows = np.zeros((len(windows), length), np.int64)
        for place, window in zip(rows, windows, strict=True):
            place[: len(window)] = window
        return self.rows[upload(rows, self._device)].view(len(windows), -1)


def _samples(task: EncodeTask) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
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
            place = item.offset + index - start
            if 0 <= place < end - start and (item.mask is None or item.mask[index]):
                audio[place] = row
    return audio.view(1, -1)


# Memory planning, before anything is allocated on the device.

# Most windows decoded as one batch. A larger batch would wait for the longest text in it.
MOST_ROWS = 128
# Most frames encoded at once: enough to keep a large device busy.
MOST_FRAMES_AT_ONCE = 24_000
# Most tokens of known text read at once, over all rows of a batch. Each reading costs as many kernel launches as a
# token.
MOST_TOKENS_AT_ONCE = 8_192
# Default for the number of streams: what the host can schedule, not what fits into memory.
MOST_STREAMS = 1024
# Libraries, CUDA graphs and fragmentation.
FIXED_BYTES = GIB


# Batch rows per whole live window of a step. Most windows are far from whole, so a step has more rows than that.
ROWS_PER_WHOLE_WINDOW = 4


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """Memory plan of one device: streams, rows in a batch, frames encoded at once, tokens read at once, and bytes."""

    streams: int
    rows: int
    frames_at_once: int
    tokens_at_once: int
    weight_bytes: int
    stream_bytes: int
    batch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.batch_bytes + self.streams * self.stream_bytes

    @property
    def windows_per_step(self) -> int:
        return max(2, self.rows // ROWS_PER_WHOLE_WINDOW)


def longest_window(spec: ModelSpec, policy: Policy) -> int:
    """Longest window of a live stream in samples: a whole one, or a young one with the tail of the last utterance."""
    behind_another = spec.window_positions + policy.tail_gap + policy.tail_until
    return int(behind_another + 1) * SAMPLES_PER_POSITION


def plan_windows(
    model: Moonshine | Whisper,
    spec: ModelSpec,
    room: int,
    *,
    dtype: torch.dtype,
    longest: int,
    max_streams: int | None,
) -> WindowMemory:
    """Fit the model, a batch and `max_streams` streams (None: as many as fit) into `room` bytes.

    Raises NotEnoughMemory.
    """
    size, shape, frames = dtype.itemsize, model.decoder_shape, model.frames_of(longest)
    weights = sum(parameter.numel() for parameter in model.parameters()) * size
    # Audio of the window and around it, and of the utterance before.
    stream_bytes = (spec.embeds_for(live=True) + spec.window_positions) * SAMPLES_PER_POSITION * 4
    # Per token of known text: attention weights, and logits.
    token_bytes = shape.heads * frames * 10 + model.config.vocabulary * 8
    # Per row: cross keys and values as encoded and as copied for the decoder, and the decoder's own; a quarter more for
    # uploads.
    row_bytes = 2 * shape.layers * shape.heads * shape.dim * size * (2 * frames + model.max_tokens) * 5 // 4
    frame_bytes = model.widest_frame * size
    left = room - weights - FIXED_BYTES - (max_streams or 1) * stream_bytes
    rows = min(MOST_ROWS, left // 2 // row_bytes)
    frames_at_once = min(MOST_FRAMES_AT_ONCE, left // 8 // frame_bytes)
    tokens_at_once = min(MOST_TOKENS_AT_ONCE, left // 4 // token_bytes)
    if rows < 1 or frames_at_once < frames or tokens_at_once < model.max_tokens:
        reading = FIXED_BYTES + max(2 * row_bytes, 8 * frames * frame_bytes, 4 * model.max_tokens * token_bytes)
        streams = "a stream" if max_streams is None else f"{max_streams} streams"
        raise NotEnoughMemory(
            f"the model needs {gib(weights)} for its weights, {gib(reading)} to read windows and "
            f"{gib((max_streams or 1) * stream_bytes)} for {streams}; {gib(room)} are free"
        )
    batch_bytes = FIXED_BYTES + rows * row_bytes + frames_at_once * frame_bytes + tokens_at_once * token_bytes
    fits = (room - weights - batch_bytes) // stream_bytes
    return WindowMemory(
        streams=max_streams or min(MOST_STREAMS, fits),
        rows=rows,
        frames_at_once=frames_at_once,
        tokens_at_once=tokens_at_once,
        weight_bytes=weights,
        stream_bytes=stream_bytes,
        batch_bytes=batch_bytes,
    )
