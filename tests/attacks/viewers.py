"""Attacks on published sessions: changed links, names that are none, crowds of viewers, viewers that do not read."""

from __future__ import annotations

import asyncio
import json
import socket as sockets

from websockets.exceptions import ConnectionClosed

from tests.attacks.real_server import MOST_VIEWERS, OTHER_KEY
from tests.attacks.target import Client, RawSocket, Target, attack

NAMES_THAT_ARE_NONE = (
    "",
    ".",
    "..",
    "-a",
    "a" * 65,
    "a%2Fb",
    "a%00",
    "a%20b",
    "%C3%A9",
    "a%0D%0AX:%20y",
    "<script>",
    "%ff",
)
UPGRADE = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"


def events(name: str) -> str:
    return f"/v1/sessions/{name}/events"


async def publish(client: Client, name: str | None) -> str:
    """Publish the session; the error code, or an empty text."""
    await client.send("session.update", session={"type": "transcription", "publish": name})
    while (event := await client.receive())["type"] not in ("session.updated", "error"):
        pass
    return str(event["error"]["code"]) if event["type"] == "error" else ""


async def link(target: Target, name: str = "talk", key: str | None = None) -> dict[str, str]:
    answer = await target.post(f"/v1/sessions/{name}/links", b"{}", key=key)
    assert answer.status == 200, answer.body
    return dict(json.loads(answer.body))


