"""Limits, overload and back-pressure: refused early, slowed by TCP, closed with a code, and never at others' cost."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.errors import AtCapacity
from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import COMPLETED, greeted_client, raw_client
from tests.realtime.gateway_doubles import FakeEngine, silence, tone
from tests.waiting import until


async def refusal(url: str, **options: Any) -> Any:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, **options):
            pass
    return refused.value.response


async def close_code(client: Any) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await client.receive()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


async def test_full_server_refuses_before_the_upgrade_with_retry_after(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(slots=2)
    async with serve(engine) as running, greeted_client(running.ws) as first, greeted_client(running.ws):
        response = await refusal(running.ws)
        assert response.status_code == 503 and 7 <= int(response.headers["Retry-After"]) <= 14
        assert json.loads(response.body)["error"]["code"] == "server_busy"
        # The place of a session that has a stream is counted once.
        await first.append(tone(0.5))
        await first.until("input_audio_buffer.speech_started")
        assert (await refusal(running.ws)).status_code == 503
        assert running.metric("refused_total", reason="capacity") == 2
        assert not caplog.records, "a refusal is no error of the server"
        await first.socket.close()
        await until(lambda: len(running.gateway.sessions) == 1)
        async with greeted_client(running.ws):
            pass


async def test_late_overload_closes_with_1013_and_no_error_event(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, greeted_client(running.ws) as client:
        engine.refuse_open = AtCapacity("s", "full after all")
        await client.append(tone(0.5))
        with pytest.raises(ConnectionClosed) as closed:
            event = await client.receive()
            pytest.fail(f"no event may come before the close, but {event} did")
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013


async def test_engine_that_is_not_ready_refuses_sessions_and_readiness(serve: Serve) -> None:
    engine = FakeEngine()
    engine.ready = False
    async with serve(engine) as running, httpx.AsyncClient() as http:
        assert (await refusal(running.ws)).status_code == 503
        assert (await http.get(f"{running.http}/ready")).status_code == 503
        assert (await http.get(f"{running.http}/health")).status_code == 200
        engine.ready = True
        assert (await http.get(f"{running.http}/ready")).status_code == 200


async def test_sessions_per_key_and_per_minute(serve: Serve) -> None:
    limits = {"sessions_per_key": 1, "new_sessions_per_minute": 2}
    async with serve(auth={"keys": ("key-number-one", "key-number-two")}, limits=limits) as running:
        one, two = ({"additional_headers": {"Authorization": f"Bearer key-number-{n}"}} for n in ("one", "two"))
        async with greeted_client(running.ws, **one):
            response = await refusal(running.ws, **one)
            assert response.status_code == 429 and json.loads(response.body)["error"]["code"] == "too_many_sessions"
            async with greeted_client(running.ws, **two):
                pass
        await until(lambda: not len(running.gateway.sessions))
        async with greeted_client(running.ws, **one):
            pass
        await until(lambda: not len(running.gateway.sessions))
        response = await refusal(running.ws, **one)
        assert json.loads(response.body)["error"]["code"] == "rate_limit_exceeded"
        assert 50 <= int(response.headers["Retry-After"]) <= 60


async def test_idle_and_overlong_sessions_are_closed_with_1008(serve: Serve) -> None:
    async with serve(limits={"idle_s": 0.3}) as running, greeted_client(running.ws) as client:
        assert await close_code(client) == 1008
    async with serve(limits={"session_s": 0.3}) as running, greeted_client(running.ws) as client:
        assert await close_code(client) == 1008
        assert running.metric("closed_total", reason="duration") == 1


async def test_sender_faster_than_the_engine_is_slowed_and_memory_stays_bounded(serve: Serve) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 0.02
    async with serve(engine, limits={"audio_in_flight_s": 1.0}) as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=None)
        entry = next(iter(running.gateway.sessions.entries.values()))
        most = 0.0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, entry.live.queued_seconds)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        for _ in range(40):
            await client.append(silence(0.5))
        await client.send("input_audio_buffer.commit")
        await client.until(COMPLETED)
        watching.cancel()
        # The limit, one joined piece (64 KiB), and the message that crossed it.
        assert 0.4 < most <= 1.0 + 65536 / 48000 + 0.5
        assert engine.streams[0].samples == 20 * 16000


async def test_sender_that_exceeds_its_message_rate_is_slowed_not_refused(serve: Serve) -> None:
    async with serve(limits={"messages_per_second": 50.0}) as running, greeted_client(running.ws) as client:
        begun = time.monotonic()
        for _ in range(75):
            await client.send("input_audio_buffer.clear")
        for _ in range(75):
            assert (await client.receive())["type"] == "input_audio_buffer.cleared"
        assert time.monotonic() - begun > 0.4


async def test_sender_of_many_mistakes_is_slowed_and_gets_every_answer(serve: Serve) -> None:
    async with serve(limits={"mistakes_per_second": 50.0}) as running, greeted_client(running.ws) as client:
        begun = time.monotonic()
        for number in range(75):
            await client.send("nothing", event_id=str(number))
            await client.append(silence(0.01))
        answers = [await client.receive() for _ in range(75)]
        assert time.monotonic() - begun > 0.4
        assert [answer["error"]["event_id"] for answer in answers] == [str(number) for number in range(75)]


async def test_client_that_does_not_read_gets_longer_deltas_and_no_loss(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws, max_queue=1) as client:
        await client.update(turn_detection=None)
        live = next(iter(running.gateway.sessions.entries.values())).live
        resume = hold_writer(running)
        for _ in range(100):
            await client.append(tone(0.4))
        await client.send("input_audio_buffer.commit")
        for _ in range(200):
            await asyncio.sleep(0.01)
            if live.session.turns.last_committed and not live.session.turns.ended:
                break
        assert len(live.outbox) <= 4
        resume()
        events = await client.until(COMPLETED)
        deltas = [event["delta"] for event in events if "delta" in event]
        assert "".join(deltas) == events[-1]["transcript"] and len(events[-1]["transcript"].split()) == 100
        assert len(deltas) < 10


def hold_writer(running: Any) -> Any:
    """Make every socket of the server look as if its peer did not read; returns the way back."""
    protocols = [item for item in running.server.server_state.connections if hasattr(item, "writable")]
    for protocol in protocols:
        protocol.pause_writing()
    return lambda: [protocol.resume_writing() for protocol in protocols]


async def test_client_that_never_reads_is_closed_and_others_go_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realtime.serving.connection.CLOSE_GRACE_S", 0.2)
    async with serve(limits={"outbox_events": 20}) as running:
        async with greeted_client(running.ws, max_queue=1) as deaf:
            await deaf.update(turn_detection=None)
            hold_writer(running)
            async with greeted_client(running.ws) as good:
                for number in range(60):
                    await deaf.send("nothing", event_id=str(number))
                for _ in range(100):
                    await asyncio.sleep(0.02)
                    if len(running.gateway.sessions) == 1:
                        break
                assert len(running.gateway.sessions) == 1
                assert running.metric("closed_total", reason="slow_reader") == 1
                with pytest.raises(ConnectionClosed):
                    while True:
                        await deaf.receive()
                await good.append(tone(1.0) + silence(0.8))
                assert (await good.until(COMPLETED))[-1]["transcript"] == "w1 w2"


async def test_client_that_only_sends_survives_missed_pongs(serve: Serve) -> None:
    """vLLM's example reads nothing until it has sent everything, and so answers no ping meanwhile."""
    async with serve(server={"ping_interval_s": 0.1, "dead_after_s": 0.3}) as running:
        async with raw_client(running.ws, max_queue=1, ping_interval=None) as client:
            client.socket.transport.pause_reading()
            for _ in range(12):
                await client.append(tone(0.1) + silence(0.02))
                await asyncio.sleep(0.1)
            client.socket.transport.resume_reading()
            assert (await client.receive())["type"] == "session.created"
            await client.append(silence(0.8))
            await client.until(COMPLETED)


