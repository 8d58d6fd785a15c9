"""Viewers of published sessions over real sockets: words so far and live, links, bounds, and viewers that do harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from realtime.serving import signed_tokens, viewers
from realtime.serving.viewers import Message
from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import COMPLETED, RawClient, greeted_client, raw_client
from tests.e2e.viewing import StreamViewer, path_of, publish, say, socket_viewer, stream_viewer, until
from tests.realtime.gateway_doubles import FakeEngine, silence, tone
from tests.waiting import until as until_so

KEY, OTHER = "the-key-of-the-speaker", "the-key-of-another"
BEARER = {"Authorization": f"Bearer {KEY}"}
# No two turns of a test are the same.
LONG_WORDS = [f"{number}" + "word" * 80 for number in range(9973)]
HOSTILE_NAMES = ("", ".", "..", "-a", "a" * 65, "a%2fb", "a%00", "a b", "%C3%A9", "a%0d%0aX: y", "a%0a", "<script>")


async def link(running: Running, name: str = "talk", key: str = KEY, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        answer = await http.post(
            f"{running.base_url}/sessions/{name}/links", json=body, headers={"Authorization": f"Bearer {key}"}
        )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def revoke(running: Running, name: str, link_id: str = "", key: str = KEY) -> httpx.Response:
    path = f"{running.base_url}/sessions/{name}/links" + (f"/{link_id}" if link_id else "")
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        return await http.delete(path, headers={"Authorization": f"Bearer {key}"})


async def refusal(running: Running, name: str, token: str = "", **options: Any) -> tuple[int, str]:
    """Status and code of a refused viewer; the stream and the socket must agree."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        headers = options.get("headers", {})
        answer = await http.get(f"{running.http}{path_of(name, token)}", headers=headers)
    url = f"ws://127.0.0.1:{running.port}{path_of(name, token)}"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, proxy=None, additional_headers=headers):
            pass
    code = answer.json()["error"]["code"]
    assert (refused.value.response.status_code, json.loads(refused.value.response.body)["error"]["code"]) == (
        answer.status_code,
        code,
    )
    return answer.status_code, code


