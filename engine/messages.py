"""What crosses between gateway and engine, as plain data.

Offsets are positions on the stream's own clock and include the silence that a flush inserts; `sample` says which
audio sample the item starts at, so the engine can turn positions back into audio time. Samples are counted at the
model's rate from the first sample the client sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

# Positions and samples are counted up to here: exact in every number that may carry them, and longer than any session.
LARGEST_COUNT = 2**53 - 1
# In place of the token of a position that was skipped as silence and not computed.
SKIPPED = -1

Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Token = Annotated[int, Meta(ge=SKIPPED, le=LARGEST_COUNT)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Message(Struct, array_like=True, gc=False):
    """Base of everything that crosses. Types and bounds of the fields are checked when a message is decoded."""


# Gateway -> engine


class TurnRule(Struct, array_like=True, gc=False, frozen=True):
    """What ends a turn: so much silence after speech, by the probabilities in `Speech`."""

    threshold: Share
    min_speech_samples: Count
    silence_samples: Count


class Open(Message, tag="open"):
    """Start a stream. `live` frames are served by arrival; a backlog stream gets what live streams leave over."""

    stream: str
    live: bool = True
    delay_positions: int | None = None
    # Model options such as language or prompt; the runner refuses what it does not know.
    options: dict[str, str] = {}
    # Tokens already emitted for the audio that is about to be replayed; they are forced, not sampled or emitted again.
    forced_tokens: list[Token] = []
    # Go on from here instead of from the beginning. `items` is the audio that was heard by then and is still needed.
    state: StreamState | None = None
    items: list[Item] = []
    # Audio below this position waits because an engine was lost: it is heard stride by stride, as it would have been.
    catch_up_until: int = 0
    # An engine died while it computed these positions: no step may hold them together with another suspect's.
    suspect: tuple[int, int] | None = None
    # Text ends where a turn does. None: only where a flush says so.
    turns: TurnRule | None = None


class Item(Message):
    """Prepared audio for `length` positions from `offset`.

    `payload` is float32 PCM with the model's look-back and look-ahead around the item's own samples, and `key` is the
    hash of its bytes. A gap (declared silence, lost packets) has no key and no payload, only its length: it moves the
    clock and carries no embedding. `mask`, where there is one, says which positions of the payload carry one.
    `samples` is how much audio the item covers: less than its positions hold when a flush padded it, nothing for the
    silence a flush inserted; None means all of its positions. The engine sets `arrival` and `embeds` (positions that
    carry an embedding) when the item comes in.
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
    # On the way only: which of the payloads of the batch is this item's; None for a gap. Key and payload are left out
    # then, and filled in again by the receiver.
    data: Count | None = None


class Feed(Message, tag="feed"):
    stream: str
    items: list[Item]


class Flush(Message, tag="flush"):
    """Text for everything fed so far must come out without waiting for more audio; answered by `Flushed`.

    With a `pause`, text is wanted only for what was said before: at this sample nobody spoke. Behind a speech gate,
    audio after it waits for what follows, so words do not depend on when the message comes; where a turn of the
    stream's rule has ended, they do not even if somebody has spoken since. A frame-synchronous model answers when the
    audio that goes on has brought the last word out.
    """

    stream: str
    tag: int
    pause: Count | None = None


class ChangeTurns(Message, tag="turns"):
    """From here on, turns of the stream end by another rule."""

    stream: str
    turns: TurnRule | None


class Finish(Message, tag="finish"):
    """No more audio. The stream runs out, then answers `Closed`."""

    stream: str


class Abort(Message, tag="abort"):
    """Forget the stream now. Answered by `Closed` without further text."""

    stream: str


# By how much a session's number rises with each new owner. An owner raises the number by one whenever it moves the
# session to another engine, so no former owner ever reaches the number of a later one.
NEXT_OWNER = 1 << 32


def same_owner(number: int, other: int) -> bool:
    """Whether two numbers of a session are of the same owner."""
    return number // NEXT_OWNER == other // NEXT_OWNER


class SaveHandoff(Message, tag="save_handoff"):
    """Keep beside a stream what its gateway knows of the session: whoever adopts the session goes on with both.

    All of it is opaque bytes. A `base` begins anew; `entries` go on from it, and together they account for the first
    `consumed` outputs of the stream. Of the `chunks` that came with bases, the newest `keep_bytes` are kept. `number`
    rises with each owner (`NEXT_OWNER`): what a former owner says is not heard. The `last` word gives the session up:
    it waits `keep_s` seconds for a gateway to adopt it, as it does when its owner is lost.
    """

    stream: str
    key: str
    number: Count
    consumed: Count
    entries: list[bytes]
    base: bytes | None = None
    chunk: bytes = b""
    keep_bytes: Count = 0
    keep_s: float = 0.0
    # By how much the engine counts less than the stream itself does.
    position_offset: Count = 0
    sample_offset: Count = 0
    last: bool = False


class Ask(Message, tag="ask"):
    """Which number does this session have here? Answered by `Held` with the same tag; changes nothing."""

    stream: str
    key: str
    tag: Count


class Adopt(Message, tag="adopt"):
    """Give me this session and its stream, if it still belongs to the owner of this number; `Held` said which it is.

    Answered by `Inherited`; a former owner hears `Wanted`, then `Fenced`. A request that comes after another gateway
    has adopted the session is answered with number 0 and changes nothing.
    """

    stream: str
    key: str
    number: Count


