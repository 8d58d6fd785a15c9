"""A session that moves to another gateway while the first one holds silence back: every sample comes once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.client import stream as streams
from tests.e2e.raw_client import COMPLETED, RawClient, greeted_client, raw_client
from tests.engine import fakes
from tests.realtime.workers import engines
from tests.realtime.workers.test_moving import Place, begin, places, transcript

RATE = engines.RATE
POSITION = 1280
# Bytes of two seconds of speech, three of silence, and as much again.
SPEECH, SILENCE = 2 * 2 * RATE, 3 * 2 * RATE
APPENDS = 5


@pytest.fixture(scope="module")
def audio() -> bytes:
    chance = np.random.default_rng(3)
    loudness = np.repeat([20_000, 30, 20_000, 30], [2 * RATE, 3 * RATE, 2 * RATE, 3 * RATE])
    return (loudness * chance.uniform(-1, 1, len(loudness))).astype("<i2").tobytes()


async def hold_some(place: Place, client: RawClient, audio: bytes) -> tuple[str, int, Any]:
    """Speak, and be silent until audio is held. Returns the token, the number of the last event, and the stream."""
    end = SPEECH + SILENCE - APPENDS * POSITION * 2
    token = await begin(client, audio[:end])
    (entry,) = place.entries
    await fakes.until(lambda: entry.live.runner.engine_stream is not None)
    stream = entry.live.runner.engine_stream
    await fakes.until(lambda: stream._held.is_skipped)
    for start in range(end, SPEECH + SILENCE, POSITION * 2):
        await client.append(audio[start : start + POSITION * 2])
    # The first of these appends told how loud the silence is.
    await fakes.until(lambda: sum(map(len, stream._held.pieces)) == (APPENDS - 1) * POSITION)
    last = (await client.until("input_audio_buffer.acknowledged"))[-1]["seq"]
    return token, last, stream


@pytest.mark.parametrize("way", ["the gateway is frozen", "the gateway is stopped"])
async def test_audio_that_a_gateway_held_comes_once(way: str, audio: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing sends what is held but the story itself.
    monkeypatch.setattr(streams, "HELD_SECONDS", 60.0)
    async with places(build=engines.skipping) as (first, second), greeted_client(first.url) as client:
        token, last, stream = await hold_some(first, client, audio)
        if way == "the gateway is frozen":
            first.client.handoffs.on_wanted = first.client.handoffs.on_fenced = None
        else:
            first.gateway.sessions.hands_over = True
            await first.gateway.sessions.drain(1.0)
            assert not stream.holds_audio
        async with raw_client(f"{second.url}?resume={token}&after={last}") as again:
            received = (await again.receive())["received_samples"]
            sent, held = (SPEECH + SILENCE) // 2, (APPENDS - 1) * POSITION
            if way == "the gateway is frozen":
                assert sent - held - 2 * POSITION <= received <= sent - held, "what was held is sent again"
            else:
                assert received == sent, "what was held was handed over"
            await again.append(audio[received * 2 :])
            await again.send("input_audio_buffer.commit")
            said = (await again.until(COMPLETED))[-1]["transcript"]
            (entry,) = second.entries
            assert entry.live.session.source_samples == len(audio) // 2
            assert entry.live.runner.engine_stream.replay_log.end_sample == len(audio) // 2
        monkeypatch.setattr(streams.HeldAudio, "may_wait", lambda self, samples, wanted, sent: False)
        assert said and said == await transcript(second.url, audio)


async def test_the_last_audio_is_acknowledged_although_nothing_follows(audio: bytes) -> None:
    async with places(number=1, build=engines.skipping) as (only,), greeted_client(only.url) as client:
        end = SPEECH + SILENCE
        await begin(client, audio[: end - 40 * POSITION * 2])
        (entry,) = only.entries
        await fakes.until(lambda: entry.live.runner.engine_stream is not None)
        await fakes.until(lambda: entry.live.runner.engine_stream._held.is_skipped)
        for start in range(end - 40 * POSITION * 2, end, POSITION):
            await client.append(audio[start : start + POSITION])
        margin = 4 * POSITION  # look-back, frames of the detector, and a position that is not full
        acknowledged = 0
        while acknowledged < end // 2 - margin:
            acknowledged = (await client.until("input_audio_buffer.acknowledged"))[-1]["samples"]
