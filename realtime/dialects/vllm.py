"""The dialect of vLLM's realtime endpoint: clients commit before and after each utterance and get its text as deltas.

Audio is 16 kHz PCM, errors are strings. It shares its path with OpenAI's dialect: `realtime/serving/inbox.py`
recognizes it by the client's first messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realtime.dialects.base import AudioText, Json, Nothing, Request, SessionFacts, event_id_of
from realtime.errors import ClientFault
from realtime.session.events import (
    Commit,
    Completed,
    Configure,
    Delta,
    ItemFailed,
    Problem,
    ServerEvent,
    SessionUpdated,
)
from realtime.session.settings import AudioFormat, Settings

VLLM_RATE = 16_000
# A prompt token in the usage is one position of the model.
MS_PER_PROMPT_TOKEN = 80


class VllmDialect:
    """A non-final commit starts an utterance; a final one ends it and is answered with `done`."""

    name = "vllm"
    fixed = True
    empty_frame_ends = False
    option_paths: Mapping[str, str] = {}
    has_appends = True

    def __init__(self, facts: SessionFacts) -> None:
        self.facts = facts
        self._model_known = False
        # Samples and tokens of the earlier parts of an utterance that was cut because of its length.
        self._earlier_samples = 0
        self._earlier_tokens = 0

    def start_settings(self, settings: Settings) -> Settings:
        return replace(
            settings,
            format=AudioFormat("audio/pcm", VLLM_RATE),
            turn_detection=None,
            turns_chosen=True,
            trim_start=False,
            minimum_commit_ms=0,
        )

    def read(self, message: Json, settings: Settings) -> Request:
        kind = message.get("type")
        if kind == "input_audio_buffer.append":
            audio = message.get("audio")
            if not isinstance(audio, str) or not audio:
                raise ClientFault("invalid_audio", "'audio' must be a non-empty base64 string.")
            return AudioText(audio)
        if kind == "input_audio_buffer.commit":
            if not self._model_known:
                raise ClientFault("model_not_validated", "Send session.update with a model before the first commit.")
            return Commit(event_id_of(message)) if message.get("final") else Nothing()
        if kind == "session.update":
            return Configure(replace(settings, model=self._model(message)))
        shown = f"'{kind[:80]}'" if isinstance(kind, str) else "missing or not a string"
        raise ClientFault("unknown_event", f"Unknown event type: {shown}.")

    def _model(self, message: Json) -> str:
        model = message.get("model")
        if not isinstance(model, str) or not model:
            raise ClientFault("invalid_event", "session.update needs a 'model'.")
        if model not in self.facts.models:
            raise ClientFault("model_not_found", f"The model `{model[:200]}` does not exist.")
        self._model_known = True
        return model

    def created(self, settings: Settings) -> Json:
        return {"type": "session.created", "id": self.facts.session_id, "created": self.facts.created}

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        match event:
            case Delta():
                return [{"type": "transcription.delta", "delta": event.text}]
            case Completed() if event.goes_on:
                # Not `done`: clients take it for the end of the utterance, which only their commit ends.
                self._earlier_samples += event.end - event.start
                self._earlier_tokens += event.tokens
                return []
            case Completed():
                return [{"type": "transcription.done", "text": event.transcript, "usage": self._usage(event)}]
            case SessionUpdated():
                shown = {"id": self.facts.session_id, "model": event.settings.model}
                return [{"type": "session.updated", **shown}]
            case ItemFailed():
                return [_error("processing_error", event.message)]
            case Problem():
                return [_error(event.code, event.message)]
            case _:
                return []

    def _usage(self, event: Completed) -> dict[str, Any]:
        samples, tokens = self._earlier_samples + event.end - event.start, self._earlier_tokens + event.tokens
        self._earlier_samples = self._earlier_tokens = 0
        prompt = -(-(samples * 1000 // self.facts.sample_rate) // MS_PER_PROMPT_TOKEN)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": None,
        }


def _error(code: str, message: str) -> Json:
    return {"type": "error", "error": message, "code": code}
