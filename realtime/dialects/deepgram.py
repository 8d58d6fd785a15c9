"""Deepgram's live dialect: choices in the query, audio in binary frames, results that name their time span.

Our text is append-only, so an interim result is always the beginning of its final one. A turn ends with a final result
that is also `speech_final`. Of a long turn, what has been said for a while becomes final before that, so that interim
results repeat only what follows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from realtime.dialects.base import Answer, Json, Nothing, Request, SessionFacts
from realtime.errors import ClientFault, Refusal
from realtime.session.events import (
    Answered,
    Commit,
    Committed,
    Completed,
    Delta,
    End,
    Ended,
    ItemFailed,
    Problem,
    ServerEvent,
    SpeechStarted,
    TimedWord,
)
from realtime.session.settings import G711_RATE, MAX_RATE, MIN_RATE, AudioFormat, Settings, TurnDetection

# Clients ask for tiny values out of habit; a pause this short inside a sentence is not an end.
MIN_ENDPOINTING_MS = 300
NO_ENDPOINTING_MS = 60_000
RAW = {"linear16": "audio/pcm", "mulaw": "audio/pcmu", "alaw": "audio/pcma"}
CONTAINERS = ("", "flac", "ogg-opus")
FINALIZE = "finalize"
# What is read of the query; all of it has one value.
READ_ONCE = (
    "encoding",
    "sample_rate",
    "channels",
    "model",
    "language",
    "endpointing",
    "interim_results",
    "vad_events",
    "utterance_end_ms",
)
# So much of an open turn may be repeated in interim results before it becomes final.
SEGMENT_CHARACTERS = 2000
SEGMENT_SECONDS = 60
# Longest names, and most terms of a list.
MAX_NAME = 256
MAX_KEYTERMS = 256


def settings_from_query(query: Mapping[str, str]) -> Settings:
    """What a client asks for in its URL. Unknown keys are ignored; raises Refusal for audio we cannot read."""
    if query.get("channels", "1") != "1":
        raise _refused("channels", "Send one channel; mix several down first.")
    for name in ("model", "language"):
        if len(query.get(name, "")) > MAX_NAME:
            raise _refused(name, f"'{name}' must have at most {MAX_NAME} characters.")
    silence_ms = _endpointing(query.get("endpointing", "10"))
    return Settings(
        format=_format(query),
        model=query.get("model") or None,
        language=query.get("language") or None,
        turn_detection=TurnDetection(silence_duration_ms=silence_ms),
        turns_chosen=True,
        minimum_commit_ms=0,
    )


def _format(query: Mapping[str, str]) -> AudioFormat:
    encoding = query.get("encoding", "")
    if encoding in CONTAINERS:
        return AudioFormat("audio/webm", 48_000, binary=True)
    if encoding not in RAW:
        known = ", ".join(RAW)
        raise _refused(
            "encoding", f"'{encoding[:40]}' is not supported; send {known}, or a container without 'encoding'."
        )
    given = query.get("sample_rate", str(G711_RATE if encoding != "linear16" else 16_000))
    if not given.isascii() or not given.isdigit() or not MIN_RATE <= int(given[:9]) <= MAX_RATE:
        raise _refused("sample_rate", f"'sample_rate' must lie between {MIN_RATE} and {MAX_RATE}.")
    rate = int(given) if encoding == "linear16" else G711_RATE
    return AudioFormat(RAW[encoding], rate, binary=True)


def _endpointing(value: str) -> int:
    if value == "false":
        return NO_ENDPOINTING_MS
    if value.isascii() and value.isdigit():
        return max(MIN_ENDPOINTING_MS, min(int(value[:6]), NO_ENDPOINTING_MS))
    return MIN_ENDPOINTING_MS


def _refused(param: str, message: str) -> Refusal:
    return Refusal(400, "invalid_query_parameter", message, param=param)


class DeepgramDialect:
    """Nothing is sent at connect; results come as turns go on and end."""

    name = "deepgram"
    fixed = True
    empty_frame_ends = True

    def __init__(self, facts: SessionFacts, query: Mapping[str, str]) -> None:
        self.facts = facts
        self.request_id = str(uuid4())
        self._interim = query.get("interim_results") == "true"
        self._speech_events = query.get("vad_events") == "true"
        self._utterance_end = "utterance_end_ms" in query
        self._created = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._text = ""
        self._words: list[TimedWord] = []
        self._starts: dict[str, int] = {}
        self._finalized: set[str] = set()
        # Where the last final result ended: the next one begins there at the earliest.
        self._final_until = 0

    def start_settings(self, settings: Settings) -> Settings:
        return settings

    def created(self, settings: Settings) -> Json | None:
        return None

    def read(self, message: Json, settings: Settings) -> Request:
        match message.get("type"):
            case "KeepAlive":
                return Nothing()
            case "Finalize":
                return Commit(FINALIZE)
            case "CloseStream":
                return End()
            case "Configure":
                answer: Json = {"type": "ConfigureSuccess", "request_id": self.request_id}
                return Answer(answer | _keyterms(message.get("keyterms")))
        raise ClientFault("UNPARSABLE_CLIENT_MESSAGE", "Send KeepAlive, Finalize, CloseStream or Configure.")

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        match event:
            case SpeechStarted():
                self._starts[event.item_id] = event.sample
                started = {"type": "SpeechStarted", "channel": [0, 1], "timestamp": self._seconds(event.sample)}
                return [started] if self._speech_events else []
            case Delta():
                return self._delta(event)
            case Committed() if event.event_id == FINALIZE:
                self._finalized.add(event.item_id)
                return []
            case Completed():
                return self._completed(event)
            case Problem() if event.event_id == FINALIZE:
                # A flush of nothing is answered too: clients wait for it.
                return [self._result("", [], self._final_until, self._final_until, final=True, finalize=True)]
            case ItemFailed():
                self._forget(event.item_id)
                return [_error(event.code, event.message)]
            case Problem():
                return [_error(event.code, event.message)]
            case Answered():
                return [event.body]
            case Ended():
                return [self._metadata(event.sample)]
            case _:
                return []

    def _delta(self, event: Delta) -> list[Json]:
        self._text = (self._text + event.text).lstrip()
        self._words += event.words
        start = max(self._starts.get(event.item_id, self._final_until), self._final_until)
        end = max(start, self._words[-1].end) if self._words else start
        long = len(self._text) > SEGMENT_CHARACTERS or end - start > SEGMENT_SECONDS * self.facts.sample_rate
        if long and self._words:
            return [self._settle_segment(start, end)]
        return [self._result(self._text, self._words, start, end)] if self._interim else []

    def _settle_segment(self, start: int, end: int) -> Json:
        """A final result for the complete words so far; what follows their last one belongs to the next result."""
        cut = 0
        for word in self._words:
            cut = max(cut, self._text.find(word.text, cut) + len(word.text))
        text, words = self._text[:cut], self._words
        self._text, self._words, self._final_until = self._text[cut:].lstrip(), [], end
        return self._result(text, words, start, end, final=True)

    def _completed(self, event: Completed) -> list[Json]:
        start = max(event.start, self._final_until)
        end = self._final_until = max(start, event.end)
        finalize = event.item_id in self._finalized
        spoken = bool(event.words) and not event.goes_on
        # All of a turn has come in deltas by now; segments of it may be final already.
        text, words = self._text, self._words
        self._forget(event.item_id)
        ends = spoken and not finalize
        out = [self._result(text, words, start, end, final=True, speech_final=ends, finalize=finalize)]
        if self._utterance_end and spoken:
            last = self._seconds(event.words[-1].end)
            out.append({"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": last})
        return out

    def _forget(self, item_id: str) -> None:
        """The turn is over: nothing of it is said again."""
        self._finalized.discard(item_id)
        self._starts.pop(item_id, None)
        self._text, self._words = "", []

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
        alternative = {"transcript": text, "confidence": 1.0, "words": [self._word(word) for word in words]}
        return {
            "type": "Results",
            "channel_index": [0, 1],
            "start": self._seconds(start),
            "duration": self._seconds(end - start),
            "is_final": final,
            "speech_final": speech_final,
            "from_finalize": finalize,
            "channel": {"alternatives": [alternative]},
            "metadata": {
                "request_id": self.request_id,
                "model_info": {"name": self.facts.model, "version": "", "arch": "tickertape"},
                "model_uuid": self.request_id,
            },
        }

    def _word(self, word: TimedWord) -> dict[str, Any]:
        plain = re.sub(r"[^\w'’-]", "", word.text).lower() or word.text
        times = {"start": self._seconds(word.start), "end": self._seconds(word.end)}
        return {"word": plain, **times, "confidence": 1.0, "punctuated_word": word.text}

    def _metadata(self, sample: int) -> Json:
        return {
            "type": "Metadata",
            "transaction_key": "deprecated",
            "request_id": self.request_id,
            "sha256": hashlib.sha256(self.request_id.encode()).hexdigest(),
            "created": self._created,
            "duration": self._seconds(sample),
            "channels": 1,
        }

    def _seconds(self, samples: int) -> float:
        return round(samples / self.facts.sample_rate, 3)


def _keyterms(terms: Any) -> Json:
    """What a client asked for, to be repeated in the answer."""
    if not isinstance(terms, list):
        return {}
    if len(terms) > MAX_KEYTERMS or not all(isinstance(term, str) and len(term) <= MAX_NAME for term in terms):
        text = f"'keyterms' must be at most {MAX_KEYTERMS} strings of at most {MAX_NAME} characters."
        raise ClientFault("UNPARSABLE_CLIENT_MESSAGE", text)
    return {"keyterms": terms}


def _error(code: str, message: str) -> Json:
    return {"type": "Error", "variant": code, "description": message, "message": message}
