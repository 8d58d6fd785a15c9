"""Attacks on a server without keys: other websites in the operator's browser, callers that are made up, and the count.

The server that they are run against has room for so few sessions that a place which is not given back is missed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

from websockets.exceptions import InvalidStatus

from tests.attacks.real_server import FEW_SESSIONS
from tests.attacks.sound import flac
from tests.attacks.target import BOUNDARY, FORM, Answer, Target, attack, form_file

WEBSITE = "https://attacker.example"
FILE = form_file(flac(0.2)) + f"--{BOUNDARY}--\r\n".encode()
# What a page could want: method, path, kind of body, body.
WANTED = [
    ("GET", "/capacity", "", b""),
    ("GET", "/metrics", "", b""),
    ("GET", "/v1/models", "", b""),
    ("POST", "/v1/realtime/client_secrets", "text/plain", b"{}"),
    ("POST", "/v1/audio/transcriptions", FORM, FILE),
    ("POST", "/v1/listen", "text/plain", flac(0.2)),
    ("OPTIONS", "/v1/audio/transcriptions", "", b""),
]
SOCKETS = ("/v1/realtime", *(f"/{version}/listen?encoding=linear16&sample_rate=16000" for version in ("v1", "v2")))


async def ask(target: Target, host: str, origin: str) -> list[tuple[str, Answer]]:
    """All that a page could want, asked for by its browser."""
    answers = []
    told = f"Host: {host}\r\nOrigin: {origin}\r\n"
    for method, path, kind, body in WANTED:
        head = f"{method} {path} HTTP/1.1\r\n{told}Connection: close\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: {kind}\r\n" if kind else ""
        head += "Access-Control-Request-Method: POST\r\n" if method == "OPTIONS" else ""
        answers.append((path, Answer.parse(await target.exchange(f"{head}\r\n".encode() + body, 30))))
    for path in SOCKETS:
        head = target.upgrade_head(path).decode().replace(f"Host: 127.0.0.1:{target.port}\r\n", told)
        async with target.raw() as socket:
            await socket.send(head.encode())
            answers.append((path, Answer.parse(await socket.read_head())))
    return answers


@attack(few_sessions=True)
async def a_page_of_another_website(target: Target) -> None:
    """A page of another website, or from disk, opens sockets, uploads, mints secrets and reads metrics."""
    host = f"127.0.0.1:{target.port}"
    for origin in (WEBSITE, "null", f"http://127.0.0.1:{target.port + 1}", f"http://{host}.attacker.example"):
        for path, answer in await ask(target, host, origin):
            assert answer.status == 403, (path, origin, answer.status)
            assert b"access-control-allow-origin" not in answer.headers.lower()
    for path, answer in await ask(target, host, f"http://{host}"):
        assert answer.status in (101, 200, 400, 405), ("the server's own page", path, answer.status)


@attack(few_sessions=True)
async def a_website_whose_name_leads_here(target: Target) -> None:
    """DNS rebinding: the browser takes the server for a part of the website, with its Host and Origin."""
    for name in ("attacker.example", "localhost.attacker.example", "127.0.0.1.attacker.example"):
        host = f"{name}:{target.port}"
        for path, answer in await ask(target, host, f"http://{host}"):
            assert answer.status == 403, (path, name, answer.status)


@attack(few_sessions=True)
async def numbers_that_are_none(target: Target) -> None:
    """Numbers in Deepgram's query that only some parsers accept, with eight channels each."""
    raw = f"{target.listen}?encoding=linear16&multichannel=true&channels=8"
    for number in (
        "00004800099",
        "0016000",
        "1_6000",
        "%D9%A1%D9%A6%D9%A0%D9%A0%D9%A0",
        "9" * 4000,
        "1e4",
        "nan",
        "-1",
    ):
        for name in ("sample_rate", "endpointing", "utterance_end_ms"):
            for _ in range(2):
                assert (await target.refused(f"{raw}&{name}={number}"))[0] == 400, (name, number[:20])
    # As many sessions as were never made would have filled the server many times over.
    async with target.client() as client:
        await client.still_works()


@attack(few_sessions=True)
async def callers_that_are_made_up(target: Target) -> None:
    """Forty sockets with different forged `X-Forwarded-For` headers: limits count by the connection's address."""
    async with AsyncExitStack() as sockets:
        for number in range(40):
            headers = {"X-Forwarded-For": f"10.0.0.{number}", "Forwarded": f"for=10.0.0.{number}"}
            try:
                await sockets.enter_async_context(target.client(headers=headers))
            except InvalidStatus as error:
                status, body = error.response.status_code, json.loads(error.response.body)
                assert (status, body["error"]["code"]) == (429, "too_many_sessions")
                break
        else:
            raise AssertionError("forty callers were believed")
        assert number <= FEW_SESSIONS


@attack(few_sessions=True)
async def leaving_in_the_handshake_of_many_channels(target: Target) -> None:
    """Sixty clients that ask for four channels each and leave at various moments of the handshake."""
    path = "/v1/listen?encoding=linear16&sample_rate=16000&multichannel=true&channels=4"
    for number in range(60):
        async with target.raw() as socket:
            await socket.send(target.upgrade_head(path))
            await asyncio.sleep(number % 6 * 0.002)
    async with asyncio.timeout(20):
        while True:
            try:
                async with target.client() as client:
                    return await client.still_works()
            except InvalidStatus as error:
                assert error.response.status_code in (429, 503)
                await asyncio.sleep(0.1)
