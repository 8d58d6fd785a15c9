"""Numbers of the configuration that the session core itself needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Seconds, unless a name says otherwise."""

    stall_seconds: float = 8.0
    keep_seconds: float = 30.0
    ack_interval_seconds: float = 0.25
    # Audio is acknowledged when it came, or (a number) when the engine has heard it and so many samples beyond it.
    ack_margin_samples: int | None = None
    # Failures of engine streams in a row, without a word in between, that end the session.
    max_engine_failures: int = 3
    # A turn that lasts longer ends after a word, and the next one goes on.
    max_turn_seconds: float = 3600.0