def get(path: str, headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


async def status(target: Target, request: bytes) -> int:
    async with target.raw() as socket:
        await socket.send(request)
        return int((await socket.read_head()).split()[1])


@attack()
async def links_that_are_changed(target: Target) -> None:
    """Links with another name, another owner or a changed letter, links of other routes, and links as keys."""
    token = (await link(target))["token"]
    assert await status(target, get(f"{events('talk')}?token={token}")) == 200
    for name in ("talk2", "Talk", "tal", "other"):
        assert await status(target, get(f"{events(name)}?token={token}")) == 401
    for forged in (
        token[:-1],
        token + "A",
        token[:9] + "AAAA" + token[13:],
        "vl_",
        "vl_" + "x" * 9000,
        "vl_%ff",
        "vl_%00",
    ):
        assert await status(target, get(f"{events('talk')}?token={forged}")) in (401, 400)
    bearer = f"Authorization: Bearer {token}\r\nContent-Length: 0\r\n"
    for method, path in (
        ("POST", "/v1/sessions/talk/links"),
        ("DELETE", "/v1/sessions/talk/links"),
        ("GET", "/v1/models"),
        ("POST", "/v1/realtime/client_secrets"),
    ):
        assert await status(target, get(path, bearer, method)) == 401, path
    assert await target.refused(target.ws, key=token) == (401, "invalid_api_key")
    # The names of another key are others, and its revocations too.
    async with target.client() as client:
        assert await publish(client, "talk") == ""
        assert (
            await status(target, get("/v1/sessions/talk/links", f"Authorization: Bearer {OTHER_KEY}\r\n", "DELETE"))
            == 200
        )
        assert await status(target, get(f"{events('talk')}?token={token}")) == 200


@attack()
async def thousands_of_links(target: Target) -> None:
    """A thousand links, and more revocations than the server keeps: it keeps a bounded number, and forgets none."""
    first = await link(target)
    bearer = f"Authorization: Bearer {target.key}\r\nContent-Length: 0\r\n"
    path = "/v1/sessions/talk/links"
    expiry = first["id"].partition("-")[0]
    for requests in (
        [get(path, bearer, "POST")] * 1000,
        [get(f"{path}/{expiry}-{number:016x}", bearer, "DELETE") for number in range(1200)],
    ):
        async with target.raw() as socket:
            await asyncio.gather(socket.send(b"".join(requests)), _answers(socket, len(requests)))
    # The list is full, so the last revocations have revoked all links of the name.
    assert await status(target, get(f"{events('talk')}?token={first['token']}")) == 401
    token = (await link(target))["token"]
    assert await status(target, get(f"{events('talk')}?token={token}")) == 200


async def _answers(socket: RawSocket, count: int) -> None:
    for _ in range(count):
        head = await socket.read_head()
        assert head.startswith(b"HTTP/1.1 200"), head[:100]
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await socket.reader.readexactly(int(length.split(b":")[1]))


@attack()
async def names_that_are_none(target: Target) -> None:
    """Names with slashes, control characters, other alphabets or too many letters, in addresses and in messages."""
    bearer = f"Authorization: Bearer {target.key}\r\nContent-Length: 0\r\n"
    for name in NAMES_THAT_ARE_NONE:
        for method, path in (
            ("GET", events(name)),
            ("POST", f"/v1/sessions/{name}/links"),
            ("GET", f"/watch/{name}/x"),
        ):
            assert await status(target, get(path, bearer, method)) in (400, 404), (name, path)
    async with target.client() as client:
        for value in ("", "a/b", "ä", "a\n", "a\x00", "-", "a" * 65, "a" * 60_000, 3, True, [], {}, {"name": "talk"}):
            await client.send("session.update", session={"publish": value})
            assert (await client.error())["param"] == "session.publish"
        await client.still_works()


@attack()
async def claims_of_one_name(target: Target) -> None:
    """Ten sessions ask for one name again and again: one has it, and it is free when that one ends."""
    clients = [target.client() for _ in range(10)]
    opened = [await client.__aenter__() for client in clients]
    try:
        for _ in range(20):
            answers = await asyncio.gather(*(publish(client, "talk") for client in opened))
            assert sorted(answers) == ["", *["name_taken"] * 9]
        await opened[0].still_works()
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)
    async with target.client() as client:
        while await publish(client, "talk"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@attack()
async def a_crowd_of_viewers(target: Target) -> None:
    """Many more viewers of one key than there are places, over both ways: 503, and those of another key come."""
    heads = f"Authorization: Bearer {target.key}\r\n"
    key = f"Sec-WebSocket-Key: {'A' * 22}==\r\n"

    async def come(number: int) -> tuple[RawSocket, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        socket = RawSocket(target, reader, writer)
        await socket.send(get(events(f"n{number % 40}"), heads + (UPGRADE + key if number % 2 else "")))
        return socket, int((await socket.read_head()).split()[1])

    there = await asyncio.gather(*(come(number) for number in range(2 * MOST_VIEWERS)))
    try:
        statuses = [answer for _, answer in there]
        # Half of the places are left to the viewers of other keys.
        assert statuses.count(200) + statuses.count(101) == MOST_VIEWERS // 2 and set(statuses) == {200, 101, 503}
        other = f"Authorization: Bearer {OTHER_KEY}\r\n"
        assert await status(target, get(events("talk"), other)) == 200
    finally:
        for socket, _ in there:
            socket.writer.transport.abort()
    async with asyncio.timeout(30):
        while await status(target, get(events("n1"), heads)) != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@attack()
async def players_of_made_up_names(target: Target) -> None:
    """A playlist for each of twice as many made-up names as there are places: viewers of another key still come."""
    heads = f"Authorization: Bearer {target.key}\r\n"
    for number in range(2 * MOST_VIEWERS):
        assert await status(target, get(f"/v1/sessions/made-up-{number}/captions.m3u8", heads)) == 200
    other = f"Authorization: Bearer {OTHER_KEY}\r\n"
    assert await status(target, get(events("talk"), other)) == 200
    assert await status(target, get("/v1/sessions/talk/captions.m3u8", other)) == 200


@attack()
async def viewers_that_read_nothing(target: Target) -> None:
    """A hundred viewers that read nothing, while a session is published and hidden two thousand times."""
    heads = f"Authorization: Bearer {target.key}\r\n"
    key = f"Sec-WebSocket-Key: {'A' * 22}==\r\n"
    stuck = []
    try:
        for number in range(100):
            end = sockets.socket()
            end.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 2048)
            end.setblocking(False)
            await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", target.port))
            request = get(events("talk"), heads + (UPGRADE + key if number % 2 else ""))
            await asyncio.get_running_loop().sock_sendall(end, request)
            stuck.append(end)
        async with target.client() as client:
            for _ in range(20):
                for number in range(100):
                    name = None if number % 2 else "talk"
                    await client.send("session.update", session={"type": "transcription", "publish": name})
                for _ in range(100):
                    await client.until("session.updated")
            await client.still_works()
    finally:
        for end in stuck:
            end.close()


@attack()
async def viewers_that_talk(target: Target) -> None:
    """Viewers that send messages, audio and large frames on their read-only sockets: each is closed with 1008."""
    url = f"ws://127.0.0.1:{target.port}{events('talk')}"
    for message in (
        "{}",
        b"\x00" * 100_000,
        '{"type": "session.update", "session": {"publish": "x"}}',
        "x" * 1_000_000,
    ):
        async with target.client(url, greeted=False) as viewer:
            await viewer.until("snapshot")
            try:
                await viewer.send_raw(message)
            except ConnectionClosed:
                pass
            assert await viewer.close_code() == 1008
