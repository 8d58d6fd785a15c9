"""Models and recordings that tests need, and that `tickertape pull` brings."""

from __future__ import annotations

import pytest

from engine.options import cache_folder


def skip_unless_cached(*names: str) -> None:
    missing = [name for name in names if not (cache_folder() / name).exists()]
    if missing:
        pytest.skip("not in the cache; run " + " and ".join(f"`tickertape pull {name}`" for name in missing))
