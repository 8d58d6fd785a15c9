"""Two channels on one of Deepgram's sockets: two streams, two transcripts, one end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import raw_client
from tests.e2e.test_deepgram_client import listen, rest, text_of, until
from tests.realtime.gateway_doubles import FakeEngine, silence, tone

QUERY = "encoding=linear16&sample_rate=16000&channels=2&multichannel=true&interim_results=true&vad_events=true"


def stereo(left: bytes, right: bytes) -> bytes:
    return np.stack([np.frombuffer(left, "<i2"), np.frombuffer(right, "<i2")], axis=1).tobytes()


def finals(events: list[dict[str, Any]], channel: int) -> str:
    results = [event for event in events if event["type"] == "Results" and event["channel_index"] == [channel, 2]]
    return " ".join(filter(None, (text_of(result) for result in results if result["is_final"])))


async def test_each_channel_has_its_own_transcript(serve: Serve) -> None:
    engine = FakeEngine()
    engine.keep_audio = True
    left = tone(1.3, 16_000) + silence(1.7, 16_000)
    right = silence(0.9, 16_000) + tone(2.1, 16_000)
    audio = stereo(left, right)
    async with serve(engine) as running, raw_client(listen(running, QUERY)) as client:
        # Pieces of odd sizes cut samples in two, and channels from one another.
        for start in range(0, len(audio), 4321):
            await client.socket.send(audio[start : start + 4321])
        await client.send("KeepAlive")
        await client.send("CloseStream")
        events, code = await rest(client)
    assert code == 1000
    assert finals(events, 0) == "w1 w2 w3" and finals(events, 1) == "w1 w2 w3 w4 w5"
    assert [event["type"] for event in events].count("Metadata") == 1 and events[-1]["type"] == "Metadata"
    assert events[-1]["channels"] == 2 and events[-1]["duration"] == pytest.approx(3.0, abs=0.01)
    started = {event["channel"][0] for event in events if event["type"] == "SpeechStarted"}
    assert started == {0, 1}
    assert {event["metadata"]["request_id"] for event in events if event["type"] == "Results"} == {
        events[-1]["request_id"]
    }
    heard = [np.concatenate(stream.heard) for stream in engine.streams]
    assert np.array_equal(np.round(heard[0] * 32768).astype("<i2"), np.frombuffer(left, "<i2"))
    assert np.array_equal(np.round(heard[1] * 32768).astype("<i2"), np.frombuffer(right, "<i2"))


async def test_finalize_reaches_the_channel_it_names_and_mistakes_are_answered_once(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running, QUERY)) as client:
        await client.socket.send("{nonsense")
        await client.send("Configure", keyterms=["x"])
        assert [(await client.receive())["type"] for _ in range(2)] == ["Error", "ConfigureFailure"]
        await client.send("Finalize", channel=1)
        assert (await client.receive())["channel_index"] == [1, 2]
        await client.send("Finalize")
        both = [await client.receive() for _ in range(2)]
        assert sorted(event["channel_index"][0] for event in both) == [0, 1]
        assert all(event["from_finalize"] for event in both)


@pytest.mark.parametrize(
    ("slots", "limits", "status"),
    [(1, {}, 503), (64, {"max_sessions": 1}, 503), (64, {"sessions_per_key": 1}, 429)],
)
async def test_two_channels_need_room_for_two(serve: Serve, slots: int, limits: dict[str, int], status: int) -> None:
    async with serve(FakeEngine(slots=slots), limits=limits) as running:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(listen(running, QUERY)):
                pass
        assert refused.value.response.status_code == status
        assert len(running.gateway.sessions) == 0


async def test_both_sessions_end_with_their_socket(serve: Serve) -> None:
    async with serve(limits={"new_sessions_per_minute": 3}) as running:
        async with raw_client(listen(running, QUERY)) as client:
            await client.socket.send(stereo(tone(1.0, 16_000), tone(1.0, 16_000)))
            await client.receive()
            assert len(running.gateway.sessions) == 2
        await until(lambda: len(running.gateway.sessions) == 0 and not running.engine.active)
        # Both counted against the rate, too.
        with pytest.raises(InvalidStatus) as refused:
            async with connect(listen(running, QUERY)):
                pass
        assert refused.value.response.status_code == 429


async def test_a_channel_without_an_engine_ends_the_socket(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, raw_client(listen(running, QUERY)) as client:
        await client.socket.send(stereo(tone(0.5, 16_000), tone(0.5, 16_000)))
        await client.receive()
        engine.streams[1].die()
        _, code = await rest(client)
    assert code == 1011
