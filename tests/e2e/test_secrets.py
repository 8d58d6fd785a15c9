"""No output of a server or its commands contains a secret: the secrets are marked, and all output is searched.

Secrets are keys, the secret that tokens are signed with, the content of the fleet's secret file, client secrets, resume
tokens in addresses, and keys that are wrong, which may be right ones with a typing error. Paths of files are none.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.e2e.raw_client import raw_client
from tests.e2e.serve_process import NO_LOAD, Served, engine_at, serving

KEY, OTHER_KEY = "mark-key-5e1f7a", "mark-other-key-90cc"
SIGNING = "mark-signing-secret-3d77b1"
FLEET = "mark-fleet-secret-1a2b3c4d5e6f708192"
WRONG = "mark-wrong-key-44aa"
MARKS = (KEY, OTHER_KEY, SIGNING, FLEET, WRONG)
UPGRADE = "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
BEARER = {"Authorization": f"Bearer {KEY}"}

# Python loads this at its start, in workers too: faults where a caller is known already. What is logged of them are
# whole stack traces.
FAULTY = """
from realtime.http.info_routes import Answers
from realtime.serving.inbox import Inbox
from realtime.http import transcription_routes

def fail(*_, **__):
    raise RuntimeError("a fault that nobody foresaw")

Answers._model = fail
Inbox._handle = fail
transcription_routes.read_request = fail
"""


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    with engine_at(tmp_path) as address:
        yield address


class Told:
    """All that a server answers and all that it hands out as a secret."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.secrets: list[str] = list(MARKS)

    def note(self, answer: httpx.Response) -> None:
        self.answers.append(f"{answer.headers} {answer.text}")

    def check(self, log: str) -> None:
        assert len(self.secrets) > len(MARKS), "secrets were minted"
        for secret in self.secrets:
            assert secret not in log, f"{secret} is in the log"
            assert not [answer for answer in self.answers if secret in answer], f"an answer shows {secret}"


async def use(server: Served, told: Told) -> None:
    """Everything with which a client shows a key, right or wrong, in good requests and in bad ones."""
    # A connection on which something failed is not used again.
    one_request = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.http, timeout=30, limits=one_request) as http:
        minted = await http.post("/v1/realtime/client_secrets", json={}, headers=BEARER)
        secret = minted.json()["value"]
        told.secrets.append(secret)
        for key in (KEY, WRONG, secret, secret[:-3] + "abc", f"ek_{WRONG}"):
            for headers in ({"Authorization": f"Bearer {key}"}, {"Authorization": f"Token {key}"}, {"api-key": key}):
                for path in ("/v1/models", f"/v1/nothing?resume={key}", f"/v1/realtime?resume={key}", "/v1/listen"):
                    told.note(await http.get(path, headers=headers))
                told.note(await http.post("/v1/realtime/client_secrets", content=b"[", headers=headers))
                file = {"file": ("a.wav", b"no audio")}
                told.note(await http.post("/v1/audio/transcriptions", files=file, headers=headers))
                told.note(await http.post("/v1/audio/transcriptions", content=b"x", headers=headers))
        token = await resume_token(server)
        told.secrets += [token] if token else []
        for key in (KEY, WRONG, secret):
            offered: Sequence[Any] = ["realtime", f"openai-insecure-api-key.{key}"]
            for query in (
                "",
                f"?resume={token or WRONG}&after=x",
                f"?resume=rt_{WRONG}",
                f"?resume={WRONG}&resume={KEY}",
            ):
                told.answers.append(await refusal(server.ws + query, {"subprotocols": offered}))
                told.answers.append(await refusal(server.ws + query, {"additional_headers": {"api-key": key}}))
            listen = server.ws.replace("/realtime", f"/listen?sample_rate=x&token={key}")
            told.answers.append(await refusal(listen, {"subprotocols": ["token", key]}))
        await asyncio.to_thread(send_malformed, server.port, secret)
        for path in ("/metrics", "/capacity", "/ready", "/health", "/"):
            told.note(await http.get(path))


async def resume_token(server: Served) -> str:
    async with raw_client(server.ws, additional_headers=BEARER) as client:
        with suppress(ConnectionClosed):
            session = await client.update(include=["session.resume"])
            return str(session["resume"]["token"])
    return ""


async def refusal(url: str, options: dict[str, Any]) -> str:
    try:
        async with raw_client(url, **options) as client:
            with suppress(ConnectionClosed):
                await client.send("session.update", session={"type": KEY})
                await client.receive()
        return ""
    except InvalidStatus as refused:
        return f"{refused.response.headers} {refused.response.body!r}"