def shown(events: list[dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """What a client shows after these events: finished turns by id, and open ones."""
    lines: dict[str, str] = {}
    open_turns: dict[str, str] = {}
    for event in events:
        match event["type"]:
            case "snapshot":
                lines |= {line["id"]: line["text"] for line in event["lines"]}
                open_turns = {line["id"]: line["text"] for line in event["open"]}
            case "delta":
                open_turns[event["id"]] = open_turns.get(event["id"], "") + event["text"]
            case "final":
                open_turns.pop(event["id"], None)
                lines[event["id"]] = event["text"]
            case "removed":
                open_turns.pop(event["id"], None)
    return list(lines.values()), open_turns


async def test_viewers_get_the_words_so_far_and_then_live(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        assert (await publish(client, "talk"))["session"]["publish"] == "talk"
        await say(client)
        first = (await client.until(COMPLETED))[-1]["transcript"]
        assert first
        async with (
            socket_viewer(running.port, "talk") as by_socket,
            stream_viewer(running.port, "talk") as by_stream,
            stream_viewer(running.port, "talk", version="1.0") as by_old_stream,
        ):
            assert by_stream.status == 200 and "text/event-stream" in by_stream.head
            assert "no-store" in by_stream.head and "chunked" not in by_old_stream.head
            seen = {}
            for viewer in (by_socket, by_stream, by_old_stream):
                snapshot = await viewer.event()
                assert snapshot["type"] == "snapshot" and snapshot["live"] and snapshot["name"] == "talk"
                assert [line["text"] for line in snapshot["lines"]] == [first]
                assert snapshot["lines"][0]["end"] > snapshot["lines"][0]["start"] >= 0
                seen[viewer] = [snapshot]
            await say(client)
            second = (await client.until(COMPLETED))[-1]["transcript"]
            for viewer, events in seen.items():
                events += await until(viewer, "final")
                assert shown(events) == ([first, second], {})
                assert any(event["type"] == "delta" for event in events), "words come before the turn ends"
                assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})
            await client.send("session.update", session={"type": "transcription", "publish": None})
            for viewer in seen:
                await until(viewer, "end")


async def test_a_viewer_may_come_before_the_speaker_and_stays_after_it(serve: Serve) -> None:
    async with serve() as running, socket_viewer(running.port, "talk") as viewer:
        assert not (await viewer.event())["live"]
        for _ in range(2):
            async with greeted_client(running.ws) as client:
                await publish(client, "talk")
                await until(viewer, "begin")
                await say(client)
                await until(viewer, "final")
            await until(viewer, "end")
        assert running.metric("viewers") == 1
    # No name, channel or viewer is left.
    assert not running.gateway.audience.channels and not len(running.gateway.audience)


@pytest.mark.parametrize("path", ["/v1/listen?encoding=linear16&sample_rate=16000", "/v2/listen?model=flux-general-en"])
async def test_deepgram_clients_publish_with_a_parameter(serve: Serve, path: str) -> None:
    async with serve() as running, socket_viewer(running.port, "talk") as viewer:
        url = f"ws://127.0.0.1:{running.port}{path}&encoding=linear16&sample_rate=16000&publish="
        url = url if path.startswith("/v2") else f"ws://127.0.0.1:{running.port}{path}&publish="
        async with raw_client(url + "talk") as client:
            await until(viewer, "begin")
            status, body = await _refused_upgrade(url + "talk")
            assert status == 409 and "Another session" in body["err_msg"]
            await client.socket.send(tone(1.3, 16_000) + silence(1.5, 16_000))
            await client.send("CloseStream")
            assert (await until(viewer, "final"))[-1]["text"].startswith("w1 w2")
        status, body = await _refused_upgrade(url + "a%2Fb")
        assert status == 400 and "publish" in body["err_msg"]
        status, body = await _refused_upgrade(url + "a&publish=b")
        assert status == 400
        if "v1" in path:
            status, body = await _refused_upgrade(url + "two&channels=2&multichannel=true")
            assert status == 400 and "one channel" in body["err_msg"]


async def _refused_upgrade(url: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, proxy=None):
            pass
    return refused.value.response.status_code, json.loads(refused.value.response.body)


async def test_cleared_and_empty_turns_disappear(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.send("session.update", session={"publish": "talk", "audio": {"input": {"turn_detection": None}}})
        await client.until("session.updated")
        async with socket_viewer(running.port, "talk") as viewer:
            events = [await viewer.event()]
            await client.append(tone(1.3) + silence(0.5))
            events += await until(viewer, "delta")
            await client.send("input_audio_buffer.clear")
            events += await until(viewer, "removed")
            assert shown(events) == ([], {})


# Who may read


async def test_a_viewer_needs_the_speakers_key_or_a_link(serve: Serve) -> None:
    async with (
        serve(auth={"keys": (KEY, OTHER)}) as running,
        greeted_client(running.ws, additional_headers=BEARER) as client,
    ):
        await publish(client, "talk")
        assert await refusal(running, "talk") == (401, "invalid_api_key")
        assert await refusal(running, "talk", headers={"Authorization": "Bearer wrong"}) == (401, "invalid_api_key")
        assert await refusal(running, "talk", token="vl_") == (401, "viewer_link_invalid")
        async with socket_viewer(running.port, "talk", additional_headers=BEARER) as viewer:
            assert (await viewer.event())["live"]
        # Another key has names of its own: it neither reads this session nor learns that it exists.
        other = {"Authorization": f"Bearer {OTHER}"}
        async with socket_viewer(running.port, "talk", additional_headers=other) as viewer:
            assert not (await viewer.event())["live"]
            async with greeted_client(running.ws, additional_headers=other) as stranger:
                assert (await publish(stranger, "talk"))["type"] == "session.updated"
                await until(viewer, "begin")
        made = await link(running)
        token = made["token"]
        assert made["watch"] == f"/watch/talk#{token}" and made["events"] == path_of("talk", token)
        async with socket_viewer(running.port, "talk", token) as viewer:
            assert (await viewer.event())["live"]
        async with socket_viewer(
            running.port, "talk", subprotocols=[Subprotocol("token"), Subprotocol(token)]
        ) as viewer:
            assert (await viewer.event())["live"]
        async with stream_viewer(running.port, "talk", headers=f"Authorization: Bearer {token}\r\n") as stream:
            assert (await stream.event())["live"]


async def test_a_link_is_for_one_name_and_for_reading_only(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY, OTHER)}) as running, httpx.AsyncClient(trust_env=False, verify=False) as http:
        token = (await link(running))["token"]
        for changed in ("tal", "talk2", "Talk", "other"):
            assert await refusal(running, changed, token) == (401, "viewer_link_invalid")
        for forged in (
            token[:-1],
            token + "A",
            "vl_" + token[3:].swapcase(),
            "vl_" + "A" * 80,
            "vl_" + "x" * 5000,
            "vl_%ff",
        ):
            assert await refusal(running, "talk", forged) == (401, "viewer_link_invalid")
        bearer = {"Authorization": f"Bearer {token}"}
        for method, path in (
            ("POST", "/sessions/talk/links"),
            ("DELETE", "/sessions/talk/links"),
            ("GET", "/models"),
            ("POST", "/realtime/client_secrets"),
            ("POST", "/audio/transcriptions"),
        ):
            assert (await http.request(method, running.base_url + path, headers=bearer)).status_code == 401
        with pytest.raises(InvalidStatus):
            async with connect(running.ws, proxy=None, additional_headers=bearer):
                pass
        # A viewer that talks is closed.
        async with socket_viewer(running.port, "talk", token) as viewer:
            await viewer.socket.send("{}")
            with pytest.raises(ConnectionClosed):
                while True:
                    await viewer.event()
            assert viewer.socket.close_code == 1008 and "read-only" in (viewer.socket.close_reason or "")


