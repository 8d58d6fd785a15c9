"""OpenAI's Realtime transcription API: the GA dialect, the older beta dialect, and the dialect of WebRTC calls.

GA has nested session objects, beta has flat ones. `merge_ga` and `merge_beta` turn session objects into `Settings`. A
key that is present changes a setting, null clears it, other settings stay. Unknown keys, models and options are ignored
without an error, because most clients treat an error as fatal. Invalid values are refused one by one, so that an
invalid language does not prevent a change of the audio format. Unknown keys are not echoed, so the size of the session
that is sent back is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from realtime.errors import ClientFault
from realtime.session.events import (
    Acknowledged,
    Answered,
    Clear,
    Cleared,
    Closing,
    Commit,
    Committed,
    Completed,
    Delta,
    Injected,
    ItemFailed,
    PauseScored,
    Problem,
    ServerEvent,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TimedOut,
    TimedWord,
)
from realtime.session.formatting import redacted_times, search_words
from realtime.session.settings import (
    BETTER_FINALS,
    G711_RATE,
    INCLUDE_END_OF_TURN,
    INCLUDE_LOGPROBS,
    INCLUDE_RESUME,
    INCLUDE_WORDS,
    MAX_RATE,
    MAX_URL_CHARACTERS,
    MIN_RATE,
    MODEL_OPTIONS,
    NAME_RULE,
    NO_FORMATTING,
    PUBLISHED_NAME,
    STREAMED_FINALS,
    AudioFormat,
    Formatting,
    Settings,
    TurnDetection,
    make_formatting,
)
from realtime.session.speakers import letter_name, speaker_of
from realtime.session.words import languages_of, token_logprobs, word_fields

# With these models, a client that does not set turn detection commits by itself.
STREAMING_MODELS = ("gpt-realtime-whisper", "gpt-live-transcribe")
DELAYS = ("minimal", "low", "medium", "high", "xhigh")
MAX_DELAY_MS = 60_000
EAGERNESS = ("low", "medium", "high", "auto")
# OpenAI's range.
IDLE_TIMEOUT_MS = (5000, 30_000)
# Paths of the settings in a session object, of GA and of the beta.
GA_PATHS = {name: f"audio.input.{name}" for name in ("format", "transcription", "noise_reduction", "turn_detection")}
BETA_PATHS = {
    "format": "input_audio_format",
    "transcription": "input_audio_transcription",
    "noise_reduction": "input_audio_noise_reduction",
    "turn_detection": "turn_detection",
}
BETA_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
DEFAULT_PCM_RATE = 24_000
CONTAINER_RATE = 48_000
# Longest names and prompt in characters, and most entries of a list.
MAX_NAME = 256
MAX_PROMPT = 16_384
MAX_ENTRIES = 256
# Fields of turn detection without effect, which are echoed as they were sent.
REPEATED_TURN_FIELDS = ("create_response", "interrupt_response")


Faults = list[ClientFault]


def _fault(param: str, message: str) -> ClientFault:
    return ClientFault("invalid_value", message, param=f"session.{param}")


def _object(value: Any, param: str) -> Json:
    if not isinstance(value, dict):
        raise _fault(param, f"'session.{param}' must be an object.")
    return value


def _number(value: Any, param: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _fault(param, f"'session.{param}' must be a number from {low:g} to {high:g}.")
    return value


def _flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise _fault(param, f"'session.{param}' must be true or false.")
    return value


def _text(value: Any, param: str, maximum: int = MAX_NAME) -> str:
    if not isinstance(value, str) or len(value) > maximum:
        raise _fault(param, f"'session.{param}' must be a string of at most {maximum} characters.")
    return value


def _texts(value: Any, param: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise _fault(param, f"'session.{param}' must be a list of at most {MAX_ENTRIES} strings.")
    texts = tuple(_text(item, param) for item in value)
    if sum(map(len, texts)) > MAX_PROMPT:
        raise _fault(param, f"'session.{param}' may have at most {MAX_PROMPT} characters in total.")
    return texts


def merge_ga(settings: Settings, session: Json, faults: Faults | None = None) -> Settings:
    """The settings after a GA `session` object, in which beta keys are accepted too.

    Invalid fields keep their value, and their faults are added to `faults`; without it, the first fault is raised.
    """
    if any(key in session for key in ("input_audio_format", "input_audio_transcription", "turn_detection")):
        settings = _merge_beta_keys(settings, session, faults)
    with _collecting(faults):
        audio = session.get("audio")
        audio_input = _object(audio, "audio").get("input") if audio is not None else None
        if audio_input is not None:
            settings = _merge_input(settings, _object(audio_input, "audio.input"), GA_PATHS, faults)
    return _finish(_merge_others(settings, session, faults))


def merge_beta(settings: Settings, session: Json, faults: Faults | None = None) -> Settings:
    """The settings after a beta `transcription_session` object; `faults` as for `merge_ga`."""
    return _finish(_merge_others(_merge_beta_keys(settings, session, faults), session, faults))


@contextmanager
def _collecting(faults: Faults | None) -> Iterator[None]:
    """Add a fault in this block to `faults` instead of raising it."""
    try:
        yield
    except ClientFault as fault:
        if faults is None:
            raise
        faults.append(fault)


def _merge_beta_keys(settings: Settings, session: Json, faults: Faults | None) -> Settings:
    renamed = {name: session[beta] for name, beta in BETA_PATHS.items() if beta in session}
    if "format" in renamed:
        with _collecting(faults):
            name = renamed.pop("format")
            if name is not None and (not isinstance(name, str) or name not in BETA_FORMATS):
                text = f"'session.input_audio_format' must be one of {list(BETA_FORMATS)}."
                raise _fault("input_audio_format", text)
            renamed["format"] = {"type": BETA_FORMATS[name or "pcm16"]}
    return _merge_input(settings, renamed, BETA_PATHS, faults)


def _published_name(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and PUBLISHED_NAME.fullmatch(value)):
        raise _fault("publish", f"'session.publish' must be a name or null. {NAME_RULE}")
    return value


def _webhook_url(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_URL_CHARACTERS):
        text = f"'session.on_final' must be a URL of at most {MAX_URL_CHARACTERS} characters, or null."
        raise _fault("on_final", text)
    return value


def _merge_others(settings: Settings, session: Json, faults: Faults | None) -> Settings:
    if "on_final" in session:
        with _collecting(faults):
            settings = replace(settings, on_final=_webhook_url(session["on_final"]))
    if "publish" in session:
        with _collecting(faults):
            settings = replace(settings, publish=_published_name(session["publish"]))
    if "include" not in session:
        return settings
    include = session["include"]
    if include is None:
        return replace(settings, include=None)
    with _collecting(faults):
        settings = replace(settings, include=_texts(include, "include"))
    return settings


def _finish(settings: Settings) -> Settings:
    if not settings.turns_chosen and (settings.model or "").startswith(STREAMING_MODELS):
        return replace(settings, turn_detection=None)
    return settings


def _merge_input(settings: Settings, given: Json, paths: Mapping[str, str], faults: Faults | None) -> Settings:
    """The settings after an audio input object; `paths` are the client's names of its keys."""
    changes: dict[str, Any] = {}
    if "format" in given:
        with _collecting(faults):
            changes["format"] = _format(given["format"], paths["format"])
    if "noise_reduction" in given:
        with _collecting(faults):
            changes["noise_reduction"] = _noise_reduction(given["noise_reduction"], paths["noise_reduction"])
    if "turn_detection" in given:
        with _collecting(faults):
            changes["turn_detection"] = _turn_detection(given["turn_detection"], paths["turn_detection"])
            changes["turns_chosen"] = True
    if "transcription" in given:
        with _collecting(faults):
            changes |= _transcription(given["transcription"], paths["transcription"], faults)
    return replace(settings, **changes)


