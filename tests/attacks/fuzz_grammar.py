"""Valid conversations of every dialect, valid requests, and ways to spoil them. A seed gives the same bytes again."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

from tests.attacks.target import BOUNDARY, form_field, form_file

SILENCE = base64.b64encode(bytes(2400)).decode()
NOISE = base64.b64encode(Random(1).randbytes(2400)).decode()
STRANGE: list[Any] = [
    *(None, True, False, -1, 0, 1, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**53 + 1, 2**63, 2**64, -(2**70), 10**400),
    *("", "\x00", "é", "\ud83d\ude00", "a" * 5000, "null", "-1", "../../etc/passwd", "%s%n", "\u202e", "0" * 300),
    *([], {}, [[]], [None] * 50, {"": {}}, {"type": "type"}, [[[[[[[[[[]]]]]]]]]], {"a": [{"b": [{}]}]}),
]
KNOWN_KEYS = ["type", "session", "audio", "model", "final", "event_id", "samples", "items", "include", "format", "x"]

Message = dict[str, Any]


def _update(**audio_input: Any) -> Message:
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": audio_input}}}


OPENAI: list[Message] = [
    {"type": "input_audio_buffer.append", "audio": SILENCE},
    {"type": "input_audio_buffer.append", "audio": NOISE, "event_id": "e"},
    {"type": "input_audio_buffer.commit", "event_id": "c"},
    {"type": "input_audio_buffer.clear"},
    {"type": "input_audio_buffer.gap", "duration_ms": 50},
    {"type": "input_audio_buffer.gap", "samples": 100, "event_id": "g"},
    {"type": "input_audio_buffer.inject", "items": [{"offset": 0, "length": 1, "sample": 0, "hash": "00" * 16}]},
    _update(turn_detection=None),
    _update(turn_detection={"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200}),
    _update(turn_detection={"type": "semantic_vad", "eagerness": "high"}),
    _update(format={"type": "audio/pcm", "rate": 16000}),
    _update(format={"type": "audio/pcmu"}),
    _update(format={"type": "audio/pcm-f32", "rate": 48000}),
    _update(format={"type": "audio/webm", "transport": "binary"}),
    _update(transcription={"model": "m", "language": "en", "prompt": "p", "delay": "low", "keywords": ["k"]}),
    _update(noise_reduction={"type": "near_field"}),
    {"type": "session.update", "session": {"include": ["session.resume", "input_audio_buffer.acks"]}},
    {"type": "response.create"},
]
BETA: list[Message] = [
    *OPENAI[:4],
    {"type": "transcription_session.update", "session": {"input_audio_format": "g711_alaw"}},
    {"type": "transcription_session.update", "session": {"turn_detection": None, "include": None}},
    {"type": "transcription_session.update", "session": {"input_audio_transcription": {"model": "m"}}},
    {"type": "session.update", "session": {"input_audio_format": "pcm16"}},
]
VLLM: list[Message] = [
    {"type": "session.update", "model": "mistralai/Voxtral-Mini-4B-Realtime-2602"},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.append", "audio": SILENCE},
    {"type": "input_audio_buffer.commit", "final": True},
]
DEEPGRAM: list[Message] = [
    {"type": "KeepAlive"},
    {"type": "Finalize"},
    {"type": "Configure", "keyterms": ["a"]},
    {"type": "CloseStream"},
]
FLUX: list[Message] = [
    {"type": "Configure", "thresholds": {"eot_threshold": 0.8, "eager_eot_threshold": 0.4, "eot_timeout_ms": 900}},
    {"type": "Configure", "thresholds": {"eager_eot_threshold": None}, "keyterms": ["a"]},
    {"type": "ForceEndTurn"},
    {"type": "KeepAlive"},
    {"type": "CloseStream"},
]
DIALECTS: dict[str, tuple[str, list[Message]]] = {
    "openai": ("/v1/realtime?intent=transcription", OPENAI),
    "beta": ("/v1/realtime?model=m", BETA),
    "vllm": ("/v1/realtime", VLLM),
    "deepgram": ("/v1/listen?encoding=linear16&sample_rate=16000&interim_results=true", DEEPGRAM),
    "flux": ("/v2/listen?encoding=linear16&sample_rate=16000&eager_eot_threshold=0.3", FLUX),
}


def mutate(value: Any, dice: Random, copies: int = 40) -> Any:
    """The same shape with something wrong in it. At most one list of it is repeated: or a message might never end."""
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = dice.choice(list(changed))
        action = dice.random()
        if action < 0.15:
            del changed[key]
        elif action < 0.3:
            changed[dice.choice(KNOWN_KEYS)] = dice.choice(STRANGE)
        else:
            changed[key] = mutate(changed[key], dice, copies)
        return changed
    if isinstance(value, list) and value and dice.random() < 0.5:
        times = dice.choice((1, 1, copies))
        return [mutate(value[0], dice, copies if times == 1 else 1), *value[1:]] * times
    if isinstance(value, str) and value and dice.random() < 0.4:
        at = dice.randrange(len(value))
        return value[:at] + dice.choice(("\x00", "=", " ", "é", '"', "")) + value[at + dice.randrange(3) :]
    return dice.choice(STRANGE)


def spoil(data: bytes, dice: Random) -> bytes:
    """Some bytes flipped, cut out, doubled or put in."""
    spoiled = bytearray(data)
    for _ in range(dice.randint(1, 6)):
        if not spoiled:
            break
        at = dice.randrange(len(spoiled))
        match dice.randrange(5):
            case 0:
                spoiled[at] ^= 1 << dice.randrange(8)
            case 1:
                del spoiled[at : at + dice.randint(1, 40)]
            case 2:
                spoiled[at:at] = spoiled[at : at + dice.randint(1, 40)]
            case 3:
                spoiled[at:at] = dice.randbytes(dice.randint(1, 20))
            case 4:
                spoiled[at:at] = dice.choice((b"\r\n", b"\x00", b"--", b'"', b"\xff\xff\xff\xff", b"{}", b"[[[["))
    return bytes(spoiled)


def socket_message(seeds: list[Message], dice: Random) -> str | bytes:
    """One message: often a good one, since mistakes only matter in a session that lives."""
    kind = dice.random()
    seed: Any = dice.choice(seeds)
    if kind < 0.35:
        return json.dumps(seed)
    if kind < 0.75:
        for round_number in range(dice.randint(1, 3)):
            seed = mutate(seed, dice, 1 if round_number else 40)
        return json.dumps(seed)
    if kind < 0.85:
        return spoil(json.dumps(seed).encode(), dice).decode("utf-8", "replace")
    if kind < 0.95:
        return dice.randbytes(dice.randint(0, 2000))
    return "[" * dice.randint(1, 3000) + '{"type":' * dice.randint(0, 50)


def http_request(key: str, dice: Random) -> bytes:
    """One request on a connection of its own: a good one, or one that is spoiled in its parts or as bytes."""
    path, body, content_type = _request_body(dice)
    if dice.random() < 0.3:
        body = spoil(body, dice)
    lines = [
        f"{dice.choice(('POST', 'POST', 'POST', 'GET', 'PUT', 'OPTIONS'))} {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        "Connection: close",
        f"Content-Type: {content_type}",
    ]
    if dice.random() < 0.25:
        lines.append("Transfer-Encoding: chunked")
        body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    whole = head + body
    return spoil(whole, dice) if dice.random() < 0.3 else whole


def _request_body(dice: Random) -> tuple[str, bytes, str]:
    kind = dice.random()
    if kind < 0.4:
        path = dice.choice(("/v1/realtime/client_secrets", "/v1/realtime/transcription_sessions", "/v1/audio/inject"))
        seeds: list[Any] = [
            {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": OPENAI[8]["session"]},
            BETA[4]["session"],
            {"items": OPENAI[6]["items"]},
        ]
        seed = dice.choice(seeds)
        if dice.random() < 0.8:
            seed = mutate(seed, dice)
        return path, json.dumps(seed).encode(), "application/json"
    if kind < 0.8:
        return _form(dice)
    path = dice.choice(("/v1/models", "/v1/models/x", "/capacity", "/health", "/nowhere", "/", "/v1/realtime"))
    return path + dice.choice(("", "?a=b", "?" + "q" * 500, "/%00", "/..%2f..")), b"", "text/plain"


def _form(dice: Random) -> tuple[str, bytes, str]:
    fields = ("model", "language", "prompt", "response_format", "stream", "timestamp_granularities[]", "temperature")
    values = ("", "en", "json", "verbose_json", "true", "word", "\x00", "x" * 3000, "é")
    parts = [form_field(dice.choice(fields), dice.choice(values)) for _ in range(dice.randrange(6))]
    parts.append(form_file(dice.choice((b"", WAV, WAV[:60], spoil(WAV, dice), dice.randbytes(300)))))
    dice.shuffle(parts)
    body = b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
    path = dice.choice(("/v1/audio/transcriptions", "/v1/audio/transcriptions", "/v1/audio/render"))
    return path, body, f"multipart/form-data; boundary={BOUNDARY}"


def _wav(samples: int) -> bytes:
    data = bytes(2 * samples)
    size = len(data).to_bytes(4, "little")
    return (
        b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00"
        b"\x80\x3e\x00\x00\x00\x7d\x00\x00\x02\x00\x10\x00data" + size + data
    )


WAV = _wav(1600)
