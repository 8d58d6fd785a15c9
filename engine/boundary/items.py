"""Makes and checks `Item`s, the messages with a stream's audio: hashes the pieces that `audio.items.ItemCutter` cuts.

The gateway calls `prepare` for the audio of every stream. Both processes call `complaint_about`: the gateway for items
that clients prepared themselves (`engine/client/prepared_audio.py`), the engine for every item. Whether audio and hash
of such an item agree is checked in `engine/client/link.py`. Functions without state.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from audio.items import AudioItem, ItemCutter
from engine.messages import LARGEST_COUNT, Item
from engine.spec import ModelSpec

KEY_BYTES = 16
# Noise that each side processes at startup, so that the first session does not wait for lazy loading.
WARM_UP_SECONDS = 2
# Features and samples with equal bytes are different inputs; this keeps their hashes apart.
_FEATURES = b"features"


def hash_payload(payload: NDArray[np.float32]) -> bytes:
    """The content key of samples (one axis) or features (two axes)."""
    person = _FEATURES if payload.ndim > 1 else b""
    return blake2b(payload.data, digest_size=KEY_BYTES, person=person).digest()


def make_cutter(spec: ModelSpec) -> ItemCutter:
    """A stream's cutter. Its first sample belongs to the first position after the model's prefix."""
    return ItemCutter(
        spec.samples_per_position,
        spec.look_back_samples,
        spec.look_ahead_samples,
        first_offset=spec.prefix_positions,
    )


def prepare(cutter: ItemCutter, cut: Iterable[AudioItem], spec: ModelSpec) -> list[Item]:
    """Make items of the pieces that the cutter has just returned. A gap has a length but no data and no key."""
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
    """The size of an item's audio; 0 if the item has none."""
    return int(getattr(item.payload, "nbytes", 0))


# Validity of items. The gateway checks items that clients have prepared, the engine checks all items.


def complaint_about(item: Item, spec: ModelSpec) -> str | None:
    """What is wrong with an item, or None. A key without data is allowed: the receiver may have the data cached."""
    offset, length, sample, samples = item.offset, item.length, item.sample, item.samples
    # Not isinstance: a bool is an int, too.
    whole = type(offset) is int and type(length) is int and type(sample) is int
    if not whole or (samples is not None and type(samples) is not int):
        return "offset, length, sample and samples must be whole numbers"
    if not (0 <= offset <= LARGEST_COUNT and 1 <= length <= LARGEST_COUNT and 0 <= sample <= LARGEST_COUNT):
        return "offset and sample must be 0 or more, the length 1 or more, and all below 2**53"
    own_samples = length * spec.samples_per_position
    if offset + length > LARGEST_COUNT or sample + own_samples > LARGEST_COUNT:
        return f"a length of {length} positions from {offset} on; this is longer than any session"
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
                f"features of shape {payload.shape}, but {spec.name} takes audio, not features; "
                f"send the item's {samples} samples"
            )
        wanted = spec.features.of(item.length)
    if payload.shape != wanted:
        return f"data of shape {payload.shape}; {spec.name} takes {wanted} for this length"
    return None
