"""The flow of the clients of Deepgram Flux."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import RawClient, raw_client
from tests.e2e.test_deepgram_client import rest
from tests.e2e.test_extensions import opus
from tests.realtime.gateway_doubles import ENGLISH, MULTILINGUAL, FakeEngine, silence, tone
from tests.waiting import until

QUERY = "model=flux-general-en&encoding=linear16&sample_rate=16000"
EAGER = QUERY + "&eot_threshold=0.9&eager_eot_threshold=0.4"


def listen(running: Running, query: str = QUERY) -> str:
    return f"ws://127.0.0.1:{running.port}/v2/listen?{query}"


async def events_until(client: RawClient, event: str, count: int = 1) -> list[dict[str, Any]]:
    """Messages up to and including the `count`-th with this event, or of this type."""
    messages: list[dict[str, Any]] = []
    while count:
        messages.append(await client.receive())
        count -= event in (messages[-1].get("event"), messages[-1]["type"])
    return messages


def steps(messages: list[dict[str, Any]]) -> list[str]:
    """The messages without updates."""
    return [name for name in (m.get("event", m["type"]) for m in messages) if name != "Update"]


async def released(running: Running) -> None:
    """Nothing of earlier sockets is counted any more: the only place of the server is free."""
    await until(lambda: not running.engine.active)
    async with raw_client(listen(running)) as client:
        assert (await client.receive())["type"] == "Connected"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("eot_threshold=0.49", "'eot_threshold'"),
        ("eot_threshold=1.01", "'eot_threshold'"),
        ("eot_threshold=00.7", "'eot_threshold'"),
        ("eot_threshold=0_7", "'eot_threshold'"),
        (f"eot_threshold={quote('٠.٧')}", "'eot_threshold'"),
        ("eot_threshold=0.7%0d%0aX-Evil:%20yes", "'eot_threshold'"),
        (f"eot_threshold={'7' * 5000}", "'eot_threshold'"),
        ("eot_threshold=0.7&eot_threshold=0.8", "'eot_threshold'"),
        ("eager_eot_threshold=0.29", "'eager_eot_threshold'"),
        ("eager_eot_threshold=0.8", "eager_eot_threshold (0.8) must not be above eot_threshold (0.7)"),
        ("eot_timeout_ms=499", "'eot_timeout_ms'"),
        ("eot_timeout_ms=60001", "'eot_timeout_ms'"),
        ("eot_timeout_ms=05000", "'eot_timeout_ms'"),
        ("eot_timeout_ms=5000.0", "'eot_timeout_ms'"),
        (f"eot_timeout_ms={quote('５０００')}", "'eot_timeout_ms'"),
        ("redact=numbers", "'redact'"),
        (f"keyterm={'k' * 3000}", "keyword"),
        ("keyterm=a%0d%0ab", "keyword"),
        ("keyterm=", "keyword"),
        ("encoding=linear32", "'encoding'"),
        (f"model={'m' * 300}", "'model'"),
    ],
)
async def test_a_bad_query_is_refused_and_counts_nothing(serve: Serve, query: str, named: str) -> None:
    base = "&".join(part for part in QUERY.split("&") if part.split("=")[0] != query.split("=")[0])
    async with serve(limits={"max_sessions": 1}) as running:
        for _ in range(2):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(listen(running, f"{base}&{query}")):
                    pass
            assert refused.value.response.status_code == 400
            body = json.loads(refused.value.response.body)
            assert set(body) == {"err_code", "err_msg", "request_id"} and named.lower() in body["err_msg"].lower()
            assert "X-Evil" not in refused.value.response.headers
        await released(running)


BAD_CONFIGURES: list[dict[str, Any]] = [
    {"thresholds": {"eot_threshold": 2}},
    {"thresholds": {"eot_threshold": "0.8"}},
    {"thresholds": {"eager_eot_threshold": 0.95}},
    {"thresholds": {"eot_timeout_ms": 10**400}},
    {"thresholds": [0.7]},
    {"keyterms": ["k" * 3000]},
    {"keyterms": ["a\r\nb"]},
    {"keyterms": [f"word{number}" for number in range(501)]},
    {"keyterms": [""]},
    {"keyterms": 7},
]


async def test_a_bad_configure_is_answered_and_changes_nothing(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine, limits={"max_sessions": 1}) as running:
        async with raw_client(listen(running, EAGER)) as client:
            # Before any audio, too.
            for bad in BAD_CONFIGURES:
                await client.send("Configure", **bad)
            failures = await events_until(client, "ConfigureFailure", len(BAD_CONFIGURES))
            assert [failure["sequence_id"] for failure in failures] == list(range(len(BAD_CONFIGURES) + 1))
            assert all(failure["description"] and failure["code"] == "INVALID_VALUE" for failure in failures[1:])
            await client.send("Configure")
            (same,) = await events_until(client, "ConfigureSuccess")
            assert same["thresholds"] == {"eot_threshold": 0.9, "eager_eot_threshold": 0.4, "eot_timeout_ms": 5000}
            assert same["keyterms"] == []
            await client.socket.send(tone(1.0, 16_000))
            await client.send("CloseStream")
            await client.send("Configure", thresholds={"eot_threshold": 0.6})
            last, code = await rest(client)
            assert code == 1000 and steps(last) == ["StartOfTurn", "EndOfTurn"]
            assert last[-1]["transcript"] == "w1 w2"
        await released(running)


async def test_messages_that_cannot_be_read_are_errors_and_the_socket_stays(serve: Serve) -> None:
    async with serve(limits={"max_sessions": 1}) as running:
        async with raw_client(listen(running)) as client:
            for frame in ("{nonsense", '{"type": "Dance"}', "[]", '{"type": "Finalize"}', '{"a":' * 5000):
                await client.socket.send(frame)
                error = (await events_until(client, "Error"))[-1]
                assert error["code"] == "UNPARSABLE_CLIENT_MESSAGE" and error["description"]
            await client.send("KeepAlive")
            await client.socket.send(b"")
            await client.socket.send(tone(1.0, 16_000) + silence(3.0, 16_000))
            assert steps(await events_until(client, "EndOfTurn")) == ["StartOfTurn", "EndOfTurn"]
        await released(running)


async def test_a_flood_of_configures_holds_nothing_and_the_last_one_counts(serve: Serve) -> None:
    async with serve(limits={"max_sessions": 1}) as running:
        async with raw_client(listen(running)) as client:
            await client.socket.send(tone(1.0, 16_000))
            for number in range(600):
                await client.send("Configure", thresholds={"eot_threshold": 0.5 + number % 5 / 10})
                if number % 100 == 99:
                    await events_until(client, "ConfigureSuccess", 100)
            await client.send("Configure", thresholds={"eot_threshold": 0.55}, keyterms=["Ticker"])
            last = (await events_until(client, "ConfigureSuccess"))[-1]
            assert last["thresholds"]["eot_threshold"] == 0.55
            await client.send("CloseStream")
            assert (await rest(client))[1] == 1000
        await released(running)


async def test_a_flood_of_configures_from_a_client_that_does_not_read_ends_its_socket(serve: Serve) -> None:
    engine = FakeEngine()
    engine.takes(replace(MULTILINGUAL, keywords=500))
    async with serve(engine, limits={"max_sessions": 1, "outbox_events": 8}) as running:
        bare = socket.socket()
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.setblocking(False)
        await asyncio.get_running_loop().sock_connect(bare, ("127.0.0.1", running.port))
        async with raw_client(listen(running), sock=bare, max_queue=1) as client:
            with suppress(ConnectionClosed):
                while not running.metric("closed_total", reason="slow_reader"):
                    await client.send("Configure", keyterms=["k" * 60] * 90)
        await until(lambda: running.metric("closed_total", reason="slow_reader") == 1)
        await released(running)


async def test_an_eager_end_is_taken_back_by_speech_and_ends_with_the_same_text(serve: Serve) -> None:
    async with serve(limits={"max_sessions": 1}) as running:
        async with raw_client(listen(running, EAGER)) as client:
            header = client.socket.response.headers["dg-request-id"]
            await client.socket.send(tone(1.3, 16_000) + silence(0.7, 16_000))
            first = await events_until(client, "EagerEndOfTurn")
            assert steps(first) == ["Connected", "StartOfTurn", "EagerEndOfTurn"]
            await client.socket.send(tone(1.3, 16_000) + silence(0.7, 16_000))
            second = await events_until(client, "EagerEndOfTurn")
            assert steps(second) == ["TurnResumed", "EagerEndOfTurn"]
            await client.socket.send(silence(3.0, 16_000))
            (end,) = await events_until(client, "EndOfTurn")
            await client.socket.send(tone(1.3, 16_000) + silence(4.0, 16_000))
            assert steps(await events_until(client, "EndOfTurn")) == ["StartOfTurn", "EagerEndOfTurn", "EndOfTurn"]
            await client.send("CloseStream")
            assert await rest(client) == ([], 1000)
        messages = [*first, *second, end]
        assert [message["sequence_id"] for message in messages] == list(range(len(messages)))
        assert {message["request_id"] for message in messages} == {header}
        assert second[-1]["transcript"] == end["transcript"] == "w1 w2 w3 w4 w5 w6"
        assert 0.39 < second[-1]["end_of_turn_confidence"] < end["end_of_turn_confidence"] <= 0.91
        assert end["trigger"] == "model" and end["turn_index"] == 0
        assert [word["word"] for word in end["words"]] == end["transcript"].split()
        assert end["audio_window_start"] == 0 and 4.0 < end["audio_window_end"] < 7.0
        await released(running)


async def test_thresholds_can_be_changed_in_the_middle(serve: Serve) -> None:
    """At a threshold of 1 only the silence ends a turn; then a lower one does."""
    async with serve() as running, raw_client(listen(running, QUERY + "&eot_threshold=1")) as client:
        await client.socket.send(tone(1.0, 16_000) + silence(4.0, 16_000))
        await client.send("Configure", thresholds={"eot_threshold": 0.6})
        assert "EndOfTurn" not in steps(await events_until(client, "ConfigureSuccess"))
        await client.socket.send(silence(0.5, 16_000))
        (end,) = await events_until(client, "EndOfTurn")
        assert end["trigger"] == "model" and end["end_of_turn_confidence"] >= 0.6
        await client.send("Configure", thresholds={"eot_threshold": 1.0, "eot_timeout_ms": 600})
        await client.socket.send(tone(1.0, 16_000) + silence(1.0, 16_000))
        assert (await events_until(client, "EndOfTurn"))[-1]["trigger"] == "timeout"


async def test_a_client_can_end_a_turn(serve: Serve) -> None:
    async with serve() as running, raw_client(listen(running)) as client:
        await client.send("ForceEndTurn")
        await client.socket.send(tone(1.0, 16_000))
        await client.send("ForceEndTurn")
        await client.send("ForceEndTurn")
        messages = await events_until(client, "EndOfTurn")
        assert messages[-1]["trigger"] == "manual" and messages[-1]["transcript"] == "w1 w2"
        await client.send("CloseStream")
        assert await rest(client) == ([], 1000)


@pytest.mark.parametrize("container", ["ogg", "webm"])
@pytest.mark.parametrize("encoding", ["", "&encoding=ogg-opus"])
async def test_containers_have_their_own_format(serve: Serve, container: str, encoding: str) -> None:
    async with serve() as running, raw_client(listen(running, "model=flux-general-en" + encoding)) as client:
        await client.socket.send(opus(container, 1.3))
        await client.send("CloseStream")
        messages, code = await rest(client)
    assert code == 1000 and messages[-1]["event"] == "EndOfTurn" and messages[-1]["transcript"].startswith("w1 w2")


async def test_keys_are_needed_where_the_server_has_keys(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}, limits={"max_sessions": 1}) as running:
        for headers in ({}, {"Authorization": "Token another"}):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(listen(running), additional_headers=headers):
                    pass
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body)["err_code"] == "INVALID_AUTH"
        for scheme in ("Token", "Bearer"):
            headers = {"Authorization": f"{scheme} the-real-key"}
            async with raw_client(listen(running), additional_headers=headers) as client:
                assert (await client.receive())["type"] == "Connected"
            await until(lambda: not len(running.gateway.sessions))
        offer = [Subprotocol("token"), Subprotocol("the-real-key")]
        async with raw_client(listen(running), subprotocols=offer) as client:
            assert client.socket.subprotocol == "token" and (await client.receive())["type"] == "Connected"


async def test_a_server_that_is_full_refuses_before_the_upgrade(serve: Serve) -> None:
    async with serve(limits={"max_sessions": 1}) as running:
        async with raw_client(listen(running)) as client:
            await client.receive()
            with pytest.raises(InvalidStatus) as refused:
                async with connect(listen(running)):
                    pass
            assert refused.value.response.status_code == 503
            assert "err_msg" in json.loads(refused.value.response.body)
        await released(running)


async def test_the_model_is_told_the_language_and_the_keyterms(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running:
        for query, told in (
            ("model=flux-general-en&language_hint=de", {"language": "en"}),
            ("model=flux-general-multi&language_hint=de&language_hint=fr", {"languages": "de,fr"}),
        ):
            async with raw_client(listen(running, f"{query}&encoding=linear16&sample_rate=16000")) as client:
                await client.socket.send(tone(1.0, 16_000))
                await events_until(client, "StartOfTurn")
            assert engine.opened[-1]["options"] == told
        engine.takes(ENGLISH)
        async with raw_client(listen(running, QUERY + "&keyterm=Ticker")) as client:
            await client.send("Configure", keyterms=["Ticker"])
            messages = await events_until(client, "Warning")
            assert steps(messages) == ["Connected", "ConfigureSuccess", "Warning"] and messages[1]["keyterms"] == []


async def test_a_turn_that_fails_is_ended_and_the_next_one_is_heard(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, raw_client(listen(running)) as client:
        await client.socket.send(tone(1.0, 16_000))
        await events_until(client, "StartOfTurn")
        engine.mute_flush = True
        await client.socket.send(silence(3.0, 16_000))
        await until(lambda: len(engine.streams[0].flushes) > 1)
        engine.mute_flush = False
        engine.streams[0].fail()
        failed = await events_until(client, "EndOfTurn")
        assert steps(failed) == ["Warning", "EndOfTurn"] and failed[-1]["transcript"].startswith("w1")
        await client.socket.send(tone(1.0, 16_000) + silence(3.0, 16_000))
        assert steps(await events_until(client, "EndOfTurn")) == ["StartOfTurn", "EndOfTurn"]


async def test_a_plain_request_is_told_to_upgrade(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        answer = await http.get(f"{running.http}/v2/listen")
        assert answer.status_code == 426 and "err_msg" in answer.json()
        assert (await http.post(f"{running.http}/v2/listen")).status_code == 405
