"""Deepgram Flux (`/v2/listen`): the query of its sockets (`read_flux_query`), and their dialect (`FluxDialect`).

The events of Flux report turns. Every `TurnInfo` has the whole text of its turn so far. A turn starts with its first
words, so noise alone starts none. A probable end (`EagerEndOfTurn`) is announced when all text before it has been sent;
if text follows anyway, `TurnResumed` comes first. So the text of an `EndOfTurn` that follows an `EagerEndOfTurn` is the
same. A number in the query is in plain digits; a number in a `Configure` message is a JSON number. The dialect of
`/v1/listen` is in `deepgram.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realtime.dialects.base import Json, Nothing, Request, SessionFacts
from realtime.dialects.deepgram import (
    CONFIGURE,
    Pairs,
    check_query,
    mean_confidence,
    published_name,
    raw_format,
    refused,
    seconds,
    webhook_url,
)
from realtime.errors import ClientFault
from realtime.session.events import (
    Commit,
    Committed,
    Completed,
    Configure,
    Delta,
    EagerTurnEnd,
    End,
    ItemFailed,
    Problem,
    ServerEvent,
    SessionUpdated,
    SpeechStarted,
    TimedWord,
    TurnResumed,
)
from realtime.session.settings import (
    DEFAULT_EOT_THRESHOLD,
    DEFAULT_EOT_TIMEOUT_MS,
    EAGER_EOT_THRESHOLDS,
    EOT_THRESHOLDS,
    EOT_TIMEOUTS_MS,
    STREAMED_FINALS,
    AudioFormat,
    Settings,
    TurnDetection,
)
from realtime.session.words import languages_of
from realtime.text_values import decimal_number, whole_number

# The name of Deepgram's English model; with any other name the language is detected, if the model can.
ENGLISH = "flux-general-en"
# Parameters that may appear only once.
FLUX_READ_ONCE = (
    *("model", "encoding", "sample_rate", "eot_threshold", "eager_eot_threshold", "eot_timeout_ms"),
    *("publish", "on_final"),
)
# Event id for the events that this client message causes.
FORCE = "force_end_turn"
# A longer turn (about ten minutes of speech) is ended and another one begins, because each message repeats the text of
# its turn.
MAX_TURN_CHARACTERS = 10_000
# An update is sent when at least one character in this many is new, so the bytes of a long turn grow linearly.
UPDATE_PART = 64


def read_flux_query(query: Mapping[str, str], pairs: Pairs = ()) -> Settings:
    """The settings of a socket. Raises Refusal."""
    check_query(query, pairs)
    for name, value in (*query.items(), *pairs):
        if name == "redact" and value != "false":
            raise refused("redact", "The server cannot redact on this path; use /v1/listen, or leave 'redact' out.")
    model = query.get("model") or None
    return Settings(
        # The end of a turn has the words of its probable end, and does not wait for a second pass.
        finals=STREAMED_FINALS,
        format=raw_format(query) or AudioFormat("audio/webm", 48_000, binary=True),
        model=model,
        language="en" if model == ENGLISH else None,
        languages=() if model == ENGLISH else _all(pairs, "language_hint"),
        keywords=tuple((term, 1.0) for term in _all(pairs, "keyterm")),
        turn_detection=_turn_detection(query),
        turns_chosen=True,
        minimum_commit_ms=0,
        publish=published_name(query),
        on_final=webhook_url(query),
    )


def _all(pairs: Pairs, wanted: str) -> tuple[str, ...]:
    return tuple(value for name, value in pairs if name == wanted)


def _turn_detection(query: Mapping[str, str]) -> TurnDetection:
    threshold, timeout_ms, eager = DEFAULT_EOT_THRESHOLD, DEFAULT_EOT_TIMEOUT_MS, None
    name = ""
    try:
        if (name := "eot_threshold") in query:
            threshold = decimal_number(name, query[name], *EOT_THRESHOLDS)
        if (name := "eot_timeout_ms") in query:
            timeout_ms = whole_number(name, query[name], *EOT_TIMEOUTS_MS)
        if (name := "eager_eot_threshold") in query:
            eager = decimal_number(name, query[name], *EAGER_EOT_THRESHOLDS)
        return TurnDetection().with_thresholds(threshold, eager, timeout_ms)
    except ValueError as error:
        raise refused(name, _sentence(error)) from None


def _sentence(error: ValueError) -> str:
    text = str(error)
    return text if text.endswith(".") else f"{text}."


class FluxDialect:
    """Deepgram Flux (`/v2/listen`) for one socket: its events report turns."""

    name = "flux"
    fixed = True
    empty_frame_ends = False
    option_paths: Mapping[str, str] = {}
    has_appends = False

    def __init__(self, facts: SessionFacts, request_id: str) -> None:
        self.facts = facts
        self._request_id = request_id
        # Number of the next message to the client.
        self._sequence = 0
        # Number of the current turn, or of the next one.
        self._index = 0
        # Text and words of the current turn, and the length of the text in the last message.
        self._text = ""
        self._words: list[TimedWord] = []
        self._sent_length = 0
        # Whether the client was sent `StartOfTurn`, and `EagerEndOfTurn` after it.
        self._started = False
        self._eager = False
        # Item id -> first sample of the turn.
        self._starts: dict[str, int] = {}
        # First and last sample of the current turn.
        self._start = 0
        self._end = 0
        # Items that `ForceEndTurn` has ended.
        self._forced: set[str] = set()

    def start_settings(self, settings: Settings) -> Settings:
        return settings

    def created(self, settings: Settings) -> Json | None:
        return self._message("Connected")

    # From the client

    def read(self, message: Json, settings: Settings) -> Request:
        match message.get("type"):
            case "CloseStream":
                return End()
            case "Configure":
                return self._configure(message, settings)
            case "ForceEndTurn":
                return Commit(FORCE)
            case "KeepAlive":
                return Nothing()
        raise ClientFault("UNPARSABLE_CLIENT_MESSAGE", "Send CloseStream, Configure or ForceEndTurn.")

    def _configure(self, message: Json, settings: Settings) -> Request:
        """Change thresholds and keyterms; what is not given stays. A message with a mistake changes nothing. Raises
        ClientFault."""
        assert settings.turn_detection is not None
        try:
            detection = _changed(settings.turn_detection, message.get("thresholds"))
            keywords = _keyterms(message.get("keyterms"))
        except ValueError as error:
            raise ClientFault("invalid_value", _sentence(error), event_id=CONFIGURE) from None
        changed = replace(settings, turn_detection=detection)
        if keywords is not None:
            changed = replace(changed, keywords=keywords)
        return Configure(changed, CONFIGURE)

    # To the client

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        match event:
            case SpeechStarted():
                self._starts[event.item_id] = event.sample
                return []
            case Delta():
                return self._delta(event, settings)
            case EagerTurnEnd() if self._started and not self._eager:
                self._eager, self._end = True, max(self._end, event.sample)
                return [self._turn_info("EagerEndOfTurn", event.confidence, settings)]
            case TurnResumed() if self._eager:
                self._eager, self._end = False, max(self._end, event.sample)
                return [self._turn_info("TurnResumed", 0.0, settings)]
            case Committed() if event.event_id == FORCE:
                self._forced.add(event.item_id)
                return []
            case Completed():
                return self._completed(event, settings)
            case ItemFailed():
                return self._failed(event, settings)
            case SessionUpdated():
                return self._configured(event.settings)
            case Problem():
                return self._problem(event)
            case _:
                return []

    def _delta(self, event: Delta, settings: Settings) -> list[Json]:
        if not self._text:
            # After a cut, the turn continues where the last one ended.
            self._start = max(self._end, self._starts.get(event.item_id, 0))
        self._text = (self._text + event.text).lstrip()
        self._words += event.words
        if self._words:
            self._end = max(self._end, self._words[-1].end)
        if not self._text:
            return []
        if not self._started:
            self._started = True
            events = [self._turn_info("StartOfTurn", 0.0, settings)]
        elif self._eager:
            self._eager = False
            events = [self._turn_info("TurnResumed", 0.0, settings)]
        elif len(self._text) - self._sent_length >= len(self._text) // UPDATE_PART:
            events = [self._turn_info("Update", 0.0, settings)]
        else:
            events = []
        if len(self._text) >= MAX_TURN_CHARACTERS:
            events += self._end_turn(1.0, "length", settings)
        return events

    def _completed(self, event: Completed, settings: Settings) -> list[Json]:
        self._end = max(self._end, event.end)
        # Without a confidence, the client has ended the turn or the audio.
        trigger = "manual" if event.confidence is None else "timeout" if event.timeout else "model"
        if event.goes_on:
            trigger = "length"
        if event.item_id in self._forced:
            trigger = "manual"
        events = self._end_turn(1.0 if event.confidence is None else event.confidence, trigger, settings)
        self._forget(event.item_id)
        return events

    def _failed(self, event: ItemFailed, settings: Settings) -> list[Json]:
        """The rest of the turn is lost: it ends with the text so far, because a client waits for its end."""
        warning = self._message("Warning", code=event.code.upper(), description=event.message)
        events = self._end_turn(1.0, "failure", settings)
        self._forget(event.item_id)
        return [warning, *events]

    def _forget(self, item_id: str) -> None:
        self._forced.discard(item_id)
        self._starts.pop(item_id, None)

    def _end_turn(self, confidence: float, trigger: str, settings: Settings) -> list[Json]:
        events = [self._turn_info("EndOfTurn", confidence, settings, trigger=trigger)] if self._started else []
        self._index += self._started
        self._text, self._words, self._sent_length = "", [], 0
        self._started = self._eager = False
        self._start = self._end
        return events

    def _turn_info(self, event: str, confidence: float, settings: Settings, **more: Any) -> Json:
        self._sent_length = len(self._text)
        rate = self.facts.sample_rate
        languages = languages_of(self._words)
        return self._message(
            "TurnInfo",
            event=event,
            turn_index=self._index,
            audio_window_start=seconds(self._start, rate),
            audio_window_end=seconds(max(self._start, self._end), rate),
            transcript=self._text.rstrip(),
            words=[_word(word, rate) for word in self._words],
            end_of_turn_confidence=round(confidence, 4),
            **more,
            **({"languages": languages} if languages else {}),
            **({"languages_hinted": list(settings.languages)} if settings.languages else {}),
        )

    def _configured(self, settings: Settings) -> list[Json]:
        """The answer with the thresholds and keyterms that are in force."""
        detection = settings.turn_detection
        assert detection is not None and detection.scored is not None
        chosen = detection.scored
        thresholds: Json = {"eot_threshold": chosen.threshold, "eot_timeout_ms": chosen.timeout_ms}
        if chosen.eager is not None:
            thresholds["eager_eot_threshold"] = chosen.eager
        terms = [term for term, _ in settings.keywords or ()]
        events = [self._message("ConfigureSuccess", thresholds=thresholds, keyterms=terms)]
        if settings.keywords is None:
            text = "This model does not support keyterms; they have no effect."
            events.append(self._message("Warning", code="KEYTERMS_NOT_SUPPORTED", description=text))
        return events

    def _problem(self, event: Problem) -> list[Json]:
        if event.event_id == FORCE:
            # No turn is open.
            return []
        if event.event_id == CONFIGURE:
            return [self._message("ConfigureFailure", code=event.code.upper(), description=event.message)]
        code = "UNPARSABLE_CLIENT_MESSAGE" if event.code == "invalid_json" else event.code.upper()
        return [self._message("Error", code=code, description=event.message)]

    def _message(self, type: str, **fields: Any) -> Json:
        number, self._sequence = self._sequence, self._sequence + 1
        return {"type": type, "request_id": self._request_id, "sequence_id": number, **fields}


def _word(word: TimedWord, sample_rate: int) -> Json:
    confidence = 1.0 if word.confidence is None else mean_confidence(word.confidence, 1)
    times = {"start": seconds(word.start, sample_rate), "end": seconds(word.end, sample_rate)}
    return {"word": word.text, "confidence": confidence, **times}


def _changed(detection: TurnDetection, thresholds: Any) -> TurnDetection:
    """Turn detection with the given thresholds; null for the eager one turns it off. Raises ValueError."""
    if thresholds is None:
        return detection
    current = detection.scored
    assert current is not None
    if not isinstance(thresholds, dict):
        raise ValueError("'thresholds' must be an object.")
    threshold = _number(thresholds, "eot_threshold", current.threshold)
    timeout_ms = _number(thresholds, "eot_timeout_ms", current.timeout_ms)
    if not isinstance(timeout_ms, int):
        raise ValueError("'eot_timeout_ms' must be a whole number.")
    eager = current.eager
    if "eager_eot_threshold" in thresholds:
        given = thresholds["eager_eot_threshold"]
        eager = None if given is None else _number(thresholds, "eager_eot_threshold", 0)
    return detection.with_thresholds(threshold, eager, timeout_ms)


def _number(thresholds: Json, name: str, current: float) -> float:
    value = thresholds.get(name)
    if value is None:
        return current
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"'{name}' must be a number.")
    return value


def _keyterms(given: Any) -> tuple[tuple[str, float], ...] | None:
    """The new keyterms, which replace the old ones; None if they stay. Raises ValueError."""
    if given is None:
        return None
    terms = [given] if isinstance(given, str) else given
    if not isinstance(terms, list) or not all(isinstance(term, str) for term in terms):
        raise ValueError("'keyterms' must be a list of strings.")
    return tuple((term, 1.0) for term in terms)
