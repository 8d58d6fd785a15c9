"""SIGHUP reads the configuration again and closes no socket; SIGUSR2 replaces the workers too."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from realtime.config import ConfigError
from tests.e2e.conftest import running_server
from tests.e2e.raw_client import greeted_client
from tests.e2e.serve_process import NO_LOAD, engine_at, serving
from tests.engine.fakes import until

OLD, NEW = "the-old-key-1234", "the-new-key-5678"


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def own_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    with engine_at(tmp_path) as address:
        yield address


def write(file: Path, key: str, **limits: object) -> None:
    lines = [
        f'[auth]\nkeys = ["{key}"]',
        "[limits]",
        *(f"{name} = {json.dumps(value)}" for name, value in limits.items()),
    ]
    file.write_text("\n".join(lines))


def bearer(key: str) -> dict[str, dict[str, str]]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


async def status_of(url: str, key: str) -> int:
    try:
        async with greeted_client(url, **bearer(key)):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


async def test_sighup_changes_keys_and_limits_and_closes_no_socket(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "tickertape.toml"
    write(file, OLD)
    async with serving(tmp_path, "--config", str(file), "--engine", engine, "--port", "0", *NO_LOAD) as server:
        async with greeted_client(server.ws, **bearer(OLD)) as client:
            write(file, NEW, sessions_per_key=1)
            server.process.send_signal(signal.SIGHUP)
            await server.until_it_says("the configuration was reloaded: changed: auth.keys, limits.sessions_per_key")
            assert await status_of(server.ws, OLD) == 401
            async with greeted_client(server.ws, **bearer(NEW)):
                assert await status_of(server.ws, NEW) == 429
            # Sessions that were open are not affected.
            assert (await client.update(turn_detection=None))["type"] == "transcription"
        assert await server.stop() == 0
        assert "Traceback" not in server.said and OLD not in server.said and NEW not in server.said


async def test_a_wrong_configuration_is_refused_in_one_line_and_the_old_one_stays(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "tickertape.toml"
    write(file, OLD)
    async with serving(tmp_path, "--config", str(file), "--engine", engine, "--port", "0") as server:
        for wrong, said in (
            ("[limits]\nmax_session = 3", "unknown key 'limits.max_session'; did you mean 'limits.max_sessions'?"),
            (f'[auth]\nkeys = ["{NEW}"]\n[limits]\nmax_load = 7', "limits.max_load is a share"),
            ("[auth", "is not valid TOML"),
        ):
            before = len(server.said.splitlines())
            file.write_text(wrong)
            server.process.send_signal(signal.SIGHUP)
            await server.until_it_says(said)
            lines = server.said.splitlines()[before:]
            assert len(lines) == 1 and "was not reloaded, and the old one stays in force: " in lines[0], lines
            assert await status_of(server.ws, OLD) == 101 and await status_of(server.ws, NEW) == 401
        file.unlink()
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("cannot read the configuration file")
        assert await status_of(server.ws, OLD) == 101
        assert await server.stop() == 0


async def test_a_configuration_from_a_pipe_is_not_read_again(tmp_path: Path, engine: str) -> None:
    """A pipe that was read is empty: taken for a configuration, it would remove the keys and open the server."""
    file = tmp_path / "tickertape.toml"
    write(file, OLD)
    shell = ("bash", "-c", 'exec "$@" --config <(cat "$0")', str(file))
    async with serving(tmp_path, "--engine", engine, "--port", "0", wrapper=shell) as server:
        assert await status_of(server.ws, OLD) == 101 and await status_of(server.ws, NEW) == 401
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("the configuration was")
        assert await status_of(server.ws, NEW) == 401, server.said
        assert "was not reloaded, and the old one stays in force: " in server.said
        assert "is not a regular file" in server.said
        assert await server.stop() == 0


async def test_what_needs_a_restart_is_named_and_not_taken_over(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "tickertape.toml"
    write(file, OLD)
    async with serving(tmp_path, "--config", str(file), "--engine", engine, "--port", "0", *NO_LOAD) as server:
        # The flag wins over the file, at a reload too.
        file.write_text(
            f'[server]\nport = 9\nhost = "::1"\nlog_level = "debug"\n[auth]\nkeys = ["{OLD}"]\nsecret = "{NEW}"'
        )
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("changed: server.log_level; changed and needs a restart: server.host, auth.secret")
        assert await status_of(server.ws, OLD) == 101
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says(
            "the configuration was reloaded: changed and needs a restart: server.host, auth.secret"
        )
        assert await server.stop() == 0


async def test_a_server_that_waits_for_its_engine_survives_both_signals(tmp_path: Path) -> None:
    async with serving(tmp_path, "--engine", f"ipc://{tmp_path}/nobody", "--port", "0", ready=False) as server:
        await server.until_it_says("waiting for an engine")
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("the configuration was reloaded: nothing has changed")
        server.process.send_signal(signal.SIGUSR2)
        await server.until_it_says("SIGUSR2 replaces workers, but this server has none")
        assert await server.stop() == 0


async def test_workers_take_the_configuration_over_and_only_sigusr2_replaces_them(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "tickertape.toml"
    write(file, OLD)
    arguments = ("--config", str(file), "--engine", engine, "--port", "0", "--workers", "2", "--server.drain-s", "1")
    arguments += NO_LOAD
    async with serving(tmp_path, *arguments) as server:
        before = set(server.workers())
        assert len(before) == 2
        async with greeted_client(server.ws, **bearer(OLD)) as client:
            write(file, NEW)
            server.process.send_signal(signal.SIGHUP)
            await server.until_it_says("the configuration was reloaded: changed: auth.keys")
            # Each connection is taken by either of them.
            async with asyncio.timeout(30):
                while {await status_of(server.ws, OLD) for _ in range(10)} != {401}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert {await status_of(server.ws, NEW) for _ in range(10)} == {101}
            assert set(server.workers()) == before
            assert (await client.update(turn_detection=None))["type"] == "transcription", "its socket is the same"
        # A worker that comes later has the configuration that is in force.
        os.kill(min(before), signal.SIGKILL)
        await until(lambda: len(set(server.workers()) - before) == 1 and len(server.workers()) == 2)
        write(file, NEW, sessions_per_key=1)
        server.process.send_signal(signal.SIGUSR2)
        await server.until_it_says("has replaced worker", 2)
        assert not set(server.workers()) & before
        async with greeted_client(server.ws, **bearer(NEW)):
            assert {await status_of(server.ws, NEW) for _ in range(6)} == {429}
        file.write_text("[auth")
        now = set(server.workers())
        server.process.send_signal(signal.SIGUSR2)
        await server.until_it_says("is not valid TOML")
        assert set(server.workers()) == now, "a restart with a configuration that is wrong does not begin"
        assert await server.stop() == 0
        assert "Traceback" not in server.said


async def test_a_limit_on_time_counts_for_sessions_that_are_open(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "tickertape.toml"
    write(file, OLD)
    async with serving(tmp_path, "--config", str(file), "--engine", engine, "--port", "0", *NO_LOAD) as server:
        async with greeted_client(server.ws, **bearer(OLD)) as client:
            write(file, OLD, session_s=0.1)
            server.process.send_signal(signal.SIGHUP)
            with pytest.raises(ConnectionClosed, match="the session lasted"):
                await client.receive()
        assert await server.stop() == 0


async def test_every_part_sees_the_limits_that_were_reloaded() -> None:
    """In one process with the test: reloads are asked for as the signal does it."""
    async with running_server(server={"inject": False}) as running, httpx.AsyncClient(base_url=running.http) as http:

        def reload(**sections: dict[str, object]) -> None:
            config = running.gateway.config
            for name, changes in sections.items():
                config = replace(config, **{name: replace(getattr(config, name), **changes)})
            assert running.server.reload(config).need_restart == ()

        async def upload() -> tuple[int, str]:
            answer = await http.post("/v1/audio/transcriptions", files={"file": ("x.wav", bytes(5000))})
            return answer.status_code, answer.json()["error"]["code"]

        reload(limits={"upload_bytes": 4000})
        assert await upload() == (413, "file_too_large")
        reload(limits={"upload_bytes": 6000, "spool_bytes": 1000})
        assert await upload() == (503, "server_busy")
        reload(limits={"max_sessions": 1, "max_load": 0.5, "control_bytes": 1000, "message_bytes": 100_000})
        assert (await http.get("/capacity")).json()["max_load"] == 0.5
        async with greeted_client(running.ws) as client:
            assert await status_of(running.ws, OLD) == 503
            await client.send("session.update", event_id="x" * 2000)
            assert (await client.receive())["error"]["code"] == "message_too_large"
            with pytest.raises(ConnectionClosed, match="1009"):
                await client.socket.send("x" * 200_000)
                await client.receive()
        reload(limits={"max_sessions": 0, "new_sessions_per_minute": 1})
        assert [await status_of(running.ws, OLD) for _ in range(2)] == [101, 429]
        assert (await http.post("/v1/audio/inject", content=b"")).status_code == 403
        reload(server={"inject": True, "handshake_s": 0.2, "log_level": "debug"}, session={"resume_s": 0.0})
        assert (await http.post("/v1/audio/inject", content=b"")).status_code != 403
        assert logging.getLogger().level == logging.DEBUG
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HT")
        async with asyncio.timeout(5):
            assert await reader.read() == b"", "a head that does not come is cut off after the new time"
        writer.close()


def certificate(folder: Path, name: str) -> tuple[bytes, bytes]:
    cert, key = folder / f"{name}.cert", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert.read_bytes(), key.read_bytes()


async def test_a_certificate_that_was_renewed_is_used_and_a_broken_one_is_not(tmp_path: Path, engine: str) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")

    def put(pair: tuple[bytes, bytes]) -> None:
        cert.write_bytes(pair[0])
        key.write_bytes(pair[1])

    put(first)
    flags = ("--server.tls-cert", str(cert), "--server.tls-key", str(key))
    async with serving(tmp_path, "--engine", engine, "--port", "0", *NO_LOAD, *flags) as server:

        async def shown() -> bytes:
            return (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))).encode()

        assert await shown() == first[0]
        put((second[0], first[1]))
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("is not the key of the certificate")
        assert await shown() == first[0]
        put(second)
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("the configuration was reloaded")
        assert await shown() == second[0]
        assert await server.stop() == 0


async def test_a_reload_with_a_certificate_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    certificate(tmp_path, "own")
    cert, key = tmp_path / "own.cert", tmp_path / "own.key"
    async with running_server(server={"tls_cert": str(cert), "tls_key": str(key)}) as running:
        config = running.gateway.config
        new = replace(config, limits=replace(config.limits, upload_bytes=4000))
        key.write_text("broken")
        with pytest.raises(ConfigError, match="must be PEM files"):
            running.server.reload(new)
        assert config.limits.upload_bytes != 4000


def test_a_server_stops_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """Closing a terminal sends SIGHUP too; a server that continued could not be stopped from that terminal."""
    log, port = tmp_path / "log", free_port()
    child, terminal = pty.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        arguments = ["serve", "--engine", f"ipc://{tmp_path}/nobody", "--port", str(port)]
        os.execv(sys.executable, [sys.executable, "-m", "realtime.cli", *arguments])
    deadline = time.monotonic() + 60
    while not (log.exists() and "waiting for an engine" in log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, log.read_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
