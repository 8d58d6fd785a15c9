"""The query parameters of Deepgram's API: `/v1/listen` on sockets (`read_socket_query`) and files (`read_file_query`).

Used by the routes of sockets and files, and by the dialects of Flux and Twilio, whose options have the same names.
Unsupported parameters have no effect and are not echoed. Only `callback` and unknown kinds of `redact` are refused,
because a client must not believe that its text was redacted or sent to another address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realtime.errors import Refusal
from realtime.session.formatting_options import Formatting, make_formatting
from realtime.session.settings import (
    G711_RATE,
    MAX_RATE,
    MAX_URL_CHARACTERS,
    MIN_RATE,
    NAME_RULE,
    PUBLISHED_NAME,
    AudioFormat,
    Settings,
    TurnDetection,
    text_language,
)
from realtime.text_values import decimal_number, whole_number

# Clients often send tiny values, but a shorter pause occurs within sentences.
MIN_ENDPOINTING_MS = 300
# With `endpointing=false` turns practically never end.
NO_ENDPOINTING_MS = 60_000
# Words may arrive this late. Deepgram has the same minimum.
MIN_UTTERANCE_END_MS = 1000
MAX_UTTERANCE_END_MS = 60_000
# Longest valid pauses; a value above the server's own maximum is reduced to it.
MAX_PAUSE_MS = 3_600_000
MAX_PAUSE_S = 3600.0
DEFAULT_UTTERANCE_SPLIT_S = 0.8
# Bound for parsing; `Settings.in_force` checks the allowed boosts.
MAX_BOOST = 1000.0
RAW = {"linear16": "audio/pcm", "mulaw": "audio/pcmu", "alaw": "audio/pcma"}
CONTAINERS = ("", "flac", "ogg-opus")
# Each channel has its own engine stream.
MAX_CHANNELS = 8
# Longest names in characters.
MAX_NAME = 256
REFUSED = {
    "callback": "The server does not send results to a callback; leave 'callback' out and read the response.",
}
# Values of `redact`, with the kinds of text that they mean here. A name is `name:Ada Lovelace`.
REDACTIONS = {
    "pci": "card",
    "credit_card": "card",
    "card": "card",
    "ssn": "ssn",
    "numbers": "numbers",
    "true": "numbers",
    "phone_number": "phone",
    "phone": "phone",
    "email_address": "email",
    "email": "email",
}
# Parameters that may appear only once.
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
    "numerals",
    "profanity_filter",
    "paragraphs",
    "diarize",
    "utterances",
    "utt_split",
    "publish",
    "on_final",
)


@dataclass(frozen=True, slots=True)
class ListenQuery:
    """The options of a socket: the settings of each channel's session, and the format of results."""

    settings: Settings
    channels: int
    punctuate: bool
    interim_results: bool
    vad_events: bool
    # Whether a turn that ends at a pause is reported with `speech_final`.
    endpoints: bool


@dataclass(frozen=True, slots=True)
class FileQuery:
    """The options of a file."""

    # None for a container, which has its own format.
    format: AudioFormat | None
    settings: Settings
    punctuate: bool
    utterances: bool
    # Seconds of pause between two utterances.
    split_s: float


# All (name, value) pairs of a query, with repeated names.
Pairs = Sequence[tuple[str, str]]


def published_name(query: Mapping[str, str], channels: int = 1) -> str | None:
    """The name under which the session is published (an extension of Deepgram's API). Raises Refusal."""
    name = query.get("publish")
    if name is None:
        return None
    if not PUBLISHED_NAME.fullmatch(name):
        raise refused("publish", f"'publish' must be a name. {NAME_RULE}")
    if channels > 1:
        raise refused("publish", "Only a session with one channel can be published.")
    return name


def webhook_url(query: Mapping[str, str]) -> str | None:
    """The URL that gets the session's finals (an extension of Deepgram's API). Raises Refusal."""
    url = query.get("on_final")
    if url is not None and not 0 < len(url) <= MAX_URL_CHARACTERS:
        raise refused("on_final", f"'on_final' must be a URL of at most {MAX_URL_CHARACTERS} characters.")
    return url


