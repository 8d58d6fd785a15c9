"""Audio to items that can cross to the engine: cut on the model's clock and hashed, the same on both sides."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from audio.items import AudioItem, ItemCutter
from engine.messages import Item
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
