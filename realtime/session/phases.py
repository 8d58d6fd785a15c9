"""Where a session can stand, and which events have an answer there. Data only; `Session` in `core` has the answers."""

from __future__ import annotations

from enum import Enum, auto

from engine import messages
from realtime.session.events import Append, Clear, Commit, Configure, Drain, End, EngineSwitched, Gap, Tick


class Phase(Enum):
    """Where a session stands."""

    # Audio and control events are answered as they come.
    ACTIVE = auto()
    # A commit waits until speech detection has seen all audio before it; later commits and clears queue behind it.
    COMMITTING = auto()
    # No more audio; the engine runs out.
    FINISHING = auto()
    CLOSED = auto()


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.ACTIVE: frozenset({Phase.COMMITTING, Phase.FINISHING, Phase.CLOSED}),
    Phase.COMMITTING: frozenset({Phase.ACTIVE, Phase.FINISHING, Phase.CLOSED}),
    Phase.FINISHING: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}

_ENGINE = {
    messages.Opened: "_ignore",
    messages.Text: "_text",
    messages.Speech: "_speech",
    messages.Flushed: "_flushed",
    messages.Closed: "_engine_closed",
    messages.Failed: "_engine_failed",
    messages.Refused: "_engine_failed",
    messages.Dead: "_engine_dead",
    EngineSwitched: "_engine_switched",
}

# Which method answers an event in a phase. What is not in the table is illegal there.
TABLE: dict[Phase, dict[type, str]] = {
    Phase.ACTIVE: {
        Configure: "_configure",
        Append: "_append",
        Gap: "_gap",
        Commit: "_commit",
        Clear: "_clear",
        End: "_end",
        Drain: "_drain",
        Tick: "_tick",
        **_ENGINE,
    },
    Phase.COMMITTING: {
        Configure: "_configure",
        Append: "_append",
        Gap: "_gap",
        Commit: "_defer",
        Clear: "_defer",
        End: "_end",
        Drain: "_drain",
        Tick: "_tick",
        **_ENGINE,
    },
    # What a client still sends while its session runs out has no effect.
    Phase.FINISHING: {
        **dict.fromkeys((Configure, Append, Gap, Commit, Clear, End, Drain), "_ignore"),
        Tick: "_tick",
        **_ENGINE,
    },
    Phase.CLOSED: {},
}