def read_socket_query(query: Mapping[str, str], pairs: Pairs = ()) -> ListenQuery:
    """The options of a socket. Raises Refusal for unsupported audio and for options that must not be ignored."""
    check_query(query, pairs)
    channels = _channels(query)
    interim_results, utterance_end_ms = _is_true(query, "interim_results"), _utterance_end(query)
    settings = Settings(
        format=raw_format(query) or AudioFormat("audio/webm", 48_000, binary=True),
        model=query.get("model") or None,
        language=query.get("language") or None,
        keywords=_keywords(pairs),
        turn_detection=TurnDetection(silence_duration_ms=_endpointing(query)),
        turns_chosen=True,
        minimum_commit_ms=0,
        # Deepgram finds utterance ends in interim results, so without them it reports none.
        utterance_end_ms=utterance_end_ms if interim_results else None,
        speakers=_is_true(query, "diarize"),
        publish=published_name(query, channels),
        on_final=webhook_url(query),
        formatting=_formatting(query, pairs),
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
    """The options of a file. Raises Refusal."""
    check_query(query, pairs)
    if _is_true(query, "multichannel") or query.get("channels", "1") != "1":
        raise refused("multichannel", "The channels of a file are mixed to one; leave 'multichannel' out.")
    settings = Settings(
        language=query.get("language") or None,
        keywords=_keywords(pairs),
        speakers=_is_true(query, "diarize"),
        formatting=_formatting(query, pairs),
    )
    utterances = _is_true(query, "utterances")
    return FileQuery(raw_format(query), settings, _punctuate(query), utterances, _utterance_split(query))


def refused(param: str, message: str) -> Refusal:
    return Refusal(400, "invalid_query_parameter", message, param=param)


def _whole(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    if name not in query:
        return default
    try:
        return whole_number(name, query[name], low, high)
    except ValueError as error:
        raise refused(name, str(error)) from None


def check_query(query: Mapping[str, str], pairs: Pairs) -> None:
    """Raises Refusal for options that must not be ignored and for names that are too long."""
    for name, value in (*query.items(), *pairs):
        if name in REFUSED and value != "false":
            raise refused(name, REFUSED[name])
    for name in ("model", "language"):
        if len(query.get(name, "")) > MAX_NAME:
            raise refused(name, f"'{name}' must have at most {MAX_NAME} characters.")


def _keywords(pairs: Pairs) -> tuple[tuple[str, float], ...]:
    """The words of `keyterm=word` and of the older `keywords=word:boost`; both may be repeated."""
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


def _formatting(query: Mapping[str, str], pairs: Pairs) -> Formatting:
    """The options for the text. `redact`, `replace` and `search` may be repeated. Raises Refusal."""
    smart, pairs = _is_true(query, "smart_format"), pairs or tuple(query.items())
    named = [value for name, value in pairs if name == "redact" for value in _redact_values(value)]
    kinds = [REDACTIONS.get(value, value) for value in named if not value.startswith("name:")]
    replaced = [value.partition(":") for name, value in pairs if name == "replace"]
    try:
        return make_formatting(
            smart=smart,
            numerals=_is_true(query, "numerals"),
            profanity_filter=_is_true(query, "profanity_filter"),
            paragraphs=smart or _is_true(query, "paragraphs"),
            redact=kinds,
            names=[value.removeprefix("name:") for value in named if value.startswith("name:")],
            replace=[(find, text) for find, _, text in replaced],
            search=[value for name, value in pairs if name == "search"],
            language=text_language(query.get("language"), None),
        )
    except ValueError as error:
        text = str(error)
        option = next((name for name in ("redact", "replace", "search") if f"'{name}'" in text), "redact")
        raise refused(option, f"{text[:1].upper()}{text[1:]}.") from None


def _redact_values(value: str) -> list[str]:
    """The values of one `redact`: some clients send a list with commas."""
    parts = [part.strip() for part in value.split(",")]
    values = [part if part.startswith("name:") else part.lower() for part in parts]
    return [value for value in values if value not in ("", "false")]


def _is_true(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() == "true"


def _punctuate(query: Mapping[str, str]) -> bool:
    return any(_is_true(query, name) for name in ("punctuate", "smart_format", "paragraphs"))


def _channels(query: Mapping[str, str]) -> int:
    channels = _whole(query, "channels", 1, 1, MAX_CHANNELS)
    if not _is_true(query, "multichannel"):
        if channels != 1:
            raise refused("channels", "Several 'channels' need 'multichannel=true'; otherwise mix them to one.")
        return 1
    if query.get("encoding", "") in CONTAINERS:
        raise refused("multichannel", "For 'multichannel' send raw samples, with 'encoding' and 'channels'.")
    return channels


def raw_format(query: Mapping[str, str]) -> AudioFormat | None:
    """The format of raw samples; None for a container. Raises Refusal."""
    encoding = query.get("encoding", "")
    if encoding in CONTAINERS:
        return None
    if encoding not in RAW:
        known = ", ".join(RAW)
        raise refused(
            "encoding", f"'{encoding[:40]}' is not supported; send {known}, or a container without 'encoding'."
        )
    rate = _whole(query, "sample_rate", 16_000 if encoding == "linear16" else G711_RATE, MIN_RATE, MAX_RATE)
    return AudioFormat(RAW[encoding], rate, binary=True)


def _endpointing(query: Mapping[str, str]) -> int:
    """The pause that ends a turn, in milliseconds. The value is `false`, `true` (default) or a number."""
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