async def client_secret(running: Running, http: httpx.AsyncClient, session: dict[str, str]) -> dict[str, str]:
    """The header of a client with a secret for sessions with these settings."""
    answer = await http.post(f"{running.base_url}/realtime/client_secrets", json={"session": session}, headers=BEARER)
    return {"Authorization": f"Bearer {answer.json()['value']}"}


async def test_client_secrets_publish_under_their_own_name_and_read_nothing(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY,)}) as running, httpx.AsyncClient(trust_env=False, verify=False) as http:
        secrets = [await client_secret(running, http, session) for session in ({"publish": "talk"}, {})]
        async with greeted_client(running.ws, additional_headers=secrets[0]) as client:
            async with socket_viewer(running.port, "talk", additional_headers=BEARER) as viewer:
                assert (await viewer.event())["live"]
            assert (await publish(client, "other"))["error"]["code"] == "publish_not_allowed"
            with pytest.raises(InvalidStatus) as refused:
                async with connect(running.ws, proxy=None, additional_headers=secrets[0]):
                    pass
            assert refused.value.response.status_code == 409
        async with greeted_client(running.ws, additional_headers=secrets[1]) as client:
            assert (await publish(client, "talk"))["error"]["code"] == "publish_not_allowed"
        assert await refusal(running, "talk", headers=secrets[1]) == (403, "client_secret_not_allowed")
        answer = await http.post(f"{running.base_url}/sessions/talk/links", headers=secrets[1])
        assert answer.status_code == 403


async def test_client_secrets_of_deepgram_clients_publish_under_no_other_name(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY,)}) as running, httpx.AsyncClient(trust_env=False, verify=False) as http:
        secrets = [await client_secret(running, http, session) for session in ({"publish": "talk"}, {})]
        for path in ("v1/listen?encoding=linear16&sample_rate=16000", "v2/listen?model=flux-general-en"):
            url = f"ws://127.0.0.1:{running.port}/{path}"
            others = ((secrets[0], "&publish=board-meeting"), (secrets[1], "&publish=talk"), (secrets[0], ""))
            for secret, name in others:
                with pytest.raises(InvalidStatus) as refused:
                    async with connect(url + name, proxy=None, additional_headers=secret):
                        pass
                assert refused.value.response.status_code == 403
                assert b"only under the name that its secret" in (refused.value.response.body or b"")
            for secret, name in ((secrets[0], "&publish=talk"), (secrets[1], "")):
                async with connect(url + name, proxy=None, additional_headers=secret):
                    pass
                await until_so(lambda: len(running.gateway.sessions) == 0)


