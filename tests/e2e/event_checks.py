"""Checks events of the wire against their published shapes (`realtime/dialects/event_schema.py`), strictly: a field
that is not described fails. The clients of the end-to-end tests call it for everything that they receive.
"""

from __future__ import annotations

from functools import cache

import msgspec

from realtime.dialects.event_schema import UNIONS, union

# The first part of a path that fits decides. A socket for OpenAI's clients may turn out to be one of vLLM's.
BY_PATH = (
    ("/v1/listen", ("DeepgramServerMessage",)),
    ("/v2/listen", ("FluxServerMessage",)),
    ("/v1/sessions/", ("ViewerEvent",)),
    ("/v1/streams/", ("PulledStreamEvent",)),
    ("/v1/whip", ("CallEvent",)),
    ("/v1/audio/", ("UploadEvent",)),
    ("", ("OpenAIServerEvent", "VllmServerEvent")),
)


@cache
def _decoder(name: str) -> msgspec.json.Decoder[object]:
    return msgspec.json.Decoder(union(UNIONS[name]))


def check_event(path: str, frame: str | bytes) -> None:
    """Fail if the event that came on this path is not as the schema says."""
    names = next(names for start, names in BY_PATH if path.startswith(start))
    reasons = []
    for name in names:
        try:
            _decoder(name).decode(frame)
            return
        except msgspec.ValidationError as error:
            reasons.append(f"{name}: {error}")
    raise AssertionError(f"{frame!r} is not as realtime/dialects/event_schema.py says: {'; '.join(reasons)}")
