"""The memory plan of the frame-synchronous runner (`plan_memory`): how many streams fit on a device and in host memory.

The plan is made before anything large is allocated. `voxtral_spec` makes the `ModelSpec` of a checkpoint, from which
the plan, the scheduler and the gateways take the model's sizes. The pages are in `kv_pages.py`, parked streams in
`parking.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.voxtral_realtime import (
    FLUSH_POSITIONS,
    LEFT_PAD_POSITIONS,
    MAX_DELAY_POSITIONS,
    VoxtralConfig,
    weight_bytes,
)
from engine.options import MAX_KEYWORDS, Options
from engine.runner.device import GIB, NotEnoughMemory, gib
from engine.runner.frames.bias_tables import BYTES_PER_ROW, BYTES_PER_SLOT
from engine.runner.frames.kv_pages import StackLayout, stack_layouts
from engine.runner.frames.parking import MOVES, SPARE_HOST_BUFFERS
from engine.spec import FeatureShape, ModelSpec

# Samples before and after a position that its convolutions and mel frames read.
LOOK_BACK_SAMPLES = 680
LOOK_AHEAD_SAMPLES = 40
# In mel frames: frames of the position itself, and frames before it that its convolutions read.
FRAMES_PER_POSITION = 8
CONTEXT_FRAMES = 3
# Encoder-cache rows beyond those of the streams: room for shared and recently released audio.
SPARE_EMBEDS = 1024
# Most encoder-cache rows of a stream: the most positions of a rebuild in one step.
EMBEDS_PER_STREAM = 64
# Memory for libraries, kernels, graphs and fragmentation: measured, plus a reserve.
FIXED_WORKSPACE_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a device is used."""

    # Most open streams, the `parked` ones included.
    streams: int
    # Pages of each group of layers, in the order of `spec.kv_groups`, for the scheduler.
    group_pages: tuple[int, ...]
    # Encoder-cache rows.
    cache_embeds: int
    weight_bytes: int
    # Device memory of a stream whose pages are on the device: pages, activations and keyword tables.
    bytes_per_stream: int
    workspace_bytes: int
    # Streams whose pages are in host memory.
    parked: int = 0

    @property
    def resident(self) -> int:
        """Number of streams whose pages fit into the device's memory."""
        return self.streams - self.parked

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.resident * self.bytes_per_stream


def voxtral_spec(config: VoxtralConfig, layouts: tuple[StackLayout, StackLayout], name: str) -> ModelSpec:
    """The facts about the model for scheduler and gateway."""
    return ModelSpec(
        name=name,
        sample_rate=16_000,
        samples_per_position=config.samples_per_position,
        look_back_samples=LOOK_BACK_SAMPLES,
        look_ahead_samples=LOOK_AHEAD_SAMPLES,
        prefix_positions=LEFT_PAD_POSITIONS,
        flush_positions=FLUSH_POSITIONS,
        embeds_per_stream=EMBEDS_PER_STREAM,
        replay_positions=EMBEDS_PER_STREAM,
        default_delay_positions=config.default_delay,
        max_delay_positions=MAX_DELAY_POSITIONS,
        kv_groups=tuple(layout.group for layout in layouts),
        features=FeatureShape(config.mel_bins, FRAMES_PER_POSITION, CONTEXT_FRAMES),
        options=Options(keywords=MAX_KEYWORDS),
    )


def kv_bytes_per_stream(spec: ModelSpec) -> int:
    """Bytes of the keys and values of one stream with full rings."""
    return sum(group.ring_pages * group.page_positions * group.bytes_per_position for group in spec.kv_groups)


