"""The HTTP side: files, models, secrets, health, CORS, TLS; and what is refused."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from realtime.config import ServerConfig
from realtime.http.routes import AccessLog
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client, raw_client
from tests.e2e.test_openai_client import send_audio, wav
from tests.realtime.gateway_doubles import MULTILINGUAL, FakeEngine, silence, tone


def error_code(response: httpx.Response) -> Any:
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["message"]
    return body["code"]


@pytest.mark.parametrize(
    ("files", "data", "status", "code"),
    [
        ({"file": ("a.wav", b"this is not audio at all", "audio/wav")}, {}, 400, "not_audio"),
        ({"file": ("a.wav", b"", "audio/wav")}, {}, 400, "empty_audio"),
        ({"file": ("a.wav", wav(1.0)[:20], "audio/wav")}, {}, 400, "corrupt_audio"),
        ({"other": ("a.wav", wav(0.2), "audio/wav")}, {}, 400, "missing_file"),
        ({"file": ("a.wav", wav(0.2), "audio/wav")}, {"response_format": "docx"}, 400, "invalid_value"),
        ({"file": ("a.wav", b"not audio either" * 100, "audio/wav")}, {"stream": "true"}, 400, "not_audio"),
    ],
)
async def test_bad_upload_is_refused_with_its_reason(
    serve: Serve, files: Any, data: Any, status: int, code: str
) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, httpx.AsyncClient() as http:
        response = await http.post(f"{running.base_url}/audio/transcriptions", files=files, data={"model": "m", **data})
        assert (response.status_code, error_code(response)) == (status, code)
        assert not engine.active


async def test_upload_that_is_no_form_or_too_large_is_refused(serve: Serve) -> None:
    async with serve(limits={"upload_bytes": 1000}) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        response = await http.post(url, json={"file": "x"})
        assert (response.status_code, error_code(response)) == (400, "invalid_form")
        response = await http.post(url, content=b"garbage", headers={"content-type": "multipart/form-data; boundary=x"})
        assert (response.status_code, error_code(response)) == (400, "invalid_form")
        response = await http.post(url, files={"file": ("a.wav", wav(1.0), "audio/wav")})
        assert (response.status_code, error_code(response)) == (413, "file_too_large")


@pytest.mark.parametrize(("charset", "status"), [("utf-8", 200), ('"UTF-8"', 200), ("punycode", 400), ("idna", 400)])
async def test_nobody_chooses_the_codec_that_reads_a_form(serve: Serve, charset: str, status: int) -> None:
    """Some codecs take minutes for a text of a few hundred kilobytes, and all clients would wait."""
    form = httpx.Request("POST", "http://x", files={"file": ("a.wav", wav(0.2), "audio/wav")}, data={"model": "m"})
    content_type = f"{form.headers['content-type']}; charset={charset}"
    async with serve() as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        response = await http.post(url, content=form.read(), headers={"content-type": content_type})
        assert response.status_code == status
        assert status == 200 or error_code(response) == "invalid_form"


async def test_upload_that_finds_no_place_is_told_when_to_come_back(serve: Serve) -> None:
    async with serve(FakeEngine(slots=0)) as running, httpx.AsyncClient() as http:
        response = await http.post(
            f"{running.base_url}/audio/transcriptions", files={"file": ("a.wav", wav(0.2), "audio/wav")}
        )
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")


async def test_upload_whose_client_has_left_gives_up_its_place(serve: Serve) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 1.0
    async with serve(engine, limits={"uploads": 1}) as running, httpx.AsyncClient() as http:
        url, files = f"{running.base_url}/audio/transcriptions", {"file": ("a.wav", wav(60.0), "audio/wav")}
        upload = asyncio.create_task(http.post(url, files=files, data={"model": "m"}))
        async with asyncio.timeout(5):
            while not engine.active:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            upload.cancel()
            while engine.active:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert running.metric("uploads_total", outcome="client_gone") == 1
        engine.feed_delay_s = 0.0
        response = await http.post(url, files={"file": ("a.wav", wav(0.5), "audio/wav")}, data={"model": "m"})
        assert response.status_code == 200


@pytest.mark.parametrize("output_delay_s", [0.0, 0.3])
async def test_failing_engine_fails_the_upload(serve: Serve, output_delay_s: float) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 0.01
    # With a delay the next piece of audio is refused before the failure is read.
    engine.output_delay_s = output_delay_s
    async with serve(engine) as running, httpx.AsyncClient(timeout=10) as http:

        async def fail_soon() -> None:
            while not engine.streams or not engine.streams[-1].samples:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            engine.streams[-1].fail("numbers went wrong")

        task = asyncio.create_task(fail_soon())
        url = f"{running.base_url}/audio/transcriptions"
        response = await http.post(url, files={"file": ("a.wav", wav(30.0), "audio/wav")})
        await task
        assert (response.status_code, error_code(response)) == (500, "transcription_failed")


async def test_every_form_field_clients_send_is_accepted(serve: Serve) -> None:
    fields = {
        "model": "gpt-4o-transcribe",
        "language": "en",
        "prompt": "names",
        "temperature": "0",
        "response_format": "json",
        "chunking_strategy": "auto",
        "timestamp_granularities[]": ["word", "segment"],
        "include[]": "logprobs",
        "languages[]": ["en", "de"],
        "keywords[]": ["Tickertape"],
        "known_speaker_names[]": ["A", "B"],
    }
    engine = FakeEngine()
    engine.takes(replace(MULTILINGUAL, keywords=500))
    async with serve(engine) as running, httpx.AsyncClient() as http:
        response = await http.post(
            f"{running.base_url}/audio/transcriptions", data=fields, files={"file": ("a.wav", wav(0.9), "audio/wav")}
        )
        assert response.json()["text"] == "w1 w2"
        assert [chance["token"] for chance in response.json()["logprobs"]] == ["w1", " w2"], (
            "together they are the text"
        )


async def test_models_say_what_ends_turns(serve: Serve) -> None:
    for has_detector, expected in ((False, ["silence", "text"]), (True, ["silence", "text", "learnt"])):
        engine = FakeEngine()
        engine.takes(replace(MULTILINGUAL, turn_detector=has_detector))
        async with serve(engine) as running, httpx.AsyncClient() as http:
            (model,) = (await http.get(f"{running.base_url}/models")).json()["data"]
            assert model["turn_detection"] == expected


async def test_unknown_paths_and_methods_answer_in_the_error_shape(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        for method, path, status in (
            ("POST", "/v1/realtime/calls", 415),
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/models/no-such-model", 404),
            ("GET", "/v1/audio/transcriptions", 405),
            ("DELETE", "/v1/models", 405),
        ):
            response = await http.request(method, running.http + path)
            assert response.status_code == status, path
            error_code(response)


async def test_client_secrets_check_their_body(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/realtime/client_secrets"
        for body in (
            {"expires_after": {"seconds": 5}},
            {"expires_after": {"seconds": 10_000}},
            {"expires_after": {"seconds": True}},
            {"expires_after": 60},
            {"session": {"audio": {"input": {"format": {"type": "audio/mp3"}}}}},
            {"session": "transcription"},
        ):
            assert (await http.post(url, json=body)).status_code == 400, body
        assert (await http.post(url, content=b"{nonsense")).status_code == 400
        for path in ("client_secrets", "transcription_sessions"):
            for wrong in (b"[]", b'"text"', b"1", b"null"):
                answer = await http.post(f"{running.base_url}/realtime/{path}", content=wrong)
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == "The body must be a JSON object."
        assert (await http.post(url, content=b"x" * 2_000_000)).status_code == 413
        made = (await http.post(url)).json()
        assert made["value"].startswith("ek_") and made["session"]["object"] == "realtime.transcription_session"


async def test_beta_sessions_endpoint_mints_a_secret(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running, httpx.AsyncClient() as http:
        headers = {"Authorization": "Bearer the-real-key"}
        url = f"{running.base_url}/realtime/transcription_sessions"
        assert (await http.post(url, json={})).status_code == 401
        made = (await http.post(url, json={"turn_detection": None}, headers=headers)).json()
        assert made["turn_detection"] is None and made["client_secret"]["value"].startswith("ek_")
        secret = {"Authorization": f"Bearer {made['client_secret']['value']}", "OpenAI-Beta": "realtime=v1"}
        async with raw_client(running.ws, additional_headers=secret) as client:
            created = await client.receive()
            assert created["type"] == "transcription_session.created" and created["session"]["turn_detection"] is None


@pytest.mark.parametrize("keys", [("the-real-key",), ()])
async def test_a_client_secret_opens_sockets_and_nothing_else(serve: Serve, keys: tuple[str, ...]) -> None:
    async with serve(auth={"keys": keys}) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/realtime/client_secrets"
        secret = (await http.post(url, headers={"Authorization": "Bearer the-real-key"})).json()["value"]
        headers = {"Authorization": f"Bearer {secret}"}
        file = {"file": ("a.wav", wav(0.2), "audio/wav")}
        for answer in (
            await http.post(url, headers=headers),
            await http.post(f"{running.base_url}/realtime/transcription_sessions", headers=headers),
            await http.post(f"{running.base_url}/audio/transcriptions", headers=headers, files=file),
            await http.post(f"{running.base_url}/audio/render", headers=headers, files=file),
            await http.post(f"{running.base_url}/audio/inject", headers=headers, json={"items": []}),
            await http.get(f"{running.base_url}/models", headers=headers),
        ):
            assert (answer.status_code, error_code(answer)) == (403, "client_secret_not_allowed"), answer.url
        async with greeted_client(running.ws, additional_headers=headers):
            pass
        async with raw_client(
            running.ws.replace("realtime", "listen?encoding=linear16"), additional_headers=headers
        ) as client:
            await client.send("CloseStream")
            assert (await client.receive())["type"] == "Metadata"


async def test_a_client_secret_goes_with_its_key(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key", "ek_the-other-key")}) as running, httpx.AsyncClient() as http:
        secrets = []
        for key in ("the-real-key", "ek_the-other-key"):
            url, headers = f"{running.base_url}/realtime/client_secrets", {"Authorization": f"Bearer {key}"}
            secrets.append((await http.post(url, headers=headers)).json()["value"])
        bearers = [{"Authorization": f"Bearer {secret}"} for secret in secrets]
        for bearer in bearers:
            async with greeted_client(running.ws, additional_headers=bearer):
                pass
        running.gateway.context.authenticator.use_keys(("ek_the-other-key",))
        with pytest.raises(InvalidStatus) as refused:
            async with greeted_client(running.ws, additional_headers=bearers[0]):
                pass
        assert refused.value.response.status_code == 401
        async with greeted_client(running.ws, additional_headers=bearers[1]):
            pass


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        ("GET http://127.0.0.1:8000/health HTTP/1.1", "127.0.0.1", b"200"),
        ("GET HTTP://localhost/v1/models?x=http://y/ HTTP/1.1", "127.0.0.1", b"200"),
        ("GET http://localhost HTTP/1.1", "127.0.0.1", b"200"),
        ("GET http://localhost?x HTTP/1.1", "127.0.0.1", b"200"),
        ("GET ws://localhost/v1/realtime HTTP/1.1", "127.0.0.1", b"426"),
        # The host of the target counts, for the check of names too.
        ("GET http://evil.example/capacity HTTP/1.1", "127.0.0.1", b"403"),
        ("GET http://127.0.0.1/capacity HTTP/1.1", "evil.example", b"200"),
        ("GET http://user@localhost/health HTTP/1.1", "127.0.0.1", b"404"),
        ("GET ftp://localhost/health HTTP/1.1", "127.0.0.1", b"404"),
    ],
)
async def test_a_whole_url_may_be_the_target_of_a_request(serve: Serve, line: str, host: str, status: bytes) -> None:
    async with serve() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(f"{line}\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
    assert answer.split(b" ", 2)[1] == status


async def test_a_socket_may_be_opened_with_a_whole_url(serve: Serve) -> None:
    async with serve() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        target = f"http://127.0.0.1:{running.port}/v1/realtime?intent=transcription"
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
        key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
        writer.write(f"GET {target} HTTP/1.1\r\nHost: other\r\n{upgrade}\r\n{key}\r\n\r\n".encode())
        async with asyncio.timeout(10):
            assert (await reader.readline()).split(b" ")[1] == b"101"
            await reader.readuntil(b"session.created")
        writer.close()


async def test_paths_without_v1_are_served_too(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        assert (await http.get(f"{running.http}/models")).status_code == 200
        async with greeted_client(running.ws.replace("/v1", "")):
            pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *extra], check=True, capture_output=True)
    return cert, key


async def test_tls_serves_https_and_wss(serve: Serve, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=str(cert))
    async with serve(server={"tls_cert": str(cert), "tls_key": str(key)}) as running:
        http = httpx.AsyncClient(verify=context)
        base_url = f"https://127.0.0.1:{running.port}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="x", http_client=http) as client:
            assert [model.id async for model in client.models.list()][0] == "fake-model"
            connecting = client.realtime.connect(
                extra_query={"intent": "transcription"}, websocket_connection_options={"ssl": context}
            )
            async with connecting as connection:
                await send_audio(connection, tone(1.0) + silence(0.8))
                async with asyncio.timeout(10):
                    while (event := await connection.recv()).type != COMPLETED:
                        pass
                assert event.transcript == "w1 w2"


async def test_body_of_a_refused_upgrade_is_json(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(
            b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 5)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"401" in head.splitlines()[0] and b"application/json" in head
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
        writer.close()


async def test_page_and_its_files_are_served_and_nothing_else_of_the_folder(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        page = await http.get(f"{running.http}/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        script = await http.get(f"{running.http}/app.js")
        assert script.status_code == 200 and "javascript" in script.headers["content-type"]
        for path in ("/../config.py", "/%2e%2e/config.py", "/web/app.js", "/app.js/x"):
            assert (await http.get(running.http + path)).status_code == 404


@pytest.mark.parametrize(
    ("served", "aliases", "listed"),
    [
        ("moonshine-base-streaming", ("mistralai/Voxtral-Mini-4B-Realtime-2602",), ["moonshine-base-streaming"]),
        ("moonshine-base-streaming", ("whisper-1", "openai/whisper-tiny"), ["moonshine-base-streaming", "whisper-1"]),
        (
            "Voxtral-Mini-4B-Realtime-2602",
            ("mistralai/Voxtral-Mini-4B-Realtime-2602",),
            ["Voxtral-Mini-4B-Realtime-2602", "mistralai/Voxtral-Mini-4B-Realtime-2602"],
        ),
    ],
)
async def test_an_alias_of_another_model_is_taken_and_not_listed(
    serve: Serve, served: str, aliases: tuple[str, ...], listed: list[str]
) -> None:
    engine = FakeEngine()
    engine.spec = replace(engine.spec, name=served)
    async with serve(engine, model={"aliases": aliases}) as running, httpx.AsyncClient() as http:
        models = (await http.get(f"{running.base_url}/models")).json()["data"]
        assert [model["id"] for model in models] == listed
        for name in aliases:
            assert (await http.get(f"{running.base_url}/models/{name}")).status_code == 200
            async with greeted_client(running.ws) as client:
                await client.send("session.update", model=name)
                assert (await client.receive())["type"] == "session.updated", "vLLM's clients may name it"


async def test_the_access_log_has_a_line_for_requests_and_sockets_without_their_query(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tickertape.access")
    async with serve(server={"access_log": True}) as running, httpx.AsyncClient(base_url=running.http) as client:
        await client.get("/v1/models?token=secret-in-a-query")
        await client.get("/nowhere%0A2026 forged")
        async with greeted_client(running.ws):
            pass
    # The server has ended, and with it every request.
    lines = [record for record in caplog.records if record.name == "tickertape.access"]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [(one["method"], one["status"]) for one in fields] == [("GET", 200), ("GET", 404), ("SOCKET", 101)]
    assert fields[0]["path"] == "/v1/models" and fields[0]["bytes"] > 10 and fields[0]["client"] == "127.0.0.1"
    assert fields[2]["path"] == "/v1/realtime" and fields[2]["close_code"] in (1000, 1005)
    assert not any("secret-in-a-query" in record.getMessage() for record in lines)


async def test_a_client_cannot_forge_a_line_or_a_field_of_the_access_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tickertape.access")
    async with serve(server={"access_log": True}) as running, httpx.AsyncClient(base_url=running.http) as client:
        forged = "/a%0A2026-01-01%20GET%20/admin%20200%20%E2%80%A8%1B%5B2J"
        await client.get(f"{forged}?token=secret-in-a-query")
        with pytest.raises(InvalidStatus):
            async with connect(f"ws://127.0.0.1:{running.port}{forged}?token=secret-in-a-query", proxy=None):
                pass
    scope = {"type": "http", "method": "GET", "path": "/b c", "client": ("1.2.3.4 GET /admin\x85" + "9" * 500, 1)}

    async def nothing(*_: object) -> None:
        pass

    await AccessLog(nothing, ServerConfig(access_log=True))(scope, nothing, nothing)  # type: ignore[arg-type]
    lines = [record for record in caplog.records if record.name == "tickertape.access"]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [one["path"] for one in fields] == [forged, forged, "/b%20c"]
    assert len(fields[2]["client"]) == 64 and fields[2]["client"].startswith("1.2.3.4%20GET%20%2Fadmin%C2%85999")
    for record in lines:
        text = record.getMessage()
        assert text.isascii() and text.isprintable() and "secret" not in text and len(text.split(" ")) == 8


async def test_there_is_no_access_log_unless_it_is_wanted(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tickertape.access")
    async with serve() as running, httpx.AsyncClient(base_url=running.http) as client:
        await client.get("/v1/models")
    assert not [record for record in caplog.records if record.name == "tickertape.access"]