class Renew(Message, tag="renew"):
    """The client has come back to the owner itself: the session gets the number of a new owner, so that no request to
    adopt it that is older takes it away. Answered by `Renewed` with the same tag."""

    stream: str
    key: str
    tag: Count
    number: Count


class Claim(Message, tag="claim"):
    """All sessions of a gateway: the key, the number, and whether another engine keeps the value now.

    It is the first word on a new connection, and is said again by a gateway that stood still. The engine answers with
    `Fenced` for each session that belongs to another gateway by now, then with `Claimed` with the same tag. What the
    gateway left here and goes on with is forgotten.
    """

    stream: str
    tag: Count
    claims: list[tuple[str, Count, bool]]


class DropHandoff(Message, tag="drop_handoff"):
    """The session is over: forget what was entrusted. Its stream, if there still is one, is ended by an Abort."""

    stream: str
    key: str
    number: Count


# About a session, not about a stream.
SessionCommand = SaveHandoff | Ask | Adopt | Renew | Claim | DropHandoff
Command = Open | Feed | Flush | ChangeTurns | Finish | Abort | SessionCommand

# A state as plain data: numbers, strings, bytes, lists and dictionaries of them.
Saved = dict[str, Any]

# Engine -> gateway


# A token's bytes, and how likely the model found it.
Chance = tuple[bytes, float]


class Word(Message):
    """A finished word, with the audio samples it spans. `chances` are those of its tokens, if the model tells them."""

    text: str
    start_sample: int
    end_sample: int
    chances: list[Chance] = []


class Text(Message, tag="text"):
    """New text of a stream; append-only, never revised. `words` are those this delta completed.

    `tokens` are all tokens since the last Text, with blanks and `CUT`: what a replay must force. Every sample before
    `sample` has been heard. In a long silence a Text with an empty delta comes now and then, so that both stay fresh.
    If the model tells: `language` is the code of what is spoken, `no_speech` how likely it found that nobody speaks.
    """

    stream: str
    delta: str
    words: list[Word]
    tokens: list[int]
    sample: int = 0
    language: str = ""
    no_speech: float | None = None


class Speech(Message, tag="speech"):
    """Speech probabilities, one per detector frame, the first starting at `sample`."""

    stream: str
    sample: int
    frame_samples: int
    probabilities: list[float]


class StreamState(Message, tag="state"):
    """All that decides what a stream of a windowed model says from here on, apart from its audio.

    A state goes out with every text: a gateway that has received a text has also received the state after it, and can
    have the stream rebuilt in exactly that state. Audio from position `audio_from` on is still needed; the engine has
    received all audio before `position`, and the flushes up to `tag`. Each of `parts` is read only by what wrote it.
    """

    stream: str
    audio_from: int
    position: int
    tag: int
    parts: dict[str, Saved]


class Opened(Message, tag="opened"):
    stream: str


class Flushed(Message, tag="flushed"):
    """Every sample before `sample` is in the text sent so far."""

    stream: str
    tag: int
    sample: int


class Closed(Message, tag="closed"):
    stream: str
    sample: int


class Failed(Message, tag="failed"):
    """The stream ended with an error. `code` is the class of the error; `message` is safe to show."""

    stream: str
    code: str
    message: str


class Refused(Message, tag="refused"):
    """A command was refused and changed nothing: the stream, if there is one, goes on."""

    stream: str
    code: str
    message: str


class Dead(Message, tag="dead"):
    """The engine stopped; sent once, last."""

    message: str


class Wanted(Message, tag="wanted"):
    """Another gateway asks for this session: its owner is to give it up with a last `Entrust`. An owner with a higher
    number has moved it to another engine, and answers with a `Disown` of this number."""

    key: str
    number: int


class Fenced(Message, tag="fenced"):
    """This session belongs to another gateway now, if the receiver has a lower number of it."""

    key: str
    number: int


class Held(Message, tag="held"):
    """Answers `Ask`: the number of the session here, 0 if there is none. It is not `whole` while its owner has come
    back and has yet to leave the value."""

    key: str
    tag: int
    number: int = 0
    whole: bool = True


class Renewed(Message, tag="renewed"):
    """Answers `Renew`: the number from now on; 0 if the session is another's."""

    tag: int
    number: int


class Claimed(Message, tag="claimed"):
    """Answers `Claim`."""

    tag: int


class SessionGiven(Message, tag="session_given"):
    """What was entrusted with a session, and where its stream stands; `number` is 0 if it cannot be adopted.

    The outputs that the entries do not account for follow at once. `end` and `sample` are where the stream's audio
    ends, `segment` where its current segment began, `flushes` and `answered` the last tags that came and were answered,
    `token` the position of the next token: all on the engine's count. `stream` is empty if there was none.
    """

    key: str
    number: int = 0
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


# About a session, not about a stream.
SessionOutput = Wanted | Fenced | Held | Renewed | Claimed | SessionGiven
Output = Text | Speech | StreamState | Opened | Flushed | Closed | Failed | Refused | Dead | SessionOutput


@dataclass(slots=True)
class StepOutput:
    """Everything one step has to say, for all streams: one message per step."""

    step: int
    outputs: list[Output]
