"""Deepgram's `/v1/listen`: query parameters and parts of the JSON of sockets and files, and the dialect of sockets.

Sockets come from `realtime/http/websocket_routes.py`, files from `realtime/http/transcription_routes.py`. Deepgram's
newer API for turns (`/v2/listen`) is in `deepgram_flux.py`; its options, and those of Twilio, have the same names.

`read_socket_query` and `read_file_query` read the query parameters. Unsupported ones have no effect and are not echoed.
Only `callback` and unknown kinds of `redact` are refused, because a client must not believe that its text was redacted
or sent to another address.

`DeepgramDialect` is the dialect of the sockets. Audio comes in binary frames. Our text is append-only, so an interim
result is always the beginning of its final result. A turn ends with a final result that is also `speech_final`. In a
long turn, text of more than a few seconds becomes final before that, and later interim results contain only the text
after it. Each channel of a socket is a session with its own `DeepgramDialect`; the channels share one `Listening`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from uuid import uuid4

from realtime.dialects.base import DirectAnswer, Json, Nothing, Request, SessionFacts
from realtime.errors import ClientFault, Refusal
from realtime.session.events import (
    Answered,
    Commit,
    Committed,
    Completed,
    Configure,
    Delta,
    End,
    Ended,
    ItemFailed,
    Problem,
    ServerEvent,
    SessionUpdated,
    SpeechStarted,
    TimedWord,
    UtteranceEnded,
    WordsLabelled,
)
from realtime.session.formatting import Hit, format_final, search_words, settled_words
from realtime.session.settings import (
    G711_RATE,
    MAX_RATE,
    MAX_URL_CHARACTERS,
    MIN_RATE,
    NAME_RULE,
    PUBLISHED_NAME,
    REDACTED,
    AudioFormat,
    Formatting,
    Settings,
    TurnDetection,
    make_formatting,
    text_language,
)
from realtime.session.words import languages_of, text_of
from realtime.text_values import decimal_number, now_text, whole_number

# The query parameters of sockets and files

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


# Parts of responses, for sockets and files

# Punctuation that is removed around words.
MARKS = ".,;:!?…\"“”„«»()[]{}¿¡。、，？！：；‘’'-–—"
# A long text is processed in parts of about this length.
CHARACTERS_AT_ONCE = 8192
SPACE = re.compile(r"\s")
ERROR_CODES = {401: "INVALID_AUTH", 403: "INSUFFICIENT_PERMISSIONS", 429: "TOO_MANY_REQUESTS", 499: "CLIENT_GONE"}


def plain(text: str) -> str:
    """The text as Deepgram writes it without `punctuate`: lower case, no punctuation around words."""
    return " ".join(word for word in map(_plain_word, text.split()) if word)


def _plain_word(word: str) -> str:
    return REDACTED if REDACTED in word else word.lower().strip(MARKS)


def plain_parts(text: str) -> Iterator[str]:
    """`plain` of a long text, as an iterator of parts. Some may be empty."""
    start, before = 0, ""
    while start < len(text):
        # Parts end between words.
        space = SPACE.search(text, start + CHARACTERS_AT_ONCE)
        end = space.start() if space else len(text)
        part, start = plain(text[start:end]), end
        yield before + part if part else ""
        before = " " if before or part else ""


def alternative(text: str, words: Sequence[TimedWord], sample_rate: int, *, punctuate: bool) -> Json:
    """One transcript with its words."""
    written = [written_word(word, sample_rate, punctuate) for word in words]
    languages = languages_of(words)
    return {
        "transcript": text if punctuate else plain(text),
        "confidence": _confidence(words),
        "words": [word for word in written if word],
        **({"languages": languages} if languages else {}),
    }


def written_word(
    word: TimedWord, sample_rate: int, punctuate: bool, with_speaker_confidence: bool = False
) -> Json | None:
    """A word as JSON; None for punctuation alone if `punctuate` is off. `with_speaker_confidence`: also the confidence
    of its speaker."""
    bare = plain(word.text) or (word.text if punctuate else "")
    times = {"start": seconds(word.start, sample_rate), "end": seconds(word.end, sample_rate)}
    marked = {"punctuated_word": word.text} if punctuate else {}
    speaker: Json = {} if word.speaker is None else {"speaker": word.speaker}
    if with_speaker_confidence and speaker:
        speaker["speaker_confidence"] = word.speaker_confidence
    return {"word": bare, **times, "confidence": _confidence([word]), **marked, **speaker} if bare else None


def written_search(words: Sequence[TimedWord], formatting: Formatting, sample_rate: int) -> list[Json] | None:
    """The hits of each search term; None if the client searches for nothing."""
    if not formatting.search:
        return None
    found = search_words(words, formatting)
    return [{"query": query, "hits": [written_hit(hit, sample_rate) for hit in hits]} for query, hits in found]


def written_hit(hit: Hit, sample_rate: int) -> Json:
    return {
        "confidence": 1.0 if hit.confidence is None else round(hit.confidence, 4),
        "start": seconds(hit.start, sample_rate),
        "end": seconds(hit.end, sample_rate),
        "snippet": hit.snippet,
    }


def _confidence(words: Sequence[TimedWord]) -> float:
    confidences = [word.confidence for word in words if word.confidence is not None]
    return mean_confidence(sum(confidences), len(confidences))


def mean_confidence(total: float, words: int) -> float:
    """The mean confidence of words; 1 if the model reports none, because clients expect a number."""
    return round(total / words, 4) if words else 1.0


def model_info(model: str) -> Json:
    return {"name": model, "version": "", "arch": "tickertape"}


def seconds(samples: int, sample_rate: int) -> float:
    return round(samples / sample_rate, 3)


def deepgram_code(status: int) -> str:
    """Deepgram's code for a refusal with this status."""
    return ERROR_CODES.get(status) or HTTPStatus(status).phrase


