"""Messages that arrive together: their audio is processed at once, whatever other messages are among them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realtime.config import Config
from realtime.dialects.openai import OpenAIDialect
from realtime.serving.connection import Connection
from realtime.serving.quota import Caller, FairTurns, Pace
from realtime.serving.registry import Sessions
from realtime.serving.socket_extras import SocketExtras
from realtime.session.settings import AudioFormat, Settings
from tests.realtime.gateway_doubles import FakeEngine

# Rounds of the event loop in which everything that is there must have been heard: a long append takes one a piece.
ROUNDS = 60


def text(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "websocket.receive", "text": json.dumps({"type": kind, **fields})}


def append(samples: int) -> dict[str, Any]:
    return text("input_audio_buffer.append", audio=base64.b64encode(bytes(2 * samples)).decode())


# What is no audio, or is not heard.
OTHERS: dict[str, dict[str, Any]] = {
    "unsupported event": text("conversation.item.create", item={}),
    "unknown event": text("no.such.thing"),
    "no event": {"type": "websocket.receive", "text": "{"},
    "bad base64": text("input_audio_buffer.append", audio="AAA"),
    "audio that is no text": text("input_audio_buffer.append", audio=7),
    "long event id": text("input_audio_buffer.append", audio="AAAA", event_id="e" * 600),
    "too long": text("session.update", session={"x": "y" * 70_000}),
    "long bad base64": text("input_audio_buffer.append", audio="?" + "A" * 70_000),
    "an injection": text("input_audio_buffer.inject", items=[]),
    "a bad update": text("session.update", session=7),
    "an update": text("session.update", session={}),
    "a commit": text("input_audio_buffer.commit"),
    "a clear": text("input_audio_buffer.clear"),
    "a bad gap": text("input_audio_buffer.gap"),
    "vLLM's update": text("session.update", model="fake-model"),
    "vLLM's commit": text("input_audio_buffer.commit", final=False),
}

batches = st.lists(st.integers(1, 3000) | st.just(30_000) | st.sampled_from(sorted(OTHERS)), min_size=1, max_size=6)


async def heard_after_each(sent: list[list[int | str]], pace: Pace | None = None) -> list[tuple[int, int]]:
    """Samples that were sent, and those that the session has counted, after each batch."""
    sessions = Sessions(FakeEngine(), Config(), lambda: 0.0, lambda: 0.0)
    settings = Settings(format=AudioFormat("audio/pcm", 16_000), turn_detection=None)
    entry = sessions._factory.make(Caller("somebody"), settings, OpenAIDialect)
    waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send(message: Any) -> None:
        """Discards the answers."""

    extras = SocketExtras(nothing_waits=waiting.empty)
    connection = Connection(entry.live, entry.inbox, waiting.get, send, extras, FairTurns())
    serving = asyncio.create_task(connection.run([], pace))
    found: list[tuple[int, int]] = []
    samples = 0
    for batch in sent:
        for message in batch:
            samples += message if isinstance(message, int) else 0
            waiting.put_nowait(append(message) if isinstance(message, int) else OTHERS[message])
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        found.append((samples, entry.live.session.source_samples))
    waiting.put_nowait({"type": "websocket.disconnect", "code": 1006})
    await serving
    await sessions.drain(0.0)
    return found


@settings(deadline=None, max_examples=150)
@given(st.lists(batches, min_size=1, max_size=3))
@example([[3200, "unsupported event"]])
@example([[3200, 3200, "no event"], [100]])
@example([[3200, "long bad base64"]])
@example([[3200, "an injection"]])
def test_whatever_has_arrived_is_heard(sent: list[list[int | str]]) -> None:
    for arrived, counted in asyncio.run(heard_after_each(sent)):
        assert counted == arrived


@pytest.mark.parametrize("batch", [[100, 100], [100, "no event"]])
async def test_audio_does_not_wait_for_a_message_that_is_held_back(batch: list[int | str]) -> None:
    """A client that is read more slowly: its third message has to wait for a second."""
    ((_, counted),) = await heard_after_each([[*batch, 100]], Pace(1.0, lambda: 0.0))
    assert counted == sum(size for size in batch if isinstance(size, int))
