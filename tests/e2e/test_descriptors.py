"""A server that runs out of file descriptors: it refuses in time, logs it once, and answers monitoring requests."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.serve_process import Served, engine_at, serving

LIMIT, SOCKETS = 256, 300
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    with engine_at(tmp_path, max_streams=2 * SOCKETS) as address:
        yield address


def limited(soft: int, hard: int) -> tuple[str, ...]:
    return ("bash", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "bash")


async def get(server: Served, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(server.http + path, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    return await asyncio.to_thread(fetch)


def connected(sockets: ExitStack, port: int) -> socket.socket:
    return sockets.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))


def asked(sockets: ExitStack, port: int, request: bytes) -> bytes:
    """The answer, whole if it is a refusal; nothing if the connection was cut."""
    client = connected(sockets, port)
    try:
        client.sendall(request)
        answer = client.recv(4096)
        while b" 503 " in answer[:20] and (more := client.recv(4096)):
            answer += more
        return answer
    except ConnectionError:
        return b""


# Nothing in these tests may depend on when a silent connection is cut off for its silence.
ARGUMENTS = ("--port", "0", "--limits.max-load", "0", "--server.handshake-s", "100")


async def check(server: Served, sockets: ExitStack) -> None:
    """Nothing new is served, those who watch the server are answered, and the log has said it once."""
    for _ in range(3):
        for path in ("/ready", "/health", "/capacity", "/metrics"):
            assert (await get(server, path))[0] == 200, path
    answer = await asyncio.to_thread(asked, sockets, server.port, UPGRADE)
    assert b" 503 " in answer[:20] and b"has no file descriptors left" in answer, answer
    assert b"connection: close" in answer.lower() and b"retry-after: 5" in answer.lower()
    assert (await get(server, "/v1/models"))[0] == 503
    # A scrape is kept for a moment.
    async with asyncio.timeout(20):
        while await refused(server) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    said = [line for line in server.said.splitlines() if "file descriptors run out" in line]
    assert len(said) == 1 and "LimitNOFILE=" in said[0] and f"of {LIMIT} are in use" in said[0], server.said


async def refused(server: Served) -> float:
    figures = (await get(server, "/metrics"))[1]
    counted = re.search(r'tickertape_refused_total\{reason="descriptors"\} (\S+)', figures)
    return 0.0 if counted is None else float(counted[1])


async def until_it_serves_again(server: Served) -> None:
    async with asyncio.timeout(60):
        while (await get(server, "/v1/models"))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_sessions_beyond_the_descriptors_are_refused_and_health_is_answered(tmp_path: Path, engine: str) -> None:
    wrapper = limited(LIMIT, LIMIT)
    async with serving(tmp_path, "--engine", engine, *ARGUMENTS, wrapper=wrapper) as server:
        with ExitStack() as sockets:

            def open_all() -> list[bytes]:
                return [asked(sockets, server.port, UPGRADE) for _ in range(SOCKETS)]

            answers = await asyncio.to_thread(open_all)
            served = sum(b" 101 " in answer[:20] for answer in answers)
            refused = sum(b"has no file descriptors left" in answer for answer in answers)
            assert served + refused == SOCKETS and served > LIMIT // 2, (served, refused)
            await check(server, sockets)
        await until_it_serves_again(server)
        assert await server.stop() == 0
        assert "Traceback" not in server.said


async def test_silent_connections_beyond_the_descriptors_do_not_keep_health_from_being_answered(
    tmp_path: Path, engine: str
) -> None:
    wrapper = limited(LIMIT, LIMIT)
    async with serving(tmp_path, "--engine", engine, *ARGUMENTS, wrapper=wrapper) as server:
        with ExitStack() as sockets:

            def open_all() -> None:
                for _ in range(SOCKETS):
                    connected(sockets, server.port)

            await asyncio.to_thread(open_all)
            await check(server, sockets)
            await asyncio.to_thread(open_all)
            await check(server, sockets)
        await until_it_serves_again(server)
        assert await server.stop() == 0
        assert "Traceback" not in server.said


async def test_the_limit_is_raised_as_far_as_the_system_allows(tmp_path: Path, engine: str) -> None:
    wrapper = limited(LIMIT, 4 * LIMIT)
    async with serving(tmp_path, "--engine", engine, *ARGUMENTS, "--workers", "2", wrapper=wrapper) as server:
        for process in (server.process.pid, *server.workers()):
            assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (4 * LIMIT, 4 * LIMIT)
        assert json.loads((await get(server, "/capacity"))[1])["sessions"] == 0
        assert await server.stop() == 0


@pytest.fixture
def tls_flags(tmp_path: Path) -> tuple[str, ...]:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return "--server.tls-cert", cert, "--server.tls-key", key


def encrypted(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=20))


def asked_with_tls(port: int, path: str) -> bytes:
    with encrypted(port) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while more := client.recv(65536):
            answer += more
        return answer


async def test_connections_without_a_tls_handshake_do_not_keep_health_from_being_answered(
    tmp_path: Path, engine: str, tls_flags: tuple[str, ...]
) -> None:
    wrapper = limited(LIMIT, LIMIT)
    async with serving(tmp_path, "--engine", engine, *ARGUMENTS, *tls_flags, wrapper=wrapper) as server:
        with ExitStack() as sockets:
            for _ in range(2):
                await asyncio.to_thread(lambda: [connected(sockets, server.port) for _ in range(SOCKETS)])
                for path in ("/ready", "/health", "/capacity", "/metrics"):
                    assert b" 200 " in (await asyncio.to_thread(asked_with_tls, server.port, path))[:20], path
                assert b" 503 " in (await asyncio.to_thread(asked_with_tls, server.port, "/v1/models"))[:20]
        async with asyncio.timeout(60):
            while b" 200 " not in (await asyncio.to_thread(asked_with_tls, server.port, "/v1/models"))[:20]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await server.stop() == 0
        assert "Traceback" not in server.said and "ERROR" not in server.said


async def test_a_tls_handshake_has_a_deadline_and_a_server_stops_beside_open_ones(
    tmp_path: Path, engine: str, tls_flags: tuple[str, ...]
) -> None:
    flags = ("--port", "0", "--server.handshake-s", "1")
    async with serving(tmp_path, "--engine", engine, *flags, *tls_flags) as server:
        with ExitStack() as sockets:
            for said in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
                client = connected(sockets, server.port)
                client.sendall(said)
                # A TLS alert may come first.
                assert len(await asyncio.to_thread(client.recv, 100)) < 50
                assert await asyncio.to_thread(rest_of, client) == b"", said
            # The first byte of the request arrives together with the last of the handshake.
            assert b" 200 " in (await asyncio.to_thread(asked_with_tls, server.port, "/health"))[:20]
            connected(sockets, server.port)
            assert await server.stop() == 0
        assert "Traceback" not in server.said and "ERROR" not in server.said


def rest_of(client: socket.socket) -> bytes:
    try:
        return client.recv(100)
    except ConnectionResetError:
        return b""
