"""Bounds of what one session may hold, and a client's delay on the model's clock."""

from __future__ import annotations

from dataclasses import dataclass

from engine.spec import ModelSpec

# What the names of the OpenAI scale mean here; the medium is the model's own default.
DELAY_MS = {"minimal": 160, "low": 320, "high": 960, "xhigh": 2400}


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """Bounds of what one session may hold."""

    max_audio_in_flight_s: float = 60.0
    max_commands: int = 4096
    max_outbox_events: int = 1024
    max_outbox_bytes: int = 2_000_000
    max_log_events: int = 4096
    max_log_bytes: int = 4 * 1024 * 1024
    # Longest message that is not audio.
    max_control_bytes: int = 64 * 1024


def delay_positions(delay: str | int | None, spec: ModelSpec) -> int | None:
    """A client's delay on the model's clock; None leaves it to the model."""
    milliseconds = DELAY_MS.get(delay) if isinstance(delay, str) else delay
    if milliseconds is None or spec.max_delay_positions == 0:
        return None
    positions = -(-milliseconds * spec.sample_rate // (1000 * spec.samples_per_position))
    return max(1, min(positions, spec.max_delay_positions))
