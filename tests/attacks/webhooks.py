"""Attacks with webhooks: the server is to reach what it must not, and to wait for receivers that never answer."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.attacks.good_client import speech
from tests.attacks.target import Client, Target, attack
from tests.waiting import until
from tests.webhook_receiver import hang, receiver

FORBIDDEN = [
    *("http://localhost/", "http://[::1]/", "http://169.254.169.254/", "http://0.0.0.0/", "http://2130706434/"),
    *("http://127.0.0.1@127.0.0.2/", "http://u:p@127.0.0.1/", "file:///etc/passwd", "ftp://127.0.0.1/", "unix:/run/x"),
    *("http://127.0.0.1/\r\nX: y", "http://127.0.0.1/a b", "", "http://" + "x" * 5000, 5, ["x"], {"a": 1}),
]


async def name(client: Client, url: Any) -> None:
    audio = {"input": {"turn_detection": None, "format": {"type": "audio/pcm", "rate": 48_000}}}
    await client.send("session.update", session={"type": "transcription", "on_final": url, "audio": audio})


async def speak(client: Client) -> None:
    """A turn that the client ends."""
    await client.append(speech(3.0))
    await client.send("input_audio_buffer.commit")
    await client.until("conversation.item.input_audio_transcription.completed")


@attack()
async def webhooks_to_forbidden_places(target: Target) -> None:
    """URLs with private addresses, user names, other protocols and line ends, and redirects: never reached."""
    contacted: list[Any] = []
    victim = await asyncio.start_server(lambda reader, writer: contacted.append(writer), "127.0.0.2", 0)
    secret = f"http://127.0.0.2:{victim.sockets[0].getsockname()[1]}/secret"

    async def redirect(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 307 X\r\nLocation: {secret}\r\nContent-Length: 0\r\n\r\n".encode())

    async with receiver() as hook:
        hook.usual = redirect
        async with target.client() as client:
            for url in (secret, *FORBIDDEN):
                await name(client, url)
                error = await client.error()
                assert error["code"] in ("host_not_allowed", "invalid_value"), (url, error)
            await name(client, hook.url())
            await client.until("session.updated")
            await speak(client)
        await until(lambda: len(hook.heads) > 1)
    victim.close()
    assert not contacted


@attack(gateway_mib=40)
async def webhooks_that_hang_or_fail(target: Target) -> None:
    """Sessions whose receivers hang, answer 500, never end their answers or reset: bounded, other sessions unharmed."""

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 X\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async def long_line(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"y" * 65536)
            await writer.drain()

    async def reset(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def one(reply: Any) -> None:
        async with receiver() as hook:
            hook.usual = reply
            async with target.client() as client:
                await name(client, hook.url())
                await client.until("session.updated")
                await speak(client)
            # It is tried again, also when the session has ended.
            await until(lambda: hook.connections > 1)

    await asyncio.gather(*map(one, (hang, 500, endless, long_line, reset, 302)))


@attack()
async def more_webhooks_than_allowed(target: Target) -> None:
    """A hundred sessions that name a URL each, and change it again and again: bounded, and free again at the end."""
    async with receiver() as hook:
        for _ in range(2):
            taken = refused = 0
            async with asyncio.TaskGroup() as group:

                async def one(number: int) -> None:
                    nonlocal taken, refused
                    async with target.client() as client:
                        for turn in range(20):
                            await name(client, hook.url(f"/{number}/{turn}"))
                            event = await client.receive()
                            while event["type"] not in ("session.updated", "error"):
                                event = await client.receive()
                            if event["type"] == "error":
                                assert event["error"]["code"] == "too_many_webhooks", event
                                refused += 1
                            else:
                                taken += 1

                for number in range(50):
                    group.create_task(one(number))
            assert taken and refused
        assert hook.connections == 0