def error_body(refusal: Refusal, request_id: str) -> Json:
    """A refusal in Deepgram's format."""
    return {"err_code": deepgram_code(refusal.status), "err_msg": refusal.message, "request_id": request_id}


# The dialect of `/v1/listen`

# Event ids for the events that these client messages cause.
FINALIZE = "finalize"
CONFIGURE = "configure"
# Text of an open turn that is longer, in characters or seconds, becomes final.
SEGMENT_CHARACTERS = 2000
SEGMENT_SECONDS = 5
# Text of an open turn waits for speaker labels until it has more than this many words; then it becomes final without.
MAX_UNKNOWN = 100


@dataclass(slots=True)
class Listening:
    """The state that the channels of one socket share."""

    query: ListenQuery
    request_id: str = field(default_factory=lambda: str(uuid4()))
    created: str = field(default_factory=now_text)
    # Channels that have ended, and the length of the longest one in samples.
    ended: int = 0
    samples: int = 0

    def end_channel(self, samples: int) -> bool:
        """A channel has ended; returns whether it was the last one."""
        self.ended += 1
        self.samples = max(self.samples, samples)
        return self.ended == self.query.channels


class DeepgramDialect:
    """Deepgram's dialect for one channel of a socket."""

    name = "deepgram"
    fixed = True
    empty_frame_ends = True
    option_paths: Mapping[str, str] = {}
    has_appends = False

    def __init__(self, facts: SessionFacts, listening: Listening, channel: int = 0) -> None:
        self.facts = facts
        self._listening = listening
        self._query = listening.query
        self._channel = [channel, listening.query.channels]
        # Messages about the whole socket are answered by the first channel only.
        self._answers_for_all = channel == 0
        # Text and words of the open turn that are not final yet.
        self._text = ""
        self._words: list[TimedWord] = []
        # Item id -> first sample of the turn.
        self._starts: dict[str, int] = {}
        # Items that were committed by `Finalize`.
        self._finalized: set[str] = set()
        # End of the last final result in samples; the next one begins there at the earliest.
        self._final_until = 0
        # End of the last final result of the current turn.
        self._segment_until = 0
        # First sample of the text that is not final yet.
        self._start = 0

    def start_settings(self, settings: Settings) -> Settings:
        return settings

    def created(self, settings: Settings) -> Json | None:
        return None

    def read(self, message: Json, settings: Settings) -> Request:
        match message.get("type"):
            case "KeepAlive":
                return Nothing()
            case "Finalize":
                asked = message.get("channel")
                return Nothing() if isinstance(asked, int) and asked != self._channel[0] else Commit(FINALIZE)
            case "CloseStream":
                return End()
            case "Configure":
                return self._configure(message, settings)
        raise ClientFault("UNPARSABLE_CLIENT_MESSAGE", "Send KeepAlive, Finalize, CloseStream or Configure.")

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        match event:
            case SpeechStarted():
                self._starts[event.item_id] = event.sample
                at = self._seconds(event.sample)
                started = {"type": "SpeechStarted", "channel": self._channel, "timestamp": at}
                return [started] if self._query.vad_events else []
            case Delta():
                return self._delta(event)
            case WordsLabelled():
                self._label(event.words)
                return []
            case Committed() if event.event_id == FINALIZE:
                self._finalized.add(event.item_id)
                return []
            case Completed():
                return self._completed(event)
            case UtteranceEnded():
                return self._utterance_ended(event)
            case SessionUpdated():
                return [self._configured(event.settings)] if self._answers_for_all else []
            case ItemFailed():
                self._forget(event.item_id)
                return [_error(event.code, event.message)]
            case Problem():
                return self._problem(event)
            case Answered():
                return [event.body]
            case Ended():
                return [self._metadata()] if self._listening.end_channel(event.sample) else []
            case _:
                return []

    def _delta(self, event: Delta) -> list[Json]:
        self._text = (self._text + event.text).lstrip()
        self._words += event.words
        self._start = max(self._starts.get(event.item_id, self._final_until), self._final_until)
        start, end = self._start, self._end()
        long = len(self._text) > SEGMENT_CHARACTERS or end - start > SEGMENT_SECONDS * self.facts.sample_rate
        if long and self._words and self._has_speakers():
            return [self._settle_segment()]
        return [self._result(self._text, self._words, start, end)] if self._query.interim_results else []

    def _label(self, words: Sequence[TimedWord]) -> None:
        """The speakers of words that are not final yet have become known."""
        known = {(word.start, word.end): word for word in words}
        self._words = [known.get((word.start, word.end), word) for word in self._words]

    def _has_speakers(self) -> bool:
        """Whether most of the words have speakers, if those were asked for: a final result is never changed."""
        unknown = sum(word.speaker is None for word in self._words)
        return not self._query.settings.speakers or 2 * unknown <= len(self._words) or len(self._words) > MAX_UNKNOWN

    def _end(self) -> int:
        """End in samples of the words that are not final yet."""
        return max(self._start, self._words[-1].end) if self._words else self._start

    def _settle_segment(self, *, everything: bool = False) -> Json:
        """A final result for the complete words so far; text after the last one belongs to the next result."""
        count, start, cut = len(self._words), self._start, 0
        if self._query.settings.speakers and not everything:
            # Words whose speakers are not known yet belong to the next result.
            count = next((at for at, word in enumerate(self._words) if word.speaker is None), count) or count
        if self._query.settings.formatting.changes_finals and not everything:
            # A number is not divided between two results.
            count = settled_words(self._words[:count], self._query.settings.formatting) or count
        words, rest = self._words[:count], self._words[count:]
        for word in words:
            cut = max(cut, self._text.find(word.text, cut) + len(word.text))
        text, end = self._text[:cut], max(start, words[-1].end)
        self._text, self._words, self._final_until = self._text[cut:].lstrip(), rest, end
        self._segment_until = end
        return self._result(text, words, start, end, final=True)

    def _completed(self, event: Completed) -> list[Json]:
        start = max(event.start, self._final_until)
        end = self._final_until = max(start, event.end)
        finalize = event.item_id in self._finalized
        spoken = bool(event.words) and not event.goes_on
        # All text of the turn has arrived in deltas, unless it was revised; segments of it may be final already.
        self._label(event.words)
        text, words = self._text, self._words
        if event.is_revised:
            words = [word for word in event.words if word.start + word.end >= 2 * self._segment_until]
            text = text_of(words).lstrip()
        self._forget(event.item_id)
        ends = spoken and not finalize and self._query.endpoints
        return [self._result(text, words, start, end, final=True, speech_final=ends, finalize=finalize)]

    def _utterance_ended(self, event: UtteranceEnded) -> list[Json]:
        """The event, after a final result for the words before it, even if the turn continues."""
        ended = {"type": "UtteranceEnd", "channel": self._channel, "last_word_end": self._seconds(event.sample)}
        return [self._settle_segment(everything=True), ended] if self._words else [ended]

    def _forget(self, item_id: str) -> None:
        """Drop the state of a turn that has ended."""
        self._finalized.discard(item_id)
        self._starts.pop(item_id, None)
        self._text, self._words, self._segment_until = "", [], 0

    def _result(
        self,
        text: str,
        words: list[TimedWord],
        start: int,
        end: int,
        *,
        final: bool = False,
        speech_final: bool = False,
        finalize: bool = False,
    ) -> Json:
        rate, punctuate, formatting = self.facts.sample_rate, self._query.punctuate, self._query.settings.formatting
        shown, raw, found = words, text, None
        if final:
            formatted = format_final(text, words, formatting)
            text, shown, raw = formatted.text, list(formatted.words), formatted.raw
            found = written_search(words, formatting, rate)
        language = self._query.settings.language
        detected = [] if language and language != "multi" else languages_of(words)
        return {
            "type": "Results",
            "channel_index": self._channel,
            "start": self._seconds(start),
            "duration": self._seconds(end - start),
            "is_final": final,
            "speech_final": speech_final,
            "from_finalize": finalize,
            "channel": {
                "alternatives": [
                    {
                        **alternative(text, shown, rate, punctuate=punctuate),
                        **({"raw_transcript": raw} if final and formatting.changes_finals else {}),
                    }
                ],
                **({} if found is None else {"search": found}),
                **({"detected_language": detected[0]} if detected else {}),
            },
            "metadata": {
                "request_id": self._listening.request_id,
                "model_info": model_info(self.facts.model),
                "model_uuid": self._listening.request_id,
            },
        }

    def _problem(self, event: Problem) -> list[Json]:
        if event.event_id == FINALIZE:
            # `Finalize` without audio is answered too, because clients wait for it.
            return [self._result("", [], self._final_until, self._final_until, final=True, finalize=True)]
        if event.event_id == CONFIGURE:
            # The code of Deepgram that fits best for any invalid keyterm.
            failed = self._failed("CONFIGURE_KEYTERM_LIMIT_EXCEEDED", event.message)
            return [failed] if self._answers_for_all else []
        return [_error(event.code, event.message)]

    def _configure(self, message: Json, settings: Settings) -> Request:
        """Change the keyterms, which is all that can be changed in a session; any other change is answered with an
        error."""
        terms = message.get("keyterms")
        if message.get("features") or not isinstance(terms, list | None):
            return self._answer(self._failed("CONFIGURE_INTERNAL_ERROR", "Only 'keyterms' can be changed, as a list."))
        if terms is None:
            return self._answer({"type": "ConfigureSuccess", "request_id": self._listening.request_id})
        if not all(isinstance(term, str) for term in terms):
            return self._answer(self._failed("CONFIGURE_INTERNAL_ERROR", "Each keyterm must be a string."))
        return Configure(replace(settings, keywords=tuple((term, 1.0) for term in terms)), CONFIGURE)

    def _configured(self, settings: Settings) -> Json:
        """The answer with the keyterms that are in force."""
        if settings.keywords is None:
            return self._failed("CONFIGURE_KEYTERMS_NOT_SUPPORTED", "This model does not support keyterms.")
        terms = [term for term, _ in settings.keywords]
        return {"type": "ConfigureSuccess", "request_id": self._listening.request_id, "keyterms": terms}

    def _failed(self, code: str, description: str) -> Json:
        body = {"request_id": self._listening.request_id, "code": code, "description": description}
        return {"type": "ConfigureFailure", **body}

    def _answer(self, body: Json) -> Request:
        return DirectAnswer(body) if self._answers_for_all else Nothing()

    def _metadata(self) -> Json:
        return {
            "type": "Metadata",
            "transaction_key": "deprecated",
            "request_id": self._listening.request_id,
            "sha256": hashlib.sha256(self._listening.request_id.encode()).hexdigest(),
            "created": self._listening.created,
            "duration": self._seconds(self._listening.samples),
            "channels": self._query.channels,
        }

    def _seconds(self, samples: int) -> float:
        return seconds(samples, self.facts.sample_rate)


def _error(code: str, message: str) -> Json:
    return {"type": "Error", "variant": code, "description": message, "message": message}
