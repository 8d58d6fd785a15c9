"""The UDP port of a call: who is answered, who is heard, and what is held."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aioice import stun

from realtime.webrtc import peer_connection
from realtime.webrtc.peer_connection import MAX_PEER_ADDRESSES, MAX_RTP_SOURCES, MAX_WAITING_DATAGRAMS, IceLite, NoPort

CLIENT = ("127.0.0.1", 40_000)
OTHER = ("127.0.0.1", 40_001)


class Wire:
    """What the port sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, tuple[str, int]]] = []

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        self.sent.append((data, address))

    def close(self) -> None:
        pass


def check(ice: IceLite, *, nominate: bool = True, username: str = "", password: str = "") -> bytes:
    message = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
    message.attributes["USERNAME"] = username or f"{ice.ufrag}:abcd"
    if nominate:
        message.attributes["USE-CANDIDATE"] = None
    message.add_message_integrity((password or ice.password).encode())
    return bytes(message)


@pytest.fixture
async def ice() -> IceLite:
    return IceLite("abcd")


@pytest.fixture
async def wire(ice: IceLite) -> Wire:
    made = Wire()
    ice.connection_made(made)  # type: ignore[arg-type]
    return made


async def test_a_signed_check_is_answered_and_a_nomination_connects(ice: IceLite, wire: Wire) -> None:
    ice.datagram_received(check(ice, nominate=False), CLIENT)
    assert len(wire.sent) == 1 and wire.sent[0][1] == CLIENT and not ice.connected.is_set()
    with pytest.raises(ConnectionError):
        await ice._send(b"hello")
    ice.datagram_received(check(ice), CLIENT)
    assert ice.connected.is_set() and ice.state == "completed"
    await ice._send(b"hello")
    assert wire.sent[-1] == (b"hello", CLIENT)


async def test_checks_that_are_not_signed_for_this_call_get_no_answer(ice: IceLite, wire: Wire) -> None:
    another = IceLite("abcd")
    unsigned = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
    answer = stun.Message(stun.Method.BINDING, stun.Class.RESPONSE)
    answer.add_message_integrity(ice.password.encode())
    for data in (
        check(ice, username="x"),
        check(ice, username=f"{ice.ufrag}:efgh"),
        check(ice, password="wrong"),
        check(another),
        bytes(unsigned),
        bytes(answer),
        bytes(20),
        b"\x00\x01" + bytes(1000),
    ):
        ice.datagram_received(data, CLIENT)
    assert not wire.sent and not ice.connected.is_set()


async def test_datagrams_of_strangers_are_not_heard(ice: IceLite, wire: Wire) -> None:
    ice.datagram_received(check(ice), CLIENT)
    ice.datagram_received(b"\x16 of a stranger", OTHER)
    ice.datagram_received(b"", CLIENT)
    ice.datagram_received(b"\x16" + bytes(5000), CLIENT)
    ice.datagram_received(b"\x16 of the client", CLIENT)
    assert await ice._recv() == b"\x16 of the client"


async def test_what_waits_is_bounded(ice: IceLite, wire: Wire) -> None:
    ice.datagram_received(check(ice), CLIENT)
    for _ in range(2 * MAX_WAITING_DATAGRAMS):
        ice.datagram_received(b"\x16", CLIENT)
    assert ice.datagrams.qsize() == MAX_WAITING_DATAGRAMS
    for port in range(10 * MAX_PEER_ADDRESSES):
        ice.datagram_received(check(ice, nominate=False), ("127.0.0.1", 1000 + port))
        assert len(ice.checked_addresses) <= MAX_PEER_ADDRESSES
    # The one that it uses is never forgotten.
    assert CLIENT in ice.checked_addresses


async def test_so_many_sources_of_rtp_are_heard(ice: IceLite, wire: Wire) -> None:
    ice.datagram_received(check(ice), CLIENT)
    for source in range(3 * MAX_RTP_SOURCES):
        ice.datagram_received(b"\x80\x60" + bytes(6) + source.to_bytes(4) + b"x", CLIENT)
    assert ice.datagrams.qsize() == MAX_RTP_SOURCES
    # RTCP is not heard at all.
    for source in range(3):
        ice.datagram_received(b"\x80\xc8" + bytes(2) + source.to_bytes(4) + bytes(8), CLIENT)
    assert ice.datagrams.qsize() == MAX_RTP_SOURCES


def rtp(source: int) -> bytes:
    return b"\x80\x60" + bytes(6) + source.to_bytes(4) + b"x"


async def test_a_silent_source_of_rtp_gives_way_and_a_live_one_does_not(
    ice: IceLite, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(peer_connection.time, "monotonic", lambda: now)

    def is_heard(source: int) -> bool:
        before = ice.datagrams.qsize()
        ice.datagram_received(rtp(source), CLIENT)
        return ice.datagrams.qsize() > before

    ice.datagram_received(check(ice), CLIENT)
    # A client that changes its source again and again, as after each renegotiation, is heard each time.
    for source in range(3 * MAX_RTP_SOURCES):
        assert is_heard(source)
        now += peer_connection.SOURCE_SILENT_S
    # Sources that go on sending, of a stranger too, neither push out the live one nor each other.
    live = 1_000_000
    assert is_heard(live)
    for second in range(3 * int(peer_connection.SOURCE_SILENT_S)):
        now += 1.0
        assert is_heard(live)
        heard = [source for source in range(50 * second, 50 * second + 50) if is_heard(source)]
        assert len(heard) < MAX_RTP_SOURCES and len(ice._sources) <= MAX_RTP_SOURCES
        while not ice.datagrams.empty():
            ice.datagrams.get_nowait()


async def test_a_flood_makes_the_process_sleep(ice: IceLite, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(peer_connection.time, "sleep", naps.append)
    for _ in range(3 * peer_connection.MAX_DATAGRAMS_PER_S):
        ice.datagram_received(b"\xff", OTHER)
    assert naps


async def test_a_client_that_stops_checking_is_gone(ice: IceLite, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    now = ice._last_check_at
    monkeypatch.setattr(peer_connection.time, "monotonic", lambda: now)
    assert not ice.client_has_left
    now += peer_connection.CONSENT_S + 1
    assert ice.client_has_left
    ice.datagram_received(check(ice, nominate=False), CLIENT)
    assert not ice.client_has_left


@asynccontextmanager
async def opened(ports: tuple[int, int] | None) -> AsyncIterator[IceLite]:
    ice = IceLite("abcd")
    await ice.open("127.0.0.1", ports)
    try:
        yield ice
    finally:
        ice.close()


async def test_ports_are_those_of_the_range() -> None:
    async with opened(None) as first:
        port = first.port
        with pytest.raises(NoPort, match=r"webrtc\.ports"):
            await IceLite("abcd").open("127.0.0.1", (port, port))
    with pytest.raises(NoPort):
        await IceLite("abcd").open("203.0.113.7", None)


async def test_a_closed_port_ends_its_reader() -> None:
    async with opened(None) as ice:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.sendto(check(ice), ("127.0.0.1", ice.port))
            async with asyncio.timeout(30):
                await ice.connected.wait()
    with pytest.raises(ConnectionError):
        await ice._recv()
    with pytest.raises(ConnectionError):
        await ice._send(b"x")