async def test_a_page_of_another_website_reads_nothing_without_keys(serve: Serve) -> None:
    async with serve() as running:
        evil = {"Origin": "https://evil.example"}
        assert (await refusal(running, "talk", headers=evil))[0] == 403
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            answer = await http.post(f"{running.base_url}/sessions/talk/links", headers=evil)
            assert answer.status_code == 403
        own = {"Origin": running.http}
        async with socket_viewer(running.port, "talk", additional_headers=own) as viewer:
            await viewer.event()


# Links that end


async def test_revoked_and_expired_links_end_live_connections(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realtime.http.viewer_routes.MIN_LINK_S", 1)
    async with serve(auth={"keys": (KEY,)}) as running:
        first, second, soon = (
            await link(running),
            await link(running),
            await link(running, expires_after={"seconds": 2}),
        )
        assert len({one["id"] for one in (first, second, soon)}) == 3
        async with (
            socket_viewer(running.port, "talk", first["token"]) as one,
            stream_viewer(running.port, "talk", second["token"]) as two,
            socket_viewer(running.port, "talk", soon["token"]) as brief,
            socket_viewer(running.port, "talk", additional_headers=BEARER) as with_key,
        ):
            for viewer in (one, two, brief, with_key):
                await viewer.event()
            assert (await revoke(running, "talk", first["id"])).status_code == 200
            with pytest.raises(ConnectionClosed):
                await one.event()
            assert one.socket.close_code == 1008
            assert await refusal(running, "talk", first["token"]) == (401, "viewer_link_invalid")
            with pytest.raises(ConnectionClosed):
                await brief.event()
            assert await refusal(running, "talk", soon["token"]) == (401, "viewer_link_invalid")
            # The other link still works, until all are revoked.
            assert running.metric("viewers") == 2
            assert (await revoke(running, "talk")).status_code == 200
            closed = (await until(two, "closed"))[-1]
            assert "revoked" in closed["reason"]
            with pytest.raises(EOFError):
                await two.event()
            newer = await link(running)
            async with socket_viewer(running.port, "talk", newer["token"]) as viewer:
                await viewer.event()
            assert (await revoke(running, "talk", "nothing")).status_code == 404
            assert (await revoke(running, "talk", "ffffffffff-" + "0" * 16)).status_code == 404
            await until_so(lambda: running.metric("viewers") == 1)


async def test_a_reload_that_removes_a_key_ends_its_links(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY, OTHER)}) as running:
        made = await link(running)
        async with socket_viewer(running.port, "talk", made["token"]) as viewer:
            await viewer.event()
            running.gateway.context.authenticator.use_keys([OTHER])
            with pytest.raises(ConnectionClosed):
                await viewer.event()


async def test_a_reload_that_removes_a_key_ends_viewers_that_came_with_it(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY, OTHER)}) as running:
        other = {"Authorization": f"Bearer {OTHER}"}
        async with (
            socket_viewer(running.port, "talk", additional_headers=BEARER) as viewer,
            stream_viewer(running.port, "talk", headers=f"Authorization: Bearer {KEY}\r\n") as stream,
            socket_viewer(running.port, "talk", additional_headers=other) as stays,
        ):
            for one in (viewer, stream, stays):
                await one.event()
            running.gateway.context.authenticator.use_keys([OTHER])
            with pytest.raises(ConnectionClosed):
                await viewer.event()
            assert viewer.socket.close_code == 1008 and "key was removed" in (viewer.socket.close_reason or "")
            assert "key was removed" in (await until(stream, "closed"))[-1]["reason"]
            await until_so(lambda: running.metric("viewers") == 1)


