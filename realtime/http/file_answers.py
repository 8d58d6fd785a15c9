"""Writes the transcript of a file in OpenAI's formats: JSON, text, subtitles, or server-sent events.

Responses are made in pieces (`long_responses.py`), because a file may have hours of words. The endpoints are in
`transcription_routes.py`; the answers to Deepgram's clients are in `listen_route.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from engine.spec import NAMES
from realtime.dialects.base import encode_json
from realtime.http.file_transcription import DIARIZED, Transcript, UploadRequest
from realtime.http.long_responses import Entries, TextParts, json_pieces, text_pieces
from realtime.session.formatting import (
    paragraph_end,
    redacted_times,
)
from realtime.session.settings import Formatting, Settings
from realtime.session.speakers import letter_name
from realtime.session.words import (
    Subtitle,
    each_subtitle,
    spoken_lines,
    srt_blocks,
    subtitles,
    token_logprobs,
    vtt_blocks,
    word_fields,
)

PLAIN = "text/plain; charset=utf-8"
# Segments in one piece of a response: fewer than other entries, because a segment has many words and its text is
# compressed for `compression_ratio`.
SEGMENTS_AT_ONCE = 16


def write_answer(transcript: Transcript, request: UploadRequest) -> tuple[Iterator[bytes], str]:
    """The body in pieces, and its content type."""
    lines, names = each_subtitle(transcript.words, transcript.sample_rate), transcript.names
    match request.response_format:
        case "text" if request.settings.speakers:
            return text_pieces(spoken_lines(transcript.words, names)), PLAIN
        case "text":
            return text_pieces(chain(_shown_text(transcript, request), ("\n",))), PLAIN
        case "srt":
            return text_pieces(srt_blocks(lines, names)), PLAIN
        case "vtt":
            return text_pieces(vtt_blocks(lines, names)), PLAIN
        case "json":
            asked = {"logprobs": _logprobs(transcript, empty=None)} if request.logprobs else {}
            asked |= _formatted(transcript, request.settings.formatting)
            shown = TextParts(_shown_text(transcript, request))
            return json_pieces({"text": shown, **asked, "usage": _duration(transcript)}), "application/json"
    if request.response_format == DIARIZED:
        segments = (diarized_segment(number, line, names) for number, line in enumerate(lines))
        whole: dict[str, Any] = {
            "task": request.settings.task or "transcribe",
            "duration": round(transcript.seconds, 3),
            "text": transcript.text,
            "segments": Entries(segments, at_once=SEGMENTS_AT_ONCE),
            "usage": _duration(transcript),
            **_formatted(transcript, request.settings.formatting),
        }
        return json_pieces(whole), "application/json"
    body: dict[str, Any] = {
        "task": request.settings.task or "transcribe",
        "language": language_name(transcript, request.settings),
        "duration": round(transcript.seconds, 3),
        "text": TextParts(_shown_text(transcript, request)),
        "segments": Entries(
            (_segment(number, line, names) for number, line in enumerate(lines)), at_once=SEGMENTS_AT_ONCE
        ),
        "usage": _duration(transcript),
        **_formatted(transcript, request.settings.formatting),
    }
    if request.words:
        body["words"] = Entries(word_fields(word, transcript.sample_rate, names) for word in transcript.words)
    return json_pieces(body), "application/json"


def _shown_text(transcript: Transcript, request: UploadRequest) -> Iterator[str]:
    """The text in parts; with `paragraphs` there is an empty line between two of them."""
    if not request.settings.formatting.paragraphs:
        yield transcript.text
        return
    start, words = 0, transcript.words
    while start < len(words):
        end = paragraph_end(words, start, transcript.sample_rate)
        yield ("\n\n" if start else "") + " ".join(word.text.strip() for word in words[start:end])
        start = end


def _formatted(transcript: Transcript, formatting: Formatting) -> dict[str, Any]:
    """Fields of a text that was formatted, redacted or searched; times in seconds."""
    rate = transcript.sample_rate
    fields: dict[str, Any] = {} if transcript.raw_text is None else {"raw_text": transcript.raw_text}
    if formatting.redacts:
        fields["redactions"] = Entries(_time(start, end, rate) for start, end in redacted_times(transcript.words))
    if formatting.search:
        fields["search"] = Entries(
            (
                {"query": query, "hits": Entries(_time(hit.start, hit.end, rate) for hit in hits)}
                for query, hits in transcript.hits.items()
            ),
            nested=True,
        )
    return fields


def _time(start: int, end: int, sample_rate: int) -> dict[str, float]:
    return {"start": round(start / sample_rate, 3), "end": round(end / sample_rate, 3)}


def _duration(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.seconds, 3)}


def _logprobs(transcript: Transcript, empty: list[Any] | None) -> Entries | list[Any] | None:
    """The log-probabilities of all tokens; `empty` if the model has none."""
    if not transcript.chances:
        return empty
    # None is not written, but it counts as work in `Entries`.
    return Entries(entry for word in transcript.words for entry in token_logprobs((word,)) or (None,))


def language_name(transcript: Transcript, settings: Settings) -> str:
    """The name of the text's language, as in OpenAI's responses."""
    code = "en" if settings.task else transcript.language or settings.language
    return NAMES[code] if code else "unknown"


def diarized_segment(number: int, line: Subtitle, names: Sequence[str]) -> dict[str, Any]:
    """A segment of one speaker, as in OpenAI's responses and events."""
    return {
        "type": "transcript.text.segment",
        "id": f"seg_{number:03}",
        "start": round(line.start, 3),
        "end": round(line.end, 3),
        "text": line.text,
        "speaker": letter_name(line.speaker or 0, names),
    }


def _segment(number: int, line: Subtitle, names: Sequence[str]) -> dict[str, Any]:
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
        **({} if line.speaker is None else {"speaker": letter_name(line.speaker, names)}),
    }


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {encode_json(body)}\n\n".encode()


def sse_delta(delta: str, transcript: Transcript, first: int, request: UploadRequest) -> bytes:
    """The event with a delta, and with the requested fields for the words from index `first` on; empty if there is
    nothing to send."""
    extras: dict[str, Any] = {}
    words = transcript.words[first:]
    if request.words:
        extras["words"] = [word_fields(word, transcript.sample_rate, transcript.names) for word in words]
    if request.logprobs:
        extras["logprobs"] = token_logprobs(words) or []
    if not delta and not any(extras.values()):
        return b""
    return sse({"type": "transcript.text.delta", "delta": delta, **extras})


class SegmentEvents:
    """The events with segments of one speaker each, as soon as their labels are known."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        # Words and segments that were sent.
        self._words = self._segments = 0

    def due(self, ended: bool = False) -> list[bytes]:
        """The events that are due now. The last segment may go on until the transcript has `ended`."""
        known = self._transcript.words[self._words : self._transcript.labelled]
        lines = subtitles(known, self._transcript.sample_rate)
        events = []
        for line in lines if ended else lines[:-1]:
            events.append(sse(diarized_segment(self._segments, line, self._transcript.names)))
            self._segments, self._words = self._segments + 1, self._words + len(line.words)
        return events


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
    extra |= _formatted(transcript, request.settings.formatting)
    shown = TextParts(_shown_text(transcript, request))
    yield from json_pieces({"type": "transcript.text.done", "text": shown, "usage": usage, **extra})
    yield b"\n\ndata: [DONE]\n\n"
