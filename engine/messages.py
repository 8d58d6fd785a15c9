"""All commands and outputs that gateway and engine exchange, as checked msgpack structs.

Commands for streams (`Open`, `Feed`, `Flush`, `Finish` and others) are answered by outputs of streams (`Text`,
`Speech`, `Flushed`, `Closed` and others). Commands for sessions (`SaveHandoff`, `Ask`, `Adopt`, `Renew`, `Claim`,
`DropHandoff`) store a session's state on an engine, so that another gateway can adopt the session; their outputs are
`Wanted`, `Fenced`, `Held`, `Renewed`, `Claimed` and `SessionGiven`. `engine/boundary/codec.py` puts many commands or
outputs into one message and encodes it; the order of the fields is the wire format.

Offsets are positions of the stream and include the silence that a flush inserts. Samples are counted at the model's
rate from the first sample that the client sent. An item has both, so that the engine can convert positions to samples.
"""

from __future__ import annotations

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


# A saved state: numbers, strings and bytes, and lists and dictionaries of these.
Saved = dict[str, Any]


class Message(Struct, array_like=True, gc=False):
    """Base of all messages. Types and bounds of the fields are checked when a message is decoded."""


# Gateway -> engine


class TurnRule(Struct, array_like=True, gc=False, frozen=True):
    """The rule by which a stream's speech track finds speech, and asks the turn detector about pauses."""

    # Speech has at least this probability.
    threshold: Share
    # Speech begins when it has lasted this long, and ends after this much silence.
    min_speech_samples: Count
    silence_samples: Count
    # The turn detector is asked after each of these lengths of silence, in samples, in rising order. `TurnScored` has
    # its answer. Empty: it is never asked.
    questions: tuple[Count, ...] = ()


class Phase(IntEnum):
    """The phases of a speech track (engine/server/speech_track.py)."""

    QUIET = 0
    STARTING = 1
    SPEAKING = 2
    PAUSED = 3


class TrackState(Struct, array_like=True, gc=False, frozen=True):
    """The state of a speech track. A sample is negative if it lies before the first one that this engine was sent."""

    phase: Phase = Phase.QUIET
    # The first sample of the current or last speech, and the first sample of the silence after it.
    start: SignedCount = 0
    fell: SignedCount = 0
    # No speech begins before this sample any more.
    floor: SignedCount = 0
    # The end of the last frame.
    sample: SignedCount = 0
    # How many more times the turn detector is asked in this pause.
    questions: Count = 0

    @property
    def speaking(self) -> bool:
        """There is speech, or the possible start of it."""
        return self.phase is Phase.SPEAKING or self.phase is Phase.STARTING

    def shifted(self, samples: int) -> TrackState:
        """The same state with `samples` added to all sample counts."""
        counts = (self.start, self.fell, self.floor, self.sample)
        start, fell, floor, sample = (count + samples for count in counts)
        return TrackState(self.phase, start, fell, floor, sample, self.questions)


class Open(Message, tag="open"):
    """Start a stream. Live streams are served in the order of arrival; uploads use the time that they leave free."""

    stream: str
    live: bool = True
    # Positions between audio and the token for it; None: the model's default.
    delay_positions: int | None = None
    # Model options such as language or prompt; the runner refuses unknown ones.
    options: dict[str, str] = {}
    # Tokens already emitted for the audio that is about to be replayed. They are used instead of decoded ones, and
    # their text is not emitted again.
    forced_tokens: list[Token] = []
    # Continue from this state instead of from the beginning. `items`: audio before that state which is still needed.
    state: StreamState | None = None
    items: list[Item] = []
    # Audio below this position is late because an engine was lost: it is still computed stride by stride, as if live.
    catch_up_until: int = 0
    # Crash suspect: an engine died while it computed these positions. No step computes two suspects together.
    suspect: tuple[int, int] | None = None
    # The rule for the ends of turns, where text ends too. None: text ends only at a flush.
    turns: TurnRule | None = None
    # The fields from here on are for a stream that is opened again.
    # The sample at which its audio continues, and the sample at which its current segment began.
    sample: Count = 0
    segment: Count = 0
    # Speech probabilities of the audio before this sample were received.
    heard_until: Count = 0
    # Tags of the last flush sent and of the last flush answered.
    flushes: Count = 0
    answered: Count = 0
    # Where the speech track continues, if another stream or engine has judged the audio before.
    track: TrackState | None = None
    # The state (of `Labels`) from which speaker labels continue. Its sample 0 lies `labels_earlier` samples before the
    # first sample of this stream. Labels inside `state` take precedence.
    labels: Saved | None = None
    labels_earlier: int = 0


