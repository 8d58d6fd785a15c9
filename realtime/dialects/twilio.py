"""Twilio Media Streams: the `start` message with its options, and the dialect for one track of a phone call.

Twilio sends JSON with mu-law audio at 8 kHz in base64 and accepts no transcripts, so this dialect writes nothing:
viewers read the words under the name that each track is published as. The options of a stream are its custom
parameters, which have the names of Deepgram's query parameters. Each track of a call is a session with its own dialect;
the socket is served by `realtime/http/websocket_routes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from realtime.dialects.base import AudioText, GapRequest, Json, Nothing, Request, SessionFacts
from realtime.dialects.deepgram import read_socket_query
from realtime.errors import ClientFault
from realtime.session.events import End, ServerEvent
from realtime.session.settings import G711_RATE, NAME_RULE, PUBLISHED_NAME, AudioFormat, Settings
from realtime.text_values import whole_number

TRACKS = ("inbound", "outbound")
ENCODING = "audio/x-mulaw"
# Parameters of one stream, and the characters of a name or a value. A client secret is the longest value.
MAX_PARAMETERS = 64
MAX_PARAMETER = 8192
# A track that is this many milliseconds behind the call gets the missing time as silence. Twilio may send nothing while
# a track is silent; chunks have 20 ms and arrive in order.
BEHIND_MS = 1000
# Longest call.
MAX_MS = 7 * 24 * 3600 * 1000
SAMPLES_PER_MS = G711_RATE // 1000
# The parameters with the API key or client secret. Twilio takes 500 characters for the name and value of a parameter;
# a client secret has more and continues in the second one.
KEYS = ("key", "key2")
# Options that the protocol itself sets.
FIXED = ("encoding", "sample_rate", "channels", "multichannel")
# Options with several values, which a parameter has with commas between them: parameters cannot be repeated.
LISTS = ("keyterm", "keywords", "search", "replace")


@dataclass(frozen=True, slots=True)
class CallStart:
    """The `start` message of a stream."""

    key: str | None
    tracks: tuple[str, ...]
    # Settings of every track; `publish` is the name of the call.
    settings: Settings


def read_start(message: Json) -> CallStart:
    """The options in a `start` message. Raises ClientFault and Refusal."""
    start = message.get("start")
    if not isinstance(start, dict):
        raise _fault("start", "'start' must be an object, as Twilio sends it.")
    _check_format(start.get("mediaFormat"))
    tracks, parameters = _tracks(start.get("tracks")), _parameters(start.get("customParameters"))
    key = "".join(parameters.pop(name, "") for name in KEYS)
    options = {name: value for name, value in parameters.items() if name not in (*FIXED, "publish")}
    pairs = [(name, part) for name, value in options.items() for part in _values(name, value)]
    settings = read_socket_query({**options, "encoding": "mulaw"}, pairs).settings
    name = _name(start, parameters.get("publish"))
    for track in tracks:
        if not PUBLISHED_NAME.fullmatch(track_name(name, track, tracks)):
            raise _fault("publish", f"'publish' must be a name, with '-{track}' for each of two tracks. {NAME_RULE}")
    return CallStart(key or None, tracks, replace(settings, format=AudioFormat("audio/pcmu", G711_RATE), publish=name))


def track_name(name: str, track: str, tracks: tuple[str, ...]) -> str:
    """The name that a track is published as."""
    return name if len(tracks) == 1 else f"{name}-{track}"


def _check_format(given: object) -> None:
    if not isinstance(given, dict):
        raise _fault("mediaFormat", "'start.mediaFormat' must be an object, as Twilio sends it.")
    if (given.get("encoding"), given.get("sampleRate"), given.get("channels")) != (ENCODING, G711_RATE, 1):
        raise _fault("mediaFormat", f"The audio must be {ENCODING} with 8000 samples a second and one channel.")


def _tracks(given: object) -> tuple[str, ...]:
    known = isinstance(given, list) and bool(given) and all(track in TRACKS for track in given)
    if not isinstance(given, list) or not known or len(set(given)) < len(given):
        raise _fault("tracks", "'start.tracks' must be a list of 'inbound' and 'outbound'.")
    return tuple(given)


def _parameters(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise _fault("customParameters", "'start.customParameters' must be an object of strings.")
    if len(given) > MAX_PARAMETERS or any(len(text) > MAX_PARAMETER for pair in given.items() for text in pair):
        text = f"A stream may have at most {MAX_PARAMETERS} parameters of at most {MAX_PARAMETER} characters."
        raise _fault("customParameters", text)
    return dict(given)


def _values(name: str, value: str) -> Iterator[str]:
    return (part.strip() for part in value.split(",")) if name in LISTS else iter((value,))


def _name(start: Mapping[str, object], asked: str | None) -> str:
    """The name of the call: the parameter `publish`, or the SID of the call."""
    name = asked if asked is not None else start.get("callSid")
    if not isinstance(name, str) or not PUBLISHED_NAME.fullmatch(name):
        what = "'start.callSid'" if asked is None else "'publish'"
        raise _fault("publish", f"{what} must be a name. {NAME_RULE}")
    return name


def _fault(param: str, message: str) -> ClientFault:
    return ClientFault("invalid_value", message, param=param)


class TwilioDialect:
    """The dialect of one track of a call. It gets the messages of all tracks: their times are the call's clock."""

    name = "twilio"
    fixed = True
    empty_frame_ends = False
    option_paths: Mapping[str, str] = {}
    has_appends = False

    def __init__(self, facts: SessionFacts, track: str, tracks: tuple[str, ...]) -> None:
        self.facts = facts
        self._track = track
        self._tracks = tracks
        # Samples of the track so far, received or filled with silence.
        self._samples = 0

    def start_settings(self, settings: Settings) -> Settings:
        if settings.publish is None:
            return settings
        return replace(settings, publish=track_name(settings.publish, self._track, self._tracks))

    def created(self, settings: Settings) -> Json | None:
        return None

    def read(self, message: Json, settings: Settings) -> Request:
        match message.get("event"):
            case "media":
                return self._media(message.get("media"))
            case "stop":
                return End()
            case "connected" | "dtmf" | "mark":
                return Nothing()
            case "start":
                raise _fault("event", "The stream has started already.")
        raise _fault("event", "'event' must be connected, start, media, dtmf, mark or stop.")

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        """Write nothing: Twilio takes audio and marks only, and reports any other message as an error."""
        return []

    def _media(self, media: object) -> Request:
        if not isinstance(media, dict):
            raise _fault("media", "'media' must be an object.")
        track, payload = media.get("track"), media.get("payload")
        if track not in self._tracks:
            raise _fault("media.track", "'media.track' must be one of the tracks of 'start'.")
        if not isinstance(payload, str):
            raise _fault("media.payload", "'media.payload' must be a string.")
        missing = self._missing(media.get("timestamp"))
        self._samples += missing
        if track != self._track:
            return GapRequest(missing) if missing else Nothing()
        # A sample is a byte. Invalid base64 counts too: its time has passed on the clock of the call.
        self._samples += len(payload) * 3 // 4 - payload.count("=", -2)
        return AudioText(payload, silence_before=missing)

    def _missing(self, timestamp: object) -> int:
        """Samples that the track is behind the call; 0 if it is a little behind or the message has no time."""
        if timestamp is None:
            return 0
        try:
            now_ms = whole_number("media.timestamp", timestamp if isinstance(timestamp, str) else "", 0, MAX_MS)
        except ValueError as error:
            raise _fault("media.timestamp", str(error)) from None
        missing = now_ms * SAMPLES_PER_MS - self._samples
        if missing < BEHIND_MS * SAMPLES_PER_MS:
            return 0
        return min(missing, int(self.facts.gap_seconds * G711_RATE))
