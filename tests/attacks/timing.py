"""Attacks with time: clients that connect and leave, that do not read, that hardly send, and endless speech."""

from __future__ import annotations

import asyncio
import json
import socket as sockets

from tests.attacks.good_client import speech
from tests.attacks.target import BINARY, TEXT, Target, attack, frame


@attack(gateway_mib=64)
async def a_storm_of_connections(target: Target) -> None:
    """Two hundred sessions opened and cut, ten at a time, some with audio in them."""

    async def come_and_go(number: int) -> None:
        async with target.upgraded() as socket:
            if number % 3 == 0:
                await socket.send_event(type="input_audio_buffer.append", audio="AAAA" * 800)
            if number % 3 == 1:
                await socket.send_frame(TEXT, b'{"type": "input_audio_buffer.app', fin=False)

    for start in range(0, 200, 10):
        await asyncio.gather(*(come_and_go(number) for number in range(start, start + 10)))


@attack(gateway_mib=64)
async def sessions_left_behind(target: Target) -> None:
    """Thirty sessions that ask to be kept for a client that never comes back: they go after `session.resume_s`."""
    update = {"type": "session.update", "session": {"include": ["session.resume"]}}
    for _ in range(30):
        async with target.upgraded() as socket:
            await socket.send_event(**update)
            while b"session.updated" not in (await socket.read_frame())[1]:
                pass


@attack()
async def a_client_that_does_not_read(target: Target) -> None:
    """Speech, word times and acknowledgements for a client that never reads: only that client is closed."""
    include = ["item.input_audio_transcription.words", "input_audio_buffer.acks", "session.resume"]
    audio_input = {"format": {"type": "audio/pcm", "rate": 48000, "transport": "binary"}}
    async with target.upgraded() as socket:
        socket.writer.get_extra_info("socket").setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
        socket.writer.transport.pause_reading()
        await socket.send_event(type="session.update", session={"include": include, "audio": {"input": audio_input}})
        audio = speech(4.0)
        for start in range(0, len(audio), 9600):
            if not await socket.try_send(frame(BINARY, audio[start : start + 9600])):
                break


@attack()
async def audio_far_ahead_of_time(target: Target) -> None:
    """Ten minutes of audio at full speed: waiting audio is bounded, and TCP slows the sender."""
    async with target.upgraded() as socket:
        audio_input = {"format": {"type": "audio/pcm", "rate": 16000, "transport": "binary"}, "turn_detection": None}
        await socket.send_event(type="session.update", session={"audio": {"input": audio_input}})
        piece = frame(BINARY, bytes(64_000))
        for _ in range(300):
            if not await socket.try_send(piece, 1.0):
                break


@attack()
async def a_byte_at_a_time(target: Target) -> None:
    """Fifty sockets that send their message a byte at a time."""
    message = frame(TEXT, json.dumps({"type": "session.update", "session": {}}).encode())

    async def drip() -> None:
        async with target.upgraded() as socket:
            for byte in message:
                await socket.send(bytes([byte]))
                await asyncio.sleep(0.01)
            async with asyncio.timeout(20):
                while b"session.updated" not in (await socket.read_frame())[1]:
                    pass

    await asyncio.gather(*(drip() for _ in range(50)))


@attack()
async def half_closed_sockets(target: Target) -> None:
    """Fifty clients that close their sending half and wait: their sessions end."""
    opened = []
    try:
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(target.upgrade_head())
            await reader.readuntil(b"\r\n\r\n")
            writer.write_eof()
            opened.append((reader, writer))
        async with asyncio.timeout(20):
            await asyncio.gather(*(reader.read() for reader, _ in opened))
    finally:
        for _, writer in opened:
            writer.transport.abort()


@attack()
async def a_turn_that_never_ends(target: Target) -> None:
    """Deepgram without endpointing and endless speech: each result repeats only the text since the last final one."""
    url = f"{target.listen}?encoding=linear16&sample_rate=48000&endpointing=false&interim_results=true"
    async with target.client(url, greeted=False) as client:
        reading = asyncio.create_task(_longest(client.socket))
        audio = speech(6.0)
        for start in range(0, len(audio), 9600):
            await client.send_raw(audio[start : start + 9600])
        await client.send("CloseStream")
        assert await asyncio.wait_for(reading, 60) < 32_768


async def _longest(socket: object) -> int:
    longest = 0
    async for message in socket:  # type: ignore[attr-defined]
        longest = max(longest, len(message))
    return longest


@attack()
async def a_mix_of_dialects(target: Target) -> None:
    """Messages of every dialect on one socket, in an order that none of them has."""
    texts = [
        {"type": "transcription_session.update", "session": {"input_audio_format": "g711_ulaw"}},
        {"type": "session.update", "model": "no-such-model"},
        {"type": "input_audio_buffer.commit", "final": True},
        {"type": "KeepAlive"},
        {"type": "Finalize"},
        {"type": "CloseStream"},
        {"type": "Configure", "keyterms": ["x"] * 1000},
        {"type": "input_audio_buffer.append", "audio": "AAAA"},
        {"type": "session.update", "session": {}},
    ]
    for first in range(len(texts)):
        for url in (target.ws, f"{target.listen}?encoding=linear16"):
            async with target.client(url, greeted=False) as client:
                for text in texts[first:] + texts[:first]:
                    await client.send_raw(json.dumps(text))
                    await client.send_raw(b"\x00\x01\x02")
                event = await client.receive()
                assert event["type"]
