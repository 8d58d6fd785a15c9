"""What goes into the session core and what comes out of it, free of any wire dialect.

Samples are counted at the engine's rate from the first sample of the session, unless a name says `source`: those are
counted at the rate of the client's own format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import messages
from realtime.session.settings import Settings

Samples = NDArray[np.float32]

# Client -> core


@dataclass(frozen=True, slots=True)
class Configure:
    settings: Settings
    event_id: str | None = None


# Not frozen, because one is made for every message: that takes a third of the time.
@dataclass(slots=True)
class Append:
    """Decoded audio, already at the engine's rate. `source_samples` and `source_ms` are what the client sent for it."""

    samples: Samples
    source_samples: int
    source_ms: float


@dataclass(slots=True)
class Gap:
    """Silence the client declares instead of sending it."""

    samples: int
    source_samples: int
    source_ms: float


@dataclass(frozen=True, slots=True)
class Commit:
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """No more audio will come; finish what is there, then close."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The server is going away: finish the running turn before `deadline`, then close."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class EngineSwitched:
    """From now on engine outputs are of a new stream whose first sample is the session's sample `base`."""

    base: int


Event = (
    Configure
    | Append
    | Gap
    | Commit
    | Clear
    | End
    | Drain
    | Tick
    | EngineSwitched
    | messages.Text
    | messages.Speech
    | messages.Opened
    | messages.Flushed
    | messages.Closed
    | messages.Failed
    | messages.Refused
    | messages.Dead
)

# Core -> client


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word and the samples it spans. If the model tells: how likely it found each token of the word, and the word."""

    text: str
    start: int
    end: int
    chances: tuple[messages.Chance, ...] = ()
    confidence: float | None = None
    # The code of its language, and how likely the model found that nobody spoke there.
    language: str = ""
    no_speech: float | None = None


@dataclass(frozen=True, slots=True)
class SessionUpdated:
    settings: Settings


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    item_id: str
    sample: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    item_id: str
    sample: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Nobody spoke for as long as the client wanted to wait; the silence becomes an item of its own."""

    item_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Committed:
    item_id: str
    previous_item_id: str | None
    # The client event that asked for it; None where speech detection did.
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    pass


@dataclass(frozen=True, slots=True)
class Delta:
    item_id: str
    text: str
    words: tuple[TimedWord, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    item_id: str
    transcript: str
    words: tuple[TimedWord, ...]
    start: int
    end: int
    tokens: int
    # The session's time at which the turn was committed.
    ended_at: float
    # The turn was only too long: the next one goes on with its next word.
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class UtteranceEnded:
    """No word followed the one that ends at `sample` for as long as the client wanted to wait."""

    sample: int


@dataclass(frozen=True, slots=True)
class ItemFailed:
    item_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The client made a mistake; the session goes on."""

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """So many of the client's own samples are safe with the server."""

    source_samples: int


@dataclass(frozen=True, slots=True)
class Injected:
    """So many items prepared elsewhere are in the engines' caches now."""

    items: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What a dialect answered by itself, in its place among the other events."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """Everything is said; `sample` is where the audio ended."""

    sample: int


@dataclass(frozen=True, slots=True)
class Closing:
    """The server will close this socket soon."""

    reason: str


ServerEvent = (
    SessionUpdated
    | SpeechStarted
    | SpeechStopped
    | TimedOut
    | Committed
    | Cleared
    | Delta
    | Completed
    | UtteranceEnded
    | ItemFailed
    | Problem
    | Acknowledged
    | Answered
    | Injected
    | Ended
    | Closing
)

# Core -> shell


@dataclass(frozen=True, slots=True)
class Send:
    event: ServerEvent


# Not frozen, because one is made for every message: that takes a third of the time.
@dataclass(slots=True)
class Feed:
    samples: Samples


@dataclass(frozen=True, slots=True)
class FeedGap:
    samples: int


@dataclass(frozen=True, slots=True)
class FlushEngine:
    """All that was said must become text; `pause`: of what was said before this sample, at which nobody spoke."""

    pause: int | None = None


@dataclass(frozen=True, slots=True)
class FinishEngine:
    pass


@dataclass(frozen=True, slots=True)
class Reanchor:
    """Leave the engine stream behind and open a new one that first hears `replay` (audio, or counts of silent
    samples), which begins at sample `base`.

    Outputs of the old stream must not be delivered any more.
    """

    base: int
    replay: tuple[Samples | int, ...]


@dataclass(frozen=True, slots=True)
class Reopen:
    """The model's options changed: let the stream run out, then go on with a new one. Nothing is replayed."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class FollowTurns:
    """Turns end by another rule from here on."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Hangup:
    """Close the socket once everything sent before has gone out. `cause` is what the metrics count it under."""

    code: int
    reason: str
    cause: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure for the metrics; `name` is one of `MEASURES`."""

    name: str
    value: float


MEASURES = frozenset({"lag_seconds", "final_seconds", "stalls", "engine_failures"})

Effect = Send | Feed | FeedGap | FlushEngine | FinishEngine | Reanchor | Reopen | FollowTurns | Hangup | Measured
