"""Streams that the server pulls: over real sockets, with real HLS, redirects, forbidden hosts, limits and readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from realtime.http import stream_routes
from realtime.http.stream_routes import StreamRoutes
from realtime.serving import isolated_decoder, pulled_streams
from realtime.serving.quota import Caller
from realtime.session.settings import Settings
from tests.e2e.conftest import Running, Serve
from tests.media_streams import (
    WebServer,
    head_of,
    hls_segments,
    needs_ffmpeg,
    playlist,
    reconnect_soon,
    redirect,
    serve_segments,
    spoken,
    wav_bytes,
    web_server,
)
from tests.waiting import forever, until

HOSTS = {"stream_hosts": ("127.0.0.1",)}
OPENED: list[httpx.AsyncClient] = []


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Encoding with ffmpeg blocks; that is the test's doing."""
    yield


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    reconnect_soon(monkeypatch)
    monkeypatch.setattr(pulled_streams, "FIRST_WAIT_S", 0.05)


@pytest.fixture(autouse=True)
async def closed_clients() -> AsyncIterator[None]:
    yield
    while OPENED:
        await OPENED.pop().aclose()


class Client:
    """A client of the routes."""

    def __init__(self, running: Running, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(base_url=running.http, headers=headers, timeout=60)
        OPENED.append(self.http)

    async def begin(self, url: str) -> dict[str, Any]:
        answer = await self.http.post("/v1/streams", json={"url": url})
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def refused(self, url: object, **more: object) -> tuple[int, str]:
        answer = await self.http.post("/v1/streams", json={"url": url, **more})
        return answer.status_code, answer.json()["error"]["code"]

    async def events(self, stream_id: str, after: int = 0) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        number = 0
        async with self.http.stream("GET", f"/v1/streams/{stream_id}/events", params={"after": after}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: "):
                    yield number, json.loads(line[6:])

    async def all_events(self, stream_id: str) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            return [event async for _, event in self.events(stream_id)]


def transcript(events: list[dict[str, Any]]) -> list[str]:
    done = [event for event in events if event["type"].endswith("input_audio_transcription.completed")]
    return " ".join(event["transcript"] for event in done).split()


async def test_streams_are_off_and_ask_for_a_key(serve: Serve) -> None:
    async with serve() as running:
        assert await Client(running).refused("http://127.0.0.1/a") == (403, "streams_not_allowed")
    async with serve(server=HOSTS, auth={"keys": ("a-long-secret", "another-secret")}) as running, web_server() as web:
        assert await Client(running).refused("http://127.0.0.1/a") == (401, "invalid_api_key")
        owner, other = Client(running, "a-long-secret"), Client(running, "another-secret")
        web.pages["/live"] = endless
        stream = await owner.begin(web.url("/live"))
        # The stream of another key does not exist.
        assert (await other.http.get("/v1/streams")).json()["data"] == []
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
            assert (await other.http.request(method, f"/v1/streams/{stream['id']}{path}")).status_code == 404
        assert [found["id"] for found in (await owner.http.get("/v1/streams")).json()["data"]] == [stream["id"]]


async def test_file_is_transcribed_and_its_events_are_read_again(serve: Serve) -> None:
    async with serve(server=HOSTS) as running, web_server() as web:
        web.pages["/talk.wav"] = wav_bytes(spoken(4.0))
        client = Client(running)
        stream = await client.begin(web.url("/talk.wav"))
        events = await client.all_events(stream["id"])
        assert transcript(events) == [f"w{number}" for number in range(1, 11)]
        assert events[-1]["type"] == "stream.status" and events[-1]["status"] == "ended"
        found = (await client.http.get(f"/v1/streams/{stream['id']}")).json()
        assert found["status"] == "ended" and found["seconds"] == 4.0 and found["missing_seconds"] == 0
        # A reader that comes back continues after the last event it has seen.
        again = [number async for number, _ in client.events(stream["id"], found["last_event"] - 2)]
        assert again == [found["last_event"] - 1, found["last_event"]]
        await until(lambda: len(running.gateway.sessions) == 0)


@needs_ffmpeg
async def test_hls_with_an_interruption_marks_the_gap(serve: Serve, tmp_path: Path) -> None:
    segments = hls_segments(tmp_path, 16)
    async with serve(server=HOSTS) as running, web_server() as web:
        serve_segments(web, segments)
        web.pages["/live.m3u8"] = playlist(segments, 0, 3)
        client = Client(running)
        stream = await client.begin(web.url("/live.m3u8"))
        seen: list[dict[str, Any]] = []
        is_first = True
        async with asyncio.timeout(60):
            async for _, event in client.events(stream["id"]):
                seen.append(event)
                if event["type"].endswith("delta") and is_first:
                    is_first = False
                    del web.pages["/live.m3u8"]
                elif event["type"] == "stream.status" and event["status"] == "waiting":
                    web.pages["/live.m3u8"] = playlist(segments, 5, 8, ended=True)
        (gap,) = [event for event in seen if event["type"] == "stream.gap"]
        lost = segments[3][0] + segments[4][0]
        assert abs(gap["audio_end_ms"] - gap["audio_start_ms"] - 1000 * lost) < 250
        assert abs(gap["audio_start_ms"] - 6000) < 250
        assert abs(len(transcript(seen)) - (16 - lost) / 0.4) <= 2
        # The reason is the server's answer; the process that pulled the stream has not crashed.
        told = [(event["status"], event["message"]) for event in seen if event["type"] == "stream.status"]
        assert all("404" in message for status, message in told if status == "waiting"), told
        assert [status for status, _ in told] == ["live", "waiting", "live", "ended"]


@needs_ffmpeg
async def test_stream_goes_on_after_a_restart_of_the_server(serve: Serve, tmp_path: Path) -> None:
    segments, file = hls_segments(tmp_path, 20), tmp_path / "streams.json"
    server = HOSTS | {"stream_file": str(file)}
    async with web_server() as web:
        serve_segments(web, segments)
        web.pages["/live.m3u8"] = playlist(segments, 0, 3)
        async with serve(server=server) as running:
            client = Client(running)
            stream = await client.begin(web.url("/live.m3u8"))
            found = running.gateway.streams.by_id[stream["id"]]
            await until(lambda: found.seconds > 5.5 and found.status == "live")
            await until(lambda: stored(file) and stored(file)[0]["place"] and stored(file)[0]["seconds"] > 3)
            last = found.events.last
            assert file.stat().st_mode & 0o777 == 0o600
            # As a killed process leaves it, and not as one that stops.
            left = file.read_bytes()
        file.write_bytes(left)
        # Two segments are gone when the server is back.
        web.pages["/live.m3u8"] = playlist(segments, 5, 8)
        async with serve(server=server) as running:
            client = Client(running)
            (again,) = (await client.http.get("/v1/streams")).json()["data"]
            assert (again["id"], again["url"]) == (stream["id"], stream["url"])
            found = running.gateway.streams.by_id[stream["id"]]
            await until(lambda: found.missing_seconds)
            web.pages["/live.m3u8"] = playlist(segments, 5, 10, ended=True)
            events = await client.all_events(stream["id"])
            told = (await client.http.get(f"/v1/streams/{stream['id']}")).json()
    kept = json.loads(left)[0]["seconds"]
    (begin,) = [event for event in events if event["type"] == "stream.session"]
    (gap,) = [event for event in events if event["type"] == "stream.gap"]
    # The new session begins where words were told, and the gap lasts until the first segment that is there.
    assert begin["stream_seconds"] == pytest.approx(kept, abs=0.01) and gap["audio_start_ms"] == 0
    assert gap["audio_end_ms"] / 1000 + kept == pytest.approx(sum(length for length, _ in segments[:5]), abs=0.3)
    assert told["seconds"] == pytest.approx(20, abs=0.4) and told["last_event"] > last
    assert len(transcript(events)) == pytest.approx((20 - kept - told["missing_seconds"]) / 0.4, abs=3)
    assert stored(file) == []


def stored(file: Path) -> list[dict[str, Any]]:
    """The streams in the file, if there is one."""
    found: list[dict[str, Any]] = json.loads(file.read_bytes()) if file.exists() else []
    return found


async def test_kept_streams_that_may_not_be_pulled_any_more_do_not_go_on(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "streams.json"
    server = HOSTS | {"stream_file": str(file)}
    async with web_server() as web:
        web.pages["/live"] = endless
        async with serve(server=server) as running:
            client = Client(running)
            kept, deleted = await client.begin(web.url("/live")), await client.begin(web.url("/live"))
            await client.http.delete(f"/v1/streams/{deleted['id']}")
            await until(lambda: [one["id"] for one in stored(file)] == [kept["id"]])
        left = file.read_bytes()
        # The server stopped: the stream is kept, and goes on.
        assert [one["id"] for one in stored(file)] == [kept["id"]]
        async with serve(server=server) as running:
            client = Client(running)
            assert [one["id"] for one in (await client.http.get("/v1/streams")).json()["data"]] == [kept["id"]]
        # Its host is not listed any more; its caller may not use the server any more; the file is damaged.
        file.write_bytes(left)
        async with serve(server=server | {"stream_hosts": ("192.0.2.1",)}) as running:
            assert not running.gateway.streams.by_id
        file.write_bytes(left)
        async with serve(server=server, auth={"keys": ("a-long-secret",)}) as running:
            found = running.gateway.streams.by_id[kept["id"]]
            await until(lambda: found.events.is_closed)
            assert found.status == "failed" and len(running.gateway.sessions) == 0
        for damaged in (b"", b"[", b"{}", b'[{"id": 5}]', left[:-20]):
            file.write_bytes(damaged)
            async with serve(server=server) as running:
                assert not running.gateway.streams.by_id


async def test_streams_go_on_after_a_restart_with_more_keys(serve: Serve, tmp_path: Path) -> None:
    """With several keys, one of them may begin fewer streams; those that it has go on."""
    file = tmp_path / "streams.json"
    server, limits = HOSTS | {"stream_file": str(file)}, {"streams": 2}
    async with web_server() as web:
        web.pages["/live"] = endless
        async with serve(server=server, limits=limits, auth={"keys": ("a-long-secret",)}) as running:
            client = Client(running, "a-long-secret")
            ids = {(await client.begin(web.url("/live")))["id"] for _ in range(2)}
            await until(lambda: {one["id"] for one in stored(file)} == ids)
        keys = {"keys": ("a-long-secret", "another-long-one")}
        async with serve(server=server, limits=limits, auth=keys) as running:
            assert set(running.gateway.streams.by_id) == ids


async def endless(writer: asyncio.StreamWriter) -> None:
    """A live WAV stream that goes on."""
    sound = bytearray(wav_bytes(spoken(6.0)))
    sound[4:8] = sound[40:44] = b"\xff\xff\xff\xff"
    writer.write(head_of(None) + sound)
    await writer.drain()
    await forever()


async def test_deleted_stream_ends_at_once_and_its_places_are_free(serve: Serve) -> None:
    async with serve(server=HOSTS, limits={"streams": 2}) as running, web_server() as web:
        web.pages["/live"] = endless
        client = Client(running)
        streams = [await client.begin(web.url("/live")) for _ in range(2)]
        assert await client.refused(web.url("/live")) == (429, "too_many_streams")
        await until(lambda: len(running.gateway.sessions) == 2)
        reading = asyncio.create_task(client.all_events(streams[0]["id"]))
        await until(lambda: running.gateway.streams.by_id[streams[0]["id"]].readers)
        for stream in streams:
            assert (await client.http.delete(f"/v1/streams/{stream['id']}")).json()["deleted"]
        assert (await reading)[-1]["message"] == "deleted"
        assert len(running.gateway.sessions) == 0 and (await client.http.get("/v1/streams")).json()["data"] == []
        await client.begin(web.url("/live"))


async def test_ended_streams_of_one_key_displace_none_of_another(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled_streams, "MAX_ENDED_STREAMS", 4)
    async with serve(server=HOSTS, auth={"keys": ("a-long-secret", "another-secret")}) as running, web_server() as web:
        web.pages["/talk.wav"] = wav_bytes(spoken(1.0))
        victim, attacker = Client(running, "a-long-secret"), Client(running, "another-secret")
        kept = await victim.begin(web.url("/talk.wav"))
        events = await victim.all_events(kept["id"])
        begun = []
        for _ in range(8):
            begun.append((await attacker.begin(web.url("/nothing-here")))["id"])
            await attacker.all_events(begun[-1])
        assert await victim.all_events(kept["id"]) == events
        # Of its own streams the oldest are forgotten; the last one ended after the others were counted.
        listed = [stream["id"] for stream in (await attacker.http.get("/v1/streams")).json()["data"]]
        assert listed == begun[-4:]


async def test_a_key_has_no_more_streams_than_sessions(serve: Serve, tmp_path: Path) -> None:
    file, keys = tmp_path / "streams.json", {"keys": ("a-long-secret", "another-secret")}
    server = HOSTS | {"stream_file": str(file)}
    async with web_server() as web:
        web.pages["/live"] = endless
        async with serve(server=server, auth=keys, limits={"sessions_per_key": 2, "streams": 4}) as running:
            greedy, other = Client(running, "a-long-secret"), Client(running, "another-secret")
            streams = [await greedy.begin(web.url("/live")) for _ in range(2)]
            answer = await greedy.http.post("/v1/streams", json={"url": web.url("/live")})
            assert answer.status_code == 429 and answer.headers["retry-after"]
            error = answer.json()["error"]
            assert error["code"] == "too_many_streams" and "limits.sessions_per_key" in error["message"]
            await other.begin(web.url("/live"))
            await until(lambda: len(stored(file)) == 3)
        # After a restart with a smaller limit the first streams of each key go on.
        async with serve(server=server, auth=keys, limits={"sessions_per_key": 1, "streams": 4}) as running:
            callers = [stream.caller.name for stream in running.gateway.streams.by_id.values()]
            assert len(callers) == len(set(callers)) == 2 and streams[0]["id"] in running.gateway.streams.by_id


async def test_one_of_several_keys_has_half_of_the_streams(serve: Serve) -> None:
    keys = {"keys": ("a-long-secret", "another-secret")}
    async with serve(server=HOSTS, auth=keys, limits={"streams": 3}) as running, web_server() as web:
        web.pages["/live"] = endless
        greedy, other = Client(running, "a-long-secret"), Client(running, "another-secret")
        for _ in range(2):
            await greedy.begin(web.url("/live"))
        assert await greedy.refused(web.url("/live")) == (429, "too_many_streams")
        await other.begin(web.url("/live"))
        assert await other.refused(web.url("/live")) == (429, "too_many_streams")


async def test_reload_that_removes_a_key_ends_its_streams(serve: Serve) -> None:
    async with serve(server=HOSTS, auth={"keys": ("a-long-secret", "another-secret")}) as running, web_server() as web:
        web.pages["/live"] = endless
        removed, kept = Client(running, "a-long-secret"), Client(running, "another-secret")
        ended, goes_on = await removed.begin(web.url("/live")), await kept.begin(web.url("/live"))
        await until(lambda: len(running.gateway.sessions) == 2)
        reading = asyncio.create_task(removed.all_events(ended["id"]))
        await until(lambda: running.gateway.streams.by_id[ended["id"]].readers)
        config = running.gateway.config
        keys = tuple(key for key in config.auth.keys if key.reveal() == "another-secret")
        running.server.reload(replace(config, auth=replace(config.auth, keys=keys)))
        async with asyncio.timeout(60):
            last = (await reading)[-1]
        assert (last["status"], last["message"]) == ("failed", "the key that began the stream was removed")
        await until(lambda: len(running.gateway.sessions) == 1)
        assert (await kept.http.get(f"/v1/streams/{goes_on['id']}")).json()["status"] in ("connecting", "live")


async def test_stream_whose_key_was_removed_opens_no_further_session(serve: Serve) -> None:
    limits = {"max_sessions": 1}
    keys = {"keys": ("a-long-secret", "another-secret")}
    async with serve(server=HOSTS, limits=limits, auth=keys) as running, web_server() as web:
        web.pages["/live"] = endless
        first = await Client(running, "another-secret").begin(web.url("/live"))
        await until(lambda: len(running.gateway.sessions) == 1)
        second = running.gateway.streams.by_id[(await Client(running, "a-long-secret").begin(web.url("/live")))["id"]]
        await until(lambda: second.status == "waiting")
        running.gateway.context.authenticator.use_keys(["another-secret"])
        await Client(running, "another-secret").http.delete(f"/v1/streams/{first['id']}")
        await until(lambda: second.events.is_closed)
        assert second.status == "failed" and len(running.gateway.sessions) == 0


async def test_readers_that_come_at_once_are_bounded_and_their_places_are_free_when_they_leave(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_routes, "MAX_READERS", 3)
    async with serve(server=HOSTS) as running, web_server() as web:
        web.pages["/live"] = endless
        stream = await Client(running).begin(web.url("/live"))
        kept = running.gateway.streams.by_id[stream["id"]]
        head = f"GET /v1/streams/{stream['id']}/events HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode()
        for _ in range(2):
            readers = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(30)]
            try:
                for _, writer in readers:
                    writer.write(head)
                async with asyncio.timeout(60):
                    answers = [int((await reader.readline()).split()[1]) for reader, _ in readers]
                assert sorted(answers) == [200] * 3 + [503] * 27 and kept.readers == 3
            finally:
                for _, writer in readers:
                    writer.transport.abort()
            await until(lambda: kept.readers == 0)


async def test_refused_session_is_opened_when_there_is_room(serve: Serve) -> None:
    async with serve(server=HOSTS, limits={"max_sessions": 1}) as running, web_server() as web:
        web.pages |= {"/live": endless, "/talk.wav": wav_bytes(spoken(4.0))}
        client = Client(running)
        first, second = await client.begin(web.url("/live")), await client.begin(web.url("/talk.wav"))

        def status(stream: dict[str, Any]) -> str:
            found: str = running.gateway.streams.by_id[stream["id"]].status
            return found

        await until(lambda: status(second) == "waiting")
        await client.http.delete(f"/v1/streams/{first['id']}")
        assert len(transcript(await client.all_events(second["id"]))) == 10


async def failure(client: Client, web: WebServer, path: str) -> str:
    """Why the stream failed."""
    stream = await client.begin(web.url(path))
    last = (await client.all_events(stream["id"]))[-1]
    assert last["status"] == "failed", last
    text: str = last["message"]
    return text


async def test_hosts_that_are_not_allowed_are_never_contacted(serve: Serve) -> None:
    """A redirect, a playlist, a segment and a key that lead elsewhere: `victim` is on an address that is not listed."""
    victim = await asyncio.start_server(lambda reader, writer: contacted.append(writer), "127.0.0.2", 0)
    contacted: list[asyncio.StreamWriter] = []
    target = f"http://127.0.0.2:{victim.sockets[0].getsockname()[1]}/secret"
    head = "#EXTM3U\n#EXT-X-TARGETDURATION:2\n"
    async with serve(server=HOSTS) as running, web_server() as web:
        client = Client(running)
        assert await client.refused(target) == (400, "host_not_allowed")
        web.pages["/redirect"] = redirect(target)
        web.pages["/twice"] = redirect(web.url("/redirect"))
        web.pages["/master.m3u8"] = f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{target}\n".encode()
        web.pages["/segment.m3u8"] = f"{head}#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n".encode()
        web.pages["/moved.m3u8"] = f"{head}#EXTINF:2,\n/redirect\n#EXT-X-ENDLIST\n".encode()
        key = f'#EXT-X-KEY:METHOD=AES-128,URI="{target}"\n'
        web.pages["/key.m3u8"] = f"{head}{key}#EXTINF:2,\n/talk.wav\n#EXT-X-ENDLIST\n".encode()
        init = f'#EXT-X-MAP:URI="{target}"\n'
        web.pages["/map.m3u8"] = f"{head}{init}#EXTINF:2,\n/talk.wav\n#EXT-X-ENDLIST\n".encode()
        for named in ("file:///etc/hostname", "/etc/hostname", "data:audio/wav;base64,UklG", "concat:/etc/hostname"):
            web.pages[f"/{named[:4]}.m3u8"] = f"{head}#EXTINF:2,\n{named}\n#EXT-X-ENDLIST\n".encode()
        web.pages["/loop"] = redirect("/loop")
        for path in list(web.pages):
            assert await failure(client, web, path), path
        assert "not listed" in await failure(client, web, "/redirect")
        assert not contacted
    victim.close()


async def test_bodies_that_never_end_or_are_no_media_fail_and_leave_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_decoder, "OPEN_S", 3.0)

    async def endless_playlist(writer: asyncio.StreamWriter) -> None:
        writer.write(head_of(None) + b"#EXTM3U\n#EXT-X-TARGETDURATION:2\n")
        while True:
            writer.write(b"#EXTINF:2.0,\n/segment.ts\n" * 1000)
            await writer.drain()

    async def silent(writer: asyncio.StreamWriter) -> None:
        await forever()

    async with serve(server=HOSTS) as running, web_server() as web:
        client = Client(running)
        web.pages |= {"/endless.m3u8": endless_playlist, "/silent": silent, "/page": b"<html>" * 1000}
        web.pages["/tiny"] = b""
        for path in list(web.pages):
            assert await failure(client, web, path)
        await until(lambda: len(running.gateway.sessions) == 0)


async def test_bad_requests_are_named(serve: Serve) -> None:
    async with serve(server=HOSTS) as running:
        client = Client(running)
        for url in (None, 5, [], {}, ""):
            assert (await client.refused(url))[0] == 400
        assert await client.refused("http://127.0.0.1/a", unknown=1) == (400, "invalid_value")
        assert await client.refused("http://127.0.0.1/" + "a" * 3000) == (400, "invalid_value")
        assert await client.refused("http://127.0.0.1/a", language="klingon") == (400, "invalid_value")
        for body in (b"", b"[]", b"{", b"x" * 100_000):
            assert (await client.http.post("/v1/streams", content=body)).status_code in (400, 413)
        assert (await client.http.get("/v1/streams/none")).status_code == 404
        assert (await client.http.put("/v1/streams")).status_code == 405
        assert (await client.http.get("/v1/streams")).json()["data"] == []


async def test_one_write_to_a_reader_is_bounded_in_bytes() -> None:
    """A reader that does not read holds one write, and there are hundreds of readers."""
    stream = pulled_streams.PulledStream("http://127.0.0.1/", Caller("a"), Settings(), 0)
    texts = ["x" * 20_000] * 20 + ["\u20ac" * 20_000] * 8 + ["x" * 100_000, "short", "short"]
    sent = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for frame in sent:
        stream.events.add(frame)
    stream.events.close()
    context: Any = SimpleNamespace(draining=False)
    streams: Any = None
    writes = [write async for write in StreamRoutes(context, streams)._event_stream(stream, 0)][1:]
    whole = "".join(f"id: {number}\ndata: {frame}\n\n" for number, frame in enumerate(sent, 1))
    assert b"".join(writes).decode() == whole
    # An event that is larger itself is written alone.
    assert all(len(write) <= 65_536 or write.count(b"id: ") == 1 for write in writes)
    assert len(writes) < len(sent)
