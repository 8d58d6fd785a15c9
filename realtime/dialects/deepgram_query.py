"""What Deepgram's clients ask for in their URL, for sockets and for files.

What is not served changes nothing and is not repeated as if it did. Two wishes are refused instead: a client that wants
secrets taken out of the text, or the answer sent elsewhere, must not believe that it got that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realtime.errors import Refusal
from realtime.numbers import decimal_number, whole_number
from realtime.session.settings import G711_RATE, MAX_RATE, MIN_RATE, AudioFormat, Settings, TurnDetection

# Clients ask for tiny values out of habit; a pause this short inside a sentence is not an end.
MIN_ENDPOINTING_MS = 300
NO_ENDPOINTING_MS = 60_000
# Deepgram takes no shorter ones: words may come later than that.
MIN_UTTERANCE_END_MS = 1000
MAX_UTTERANCE_END_MS = 60_000
# Longest pauses that a client may name; what is longer than the server waits becomes the longest that it waits.
MAX_PAUSE_MS = 3_600_000
MAX_PAUSE_S = 3600.0
DEFAULT_UTTERANCE_SPLIT_S = 0.8
# Which boosts are taken is asked where the keywords come into force.
MAX_BOOST = 1000.0
RAW = {"linear16": "audio/pcm", "mulaw": "audio/pcmu", "alaw": "audio/pcma"}
CONTAINERS = ("", "flac", "ogg-opus")
# Each channel is a stream of its own.
MAX_CHANNELS = 8
# Longest names.
MAX_NAME = 256
REFUSED = {
    "redact": "Nothing is redacted here; leave 'redact' out.",
    "callback": "Answers are not sent elsewhere; leave 'callback' out and read the answer.",
}
# What is read of the query; all of it has one value.
READ_ONCE = (
    "encoding",
    "sample_rate",
    "channels",
    "multichannel",
    "model",
    "language",
    "endpointing",
    "interim_results",
    "vad_events",
    "utterance_end_ms",
    "punctuate",
    "smart_format",
    "utterances",
    "utt_split",
)


@dataclass(frozen=True, slots=True)
class ListenQuery:
    """A socket: the settings of each channel's session, and how results are to look."""

    settings: Settings
    channels: int
    punctuate: bool
    interim_results: bool
    vad_events: bool
    # Pauses end a turn with `speech_final`.
    endpoints: bool


@dataclass(frozen=True, slots=True)
class FileQuery:
    """A file: how to read and what to answer."""

    # None: the file says itself what it is.
    format: AudioFormat | None
    settings: Settings
    punctuate: bool
    utterances: bool
    # A pause of so many seconds begins another utterance.
    split_s: float


# What a query says, one by one; some names come several times.
Pairs = Sequence[tuple[str, str]]


def read_socket_query(query: Mapping[str, str], pairs: Pairs = ()) -> ListenQuery:
    """Raises Refusal for audio that cannot be read and for what must not be left out in silence."""
    _check(query, pairs)
    channels = _channels(query)
    interim_results, utterance_end_ms = _is_true(query, "interim_results"), _utterance_end(query)
    settings = Settings(
        format=_raw_format(query) or AudioFormat("audio/webm", 48_000, binary=True),
        model=query.get("model") or None,
        language=query.get("language") or None,
        keywords=_keywords(pairs),
        turn_detection=TurnDetection(silence_duration_ms=_endpointing(query)),
        turns_chosen=True,
        minimum_commit_ms=0,
        # Deepgram finds the gap in its interim results, so without them there is none to tell of.
        utterance_end_ms=utterance_end_ms if interim_results else None,
    )
    return ListenQuery(
        settings,
        channels,
        _punctuate(query),
        interim_results,
        _is_true(query, "vad_events"),
        endpoints=query.get("endpointing", "").lower() != "false",
    )


def read_file_query(query: Mapping[str, str], pairs: Pairs = ()) -> FileQuery:
    """The same for a file."""
    _check(query, pairs)
    if _is_true(query, "multichannel") or query.get("channels", "1") != "1":
        raise refused("multichannel", "The channels of a file are mixed to one; leave 'multichannel' out.")
    settings = Settings(language=query.get("language") or None, keywords=_keywords(pairs))
    utterances = _is_true(query, "utterances")
    return FileQuery(_raw_format(query), settings, _punctuate(query), utterances, _utterance_split(query))


def refused(param: str, message: str) -> Refusal:
    return Refusal(400, "invalid_query_parameter", message, param=param)


def _whole(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    if name not in query:
        return default
    try:
        return whole_number(name, query[name], low, high)
    except ValueError as error:
        raise refused(name, str(error)) from None


def _check(query: Mapping[str, str], pairs: Pairs) -> None:
    for name, value in (*query.items(), *pairs):
        if name in REFUSED and value != "false":
            raise refused(name, REFUSED[name])
    for name in ("model", "language"):
        if len(query.get(name, "")) > MAX_NAME:
            raise refused(name, f"'{name}' must have at most {MAX_NAME} characters.")


def _keywords(pairs: Pairs) -> tuple[tuple[str, float], ...]:
    """`keyterm=word`, and the older `keywords=word:boost`; each may come often."""
    words = []
    for name, value in pairs:
        if name == "keyterm":
            words.append((value, 1.0))
        elif name == "keywords":
            word, colon, boost = value.rpartition(":")
            try:
                words.append((word, decimal_number("boost", boost, -MAX_BOOST, MAX_BOOST)) if colon else (value, 1.0))
            except ValueError:
                text = f"'{value[:40]}' is not a word with a boost; write it as 'word:2'."
                raise refused("keywords", text) from None
    return tuple(words)


def _is_true(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() == "true"


def _punctuate(query: Mapping[str, str]) -> bool:
    return _is_true(query, "punctuate") or _is_true(query, "smart_format")


def _channels(query: Mapping[str, str]) -> int:
    channels = _whole(query, "channels", 1, 1, MAX_CHANNELS)
    if not _is_true(query, "multichannel"):
        if channels != 1:
            raise refused("channels", "More than one of 'channels' needs 'multichannel=true'; or mix them down.")
        return 1
    if query.get("encoding", "") in CONTAINERS:
        raise refused("multichannel", "For 'multichannel' send raw samples, and say 'encoding' and 'channels'.")
    return channels


def _raw_format(query: Mapping[str, str]) -> AudioFormat | None:
    encoding = query.get("encoding", "")
    if encoding in CONTAINERS:
        return None
    if encoding not in RAW:
        known = ", ".join(RAW)
        raise refused(
            "encoding", f"'{encoding[:40]}' is not supported; send {known}, or a container without 'encoding'."
        )
    rate = _whole(query, "sample_rate", 16_000 if encoding == "linear16" else G711_RATE, MIN_RATE, MAX_RATE)
    return AudioFormat(RAW[encoding], rate if encoding == "linear16" else G711_RATE, binary=True)


def _endpointing(query: Mapping[str, str]) -> int:
    """The pause that ends a turn: false, true for the usual one, or milliseconds."""
    match query.get("endpointing", "").lower():
        case "false":
            return NO_ENDPOINTING_MS
        case "" | "true":
            return MIN_ENDPOINTING_MS
    given = _whole(query, "endpointing", MIN_ENDPOINTING_MS, 0, MAX_PAUSE_MS)
    return max(MIN_ENDPOINTING_MS, min(given, NO_ENDPOINTING_MS))


def _utterance_end(query: Mapping[str, str]) -> int | None:
    if query.get("utterance_end_ms", "").lower() in ("", "false"):
        return None
    given = _whole(query, "utterance_end_ms", MIN_UTTERANCE_END_MS, 0, MAX_PAUSE_MS)
    return max(MIN_UTTERANCE_END_MS, min(given, MAX_UTTERANCE_END_MS))


def _utterance_split(query: Mapping[str, str]) -> float:
    if "utt_split" not in query:
        return DEFAULT_UTTERANCE_SPLIT_S
    try:
        return decimal_number("utt_split", query["utt_split"], 0, MAX_PAUSE_S)
    except ValueError as error:
        raise refused("utt_split", str(error)) from None
