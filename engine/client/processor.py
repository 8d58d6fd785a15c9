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
from engine.boundary.item_rules import complaint_about
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
        for place, item in enumerate(present):
            self._check_one(place, item)
        return present

    def _check_one(self, place: int, item: Item) -> None:
        complaint = complaint_about(item, self.spec)
        if complaint is None and item.payload is not None:
            if not np.isfinite(item.payload).all():
                complaint = "the data holds NaN or infinite values"
            elif hash_payload(item.payload) != item.key:
                complaint = (
                    f"the hash {item.key.hex()} is not the hash of its data; hash the float32 bytes "
                    f"with blake2b, {KEY_BYTES} bytes long, and send both unchanged"
                )
        if complaint is not None:
            raise ItemRefused(f"item {place}: {complaint}")

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
