"""Attacks on keys: client secrets beyond their rights, other clients' resume tokens, items for the shared cache."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.boundary.items import hash_payload
from realtime.http.authentication import Authenticator
from realtime.serving.signed_tokens import Signer
from realtime.session.settings import Settings
from tests.attacks.real_server import BAD_KEY, GOOD_KEY, OTHER_KEY, SIGNING_SECRET
from tests.attacks.sound import flac
from tests.attacks.target import Answer, Client, Target, attack, form_file

SECRETS = "/v1/realtime/client_secrets"
TAKEN_OVER = 4409


async def secret_of(target: Target) -> str:
    answer = await target.post(SECRETS, b"{}")
    assert answer.status == 200, answer.body
    value: str = json.loads(answer.body)["value"]
    return value


@attack()
async def a_secret_that_mints_secrets(target: Target) -> None:
    """A client secret asks for another one, for a beta one, for uploads, rendering and injection."""
    secret = await secret_of(target)
    async with target.client(key=secret) as client:
        await client.still_works()
    for path in (SECRETS, "/v1/realtime/transcription_sessions", "/v1/audio/inject"):
        answer = await target.post(path, b"{}", key=secret)
        assert answer.status in (401, 403), (path, answer.status, answer.body)
    answer = await target.upload(form_file(flac(0.2)), key=secret)
    assert answer.status in (401, 403), answer.body


@attack()
async def forged_secrets(target: Target) -> None:
    """Secrets that were never issued, a secret with a changed letter, a key with the prefix of a secret."""
    secret = await secret_of(target)
    for forged in ("ek_", "ek_forged", secret[:-1] + "!", secret.upper(), "ek_" + GOOD_KEY, secret + " "):
        if forged.strip() != secret:
            assert await target.refused(target.ws, key=forged) == (401, "invalid_api_key")


@attack()
async def secrets_of_a_key_that_is_gone(target: Target) -> None:
    """Correctly signed secrets of a key that was removed, or of no key."""
    signer = Signer(SIGNING_SECRET.encode())
    before, without = Authenticator(("a-key-that-is-gone", BAD_KEY), signer), Authenticator((), signer)
    good = before.issue(before.check(BAD_KEY, ""), Settings(), 60).value
    async with target.client(key=good) as client:
        await client.still_works()
    for authenticator, key in ((before, "a-key-that-is-gone"), (without, "")):
        secret = authenticator.issue(authenticator.check(key, "127.0.0.1"), Settings(), 60).value
        assert await target.refused(target.ws, key=secret) == (401, "invalid_api_key")


@attack()
async def bad_requests_for_secrets(target: Target) -> None:
    """Bodies that are not JSON, too large or nested too deeply, and endless lifetimes."""
    for body, statuses in (
        (b"{", (400,)),
        (b"[]", (400,)),
        (b"\xff\xfe", (400,)),
        (b"[" * 100_000, (400, 413)),
        (b'{"x": "' + b"y" * 2_000_000 + b'"}', (413,)),
        (b'{"expires_after": {"seconds": 1e400}}', (400,)),
        (b'{"expires_after": {"seconds": 99999999999}}', (400,)),
        (b'{"expires_after": []}', (400,)),
        (b'{"session": {"audio": {"input": {"format": {"rate": -1, "type": "audio/pcm"}}}}}', (400,)),
    ):
        answer = await target.post(SECRETS, body)
        assert answer.status in statuses, (body[:40], answer.status)
        assert answer.code


async def resumable(client: Client) -> str:
    """Ask for a session that can be resumed; its token."""
    session = await client.update(include=["session.resume"], turn_detection=None)
    token: str = session["resume"]["token"]
    return token


@attack()
async def guessed_tokens(target: Target) -> None:
    """Tokens that are guessed, modified or far too long, and sequence numbers that are not numbers."""
    async with target.client() as client:
        token = await resumable(client)
        for guess in ("", "rt_", "x" * 5000, token[:-1], token + "A", token.swapcase(), "%00", "rt_" + "A" * 32):
            status, code = await target.refused(f"{target.ws}?resume={guess}&after=0")
            assert (status, code) == (404, "resume_token_unknown"), guess[:40]
        for after in ("-1", "x", "1e3", "9" * 40, "", "%00"):
            status, code = await target.refused(f"{target.ws}?resume={token}&after={after}")
            assert status in (400, 410), after
        assert (await target.refused(f"{target.ws}?resume={token}&after=999999"))[0] == 410
        await client.still_works()


@attack()
async def a_token_of_somebody_else(target: Target) -> None:
    """The right token with the wrong key."""
    async with target.client() as client:
        token = await resumable(client)
        assert await target.refused(f"{target.ws}?resume={token}&after=0", key=OTHER_KEY) == (
            404,
            "resume_token_unknown",
        )
        await client.still_works()


@attack()
async def a_storm_of_takeovers(target: Target) -> None:
    """Forty sockets take one session from each other while it sends audio: each sample counts once."""
    audio = b"\x01\x00" * 2400
    async with target.client() as client:
        token = await resumable(client)
        counted = 0
        for _ in range(20):
            await client.append(audio)
        for _ in range(40):
            try:
                async with target.client(f"{target.ws}?resume={token}&after=0", greeted=False) as other:
                    received = (await other.until("session.resumed"))["received_samples"]
                    assert counted <= received <= counted + 20 * 2400, (counted, received)
                    counted = received
                    for _ in range(20):
                        await other.append(audio)
            except (InvalidStatus, ConnectionClosed):
                break
        assert await client.close_code() == TAKEN_OVER


@attack()
async def resuming_while_connected(target: Target) -> None:
    """Ten sockets at once with the token of a connected session: one of them has it in the end."""
    async with target.client() as client:
        token = await resumable(client)
        codes: list[Any] = []

        async def take() -> None:
            try:
                async with target.client(f"{target.ws}?resume={token}&after=0", greeted=False) as other:
                    codes.append(await asyncio.wait_for(other.close_code(), 2))
            except TimeoutError:
                codes.append("kept")
            except InvalidStatus as refused:
                # On a busy machine a request may wait so long that its client could have left; it has to ask again.
                code = json.loads(refused.response.body)["error"]["code"]
                assert (refused.response.status_code, code) == (503, "request_too_old")
                await take()

        await asyncio.gather(*(take() for _ in range(10)))
        assert len(codes) == 10, codes
        assert codes.count("kept") <= 1 and set(codes) <= {"kept", TAKEN_OVER}, codes


BAD_FIELDS: list[dict[str, Any]] = [
    {"samples": "x"},
    {"samples": -(2**63)},
    {"offset": 2**70},
    {"length": -1},
    {"sample": 1e308},
    {"hash": "zz"},
    {"hash": 5},
    {"hash": "00" * 16},
    {"data": "A"},
    {"data": [1]},
    {"shape": [2**40]},
    {"shape": "x"},
    {"mask": "x"},
    {"mask": [True] * 10_000},
]


@attack()
async def poisoned_items(target: Target) -> None:
    """Items for the shared cache with one wrong field: a text for a number, or a number out of range."""
    sound = np.linspace(-0.5, 0.5, 1280, dtype=np.float32)
    good: dict[str, Any] = {"offset": 0, "length": 1, "sample": 0, "hash": hash_payload(sound).hex(), "shape": [1280]}
    good["data"] = base64.b64encode(sound.tobytes()).decode()
    items = [{**good, **bad} for bad in BAD_FIELDS] + [{}]
    for entry in items:
        answer = await target.post("/v1/audio/inject", json.dumps({"items": [entry]}).encode())
        assert answer.status in (400, 403), (entry, answer.status, answer.body)
    async with target.client() as client:
        for entry in items:
            await client.send("input_audio_buffer.inject", items=[{**entry, "data": "AAAA"}], event_id="i")
            assert (await client.error())["event_id"] == "i"
        await client.still_works()


@attack(gateway_mib=40)
async def a_large_injection(target: Target) -> None:
    """Sixteen megabytes of items in one request."""
    body = b'{"items": [' + b"null," * 3_200_000 + b"null]}"
    answer: Answer = await target.post("/v1/audio/inject", body)
    assert answer.status in (400, 403, 404, 413), answer.status
