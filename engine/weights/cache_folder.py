"""The path of the folder in which downloaded models are kept (`cache_folder`).

A module of its own, because commands need it before they import slow modules.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`TICKERTAPE_CACHE`, or `tickertape` in the user's cache folder."""
    if own := os.environ.get("TICKERTAPE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tickertape"