def _noise_reduction(value: Any, path: str) -> Json | None:
    if value is None:
        return None
    kind = _object(value, path).get("type")
    return {} if kind is None else {"type": _text(kind, path + ".type")}


def _format(value: Any, path: str) -> AudioFormat:
    if value is None:
        return AudioFormat()
    given = _object(value, path)
    kind = given.get("type", "audio/pcm")
    binary = given.get("transport") == "binary"
    if kind in ("audio/pcmu", "audio/pcma"):
        return AudioFormat(kind, G711_RATE, binary)
    if kind in ("audio/webm", "audio/ogg"):
        return AudioFormat(kind, CONTAINER_RATE, binary)
    if kind not in ("audio/pcm", "audio/pcm-f32"):
        known = "audio/pcm, audio/pcm-f32, audio/pcmu, audio/pcma, audio/webm or audio/ogg"
        raise _fault(path + ".type", f"'session.{path}.type' must be {known}.")
    rate = given.get("rate")
    checked = _number(DEFAULT_PCM_RATE if rate is None else rate, path + ".rate", MIN_RATE, MAX_RATE)
    if checked != int(checked):
        raise _fault(path + ".rate", f"'session.{path}.rate' must be a whole number.")
    return AudioFormat(kind, int(checked), binary)


def _turn_detection(value: Any, path: str) -> TurnDetection | None:
    if value is None:
        return None
    given = _object(value, path)
    kind = given.get("type", "server_vad")
    if kind not in ("server_vad", "semantic_vad"):
        raise _fault(path + ".type", f"'session.{path}.type' must be server_vad or semantic_vad.")
    present = {key: item for key, item in given.items() if item is not None and key != "type"}
    changes: dict[str, Any] = {"semantic": kind == "semantic_vad"}
    if "threshold" in present:
        # With a threshold of 0 everything would be speech.
        changes["threshold"] = max(0.01, float(_number(present.pop("threshold"), path + ".threshold", 0, 1)))
    for name in ("prefix_padding_ms", "silence_duration_ms"):
        if name in present:
            changes[name] = int(_number(present.pop(name), f"{path}.{name}", 0, 60_000))
    if "idle_timeout_ms" in present and kind == "server_vad":
        timeout_ms = _number(present.pop("idle_timeout_ms"), path + ".idle_timeout_ms", *IDLE_TIMEOUT_MS)
        changes["idle_timeout_ms"] = int(timeout_ms)
    if "speaker_change" in present:
        changes["speaker_change"] = _flag(present.pop("speaker_change"), path + ".speaker_change")
    eagerness = present.pop("eagerness", "auto")
    if eagerness not in EAGERNESS:
        raise _fault(path + ".eagerness", f"'session.{path}.eagerness' must be one of {list(EAGERNESS)}.")
    repeated = tuple((name, present[name]) for name in REPEATED_TURN_FIELDS if isinstance(present.get(name), bool))
    return TurnDetection(**changes, eagerness=eagerness, extra=repeated)


