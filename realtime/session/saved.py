"""A session as a value: all that decides what it says next, as plain data that another process can go on with.

Not part of it: the sample rate and the limits, which are the server's, and the sound that the stall guard keeps. Of
that, only its length is saved: a stream that has to hear it again after a move hears silence there, and times stay
right. Everything else in a value is bounded by what bounds a session: the longest turn, and the audio in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import messages
from realtime.session.boundaries import SavedBoundaries
from realtime.session.phases import Phase
from realtime.session.settings import Settings
from realtime.session.stall import SavedStall


@dataclass(frozen=True, slots=True)
class Mark:
    """A flush that the engine has yet to answer, and the sample at which it stands."""

    sample: int
    pause: int | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A commit (or clear) that cannot be answered yet, and where in the audio it stands."""

    clears: bool
    event_id: str | None
    sample: int
    source_ms: float


@dataclass(frozen=True, slots=True)
class SavedSession:
    """Times are on the clock of the process that saved it."""

    settings: Settings
    phase: Phase
    boundaries: SavedBoundaries
    stall: SavedStall
    marks: list[Mark]
    waiting: list[Waiting]
    held_speech: list[messages.Speech]
    engine_base: int
    acked_samples: int
    acked_at: float
    drain_deadline: float | None
    engine_failures: int
