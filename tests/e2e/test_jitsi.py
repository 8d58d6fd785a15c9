"""A Jitsi meeting: the flow of opus-transcriber-proxy, which connects Jitsi's video bridge to transcription services.

It has an OpenAI client (provider `openai_custom`) that is imitated here message by message: one socket for each
participant, 24 kHz in base64, a commit when a participant is silent, and a close after any error but an empty commit.
"""

from __future__ import annotations

from typing import Any

from websockets.typing import Subprotocol

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, DELTA, raw_client
from tests.realtime.gateway_doubles import silence, tone

KEY = "the-key-of-the-meeting"
UPDATE = {
    "type": "transcription",
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24_000},
            "noise_reduction": {"type": "near_field"},
            "transcription": {"model": "gpt-4o-mini-transcribe", "language": "en"},
            "turn_detection": {
                "type": "server_vad",
                "threshold": 0.5,
                "prefix_padding_ms": 300,
                "silence_duration_ms": 300,
            },
        }
    },
    "include": ["item.input_audio_transcription.logprobs"],
}
# All others are logged as unexpected by the proxy.
KNOWN = {
    "session.created",
    "session.updated",
    "input_audio_buffer.committed",
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "conversation.item.added",
    "conversation.item.done",
    DELTA,
    COMPLETED,
}


async def test_a_participant_of_a_meeting_is_transcribed(serve: Serve) -> None:
    protocols = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{KEY}")]
    async with serve(auth={"keys": (KEY,)}) as running:
        url = f"{running.ws}?intent=transcription"
        events: list[dict[str, Any]] = []
        async with raw_client(url, subprotocols=protocols) as client:
            assert client.socket.subprotocol == "realtime"
            # The proxy sends its settings when the socket opens, and again with another prompt.
            await client.send("session.update", session=UPDATE)
            await client.send("session.update", session=UPDATE)
            audio = tone(1.3) + silence(0.6)
            for start in range(0, len(audio), 960):
                await client.append(audio[start : start + 960])
            events += await client.until(COMPLETED)
            await client.send("input_audio_buffer.commit")
            error = await client.receive()
        assert (error["error"]["type"], error["error"]["code"]) == (
            "invalid_request_error",
            "input_audio_buffer_commit_empty",
        )
    assert {event["type"] for event in events} == KNOWN
    deltas = "".join(event["delta"] for event in events if event["type"] == DELTA)
    assert events[-1]["transcript"] == deltas.strip() == "w1 w2 w3"
    assert {event["item_id"] for event in events if "item_id" in event} == {events[-1]["item_id"]}
