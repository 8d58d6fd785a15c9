"""Pieces that Deepgram's answers have in common, on sockets and for files. No state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from realtime.errors import Refusal
from realtime.session.events import TimedWord
from realtime.session.words import languages_of

Json = dict[str, Any]

# What a word may begin or end with and does not belong to it.
MARKS = ".,;:!?…\"“”„«»()[]{}¿¡。、，？！：；‘’'-–—"
# A long text is rewritten in parts of about this length.
CHARACTERS_AT_ONCE = 8192
SPACE = re.compile(r"\s")
ERROR_CODES = {401: "INVALID_AUTH", 403: "INSUFFICIENT_PERMISSIONS", 429: "TOO_MANY_REQUESTS", 499: "CLIENT_GONE"}


def plain(text: str) -> str:
    """Words as Deepgram writes them without `punctuate`: small letters, no marks around them."""
    return " ".join(word for word in (part.strip(MARKS) for part in text.lower().split()) if word)


def plain_parts(text: str) -> Iterator[str]:
    """The same of a long text, in parts that are made one by one. Some may be empty."""
    start, before = 0, ""
    while start < len(text):
        # Words stay whole.
        space = SPACE.search(text, start + CHARACTERS_AT_ONCE)
        end = space.start() if space else len(text)
        part, start = plain(text[start:end]), end
        yield before + part if part else ""
        before = " " if before or part else ""


def alternative(text: str, words: Sequence[TimedWord], sample_rate: int, *, punctuate: bool) -> Json:
    """One transcript with its words."""
    written = [written_word(word, sample_rate, punctuate) for word in words]
    languages = languages_of(words)
    return {
        "transcript": text if punctuate else plain(text),
        "confidence": _confidence(words),
        "words": [word for word in written if word],
        **({"languages": languages} if languages else {}),
    }


def written_word(word: TimedWord, sample_rate: int, punctuate: bool) -> Json | None:
    """A word of a transcript; None for marks alone, where marks are not asked for."""
    bare = plain(word.text) or (word.text if punctuate else "")
    times = {"start": seconds(word.start, sample_rate), "end": seconds(word.end, sample_rate)}
    marked = {"punctuated_word": word.text} if punctuate else {}
    return {"word": bare, **times, "confidence": _confidence([word]), **marked} if bare else None


def _confidence(words: Sequence[TimedWord]) -> float:
    told = [word.confidence for word in words if word.confidence is not None]
    return mean_confidence(sum(told), len(told))


def mean_confidence(total: float, words: int) -> float:
    """The mean of those words whose confidence is known. Clients read it in any case: it is 1 where there is none."""
    return round(total / words, 4) if words else 1.0


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
