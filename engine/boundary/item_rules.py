"""What an item must be like to be heard. The gateway asks for items that others prepared, the engine for all."""

from __future__ import annotations

import numpy as np

from engine.boundary.preparation import KEY_BYTES
from engine.messages import Item
from engine.spec import ModelSpec

# Positions and samples are counted up to here: exact in every number that may carry them, and longer than any session.
LARGEST_COUNT = 2**53 - 1


def complaint_about(item: Item, spec: ModelSpec) -> str | None:
    """What is wrong with an item, if anything. A key without data is not: the data may be held already."""
    offset, length, sample, samples = item.offset, item.length, item.sample, item.samples
    # A bool is an int to everybody but the clock.
    whole = type(offset) is int and type(length) is int and type(sample) is int
    if not whole or (samples is not None and type(samples) is not int):
        return "offset, length, sample and samples must be whole numbers"
    if not (0 <= offset <= LARGEST_COUNT and 1 <= length <= LARGEST_COUNT and 0 <= sample <= LARGEST_COUNT):
        return "offset and sample must be 0 or more, the length 1 or more, and all below 2**53"
    own_samples = length * spec.samples_per_position
    if offset + length > LARGEST_COUNT or sample + own_samples > LARGEST_COUNT:
        return f"a length of {length} positions from {offset} on; no session is so long"
    if samples is not None and not 0 <= samples <= own_samples:
        return f"samples must lie between 0 and {own_samples}, which {length} positions hold"
    if item.mask is not None and len(item.mask) != length:
        return f"a mask of {len(item.mask)} entries for {length} positions; give one for each"
    empty = not item.key and item.payload is None
    if item.mask is not None and not any(item.mask) and not empty:
        return "a gap carries no audio; leave out its key and data, or its mask"
    if empty and (item.mask is None or not any(item.mask)):
        return None
    return _complaint_about_data(item, spec, own_samples)


def _complaint_about_data(item: Item, spec: ModelSpec, own_samples: int) -> str | None:
    key, payload = item.key, item.payload
    if type(key) is not bytes or len(key) != KEY_BYTES:
        return f"the key must be {KEY_BYTES} bytes, the blake2b hash of the data"
    if payload is None:
        return None
    if not isinstance(payload, np.ndarray) or payload.dtype != np.float32 or not payload.flags.c_contiguous:
        return f"data of type {getattr(payload, 'dtype', type(payload).__name__)}; send contiguous float32"
    samples = spec.look_back_samples + own_samples + spec.look_ahead_samples
    wanted: tuple[int, ...] = (samples,)
    if payload.ndim == 2:
        if spec.features is None:
            return (
                f"features of shape {payload.shape}, but {spec.name} hears audio, not features; "
                f"send the item's {samples} samples"
            )
        wanted = spec.features.of(item.length)
    if payload.shape != wanted:
        return f"data of shape {payload.shape}; {spec.name} takes {wanted} for this length"
    return None
