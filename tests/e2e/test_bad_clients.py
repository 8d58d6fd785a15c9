"""Errors on a socket: bad messages, bad handshakes, abrupt ends. Each gets its answer; other clients are unaffected."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.attacks.sound import flac_bomb
from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import COMPLETED, RawClient, greeted_client, raw_client
from tests.realtime.gateway_doubles import FakeEngine, silence, tone


async def works(client: RawClient) -> None:
    """The session still transcribes."""
    await client.send("input_audio_buffer.clear")
    await client.until("input_audio_buffer.cleared")
    await client.append(tone(1.0) + silence(0.8))
    assert len((await client.until(COMPLETED))[-1]["transcript"].split()) == 2


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ("", "invalid_json", None),
        ("{", "invalid_json", None),
        ("[1, 2]", "invalid_json", None),
        ("null", "invalid_json", None),
        ('"text"', "invalid_json", None),
        ('{"type": "session.update", "session": ' + "[" * 5000 + "]" * 5000 + "}", "invalid_json", None),
        ("{}", "invalid_value", "type"),
        ('{"type": 7}', "invalid_value", "type"),
        ('{"type": "no.such.event", "event_id": "e"}', "invalid_value", "type"),
        ('{"type": "response.create", "event_id": "e"}', "invalid_value", "type"),
        ('{"type": "conversation.item.delete", "event_id": "e"}', "invalid_value", "type"),
        ('{"type": "input_audio_buffer.append", "event_id": "e"}', "invalid_value", "audio"),
        ('{"type": "input_audio_buffer.append", "audio": 5, "event_id": "e"}', "invalid_value", "audio"),
        ('{"type": "input_audio_buffer.append", "audio": "a", "event_id": "e"}', "invalid_audio", "audio"),
        ('{"type": "input_audio_buffer.append", "audio": "é===", "event_id": "e"}', "invalid_audio", "audio"),
        ('{"type": "input_audio_buffer.append", "audio": "AAAA AAAA", "event_id": "e"}', "invalid_audio", "audio"),
        ('{"type": "session.update", "session": 3, "event_id": "e"}', "invalid_value", "session"),
        ('{"type": "session.update", "session": {"audio": []}, "event_id": "e"}', "invalid_value", "session.audio"),
        (
            '{"type": "session.update", "session": {"include": "x"}, "event_id": "e"}',
            "invalid_value",
            "session.include",
        ),
        ('{"type": "input_audio_buffer.gap", "event_id": "e"}', "invalid_value", "duration_ms"),
        ('{"type": "input_audio_buffer.gap", "samples": -1, "event_id": "e"}', "invalid_value", "samples"),
        (f'{{"type": "input_audio_buffer.gap", "samples": {10**400}, "event_id": "e"}}', "invalid_value", "samples"),
        (
            f'{{"type": "input_audio_buffer.gap", "duration_ms": {10**400}, "event_id": "e"}}',
            "invalid_value",
            "duration_ms",
        ),
    ],
)
async def test_bad_message_gets_an_error_with_its_event_id(
    serve: Serve, frame: str, code: str, param: str | None
) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.socket.send(frame)
        event = await client.receive()
        assert event["type"] == "error" and event["error"]["code"] == code and event["error"]["param"] == param
        expected = "e" if '"e"' in frame else None
        assert event["error"]["event_id"] == expected and event["error"]["type"] == "invalid_request_error"
        assert "Traceback" not in event["error"]["message"]
        await works(client)


@pytest.mark.parametrize(
    ("audio_input", "param"),
    [
        ({"format": {"type": "audio/pcm", "rate": 4000}}, "format.rate"),
        ({"format": {"type": "audio/pcm", "rate": 96000}}, "format.rate"),
        ({"format": {"type": "audio/pcm", "rate": "24k"}}, "format.rate"),
        ({"format": {"type": "audio/mp3"}}, "format.type"),
        ({"turn_detection": {"type": "psychic"}}, "turn_detection.type"),
        ({"turn_detection": {"type": "server_vad", "threshold": 2}}, "turn_detection.threshold"),
        ({"turn_detection": {"type": "server_vad", "silence_duration_ms": -1}}, "turn_detection.silence_duration_ms"),
        ({"turn_detection": {"type": "server_vad", "idle_timeout_ms": 100}}, "turn_detection.idle_timeout_ms"),
        ({"turn_detection": {"type": "semantic_vad", "eagerness": "extreme"}}, "turn_detection.eagerness"),
        ({"transcription": {"model": 5}}, "transcription.model"),
        ({"transcription": {"delay": "yesterday"}}, "transcription.delay"),
        ({"transcription": {"keywords": "one"}}, "transcription.keywords"),
    ],
)
async def test_bad_setting_is_refused_by_name_and_changes_nothing(
    serve: Serve, audio_input: dict[str, Any], param: str
) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        before = await client.update()
        await client.send("session.update", session={"audio": {"input": audio_input}}, event_id="bad")
        error = (await client.receive())["error"]
        assert error["param"] == f"session.audio.input.{param}" and error["event_id"] == "bad"
        assert await client.update() == before


async def test_harmless_unknown_things_are_accepted_in_silence(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws + "?intent=transcription&model=x&foo=bar") as client:
        session = {
            "type": "realtime",
            "instructions": "be nice",
            "audio": {
                "input": {
                    "transcription": {"model": "never-heard-of", "temperature": 3},
                    "noise_reduction": {"type": "near_field"},
                    "turn_detection": {"type": "server_vad", "create_response": True, "idle_timeout_ms": 5000},
                },
                "output": {"voice": "alloy"},
            },
        }
        await client.send("session.update", session=session)
        shown = (await client.until("session.updated"))[-1]["session"]
        assert shown["audio"]["input"]["turn_detection"]["create_response"] is True
        assert shown["audio"]["input"]["noise_reduction"] is None, "the server has no noise reduction"
        await works(client)


async def test_flat_beta_fields_in_a_plain_update_are_translated(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        flat = {"input_audio_format": "g711_ulaw", "turn_detection": None, "input_audio_transcription": {"model": "m"}}
        await client.send("session.update", session=flat)
        shown = (await client.until("session.updated"))[-1]["session"]["audio"]["input"]
        assert shown["format"] == {"type": "audio/pcmu"} and shown["turn_detection"] is None


async def test_append_of_fifteen_megabytes_is_taken(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=None)
        audio = bytes(15 * 1024 * 1024)
        await client.append(audio)
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["transcript"] == ""
        assert engine.streams[0].samples == round(len(audio) / 2 * 16000 / 24000)


async def test_larger_message_closes_with_1009(serve: Serve) -> None:
    async with serve(limits={"message_bytes": 100_000}) as running, greeted_client(running.ws) as client:
        with pytest.raises(ConnectionClosed) as closed:
            await client.socket.send("x" * 200_000)
            await client.receive()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


async def test_json_in_binary_frames_is_understood(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.socket.send(json.dumps({"type": "session.update", "session": {}}).encode())
        assert (await client.receive())["type"] == "session.updated"


async def test_odd_trailing_bytes_are_carried_to_the_next_append(serve: Serve) -> None:
    engine = FakeEngine()
    engine.keep_audio = True
    audio = tone(1.0)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=None)
        for start in range(0, len(audio), 1001):
            await client.append(audio[start : start + 1001])
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2"
        assert engine.streams[0].samples == 16_000


async def test_client_that_vanishes_in_a_turn_frees_its_place(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running:
        async with greeted_client(running.ws) as client:
            await client.append(tone(1.0))
            await client.until("input_audio_buffer.speech_started")
            client.socket.transport.abort()
        for _ in range(100):
            if not engine.active and not len(running.gateway.sessions):
                break
            await asyncio.sleep(0.02)
        assert not engine.active and engine.streams[0].aborted
        async with greeted_client(running.ws) as client:
            await works(client)


async def test_wrong_key_gets_401_in_every_place_a_key_can_be(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        for options in (
            {},
            {"additional_headers": {"Authorization": "Bearer nope"}},
            {"additional_headers": {"Authorization": "Basic dXNlcg=="}},
            {"additional_headers": {"api-key": "nope"}},
            {"subprotocols": ["realtime", "openai-insecure-api-key.nope"]},
            {"subprotocols": ["realtime", "openai-insecure-api-key.ek_forged"]},
            {"subprotocols": ["token", "nope"]},
        ):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(running.ws, **options):
                    pass
            response = refused.value.response
            assert response.status_code == 401
            assert json.loads(response.body)["error"]["code"] == "invalid_api_key"
        assert running.metric("refused_total", reason="auth") == 7


async def test_right_key_is_taken_from_every_place_and_never_echoed_or_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "the-real-key"
    async with serve(auth={"keys": (key,)}) as running:
        for options, selected in (
            ({"additional_headers": {"Authorization": f"Bearer {key}"}}, None),
            ({"additional_headers": {"Authorization": f"Token {key}"}}, None),
            ({"additional_headers": {"api-key": key}}, None),
            ({"subprotocols": ["realtime", f"openai-insecure-api-key.{key}", "openai-agents-sdk.0.1"]}, "realtime"),
            ({"subprotocols": ["token", key]}, "token"),
            ({"subprotocols": ["bearer", key]}, "bearer"),
        ):
            async with connect(running.ws, **options) as socket:
                assert socket.subprotocol == selected
                assert key not in str(socket.response.headers) and key not in await socket.recv()
    server_logs = [record for record in caplog.records if record.name.startswith(("tickertape", "uvicorn"))]
    assert not [record for record in server_logs if key in record.getMessage()]


async def test_beta_subprotocol_chooses_the_beta_dialect(serve: Serve) -> None:
    offered = ["realtime", "openai-insecure-api-key.x", "openai-beta.realtime-v1"]
    async with serve() as running, raw_client(running.ws, subprotocols=offered) as client:
        assert (await client.receive())["type"] == "transcription_session.created"
        assert client.socket.subprotocol == "realtime"


async def test_calls_are_not_found(serve: Serve) -> None:
    async with serve() as running:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(running.ws + "?call_id=abc"):
                pass
        assert refused.value.response.status_code == 404


async def raw_exchange(running: Running, data: bytes, seconds: float = 5.0) -> bytes:
    """Send bytes to the port; what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


