"""The input events and the effects of the session core, as dataclasses, independent of wire dialects.

Client inputs (`Append`, `Commit`, ...) come from the dialects, engine inputs are `engine.messages`. Effects are of
three kinds: events for the client (`Delta`, `Completed`, ...), which a dialect writes as JSON; commands for the engine
stream (`Feed`, `FlushEngine`, ...), which `realtime/serving/live_session.py` carries out; and `Hangup` and `Measured`.
Samples are counted at the engine's rate from the first sample of the session. Names with `source` are counts at the
rate of the client's format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from engine import messages
from realtime.session.settings import Settings

Samples = NDArray[np.float32]

# Client -> core


@dataclass(frozen=True, slots=True)
class Configure:
    """The client changes the settings of the session."""

    settings: Settings
    event_id: str | None = None


# Not frozen, because one is made for every message, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class Append:
    """Decoded audio at the engine's rate. `source_samples` and `source_ms` are its length as the client sent it."""

    samples: Samples
    source_samples: int
    source_ms: float


@dataclass(slots=True)
class Gap:
    """Silence that the client declares instead of sending it."""

    samples: int
    source_samples: int
    source_ms: float


@dataclass(frozen=True, slots=True)
class Commit:
    """The client ends the turn: all audio so far that is not committed becomes an item."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """The client drops the audio that is not committed."""

    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """No more audio will come: transcribe the rest, then close."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The server shuts down: finish the running turn before `deadline`, then close."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Sent at regular intervals, so that the core can act when time has passed without another event."""

    # Seconds of audio that the engine has not computed.
    behind_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSwitched:
    """Later engine outputs come from a new stream, whose first sample is the session sample `base`."""

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
    | messages.Labels
    | messages.Opened
    | messages.Flushed
    | messages.Revised
    | messages.Closed
    | messages.Failed
    | messages.Refused
    | messages.Dead
)

# Core -> client


# Not for the garbage collector: a word refers to plain values only, and hours of open turns have millions of them. A
# collection over 64 such turns of an hour would block the event loop for a tenth of a second.
class TimedWord(Struct, frozen=True, gc=False):
    """A word with its first sample and the sample after its last."""

    text: str
    start: int
    end: int
    # (bytes, log-probability) of each token, and the probability of the word; empty and None if the model has none.
    chances: tuple[messages.TokenLogProbability, ...] = ()
    confidence: float | None = None
    # Language code, and the model's probability that there was no speech.
    language: str = ""
    no_speech: float | None = None
    # Number of the speaker, and the confidence of this label; None without labels, or while they are not known yet.
    speaker: int | None = None
    speaker_confidence: float | None = None


@dataclass(frozen=True, slots=True)
class SessionUpdated:
    settings: Settings


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    item_id: str
    sample: int


@dataclass(frozen=True, slots=True)
class EagerTurnEnd:
    """The turn has probably ended: all text of the audio before `sample` was sent. `TurnResumed` withdraws this."""

    item_id: str
    sample: int
    confidence: float


@dataclass(frozen=True, slots=True)
class TurnResumed:
    """Speech continues at `sample` in a turn whose probable end was announced."""

    item_id: str
    sample: int


@dataclass(frozen=True, slots=True)
class PauseScored:
    """The turn detector has answered in a pause of the turn: the probability that the turn is over at `sample`."""

    item_id: str
    sample: int
    confidence: float


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    item_id: str
    sample: int
    # The probability that the turn was over, if turns end by a score.
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """There was no speech for the client's idle timeout; the silence becomes an item."""

    item_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A turn has ended and is an item; its final text follows."""

    item_id: str
    previous_item_id: str | None
    # Id of the client's commit event; None if speech detection ended the turn.
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The answer to `Clear`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a turn, with the words that it completes."""

    item_id: str
    text: str
    words: tuple[TimedWord, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """A turn has ended with this final text. `start` and `end` are the samples of the turn."""

    item_id: str
    transcript: str
    words: tuple[TimedWord, ...]
    start: int
    end: int
    tokens: int
    # When the turn was committed, on the session's clock.
    ended_at: float
    # The turn was split, because it was too long or the speaker changed; the next turn continues with the next word.
    goes_on: bool = False
    # As in SpeechStopped.
    confidence: float | None = None
    # Whether the length of the silence ended the turn, and not a score.
    timeout: bool = False
    # Words were decoded again: transcript and words may differ from the deltas.
    is_revised: bool = False


@dataclass(frozen=True, slots=True)
class WordsLabelled:
    """The speakers of these words, which were sent before, are known now."""

    item_id: str
    words: tuple[TimedWord, ...]


@dataclass(frozen=True, slots=True)
class UtteranceEnded:
    """No word followed the one that ends at `sample` within the client's `utterance_end_ms`."""

    sample: int


@dataclass(frozen=True, slots=True)
class ItemFailed:
    """A committed turn gets no final, because its engine stream has failed."""

    item_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The client made a mistake; the session continues."""

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The client need not keep its first `source_samples` samples any longer: the server does not need them again."""

    source_samples: int


@dataclass(frozen=True, slots=True)
class Injected:
    """This many prepared items were put into the caches of the engines."""

    items: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A direct answer of a dialect, in order with the other events."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """All text has been sent; `sample` is the end of the audio."""

    sample: int


@dataclass(frozen=True, slots=True)
class Closing:
    """The server will close this socket soon."""

    reason: str


ServerEvent = (
    SessionUpdated
    | SpeechStarted
    | EagerTurnEnd
    | TurnResumed
    | PauseScored
    | SpeechStopped
    | TimedOut
    | Committed
    | Cleared
    | Delta
    | Completed
    | WordsLabelled
    | UtteranceEnded
    | ItemFailed
    | Problem
    | Acknowledged
    | Answered
    | Injected
    | Ended
    | Closing
)

# Effects: what the live session has to do


@dataclass(frozen=True, slots=True)
class Send:
    event: ServerEvent


# Not frozen, for the same reason as Append.
@dataclass(slots=True)
class Feed:
    """Feed these samples to the engine stream."""

    samples: Samples


@dataclass(frozen=True, slots=True)
class FeedGap:
    """Feed this many samples of silence to the engine stream."""

    samples: int


@dataclass(frozen=True, slots=True)
class FlushEngine:
    """Flush the engine stream: it must send all text of the audio so far."""

    # If set, only the text before this sample is needed, which lies in silence.
    pause: int | None = None
    # Whether the client itself ended the turn here.
    ends_speech: bool = False
    # Whether the rule of turn detection ended the turn before the pause.
    turn_over: bool = False


@dataclass(frozen=True, slots=True)
class FinishEngine:
    """Finish the engine stream: it sends the rest of its text."""


@dataclass(frozen=True, slots=True)
class Reanchor:
    """Abandon the engine stream and open a new one that first gets `replay`, which begins at sample `base`.

    `replay` consists of samples, or numbers of silent samples. Outputs of the old stream must not be delivered then.
    """

    base: int
    replay: tuple[Samples | int, ...]


@dataclass(frozen=True, slots=True)
class Reopen:
    """The model's options changed: finish the stream, then continue with a new one. Nothing is replayed."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class FollowTurns:
    """Turn detection changed: the engine gets another rule for the end of turns."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Hangup:
    """Close the socket after the events sent before. `cause` is its label in the metrics."""

    code: int
    reason: str
    cause: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A value for the metrics; `name` is one of `MEASURES`."""

    name: str
    value: float


MEASURES = frozenset({"lag_seconds", "final_seconds", "stalls", "engine_failures"})

Effect = Send | Feed | FeedGap | FlushEngine | FinishEngine | Reanchor | Reopen | FollowTurns | Hangup | Measured
