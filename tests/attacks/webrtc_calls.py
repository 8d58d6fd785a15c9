"""Attacks with WebRTC calls: offers that are none, addresses of others, strangers, channels and sound that do harm."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import patch

import pylibsrtp

from tests.attacks.target import BOUNDARY, FORM, Target, attack, form_field
from tests.realtime.gateway_doubles import tone
from tests.waiting import until
from tests.webrtc_client import RATE, Caller, caller

WHIP = "/v1/whip"
SDP = "application/sdp"
# More than a server takes at once.
MANY_CALLS = 80


@asynccontextmanager
async def calling(target: Target, seconds: float = 0.0, lines: str = "") -> AsyncIterator[Caller]:
    """A call of the attacker that is connected. `lines` are added to its offer."""
    async with caller(tone(seconds, RATE)) as made:
        offer = (await made.offer()).replace("a=mid:0\r\n", f"a=mid:0\r\n{lines}")
        answer = await target.post(WHIP, offer.encode(), SDP)
        assert answer.status == 201, answer.body
        await made.take(answer.body.decode())
        await made.until("session.created")
        yield made


async def offer_of() -> str:
    async with caller() as made:
        return await made.offer()


async def over(made: Caller) -> None:
    """The server has ended this call."""
    async with asyncio.timeout(30):
        await made.closed.wait()


@attack()
async def calls_with_hostile_offers(target: Target) -> None:
    """Offers of hostile size, with a thousand sections or lines, and texts that are none: each is refused by name."""
    good = await offer_of()
    section = good[good.index("m=audio") : good.index("m=application")]
    cases: list[tuple[bytes, int]] = [
        (good.encode() + b"a=x\r\n" * 4_000_000, 413),
        (good.encode() + b"a=candidate:1 1 udp 1 10.0.0.1 1 typ host\r\n" * 5_000, 413),
        (good.encode() + b"a=candidate:1 1 udp 1 10.0.0.1 1 typ host\r\n" * 2_000, 413),
        (good.encode() + b"a=x\r\n" * 9_000, 400),
        (good.replace(section, section * 30).encode(), 400),
        (good.encode() + b"m=video 9 UDP/TLS/RTP/SAVPF 96\r\n" * 1_000, 400),
        (good.encode() + b"a=" + b"x" * 50_000, 400),
        (b"m=audio " * 8_000, 400),
        (b"\x00" * 60_000, 400),
        (os.urandom(60_000), 400),
        (b"v=0\r\n", 400),
        (b"", 400),
        (good.replace("a=mid:0", "a=mid:0\r\na=mid:\x01").encode(), 400),
        (re.sub(r"a=fingerprint:.*\r\n", "", good).encode(), 400),
        (re.sub(r"a=ice-ufrag:.*", "a=ice-ufrag:" + "x" * 900, good).encode(), 400),
    ]
    for body, status in cases:
        answer = await target.post(WHIP, body, SDP)
        assert answer.status == status and answer.code in ("invalid_offer", "body_too_large"), (body[:100], answer.body)
    for session in ("[" * 60_000, "{", "5", "[]", '{"audio": 3}', json.dumps({"include": ["x" * 50_000]})):
        body = form_field("sdp", good) + form_field("session", session) + f"--{BOUNDARY}--\r\n".encode()
        answer = await target.post("/v1/realtime/calls", body, FORM)
        assert answer.status == 400, (session[:100], answer.body)
    for path in (f"{WHIP}/call_x", "/v1/realtime/calls/x/hangup"):
        method = "DELETE" if path.startswith(WHIP) else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{target.authorization}Connection: close\r\n\r\n"
        assert b" 404 " in (await target.exchange(head.encode()))[:40]


@attack()
async def calls_to_other_hosts(target: Target) -> None:
    """Candidates that name other hosts and ports, names of mDNS and TCP: the server sends nothing to any of them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as victim:
        victim.bind(("127.0.0.2", 0))
        victim.setblocking(False)
        port = victim.getsockname()[1]
        kinds = ("host", "srflx raddr 127.0.0.2 rport 9", "relay raddr 0.0.0.0 rport 0", "prflx")
        lines = "".join(
            f"a=candidate:{number} 1 udp {2**31 - 1 - number} 127.0.0.2 {port} typ {kinds[number % 4]}\r\n"
            for number in range(600)
        )
        lines += "a=candidate:1 1 udp 1 2b1a9c.local 9 typ host\r\n"
        lines += "a=candidate:1 1 tcp 1 127.0.0.2 80 typ host tcptype active\r\n"
        async with calling(target, 3.0, lines) as made:
            await until(lambda: made.speaker.seconds > 2)
        with suppress(BlockingIOError):
            raise AssertionError(f"the server has sent {victim.recv(2048)!r}")


