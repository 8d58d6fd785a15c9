"""Clients' texts that could start a header, a log line or a terminal command, in every place that takes text."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.logs import MAX_LINES, LineFormatter, RateLimitedHandler
from realtime.serving.uvicorn_protocols import MAX_HEADER_CHARACTERS, clean_headers, header_text
from tests.e2e.conftest import Running, Serve
from tests.realtime.gateway_doubles import ENGLISH, tone

MARK = "zzmarkzz"
# The end of a header and another one; the end of a head; a line of the log; a terminal's escape; other ends of lines.
HOSTILE = [
    f"a\r\nX-{MARK}: yes",
    f"a\r\n\r\n<html>{MARK}</html>",
    f"a\n2026-01-01 00:00:00,000 ERROR tickertape: {MARK}",
    f"a\x1b]0;{MARK}\x07\x1b[2J",
    f"a\u2028{MARK}\x85\x00\x7f\u202e",
    f"ä€🐎\ud83d{MARK}",
]
LINE = re.compile(r"\d{4}-\d\d-\d\d [^\r\n]*|    \| [^\r\n]*")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PATHS = ("/v1/realtime", "/realtime", "/v1/listen")
QUERY = (
    "model",
    "resume",
    "after",
    "call_id",
    "intent",
    "encoding",
    "sample_rate",
    "channels",
    "multichannel",
    "language",
)
QUERY += ("keyterm", "keywords", "endpointing", "utterance_end_ms", "interim_results", "redact", "callback", "tag", "x")


def in_url(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The log as `tickertape serve` writes it, at its most talkative level."""
    stream = io.StringIO()
    handler = RateLimitedHandler(stream)
    handler.setFormatter(LineFormatter(FORMAT))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)
    handler.close()


def check_log(log: io.StringIO) -> None:
    """Every line is one that the server began, and says nothing to a terminal."""
    for line in re.split("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", log.getvalue().removesuffix("\n")):
        assert not line or LINE.fullmatch(line), line
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in line), line
    assert " ERROR " not in log.getvalue().replace(f"ERROR tickertape: {MARK}", ""), log.getvalue()


