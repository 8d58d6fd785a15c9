"""Attacks on the socket of Twilio Media Streams: calls that never start, wrong starts, media and times that lie."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed

from tests.attacks.target import TEXT, Client, Target, attack, frame
from tests.phone_calls import CONNECTED, FORMAT, PhoneCall, mulaw, phone_call, start_message

PATH = "/v1/twilio"


def begin(target: Target, tracks: tuple[str, ...] = ("inbound",), **parameters: Any) -> dict[str, Any]:
    return start_message(tracks, customParameters={"key": target.key, "publish": "attacked", **parameters})


async def close_code(call: PhoneCall) -> int:
    """The code the server closes with, which must send nothing before that."""
    code = await Client(Target(0), call.socket).close_code()
    assert code != 1000 or not call.socket.close_reason or call.socket.close_reason == "finished"
    return code


async def refused(target: Target, *messages: object) -> None:
    """Each of these, sent after the upgrade, ends with 1008."""
    async with phone_call(target.port, {}) as call:
        try:
            for message in messages:
                await call.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
        except ConnectionClosed:
            pass
        assert await close_code(call) == 1008, messages


@attack()
async def calls_that_never_start(target: Target) -> None:
    """Two hundred calls without a whole `start`: each is closed after `server.handshake_s`."""
    sockets = [target.raw() for _ in range(200)]
    opened = [await socket.__aenter__() for socket in sockets]
    try:
        for number, socket in enumerate(opened):
            await socket.send(target.upgrade_head(PATH).replace(target.authorization.encode(), b""))
            assert (await socket.read_head()).startswith(b"HTTP/1.1 101")
            if number % 2:
                await socket.send(frame(TEXT, json.dumps(CONNECTED).encode()))
            if number % 3:
                await socket.send(frame(TEXT, json.dumps(begin(target)).encode())[:-5])
        codes = await asyncio.gather(*(socket.close_code() for socket in opened))
        assert set(codes) <= {1008, 1006}
    finally:
        for socket in sockets:
            await socket.__aexit__(None, None, None)


@attack()
async def calls_that_start_wrongly(target: Target) -> None:
    """Media, keys pressed or noise before `start`, huge parameters, other encodings, other tracks, wrong keys."""
    media = {"event": "media", "media": {"track": "inbound", "payload": "AAAA"}}
    await refused(target, media, begin(target))
    await refused(target, CONNECTED, CONNECTED, begin(target))
    await refused(target, CONNECTED, {"event": "dtmf"}, begin(target))
    for noise in ("{", "[]", "\x00", b"\xff\xfe", "[" * 50_000, "x" * 1_000_000, b"\x00" * 1_000_000):
        await refused(target, noise, begin(target))
    many = {f"p{number}": "x" for number in range(5_000)}
    for parameters in (
        {"x": "y" * 60_000},
        many,
        {"x": "y" * 3_000_000},
        {"language": "x" * 8_000},
        {"search": "," * 8_000},
    ):
        await refused(target, CONNECTED, begin(target, **parameters))
    for changes in (
        {"mediaFormat": {**FORMAT, "encoding": "audio/x-l16"}},
        {"mediaFormat": {**FORMAT, "sampleRate": 10**30}},
        {"mediaFormat": {**FORMAT, "channels": 255}},
        {"tracks": ["inbound"] * 1_000},
        {"tracks": [["inbound"]]},
        {"customParameters": {"key": "wrong"}},
        {"customParameters": {"key": target.key, "publish": "../x"}},
        {"customParameters": {"key": {"a": "b"}}},
        {"callSid": "x" * 10_000},
    ):
        await refused(target, CONNECTED, start_message(**changes))


@attack()
async def calls_with_wrong_media(target: Target) -> None:
    """Bad base64, tracks that were not announced, times and sequence numbers that jump, floods of keys pressed."""
    async with phone_call(target.port, begin(target, ("inbound", "outbound"))) as call:
        payloads = ("%%%", "AAA", "AA==AA", " AAAA", "AAAA\n", "é", "", "A" * 60_000, "=" * 1_000, 3, None, [])
        for payload in payloads:
            for track in ("inbound", "outbound", "both", 3):
                await call.send_next("media", media={"track": track, "timestamp": "0", "payload": payload})
        for timestamp in ("-1", "1e9", "NaN", "9" * 40, 10**30, "٣", None, "604800000", "0", "604800001"):
            for track in ("inbound", "outbound"):
                call.sequence = (call.sequence * 7919 + 1) % 10**6
                await call.send_next("media", media={"track": track, "timestamp": timestamp, "payload": "////"})
        for _ in range(3_000):
            await call.dtmf()
        for message in ("x" * 70_000, b"\x00" * 70_000, b"{}", '{"event": "start"}'):
            await call.socket.send(message)
        await call.media(mulaw(bytes(16_000)))
        await call.stop()
        with suppress(ConnectionClosed):
            for _ in range(100):
                await call.media(mulaw(bytes(320)))


@attack()
async def calls_that_are_cut(target: Target) -> None:
    """Forty calls of two tracks that break off: their sessions end, and their names become free."""
    noise = mulaw(bytes(range(256)) * 60)

    async def call_and_leave(number: int) -> None:
        async with phone_call(target.port, begin(target, ("inbound", "outbound"), publish=f"cut{number}")) as call:
            try:
                await call.media(noise)
                await call.media(noise, "outbound")
            except ConnectionClosed as closed:
                # There may be no room for this many sessions.
                assert closed.rcvd is not None and closed.rcvd.code == 1013
            call.socket.transport.abort()

    for group in range(10):
        await asyncio.gather(*(call_and_leave(4 * group + number) for number in range(4)))
    async with asyncio.timeout(60):
        for number in range(40):
            while True:
                async with phone_call(target.port, begin(target, publish=f"cut{number}-inbound")) as call:
                    await call.stop()
                    if await close_code(call) == 1000:
                        break
                await asyncio.sleep(0.1)
