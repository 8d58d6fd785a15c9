"""Attacks on the WebSocket protocol itself: frames that a browser would never make."""

from __future__ import annotations

import asyncio

from tests.attacks.target import BINARY, CLOSE, CONTINUED, PING, PONG, TEXT, Target, attack, frame

PROTOCOL_ERROR, BAD_TEXT, TOO_BIG = 1002, 1007, 1009


@attack()
async def malformed_frames(target: Target) -> None:
    """Sockets that send one frame each, which breaks a rule of the protocol."""
    too_long = b"\x81\xff" + (2**63).to_bytes(8, "big") + bytes(4)
    for name, data, code in (
        ("reserved bit 1", frame(TEXT, b"{}", reserved=4), PROTOCOL_ERROR),
        ("reserved bit 2", frame(TEXT, b"{}", reserved=2), PROTOCOL_ERROR),
        ("reserved bit 3", frame(BINARY, b"{}", reserved=1), PROTOCOL_ERROR),
        ("no mask", frame(TEXT, b"{}", masked=False), PROTOCOL_ERROR),
        ("unknown data opcode", frame(0x3, b"{}"), PROTOCOL_ERROR),
        ("unknown control opcode", frame(0xB, b"{}"), PROTOCOL_ERROR),
        ("long ping", frame(PING, bytes(126)), PROTOCOL_ERROR),
        ("long close", frame(CLOSE, bytes(2000)), PROTOCOL_ERROR),
        ("ping in pieces", frame(PING, b"x", fin=False), PROTOCOL_ERROR),
        ("close of one byte", frame(CLOSE, b"\x03"), PROTOCOL_ERROR),
        ("close with a code that is none", frame(CLOSE, (999).to_bytes(2, "big")), PROTOCOL_ERROR),
        ("continuation of nothing", frame(CONTINUED, b"x"), PROTOCOL_ERROR),
        ("text inside a text", frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), PROTOCOL_ERROR),
        ("text that is no UTF-8", frame(TEXT, b"\xff\xfe"), BAD_TEXT),
        ("a surrogate in UTF-8", frame(TEXT, b'{"type":"\xed\xa0\x80"}'), BAD_TEXT),
        ("half a character", frame(TEXT, b"\xc3"), BAD_TEXT),
        ("a length beyond counting", too_long, TOO_BIG),
        ("noise", b"\xff" * 500, PROTOCOL_ERROR),
    ):
        async with target.upgraded() as socket:
            await socket.send(data)
            got = await socket.close_code(10)
            assert got == code or (name == "a length beyond counting" and got == PROTOCOL_ERROR), (name, got)


@attack(gateway_mib=72)
async def fragments_for_ever(target: Target) -> None:
    """A message in fragments of 64 KiB that grows beyond the largest allowed message."""
    async with target.upgraded() as socket:
        await socket.send_frame(TEXT, b"x", fin=False)
        piece = frame(CONTINUED, bytes(65_536), fin=False)
        assert await socket.close_code_while_sending(piece, 40 * 2**20) == TOO_BIG
    assert target.sent < 30 * 2**20


@attack(gateway_mib=8)
async def fragments_of_one_byte(target: Target) -> None:
    """A message of 100,000 fragments of one byte: it may cost its bytes, but not an object for each fragment."""
    async with target.upgraded() as socket:
        await socket.send_frame(TEXT, b"[", fin=False)
        piece = frame(CONTINUED, b"[", fin=False)
        for _ in range(10):
            await socket.send(piece * 10_000)
        await socket.send_frame(CONTINUED, b"", fin=True)
        assert await socket.error_code() == "message_too_large"


@attack()
async def empty_fragments(target: Target) -> None:
    """A hundred thousand continuations without a byte in them."""
    async with target.upgraded() as socket:
        await socket.send_frame(TEXT, b"{", fin=False)
        piece = frame(CONTINUED, b"", fin=False)
        for _ in range(10):
            await socket.send(piece * 10_000)
        await socket.send_frame(CONTINUED, b"", fin=True)
        assert await socket.error_code() == "invalid_json"


@attack()
async def a_flood_of_pings(target: Target) -> None:
    """Thirty thousand pings from a client that reads every pong."""
    async with target.upgraded() as socket:
        reading = asyncio.create_task(socket.close_code())
        for _ in range(30):
            if not await socket.try_send(frame(PING, bytes(100)) * 1000, 10):
                break
        await socket.try_send(frame(CLOSE, (1000).to_bytes(2, "big")))
        assert await reading in (1000, 1008, 1006)


@attack()
async def pings_without_reading(target: Target) -> None:
    """Pings from a client that reads nothing: pongs must not pile up."""
    async with target.upgraded() as socket:
        socket.writer.transport.pause_reading()
        sent = 0
        while sent < 150 and await socket.try_send(frame(PING, bytes(125)) * 1000, 2):
            sent += 1
        # The server reads no further, or has cut the line: either way it holds nothing for us.
        socket.writer.transport.resume_reading()
        await socket.try_send(frame(CLOSE, (1000).to_bytes(2, "big")))
        assert await socket.close_code(20) in (1000, 1008, 1006)


@attack()
async def a_flood_of_pongs(target: Target) -> None:
    """A hundred thousand pongs without a ping."""
    async with target.upgraded() as socket:
        for _ in range(10):
            await socket.send(frame(PONG, b"") * 10_000)
        await socket.send_frame(CLOSE, (1000).to_bytes(2, "big"))
        assert await socket.close_code() == 1000


@attack()
async def talking_after_the_close(target: Target) -> None:
    """Eight megabytes of frames behind a close frame."""
    async with target.upgraded() as socket:
        await socket.send_frame(CLOSE, (1000).to_bytes(2, "big"))
        piece = frame(TEXT, b'{"type":"session.update","session":{}}') * 1000
        assert await socket.close_code_while_sending(piece, 2**23) == 1000


@attack(gateway_mib=72)
async def one_message_too_large(target: Target) -> None:
    """A single message of 30 MB: it is refused by its frame header, before its bytes are read."""
    async with target.upgraded() as socket:
        await socket.send(b"\x81\xff" + (30_000_000).to_bytes(8, "big") + bytes(4))
        assert await socket.close_code_while_sending(bytes(65_536), 30_000_000) == TOO_BIG


@attack(gateway_mib=48)
async def messages_that_stop_before_their_end(target: Target) -> None:
    """Ten sockets whose messages of 21 MiB stop ten bytes before their end, half of them audio.

    Audio that was heard waits for the engine as any other does.
    """
    large = 21 * 2**20 - 100
    bodies = (
        b'{"type":"input_audio_buffer.append","audio":"' + b"A" * large,
        b'{"type":"session.update","x":"' + b"x" * large,
    )
    audio_input = {"format": {"type": "audio/pcm", "rate": 48000}, "turn_detection": None}

    async def stop_short(body: bytes) -> None:
        async with target.upgraded() as socket:
            await socket.send_event(type="session.update", session={"audio": {"input": audio_input}})
            await socket.try_send(frame(TEXT, body)[:-10], 20)
            await asyncio.sleep(2)

    await asyncio.gather(*(stop_short(bodies[number % 2]) for number in range(10)))


@attack()
async def a_frame_that_never_comes(target: Target) -> None:
    """Fifty sockets that announce a message of 20 MB and send ten bytes of it."""
    sockets = []
    try:
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(target.upgrade_head())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            writer.write(b"\x81\xff" + (20_000_000).to_bytes(8, "big") + bytes(14))
            sockets.append(writer)
        await asyncio.sleep(0.3)
    finally:
        for writer in sockets:
            writer.transport.abort()
