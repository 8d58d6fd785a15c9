"""Audio to items that can cross to the engine: cut on the model's clock and hashed, the same on both sides."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from audio.items import AudioItem, ItemCutter
from engine.messages import LARGEST_COUNT, Item
from engine.spec import ModelSpec

KEY_BYTES = 16
# Noise that either side prepares at its start, so that a first user finds everything loaded.
WARM_UP_SECONDS = 2
# Features and samples with equal bytes are different inputs, so they must not share a key.
_FEATURES = b"features"


def hash_payload(payload: NDArray[np.float32]) -> bytes:
    """The content key of samples (one axis) or features (two axes)."""
    person = _FEATURES if payload.ndim > 1 else b""
    return blake2b(payload.data, digest_size=KEY_BYTES, person=person).digest()


def make_cutter(spec: ModelSpec) -> ItemCutter:
    """A stream's cutter: its first sample belongs to the first position after the model's opening."""
    return ItemCutter(
        spec.samples_per_position,
        spec.look_back_samples,
        spec.look_ahead_samples,
        first_offset=spec.prefix_positions,
    )


def prepare(cutter: ItemCutter, cut: Iterable[AudioItem], spec: ModelSpec) -> list[Item]:
    """Hash what the cutter has just made. A gap has no bytes and no key, only a length."""
    items = []
    for piece in cut:
        positions = piece.length * spec.samples_per_position
        came = min(positions, cutter.samples_in - piece.sample)
        item = Item(piece.offset, piece.length, piece.sample, samples=None if came == positions else came)
        if piece.pcm is not None:
            item.key, item.payload = hash_payload(piece.pcm), piece.pcm
        items.append(item)
    return items


def payload_bytes(item: Item) -> int:
    return int(getattr(item.payload, "nbytes", 0))


# What an item must be like to be heard. The gateway asks for items that others prepared, the engine for all.


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