def _transcription(value: Any, path: str, faults: Faults | None) -> dict[str, Any]:
    if value is None:
        nothing: dict[str, Any] = dict.fromkeys(("model", "language", "task", "delay", "finals"))
        texts = {"prompt": "", "formatting": NO_FORMATTING, "text_language": ""}
        return {**nothing, **texts, "languages": (), "keywords": ()}
    changes: dict[str, Any] = {}
    for name, item in _object(value, path).items():
        if name in _OPTIONS:
            with _collecting(faults):
                changes[_FIELDS.get(name, name)] = _OPTIONS[name](item, f"{path}.{name}")
    return changes


def _name(value: Any, path: str) -> str | None:
    return None if value is None else _text(value, path) or None


def _prompt(value: Any, path: str) -> str:
    return "" if value is None else _text(value, path, MAX_PROMPT)


def _languages(value: Any, path: str) -> tuple[str, ...]:
    return _texts([] if value is None else value, path)


def _delay(value: Any, path: str) -> str | int | None:
    if value is None or value in DELAYS:
        return value  # type: ignore[no-any-return]
    return int(_number(value, path, 0, MAX_DELAY_MS))


def _keywords(value: Any, path: str) -> tuple[tuple[str, float], ...]:
    """Keywords with a boost of 1; their number and length are checked by `Settings.in_force`."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _fault(path, f"'session.{path}' must be a list of strings.")
    return tuple((word, 1.0) for word in value)


def _known_speakers(value: Any, path: str) -> tuple[tuple[str, str | None], ...]:
    """Names and recordings; names are checked when the voices are enrolled."""
    given = [] if value is None else value
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise _fault(path, f"'session.{path}' must be a list of objects with 'name' and 'reference'.")
    names = [_text(one.get("name"), f"{path}.name") for one in given]
    urls = [one.get("reference") for one in given]
    if not all(url is None or isinstance(url, str) for url in urls):
        raise _fault(f"{path}.reference", f"'session.{path}.reference' must be a data URL: data:audio/wav;base64,...")
    return tuple(zip(names, urls, strict=True))


def _finals(value: Any, path: str) -> str | None:
    if value is not None and value not in (BETTER_FINALS, STREAMED_FINALS):
        raise _fault(path, f"'session.{path}' must be '{BETTER_FINALS}' or '{STREAMED_FINALS}'.")
    return value  # type: ignore[no-any-return]


def _formatting(value: Any, path: str) -> Formatting:
    """The object `format`. Unknown keys are refused: a client that asks for redaction relies on it."""
    return NO_FORMATTING if value is None else read_formatting(_object(value, path), f"session.{path}")


def read_formatting(given: Json, path: str) -> Formatting:
    """The options for the text of finals. Raises ClientFault; `path` is the client's name of the object."""
    for name in given:
        if name not in FORMAT_KEYS:
            raise ClientFault(
                "invalid_value", f"'{path}' has no '{name[:40]}'; it has {', '.join(FORMAT_KEYS)}.", param=path
            )
    options: dict[str, Any] = {}
    for name, item in given.items():
        valid = isinstance(item, FORMAT_KEYS[name])
        if isinstance(item, list):
            valid = valid and all(isinstance(term, str) for term in item)
        if isinstance(item, dict):
            valid = valid and all(isinstance(text, str) for text in item.values())
            options[name] = tuple(item.items())
        else:
            options[name] = item
        if not valid:
            raise ClientFault("invalid_value", f"'{path}.{name}' must be {_SHAPES[FORMAT_KEYS[name]]}.", param=path)
    try:
        return make_formatting(**options)
    except ValueError as error:
        text = str(error)
        raise ClientFault("invalid_value", f"{text[:1].upper()}{text[1:]}.", param=path) from None