async def test_tls_hello_on_the_plain_port_is_closed_at_once(serve: Serve) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    async with serve() as running:
        await raw_exchange(running, outgoing.read(), seconds=2.0)


async def test_slow_handshake_is_cut_off(serve: Serve) -> None:
    async with serve(server={"handshake_s": 0.3}) as running:
        assert await raw_exchange(running, b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nX-Slow: ") == b""
        async with greeted_client(running.ws) as client:
            # The deadline passes for another connection, which says nothing, and so it has for this one.
            assert await raw_exchange(running, b"") == b""
            await works(client)


async def test_garbage_on_the_wire_ends_only_that_socket(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as good:
        upgrade = (
            f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
            f"{base64.b64encode(bytes(16)).decode()}\r\n\r\n"
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(upgrade)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\xff" * 500)
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await works(good)


async def test_client_that_leaves_during_the_handshake_leaves_nothing_behind(serve: Serve) -> None:
    async with serve() as running:
        upgrade = (
            b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(upgrade)
            await writer.drain()
            writer.transport.abort()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not len(running.gateway.sessions):
                break
        assert not len(running.gateway.sessions)
        async with greeted_client(running.ws) as client:
            await works(client)


@pytest.mark.parametrize("extra", [f"X-Long: {'a' * 9000}\r\n", "X-Many: a\r\n" * 200], ids=["long", "many"])
async def test_head_of_an_upgrade_that_cannot_be_read_is_answered(serve: Serve, extra: str) -> None:
    head = (
        "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{extra}\r\n"
    )
    async with serve() as running:
        assert (await raw_exchange(running, head.encode())).startswith(b"HTTP/1.1 400")


async def test_bad_frame_before_the_greeting_is_no_error_of_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    head = (
        b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    async with serve() as running:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(head)
            await reader.readuntil(b"\r\n\r\n")
            # A frame without a mask.
            writer.write(b"\x81\x02{}")
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 100000\r\n\r\n--b\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n--b\r\n\r\nffffffffffffffffffff\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n--b\r\n\r\nno size\r\n",
    ],
    ids=["left", "chunk too large", "no chunk"],
)
@pytest.mark.parametrize("path", ["audio/transcriptions", "audio/render", "realtime/client_secrets"])
async def test_body_that_breaks_off_is_no_error_of_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture, path: str, body: bytes
) -> None:
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n".encode()
    async with serve() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(head + body)
        await running.answers_others()
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_bad_body_of_a_head_request_is_no_error_of_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2"))
        writer.close()
        await running.answers_others()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_hours_of_audio_in_a_few_bytes_end_with_their_client(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running:
        async with greeted_client(running.ws) as client:
            await client.update(format={"type": "audio/webm", "transport": "binary"}, turn_detection=None)
            await client.socket.send(flac_bomb(3 * 3600))
            for _ in range(500):
                if engine.streams and engine.streams[0].samples:
                    break
                await asyncio.sleep(0.01)
            client.socket.transport.abort()
        # To decode all that is taken of them would go on for ten seconds or more.
        for _ in range(300):
            if not len(running.gateway.sessions):
                break
            await asyncio.sleep(0.01)
        assert not len(running.gateway.sessions) and engine.streams[0].samples > 0


@pytest.mark.parametrize("protocol", ["", "Sec-WebSocket-Protocol: no-such\r\n"])
async def test_bytes_before_the_handshake_is_answered_are_no_error_of_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    head = (
        "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{protocol}\r\n"
    ).encode()
    async with serve() as running:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            # More than one read of the server, so that some of it is read between the request and its answer.
            writer.write(head + b"\xff" * 2_000_000)
            await asyncio.gather(asyncio.wait_for(reader.read(), 5), return_exceptions=True)
            writer.close()
        async with greeted_client(running.ws) as client:
            await works(client)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