async def test_thousands_of_links_and_revocations_are_bounded(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY, OTHER)}) as running:
        revocations = running.gateway.audience.publisher.revocations
        async with httpx.AsyncClient(trust_env=False, verify=False, headers=BEARER) as http:
            for _ in range(50):
                answer = await http.post(f"{running.base_url}/sessions/talk/links")
                assert answer.status_code == 200
        assert not revocations.all(), "a link that is made is not stored"
        kept, of_other = await link(running, "kept"), await link(running, key=OTHER)
        made = [await link(running) for _ in range(3)]
        # As thousands of requests do it.
        routes = running.gateway.audience.publisher
        links = signed_tokens.ViewerLinks(None, revocations, lambda owner: True)  # type: ignore[arg-type]
        owner = running.gateway.context.authenticator.name_of(KEY)
        for number in range(100):
            assert links.revocation(owner, "talk", f"ffffffff-{number:016x}") is None, "no link lasts that long"
        for number in range(signed_tokens.MAX_REVOKED + 200):
            now_id = f"{int(made[0]['expires_at']):08x}-{number:016x}"
            revocation = links.revocation(owner, "talk", now_id)
            assert revocation is not None
            routes.revoke(revocation)
        assert len(revocations.all()) <= signed_tokens.MAX_REVOKED + 1
        # What does not fit revokes more than was asked for, never less; other keys are not affected.
        assert await refusal(running, "talk", made[0]["token"]) == (401, "viewer_link_invalid")
        for name, token in (
            ("kept", kept["token"]),
            ("talk", of_other["token"]),
            ("talk", (await link(running))["token"]),
        ):
            async with socket_viewer(running.port, name, token) as viewer:
                await viewer.event()


async def test_bad_requests_for_links_are_refused(serve: Serve) -> None:
    seconds = (b"3", b"[]", b'{"seconds": true}', b'{"seconds": 9}', b'{"seconds": 2592001}', b'{"seconds": 1e9}')
    async with serve() as running, httpx.AsyncClient(trust_env=False, verify=False) as http:
        for body in (b"{", b"[]", b"x" * 70_000, *(b'{"expires_after": %b}' % value for value in seconds)):
            answer = await http.post(f"{running.base_url}/sessions/talk/links", content=body)
            assert answer.status_code in (400, 413) and answer.json()["error"]["code"], body[:40]


# Captions for HLS players


async def test_players_get_a_playlist_and_its_segments(serve: Serve) -> None:
    async with (
        serve(auth={"keys": (KEY,)}) as running,
        greeted_client(running.ws, additional_headers=BEARER) as client,
        httpx.AsyncClient(trust_env=False, verify=False, base_url=running.http) as http,
    ):
        await publish(client, "talk")
        made = await link(running)
        answer = await http.get(made["captions"])
        assert answer.status_code == 200 and "mpegurl" in answer.headers["content-type"]
        addresses = [line for line in answer.text.splitlines() if not line.startswith("#")]
        assert addresses and all(made["token"] in address for address in addresses)
        for address in addresses:
            segment = await http.get(f"/v1/sessions/talk/{address}")
            assert segment.status_code == 200 and segment.text.startswith("WEBVTT")
            assert "text/vtt" in segment.headers["content-type"]
        segments = next(iter(running.gateway.audience.channels.values())).segments
        await say(client)
        await until_so(lambda: any(word.text == "w1" for word in segments._words))
        # The same rules as for other viewers.
        for path in ("captions.m3u8", addresses[0].partition("?")[0]):
            assert (await http.get(f"/v1/sessions/talk/{path}")).status_code == 401
            assert (await http.get(f"/v1/sessions/other/{path}?token={made['token']}")).status_code == 401
            assert (await http.get(f"/v1/sessions/talk/{path}", headers=BEARER)).status_code == 200
        for number in ("0", "-1", "x", "9" * 5000, "1e9", "%00", "99999999999"):
            answer = await http.get(f"/v1/sessions/talk/captions/{number}.vtt", headers=BEARER)
            assert answer.status_code == 404, number[:20]


async def test_players_of_names_without_a_speaker_take_no_places(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "PLAYER_S", 1.0)
    async with (
        serve(auth={"keys": (KEY, "another-key")}, limits={"viewers": 5}) as running,
        httpx.AsyncClient(trust_env=False, verify=False, base_url=running.base_url) as http,
    ):
        audience = running.gateway.audience
        for number in range(40):
            answer = await http.get(f"/sessions/n{number}/captions.m3u8", headers=BEARER)
            assert answer.status_code == 200
            assert not audience.players and len(audience.channels) <= viewers.MAX_AWAITED_NAMES
        # The names that were asked for last are those that wait for their speaker.
        assert audience.channels.keys() == {
            (key, f"n{number}") for key, _ in audience.channels for number in range(40 - viewers.MAX_AWAITED_NAMES, 40)
        }
        other = {"Authorization": "Bearer another-key"}
        assert (await http.get("/sessions/talk/captions.m3u8", headers=other)).status_code == 200
        await until_so(lambda: not audience.channels)


