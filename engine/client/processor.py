"""Items on their way to an engine: checked, and looked up in a sender cache.

There are two kinds of processor. The main one owns the sender cache that mirrors an engine, and serves what executes on
that engine. The read-only one has a private cache and serves what only prepares (render, sizing, items for a remote
engine): a hash entered in the mirror for an item that the engine never receives would be a lie.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from engine.boundary.input_cache import SenderCache
from engine.boundary.preparation import (
    KEY_BYTES,
    WARM_UP_SECONDS,
    hash_payload,
    make_cutter,
    payload_bytes,
    prepare,
)
from engine.errors import EngineError
from engine.messages import Item
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)


class ItemRefused(EngineError):
    """An item prepared elsewhere is malformed, or its hash is not the hash of its bytes. Nothing was changed."""


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
        empty = not item.key and item.payload is None
        if item.mask is not None and not any(item.mask) and not empty:
            raise ItemRefused(f"{where}: a gap carries no audio; leave out its key and data, or its mask")
        if empty and (item.mask is None or not any(item.mask)):
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
        items = prepare(cutter, cutter.cut(noise), self.spec)
        items += prepare(cutter, cutter.flush(self.spec.flush_positions), self.spec)
        before = self.cache.stats
        self.cache.stats = type(before)()
        try:
            self.check(items)
            self.pack(items)
        finally:
            self.cache.stats = before
            self.cache.clear()


def processor_for(executes: bool, main: Processor, read_only: Processor) -> Processor:
    """The routing rule: a request that executes on the engine goes to the processor whose cache mirrors it; one that
    only prepares goes to the other."""
    return main if executes else read_only


def warm_up(processor: Processor) -> float | None:
    """Seconds it took; None if it failed, which stops nobody: the first request will be slower."""
    began = time.perf_counter()
    try:
        processor.warm_up()
    except Exception:
        logger.warning(
            "warm-up of the %s processor failed; its first request will be slower", processor.name, exc_info=True
        )
        return None
    took = time.perf_counter() - began
    logger.info("the %s processor is warm after %.3f s", processor.name, took)
    return took
