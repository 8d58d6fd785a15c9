"""The memory plan of a windowed model on a device (`plan_windows`): how many streams, and how large a batch, fit.

`engine/runner/load.py` makes the plan before anything is allocated on the device; `DeviceWindows` keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.moonshine import Moonshine
from engine.models.whisper import Whisper
from engine.runner.device import GIB, NotEnoughMemory, gib
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION
from engine.runner.windowed.stability import Policy
from engine.spec import ModelSpec

# Most windows decoded as one batch. A larger batch would wait for the longest text in it.
MAX_ROWS = 128
# Most frames encoded at once: enough to keep a large device busy.
MAX_FRAMES_AT_ONCE = 24_000
# Most tokens of known text read in one pass, over all rows of a batch. Each such pass costs as many kernel launches as
# one new token per row.
MAX_TOKENS_AT_ONCE = 8_192
# Default for the number of streams: what the host can schedule, not what fits into memory.
MAX_STREAMS = 1024
# Memory for libraries, CUDA graphs and fragmentation.
FIXED_BYTES = GIB


# Batch rows per longest live window of a step. The scheduler counts a step's windows as if all had the longest length;
# most are much shorter, so a step has more of them than `windows_per_step`.
ROWS_PER_WHOLE_WINDOW = 4


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """Memory plan of a windowed model on one device."""

    streams: int
    # Most rows (windows) of a decoding batch.
    rows: int
    # Most frames that are encoded at once, padding included.
    frames_at_once: int
    # Most tokens of known text that are read in one pass, over all rows.
    tokens_at_once: int
    weight_bytes: int
    stream_bytes: int
    batch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.batch_bytes + self.streams * self.stream_bytes

    @property
    def windows_per_step(self) -> int:
        """Windows of the longest length that the scheduler may plan for one step."""
        return max(2, self.rows // ROWS_PER_WHOLE_WINDOW)


def longest_window(spec: ModelSpec, policy: Policy) -> int:
    """Upper bound of the audio that is encoded for a window of a live stream, in samples: the longest window, and the
    context before a short one."""
    positions = spec.window_positions + policy.tail_gap + policy.tail_until
    return int(positions + 1) * SAMPLES_PER_POSITION


def plan_windows(
    model: Moonshine | Whisper,
    spec: ModelSpec,
    room: int,
    *,
    dtype: torch.dtype,
    longest: int,
    max_streams: int | None,
) -> WindowMemory:
    """Fit the model, a batch and `max_streams` streams (None: as many as fit) into `room` bytes. `longest`: longest
    window in samples. Raises NotEnoughMemory.
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
    frame_bytes = model.peak_values_per_frame * size
    remaining = room - weights - FIXED_BYTES - (max_streams or 1) * stream_bytes
    rows = min(MAX_ROWS, remaining // 2 // row_bytes)
    frames_at_once = min(MAX_FRAMES_AT_ONCE, remaining // 8 // frame_bytes)
    tokens_at_once = min(MAX_TOKENS_AT_ONCE, remaining // 4 // token_bytes)
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
        streams=max_streams or min(MAX_STREAMS, fits),
        rows=rows,
        frames_at_once=frames_at_once,
        tokens_at_once=tokens_at_once,
        weight_bytes=weights,
        stream_bytes=stream_bytes,
        batch_bytes=batch_bytes,
    )