class Item(Message):
    """Audio for `length` positions from position `offset`; its first own sample is `sample`.

    A gap (declared silence, lost packets) has no key and no payload, only a length: it advances the position, and the
    model reads silence there.
    """

    offset: Count
    length: Count
    sample: Count
    # Hash of the payload's bytes.
    key: bytes = b""
    # float32 PCM with the model's look-back and look-ahead around the item's own samples, or features.
    payload: Any = None
    # Which positions of the payload are used, the others are silence; None: all.
    mask: list[bool] | None = None
    # Number of samples that the item covers: fewer than its positions have if a flush padded it, 0 for silence that a
    # flush inserted, None for those of all its positions.
    samples: Count | None = None
    # Set by the engine: the time of arrival (monotonic, ns), and the number of positions that need a row in the encoder
    # cache.
    arrival: int = 0
    embeds: int = 0
    # Only in transit: index of the item's payload in the batch, None for a gap. Key and payload are left out then, and
    # the receiver fills them in again.
    data: Count | None = None

    def covered_samples(self, samples_per_position: int) -> int:
        """Number of samples of the client's audio that the item covers."""
        return self.length * samples_per_position if self.samples is None else self.samples


class Feed(Message, tag="feed"):
    """Audio for a stream: consecutive items."""

    stream: str
    items: list[Item]


class Flush(Message, tag="flush"):
    """Produce the text of everything fed so far without waiting for more audio; answered by `Flushed`.

    With a `pause`, text is wanted only up to this sample, which lies in silence. A windowed model reads the audio after
    the pause only together with later audio, so the words do not depend on when this message arrives. That holds even
    if speech has begun again, provided that a turn ended at the pause by the stream's rule. A frame-synchronous model
    answers when it has computed enough of the following audio for the last word.
    """

    stream: str
    tag: int
    pause: Count | None = None
    # The client has ended the turn here: speech that continues counts as new speech.
    ends_speech: bool = False
    # The turn before the pause has ended, so the turn detector need not be asked about the pause.
    turn_over: bool = False


class ChangeTurns(Message, tag="turns"):
    """Use another turn rule from the first frame on that ends after the audio sent so far."""

    stream: str
    turns: TurnRule | None


class Finish(Message, tag="finish"):
    """No more audio follows. The stream computes the rest, then answers `Closed`."""

    stream: str


class Abort(Message, tag="abort"):
    """Drop the stream now. Answered by `Closed` without further text."""

    stream: str


# The commands that an engine keeps so that a gateway that adopts the stream can have another engine rebuild it. In
# transit, the payloads of their items are bytes and no arrays.
ReplayCommand = Feed | Flush | ChangeTurns

# The owner number of a session is a fencing token: messages with a lower number than the current one are ignored. It
# rises by this with each new owner. An owner raises it by one whenever it migrates the session to another engine, so a
# former owner never reaches the number of a later one.
NEXT_OWNER = 1 << 32


def same_owner(owner_number: int, other: int) -> bool:
    """Whether two owner numbers of a session belong to the same owner."""
    return owner_number // NEXT_OWNER == other // NEXT_OWNER


class SaveHandoff(Message, tag="save_handoff"):
    """Save the gateway's state of a session on the engine of its stream, so that another gateway can adopt both.

    The state is opaque to the engine: a base, and entries that are appended to it.
    """

    stream: str
    # The session.
    key: str
    # Messages with the number of a former owner are ignored.
    owner_number: Count
    # The saved state includes the first `consumed` outputs of the stream.
    consumed: Count
    entries: list[bytes]
    # Replaces the base and the entries that were saved before.
    base: bytes | None = None
    # Comes with a base: the frames that the client was sent since the last base. The engine keeps the chunks of all
    # bases up to `keep_bytes` bytes, and drops the oldest first.
    chunk: bytes = b""
    keep_bytes: Count = 0
    # How long (seconds) the session waits to be adopted after its owner is lost or has released it.
    keep_s: float = 0.0
    # Stream position minus engine position, and stream sample minus engine sample.
    position_offset: Count = 0
    sample_offset: Count = 0
    # The owner releases the session: another gateway may adopt it.
    last: bool = False


# In `Ask`, `Adopt`, `Renew`, `Claim` and `DropHandoff`, `stream` is empty: it is the first field of every command.