def plan_memory(
    config: VoxtralConfig,
    free_bytes: int,
    *,
    decoder_window: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_streams: int | None,
    parked_bytes: int = 0,
) -> MemoryPlan:
    """Fit `max_streams` streams (None: as many as possible) into `free_bytes`, weights included. Raises
    NotEnoughMemory.

    With `parked_bytes` of host memory there can be more streams than fit, at most twice as many: silent streams are
    parked there.
    """
    layouts = stack_layouts(config, decoder_window, kv_dtype)
    spec = voxtral_spec(config, layouts, "voxtral")
    kv_bytes = kv_bytes_per_stream(spec)
    per_stream = kv_bytes + _activation_bytes(config, dtype, spec) + BYTES_PER_SLOT + BYTES_PER_ROW
    weights, shared = weight_bytes(config, dtype), FIXED_WORKSPACE_BYTES + _opening_bytes(spec)
    room = free_bytes - weights - shared
    fits_on_device = room // per_stream
    if fits_on_device < 1:
        raise NotEnoughMemory(
            f"the model needs {gib(weights)} for its weights, {gib(shared)} to work in and {gib(per_stream)} for "
            f"each stream; {gib(free_bytes)} are free"
        )
    parked, parking_overhead = 0, 0
    if parked_bytes and (max_streams is None or max_streams > fits_on_device):
        parked = max(0, min(parked_bytes // kv_bytes - SPARE_HOST_BUFFERS, fits_on_device))
        # Device buffers of the moves, and what a parked stream has on the device besides its pages.
        parking_overhead = 3 * MOVES * kv_bytes + parked * (per_stream - kv_bytes)
        if parked == 0 or parking_overhead + per_stream > room:
            parked, parking_overhead = 0, 0
    fits_in_all = (room - parking_overhead) // per_stream + parked
    streams = fits_in_all if max_streams is None else max_streams
    if streams > fits_in_all:
        raise NotEnoughMemory(
            f"{streams} streams need {gib(weights + shared + streams * per_stream)} on the device, "
            f"{gib(free_bytes)} are free: {fits_in_all} streams fit with a decoder window of {decoder_window} tokens; "
            "a smaller window, 8-bit keys and values or host memory for silent streams (model.parked_share) help"
        )
    resident = min(streams, fits_in_all - parked)
    return MemoryPlan(
        streams=streams,
        group_pages=tuple(resident * group.ring_pages for group in spec.kv_groups),
        cache_embeds=streams * spec.embeds_per_stream + SPARE_EMBEDS,
        weight_bytes=weights,
        bytes_per_stream=per_stream,
        workspace_bytes=shared + parking_overhead,
        parked=streams - resident,
    )


def plan_share(
    config: VoxtralConfig,
    free_bytes: int,
    total_bytes: int,
    share_of: int,
    *,
    decoder_window: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_streams: int | None,
    parked_bytes: int = 0,
) -> MemoryPlan:
    """Return the plan of one of `share_of` engines that share a device. Raises NotEnoughMemory.

    Each engine plans with an equal part of the device's total memory, not with the free memory, so that all plan the
    same number of streams and can replace one another.
    """
    room = free_bytes if share_of == 1 else total_bytes // share_of
    try:
        plan = plan_memory(
            config,
            room,
            decoder_window=decoder_window,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_streams=max_streams,
            parked_bytes=parked_bytes // share_of,
        )
    except NotEnoughMemory as error:
        if share_of == 1:
            raise
        text = f"{share_of} engines share the device and its {gib(total_bytes)} (model.spare): {error}"
        raise NotEnoughMemory(text) from error
    if plan.total_bytes > free_bytes:
        raise NotEnoughMemory(
            f"this engine would take {gib(plan.total_bytes)}, its part of {gib(total_bytes)} for {share_of} engines "
            f"(model.spare), and {gib(free_bytes)} are free: set model.max_streams below {plan.streams}"
        )
    return plan


def _opening_bytes(spec: ModelSpec) -> int:
    """Bytes of pages that belong to no stream: one opening of the encoder, one of the decoder per delay, and
    padding."""
    total = 0
    for group, openings in zip(spec.kv_groups, (1, MAX_DELAY_POSITIONS), strict=True):
        pages = 1 + openings * -(-spec.prefix_positions // group.page_positions)
        total += pages * group.page_positions * group.bytes_per_position
    return total


def _activation_bytes(config: VoxtralConfig, dtype: torch.dtype, spec: ModelSpec) -> int:
    """Bytes of the largest tensors of a step for one stream, and of its rows of the encoder cache."""
    cached = (spec.embeds_per_stream + 1) * config.audio.width * config.rows_per_position
    feed_forward = 3 * config.audio.ffn * config.rows_per_position + 3 * config.text.ffn
    return (cached + config.vocabulary + feed_forward) * dtype.itemsize