def formatting_object(formatting: Formatting) -> Json:
    """The options in force, as a client sends them."""
    shown = {name: getattr(formatting, name) for name in FORMAT_KEYS}
    shown["replace"] = dict(formatting.replace)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items() if value}


# The keys of `format` with their types.
FORMAT_KEYS: dict[str, type] = {
    "smart": bool,
    "numerals": bool,
    "profanity_filter": bool,
    "paragraphs": bool,
    "redact": list,
    "names": list,
    "replace": dict,
    "search": list,
}
_SHAPES = {bool: "true or false", list: "a list of strings", dict: "an object with strings as values"}

# Options with another name in the settings.
_FIELDS = {"format": "formatting", "known_speakers": "asked_speakers"}
# The parser of each transcription option.
_OPTIONS: dict[str, Callable[[Any, str], Any]] = {
    "model": _name,
    "language": _name,
    "task": _name,
    "prompt": _prompt,
    "languages": _languages,
    "keywords": _keywords,
    "delay": _delay,
    "finals": _finals,
    "format": _formatting,
    "known_speakers": _known_speakers,
}


def _turn_object(turns: TurnDetection | None) -> Json | None:
    if turns is None:
        return None
    extra = dict(turns.extra)
    if turns.speaker_change:
        extra["speaker_change"] = True
    if turns.semantic:
        return {"type": "semantic_vad", "eagerness": turns.eagerness, **extra}
    return {
        "type": "server_vad",
        "threshold": turns.threshold,
        "prefix_padding_ms": turns.prefix_padding_ms,
        "silence_duration_ms": turns.silence_duration_ms,
        **({} if turns.idle_timeout_ms is None else {"idle_timeout_ms": turns.idle_timeout_ms}),
        **extra,
    }


def _transcription_object(settings: Settings, facts: SessionFacts) -> Json:
    shown: Json = {
        "model": settings.model or facts.model,
        "language": settings.language,
        "prompt": settings.shown_prompt,
    }
    if settings.task is not None:
        shown["task"] = settings.task
    if settings.languages != ():
        shown["languages"] = settings.languages and list(settings.languages)
    keywords = settings.all_keywords
    if keywords != ():
        shown["keywords"] = keywords and [word for word, _ in keywords]
    if settings.delay is not None:
        shown["delay"] = settings.delay
    if settings.finals is not None:
        shown["finals"] = BETTER_FINALS if settings.revises else STREAMED_FINALS
    if settings.formatting != NO_FORMATTING:
        shown["format"] = formatting_object(settings.formatting)
    if settings.known_speakers:
        shown["known_speakers"] = [{"name": name} for name in settings.speaker_names]
    return shown