async def test_players_of_published_names_are_bounded_and_forgotten(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "PLAYER_S", 2.0)
    async with (
        serve(limits={"viewers": 2}) as running,
        contextlib.AsyncExitStack() as stack,
        httpx.AsyncClient(trust_env=False, verify=False, base_url=running.base_url) as http,
    ):
        audience, statuses = running.gateway.audience, []
        for number in range(3):
            await publish(await stack.enter_async_context(greeted_client(running.ws)), f"n{number}")
        for number in range(3):
            statuses.append((await http.get(f"/sessions/n{number}/captions.m3u8")).status_code)
            assert audience.players.total() <= 2
        # A slow machine may have forgotten the first one already.
        assert statuses[:2] == [200, 200] and statuses[2] in (200, 503)
        await until_so(lambda: not audience.channels and not audience.players)


# Names


async def test_names_of_hostile_shape_are_refused_everywhere(serve: Serve) -> None:
    async with (
        serve() as running,
        greeted_client(running.ws) as client,
        httpx.AsyncClient(trust_env=False, verify=False) as http,
    ):
        for name in HOSTILE_NAMES:
            for method, path in (("GET", "events"), ("POST", "links"), ("DELETE", "links")):
                answer = await http.request(method, f"{running.base_url}/sessions/{name}/{path}")
                assert answer.status_code in (400, 404), (name, answer.status_code)
        for value in ("", "a/b", "ä", "a\n", "a\u0000", "-", "a" * 65, 3, True, [], {}, ["talk"]):
            await client.send("session.update", session={"publish": value})
            error = (await client.until("error"))[-1]["error"]
            assert error["param"] == "session.publish" and error["code"] == "invalid_value", value
        assert (await publish(client, "a.b-c_9"))["session"]["publish"] == "a.b-c_9"