class Ask(Message, tag="ask"):
    """Ask for the owner number of a session on this engine. Answered by `Held` with the same tag; changes nothing."""

    stream: str
    key: str
    tag: Count


class Adopt(Message, tag="adopt"):
    """Adopt this session and its stream, if it still belongs to the owner of `owner_number` (from `Held`).

    Answered by `SessionGiven`; the former owner is sent `Wanted`, then `Fenced`. A request that arrives after another
    gateway has adopted the session is answered with owner number 0 and changes nothing.
    """

    stream: str
    key: str
    owner_number: Count


class Renew(Message, tag="renew"):
    """The client has resumed at the owner itself: the session gets the owner number of a new owner, so that an older
    request to adopt it fails. Answered by `Renewed` with the same tag."""

    stream: str
    key: str
    tag: Count
    owner_number: Count


class Claim(Message, tag="claim"):
    """All sessions that a gateway owns.

    It is the first message on a new connection; a gateway whose event loop was stalled sends it again. The engine
    answers with `Fenced` for each session that has been adopted by another gateway, then with `Claimed` with the same
    tag. A handoff that was waiting here is dropped if its gateway still runs the session.
    """

    stream: str
    tag: Count
    # (key, owner number, whether another engine has the session's handoff now)
    claims: list[tuple[str, Count, bool]]


class DropHandoff(Message, tag="drop_handoff"):
    """The session has ended, or has migrated to another engine: drop its handoff here. Its stream is not affected; an
    Abort ends it."""

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
    """A finished word and the samples it spans."""

    text: str
    start_sample: int
    end_sample: int
    # The word's tokens with their log-probabilities, if the model has them.
    chances: list[TokenLogProbability] = []


class Text(Message, tag="text"):
    """New text of a stream. It is appended to the text so far and does not change it.

    In a long silence a Text with an empty delta is sent now and then, so that `tokens` and `sample` stay current.
    """

    stream: str
    delta: str
    # The words that this delta completed.
    words: list[Word]
    # All tokens since the last Text, with blanks and `SKIPPED`. A replay forces them (`Open.forced_tokens`).
    tokens: list[int]
    # Every sample before this one has been processed.
    sample: int = 0
    # Code of the spoken language, if the model provides it.
    language: str = ""
    # Probability that there is no speech, if the model provides it.
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
    """Speech continues at `sample`, after a pause that was shorter than the rule's silence."""

    sample: int
    at: int


class SpeechEnded(Message, tag="ended"):
    """The silence of the rule has lasted until `sample`; speech itself ended at `speech_end`. Without semantic turn
    detection a turn ends here; with it, this is a pause of at least that length."""

    sample: int
    at: int
    speech_end: int


class TurnScored(Message, tag="scored"):
    """The turn detector's answer to a question about a pause."""

    # The detector was given the audio before this sample.
    sample: int
    at: int
    # The first sample of the pause, and the number of the question in the pause, from 0.
    fell: int
    number: int
    # The probability that the turn is complete; None: there is no answer.
    probability: float | None = None


SpeechEvent = SpeechStarted | SpeechPaused | SpeechResumed | SpeechEnded | TurnScored


class Speech(Message, tag="speech"):
    """The speech in the next frames of a stream."""

    stream: str
    # The first sample of the first frame, and the length of a frame.
    sample: int
    frame_samples: int
    # The speech probability of each frame, for measurements. Only the speech track compares it with thresholds.
    probabilities: list[float]
    events: list[SpeechEvent] = []
    # The state of the speech track after the last frame.
    track: TrackState = TrackState()
    # How many samples of the frames are surely speech.
    spoken: int = 0
    # Whether the model is given no audio at present, because there has been silence for long.
    skipped: bool = False

    @property
    def end(self) -> int:
        """The end of the last frame."""
        return self.sample + self.frame_samples * len(self.probabilities)

    def shift(self, samples: int) -> None:
        """Add `samples` to all sample counts, in place."""
        self.sample += samples
        self.track = self.track.shifted(samples)
        for event in self.events:
            event.sample += samples
            event.at += samples
            if isinstance(event, SpeechEnded):
                event.speech_end += samples
            elif isinstance(event, TurnScored):
                event.fell += samples


# (first sample, end, number of the speaker, confidence from 0 to 1). Enrolled voices have the first numbers, in the
# order in which they were given.
LabelSpan = tuple[int, int, int, float]