def ga_session(settings: Settings, facts: SessionFacts, expires_at: int) -> Json:
    """The effective session as a GA object."""
    audio_format: Json = {"type": settings.format.type}
    if settings.format.type.startswith("audio/pcm") and settings.format.type not in ("audio/pcmu", "audio/pcma"):
        audio_format["rate"] = settings.format.rate
    if settings.format.binary:
        audio_format["transport"] = "binary"
    shown: Json = {
        "type": "transcription",
        "object": "realtime.transcription_session",
        "id": facts.session_id,
        "expires_at": expires_at,
        "audio": {
            "input": {
                "format": audio_format,
                "transcription": _transcription_object(settings, facts),
                "noise_reduction": settings.noise_reduction,
                "turn_detection": _turn_object(settings.turn_detection),
            }
        },
        "include": list(settings.include) if settings.include is not None else None,
    }
    if settings.wants(INCLUDE_RESUME) and facts.resume_token:
        shown["resume"] = {"token": facts.resume_token, "keep_seconds": facts.resume_seconds}
    if settings.publish is not None:
        shown["publish"] = settings.publish
    if settings.on_final is not None:
        shown["on_final"] = settings.on_final
    return shown


def beta_session(settings: Settings, facts: SessionFacts) -> Json:
    """The effective session as a beta object."""
    names = {kind: name for name, kind in BETA_FORMATS.items()}
    shown = {
        "id": facts.session_id,
        "object": "realtime.transcription_session",
        "input_audio_format": names.get(settings.format.type, "pcm16"),
        "input_audio_transcription": _transcription_object(settings, facts),
        "input_audio_noise_reduction": settings.noise_reduction,
        "turn_detection": _turn_object(settings.turn_detection),
        "modalities": ["text"],
        "include": list(settings.include) if settings.include is not None else None,
        "client_secret": None,
    }
    if settings.publish is not None:
        shown["publish"] = settings.publish
    if settings.on_final is not None:
        shown["on_final"] = settings.on_final
    return shown


# Sessions do not expire, but clients expect an expiry time in the future.
SHOWN_LIFETIME_S = 24 * 3600
TRANSCRIPTION = "conversation.item.input_audio_transcription"
CONVERSATION_EVENTS = ("conversation.item.", "response.", "output_audio_buffer.")


def _option_paths(transcription: str, turn_detection: str) -> dict[str, str]:
    """Where a session object has the options that the model or the server may refuse."""
    paths = {name: f"session.{transcription}.{name}" for name in (*MODEL_OPTIONS, "known_speakers")}
    return {**paths, "include": "session.include", "turn_detection": f"session.{turn_detection}.speaker_change"}


