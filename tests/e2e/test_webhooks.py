"""Webhooks over real sockets: a server, its clients, and receivers of finals on loopback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from realtime.serving import webhooks
from realtime.serving.webhooks import shown_secret, signing_secret
from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import COMPLETED, RawClient, greeted_client, raw_client
from tests.media_streams import spoken, wav_bytes, web_server
from tests.realtime.gateway_doubles import silence, tone
from tests.waiting import until
from tests.webhook_receiver import hang, receiver

SECRET = "what-webhooks-are-signed-with"
KEY, OTHER = "a-long-secret-key", "another-secret-key"
PER_SESSION = {"hosts": ("127.0.0.1:*",), "per_session": True, "secret": SECRET}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(webhooks, "LONGEST_WAIT_S", 0.1)


def of_all(*urls: str, **more: Any) -> dict[str, Any]:
    return {"on_final": urls, "secret": SECRET, **more}


async def speak(client: RawClient, turns: int = 1) -> list[str]:
    """The finals that the client gets for some turns."""
    finals = []
    for _ in range(turns):
        await client.append(tone(1.0) + silence(1.0))
        finals.append((await client.until(COMPLETED))[-1]["transcript"])
    return finals


async def change(client: RawClient, **session: Any) -> dict[str, Any]:
    await client.send("session.update", session={"type": "transcription", **session})
    found: dict[str, Any] = (await client.until("session.updated"))[-1]["session"]
    return found


async def refused(client: RawClient, url: Any) -> tuple[str, str]:
    await client.send("session.update", session={"type": "transcription", "on_final": url})
    error = (await client.until("error"))[-1]["error"]
    return error["code"], error["param"]


async def test_finals_and_the_end_of_a_session_are_sent_signed_and_in_order(serve: Serve) -> None:
    async with receiver() as hook, serve(webhooks=of_all(hook.url("/a?token=1"))) as running:
        async with greeted_client(running.ws) as client:
            session = (await client.update())["id"]
            finals = await speak(client, 3)
        await until(lambda: len(hook.taken) == 4)
        assert hook.texts == finals and len(set(finals)) == 3
        assert [body["type"] for body in hook.taken] == ["session.final"] * 3 + ["session.ended"]
        assert {body["data"]["session_id"] for body in hook.taken} == {session}
        assert hook.taken[-1]["data"]["seconds"] == 6.0 and {body["dropped"] for body in hook.taken} == {0}
        spans = [(body["data"]["start"], body["data"]["end"]) for body in hook.taken[:3]]
        assert spans == sorted(spans) and all(start < end for start, end in spans)
        hook.verify(signing_secret(SECRET, ""))
        assert len({head["webhook-id"] for head in hook.heads}) == 4 and set(hook.paths) == {"/a?token=1"}
        assert running.metric("webhook_delivered_total") == 4 and running.metric("webhook_queue_events") == 0
        # A session without audio has no end, and nothing is kept of the others.
        async with greeted_client(running.ws):
            pass
        await until(lambda: len(running.gateway.sessions) == 0)
        assert len(hook.taken) == 4 and running.gateway.webhooks.endpoints == 0


async def test_webhooks_are_off_by_default(serve: Serve) -> None:
    async with receiver() as hook, serve() as running:
        async with greeted_client(running.ws) as client:
            assert await refused(client, hook.url()) == ("webhooks_off", "session.on_final")
            assert "on_final" not in await client.update()
            await speak(client)
        async with httpx.AsyncClient(base_url=running.http) as http:
            answer = await http.get("/v1/webhooks")
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "webhooks_off")
        assert hook.connections == 0


async def test_a_key_has_its_own_urls_and_its_own_secret(serve: Serve) -> None:
    async with receiver() as one, receiver() as both:
        hooks = of_all(f"{KEY} {one.url()}", both.url())
        async with serve(webhooks=hooks, auth={"keys": (KEY, OTHER)}) as running:
            for key in (KEY, OTHER):
                headers = {"Authorization": f"Bearer {key}"}
                async with greeted_client(running.ws, additional_headers=headers) as client:
                    await speak(client)
            await until(lambda: len(one.taken) == 2 and len(both.taken) == 4)
            one.verify(signing_secret(SECRET, KEY))
            with pytest.raises(AssertionError):
                both.verify(signing_secret(SECRET, KEY))
            async with httpx.AsyncClient(base_url=running.http, headers={"Authorization": f"Bearer {KEY}"}) as http:
                told = (await http.get("/v1/webhooks")).json()
            # The URL of all keys is the operator's: it may contain a token.
            assert told["on_final"] == [one.url()] and told["per_session"] is False
            assert told["signing_secret"] == shown_secret(signing_secret(SECRET, KEY))
            async with httpx.AsyncClient(base_url=running.http) as http:
                assert (await http.get("/v1/webhooks")).status_code == 401


async def test_session_names_a_url_within_the_list(serve: Serve) -> None:
    async with receiver() as hook, serve(webhooks=PER_SESSION) as running:
        async with greeted_client(running.ws) as client:
            assert (await change(client, on_final=hook.url()))["on_final"] == hook.url()
            finals = await speak(client, 2)
            await until(lambda: hook.texts == finals)
            for bad in ("http://127.0.0.2/", "http://u:p@127.0.0.1/", "ftp://127.0.0.1/", "x" * 3000, 5):
                code, param = await refused(client, bad)
                assert code in ("host_not_allowed", "invalid_value") and param == "session.on_final", bad
            assert (await client.update())["on_final"] == hook.url()
            assert "on_final" not in await change(client, on_final=None)
            await speak(client)
        await until(lambda: len(running.gateway.sessions) == 0)
        assert hook.texts == finals and running.gateway.webhooks.endpoints == 0


@pytest.mark.parametrize("path", ["/v1/listen", "/v2/listen"])
async def test_deepgram_clients_name_a_url(serve: Serve, path: str) -> None:
    async with receiver() as hook, serve(webhooks=PER_SESSION) as running:
        start = f"ws://127.0.0.1:{running.port}{path}?encoding=linear16&sample_rate=24000&on_final="
        address = start + quote(hook.url(), safe="")
        async with raw_client(address) as client:
            await client.socket.send(tone(1.0) + silence(6.0))
            await until(lambda: hook.texts)
            await client.socket.send(json.dumps({"type": "CloseStream"}))
            await until(lambda: hook.taken[-1]["type"] == "session.ended")
        for url, status in (("http://127.0.0.2/", 400), ("x" * 3000, 400), ("", 400)):
            with pytest.raises(InvalidStatus) as error:
                async with raw_client(start + quote(url, safe="")):
                    pass
            assert error.value.response.status_code == status


async def test_order_is_kept_over_failures(serve: Serve) -> None:
    async with receiver() as hook, serve(webhooks=of_all(hook.url(), timeout_s=0.3)) as running:
        hook.replies = [500, 500, hang, 302, 404, 200, 503, 429, 200]
        async with greeted_client(running.ws) as client:
            finals = await speak(client, 3)
        await until(lambda: len(hook.taken) == 4)
        assert hook.texts == finals
        # Each attempt of one event has the same id and body, and a signature of its own time.
        first = [head["webhook-id"] for head in hook.heads[:6]]
        assert len(set(first)) == 1 and len(set(hook.bodies[:6])) == 1
        hook.verify(signing_secret(SECRET, ""))
        assert running.metric("webhook_failures_total") == 7 and running.metric("webhook_dropped_total") == 0


async def test_a_receiver_that_hangs_delays_no_session_and_no_other_receiver(serve: Serve) -> None:
    async with receiver() as bad, receiver() as good:
        hooks = of_all(bad.url(), good.url(), timeout_s=600.0, drain_s=0.0, queue_events=5)
        async with serve(webhooks=hooks) as running:
            bad.usual = hang
            async with greeted_client(running.ws) as client:
                finals = await speak(client, 12)
                await until(lambda: good.texts == finals)
            assert bad.connections == 1 and bad.taken == []
            # Twelve finals and the end: five wait, of which one is being sent.
            await until(lambda: running.metric("webhook_dropped_total", reason="queue_full") == 8)
            await until(lambda: running.metric("webhook_queue_events") == 5)


async def test_what_was_dropped_is_told_at_the_next_delivery_and_once_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiver() as hook, serve(webhooks=of_all(hook.url(), queue_events=2)) as running:
        hook.usual = 500
        async with greeted_client(running.ws) as client:
            finals = await speak(client, 6)
            await until(lambda: running.metric("webhook_dropped_total", reason="queue_full") == 4)
            hook.usual = 200
            await until(lambda: hook.texts[-1:] == finals[-1:])
            finals += await speak(client)
            await until(lambda: hook.texts[-1:] == finals[-1:])
        lost = [body["dropped"] for body in hook.taken]
        assert sum(lost) == 4 and lost[-1] == 0 and len(hook.texts) == 3
        assert hook.texts == [final for final in finals if final in hook.texts]
        said = [record.getMessage() for record in caplog.records if record.name == "tickertape.webhooks"]
        assert len([line for line in said if "are dropped" in line]) == 1
        assert [line for line in said if "works again" in line and "4 events" in line]
        assert not [line for line in said if "/hook" in line]


async def test_text_is_the_one_of_the_clients_final(serve: Serve) -> None:
    async with receiver() as hook, serve(webhooks=of_all(hook.url())) as running:
        async with greeted_client(running.ws) as client:
            await client.update(transcription={"format": {"names": ["w2"], "replace": {"w1": "one"}}})
            finals = await speak(client, 2)
        await until(lambda: len(hook.taken) == 3)
        assert hook.texts == finals and "[REDACTED]" in finals[0] and finals[0].startswith("one")
        assert b"w2 " not in b"".join(hook.bodies) and b"w1" not in hook.bodies[0]


async def test_a_client_secret_has_only_the_webhook_that_it_was_made_with(serve: Serve) -> None:
    async with receiver() as hook, serve(webhooks=PER_SESSION, auth={"keys": (KEY,)}) as running:
        async with httpx.AsyncClient(base_url=running.http, headers={"Authorization": f"Bearer {KEY}"}) as http:
            plain = (await http.post("/v1/realtime/client_secrets", json={})).json()["value"]
            body = {"session": {"type": "transcription", "on_final": hook.url()}}
            hooked = (await http.post("/v1/realtime/client_secrets", json=body)).json()["value"]
        async with greeted_client(running.ws, additional_headers={"Authorization": f"Bearer {plain}"}) as client:
            assert await refused(client, hook.url()) == ("webhook_not_allowed", "session.on_final")
        with pytest.raises(InvalidStatus) as error:
            address = f"ws://127.0.0.1:{running.port}/v1/listen?on_final={quote(hook.url(), safe='')}"
            async with raw_client(address, additional_headers={"Authorization": f"Bearer {plain}"}):
                pass
        assert error.value.response.status_code == 403
        async with httpx.AsyncClient(base_url=running.http, headers={"Authorization": f"Bearer {hooked}"}) as http:
            assert (await http.get("/v1/webhooks")).status_code == 403
        async with greeted_client(running.ws, additional_headers={"Authorization": f"Bearer {hooked}"}) as client:
            assert await refused(client, None) == ("webhook_not_allowed", "session.on_final")
            finals = await speak(client)
        await until(lambda: hook.texts == finals)
        hook.verify(signing_secret(SECRET, KEY))


async def test_a_server_that_stops_delivers_the_last_finals_within_its_time(serve: Serve) -> None:
    async with receiver() as slow, receiver() as bad:
        slow.replies, bad.usual = [500, 500, 500], 500
        hooks = of_all(slow.url(), bad.url(), drain_s=1.0)
        async with serve(webhooks=hooks) as running:
            client = await stack_client(running)
            await client.append(tone(1.0))
            await until(lambda: running.engine.streams and running.engine.streams[-1].samples >= 12_800)
            metrics = running.gateway.metrics.registry
        # The open turn was finished by the drain.
        assert [body["type"] for body in slow.taken] == ["session.final", "session.ended"]
        assert metrics.get_sample_value("tickertape_webhook_dropped_total", {"reason": "shutdown"}) == 2
        await client.socket.close()


async def stack_client(running: Running) -> RawClient:
    client = RawClient(await connect(running.ws, compression=None))
    assert (await client.receive())["type"] == "session.created"
    return client


async def test_events_in_the_file_survive_a_restart(serve: Serve, tmp_path: Path) -> None:
    folder = str(tmp_path / "queue")
    async with receiver() as hook:
        hooks = of_all(hook.url(), drain_s=0.0, folder=folder)
        hook.usual = 500
        async with serve(webhooks=hooks) as running:
            async with greeted_client(running.ws) as client:
                finals = await speak(client, 3)
            await until(lambda: running.metric("webhook_queue_events") == 4)
            metrics = running.gateway.metrics.registry
        assert metrics.get_sample_value("tickertape_webhook_dropped_total", {"reason": "shutdown"}) is None
        assert hook.taken == []
        before = {head["webhook-id"] for head in hook.heads}
        hook.usual = 200
        async with serve(webhooks=hooks) as running:
            await until(lambda: len(hook.taken) == 4)
            await until(lambda: running.metric("webhook_queue_events") == 0)
        assert hook.texts == finals and hook.taken[-1]["type"] == "session.ended"
        assert before <= {head["webhook-id"] for head in hook.heads}
        hook.verify(signing_secret(SECRET, ""))
        async with serve(webhooks=hooks) as running:
            await running.answers_others()
            assert running.metric("webhook_queue_events") == 0
        assert len(hook.taken) == 4


async def test_reload_changes_the_urls_of_new_sessions(serve: Serve) -> None:
    async with receiver() as old, receiver() as new, serve(webhooks=of_all(old.url())) as running:
        async with greeted_client(running.ws) as client:
            await speak(client)
            await until(lambda: len(old.taken) == 1)
            changed = replace(running.gateway.config.webhooks, on_final=(new.url(),))
            running.server.reload(replace(running.gateway.config, webhooks=changed))
            async with greeted_client(running.ws) as later:
                finals = await speak(later)
            await until(lambda: new.texts == finals)
            # A URL that the operator has removed gets nothing more, not even from sessions that go on.
            await speak(client)
            await until(lambda: running.metric("webhook_dropped_total", reason="not_allowed") == 1)
        assert len(old.taken) == 1


async def test_pulled_streams_have_the_webhooks_of_their_key(serve: Serve) -> None:
    async with receiver() as hook, web_server() as web:
        async with serve(webhooks=of_all(hook.url()), server={"stream_hosts": ("127.0.0.1",)}) as running:
            web.pages["/talk.wav"] = wav_bytes(spoken(4.0))
            async with httpx.AsyncClient(base_url=running.http, timeout=60) as http:
                assert (await http.post("/v1/streams", json={"url": web.url("/talk.wav")})).status_code == 201
            await until(lambda: hook.taken and hook.taken[-1]["type"] == "session.ended")
            assert " ".join(hook.texts).split() == [f"w{number}" for number in range(1, 11)]