async def test_half_open_socket_is_found_and_its_session_ended(serve: Serve) -> None:
    async with serve(server={"ping_interval_s": 0.1, "dead_after_s": 0.3}) as running:
        async with greeted_client(running.ws, ping_interval=None) as client:
            client.socket.transport.pause_reading()
            for _ in range(100):
                await asyncio.sleep(0.02)
                if not len(running.gateway.sessions):
                    break
            assert not len(running.gateway.sessions)
            client.socket.transport.abort()


UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


async def blocked_sender(running: Running) -> socket.socket:
    """A client whose socket the server has stopped to read: it sends until the system takes no more."""
    client = socket.socket()
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", running.port))
    await loop.sock_sendall(client, UPGRADE)
    greeting = b""
    while b"session.created" not in greeting:
        greeting += await loop.sock_recv(client, 65536)
    audio = json.dumps(
        {"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(24_000)).decode()}
    ).encode()
    frame = b"\x81\xfe" + len(audio).to_bytes(2) + bytes(4) + audio
    connection = next(iter(running.server.server_state.connections))
    async with asyncio.timeout(30):
        sending = asyncio.create_task(loop.sock_sendall(client, frame * 2000))
        while not connection.read_paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return client


async def test_a_client_that_leaves_while_it_is_not_read_is_not_counted_until_the_next_pings(serve: Serve) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 3600.0
    async with serve(engine, limits={"audio_in_flight_s": 0.5}, server={"ping_interval_s": 600.0}) as running:
        (await blocked_sender(running)).close()
        async with asyncio.timeout(20):
            while len(running.gateway.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_client_that_ends_its_sending_while_it_is_not_read_keeps_its_session(serve: Serve) -> None:
    """What it sent before is still read, and it gets the text."""
    engine = FakeEngine()
    engine.feed_delay_s = 3600.0
    async with serve(engine, limits={"audio_in_flight_s": 0.5}, server={"ping_interval_s": 600.0}) as running:
        client = await blocked_sender(running)
        client.shutdown(socket.SHUT_WR)
        received = b""
        async with asyncio.timeout(30):
            while received.count(b"\x89\x00") < 3:
                received += await asyncio.get_running_loop().sock_recv(client, 100)
        assert len(running.gateway.sessions) == 1
        client.close()


async def test_hundred_parallel_sessions_each_get_their_own_words(serve: Serve) -> None:
    engine = FakeEngine(slots=200)

    async def one(number: int, url: str) -> str:
        async with greeted_client(url) as client:
            await asyncio.sleep(number % 10 * 0.01)
            audio = tone(0.4 * (1 + number % 5) + 0.1) + silence(0.8)
            for start in range(0, len(audio), 9600):
                await client.append(audio[start : start + 9600])
            return str((await client.until(COMPLETED))[-1]["transcript"])

    async with serve(engine) as running:
        texts = await asyncio.gather(*(one(number, running.ws) for number in range(100)))
        assert [len(text.split()) for text in texts] == [1 + number % 5 for number in range(100)]
        # What the ticker sees of the loop while a hundred sessions share two cores with their clients.
        assert running.metric("loop_lag_seconds_count") > 0


async def test_capacity_counts_connected_and_speaking_apart(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http, greeted_client(running.ws):
        async with greeted_client(running.ws) as speaker:
            await speaker.append(tone(0.5))
            await speaker.until("input_audio_buffer.speech_started")
            seen = (await http.get(f"{running.http}/capacity")).json()
            assert (seen["connected"], seen["speaking"], seen["streams_used"]) == (2, 1, 1)


async def test_drain_finishes_the_running_turn_tells_clients_and_refuses_new_ones(serve: Serve) -> None:
    async with serve(server={"drain_s": 3.0}) as running:
        async with greeted_client(running.ws) as idle, greeted_client(running.ws) as speaker:
            await speaker.append(tone(1.0))
            await speaker.until("input_audio_buffer.speech_started")
            running.server.should_exit = True
            assert (await idle.receive())["type"] == "session.closing"
            assert await close_code(idle) == 1012
            await speaker.until("session.closing")
            await speaker.append(silence(0.8))
            events = await speaker.until(COMPLETED)
            assert events[-1]["transcript"] == "w1 w2"
            assert await close_code(speaker) == 1012


async def test_metrics_show_what_happened(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        async with greeted_client(running.ws) as client:
            await client.append(tone(1.0) + silence(0.8))
            await client.until(COMPLETED)
            await until(lambda: running.metric("audio_heard_seconds_total") > 1.7)
            text = (await http.get(f"{running.http}/metrics")).text
    assert 'tickertape_sessions_opened_total{dialect="openai"} 1.0' in text
    assert "tickertape_sessions_connected 1.0" in text
    assert "tickertape_final_seconds_count 1.0" in text
    figures = dict(line.split() for line in text.splitlines() if line.startswith("tickertape_audio_"))
    assert float(figures["tickertape_audio_received_seconds_total"]) == pytest.approx(1.8)
    assert 1.7 < float(figures["tickertape_audio_heard_seconds_total"]) <= 1.8
