"""Checks items that a client prepared itself, and finds out which audio an engine already has (`ItemChecker`).

Clients may cut and hash audio themselves and send items instead of samples. Each `EngineLink` has an `ItemChecker`
whose cache mirrors the engine's cache of audio: audio that the engine has is sent as its hash alone. `EngineClient` has
another one for requests that only prepare items and send none (`engine/client/prepared_audio.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from engine.boundary.input_cache import SenderCache
from engine.boundary.items import (
    KEY_BYTES,
    WARM_UP_SECONDS,
    complaint_about,
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


class ItemChecker:
    """Checks items for one model and looks up their audio in one sender cache.

    The checker of a link uses the cache that mirrors the engine's. The preparing checker has a cache of its own: if a
    request that only prepares items added their hashes to the mirror, the gateway would not send this audio later.
    `name` is used in log lines.
    """

    def __init__(self, name: str, spec: ModelSpec, cache: SenderCache) -> None:
        self.name = name
        self.spec = spec
        self.cache = cache

    def pack(self, items: Sequence[Item]) -> list[bool]:
        """Returns for each item of one message whether its data must be sent.

        This adds the items to the cache, so the message must then be sent.
        """
        seen: set[bytes] = set()
        has_data = []
        for item in items:
            # The data of an item with a hash alone must be in this message already, or in the cache.
            has_data.append(bool(item.key) and (item.payload is not None or item.key in seen or item.key in self.cache))
            if has_data[-1]:
                seen.add(item.key)
        sizes = [(item.key, payload_bytes(item)) for item, has in zip(items, has_data, strict=True) if has]
        is_sent = iter(self.cache.plan_send(sizes))
        return [has and next(is_sent) for has in has_data]

    def check(self, items: Iterable[Item | None]) -> list[Item]:
        """Verify items prepared elsewhere, without those that are None. Raises ItemRefused."""
        present = [item for item in items if item is not None]
        for index, item in enumerate(present):
            self._check_one(index, item)
        return present

    def _check_one(self, index: int, item: Item) -> None:
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
            raise ItemRefused(f"item {index}: {complaint}")

    def warm_up(self) -> None:
        """Run noise through the code of a request, then clear the cache and restore its statistics."""
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


def warm_up(checker: ItemChecker) -> float | None:
    """Warm the checker up. Returns the seconds it took; None if it failed, and then the first request is slower."""
    began = time.perf_counter()
    try:
        checker.warm_up()
    except Exception:
        logger.warning(
            "warm-up of the %s item checker failed; its first request will be slower", checker.name, exc_info=True
        )
        return None
    took = time.perf_counter() - began
    logger.info("the %s item checker is warm after %.3f s", checker.name, took)
    return took
