"""Files as Deepgram's clients send them: the body is the audio."""

from __future__ import annotations

import hashlib
import io
import wave
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.realtime.gateway_doubles import FakeEngine, silence, tone

SPOKEN = tone(1.3, 16_000) + silence(1.0, 16_000) + tone(0.9, 16_000)


def wav(pcm: bytes, rate: int = 16_000) -> bytes:
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm)
    return written.getvalue()


async def post(running: Any, body: Any, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(f"{running.base_url}/listen", content=body, **options)


async def test_a_file_is_answered_in_deepgrams_shape(serve: Serve) -> None:
    body = wav(SPOKEN)
    async with serve(FakeEngine(words=["Hello,", "there."])) as running:
        answer = await post(running, body, params={"model": "nova-3", "smart_format": "true", "utterances": "true"})
    assert answer.status_code == 200
    metadata, results = answer.json()["metadata"], answer.json()["results"]
    assert metadata["request_id"] == answer.headers["dg-request-id"]
    assert metadata["sha256"] == hashlib.sha256(body).hexdigest() and metadata["channels"] == 1
    assert metadata["duration"] == pytest.approx(3.2, abs=0.01)
    assert list(metadata["model_info"]) == metadata["models"]
    (best,) = results["channels"][0]["alternatives"]
    assert best["transcript"] == "Hello, there. Hello, there. Hello,"
    assert [word["punctuated_word"] for word in best["words"]] == best["transcript"].split()
    first, second = results["utterances"]
    assert first["transcript"] == "Hello, there. Hello," and second["transcript"] == "there. Hello,"
    assert first["words"] + second["words"] == best["words"]
    assert (second["start"], second["end"]) == (second["words"][0]["start"], second["words"][-1]["end"])


async def test_plain_words_and_no_utterances_unless_asked_for(serve: Serve) -> None:
    async with serve(FakeEngine(words=["Hello,", "there."])) as running:
        answer = (await post(running, wav(SPOKEN), headers={"Content-Type": "audio/wav"})).json()
    assert answer["results"]["channels"][0]["alternatives"][0]["transcript"] == "hello there hello there hello"
    assert "utterances" not in answer["results"]


@pytest.mark.parametrize(
    ("query", "body", "seconds"),
    [
        ("encoding=linear16&sample_rate=16000", SPOKEN, 3.2),
        ("encoding=linear16&sample_rate=8000", tone(2.0, 8_000), 2.0),
        ("encoding=mulaw&sample_rate=8000", (b"\x90" * 8 + b"\x10" * 8) * 500, 1.0),
        ("encoding=mulaw&sample_rate=16000", (b"\x90" * 16 + b"\x10" * 16) * 500, 1.0),
        ("encoding=alaw&sample_rate=48000", (b"\x9a" * 48 + b"\x1a" * 48) * 500, 1.0),
    ],
)
async def test_raw_samples_say_in_the_query_what_they_are(
    serve: Serve, query: str, body: bytes, seconds: float
) -> None:
    async with serve() as running:
        answer = await post(running, body, params=httpx.QueryParams(query))
    assert answer.status_code == 200
    assert answer.json()["metadata"]["duration"] == pytest.approx(seconds, abs=0.01)
    assert answer.json()["metadata"]["sha256"] == hashlib.sha256(body).hexdigest()
    assert answer.json()["results"]["channels"][0]["alternatives"][0]["transcript"].startswith("w1 w2")


@pytest.mark.parametrize(
    ("body", "options", "status", "code", "text"),
    [
        (b'{"url": "https://a.example"}', {"headers": {"Content-Type": "application/json"}}, 400, "Bad Request", "url"),
        (b"", {}, 400, "Bad Request", "empty"),
        (b"this is not audio", {}, 400, "Bad Request", "WebM"),
        (b"x", {"params": {"multichannel": "true"}}, 400, "Bad Request", "multichannel"),
        (b"x", {"params": {"redact": "pii"}}, 400, "Bad Request", "redact"),
        (b"x", {"params": httpx.QueryParams("redact=pii&redact=false")}, 400, "Bad Request", "redact"),
        (b"x", {"params": {"callback": "https://a.example"}}, 400, "Bad Request", "callback"),
        (b"x", {"params": {"utt_split": "long"}}, 400, "Bad Request", "utt_split"),
        (b"x", {"params": httpx.QueryParams("language=en&language=de")}, 400, "Bad Request", "language"),
        (b"x" * 5000, {}, 413, "Request Entity Too Large", "larger"),
    ],
)  # fmt: skip
async def test_refusals_have_deepgrams_shape(
    serve: Serve, body: bytes, options: dict[str, Any], status: int, code: str, text: str
) -> None:
    async with serve(limits={"upload_bytes": 4096}) as running:
        answer = await post(running, body, **options)
    assert answer.status_code == status
    assert set(answer.json()) == {"err_code", "err_msg", "request_id"}
    assert answer.json()["err_code"] == code and text in answer.json()["err_msg"]
    assert answer.headers["dg-request-id"] == answer.json()["request_id"]


async def test_a_key_is_needed_as_for_sockets(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        refused = await post(running, wav(SPOKEN), headers={"Authorization": "Token another-key"})
        assert refused.status_code == 401 and refused.json()["err_code"] == "INVALID_AUTH"
        taken = await post(running, wav(SPOKEN), headers={"Authorization": "Token the-real-key"})
        assert taken.status_code == 200


async def test_a_body_of_unknown_length_is_counted_as_it_comes(serve: Serve) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(1000)

    async with serve(limits={"upload_bytes": 4096}) as running:
        answer = await post(running, pieces())
        assert answer.status_code == 413 and answer.json()["request_id"]
        again = await post(running, wav(tone(0.1, 16_000)))
        assert again.status_code == 200


async def test_files_that_wait_are_bounded_together_with_the_other_uploads(serve: Serve) -> None:
    async with serve(limits={"uploads": 0, "uploads_waiting": 0}) as running:
        answer = await post(running, wav(SPOKEN))
    assert answer.status_code == 503 and answer.json()["err_code"] == "Service Unavailable"
    assert int(answer.headers["retry-after"]) > 0
