"""OpenAI session objects <-> Settings: the GA shape (nested) and the beta shape (flat).

The merge rule: a key that is present changes a setting, an explicit null clears it, other settings stay. Unknown keys,
models and options are accepted in silence, because to most clients an error is fatal; only values that cannot be right
are refused, each by itself: a language that is none must not cost a client the format of its audio. What is not known
is not repeated either: the session that goes back is bounded, whatever was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from realtime.dialects.base import Json, SessionFacts
from realtime.errors import ClientFault
from realtime.session.settings import (
    G711_RATE,
    INCLUDE_RESUME,
    MAX_RATE,
    MIN_RATE,
    AudioFormat,
    Settings,
    TurnDetection,
)

# A client of these models that leaves turn detection out means to commit by itself.
STREAMING_MODELS = ("gpt-realtime-whisper", "gpt-live-transcribe")
DELAYS = ("minimal", "low", "medium", "high", "xhigh")
MAX_DELAY_MS = 60_000
EAGERNESS = ("low", "medium", "high", "auto")
# What OpenAI allows for the time without speech.
IDLE_TIMEOUT_MS = (5000, 30_000)
# Where the parts of a session are, in the GA shape and in that of the beta.
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
# Longest names, longest text a model may be told, and most entries of a list.
MAX_NAME = 256
MAX_PROMPT = 16_384
MAX_ENTRIES = 256
# Fields of turn detection that change nothing here and are repeated as they were sent.
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


def _text(value: Any, param: str, most: int = MAX_NAME) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise _fault(param, f"'session.{param}' must be a string of at most {most} characters.")
    return value


def _texts(value: Any, param: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise _fault(param, f"'session.{param}' must be a list of at most {MAX_ENTRIES} strings.")
    texts = tuple(_text(item, param) for item in value)
    if sum(map(len, texts)) > MAX_PROMPT:
        raise _fault(param, f"'session.{param}' may have at most {MAX_PROMPT} characters in all.")
    return texts


def merge_ga(settings: Settings, session: Json, faults: Faults | None = None) -> Settings:
    """The settings after a GA `session` object; flat beta keys in it are understood too.

    Fields that are wrong stay as they are and go to `faults`; without that, the first of them is raised.
    """
    if any(key in session for key in ("input_audio_format", "input_audio_transcription", "turn_detection")):
        settings = _merge_beta_keys(settings, session, faults)
    with _noting(faults):
        audio = session.get("audio")
        audio_input = _object(audio, "audio").get("input") if audio is not None else None
        if audio_input is not None:
            settings = _merge_input(settings, _object(audio_input, "audio.input"), GA_PATHS, faults)
    return _finish(_merge_include(settings, session, faults))


def merge_beta(settings: Settings, session: Json, faults: Faults | None = None) -> Settings:
    """The settings after a flat `transcription_session` object."""
    return _finish(_merge_include(_merge_beta_keys(settings, session, faults), session, faults))


@contextmanager
def _noting(faults: Faults | None) -> Iterator[None]:
    """What is wrong here costs what is inside, and no more."""
    try:
        yield
    except ClientFault as fault:
        if faults is None:
            raise
        faults.append(fault)


def _merge_beta_keys(settings: Settings, session: Json, faults: Faults | None) -> Settings:
    renamed = {name: session[beta] for name, beta in BETA_PATHS.items() if beta in session}
    if "format" in renamed:
        with _noting(faults):
            name = renamed.pop("format")
            if name is not None and (not isinstance(name, str) or name not in BETA_FORMATS):
                text = f"'session.input_audio_format' must be one of {list(BETA_FORMATS)}."
                raise _fault("input_audio_format", text)
            renamed["format"] = {"type": BETA_FORMATS[name or "pcm16"]}
    return _merge_input(settings, renamed, BETA_PATHS, faults)


def _merge_include(settings: Settings, session: Json, faults: Faults | None) -> Settings:
    if "include" not in session:
        return settings
    include = session["include"]
    if include is None:
        return replace(settings, include=None)
    with _noting(faults):
        settings = replace(settings, include=_texts(include, "include"))
    return settings


def _finish(settings: Settings) -> Settings:
    if not settings.turns_chosen and (settings.model or "").startswith(STREAMING_MODELS):
        return replace(settings, turn_detection=None)
    return settings


def _merge_input(settings: Settings, given: Json, paths: Mapping[str, str], faults: Faults | None) -> Settings:
    """`paths`: where in the client's session each of them is."""
    changes: dict[str, Any] = {}
    if "format" in given:
        with _noting(faults):
            changes["format"] = _format(given["format"], paths["format"])
    if "noise_reduction" in given:
        with _noting(faults):
            changes["noise_reduction"] = _noise_reduction(given["noise_reduction"], paths["noise_reduction"])
    if "turn_detection" in given:
        with _noting(faults):
            changes["turn_detection"] = _turn_detection(given["turn_detection"], paths["turn_detection"])
            changes["turns_chosen"] = True
    if "transcription" in given:
        with _noting(faults):
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
        # A threshold of exactly 0 would hear speech in everything; the nearest sensible value is taken.
        changes["threshold"] = max(0.01, float(_number(present.pop("threshold"), path + ".threshold", 0, 1)))
    for name in ("prefix_padding_ms", "silence_duration_ms"):
        if name in present:
            changes[name] = int(_number(present.pop(name), f"{path}.{name}", 0, 60_000))
    if "idle_timeout_ms" in present and kind == "server_vad":
        timeout_ms = _number(present.pop("idle_timeout_ms"), path + ".idle_timeout_ms", *IDLE_TIMEOUT_MS)
        changes["idle_timeout_ms"] = int(timeout_ms)
    eagerness = present.pop("eagerness", "auto")
    if eagerness not in EAGERNESS:
        raise _fault(path + ".eagerness", f"'session.{path}.eagerness' must be one of {list(EAGERNESS)}.")
    repeated = tuple((name, present[name]) for name in REPEATED_TURN_FIELDS if isinstance(present.get(name), bool))
    return TurnDetection(**changes, eagerness=eagerness, extra=repeated)


def _transcription(value: Any, path: str, faults: Faults | None) -> dict[str, Any]:
    if value is None:
        nothing: dict[str, Any] = dict.fromkeys(("model", "language", "task", "delay"))
        return {**nothing, "prompt": "", "languages": (), "keywords": ()}
    changes: dict[str, Any] = {}
    for name, item in _object(value, path).items():
        if name in _OPTIONS:
            with _noting(faults):
                changes[name] = _OPTIONS[name](item, f"{path}.{name}")
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
    """Words that weigh the same. How many and how long they may be is asked where the options come into force."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _fault(path, f"'session.{path}' must be a list of strings.")
    return tuple((word, 1.0) for word in value)


# How each option of a transcription is read.
_OPTIONS: dict[str, Callable[[Any, str], Any]] = {
    "model": _name,
    "language": _name,
    "task": _name,
    "prompt": _prompt,
    "languages": _languages,
    "keywords": _keywords,
    "delay": _delay,
}


def _turn_object(turns: TurnDetection | None) -> Json | None:
    if turns is None:
        return None
    extra = dict(turns.extra)
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
    return shown


def ga_session(settings: Settings, facts: SessionFacts, expires_at: int) -> Json:
    """The effective session in the GA shape."""
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
    return shown


def beta_session(settings: Settings, facts: SessionFacts) -> Json:
    """The effective session in the flat beta shape."""
    names = {kind: name for name, kind in BETA_FORMATS.items()}
    return {
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