async def test_two_sessions_that_claim_one_name(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as first, greeted_client(running.ws) as second:
        await publish(first, "talk")
        async with socket_viewer(running.port, "talk") as viewer:
            await viewer.event()
            for _ in range(3):
                refused = await publish(second, "talk")
                assert refused["error"]["code"] == "name_taken" and refused["error"]["param"] == "session.publish"
            await say(second)
            await second.until(COMPLETED)
            await say(first)
            words = (await first.until(COMPLETED))[-1]["transcript"]
            assert (await until(viewer, "final"))[-1]["text"] == words, "the words of the second are not shown"
            # A change of name gives the old one away.
            assert (await publish(first, "other"))["type"] == "session.updated"
            assert (await publish(second, "talk"))["type"] == "session.updated"
            await until(viewer, "begin")
            await first.socket.close()
            await second.socket.close()
            await until(viewer, "end")


async def test_a_resumed_session_stays_published(serve: Serve) -> None:
    async with serve() as running:
        async with greeted_client(running.ws) as client:
            await client.send("session.update", session={"include": ["session.resume"], "publish": "talk"})
            token = (await client.until("session.updated"))[-1]["session"]["resume"]["token"]
            async with socket_viewer(running.port, "talk") as viewer:
                await viewer.event()
                client.socket.transport.abort()
                await until_so(lambda: not running.gateway.sessions.connected)
                async with raw_client(f"{running.ws}?resume={token}&after=0") as again:
                    await say(again)
                    events = await until(viewer, "final")
                    assert "end" not in [event["type"] for event in events]


async def test_publishing_can_be_turned_off(serve: Serve) -> None:
    async with serve(limits={"viewers": 0}) as running, greeted_client(running.ws) as client:
        assert (await publish(client, "talk"))["error"]["code"] == "publishing_off"
        assert await refusal(running, "talk") == (403, "publishing_off")
        url = f"ws://127.0.0.1:{running.port}/v1/listen?encoding=linear16&sample_rate=16000&publish=talk"
        assert (await _refused_upgrade(url))[0] == 403


# Bounds


async def test_viewers_beyond_the_limit_are_refused_and_places_become_free(serve: Serve) -> None:
    async with serve(limits={"viewers": 3}) as running, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await (await stack.enter_async_context(socket_viewer(running.port, "talk"))).event()
        async with stream_viewer(running.port, "other") as third:
            await third.event()
            for _ in range(4):
                assert await refusal(running, "talk") == (503, "too_many_viewers")
        await until_so(lambda: len(running.gateway.audience) == 2)
        async with stream_viewer(running.port, "talk") as third:
            await third.event()
        assert running.metric("refused_total", reason="viewers") == 8


async def test_one_of_several_keys_leaves_half_of_the_places_to_the_viewers_of_others(serve: Serve) -> None:
    async with (
        serve(limits={"viewers": 4}, auth={"keys": (KEY, OTHER)}) as running,
        contextlib.AsyncExitStack() as stack,
        httpx.AsyncClient(trust_env=False, verify=False, base_url=running.base_url) as http,
    ):
        links = {key: (await link(running, key=key))["token"] for key in (KEY, OTHER)}
        for _ in range(2):
            await (await stack.enter_async_context(socket_viewer(running.port, "talk", links[KEY]))).event()
        # With a link, with the key, and a player of another name: all are viewers of one key.
        assert await refusal(running, "talk", links[KEY]) == (503, "too_many_viewers")
        assert await refusal(running, "other", headers=BEARER) == (503, "too_many_viewers")
        assert (await http.get("/sessions/other/captions.m3u8", headers=BEARER)).status_code == 503
        for _ in range(2):
            await (await stack.enter_async_context(socket_viewer(running.port, "talk", links[OTHER]))).event()


async def test_players_count_as_viewers_of_their_key(serve: Serve) -> None:
    bearers = {key: {"Authorization": f"Bearer {key}"} for key in (KEY, OTHER)}
    async with (
        serve(limits={"viewers": 4}, auth={"keys": (KEY, OTHER)}) as running,
        contextlib.AsyncExitStack() as stack,
        httpx.AsyncClient(trust_env=False, verify=False, base_url=running.base_url) as http,
    ):
        for key, names in ((KEY, "abc"), (OTHER, "a")):
            for name in names:
                client = await stack.enter_async_context(greeted_client(running.ws, additional_headers=bearers[key]))
                await publish(client, name)
        statuses = [(await http.get(f"/sessions/{name}/captions.m3u8", headers=BEARER)).status_code for name in "abc"]
        assert statuses == [200, 200, 503]
        assert (await http.get("/sessions/a/captions.m3u8", headers=bearers[OTHER])).status_code == 200


async def test_one_encoding_for_all_viewers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[dict[str, Any]] = []

    class Counted(Message):
        def __init__(self, number: int, fields: dict[str, Any]) -> None:
            super().__init__(number, fields)
            encoded.append(fields)

    monkeypatch.setattr(viewers, "Message", Counted)
    async with serve() as running, greeted_client(running.ws) as client, contextlib.AsyncExitStack() as stack:
        await publish(client, "talk")
        watching: list[Any] = []
        for _ in range(20):
            watching.append(await stack.enter_async_context(socket_viewer(running.port, "talk")))
            watching.append(await stack.enter_async_context(stream_viewer(running.port, "talk")))
        for viewer in watching:
            await viewer.event()
        assert len(encoded) == 1, "all of them got the same snapshot"
        encoded.clear()
        await say(client)
        for viewer in watching:
            events = await until(viewer, "final")
        assert [fields["seq"] for fields in encoded] == [event["seq"] for event in events]
        assert len(running.engine.streams) == 1


async def never_reading(running: Running, request: bytes) -> socket.socket:
    """A connection with a small receive buffer that sends a request and reads nothing."""
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", running.port))
    await asyncio.get_running_loop().sock_sendall(end, request)
    return end


def _head(path: str, upgrade: bool) -> bytes:
    more = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    more += f"Sec-WebSocket-Key: {'A' * 22}==\r\n"
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more if upgrade else ''}\r\n".encode()


