"""A client that resumes on another socket: every sample counts once, wherever the old socket is cut."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from realtime.config import Config, LimitsConfig
from realtime.dialects.openai import OpenAIDialect
from realtime.errors import CloseCode
from realtime.serving.connection import Connection
from realtime.serving.quota import Caller, FairTurns
from realtime.serving.registry import Sessions
from realtime.serving.session_factory import OpenSession
from realtime.serving.socket_extras import SocketExtras
from realtime.session.events import Hangup
from realtime.session.settings import INCLUDE_RESUME, AudioFormat, Settings
from tests.realtime.gateway_doubles import FakeEngine

SAMPLE_BYTES = {"audio/pcm": 2, "audio/pcm-f32": 4, "audio/pcmu": 1}
FORMATS = [
    AudioFormat("audio/pcm", 16_000),
    AudioFormat("audio/pcm", 24_000),
    AudioFormat("audio/pcm", 8_000, binary=True),
    AudioFormat("audio/pcm-f32", 44_100, binary=True),
    AudioFormat("audio/pcmu", 8_000),
]


class Socket:
    """One socket of a client, and what waits in it."""

    def __init__(self, entry: OpenSession) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closed_with: int | None = None
        self.connection = Connection(
            entry.live,
            entry.inbox,
            self.messages.get,
            self._send,
            SocketExtras(nothing_waits=self.messages.empty),
            FairTurns(),
        )
        self.serving = asyncio.create_task(self.connection.run([]))

    async def _send(self, message: Any) -> None:
        if message["type"] == "websocket.close":
            self.closed_with = message["code"]

    def audio(self, data: bytes, binary: bool) -> None:
        if binary:
            self.messages.put_nowait({"type": "websocket.receive", "bytes": data})
            return
        body = {"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()}
        self.messages.put_nowait({"type": "websocket.receive", "text": json.dumps(body)})


def sound(audio_format: AudioFormat, samples: int) -> bytes:
    chance = np.random.default_rng(7)
    if audio_format.type == "audio/pcm-f32":
        return chance.uniform(-0.5, 0.5, samples).astype("<f4").tobytes()
    if audio_format.type == "audio/pcmu":
        return chance.integers(0, 255, samples, np.uint8).tobytes()
    return chance.integers(-9000, 9000, samples, np.int16).tobytes()


async def heard_by_the_engine(
    audio_format: AudioFormat, data: bytes, cuts: list[int], takeovers: list[tuple[int, int]]
) -> NDArray[np.float32]:
    """Send `data` in pieces of the sizes `cuts`. Each takeover comes after so many pieces, so many rounds later."""
    engine = FakeEngine()
    engine.keep_audio = True
    # So little room that the reader waits inside long messages too.
    config = Config(limits=LimitsConfig(audio_in_flight_s=0.05))
    sessions = Sessions(engine, config, lambda: 0.0, lambda: 0.0)
    chosen = Settings(format=audio_format, turn_detection=None, include=(INCLUDE_RESUME,))
    async with sessions.open(Caller("test"), chosen, [OpenAIDialect]) as (entry,):
        unit = SAMPLE_BYTES[audio_format.type]
        socket = Socket(entry)
        sessions.attach((entry,), socket.connection)
        old: list[Socket] = []
        sent = 0
        for pieces, rounds in takeovers:
            for number in range(pieces):
                piece = data[sent : sent + cuts[number % len(cuts)]]
                socket.audio(piece, audio_format.binary)
                sent += len(piece)
            for _ in range(rounds):
                await asyncio.sleep(0)
            entry.inbox.reconnected()
            sent = json.loads(entry.live.greeting_again())["received_samples"] * unit
            old.append(socket)
            socket = Socket(entry)
            sessions.attach((entry,), socket.connection)
        socket.audio(data[sent:], audio_format.binary)
        socket.messages.put_nowait({"type": "websocket.receive", "text": '{"type": "input_audio_buffer.commit"}'})
        socket.messages.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await socket.serving
        for left in old:
            assert isinstance(await left.serving, Hangup) and left.closed_with == CloseCode.TAKEN_OVER
        while entry.live.queued_seconds:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert entry.live.session.source_samples == len(data) // unit
        await sessions.end(entry)
    return np.concatenate([np.zeros(0, np.float32), *engine.streams[0].heard])


@settings(max_examples=60, deadline=None)
@given(
    audio_format=st.sampled_from(FORMATS),
    cuts=st.lists(st.integers(1, 6001), min_size=1, max_size=6),
    takeovers=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=4),
)
def test_the_engine_hears_what_it_hears_without_a_break(
    audio_format: AudioFormat, cuts: list[int], takeovers: list[tuple[int, int]]
) -> None:
    data = sound(audio_format, 20_000)
    whole = asyncio.run(heard_by_the_engine(audio_format, data, cuts, []))
    broken = asyncio.run(heard_by_the_engine(audio_format, data, cuts, takeovers))
    np.testing.assert_array_equal(broken, whole)


def test_a_message_that_is_being_taken_in_pieces_stops_at_once() -> None:
    """The reader waits for room inside a long message when the other socket comes."""
    audio_format = AudioFormat("audio/pcm", 16_000)
    data = sound(audio_format, 300_000)
    for rounds in range(1, 12):
        heard = asyncio.run(heard_by_the_engine(audio_format, data, [400_000], [(1, rounds)]))
        assert len(heard) == 300_000
