"""What is answered to a file, in OpenAI's shapes: JSON, text, subtitles, and server-sent events. Made in pieces."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from engine.languages import NAMES
from realtime.dialects.json_frames import encode_json
from realtime.http.files import Transcript, UploadRequest
from realtime.http.pieces import Entries, json_pieces, text_pieces
from realtime.session.settings import Settings
from realtime.session.subtitles import Subtitle, each_subtitle, srt_blocks, vtt_blocks
from realtime.session.words import token_logprobs, word_fields

PLAIN = "text/plain; charset=utf-8"
# A segment has many words, and its text is compressed to see how often it repeats itself.
SEGMENTS_AT_ONCE = 16


def write_answer(transcript: Transcript, request: UploadRequest) -> tuple[Iterator[bytes], str]:
    """The body in pieces, and its content type."""
    lines = each_subtitle(transcript.words, transcript.sample_rate)
    match request.response_format:
        case "text":
            return text_pieces((transcript.text, "\n")), PLAIN
        case "srt":
            return text_pieces(srt_blocks(lines)), PLAIN
        case "vtt":
            return text_pieces(vtt_blocks(lines)), PLAIN
        case "json":
            asked = {"logprobs": _logprobs(transcript, empty=None)} if request.logprobs else {}
            return json_pieces({"text": transcript.text, **asked, "usage": _duration(transcript)}), "application/json"
    body: dict[str, Any] = {
        "task": request.settings.task or "transcribe",
        "language": language_name(transcript, request.settings),
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
        "segments": Entries((_segment(number, line) for number, line in enumerate(lines)), at_once=SEGMENTS_AT_ONCE),
        "usage": _duration(transcript),
    }
    if request.words:
        body["words"] = Entries(word_fields(word, transcript.sample_rate) for word in transcript.words)
    return json_pieces(body), "application/json"


def _duration(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.seconds, 3)}


def _logprobs(transcript: Transcript, empty: list[Any] | None) -> Entries | list[Any] | None:
    """Of all words; `empty` where the model tells none."""
    if not transcript.chances:
        return empty
    # A word without any is no entry, and work all the same.
    return Entries(entry for word in transcript.words for entry in token_logprobs((word,)) or (None,))


def language_name(transcript: Transcript, settings: Settings) -> str:
    """The language of the text, as OpenAI writes it."""
    code = "en" if settings.task else transcript.language or settings.language
    return NAMES[code] if code else "unknown"


def _segment(number: int, line: Subtitle) -> dict[str, Any]:
    logs = [log for word in line.words for _, log in word.chances]
    unheard = [word.no_speech for word in line.words if word.no_speech is not None]
    spelled = line.text.encode()
    return {
        "id": number,
        "seek": 0,
        "start": round(line.start, 3),
        "end": round(line.end, 3),
        "text": line.text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": round(sum(logs) / len(logs), 4) if logs else 0.0,
        "compression_ratio": round(len(spelled) / len(zlib.compress(spelled)), 3),
        "no_speech_prob": round(sum(unheard) / len(unheard), 4) if unheard else 0.0,
    }


def sse(body: dict[str, Any]) -> bytes:
    """A short event."""
    return f"data: {encode_json(body)}\n\n".encode()


def sse_delta(delta: str, transcript: Transcript, first: int, request: UploadRequest) -> bytes:
    """The event with a delta, and what was asked for of the words from the one with this number on; none for none."""
    extras: dict[str, Any] = {}
    words = transcript.words[first:]
    if request.words:
        extras["words"] = [word_fields(word, transcript.sample_rate) for word in words]
    if request.logprobs:
        extras["logprobs"] = token_logprobs(words) or []
    if not delta and not any(extras.values()):
        return b""
    return sse({"type": "transcript.text.delta", "delta": delta, **extras})


def sse_done(transcript: Transcript, request: UploadRequest) -> Iterator[bytes]:
    """The last events, in pieces."""
    audio_tokens = round(transcript.seconds * 12.5)
    usage = {
        "type": "tokens",
        "input_tokens": audio_tokens,
        "output_tokens": transcript.tokens,
        "total_tokens": audio_tokens + transcript.tokens,
        "input_token_details": {"text_tokens": 0, "audio_tokens": audio_tokens},
    }
    extra: dict[str, Any] = {"duration": round(transcript.seconds, 3)} if request.words else {}
    if request.logprobs:
        extra["logprobs"] = _logprobs(transcript, empty=[])
    yield b"data: "
    yield from json_pieces({"type": "transcript.text.done", "text": transcript.text, "usage": usage, **extra})
    yield b"\n\ndata: [DONE]\n\n"
