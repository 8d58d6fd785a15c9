"""The events of a WebRTC call: those of OpenAI's Realtime API, without the events that carry audio.

The audio comes as Opus on the call's track. A call cannot be resumed.
"""

from __future__ import annotations

from dataclasses import replace

from realtime.dialects.base import AudioText, GapRequest, Json, Request, Update, event_id_of
from realtime.dialects.openai import OpenAIDialect
from realtime.errors import ClientFault
from realtime.session.events import Answered, ServerEvent
from realtime.session.settings import INCLUDE_RESUME, AudioFormat, Settings

# What the process of a call sends to the gateway.
CALL_FORMAT = AudioFormat("audio/pcm", 16_000, binary=True)


class CallDialect(OpenAIDialect):
    """The GA dialect over a data channel."""

    name = "webrtc"
    fixed = True
    has_appends = False

    def start_settings(self, settings: Settings) -> Settings:
        return _for_call(super().start_settings(settings))

    def read(self, message: Json, settings: Settings) -> Request:
        request = super().read(message, settings)
        if isinstance(request, AudioText | GapRequest):
            text = "The audio of a call comes on its track, as Opus."
            raise ClientFault("invalid_value", text, param="type", event_id=event_id_of(message))
        return replace(request, settings=_for_call(request.settings)) if isinstance(request, Update) else request

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        return [event.body] if isinstance(event, Answered) else super().write(event, settings)

    def _session_object(self, settings: Settings) -> Json:
        # How the samples come from the process of the call is no concern of the client.
        return super()._session_object(replace(settings, format=replace(CALL_FORMAT, binary=False)))

    def gap(self, start_ms: float, end_ms: float) -> Json:
        """The event for audio that the network lost."""
        return self._event("call.gap", audio_start_ms=round(start_ms), audio_end_ms=round(end_ms))

    def ended(self, code: int, reason: str) -> Json:
        """The last event of a call that the server ends."""
        return self._event("call.ended", code=code, reason=reason)


def _for_call(settings: Settings) -> Settings:
    """The same settings with the format of calls, and not resumable."""
    include = settings.include
    if include is not None:
        include = tuple(name for name in include if name != INCLUDE_RESUME)
    return replace(settings, format=CALL_FORMAT, include=include)
