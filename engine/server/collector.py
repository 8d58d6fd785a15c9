"""The cycle collector of an engine: at rest."""

from __future__ import annotations

import gc


def calm_collector() -> None:
    """Call once, when the model is loaded. Steps leave no cycles behind; left as it is, the collector would walk the
    bookkeeping of every stream again and again, for milliseconds at a time, and find nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
