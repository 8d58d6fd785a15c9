"""The OpenAI Realtime transcription dialects: GA, and the older beta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from realtime.dialects.base import (
    AudioText,
    GapRequest,
    InjectRequest,
    Json,
    Request,
    SessionFacts,
    Update,
    event_id_of,
    text_field,
)
from realtime.dialects.openai_session import Faults, beta_session, ga_session, merge_beta, merge_ga
from realtime.errors import ClientFault
from realtime.session.events import (
    Acknowledged,
    Clear,
    Cleared,
    Closing,
    Commit,
    Committed,
    Completed,
    Delta,
    Injected,
    ItemFailed,
    Problem,
    ServerEvent,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TimedOut,
    TimedWord,
)
from realtime.session.settings import INCLUDE_LOGPROBS, INCLUDE_WORDS, Settings
from realtime.session.words import languages_of, token_logprobs, word_fields

# Sessions do not expire; clients that look at the expiry want a moment in the future.
SHOWN_LIFETIME_S = 24 * 3600
TRANSCRIPTION = "conversation.item.input_audio_transcription"
CONVERSATION_EVENTS = ("conversation.item.", "response.", "output_audio_buffer.")


class OpenAIDialect:
    """GA shapes. The beta dialect differs in how it names and shows the session and a new item."""

    name = "openai"
    fixed = False
    empty_frame_ends = False
    option_path = "session.audio.input.transcription."
    has_appends = True

    def __init__(self, facts: SessionFacts) -> None:
        self.facts = facts

    def start_settings(self, settings: Settings) -> Settings:
        return replace(settings, trim_start=True, minimum_commit_ms=100)

    # Client -> server

    def read(self, message: Json, settings: Settings) -> Request:
        kind = message.get("type")
        event_id = event_id_of(message)
        try:
            match kind:
                case "input_audio_buffer.append":
                    return AudioText(text_field(message, "audio"))
                case "input_audio_buffer.commit":
                    return Commit(event_id)
                case "input_audio_buffer.clear":
                    return Clear(event_id)
                case "input_audio_buffer.gap":
                    return GapRequest(self._gap(message, settings))
                case "input_audio_buffer.inject":
                    return InjectRequest(self._items(message), event_id)
                case "session.update":
                    return self._update(merge_ga, message, settings)
                case "transcription_session.update":
                    return self._update(merge_beta, message, settings)
        except ClientFault as fault:
            fault.event_id = event_id
            raise
        raise ClientFault("invalid_value", self._unknown(kind), param="type", event_id=event_id)

    def _unknown(self, kind: Any) -> str:
        if isinstance(kind, str) and kind.startswith(CONVERSATION_EVENTS):
            return f"'{kind[:80]}' is not available in a transcription session."
        shown = f"'{kind[:80]}'" if isinstance(kind, str) else "missing or not a string"
        return (
            f"Invalid event type: {shown}. Supported: session.update, transcription_session.update, "
            "input_audio_buffer.append, input_audio_buffer.commit, input_audio_buffer.clear, input_audio_buffer.gap."
        )

    def _update(self, merge: Callable[[Settings, Json, Faults], Settings], message: Json, settings: Settings) -> Update:
        faults: Faults = []
        return Update(merge(settings, self._session(message), faults), event_id_of(message), faults)

    def _session(self, message: Json) -> Json:
        session = message.get("session")
        if not isinstance(session, dict):
            raise ClientFault("invalid_value", "'session' must be an object.", param="session")
        return session

    def _items(self, message: Json) -> list[Any]:
        items = message.get("items")
        if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
            raise ClientFault("invalid_value", "'items' must be a list of items as render gives them.", param="items")
        return items

    def _gap(self, message: Json, settings: Settings) -> int:
        """Length of a gap in client samples: `samples`, or `duration_ms`."""
        rate, most_s = settings.format.rate, self.facts.gap_seconds
        name, per_second = ("duration_ms", 1000) if message.get("samples") is None else ("samples", rate)
        given = message.get(name)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ClientFault("invalid_value", "A gap needs 'samples' or 'duration_ms', a number.", param=name)
        # Compared before it is calculated with: a whole number may be larger than any float.
        if not 0 <= given <= most_s * per_second:
            text = f"A gap lasts from 0 to {most_s:g} seconds (limits.gap_s)."
            raise ClientFault("invalid_value", text, param=name)
        return round(given * rate / per_second)

    # Server -> client

    def created(self, settings: Settings) -> Json:
        # Clients of vLLM look for the id and the time at the top level; OpenAI's do not mind.
        top = {"id": self.facts.session_id, "created": self.facts.created}
        return self._event("session.created", **top, session=self._session_object(settings))

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        match event:
            case Delta():
                return [self._delta(event, settings)]
            case Completed():
                return [self._completed(event, settings)]
            case Committed():
                return self._committed(event)
            case SpeechStarted():
                start_ms = self._ms(event.sample)
                name = "input_audio_buffer.speech_started"
                return [self._event(name, audio_start_ms=start_ms, item_id=event.item_id)]
            case SpeechStopped():
                end_ms = self._ms(event.sample)
                return [self._event("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=event.item_id)]
            case TimedOut():
                span = {"audio_start_ms": self._ms(event.start), "audio_end_ms": self._ms(event.end)}
                return [self._event("input_audio_buffer.timeout_triggered", item_id=event.item_id, **span)]
            case SessionUpdated():
                return [self._updated(event.settings)]
            case Cleared():
                return [self._event("input_audio_buffer.cleared")]
            case ItemFailed():
                error = {"type": "server_error", "code": event.code, "message": event.message, "param": None}
                return [self._event(f"{TRANSCRIPTION}.failed", item_id=event.item_id, content_index=0, error=error)]
            case Problem():
                return [self._problem(event.code, event.message, event.param, event.event_id)]
        return self._extension(event)

    def _extension(self, event: ServerEvent) -> list[Json]:
        """Events that OpenAI does not have. Most go only to clients that asked; clients ignore unknown ones."""
        match event:
            case Acknowledged():
                return [self._event("input_audio_buffer.acknowledged", samples=event.source_samples)]
            case Closing():
                return [self._event("session.closing", reason=event.reason)]
            case Injected():
                return [self._event("input_audio_buffer.injected", items=event.items)]
        return []

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "event_id": self.facts.new_event_id(), **fields}

    def _session_object(self, settings: Settings) -> Json:
        return ga_session(settings, self.facts, self.facts.created + SHOWN_LIFETIME_S)

    def _updated(self, settings: Settings) -> Json:
        return self._event("session.updated", session=self._session_object(settings))

    def _problem(self, code: str, message: str, param: str | None, event_id: str | None) -> Json:
        error = {
            "type": "invalid_request_error",
            "code": code,
            "message": message,
            "param": param,
            "event_id": event_id,
        }
        return self._event("error", error=error)

    def _committed(self, event: Committed) -> list[Json]:
        previous = event.previous_item_id
        return [
            self._event("input_audio_buffer.committed", item_id=event.item_id, previous_item_id=previous),
            *self._item_events(_item(event.item_id), previous),
        ]

    def _item_events(self, item: Json, previous: str | None) -> list[Json]:
        return [
            self._event("conversation.item.added", item=item, previous_item_id=previous),
            self._event("conversation.item.done", item=item, previous_item_id=previous),
        ]

    def _delta(self, event: Delta, settings: Settings) -> Json:
        extra = self._extensions(event.words, settings)
        return self._event(f"{TRANSCRIPTION}.delta", item_id=event.item_id, content_index=0, delta=event.text, **extra)

    def _completed(self, event: Completed, settings: Settings) -> Json:
        extra = self._extensions(event.words, settings)
        if settings.wants(INCLUDE_WORDS):
            extra |= {"audio_start_ms": self._ms(event.start), "audio_end_ms": self._ms(event.end)}
        if languages := languages_of(event.words):
            extra["languages"] = [{"code": code} for code in languages]
        seconds = round((event.end - event.start) / self.facts.sample_rate, 3)
        return self._event(
            f"{TRANSCRIPTION}.completed",
            item_id=event.item_id,
            content_index=0,
            transcript=event.transcript,
            usage={"type": "duration", "seconds": seconds},
            **extra,
        )

    def _extensions(self, words: tuple[TimedWord, ...], settings: Settings) -> Json:
        extra: Json = {}
        if settings.wants(INCLUDE_LOGPROBS):
            extra["logprobs"] = token_logprobs(words)
        if settings.wants(INCLUDE_WORDS):
            rate = self.facts.sample_rate
            extra["words"] = [word_fields(word, rate) for word in words]
        return extra

    def _ms(self, sample: int) -> int:
        return sample * 1000 // self.facts.sample_rate


class BetaDialect(OpenAIDialect):
    """The shapes OpenAI used before GA: flat session, `transcription_session.*`, one event per new item."""

    name = "openai-beta"
    option_path = "session.input_audio_transcription."

    def __init__(self, facts: SessionFacts) -> None:
        super().__init__(facts)
        # A plain session.update is answered with session.updated, as the client that sends it expects.
        self._plain_update = False

    def read(self, message: Json, settings: Settings) -> Request:
        request = super().read(message, settings)
        if isinstance(request, Update):
            self._plain_update = message.get("type") == "session.update"
        return request

    def created(self, settings: Settings) -> Json:
        top = {"id": self.facts.session_id, "created": self.facts.created}
        return self._event("transcription_session.created", **top, session=beta_session(settings, self.facts))

    def _updated(self, settings: Settings) -> Json:
        if self._plain_update:
            return super()._updated(settings)
        return self._event("transcription_session.updated", session=beta_session(settings, self.facts))

    def _item_events(self, item: Json, previous: str | None) -> list[Json]:
        return [self._event("conversation.item.created", item=item, previous_item_id=previous)]


def _item(item_id: str) -> Json:
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }
