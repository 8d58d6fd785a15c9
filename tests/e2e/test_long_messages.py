"""Messages of many megabytes: all audio is processed, and neither the longest block of the loop nor memory grows."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from realtime.serving import uvicorn_protocols
from realtime.serving.inbox import AudioIntake
from realtime.serving.uvicorn_protocols import MAX_WAITING_BYTES, PART_BYTES, RealtimeWebSocket
from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import greeted_client
from tests.e2e.test_flooding import CONTINUED, TEXT, bare_socket, frame, server_side

# As much as OpenAI takes in one append.
LARGEST = 15 * 2**20
# The engine of these tests hears at once; audio is not what they hold.
AMPLE = {"audio_in_flight_s": 3600.0}


def ramp(size: int) -> bytes:
    """Samples that are all different from their neighbours: one that is lost or doubled is seen."""
    return (np.arange(size // 2, dtype=np.int64) % 30_011 - 15_000).astype("<i2").tobytes()


def append_of(audio: bytes, **fields: Any) -> bytes:
    return json.dumps(
        {"audio": base64.b64encode(audio).decode(), "type": "input_audio_buffer.append", **fields}
    ).encode()


async def heard(running: Running, samples: int, stream: int = 0) -> np.ndarray:
    """What a stream has heard, once it is so much."""
    async with asyncio.timeout(60):
        while len(running.engine.streams) <= stream or running.engine.streams[stream].samples < samples:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return np.concatenate(running.engine.streams[stream].heard)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of audio are decoded in one go."""
    sizes: list[int] = []
    decode = AudioIntake.decode

    def counting(intake: AudioIntake, data: Any) -> Any:
        sizes.append(len(data))
        return decode(intake, data)

    monkeypatch.setattr(AudioIntake, "decode", counting)
    return sizes


RAW = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}


@pytest.mark.parametrize("shape", ["one frame", "fragments", "binary JSON"])
async def test_the_largest_append_is_heard_in_pieces(serve: Serve, decoded: list[int], shape: str) -> None:
    audio = ramp(LARGEST)
    async with serve(limits=AMPLE) as running, greeted_client(running.ws) as client:
        running.engine.keep_audio = True
        await client.update(**RAW)
        message = append_of(audio)
        if shape == "fragments":
            text = message.decode()
            await client.socket.send([text[start : start + 700_001] for start in range(0, len(text), 700_001)])
        else:
            await client.socket.send(message if shape == "binary JSON" else message.decode())
        await client.send("session.update", session={})
        found = await heard(running, len(audio) // 2)
        kinds = [event["type"] for event in await client.until("session.updated")]
    assert "error" not in kinds
    assert np.array_equal(found * 32768, np.frombuffer(audio, "<i2"))
    assert max(decoded) <= PART_BYTES


async def test_the_largest_binary_frame_is_heard_in_pieces(serve: Serve, decoded: list[int]) -> None:
    audio = ramp(20 * 2**20)
    async with serve(limits=AMPLE) as running, greeted_client(running.ws) as client:
        running.engine.keep_audio = True
        await client.update(format={**RAW["format"], "transport": "binary"}, turn_detection=None)
        await client.socket.send(audio)
        found = await heard(running, len(audio) // 2)
    assert np.array_equal(found * 32768, np.frombuffer(audio, "<i2"))
    assert max(decoded) <= PART_BYTES


async def test_a_frame_of_many_channels_is_dealt_out_in_pieces(serve: Serve, decoded: list[int]) -> None:
    frames = ramp(20 * 2**20 // 16 * 16 + 16)
    url = "?encoding=linear16&sample_rate=16000&channels=8&multichannel=true"
    async with serve(limits=AMPLE) as running, connect(f"ws://127.0.0.1:{running.port}/v1/listen{url}") as socket:
        running.engine.keep_audio = True
        await socket.send(frames)
        each = np.frombuffer(frames, "<i2").reshape(-1, 8)
        found = [await heard(running, len(each), stream) for stream in range(8)]
    # Streams are opened in any order.
    firsts = sorted(range(8), key=lambda stream: found[stream][0])
    for channel, stream in enumerate(firsts):
        assert np.array_equal(found[stream] * 32768, each[:, channel])
    assert max(decoded) <= PART_BYTES // 8


def held_bytes(socket: RealtimeWebSocket) -> int:
    """What the server side of a socket keeps of messages that are not complete, or not handled."""
    incoming = socket._incoming
    unfinished = 0 if incoming is None else len(incoming.buffer)
    return len(socket.conn.reader.buffer) + unfinished + socket._mailbox.bytes + len(socket._unparsed)


@pytest.mark.parametrize("kind", ["append", "update"])
async def test_messages_that_stop_before_their_end_hold_little(serve: Serve, kind: str) -> None:
    body = append_of(ramp(LARGEST)) if kind == "append" else b'{"type":"session.update","x":"' + b"x" * LARGEST + b'"}'
    data = frame(TEXT, body)
    async with serve(limits=AMPLE) as running, AsyncExitStack() as stack:
        writers = [(await stack.enter_async_context(bare_socket(running)))[1] for _ in range(5)]
        for writer in writers:
            writer.write(data[:-10])
        await asyncio.gather(*(writer.drain() for writer in writers))
        async with asyncio.timeout(300):
            while any(socket.conn.current_size is None for socket in server_side()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # All of it was read: what is still held is what waits for the last ten bytes.
            while sum(len(socket._unparsed) + socket._mailbox.bytes for socket in server_side()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert max(map(held_bytes, server_side())) <= 2 * PART_BYTES + 16


async def test_a_long_message_does_not_pile_up_while_the_engine_is_busy(serve: Serve) -> None:
    async with serve(limits={"audio_in_flight_s": 1.0}) as running, bare_socket(running) as (_, writer):
        running.engine.feed_delay_s = 0.2
        data, most = frame(TEXT, append_of(ramp(LARGEST))), 0
        writer.write(data)
        async with asyncio.timeout(30):
            while not running.engine.streams or running.engine.streams[0].samples < 16_000:
                most = max(most, *map(held_bytes, server_side()), 0)
                await asyncio.sleep(0.005)
        # What one read of the socket brings comes on top.
        assert most <= MAX_WAITING_BYTES + 2 * PART_BYTES + 256 * 1024


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (append_of(ramp(10**6))[:-30] + b'?"}', "invalid_json"),
        (append_of(ramp(10**6)).replace(b'A"', b'A?"', 1).replace(b'"type"', b'"?", "type"', 1), "invalid_json"),
        (append_of(ramp(10**6)).replace(b"==", b"="), "invalid_audio"),
        (append_of(ramp(10**6)).replace(b".append", b".commit"), "message_too_large"),
        (append_of(ramp(10**6), more=["x"] * 100), "message_too_large"),
        (b'{"type":"session.update","session":{"x":"' + b"y" * 10**6 + b'"}}', "message_too_large"),
        (b"[" * 10**6, "message_too_large"),
        (b'"' * 10**6, "message_too_large"),
    ],
)
async def test_a_long_message_that_is_wrong_is_told_once_and_the_session_goes_on(
    serve: Serve, message: bytes, code: str
) -> None:
    async with serve(limits=AMPLE) as running, greeted_client(running.ws) as client:
        await client.update(**RAW)
        await client.socket.send(message.decode())
        events = await client.until("error")
        assert events[-1]["error"]["code"] == code
        await client.send("session.update", session={})
        assert "error" not in [event["type"] for event in await client.until("session.updated")]


async def test_long_text_that_is_no_utf8_closes_the_socket(serve: Serve) -> None:
    async with serve() as running, bare_socket(running) as (reader, writer):
        # Half a character at the very end; the other half of one in the middle is cut by a part and is fine.
        writer.write(frame(TEXT, b'{"x":"' + "é".encode() * 100_000 + b"\xc3"))
        async with asyncio.timeout(10):
            assert struct.pack("!H", 1007) in await reader.read()


async def test_fragments_of_a_long_message_may_have_pings_between_them(serve: Serve) -> None:
    audio = ramp(400_000)
    async with serve(limits=AMPLE) as running, bare_socket(running) as (reader, writer):
        running.engine.keep_audio = True
        update = {"type": "session.update", "session": {"audio": {"input": RAW}}}
        writer.write(frame(TEXT, json.dumps(update).encode()))
        await reader.readuntil(b"session.updated")
        message = append_of(audio)
        writer.write(frame(TEXT, message[:200_000], final=False) + frame(9, b"still there?"))
        writer.write(frame(CONTINUED, message[200_000:]))
        await reader.readuntil(b"still there?")
        assert np.array_equal(await heard(running, 200_000) * 32768, np.frombuffer(audio, "<i2"))


def close_code_in(data: bytes) -> int:
    """The code of the close frame that ends the data."""
    found = re.search(rb"\x88[\x02-\x7d](..)[ -~]*$", data, re.DOTALL)
    assert found is not None, data[-200:]
    return int(struct.unpack("!H", found[1])[0])


@pytest.mark.parametrize("begun", ["head", "short message", "long message", "fragment"])
async def test_a_message_that_has_begun_must_go_on(serve: Serve, begun: str) -> None:
    """A client that answers pings and sends a byte now and then is alive, but its message never ends."""
    starts = {
        "head": b"\x81",
        "short message": frame(TEXT, b"x" * 1000)[:500],
        "long message": frame(TEXT, append_of(ramp(10**6)))[:-10_000],
        "fragment": frame(TEXT, b"{", final=False),
    }
    async with serve(server={"dead_after_s": 1.0, "ping_interval_s": 0.2}) as running:
        async with bare_socket(running) as (reader, writer):
            writer.write(starts[begun])
            reading = asyncio.create_task(reader.read(-1))
            while not reading.done():
                # Each is a sign of life.
                signs = {"head": b"", "fragment": frame(CONTINUED, b"", final=False)}
                writer.write(signs.get(begun, b"x"))
                await asyncio.wait((reading,), timeout=0.1)
            assert close_code_in(reading.result()) == 1008


async def test_a_message_that_comes_slowly_is_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocols, "MIN_BODY_RATE", 20)
    async with serve(server={"dead_after_s": 0.5}) as running, bare_socket(running) as (reader, writer):
        message = frame(TEXT, json.dumps({"type": "session.update", "session": {}, "x": "y" * 100}).encode())
        for start in range(0, len(message), 5):
            writer.write(message[start : start + 5])
            await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            await reader.readuntil(b"session.updated")


async def test_a_long_message_that_we_do_not_read_is_not_late(serve: Serve) -> None:
    limits = {"audio_in_flight_s": 0.5}
    async with serve(limits=limits, server={"dead_after_s": 0.3}) as running, greeted_client(running.ws) as client:
        running.engine.feed_delay_s = 0.3
        await client.update(**RAW)
        await client.socket.send(append_of(ramp(160_000)).decode())
        await client.send("session.update", session={})
        await client.until("session.updated")
        await heard_samples(running, 80_000)


async def heard_samples(running: Running, samples: int) -> None:
    async with asyncio.timeout(30):
        while running.engine.streams[0].samples < samples:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [900, 60_000])
async def test_a_message_over_the_limit_is_refused_however_it_comes(serve: Serve, size: int) -> None:
    """One that arrives whole takes the short way, which has to know the limit as well."""
    async with serve(limits={"message_bytes": 800}) as running, greeted_client(running.ws) as client:
        await client.append(bytes(300))
        await client.update()
        with pytest.raises(ConnectionClosed) as closed:
            await client.append(bytes(size))
            while True:
                await client.receive()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


async def test_a_socket_that_is_cut_inside_a_long_message_goes_on_with_a_new_one(serve: Serve) -> None:
    audio = ramp(600_000)
    async with serve(limits=AMPLE) as running, greeted_client(running.ws) as client:
        running.engine.keep_audio = True
        session = await client.update(**RAW, include=["session.resume"])
        message = frame(TEXT, append_of(audio))
        client.socket.transport.write(message[: len(message) // 2])  # type: ignore[attr-defined]
        await heard(running, 50_000)
        client.socket.transport.abort()
        token = session["resume"]["token"]
        async with connect(f"{running.ws}?resume={token}&after=1") as again:
            while (resumed := json.loads(await again.recv()))["type"] != "session.resumed":
                pass
            received = resumed["received_samples"]
            assert 50_000 <= received < 300_000
            await again.send(append_of(audio[2 * received :]).decode())
            assert np.array_equal(await heard(running, 300_000) * 32768, np.frombuffer(audio, "<i2"))