@attack()
async def calls_that_never_connect(target: Target) -> None:
    """Eighty offers and no client: each holds a place until its deadline, some are refused, and then all are free."""
    offer = (await offer_of()).encode()

    async def offered() -> int:
        return (await target.post(WHIP, offer, SDP)).status

    found = [await asyncio.gather(*(offered() for _ in range(10))) for _ in range(MANY_CALLS // 10)]
    assert {status for some in found for status in some} <= {201, 429, 503}
    async with asyncio.timeout(40):
        while await offered() != 201:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.1)


@attack()
async def calls_that_strangers_disturb(target: Target) -> None:
    """RTP, DTLS, STUN and noise from another address, thousands of datagrams: dropped, and the call goes on."""
    async with calling(target, 20.0) as made:
        (port,) = set(re.findall(r"127\.0\.0\.1 (\d+) typ host", made.peer.remoteDescription.sdp))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.0.3", 0))
            stranger.setblocking(False)
            heads = (
                b"\x80\x60",
                b"\x16\xfe\xfd",
                b"\x17\xfe\xfd",
                b"\x00\x01\x00\x00\x21\x12\xa4\x42",
                b"\x01\x01",
                b"\xff",
            )
            for number in range(30_000):
                with suppress(BlockingIOError):
                    stranger.sendto(heads[number % len(heads)] + os.urandom(number % 1200), ("127.0.0.1", int(port)))
                if number % 200 == 0:
                    await asyncio.sleep(0)
            made.send(type="session.update", session={"type": "transcription"})
            await made.until("session.updated")
            with suppress(BlockingIOError):
                raise AssertionError(f"the server has answered {stranger.recv(2048)!r}")


async def giant(made: Caller) -> None:
    sctp: Any = made.peer.sctp
    sctp._remote_max_message_size = 0
    assert made.channel is not None
    made.channel.send("x" * 3_000_000)


async def in_pieces(made: Caller) -> None:
    """Each chunk has one byte."""
    assert made.channel is not None
    with patch("aiortc.rtcsctptransport.USERDATA_MAX_LENGTH", 1):
        made.channel.send("x" * 5_000)
        await over(made)


async def binary(made: Caller) -> None:
    assert made.channel is not None
    made.channel.send(os.urandom(60_000))


async def channels(made: Caller) -> None:
    for number in range(300):
        made.peer.createDataChannel(f"channel {number}")


async def streams(made: Caller) -> None:
    sctp: Any = made.peer.sctp
    for stream in range(1_000, 1_200):
        await sctp._send(stream, 51, b"x")


async def wrong(made: Caller) -> None:
    """A channel that is opened twice."""
    sctp: Any = made.peer.sctp
    for _ in range(3):
        await sctp._send(0, 50, b"\x03" + bytes(11))


@attack()
async def calls_that_flood_their_channel(target: Target) -> None:
    """Giant messages, messages in thousands of pieces, many channels and streams, bytes, wrong SCTP: the call ends."""
    for harm in (giant, in_pieces, binary, channels, streams, wrong):
        async with calling(target) as made:
            with suppress(ConnectionError):
                await harm(made)
            await over(made)


@attack()
async def calls_that_do_not_read(target: Target) -> None:
    """Calls that ask for events without end and acknowledge none: what waits is bounded, and they are closed."""

    async def deaf() -> None:
        async with calling(target) as made:
            sctp: Any = made.peer.sctp

            async def no_sack() -> None:
                sctp._sack_needed = False

            sctp._send_sack = no_sack
            with suppress(Exception):
                for number in range(20_000):
                    made.send(type="x" * 80, event_id="x" * 500)
                    if number % 50 == 0:
                        await asyncio.sleep(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await made.closed.wait()

    await asyncio.gather(*(deaf() for _ in range(3)))


@attack()
async def calls_with_wrong_sound(target: Target) -> None:
    """Foreign payload types, a thousand sources, numbers and times that jump, noise for Opus: no time is made of it."""
    async with calling(target, 1.0) as made:
        transport: Any = made.peer.getSenders()[0].transport
        (kind,) = (codec.payloadType for codec in made.peer.getTransceivers()[0]._codecs)
        for number in range(4_000):
            payload_type = kind if number % 2 else number % 128
            sequence, source = number * 7_919 % 65_536, number % 1_000 if number % 3 else 5
            head = bytes([0x80, payload_type]) + sequence.to_bytes(2) + os.urandom(4) + source.to_bytes(4)
            with suppress(ConnectionError, pylibsrtp.Error):
                await transport._send_rtp(head + os.urandom(number % 1_100))
            if number % 50 == 0:
                await asyncio.sleep(0.01)
        made.send(type="session.update", session={"type": "transcription"})
        gaps = [event for event in await made.until("session.updated") if event["type"] == "call.gap"]
        assert sum(gap["audio_end_ms"] - gap["audio_start_ms"] for gap in gaps) < 60_000, gaps
