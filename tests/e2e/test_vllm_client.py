"""The flow of vLLM's realtime clients: utterances between commits, string errors, 16 kHz."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import RawClient, greeted_client, raw_client
from tests.realtime.gateway_doubles import FakeEngine, silence, tone

MODEL = "mistralai/Voxtral-Mini-4B-Realtime-2602"


@pytest.mark.parametrize(
    ("event", "code", "said"),
    [
        ({"type": "session.update"}, "invalid_event", "model"),
        ({"type": "session.update", "model": "nonexistent-model"}, "model_not_found", "`nonexistent-model`"),
        ({"type": "input_audio_buffer.commit", "final": True}, "model_not_validated", "session.update"),
        ({"type": "input_audio_buffer.append", "audio": "!!!"}, "invalid_audio", "base64"),
        ({"type": "input_audio_buffer.append", "audio": ""}, "invalid_audio", "empty"),
        ({"type": "input_audio_buffer.append"}, "invalid_audio", "base64"),
        ({"type": "what.is.this"}, "unknown_event", "what.is.this"),
    ],
)
async def test_every_error_is_a_string_with_its_code_and_the_socket_stays(
    serve: Serve, event: dict[str, Any], code: str, said: str
) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        if event["type"] not in ("session.update", "input_audio_buffer.commit"):
            await client.send("session.update", model=MODEL)
            await client.until("session.updated")
        await client.send(**{"kind" if key == "type" else key: value for key, value in event.items()})
        error = await client.receive()
        assert error["type"] == "error" and error["code"] == code and said in error["error"]
        assert await utterance(client, tone(1.0, 16_000)) == " w1 w2"


async def test_invalid_json_is_an_error_too(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.send("session.update", model=MODEL)
        await client.until("session.updated")
        await client.socket.send("{not json")
        assert (await client.receive())["code"] == "invalid_json"
        assert await utterance(client, tone(1.0, 16_000)) == " w1 w2"


async def utterance(client: RawClient, audio: bytes) -> str:
    """Start, unpaced audio in small chunks, end; the text of `done`, which must equal the deltas."""
    await client.send("session.update", model=MODEL)
    await client.until("session.updated")
    await client.send("input_audio_buffer.commit")
    for start in range(0, len(audio), 4096):
        await client.append(audio[start : start + 4096])
    await client.send("input_audio_buffer.commit", final=True)
    events = await client.until("transcription.done")
    done = events[-1]
    assert "".join(event["delta"] for event in events if event["type"] == "transcription.delta") == done["text"]
    assert {event["type"] for event in events} <= {"transcription.delta", "transcription.done"}
    assert done["usage"]["total_tokens"] == done["usage"]["prompt_tokens"] + done["usage"]["completion_tokens"]
    return str(done["text"])


async def test_two_utterances_on_one_socket(serve: Serve) -> None:
    async with serve() as running, raw_client(running.ws) as client:
        created = await client.receive()
        assert created["type"] == "session.created" and created["id"].startswith("sess") and created["created"] > 0
        assert await utterance(client, tone(2.1, 16_000)) == " w1 w2 w3 w4 w5"
        assert await utterance(client, tone(1.3, 16_000) + silence(0.5, 16_000)) == " w6 w7 w8"


async def test_deltas_come_while_audio_still_arrives(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.send("session.update", model=MODEL)
        await client.until("session.updated")
        await client.send("input_audio_buffer.commit")
        await client.append(tone(2.1, 16_000))
        assert (await client.receive())["type"] == "transcription.delta"
        # A second start while one runs changes nothing.
        await client.send("input_audio_buffer.commit")
        await client.send("input_audio_buffer.commit", final=True)
        assert (await client.until("transcription.done"))[-1]["text"] == " w1 w2 w3 w4 w5"


async def test_empty_utterance_is_done_with_empty_text(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        assert await utterance(client, b"") == ""
        assert await utterance(client, tone(1.0, 16_000)) == " w1 w2"


async def test_audio_before_the_starting_commit_is_transcribed(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.send("session.update", model="fake-model")
        await client.until("session.updated")
        await client.append(tone(1.0, 16_000))
        await client.send("input_audio_buffer.commit")
        await client.send("input_audio_buffer.commit", final=True)
        assert (await client.until("transcription.done"))[-1]["text"] == " w1 w2"


async def test_failed_stream_is_a_processing_error(serve: Serve) -> None:
    engine = FakeEngine()
    engine.mute_flush = True
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.send("session.update", model=MODEL)
        await client.until("session.updated")
        await client.append(tone(1.0, 16_000))
        await client.send("input_audio_buffer.commit", final=True)
        while not engine.streams or not engine.streams[0].flushes:
            await client.until("transcription.delta")
        engine.mute_flush = False
        engine.streams[0].fail()
        error = (await client.until("error"))[-1]
        assert error["code"] == "processing_error" and isinstance(error["error"], str)
        assert await utterance(client, tone(1.0, 16_000)) == " w1 w2"
