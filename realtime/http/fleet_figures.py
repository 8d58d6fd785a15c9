"""The figures of a whole fleet, as its keeper wrote them down for this gateway."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def fleet_figures(path: str | None) -> dict[str, Any] | None:
    """With their age by this machine's clock; None if nobody writes any. Reads a file, so not for an event loop."""
    if path is None:
        return None
    try:
        file = Path(path)
        written = file.stat().st_mtime
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return {**found, "age_s": round(max(0.0, time.time() - written), 1)} if isinstance(found, dict) else None
