"""How much memory a model and its streams need, and what fits: asked before anything large is allocated."""

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
from engine.runner.bias_tables import BYTES_PER_ROW, BYTES_PER_SLOT
from engine.runner.device import GIB, NotEnoughMemory, gib
from engine.runner.frames.kv import StackLayout, stack_layouts
from engine.spec import FeatureShape, ModelSpec

LOOK_BACK_SAMPLES = 680
LOOK_AHEAD_SAMPLES = 40
# The same in mel frames: those of the position itself, and those before it that its convolutions reach.
FRAMES_PER_POSITION = 8
CONTEXT_FRAMES = 3
# Encoder-cache rows beyond what streams hold at once: room for shared and recently released audio.
SPARE_EMBEDS = 1024
# Libraries, kernels, recordings and fragmentation, measured with room to spare.
FIXED_WORKSPACE_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one device holds. `group_pages` is for the scheduler, in the order of `spec.kv_groups`."""

    streams: int
    group_pages: tuple[int, ...]
    cache_embeds: int
    weight_bytes: int
    stream_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.streams * self.stream_bytes


def voxtral_spec(config: VoxtralConfig, layouts: tuple[StackLayout, StackLayout], name: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        sample_rate=16_000,
        samples_per_position=config.samples_per_position,
        look_back_samples=LOOK_BACK_SAMPLES,
        look_ahead_samples=LOOK_AHEAD_SAMPLES,
        prefix_positions=LEFT_PAD_POSITIONS,
        flush_positions=FLUSH_POSITIONS,
        default_delay_positions=config.default_delay,
        max_delay_positions=MAX_DELAY_POSITIONS,
        kv_groups=tuple(layout.group for layout in layouts),
        features=FeatureShape(config.mel_bins, FRAMES_PER_POSITION, CONTEXT_FRAMES),
        options=Options(keywords=MAX_KEYWORDS),
    )


def stream_bytes(spec: ModelSpec) -> int:
    """Keys and values of one stream whose rings are full."""
    return sum(group.ring_pages * group.page_positions * group.bytes_per_position for group in spec.kv_groups)


def plan_memory(
    config: VoxtralConfig,
    free_bytes: int,
    *,
    decoder_window: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_streams: int | None,
) -> MemoryPlan:
    """Fit `max_streams` streams (or as many as there is room for) into `free_bytes`, weights included."""
    layouts = stack_layouts(config, decoder_window, kv_dtype)
    spec = voxtral_spec(config, layouts, "voxtral")
    per_stream = stream_bytes(spec) + _activation_bytes(config, dtype, spec) + BYTES_PER_SLOT + BYTES_PER_ROW
    weights, shared = weight_bytes(config, dtype), FIXED_WORKSPACE_BYTES + _opening_bytes(spec)
    room = free_bytes - weights - shared
    fits = room // per_stream
    if fits < 1:
        raise NotEnoughMemory(
            f"the model needs {gib(weights)} for its weights, {gib(shared)} to work in and {gib(per_stream)} for "
            f"each stream; {gib(free_bytes)} are free"
        )
    streams = fits if max_streams is None else max_streams
    if streams > fits:
        raise NotEnoughMemory(
            f"{streams} streams need {gib(weights + shared + streams * per_stream)}, {gib(free_bytes)} are free: "
            f"{fits} streams fit with a decoder window of {decoder_window} tokens; "
            "a smaller window or 8-bit keys and values make room for more"
        )
    return MemoryPlan(
        streams=streams,
        group_pages=tuple(streams * group.ring_pages for group in spec.kv_groups),
        cache_embeds=streams * spec.embeds_per_stream + SPARE_EMBEDS,
        weight_bytes=weights,
        stream_bytes=per_stream,
        workspace_bytes=shared,
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
) -> MemoryPlan:
    """The plan of one of `share_of` engines on a device.

    Each plans with its part of the whole device and not with what is free, so that all of them take as many streams as
    the others and can stand in for one another.
    """
    room = free_bytes if share_of == 1 else total_bytes // share_of
    try:
        plan = plan_memory(
            config, room, decoder_window=decoder_window, dtype=dtype, kv_dtype=kv_dtype, max_streams=max_streams
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
    """Pages that no stream owns: one opening of the encoder, one of the decoder per delay, one of each for padding."""
    total = 0
    for group, openings in zip(spec.kv_groups, (1, MAX_DELAY_POSITIONS), strict=True):
        pages = 1 + openings * -(-spec.prefix_positions // group.page_positions)
        total += pages * group.page_positions * group.bytes_per_position
    return total


def _activation_bytes(config: VoxtralConfig, dtype: torch.dtype, spec: ModelSpec) -> int:
    """Largest tensors that a step holds at once for one stream, and its rows of the encoder cache."""
    cached = (spec.embeds_per_stream + 1) * config.audio.width * config.rows_per_position
    feed_forward = 3 * config.audio.ffn * config.rows_per_position + 3 * config.text.ffn
    return (cached + config.vocabulary + feed_forward) * dtype.itemsize
