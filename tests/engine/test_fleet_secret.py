"""Links over tcp: accepted and encrypted with the fleet's secret, refused with a message without it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine.boundary import sockets
from engine.boundary.sockets import EngineSocket, GatewaySocket, KeyPair, LinkKeys, leaves_the_machine
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import RemoteEngine
from engine.fleet_secret import (
    MAX_SECRET_BYTES,
    MIN_SECRET_BYTES,
    cluster_token,
    derive,
    fingerprint,
    make_secret,
    read_secret,
)
from engine.server.main import run_engine
from tests.engine import fakes
from tests.engine.client.cuttable_line import cuttable_line

SECRET, OTHER = b"the secret of this fleet", b"the secret of that fleet"


@contextmanager
def engine_over_tcp(secret: bytes | None) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    stop = threading.Event()
    arguments = (f"tcp://127.0.0.1:{port}", fakes.build, stop.is_set, False, None, None, secret)
    thread = threading.Thread(target=run_engine, args=arguments)
    thread.start()
    yield port
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    """The port of an engine with a secret."""
    with engine_over_tcp(SECRET) as port:
        yield port


async def test_with_the_secret_all_works_and_nothing_is_readable_on_the_way(locked: int) -> None:
    async with (
        cuttable_line(locked) as line,
        fakes.running(RemoteEngine(line.address), fleet_secret=SECRET) as client,
    ):
        transcript = await fakes.transcribe(client, "a name that could be read", fakes.speech(1, 1))
        assert transcript.text
        assert len(line.heard) > 10_000
        for said in (b"a name that could be read", fakes.FRAMES.name.encode(), b"welcome"):
            assert said not in line.heard
    with engine_over_tcp(None) as port:
        async with cuttable_line(port) as line, fakes.running(RemoteEngine(line.address)) as client:
            await fakes.transcribe(client, "a name that could be read", fakes.speech(1, 1))
            assert b"a name that could be read" in line.heard, "else this test proves nothing"


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
async def test_another_secret_is_refused_and_both_sides_say_so(
    locked: int,
    theirs: bytes | None,
    ours: bytes | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "REFUSAL_LOG_SECONDS", 0.0)
    with engine_over_tcp(None) as open_port, caplog.at_level(logging.WARNING):
        port = open_port if theirs is None else locked
        client = EngineClient([RemoteEngine(f"tcp://127.0.0.1:{port}")], ClientSettings(fleet_secret=ours))
        await client.start()
        try:
            async with asyncio.timeout(20):
                await fakes.until(lambda: any("fleet secret" in gone.problem for gone in client.capacity().missing))
                await fakes.until(lambda: "a gateway was refused" in caplog.text)
            assert not client.ready
            assert "cannot be used: " in caplog.text
        finally:
            await client.close()


async def test_who_knows_the_engines_key_alone_does_not_come_in() -> None:
    keys = LinkKeys.from_secret(SECRET)
    engine = EngineSocket(zmq.Context.instance(), "tcp://127.0.0.1:0", keys)
    refused = asyncio.Event()
    guessed = LinkKeys(keys.listener, KeyPair.of(bytes(31) + b"1"))
    gateway = GatewaySocket(
        zmq.Context.instance(), engine.bound_to, lambda frames: None, lambda: None, refused.set, guessed
    )
    try:
        gateway.send([b"hello"])
        async with asyncio.timeout(20):
            while not refused.is_set():
                assert not await asyncio.to_thread(engine.wait, 0.05)
                await asyncio.sleep(0)
        assert engine.receive() is None
    finally:
        gateway.close()
        engine.close()


def test_what_is_no_secret_is_said(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ValueError, match="No such file"):
        read_secret(path)
    path.write_text("short\n")
    with pytest.raises(ValueError, match="5 bytes"):
        read_secret(path)
    path.write_text("  a secret that is long enough\n")
    assert read_secret(path) == b"a secret that is long enough"


@pytest.mark.parametrize("length", [MIN_SECRET_BYTES - 1, MIN_SECRET_BYTES, MAX_SECRET_BYTES, MAX_SECRET_BYTES + 1])
def test_a_secret_has_bounds(length: int, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * length)
    if MIN_SECRET_BYTES <= length <= MAX_SECRET_BYTES:
        assert read_secret(path) == b"x" * length
    else:
        with pytest.raises(ValueError, match="use 16 to 4096 random ones"):
            read_secret(path)


def test_a_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    make_secret(path)
    secret = read_secret(path)
    make_secret(path)
    assert read_secret(path) == secret and path.stat().st_mode & 0o777 == 0o600


def test_values_of_a_fleet_that_runs_stay_the_same() -> None:
    """Machines with another version of the server have to derive the same ones."""
    assert fingerprint(SECRET) == "6d67cf82393a3466"
    assert cluster_token(SECRET) == "84daa179a943c3c37d36597192202c82a49e850c781a1c816d4a6ed4ef44d175"
    assert fingerprint(SECRET) != fingerprint(SECRET + b"x")


def test_each_purpose_has_its_key() -> None:
    # What OpenSSL's HKDF makes of this key with the salt "tickertape fleet" and the info "tokens".
    known = "f3fbb88deb5f22e00b908e4b10b403fa372d80d884a9dc693b9eb1ee9170a668"
    assert derive(SECRET, "tokens").hex() == known
    assert len({derive(SECRET, "tokens"), derive(SECRET, "engine link"), derive(OTHER, "engine link")}) == 3


def test_addresses_that_others_see() -> None:
    for address in ("tcp://10.0.0.7:1", "tcp://0.0.0.0:1", "tcp://*:1", "tcp://gpu1:1"):
        assert leaves_the_machine(address)
    for address in ("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x", "inproc://x"):
        assert not leaves_the_machine(address)