async def test_viewers_that_never_read_hold_no_words_and_slow_no_client(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "UNREAD_S", 2.0)
    engine = FakeEngine(words=LONG_WORDS)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await publish(client, "talk")
        stuck = [await never_reading(running, _head(path_of("talk"), upgrade)) for upgrade in (True, False) * 5]
        await until_so(lambda: len(running.gateway.audience) == 10)
        channel = next(iter(running.gateway.audience.channels.values()))
        async with socket_viewer(running.port, "talk") as reader:
            seen = [await reader.event()]
            said = []
            while not running.metric("viewer_skips_total") >= 10:
                await say(client, 4.1)
                said.append((await client.until(COMPLETED))[-1]["transcript"])
                seen += await until(reader, "final")
            # A viewer that reads has everything.
            assert shown(seen)[0] == said
            waiting = [viewer for viewer in channel.viewers if viewer.behind_since is not None]
            assert len(waiting) >= 9 or len(channel.viewers) < 11
            assert len(channel._pending) <= viewers.MAX_PENDING
            # Those that take nothing for a while are cut off, and their places are free.
            await until_so(lambda: len(running.gateway.audience) == 1)
        for end in stuck:
            end.close()


async def test_a_slow_viewer_continues_with_the_newest_words(serve: Serve) -> None:
    engine = FakeEngine(words=LONG_WORDS)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await publish(client, "talk")
        end = await never_reading(running, _head(path_of("talk"), upgrade=False))
        await until_so(lambda: len(running.gateway.audience) == 1)
        turns = 0
        while running.metric("viewer_skips_total") < 1 or turns < 20:
            await say(client, 4.1)
            last = (await client.until(COMPLETED))[-1]["transcript"]
            turns += 1
        reader, writer = await asyncio.open_connection(sock=end)
        slow = StreamViewer(reader, writer)
        async with asyncio.timeout(60):
            slow.head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        slow._is_chunked = True
        events = [await slow.event()]
        while last not in shown(events)[0]:
            events.append(await slow.event())
        later = [event for event in events if event["type"] == "snapshot"][1:]
        assert later and all(len(event["lines"]) <= viewers.NEWEST_LINES for event in later)
        finals = [event for event in events if event["type"] == "final"]
        assert len(finals) < turns, "what it missed was dropped"
        # It is a viewer like any other again.
        await say(client)
        await until(slow, "final")
        writer.close()


async def test_the_words_so_far_are_bounded(serve: Serve) -> None:
    engine = FakeEngine(words=["word" * 250])
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await publish(client, "talk")
        for _ in range(12):
            await say(client, 8.1)
            await client.until(COMPLETED)
        async with stream_viewer(running.port, "talk") as viewer:
            snapshot = await viewer.event()
        lengths = [len(line["text"]) for line in snapshot["lines"]]
        assert max(lengths) <= 4000 and sum(lengths) <= 32_000 and len(lengths) < 12


async def test_a_head_request_ends_at_once(serve: Serve) -> None:
    async with serve() as running:
        async with stream_viewer(running.port, "talk", method="HEAD", headers="Connection: close\r\n") as viewer:
            assert viewer.status == 200 and "text/event-stream" in viewer.head
            async with asyncio.timeout(60):
                assert await viewer.reader.read() == b""
        assert not len(running.gateway.audience)


async def test_viewers_are_told_when_the_server_stops(serve: Serve) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with serve() as running:
            by_socket = await stack.enter_async_context(socket_viewer(running.port, "talk"))
            by_stream = await stack.enter_async_context(stream_viewer(running.port, "talk"))
            await by_socket.event()
            await by_stream.event()
        with pytest.raises(ConnectionClosed):
            await by_socket.event()
        assert by_socket.socket.close_code == 1012
        assert "restarting" in (await until(by_stream, "closed"))[-1]["reason"]


async def test_a_storm_of_viewers_that_come_and_go(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await publish(client, "talk")

        async def come_and_go(number: int) -> None:
            end = await never_reading(running, _head(path_of("talk" if number % 2 else f"n{number}"), bool(number % 3)))
            if number % 5:
                await asyncio.sleep(0)
            end.close()

        await asyncio.gather(*(come_and_go(number) for number in range(150)), say(client))
        await client.until(COMPLETED)
        await until_so(lambda: not len(running.gateway.audience) and not running.gateway.audience.channels)
        await _still_works(running, client)


async def _still_works(running: Running, client: RawClient) -> None:
    async with socket_viewer(running.port, "talk") as viewer:
        await viewer.event()
        await say(client)
        await until(viewer, "final")
