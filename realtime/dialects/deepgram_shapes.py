"""Pieces that Deepgram's answers have in common, on sockets and for files. No state."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from realtime.errors import Refusal
from realtime.session.events import TimedWord
from realtime.session.words import languages_of

Json = dict[str, Any]

# What a word may begin or end with and does not belong to it.
MARKS = ".,;:!?…\"“”„«»()[]{}¿¡。、，？！：；‘’'-–—"
ERROR_CODES = {401: "INVALID_AUTH", 403: "INSUFFICIENT_PERMISSIONS", 429: "TOO_MANY_REQUESTS", 499: "CLIENT_GONE"}


def plain(text: str) -> str:
    """Words as Deepgram writes them without `punctuate`: small letters, no marks around them."""
    return " ".join(word for word in (part.strip(MARKS) for part in text.lower().split()) if word)


def alternative(text: str, words: Sequence[TimedWord], sample_rate: int, *, punctuate: bool) -> Json:
    """One transcript with its words."""
    written = [_word(word, sample_rate, punctuate) for word in words]
    languages = languages_of(words)
    return {
        "transcript": text if punctuate else plain(text),
        "confidence": _confidence(words),
        "words": [word for word in written if word["word"]],
        **({"languages": languages} if languages else {}),
    }


def _word(word: TimedWord, sample_rate: int, punctuate: bool) -> Json:
    bare = plain(word.text) or (word.text if punctuate else "")
    times = {"start": seconds(word.start, sample_rate), "end": seconds(word.end, sample_rate)}
    marked = {"punctuated_word": word.text} if punctuate else {}
    return {"word": bare, **times, "confidence": _confidence([word]), **marked}


def _confidence(words: Sequence[TimedWord]) -> float:
    """The words' mean. Clients read it in any case: it is 1 where the model tells none."""
    told = [word.confidence for word in words if word.confidence is not None]
    return round(sum(told) / len(told), 4) if told else 1.0


def model_info(model: str) -> Json:
    return {"name": model, "version": "", "arch": "tickertape"}


def seconds(samples: int, sample_rate: int) -> float:
    return round(samples / sample_rate, 3)


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def error_body(refusal: Refusal, request_id: str) -> Json:
    """A refusal as Deepgram's clients expect it."""
    code = ERROR_CODES.get(refusal.status) or HTTPStatus(refusal.status).phrase
    return {"err_code": code, "err_msg": refusal.message, "request_id": request_id}