class Labels(Message, tag="labels"):
    """Speaker labels: which spans of a stream belong to which speaker."""

    stream: str
    # Consecutive spans after those of the message before. They never change.
    decided: list[LabelSpan]
    # The labels of the speech after them, as they would be decided without more audio. The next message replaces them.
    guess: list[LabelSpan] = []
    # The state from which another engine or stream can continue. Sent now and then, and with a stream's last labels.
    state: Saved | None = None
    # All spans that begin before this sample are decided; 0 if that is not known.
    settled: int = 0
    # The engine continues the stream of another one and has not computed the labels of the speech so far yet.
    is_behind: bool = False


class StreamState(Message, tag="state"):
    """The state of a windowed model's stream. Together with the audio it determines all further text.

    A state is sent with every text: a gateway that has received a text has also received the state after it, and can
    have the stream rebuilt in exactly that state.
    """

    stream: str
    # Audio from this position on is still needed.
    audio_from: int
    # The engine had received all audio before this position, and the flushes up to this tag.
    position: int
    tag: int
    # By component; each part is read only by the component that wrote it.
    parts: dict[str, Saved]


class Opened(Message, tag="opened"):
    """Answers `Open`: the engine has accepted the stream."""

    stream: str


class Flushed(Message, tag="flushed"):
    """Answers `Flush`: the text sent so far covers every sample before `sample`."""

    stream: str
    tag: int
    sample: int
    # A `Revised` that ends at `sample` follows.
    is_revised: bool = False


class Revised(Message, tag="revised"):
    """The result of the second pass for the samples from `start` to `end`."""

    stream: str
    start: int
    end: int
    # They replace the words that were streamed. None: the streamed words stay.
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
    """Another gateway asks for this session: its owner must release it with a last `SaveHandoff`. If the owner's own
    number is higher, it has migrated the session to another engine, and answers `DropHandoff` with this number."""

    key: str
    owner_number: int


class Fenced(Message, tag="fenced"):
    """Another gateway owns this session now. A receiver whose own number of it is not lower ignores this message."""

    key: str
    owner_number: int


class Held(Message, tag="held"):
    """Answers `Ask` for a session's handoff on this engine."""

    key: str
    tag: int
    # 0: this engine does not know the session.
    owner_number: int = 0
    # False: the session cannot be adopted here now. Its owner has reconnected and not saved the handoff again, or the
    # owner may have continued it on another engine.
    whole: bool = True


class Renewed(Message, tag="renewed"):
    """Answers `Renew`: the session's new owner number, or 0 if it belongs to another gateway."""

    tag: int
    owner_number: int


class Claimed(Message, tag="claimed"):
    """Answers `Claim`."""

    tag: int


class SessionGiven(Message, tag="session_given"):
    """Answers `Adopt`: the saved handoff of a session and the state of its stream.

    The stream's outputs that the saved handoff does not include follow at once. Positions and samples are as the engine
    counts them.
    """

    key: str
    # The new owner number; 0: the adoption was refused.
    owner_number: int = 0
    # The former gateway's name for the stream; empty if the session has none.
    stream: str = ""
    # As in `SaveHandoff`.
    base: bytes = b""
    chunks: list[bytes] = []
    entries: list[bytes] = []
    consumed: int = 0
    position_offset: int = 0
    sample_offset: int = 0
    # Position and sample at which the stream's audio ends, and the sample at which its current segment began.
    end: int = 0
    sample: int = 0
    segment: int = 0
    # Tags of the last flush received and of the last flush answered.
    flushes: int = 0
    answered: int = 0
    # Position of the next token.
    token: int = 0
    delay_positions: int | None = None
    options: dict[str, str] = {}
    # Speech probabilities of the audio before this sample are in the handoff.
    heard_until: Count = 0
    turns: TurnRule | None = None
    # The speech track after the frames up to `heard_until`.
    track: TrackState | None = None
    # For a stream that another engine can rebuild (windowed models): its last state, if there is one, and the commands
    # since then with the audio that the state still needs.
    state: StreamState | None = None
    kept: list[ReplayCommand] | None = None
    # The last state of the stream's speaker labels.
    labels: Saved | None = None


# Outputs about a session, not about a stream.
SessionOutput = Wanted | Fenced | Held | Renewed | Claimed | SessionGiven
StreamOutput = Text | Speech | Labels | StreamState | Opened | Flushed | Revised | Closed | Failed | Refused
Output = StreamOutput | Dead | SessionOutput
