"""Deepgram's live dialect: choices in the query, audio in binary frames, results that name their time span.

Our text is append-only, so an interim result is always the beginning of its final one. A turn ends with a final result
that is also `speech_final`. Of a turn that goes on, what has been said for a few seconds becomes final before that, and
interim results repeat only what follows. Each channel of a socket is a session with a dialect of its own; what they
have in common is their `Listening`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from uuid import uuid4

from realtime.dialects.base import Answer, Json, Nothing, Request, SessionFacts
from realtime.dialects.deepgram_query import ListenQuery
from realtime.dialects.deepgram_shapes import alternative, model_info, now_text, seconds
from realtime.errors import ClientFault
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
)
from realtime.session.settings import Settings
from realtime.session.words import languages_of

FINALIZE = "finalize"
CONFIGURE = "configure"
# So much of an open turn may be repeated in interim results before it becomes final.
SEGMENT_CHARACTERS = 2000
SEGMENT_SECONDS = 5


@dataclass(slots=True)
class Listening:
    """One socket, for all of its channels."""

    query: ListenQuery
    request_id: str = field(default_factory=lambda: str(uuid4()))
    created: str = field(default_factory=now_text)
    ended: int = 0
    samples: int = 0

    def end_channel(self, samples: int) -> bool:
        """A channel has said everything; returns whether it was the last one."""
        self.ended += 1
        self.samples = max(self.samples, samples)
        return self.ended == self.query.channels


class DeepgramDialect:
    """Nothing is sent at connect; results come as turns go on and end."""

    name = "deepgram"
    fixed = True
    empty_frame_ends = True
    option_path = ""
    has_appends = False

    def __init__(self, facts: SessionFacts, listening: Listening, channel: int = 0) -> None:
        self.facts = facts
        self._listening = listening
        self._query = listening.query
        self._channel = [channel, listening.query.channels]
        # What concerns the whole socket is answered once.
        self._answers_for_all = channel == 0
        self._text = ""
        self._words: list[TimedWord] = []
        self._starts: dict[str, int] = {}
        self._finalized: set[str] = set()
        # Where the last final result ended: the next one begins there at the earliest.
        self._final_until = 0
        # Where the text begins that is not final yet.
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
        if long and self._words:
            return [self._settle_segment()]
        return [self._result(self._text, self._words, start, end)] if self._query.interim_results else []

    def _end(self) -> int:
        """Where the words end that are not final yet."""
        return max(self._start, self._words[-1].end) if self._words else self._start

    def _settle_segment(self) -> Json:
        """A final result for the complete words so far; what follows their last one belongs to the next result."""
        start, end, cut = self._start, self._end(), 0
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
        ends = spoken and not finalize and self._query.endpoints
        return [self._result(text, words, start, end, final=True, speech_final=ends, finalize=finalize)]

    def _utterance_ended(self, event: UtteranceEnded) -> list[Json]:
        """The words before it are final by then, also where the turn goes on."""
        ended = {"type": "UtteranceEnd", "channel": self._channel, "last_word_end": self._seconds(event.sample)}
        return [self._settle_segment(), ended] if self._words else [ended]

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
        rate, punctuate = self.facts.sample_rate, self._query.punctuate
        told = self._query.settings.language
        detected = [] if told and told != "multi" else languages_of(words)
        return {
            "type": "Results",
            "channel_index": self._channel,
            "start": self._seconds(start),
            "duration": self._seconds(end - start),
            "is_final": final,
            "speech_final": speech_final,
            "from_finalize": finalize,
            "channel": {
                "alternatives": [alternative(text, words, rate, punctuate=punctuate)],
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
            # A flush of nothing is answered too: clients wait for it.
            return [self._result("", [], self._final_until, self._final_until, final=True, finalize=True)]
        if event.event_id == CONFIGURE:
            # Of the codes that clients know, this one is nearest to any fault of a term.
            failed = self._failed("CONFIGURE_KEYTERM_LIMIT_EXCEEDED", event.message)
            return [failed] if self._answers_for_all else []
        return [_error(event.code, event.message)]

    def _configure(self, message: Json, settings: Settings) -> Request:
        """Words to expect are all that can be changed in the middle, and a client must not believe that more was."""
        terms = message.get("keyterms")
        if message.get("features") or not isinstance(terms, list | None):
            return self._answer(
                self._failed("CONFIGURE_INTERNAL_ERROR", "Only a list of keyterms can be changed here.")
            )
        if terms is None:
            return self._answer({"type": "ConfigureSuccess", "request_id": self._listening.request_id})
        if not all(isinstance(term, str) for term in terms):
            return self._answer(self._failed("CONFIGURE_INTERNAL_ERROR", "Each keyterm must be a text."))
        return Configure(replace(settings, keywords=tuple((term, 1.0) for term in terms)), CONFIGURE)

    def _configured(self, settings: Settings) -> Json:
        """What is in force now."""
        if settings.keywords is None:
            return self._failed("CONFIGURE_KEYTERMS_NOT_SUPPORTED", "This model takes no keyterms.")
        terms = [term for term, _ in settings.keywords]
        return {"type": "ConfigureSuccess", "request_id": self._listening.request_id, "keyterms": terms}

    def _failed(self, code: str, description: str) -> Json:
        body = {"request_id": self._listening.request_id, "code": code, "description": description}
        return {"type": "ConfigureFailure", **body}

    def _answer(self, body: Json) -> Request:
        return Answer(body) if self._answers_for_all else Nothing()

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