def send_malformed(port: int, secret: str) -> None:
    """Requests that cannot be read, with keys in every part of them."""
    for key in (KEY, WRONG, secret):
        for request in (
            f"GET /v1/realtime?resume={key} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nBroken line\r\n\r\n",
            f"GET /v1/models HTTP/9.9\r\nAuthorization: Bearer {key}\r\n\r\n",
            f"{key}\r\n\r\n",
            f"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {key}\r\n\r\n",
            f"{UPGRADE}Sec-WebSocket-Key: {key}\r\nAuthorization: Bearer {key}\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client, suppress(OSError):
                client.sendall(request.encode())
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass


def configure(folder: Path, fleet: bool) -> Path:
    file = folder / "tickertape.toml"
    (folder / "fleet-secret").write_text(FLEET)
    signing = f'[fleet]\nsecret_file = "{folder}/fleet-secret"\n' if fleet else f'secret = "{SIGNING}"\n'
    file.write_text(f'[auth]\nkeys = ["{KEY}", "{OTHER_KEY}"]\n{signing}')
    return file


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("fleet", [False, True], ids=["auth.secret", "fleet"])
async def test_a_server_shows_no_secret(tmp_path: Path, engine: str, workers: str, fleet: bool) -> None:
    told, file = Told(), configure(tmp_path, fleet)
    arguments = (
        "--config",
        str(file),
        "--engine",
        engine,
        "--port",
        "0",
        "--workers",
        workers,
        "--limits.max-load",
        "0",
    )
    async with serving(tmp_path, *arguments, environment={"TICKERTAPE_DEBUG": "1"}) as server:
        await use(server, told)
        good = file.read_text()
        for wrong in (f'[auth]\nkeys = ["{KEY}"', f'[auth]\nkeys = [["{KEY}"]]', f'[auth]\nsecret = "{KEY}" "{KEY}"'):
            file.write_text(wrong)
            before = server.said.count("was not reloaded")
            server.process.send_signal(signal.SIGHUP)
            await server.until_it_says("was not reloaded", before + 1)
        file.write_text(good.replace(OTHER_KEY, f"{OTHER_KEY}-2"))
        server.process.send_signal(signal.SIGHUP)
        await server.until_it_says("changed: auth.keys")
        for worker in server.workers()[:1]:
            os.kill(worker, signal.SIGABRT)
            await server.until_it_says("its clients can resume at the other workers")
        assert await server.stop() == 0
        told.check(server.said)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_faults_show_stack_traces_and_no_secret(tmp_path: Path, engine: str, workers: str) -> None:
    told, file = Told(), configure(tmp_path, fleet=False)
    (tmp_path / "sitecustomize.py").write_text(FAULTY)
    arguments = ("--config", str(file), "--engine", engine, "--port", "0", *NO_LOAD)
    started = {"TICKERTAPE_DEBUG": "1", "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    async with serving(tmp_path, *arguments, "--workers", workers, environment=started) as server:
        await use(server, told)
        await server.stop()
        told.check(server.said)
        assert server.said.count("a fault that nobody foresaw") > 10 and "Traceback" in server.said


@pytest.mark.timeout(300)
async def test_commands_that_talk_to_a_server_show_no_secret(tmp_path: Path, engine: str) -> None:
    file = configure(tmp_path, fleet=False)
    silence = tmp_path / "a.wav"
    silence.write_bytes(b"no audio")
    async with serving(tmp_path, "--config", str(file), "--engine", engine, "--port", "0", *NO_LOAD) as server:
        address = f"http://user:{WRONG}@127.0.0.1:{server.port}/v1/realtime?resume=rt_{WRONG}"
        commands = [
            ["status", "--json", server.http],
            ["status", "--json", address],
            ["status", "--ready", address],
            ["transcribe", "--server", server.http, str(silence)],
            ["transcribe", "--server", address, str(silence)],
            ["transcribe", "--live", "--server", address, str(silence)],
            ["check-config", str(file)],
            ["serve", "--config", str(file), "--port", str(server.port)],
            ["engine", "--listen", "nowhere", "--config", str(file)],
            ["completion", "bash"],
        ]
        # A key with a line break is refused by the HTTP client, whose error quotes it.
        tries = [(KEY, command) for command in commands] + [(f"{KEY}\n{KEY}", commands[at]) for at in (0, 3, 5)]
        for key, command in tries:
            # Errors with their stack traces.
            environment = os.environ | {"TICKERTAPE_API_KEY": key, "TICKERTAPE_DEBUG": "1"}
            said = await asyncio.to_thread(said_by, command, environment)
            assert said and not [mark for mark in MARKS if mark in said], (command, said)
        assert await server.stop() == 0
        assert not [mark for mark in MARKS if mark in server.said]


def said_by(command: list[str], environment: dict[str, str]) -> str:
    line = [sys.executable, "-m", "realtime.cli", *command]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def test_values_that_hold_secrets_do_not_show_them() -> None:
    from engine.boundary.sockets import LinkKeys
    from engine.client.client import ClientSettings
    from realtime.bench.clients import Target
    from realtime.config import AuthConfig, Config
    from realtime.serving.signed_tokens import Signer
    from realtime.workers.worker_link import Reload, Start, encode_config

    config = encode_config(Config(auth=AuthConfig(keys=(KEY,), secret=SIGNING)))
    assert KEY in json.loads(bytes(config))["auth"]["keys"], "workers get it"
    keys = LinkKeys.from_secret(FLEET.encode())
    for held in (
        Start(config, FLEET.encode(), [], 1),
        Reload(config),
        ClientSettings(fleet_secret=FLEET.encode()),
        Signer(SIGNING.encode()),
        Target("ws://x", KEY, None, 80, 500),
        keys,
    ):
        shown = f"{held!r} {held}"
        hidden = (*MARKS, keys.listener.secret.decode(), keys.caller.secret.decode())
        assert not [mark for mark in hidden if mark in shown], shown
