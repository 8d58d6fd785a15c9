"""How much memory a windowed model and its streams need on a device: asked before anything is allocated there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.moonshine import Moonshine
from engine.models.whisper import Whisper
from engine.runner.device import GIB, NotEnoughMemory, gib
from engine.runner.windowed.audio_slab import SAMPLES_PER_POSITION
from engine.runner.windowed.stability import Policy
from engine.spec import ModelSpec

# Most windows that are decoded as one batch. More would share a step, and wait for the longest text among them.
MOST_ROWS = 128
# Most frames that the encoder hears at once: enough to keep a large device busy.
MOST_FRAMES_AT_ONCE = 24_000
# Most known text that is read at once, over all rows of a batch: every reading costs as many launches as a token does.
MOST_TOKENS_AT_ONCE = 8_192
# Streams that are taken if nobody says how many: what their host can schedule, not what the memory holds.
MOST_STREAMS = 1024
# Libraries, recordings and fragmentation.
FIXED_BYTES = GIB


# A step reads so many whole windows of live streams for each four rows of a batch, because most are far from whole, or
# half as many windows of files.
ROWS_PER_WHOLE_WINDOW = 4


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """What one device holds: streams, windows in a batch, frames that are encoded and tokens that are read at once."""

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
    """Samples of the longest window of a live stream: a whole one, or a young one behind the longest utterance."""
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
    """Fit the model, a batch and `max_streams` streams (or as many as there is room for) into `room` bytes."""
    size, shape, frames = dtype.itemsize, model.decoder_shape, model.frames_of(longest)
    weights = sum(parameter.numel() for parameter in model.parameters()) * size
    # Audio of the window and around it, and of the utterance before.
    stream_bytes = (spec.embeds_for(live=True) + spec.window_positions) * SAMPLES_PER_POSITION * 4
    # Attention with its weights, and what the model says in every place.
    token_bytes = shape.heads * frames * 10 + model.config.vocabulary * 8
    # Keys and values of what a row hears, as they are encoded and where the decoder reads them, and of what it says;
    # a fourth more for backlog.
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
