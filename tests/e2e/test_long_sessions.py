"""Realistic sessions: at the pace of speech, an hour long, and a hundred at once without a blocked loop."""

from __future__ import annotations

import asyncio
import base64
import time

from openai import AsyncOpenAI

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.e2e.test_openai_client import DELTA
from tests.realtime.gateway_doubles import FakeEngine, silence, tone


async def test_openai_package_in_real_time_gets_text_while_speech_goes_on(serve: Serve) -> None:
    audio = silence(0.3) + tone(2.0) + silence(0.9)
    async with serve() as running, AsyncOpenAI(base_url=running.base_url, api_key="x") as client:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            begun = time.monotonic()

            async def speak() -> None:
                for number, start in enumerate(range(0, len(audio), 2400)):
                    await connection.input_audio_buffer.append(
                        audio=base64.b64encode(audio[start : start + 2400]).decode()
                    )
                    await asyncio.sleep(max(0.0, begun + (number + 1) * 0.05 - time.monotonic()))

            speaking = asyncio.create_task(speak())
            first_delta_at = None
            async with asyncio.timeout(15):
                while (event := await connection.recv()).type != COMPLETED:
                    if event.type == DELTA and first_delta_at is None:
                        first_delta_at = time.monotonic() - begun
            await speaking
    assert event.transcript == "w1 w2 w3 w4 w5"
    # The speaker was not done yet.
    assert first_delta_at is not None and first_delta_at < 2.3


async def test_session_of_an_hour_keeps_its_times_and_nothing_else(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.update(
            format={"type": "audio/pcm", "rate": 16_000}, include=["item.input_audio_transcription.words"]
        )
        session = next(iter(running.gateway.sessions.entries.values())).live.session
        most_kept = 0
        for minute in range(60):
            await client.append(tone(1.0, 16_000))
            await client.send("input_audio_buffer.gap", duration_ms=59_000)
            events = await client.until(COMPLETED)
            started = next(event for event in events if event["type"].endswith("speech_started"))
            assert abs(started["audio_start_ms"] - minute * 60_000) <= 400
            assert abs(events[-1]["words"][0]["start"] - minute * 60) < 1.0
            most_kept = max(most_kept, session.stall.kept_samples)
            assert not session.turns.ended and session.turns.current is None
        assert len(engine.streams) == 1 and engine.streams[0].samples == 3600 * 16_000
        assert most_kept <= 61 * 16_000


async def test_hundred_streams_at_the_pace_of_speech_make_no_blocking_call(serve: Serve) -> None:
    """The blockbuster fixture fails blocking calls."""
    engine = FakeEngine(slots=200)

    async def one(url: str, number: int) -> str:
        async with greeted_client(url) as client:
            await asyncio.sleep(number * 0.001)
            audio = tone(0.9) + silence(0.7)
            for start in range(0, len(audio), 4800):
                await client.append(audio[start : start + 4800])
                await asyncio.sleep(0.05)
            return str((await client.until(COMPLETED))[-1]["transcript"])

    async with serve(engine) as running:
        texts = await asyncio.gather(*(one(running.ws, number) for number in range(100)))
    assert texts == ["w1 w2"] * 100
