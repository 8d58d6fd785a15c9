"""Audio to items that can cross to the engine: cut, hashed, checked, and looked up in a sender cache.

There are two kinds of processor. The main one owns the sender cache that mirrors an engine, and serves what executes on
that engine. The read-only one has a private cache and serves what only prepares (render, sizing, items for a remote
engine): a hash entered in the mirror for an item that the engine never receives would be a lie.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from audio.items import AudioItem, ItemCutter
from engine.boundary.input_cache import SenderCache
from engine.errors import EngineError
from engine.messages import Item
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

KEY_BYTES = 16
WARM_UP_SECONDS = 2
# Features and samples with equal bytes are different inputs, so they must not share a key.
_FEATURES = b"features"


class ItemRefused(EngineError):
    """An item prepared elsewhere is malformed, or its hash is not the hash of its bytes. Nothing was changed."""


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
    """Hash what the cutter has just made. A gap has no bytes and no key, only a mask."""
    items = []
    for piece in cut:
        positions = piece.length * spec.samples_per_position
        came = min(positions, cutter.samples_in - piece.sample)
        item = Item(piece.offset, piece.length, piece.sample, samples=None if came == positions else came)
        if piece.pcm is None:
            item.mask = [False] * piece.length
        else:
            item.key, item.payload = hash_payload(piece.pcm), piece.pcm
        items.append(item)
    return items


class Processor:
    """Checks, looks up and renders items for one model, against one sender cache."""

    def __init__(self, name: str, spec: ModelSpec, cache: SenderCache) -> None:
        self.name = name
        self.spec = spec
        self.cache = cache

    def pack(self, items: Sequence[Item]) -> list[bool]:
        """For each item of one message: must its data travel? The message must then be sent."""
        seen: set[bytes] = set()
        asked = []
        for item in items:
            # A hash alone, which the engine must hold already, can be looked up but never sent.
            asked.append(bool(item.key) and (item.payload is not None or item.key in seen or item.key in self.cache))
            if asked[-1]:
                seen.add(item.key)
        sizes = [(item.key, payload_bytes(item)) for item, ask in zip(items, asked, strict=True) if ask]
        travels = iter(self.cache.pack(sizes))
        return [ask and next(travels) for ask in asked]

    def check(self, items: Iterable[Item | None]) -> list[Item]:
        """Items prepared elsewhere, verified; those that are None are skipped."""
        present = [item for item in items if item is not None]
        for item in present:
            self._check_one(item)
        return present

    def _check_one(self, item: Item) -> None:
        where = f"item at position {item.offset}"
        if item.offset < 0 or item.length < 1 or item.sample < 0:
            raise ItemRefused(
                f"{where}: offset {item.offset}, length {item.length}, sample {item.sample}; the length "
                "must be at least 1, the others 0 or more"
            )
        if item.mask is not None and not any(item.mask):
            if item.key or item.payload is not None:
                raise ItemRefused(f"{where}: a gap carries no audio; leave out its key and data, or its mask")
            return
        if not isinstance(item.key, bytes) or len(item.key) != KEY_BYTES:
            raise ItemRefused(f"{where}: the key must be {KEY_BYTES} bytes, the blake2b hash of the data")
        if item.payload is None:
            return
        self._check_payload(where, item)
        if hash_payload(item.payload) != item.key:
            raise ItemRefused(
                f"{where}: the hash {item.key.hex()} is not the hash of its data; hash the float32 bytes "
                f"with blake2b, {KEY_BYTES} bytes long, and send both unchanged"
            )

    def _check_payload(self, where: str, item: Item) -> None:
        payload = item.payload
        if not isinstance(payload, np.ndarray) or payload.dtype != np.float32 or not payload.flags.c_contiguous:
            found = getattr(payload, "dtype", type(payload).__name__)
            raise ItemRefused(f"{where}: data of type {found}; send contiguous float32")
        spec = self.spec
        samples = spec.look_back_samples + item.length * spec.samples_per_position + spec.look_ahead_samples
        wanted: tuple[int, ...] = (samples,)
        if payload.ndim == 2:
            if spec.features is None:
                raise ItemRefused(
                    f"{where}: features of shape {payload.shape}, but {spec.name} hears audio, not features; "
                    f"send the item's {samples} samples"
                )
            wanted = spec.features.of(item.length)
        if payload.shape != wanted:
            raise ItemRefused(f"{where}: data of shape {payload.shape}; {spec.name} takes {wanted} for this length")
        if not np.isfinite(payload).all():
            raise ItemRefused(f"{where}: the data holds NaN or infinite values")

    def warm_up(self) -> None:
        """Run dummy audio through everything a request runs through, then forget it."""
        noise = np.random.default_rng(0).standard_normal(WARM_UP_SECONDS * self.spec.sample_rate, dtype=np.float32)
        cutter = make_cutter(self.spec)
        items = prepare(cutter, cutter.push(noise), self.spec)
        items += prepare(cutter, cutter.flush(self.spec.flush_positions), self.spec)
        before = self.cache.stats
        self.cache.stats = type(before)()
        try:
            self.check(items)
            self.pack(items)
        finally:
            self.cache.stats = before
            self.cache.clear()


def payload_bytes(item: Item) -> int:
    return 0 if item.payload is None else int(item.payload.nbytes)


def processor_for(executes: bool, main: Processor, read_only: Processor) -> Processor:
    """The routing rule: only what executes on the engine may touch the cache that mirrors it."""
    return main if executes else read_only


def warm_up(processors: Iterable[Processor]) -> dict[str, float | None]:
    """Seconds each processor took; None where one failed, which stops neither the others nor the server."""
    took: dict[str, float | None] = {}
    for processor in processors:
        started = time.perf_counter()
        try:
            processor.warm_up()
        except Exception:
            logger.warning(
                "warm-up of the %s processor failed; its first request will be slower", processor.name, exc_info=True
            )
            took[processor.name] = None
        else:
            took[processor.name] = time.perf_counter() - started
            logger.info("the %s processor is warm after %.3f s", processor.name, took[processor.name])
    return took