class OpenAIDialect:
    """The GA dialect."""

    name = "openai"
    fixed = False
    empty_frame_ends = False
    option_paths: Mapping[str, str] = _option_paths("audio.input.transcription", "audio.input.turn_detection")
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
            raise ClientFault("invalid_value", "'items' must be a list of items as render returns them.", param="items")
        return items

    def _gap(self, message: Json, settings: Settings) -> int:
        """Length of a gap in source samples, from `samples` or `duration_ms`. Raises ClientFault."""
        rate, max_s = settings.format.rate, self.facts.gap_seconds
        name, per_second = ("duration_ms", 1000) if message.get("samples") is None else ("samples", rate)
        given = message.get(name)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ClientFault("invalid_value", "A gap needs 'samples' or 'duration_ms', a number.", param=name)
        # Checked before any arithmetic: an integer may be too large for a float.
        if not 0 <= given <= max_s * per_second:
            text = f"A gap must last from 0 to {max_s:g} seconds (limits.gap_s)."
            raise ClientFault("invalid_value", text, param=name)
        return round(given * rate / per_second)

    # Server -> client

    def created(self, settings: Settings) -> Json:
        # vLLM's clients expect id and time at the top level; OpenAI's ignore them there.
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
                extra = _end_of_turn(event.confidence, settings)
                name = "input_audio_buffer.speech_stopped"
                return [self._event(name, audio_end_ms=end_ms, item_id=event.item_id, **extra)]
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
        """Events that OpenAI's API does not have. Most are sent only on request; clients ignore unknown events."""
        match event:
            case Acknowledged():
                return [self._event("input_audio_buffer.acknowledged", samples=event.source_samples)]
            case Closing():
                return [self._event("session.closing", reason=event.reason)]
            case Injected():
                return [self._event("input_audio_buffer.injected", items=event.items)]
            case PauseScored():
                score = {"audio_end_ms": self._ms(event.sample), "end_of_turn_confidence": round(event.confidence, 4)}
                return [self._event("input_audio_buffer.pause_scored", item_id=event.item_id, **score)]
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
        formatting = settings.formatting
        final = self.facts.finals.format(event.transcript, event.words, formatting)
        extra = self._extensions(final.words, settings)
        if formatting != NO_FORMATTING:
            extra |= formatted_fields(final.raw, event.words, formatting, self.facts.sample_rate)
        if settings.wants(INCLUDE_WORDS):
            extra |= {"audio_start_ms": self._ms(event.start), "audio_end_ms": self._ms(event.end)}
        if settings.labels_speakers and (speaker := speaker_of(event.words)) is not None:
            extra["speaker"] = letter_name(speaker, settings.speaker_names)
        extra |= _end_of_turn(event.confidence, settings)
        if languages := languages_of(event.words):
            extra["languages"] = [{"code": code} for code in languages]
        seconds = round((event.end - event.start) / self.facts.sample_rate, 3)
        return self._event(
            f"{TRANSCRIPTION}.completed",
            item_id=event.item_id,
            content_index=0,
            transcript=final.text,
            usage={"type": "duration", "seconds": seconds},
            **extra,
        )

    def _extensions(self, words: tuple[TimedWord, ...], settings: Settings) -> Json:
        extra: Json = {}
        if settings.wants(INCLUDE_LOGPROBS):
            extra["logprobs"] = token_logprobs(words)
        if settings.wants(INCLUDE_WORDS) or settings.labels_speakers:
            rate = self.facts.sample_rate
            extra["words"] = [word_fields(word, rate, settings.speaker_names) for word in words]
        return extra

    def _ms(self, sample: int) -> int:
        return sample * 1000 // self.facts.sample_rate


def _end_of_turn(confidence: float | None, settings: Settings) -> Json:
    """The probability that the turn is over, if the client asked for it and the turn was scored."""
    if confidence is None or not settings.wants(INCLUDE_END_OF_TURN):
        return {}
    return {"end_of_turn_confidence": round(confidence, 4)}


def formatted_fields(raw: str, words: Sequence[TimedWord], formatting: Formatting, sample_rate: int) -> Json:
    """Fields of a final that was formatted: the text before, the times of redactions, the hits of a search. Times are
    in seconds."""
    fields: Json = {"raw_transcript": raw} if formatting.changes_finals else {}
    if formatting.redacts:
        fields["redactions"] = [_span(start, end, sample_rate) for start, end in redacted_times(words)]
    if formatting.search:
        fields["search"] = [
            {"query": query, "hits": [_span(hit.start, hit.end, sample_rate) for hit in hits]}
            for query, hits in search_words(words, formatting)
        ]
    return fields


def _span(start: int, end: int, sample_rate: int) -> Json:
    return {"start": round(start / sample_rate, 3), "end": round(end / sample_rate, 3)}


class BetaDialect(OpenAIDialect):
    """The beta dialect: flat session objects, `transcription_session.*`, and one event for each new item."""

    name = "openai-beta"
    option_paths: Mapping[str, str] = _option_paths("input_audio_transcription", "turn_detection")

    def __init__(self, facts: SessionFacts) -> None:
        super().__init__(facts)
        # The last update was a `session.update`, which is answered with `session.updated`.
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


# What the process of a call sends to the gateway.
CALL_FORMAT = AudioFormat("audio/pcm", 16_000, binary=True)


class CallDialect(OpenAIDialect):
    """The GA dialect over the data channel of a WebRTC call, without the events that carry audio: that comes as Opus on
    the call's track. A call cannot be resumed."""

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


def _item(item_id: str) -> Json:
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }
