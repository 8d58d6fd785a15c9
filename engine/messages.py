"""All commands and outputs that gateway and engine exchange, as checked msgpack structs.

Commands for streams (`Open`, `Feed`, `Flush`, `Finish` and others) are answered by outputs of streams (`Text`,
`Speech`, `Flushed`, `Closed` and others). Commands for sessions (`SaveHandoff`, `Ask`, `Adopt`, `Renew`, `Claim`,
`DropHandoff`) store a session's state on an engine and let another gateway take it. `engine/boundary/codec.py` puts
many of them into one message and encodes it; the order of fields is the wire format.

Offsets are positions of the stream and include the silence that a flush inserts. `sample` is the audio sample at which
an item starts, so that the engine can turn positions back into audio time. Samples are counted at the model's rate from
the first sample that the client sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

# Largest position or sample count: exact in a float64, and longer than any session.
LARGEST_COUNT = 2**53 - 1
# Stands for the token of a position that was skipped as silence and not computed.
SKIPPED = -1

Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
SignedCount = Annotated[int, Meta(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Token = Annotated[int, Meta(ge=SKIPPED, le=LARGEST_COUNT)]
Share = Annotated[float, Meta(gt=0, le=1)]


# A saved state: numbers, strings, bytes, and lists and dictionaries of them.
Saved = dict[str, Any]


class Message(Struct, array_like=True, gc=False):
    """Base of all messages. Types and bounds of the fields are checked when a message is decoded."""


# Gateway -> engine


class TurnRule(Struct, array_like=True, gc=False, frozen=True):
    """The rule of a stream's speech track: speech has at least this probability and this length, and ends after
    `silence_samples` of silence. The turn detector is asked after each of `questions`, samples of silence in rising
    order, and answers with `TurnScored`; without any it is never asked."""

    threshold: Share
    min_speech_samples: Count
    silence_samples: Count
    questions: tuple[Count, ...] = ()


class Phase(IntEnum):
    """The phases of a speech track (engine/server/speech_track.py)."""

    QUIET = 0
    STARTING = 1
    SPEAKING = 2
    PAUSED = 3


class TrackState(Struct, array_like=True, gc=False, frozen=True):
    """The state of a speech track after the frame that ends at `sample`: its phase, where the current or last speech
    began and fell (the first sample of the silence after it), the sample before which no speech begins any more, and
    how many more times the turn detector is asked in this pause. A sample is negative if it lies before the first one
    that this engine was sent."""

    phase: Phase = Phase.QUIET
    start: SignedCount = 0
    fell: SignedCount = 0
    floor: SignedCount = 0
    sample: SignedCount = 0
    questions: Count = 0

    @property
    def speaking(self) -> bool:
        """There is speech, or the possible start of it."""
        return self.phase is Phase.SPEAKING or self.phase is Phase.STARTING

    def later(self, samples: int) -> TrackState:
        """The same state, counted from a point `samples` samples earlier."""
        places = (self.start, self.fell, self.floor, self.sample)
        start, fell, floor, sample = (place + samples for place in places)
        return TrackState(self.phase, start, fell, floor, sample, self.questions)


class Open(Message, tag="open"):
    """Start a stream. Live streams are served in the order of arrival; uploads use the time that they leave free."""

    stream: str
    live: bool = True
    delay_positions: int | None = None
    # Model options such as language or prompt; the runner refuses unknown ones.
    options: dict[str, str] = {}
    # Tokens already emitted for the audio that is about to be replayed; they are forced, not sampled or emitted again.
    forced_tokens: list[Token] = []
    # Continue from this state instead of from the beginning. `items`: audio before that state which is still needed.
    state: StreamState | None = None
    items: list[Item] = []
    # Audio below this position is late because an engine was lost: it is still processed stride by stride, as if live.
    catch_up_until: int = 0
    # Crash suspect: an engine died while it computed these positions. No step computes two suspects together.
    suspect: tuple[int, int] | None = None
    # The rule for the ends of turns, where text ends too. None: text ends only at a flush.
    turns: TurnRule | None = None
    # Of a stream that is reopened: the sample at which its audio continues, the one at which its segment began, and the
    # one up to which speech probabilities were received; tags of the last flush sent and of the last one answered.
    sample: Count = 0
    segment: Count = 0
    heard_until: Count = 0
    flushes: Count = 0
    answered: Count = 0
    # The speech track after frames that another stream or engine has judged.
    track: TrackState | None = None
    # Speaker labels go on from this state (of `Labels`), whose samples are counted from `labels_earlier` samples before
    # the first one of this stream. A `state` with labels of its own goes first.
    labels: Saved | None = None
    labels_earlier: int = 0


class Item(Message):
    """Prepared audio for `length` positions from `offset`.

    `payload` is float32 PCM with the model's look-back and look-ahead around the item's own samples, and `key` is the
    hash of its bytes. A gap (declared silence, lost packets) has no key and no payload, only a length: it advances the
    position and has no embedding. `mask`, if set, says which positions of the payload have an embedding. `samples` is
    the number of samples the item covers: fewer than its positions hold if a flush padded it, 0 for silence that a
    flush inserted, None for all of its positions. The engine sets `arrival` and `embeds` (number of positions with an
    embedding) when it receives the item.
    """

    offset: Count
    length: Count
    sample: Count
    key: bytes = b""
    payload: Any = None
    mask: list[bool] | None = None
    samples: Count | None = None
    arrival: int = 0
    embeds: int = 0
    # Only in transit: index of the item's payload in the batch, None for a gap. Key and payload are left out then, and
    # the receiver fills them in again.
    data: Count | None = None

    def covered_samples(self, samples_per_position: int) -> int:
        """Number of samples of the client's audio that the item covers."""
        return self.length * samples_per_position if self.samples is None else self.samples


class Feed(Message, tag="feed"):
    """Audio for a stream: items that follow each other."""

    stream: str
    items: list[Item]


class Flush(Message, tag="flush"):
    """Produce the text of everything fed so far without waiting for more audio; answered by `Flushed`.

    With a `pause`, text is wanted only up to this sample, which lies in silence. Where a speech gate decides which
    audio the model reads (windowed models), audio after the pause is read together with later audio only, so the words
    do not depend on when the message arrives. If a turn of the stream's
    rule ended at the pause, they do not depend on it even if speech has begun again. A frame-synchronous model answers
    when the following audio has brought the last word out. `ends_speech`: the client ended the turn here, so that
    speech which goes on begins anew. `turn_over`: the turn before the pause has ended, so that the turn detector need
    not be asked about it.
    """

    stream: str
    tag: int
    pause: Count | None = None
    ends_speech: bool = False
    turn_over: bool = False


class ChangeTurns(Message, tag="turns"):
    """Use another rule from here on: for the first frame that ends after the audio so far, and all later ones."""

    stream: str
    turns: TurnRule | None


class Finish(Message, tag="finish"):
    """No more audio follows. The stream computes the rest, then answers `Closed`."""

    stream: str


class Abort(Message, tag="abort"):
    """Drop the stream now. Answered by `Closed` without further text."""

    stream: str


# Commands from which a gateway that adopts a stream can have it rebuilt. Their payloads are bytes.
KeptCommand = Feed | Flush | ChangeTurns

# A session's number rises by this with each new owner. An owner raises the number by one whenever it migrates the
# session to another engine, so a former owner never reaches the number of a later one.
NEXT_OWNER = 1 << 32


def same_owner(number: int, other: int) -> bool:
    """Whether two numbers of a session are of the same owner."""
    return number // NEXT_OWNER == other // NEXT_OWNER


class SaveHandoff(Message, tag="save_handoff"):
    """Store the gateway's state of a session beside its stream, so that another gateway can adopt both.

    The state is opaque bytes. A `base` replaces what was saved before; `entries` are appended to it. Together they
    cover the first `consumed` outputs of the stream. Of the chunks that came with bases, the newest `keep_bytes` bytes
    are kept. `owner_number` rises with each owner (`NEXT_OWNER`); messages of a former owner are ignored. `last` gives
    the session up: it waits `keep_s` seconds for a gateway to adopt it, as it does when its owner is lost.
    """

    stream: str
    key: str
    owner_number: Count
    consumed: Count
    entries: list[bytes]
    base: bytes | None = None
    chunk: bytes = b""
    keep_bytes: Count = 0
    keep_s: float = 0.0
    # Stream position minus engine position, and stream sample minus engine sample.
    position_offset: Count = 0
    sample_offset: Count = 0
    last: bool = False


class Ask(Message, tag="ask"):
    """Ask for the owner number that a session has on this engine. Answered by `Held` with the same tag; changes
    nothing."""

    stream: str
    key: str
    tag: Count


class Adopt(Message, tag="adopt"):
    """Adopt this session and its stream, if it still belongs to the owner of `owner_number` (taken from `Held`).

    Answered by `SessionGiven`; the former owner is sent `Wanted`, then `Fenced`. A request that arrives after another
    gateway has adopted the session is answered with number 0 and changes nothing.
    """

    stream: str
    key: str
    owner_number: Count


class Renew(Message, tag="renew"):
    """The client has resumed at the owner itself: the session gets the number of a new owner, so that an older request
    to adopt it fails. Answered by `Renewed` with the same tag."""

    stream: str
    key: str
    tag: Count
    owner_number: Count


class Claim(Message, tag="claim"):
    """All sessions of a gateway: the key, the number, and whether another engine holds the handoff now.

    It is the first message on a new connection; a gateway whose event loop was stalled sends it again. The engine
    answers with `Fenced` for each session that has been adopted by another gateway, then with `Claimed` with the same
    tag. A handoff that was waiting here is dropped if its gateway still runs the session.
    """

    stream: str
    tag: Count
    claims: list[tuple[str, Count, bool]]


class DropHandoff(Message, tag="drop_handoff"):
    """The session is over: drop its handoff. An Abort ends its stream, if there still is one."""

    stream: str
    key: str
    owner_number: Count


# Commands about a session, not about a stream.
SessionCommand = SaveHandoff | Ask | Adopt | Renew | Claim | DropHandoff
Command = Open | Feed | Flush | ChangeTurns | Finish | Abort | SessionCommand

# Engine -> gateway


# The bytes of a token, and the natural logarithm of its probability.
TokenLogProbability = tuple[bytes, float]


class Word(Message):
    """A finished word and the samples it spans. `chances`: its tokens' log-probabilities, if the model has them."""

    text: str
    start_sample: int
    end_sample: int
    chances: list[TokenLogProbability] = []


class Text(Message, tag="text"):
    """New text of a stream; append-only, never revised. `words` are the words that this delta completed.

    `tokens` are all tokens since the last Text, with blanks and `SKIPPED`: a replay forces them. Every sample before
    `sample` has been processed. In a long silence a Text with an empty delta is sent now and then, so that both stay
    current. If the model provides them: `language` is the code of the spoken language, `no_speech` the probability
    that there is no speech.
    """

    stream: str
    delta: str
    words: list[Word]
    tokens: list[int]
    sample: int = 0
    language: str = ""
    no_speech: float | None = None


class SpeechStarted(Message, tag="started"):
    """Speech began at `sample`, and has lasted for the shortest speech of the rule. In all events of speech, `at` is
    the end of the frame in which it was detected."""

    sample: int
    at: int


class SpeechPaused(Message, tag="paused"):
    """Speech stopped at `sample`; it may resume."""

    sample: int
    at: int


class SpeechResumed(Message, tag="resumed"):
    """Speech goes on at `sample`, after a pause that was shorter than the rule's silence."""

    sample: int
    at: int


class SpeechEnded(Message, tag="ended"):
    """The silence of the rule has lasted until `sample`; speech itself ended at `speech_end`. Without semantic turn
    detection a turn ends here; with it, this is a pause of at least that length."""

    sample: int
    at: int
    speech_end: int


class TurnScored(Message, tag="scored"):
    """The turn detector's answer to question `number` (from 0) in the pause that began at `fell`: the probability that
    the turn is complete, by the audio before `sample`. None: there is no answer."""

    sample: int
    at: int
    fell: int
    number: int
    probability: float | None = None


SpeechEvent = SpeechStarted | SpeechPaused | SpeechResumed | SpeechEnded | TurnScored


class Speech(Message, tag="speech"):
    """The speech in the next frames of a stream; the first frame starts at `sample`. The message has the events of
    speech, the state of the speech track after the last frame, and how many samples are surely speech (`spoken`).

    `probabilities`, one for each frame, are for measurements. Only the speech track compares them with thresholds.
    """

    stream: str
    sample: int
    frame_samples: int
    probabilities: list[float]
    events: list[SpeechEvent] = []
    track: TrackState = TrackState()
    spoken: int = 0

    @property
    def end(self) -> int:
        return self.sample + self.frame_samples * len(self.probabilities)

    def later(self, samples: int) -> None:
        """Count all samples from a point `samples` samples earlier, in place."""
        self.sample += samples
        self.track = self.track.later(samples)
        for event in self.events:
            event.sample += samples
            event.at += samples
            if isinstance(event, SpeechEnded):
                event.speech_end += samples
            elif isinstance(event, TurnScored):
                event.fell += samples


# Samples from start to end, the number of the speaker, and how sure that is (0 to 1).
LabelSpan = tuple[int, int, int, float]


class Labels(Message, tag="labels"):
    """Who speaks. `decided` never changes; its spans follow each other. `guess` is about the speech after them, as it
    would be decided without more audio; the next message replaces it. Enrolled voices have the first numbers, in order.

    `state` comes now and then, and with the last labels of a stream: another engine or stream can go on from it. All
    spans that begin before the sample `settled` are decided; 0 if that is not known. `is_behind`: the engine goes on
    with the stream of another one and has not computed the labels of its speech yet."""

    stream: str
    decided: list[LabelSpan]
    guess: list[LabelSpan] = []
    state: Saved | None = None
    settled: int = 0
    is_behind: bool = False


class StreamState(Message, tag="state"):
    """The state of a stream of a windowed model: with the audio, it determines all further text.

    A state is sent with every text: a gateway that has received a text has also received the state after it, and can
    have the stream rebuilt in exactly that state. Audio from position `audio_from` on is still needed; the engine has
    received all audio before `position`, and the flushes up to `tag`. Each of `parts` is read only by the component
    that wrote it.
    """

    stream: str
    audio_from: int
    position: int
    tag: int
    parts: dict[str, Saved]


class Opened(Message, tag="opened"):
    """Answers `Open`: the engine has accepted the stream."""

    stream: str


class Flushed(Message, tag="flushed"):
    """Answers `Flush`: the text sent so far covers every sample before `sample`. `is_revised`: a `Revised` that ends
    there follows."""

    stream: str
    tag: int
    sample: int
    is_revised: bool = False


class Revised(Message, tag="revised"):
    """Better words for the samples from `start` to `end`, in place of the streamed ones. None: those stay."""

    stream: str
    start: int
    end: int
    words: list[Word] | None


class Closed(Message, tag="closed"):
    """The last output of a stream that was finished or aborted. `sample` is the end of its audio."""

    stream: str
    sample: int


class Failed(Message, tag="failed"):
    """The stream ended with an error. `code` is the name of the error's class; `message` may be shown to the client."""

    stream: str
    code: str
    message: str


class Refused(Message, tag="refused"):
    """A command was refused and changed nothing; the stream, if there is one, continues."""

    stream: str
    code: str
    message: str


class Dead(Message, tag="dead"):
    """The engine has stopped. This is its last message."""

    message: str


class Wanted(Message, tag="wanted"):
    """Another gateway asks for this session: its owner must give it up with a last `SaveHandoff`. An owner with a
    higher number has migrated it to another engine, and answers with a `DropHandoff` of this number."""

    key: str
    owner_number: int


class Fenced(Message, tag="fenced"):
    """This session belongs to another gateway now, if the receiver's number of it is lower."""

    key: str
    owner_number: int


class Held(Message, tag="held"):
    """Answers `Ask`: the number of the session here, 0 if there is none. `whole` is False while the owner has
    reconnected but has not saved the handoff again."""

    key: str
    tag: int
    owner_number: int = 0
    whole: bool = True


class Renewed(Message, tag="renewed"):
    """Answers `Renew`: the session's new number, or 0 if it belongs to another gateway."""

    tag: int
    owner_number: int


class Claimed(Message, tag="claimed"):
    """Answers `Claim`."""

    tag: int


class SessionGiven(Message, tag="session_given"):
    """Answers `Adopt`: the saved handoff of a session and the state of its stream; `owner_number` is 0 if it was
    refused.

    The outputs that the entries do not cover follow at once. `end` (position) and `sample` are where the stream's audio
    ends, `segment` the sample where its current segment began, `flushes` and `answered` the tags of the last flush
    received and answered, `token` the position of the next token: all as the engine counts. `stream` is empty if there
    is none. Speech probabilities up to sample `heard_until` are in the entries.

    If another engine can rebuild the stream (windowed models), `kept` has what it needs: the commands since the last
    `state`, or all of them if there is no state, and the audio before that state which is still needed.
    """

    key: str
    owner_number: int = 0
    stream: str = ""
    base: bytes = b""
    chunks: list[bytes] = []
    entries: list[bytes] = []
    consumed: int = 0
    position_offset: int = 0
    sample_offset: int = 0
    end: int = 0
    sample: int = 0
    segment: int = 0
    flushes: int = 0
    answered: int = 0
    token: int = 0
    delay_positions: int | None = None
    options: dict[str, str] = {}
    heard_until: Count = 0
    turns: TurnRule | None = None
    # The speech track after the frames up to `heard_until`.
    track: TrackState | None = None
    state: StreamState | None = None
    kept: list[KeptCommand] | None = None
    # The last state of the stream's speaker labels.
    labels: Saved | None = None


# Outputs about a session, not about a stream.
SessionOutput = Wanted | Fenced | Held | Renewed | Claimed | SessionGiven
StreamOutput = Text | Speech | Labels | StreamState | Opened | Flushed | Revised | Closed | Failed | Refused
Output = StreamOutput | Dead | SessionOutput


@dataclass(slots=True)
class StepOutput:
    """The outputs of one step, for all streams."""

    step: int
    outputs: list[Output]
