"""Appends take a fast path if they can and a general one otherwise: the audio is the same."""

from __future__ import annotations

import asyncio
import base64
import json
import random

import numpy as np
import pytest

from realtime.serving.inbox import Inbox
from tests.e2e.conftest import Serve
from tests.e2e.test_flooding import TEXT, bare_socket, frame

SAMPLES = 160


def event(kind: str, **fields: object) -> bytes:
    return frame(TEXT, json.dumps({"type": kind, **fields}).encode())


def append(samples: np.ndarray) -> bytes:
    return event("input_audio_buffer.append", audio=base64.b64encode(samples.astype("<i2").tobytes()).decode())


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_heard_does_not_depend_on_what_arrives_together(
    serve: Serve, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[bool] = []
    handle_now = Inbox.handle_now
    monkeypatch.setattr(Inbox, "handle_now", lambda inbox, text: at_once.append(handle_now(inbox, text)) or at_once[-1])
    chance = random.Random(seed)
    audio = np.arange(40 * SAMPLES, dtype=np.int16)
    pieces = [append(piece) for piece in np.split(audio, 40)]
    # Mistakes and other messages between the audio do not change its order.
    for place in (30, 20, 10):
        pieces.insert(place, chance.choice([event("nonsense"), frame(TEXT, b"{"), event("input_audio_buffer.commit")]))
    async with serve() as running, bare_socket(running) as (reader, writer):
        running.engine.keep_audio = True
        detection = {"turn_detection": None, "format": {"type": "audio/pcm", "rate": 16_000}}
        writer.write(event("session.update", session={"type": "transcription", "audio": {"input": detection}}))
        await reader.readuntil(b"session.updated")
        data = b"".join(pieces)
        while data:
            # One message at a time, a part of one, or many.
            size = chance.choice([len(pieces[0]), chance.randint(1, 100), chance.randint(1, 20_000)])
            writer.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0.002)
        async with asyncio.timeout(20):
            while not running.engine.streams or running.engine.streams[0].samples < len(audio):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        (stream,) = running.engine.streams
        assert np.array_equal(np.concatenate(stream.heard) * 32768, audio)
    assert True in at_once, "the short way was not taken at all"


@pytest.mark.parametrize(
    "other",
    [event("conversation.item.create"), frame(TEXT, b"{"), event("session.update")],
    ids=["unsupported event", "no JSON", "update without a model"],
)
async def test_audio_that_comes_together_with_a_mistake_is_heard_at_once(serve: Serve, other: bytes) -> None:
    """Nothing follows: a client that has said so much waits for what it said to be heard."""
    async with serve() as running, bare_socket(running) as (_, writer):
        spoken = append(np.zeros(4800, np.int16))
        # The first message of a read may take the short way; the second cannot.
        writer.write(spoken + spoken + other)
        async with asyncio.timeout(10):
            while not running.engine.streams or running.engine.streams[0].samples < 5000:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