async def exchange(running: Running, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            return await reader.read(2**20)
    finally:
        writer.transport.abort()


def head_of(answer: bytes) -> bytes:
    head, end, _ = answer.partition(b"\r\n\r\n")
    assert end and head.startswith(b"HTTP/1.1 "), answer[:200]
    lines = head.split(b"\r\n")[1:]
    assert all(re.fullmatch(rb"[A-Za-z0-9-]+:[\t -~]*", line) for line in lines), head
    assert not any(line.lower().startswith(f"x-{MARK}".encode()) for line in lines), head
    return head


def request(method: str, target: str, extra: str = "", body: bytes = b"") -> bytes:
    fixed = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    head = f"{method} {target} HTTP/1.1\r\n{fixed}{extra}\r\n"
    return head.encode("utf-8", "surrogatepass") + body


def upgrade(target: str, extra: str = "") -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{extra}\r\n".encode()


@pytest.mark.parametrize("text", HOSTILE)
async def test_queries_of_sockets_and_requests(serve: Serve, log: io.StringIO, text: str) -> None:
    async with serve() as running:
        for path in PATHS:
            for name in QUERY:
                for query in (f"{name}={in_url(text)}", f"{name}=1&{name}={in_url(text)}", f"{in_url(text)}=1"):
                    target = f"{path}?encoding=linear16&{query}" if path == "/v1/listen" else f"{path}?{query}"
                    head_of(await exchange(running, upgrade(target)))
        for target in ("/v1/listen", "/v1/models", "/v1/audio/transcriptions", "/", "/metrics"):
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                head_of(await exchange(running, request(method, f"{target}?language={in_url(text)}&x={in_url(text)}")))
    check_log(log)


@pytest.mark.parametrize("text", HOSTILE)
async def test_paths(serve: Serve, log: io.StringIO, text: str) -> None:
    async with serve() as running:
        for path in ("/", "/v1/models/", "/v1/audio/", "/v1/realtime/", "/v1/listen/"):
            for method in ("GET", "POST"):
                head_of(await exchange(running, request(method, path + in_url(text))))
                head_of(await exchange(running, request(method, f"{path}{in_url(text)}/")))
            head_of(await exchange(running, upgrade(path + in_url(text))))
    check_log(log)


async def test_headers(serve: Serve, log: io.StringIO) -> None:
    """A parser of HTTP lets no line end into a value, but much else."""
    value = f"a\x0b\x1b[2J\x7f\t\x85{MARK}"
    names = (
        "Host",
        "Origin",
        "Authorization",
        "Cookie",
        "User-Agent",
        "OpenAI-Beta",
        "Sec-WebSocket-Protocol",
        "Referer",
    )
    names += (
        "Access-Control-Request-Headers",
        "Access-Control-Request-Method",
        "Content-Type",
        "Content-Length",
        "Range",
    )
    names += ("X-Forwarded-For", "If-None-Match", "Transfer-Encoding", "Expect")
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        for name in names:
            for hostile in (value, value.encode().decode("latin-1"), f"a{MARK}\x00"):
                for path in ("/v1/models", "/v1/listen", "/", "/v1/models/"):
                    for method in ("GET", "OPTIONS"):
                        answer = await exchange(running, request(method, path, f"{name}: {hostile}\r\n"))
                        assert not answer or head_of(answer)
                answer = await exchange(running, upgrade("/v1/realtime", f"{name}: {hostile}\r\n"))
                assert not answer or head_of(answer)
    check_log(log)


@pytest.mark.parametrize("text", HOSTILE[:5])
async def test_bodies(serve: Serve, log: io.StringIO, text: str) -> None:
    async with serve() as running, httpx.AsyncClient(base_url=running.http, timeout=30) as client:
        for path in (
            "/v1/realtime/client_secrets",
            "/v1/realtime/transcription_sessions",
            "/v1/audio/inject",
            "/v1/listen",
        ):
            for body in ({"session": {text: text}}, {"session": text}, {text: text}, {"url": text}, [text]):
                await client.post(path, json=body)
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/render"):
            for name in ("model", "language", "prompt", "response_format", "temperature", "keywords[]", "stream", text):
                files = {"file": (text, b"not audio " + text.encode(), "audio/wav")}
                await client.post(path, data={name: text}, files=files)
            await client.post(path, files={text: (text, b"x")})
    check_log(log)


@pytest.mark.parametrize("text", HOSTILE[:5])
async def test_events(serve: Serve, log: io.StringIO, text: str) -> None:
    inputs: list[Any] = [
        {"format": {"type": text}},
        {"format": text},
        {"turn_detection": {"type": text}},
        {"transcription": {"language": text}},
        {"transcription": {"model": text, "prompt": text, "keywords": [text], "languages": [text], "task": text}},
        {"transcription": {"prompt": text}},
        {"noise_reduction": {"type": text}},
        {text: text},
    ]
    async with serve() as running:
        async with connect(running.ws) as socket:
            for audio_input in inputs:
                update = {"type": "session.update", "session": {"audio": {"input": audio_input}, "include": [text]}}
                await socket.send(json.dumps(update))
            for event in ({"type": text}, {"type": "input_audio_buffer.append", "audio": text}, {text: text}, text):
                await socket.send(json.dumps(event))
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA" * 20_000, "x": text}))
            await socket.send(json.dumps({"type": "input_audio_buffer.commit", "event_id": text}))
            await socket.send(text.encode())
            await socket.send(json.dumps({"type": "session.update", "session": {}}))
            await socket.close(1000, text[:30])
        query = f"encoding=linear16&keyterm={in_url(text)}&language={in_url(text)}"
        try:
            async with connect(f"ws://127.0.0.1:{running.port}/v1/listen?{query}") as socket:
                for event in (
                    {"type": text},
                    {"type": "Configure", "keyterms": [text]},
                    {"type": "Finalize", "channel": text},
                ):
                    await socket.send(json.dumps(event))
                await socket.send(tone(0.2))
                await socket.close(4321, text[:30])
        except (InvalidStatus, ConnectionClosed):
            pass
    check_log(log)


async def test_a_value_with_a_line_end_is_refused_with_an_answer(serve: Serve, log: io.StringIO) -> None:
    """It was dropped without one, and had a stack trace with the client's lines in the log."""
    target = f"/v1/listen?encoding=linear16&sample_rate={in_url(HOSTILE[0])}"
    async with serve() as running:
        answer = await exchange(running, upgrade(target))
        assert answer.startswith(b"HTTP/1.1 400 ") and b"\r\ndg-error: " in head_of(answer)
        answer = await exchange(running, request("POST", target))
        assert answer.startswith(b"HTTP/1.1 400 ") and b"\r\ndg-error: " in head_of(answer)
    assert log.getvalue() == ""


async def test_a_client_cannot_flood_the_log(serve: Serve, log: io.StringIO) -> None:
    async with serve() as running, connect(running.ws) as socket:
        running.engine.takes(ENGLISH)
        for number in range(300):
            update = {"audio": {"input": {"transcription": {"prompt": f"a prompt that is not taken, {number}"}}}}
            await socket.send(json.dumps({"type": "session.update", "session": update}))
        updated = 0
        while updated < 300:
            updated += json.loads(await socket.recv())["type"] == "session.updated"
        lines = log.getvalue().splitlines()
        assert len(lines) == MAX_LINES and "the model does not support prompt" in lines[0]


@settings(deadline=None)
@given(st.text())
def test_a_header_is_one_line_of_ascii(text: str) -> None:
    value = header_text(text)
    assert all(" " <= letter <= "~" for letter in value) and len(value) <= 10 * MAX_HEADER_CHARACTERS


@settings(deadline=None)
@given(st.binary())
def test_no_header_that_is_sent_begins_another(value: bytes) -> None:
    ((_, cleaned),) = clean_headers([(b"x", value)])
    assert not re.search(rb"[\x00-\x1f\x7f]", cleaned)
    assert cleaned == value or re.search(rb"[\x00-\x1f\x7f]", value)


@pytest.mark.parametrize("path", PATHS)
async def test_a_plain_request_is_told_of_the_upgrade_that_it_lacks(serve: Serve, path: str) -> None:
    async with serve() as running, httpx.AsyncClient(base_url=running.http) as client:
        answer = await client.get(path)
        assert answer.status_code == 426
        assert answer.headers["upgrade"] == "websocket" and answer.headers["connection"].lower() == "upgrade"
        body = answer.json()
        text = body["err_msg"] if path == "/v1/listen" else body["error"]["message"]
        assert "proxy" in text and "'Upgrade'" in text
        assert (await client.head(path)).status_code == 426
        # Other methods are as they were.
        assert (await client.delete(path)).status_code == 405
