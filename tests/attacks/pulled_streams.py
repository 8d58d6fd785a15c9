"""Attacks with URLs: the server is to pull what it must not reach, what never ends, and more than it may hold."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.attacks.real_server import OTHER_KEY
from tests.attacks.target import Answer, Target, attack
from tests.media_streams import cut_then, head_of, late_file, redirect, spoken, wav_bytes, web_server
from tests.waiting import forever

STREAMS = "/v1/streams"
FORBIDDEN = [
    *("http://localhost/", "http://[::1]/", "http://169.254.169.254/", "http://0.0.0.0/", "http://2130706434/"),
    *("http://127.0.0.1@127.0.0.2/", "file:///etc/passwd", "concat:/etc/passwd", "data:audio/wav;base64,AAAA"),
    *("rtsp://127.0.0.1/x", "unix:/run/x", "pipe:0", "", None, 5, ["x"]),
]
PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:2\n"


async def begin(target: Target, url: Any, key: str | None = None) -> Answer:
    return await target.post(STREAMS, json.dumps({"url": url}).encode(), key=key)


async def request(target: Target, method: str, path: str, key: str | None = None) -> Answer:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key or target.key}\r\nConnection: close\r\n\r\n"
    )
    return Answer.parse(await target.exchange(head.encode(), 60))


async def ended(target: Target, url: str) -> dict[str, Any]:
    """The stream when the server has given it up; it is deleted."""
    answer = await begin(target, url)
    assert answer.status == 201, answer.body
    path = f"{STREAMS}/{json.loads(answer.body)['id']}"
    found: dict[str, Any] = {}
    async with asyncio.timeout(50):
        while found.get("status") not in ("ended", "failed"):
            await asyncio.sleep(0.1)
            found = json.loads((await request(target, "GET", path)).body)
    assert (await request(target, "DELETE", path)).status == 200
    return found


@attack()
async def streams_to_forbidden_places(target: Target) -> None:
    """URLs, redirects, playlists and keys that lead to private addresses, files and other protocols: never opened."""
    contacted: list[Any] = []
    victim = await asyncio.start_server(lambda reader, writer: contacted.append(writer), "127.0.0.2", 0)
    secret = f"http://127.0.0.2:{victim.sockets[0].getsockname()[1]}/secret"
    for url in (secret, *FORBIDDEN):
        answer = await begin(target, url)
        assert answer.status == 400 and answer.code in ("host_not_allowed", "invalid_value"), (url, answer.body)
    async with web_server() as web:
        web.pages["/redirect"] = redirect(secret)
        web.pages["/loop"] = redirect("/loop")
        named = (secret, "/redirect", "file:///etc/passwd", "concat:/etc/passwd|/etc/hosts", "data:audio/wav;base64,AA")
        for number, place in enumerate(named):
            web.pages[f"/{number}.m3u8"] = f"{PLAYLIST}#EXTINF:2,\n{place}\n#EXT-X-ENDLIST\n".encode()
        web.pages["/master.m3u8"] = f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{secret}\n".encode()
        key = f'{PLAYLIST}#EXT-X-KEY:METHOD=AES-128,URI="{secret}"\n#EXTINF:2,\n/x.ts\n#EXT-X-ENDLIST\n'
        web.pages["/key.m3u8"] = key.encode()
        for path in list(web.pages):
            found = await ended(target, web.url(path))
            assert found["status"] == "failed" and found["seconds"] == 0, (path, found)
    victim.close()
    assert not contacted


@attack()
async def streams_that_are_no_media(target: Target) -> None:
    """Endless playlists, a playlist that names itself, headers that never end, noise: each fails, with a reason."""

    async def endless_playlist(writer: asyncio.StreamWriter) -> None:
        writer.write(head_of(None) + PLAYLIST.encode())
        while True:
            writer.write(b"#EXTINF:2.0,\n/segment.ts\n" * 1000)
            await writer.drain()

    async def endless_head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X: " + b"y" * 10_000 + b"\r\n")
            await writer.drain()

    async with web_server() as web:
        web.pages |= {"/endless.m3u8": endless_playlist, "/head": endless_head, "/noise": bytes(range(256)) * 4000}
        web.pages["/self.m3u8"] = f"{PLAYLIST}#EXTINF:2,\n/self.m3u8\n#EXT-X-ENDLIST\n".encode()
        web.pages["/empty"] = b""
        for path in list(web.pages):
            found = await ended(target, web.url(path))
            assert found["status"] == "failed" and found["message"], (path, found)


@attack()
async def ended_streams_that_displace_others(target: Target) -> None:
    """Forty streams that fail at once: the ended stream of another key, and its events, are still there."""
    async with web_server() as web:
        web.pages["/talk.wav"] = wav_bytes(spoken(1.0))
        answer = await begin(target, web.url("/talk.wav"), OTHER_KEY)
        assert answer.status == 201, answer.body
        path = f"{STREAMS}/{json.loads(answer.body)['id']}"
        # The response ends with the stream.
        assert b"stream.status" in (await request(target, "GET", f"{path}/events", OTHER_KEY)).body
        begun = 0
        while begun < 40:
            answer = await begin(target, web.url("/nothing-here"))
            assert answer.status in (201, 429), answer.body
            begun += answer.status == 201
            await asyncio.sleep(0 if answer.status == 201 else 0.1)
        assert b"stream.status" in (await request(target, "GET", f"{path}/events", OTHER_KEY)).body
        assert (await request(target, "DELETE", path, OTHER_KEY)).status == 200
        for stream in json.loads((await request(target, "GET", STREAMS)).body)["data"]:
            assert (await request(target, "DELETE", f"{STREAMS}/{stream['id']}")).status == 200


@attack()
async def a_file_that_begins_centuries_later(target: Target) -> None:
    """A file that breaks off, and begins centuries later at the next connection: it goes on without a gap."""
    whole = wav_bytes(spoken(4.0))
    async with web_server() as web:
        web.pages["/talk"] = cut_then(whole, len(whole) // 2, late_file(spoken(1.0), 1e13))
        found = await ended(target, web.url("/talk"))
    assert found["status"] == "ended" and found["missing_seconds"] == 0 and 2 < found["seconds"] < 4, found


@attack(gateway_mib=40)
async def more_streams_than_allowed(target: Target) -> None:
    """Thirty streams with readers that do not read, and the streams of another key: bounded, refused, not found."""

    async def live(writer: asyncio.StreamWriter) -> None:
        sound = bytearray(wav_bytes(spoken(4.0)))
        sound[4:8] = sound[40:44] = b"\xff\xff\xff\xff"
        writer.write(head_of(None) + sound)
        await forever()

    async with web_server() as web:
        web.pages["/live"] = live
        answers = [await begin(target, web.url("/live")) for _ in range(30)]
        ids = [json.loads(answer.body)["id"] for answer in answers if answer.status == 201]
        assert len(ids) == 4 and {answer.status for answer in answers} == {201, 429}
        for path in (f"{STREAMS}/{ids[0]}", f"{STREAMS}/{ids[0]}/events"):
            assert (await request(target, "GET", path, OTHER_KEY)).status == 404
        assert (await request(target, "DELETE", f"{STREAMS}/{ids[0]}", OTHER_KEY)).status == 404
        # Half of the places are left to other keys.
        theirs = await begin(target, web.url("/live"), OTHER_KEY)
        assert theirs.status == 201, theirs.body
        assert (await request(target, "DELETE", f"{STREAMS}/{json.loads(theirs.body)['id']}", OTHER_KEY)).status == 200
        for after in ("-1", "x", "9" * 40):
            assert (await request(target, "GET", f"{STREAMS}/{ids[0]}/events?after={after}")).status == 400
        head = f"GET {STREAMS}/{ids[0]}/events HTTP/1.1\r\nHost: x\r\n{target.authorization}\r\n".encode()
        readers = [await asyncio.open_connection("127.0.0.1", target.port) for _ in range(20)]
        for _, writer in readers:
            writer.write(head)
        for stream_id in ids:
            assert (await request(target, "DELETE", f"{STREAMS}/{stream_id}")).status == 200
        for _, writer in readers:
            writer.transport.abort()
