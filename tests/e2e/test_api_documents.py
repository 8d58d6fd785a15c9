"""The OpenAPI document and the JSON schema of events: they have every route, parameter, form field and error code of
the code, and what a running server answers is as they say."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from realtime.config import Config
from realtime.dialects import deepgram, deepgram_flux, event_schema
from realtime.http import upload_forms
from realtime.http.listen_route import PARAMETERS
from realtime.http.openapi import codes_of, document, operations, path_of
from realtime.http.routes import build_app, page_routes
from realtime.http.transcription_routes import UploadForm
from realtime.http.websocket_routes import FLUX_PARAMETERS, REALTIME_PARAMETERS, SOCKET_PARAMETERS
from tests.e2e.conftest import Running, Serve
from tests.e2e.event_checks import check_event
from tests.e2e.raw_client import COMPLETED, raw_client
from tests.e2e.test_deepgram_client import rest
from tests.e2e.test_openai_client import wav
from tests.media_streams import spoken, wav_bytes, web_server
from tests.realtime.gateway_doubles import MULTILINGUAL, FakeEngine, silence, tone
from tests.webrtc_client import caller

ROOT = Path(__file__).parents[2]
FILE = {"file": ("a.wav", wav(1.6), "audio/wav")}
FORMAT = json.dumps({"smart": True, "redact": ["numbers"], "search": ["w1"]})


@pytest.fixture(scope="module")
def routes() -> list[Any]:
    return list(build_app(FakeEngine(), Config()).routes)


@pytest.fixture(scope="module")
def strict(routes: list[Any]) -> dict[str, Any]:
    return document(routes, strict=True)


# The documents and the code


def test_the_document_has_every_route_and_no_other(routes: list[Any]) -> None:
    sockets = {path_of(route) for route in routes if isinstance(route, WebSocketRoute)}
    plain = [route for route in routes if isinstance(route, Route)]
    served = {(path_of(route), method.lower()) for route in plain for method in route.methods or () if method != "HEAD"}
    files = {(path_of(route), "get") for route in page_routes()}
    shown = {(path, method) for path, item in document(routes)["paths"].items() for method in item}
    assert shown == (served - files) | {(path, "get") for path in sockets}


def test_a_route_without_a_description_is_found(routes: list[Any]) -> None:
    async def forgotten(request: Request) -> Response:
        return Response()

    with pytest.raises(LookupError, match="POST /v1/forgotten is not described"):
        document([*routes, Route("/v1/forgotten", forgotten, methods=["POST"])])


def test_the_document_is_valid_openapi(routes: list[Any]) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    shown = document(routes)
    assert shown["openapi"].startswith("3.1")
    validator.validate(shown)


def calls(source: str, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names:
            yield node


def literal(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def test_every_error_code_of_the_code_is_in_the_document_and_the_other_way_round(routes: list[Any]) -> None:
    sources = [path.read_text() for path in (ROOT / "realtime").rglob("*.py")]
    raising = ("Refusal", "ClientFault", "_refusal", "_refuse", "_refused", "_check_allowed")
    raised = [[literal(argument) for argument in call.args] for text in sources for call in calls(text, *raising)]
    made = {(given[0], given[1]) for given in raised if len(given) > 1 and isinstance(given[0], int) and given[1]}
    # Answers to paths and methods that do not exist.
    made -= {(404, "not_found"), (405, "method_not_allowed")}
    shown = {
        (status, code)
        for operation in operations(routes).values()
        for status, codes in codes_of(operation).items()
        for code in codes
    }
    assert len(made) > 30 and made <= shown, made - shown
    written = {code for _, code in shown} - {upload_forms.GONE}
    known = {argument for given in raised for argument in given} | audio_codes()
    assert written <= known, written - known


def audio_codes() -> set[str]:
    """The codes of audio errors, which the document takes from their classes."""
    return set(re.findall(r'code = "(\w+)"', (ROOT / "audio/errors.py").read_text()))


def test_every_field_of_the_form_is_in_the_document() -> None:
    text = (ROOT / "realtime/http/file_transcription.py").read_text()
    read = {literal(call.args[1]) for call in calls(text, "_field", "_values", "_chosen")} - {None}
    shown = {field.encode_name.removesuffix("[]") for field in msgspec.structs.fields(UploadForm)}
    assert shown == read | {"file", "known_speaker_names", "known_speaker_references"}


def test_every_query_parameter_is_in_the_document() -> None:
    listen = {one.name: one.repeated for one in (*SOCKET_PARAMETERS, *PARAMETERS)}
    assert {name for name, repeated in listen.items() if not repeated} == set(deepgram.READ_ONCE)
    assert {one.name for one in FLUX_PARAMETERS if not one.repeated} == set(deepgram_flux.FLUX_READ_ONCE)
    first = (ROOT / "realtime/dialects/deepgram.py").read_text()
    flux = (ROOT / "realtime/dialects/deepgram_flux.py").read_text()
    named = re.compile(r'name == "(\w+)"')
    assert set(named.findall(first)) <= set(listen)
    # Flux names `redact` only to refuse it.
    assert set(named.findall(flux)) - {"redact"} <= {one.name for one in FLUX_PARAMETERS}
    text = (ROOT / "realtime/http/websocket_routes.py").read_text()
    read = set(re.findall(r'query(?:\.get\(|\[)"(\w+)"', text)) | set(re.findall(r'"(\w+)" in query', text))
    assert read - {"call_id"} == {one.name for one in REALTIME_PARAMETERS} - {"intent"}


# What a running server answers


class Checked:
    """A client that checks each response against the document, and notes which operations it has used."""

    def __init__(self, running: Running, shown: dict[str, Any]) -> None:
        self._http = httpx.AsyncClient(base_url=running.http, timeout=60)
        self._shown = shown
        self._paths = {path: re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))) for path in shown["paths"]}
        self.used: set[tuple[str, str]] = set()

    async def __aenter__(self) -> Checked:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def __call__(self, status: int, method: str, path: str, **options: Any) -> httpx.Response:
        answer = await self._http.request(method, path, **options)
        assert answer.status_code == status, answer.text
        (template,) = [one for one, pattern in self._paths.items() if pattern.fullmatch(path.partition("?")[0])]
        described = self._shown["paths"][template][method.lower()]["responses"][str(status)]
        media = answer.headers["content-type"].partition(";")[0]
        schema = described["content"][media]["schema"]
        if media == "application/json":
            errors = Draft202012Validator({**schema, "components": self._shown["components"]}).iter_errors(
                answer.json()
            )
            assert not [error.message for error in errors], (template, answer.text)
        if status >= 400 and "error" in answer.json():
            assert answer.json()["error"]["code"] in re.split(r"[:,; ]+", described["description"])
            assert status not in (429, 503) or "retry-after" in answer.headers
        if status >= 400 and "err_code" in answer.json():
            assert described["description"].endswith(f": {answer.json()['err_code']}")
        if status < 400:
            self.used.add((template, method.lower()))
        return answer


FORMS: list[dict[str, Any]] = [
    {"response_format": "json", "include[]": "logprobs"},
    {"response_format": "json", "format": FORMAT},
    {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"], "format": FORMAT},
    {"response_format": "verbose_json", "speakers": "true"},
    {"response_format": "diarized_json", "format": FORMAT},
    {"response_format": "text"},
    {"response_format": "srt"},
    {"response_format": "vtt"},
]
STREAMED: list[dict[str, Any]] = [
    {"timestamp_granularities[]": "word", "include[]": "logprobs", "format": FORMAT},
    {"model": "gpt-4o-transcribe-diarize"},
]


def engine_with_everything() -> FakeEngine:
    engine = FakeEngine()
    engine.takes(replace(MULTILINGUAL, keywords=500, speakers=True))
    return engine


async def test_answers_of_a_running_server_are_as_the_document_says(serve: Serve, strict: dict[str, Any]) -> None:
    hosts = {"stream_hosts": ("127.0.0.1",), "inject": True}
    async with (
        serve(engine_with_everything(), server=hosts) as running,
        Checked(running, strict) as ask,
        web_server() as web,
    ):
        for path in ("/health", "/ready", "/capacity", "/metrics", "/openapi.json", "/docs/api"):
            await ask(200, "GET", path)
        for prefix in ("/v1", ""):
            (model,) = (await ask(200, "GET", f"{prefix}/models")).json()["data"]
            await ask(200, "GET", f"{prefix}/models/{model['id']}")
            await ask(404, "GET", f"{prefix}/models/none")
            await ask(200, "POST", f"{prefix}/realtime/client_secrets", json={"expires_after": {"seconds": 60}})
            await ask(200, "POST", f"{prefix}/realtime/transcription_sessions")
            await ask(200, "POST", f"{prefix}/audio/transcriptions", files=FILE)
            await ask(200, "POST", f"{prefix}/audio/translations", files=FILE)
            await ask(200, "POST", f"{prefix}/audio/render?data=false", files=FILE)
            items = (await ask(200, "POST", f"{prefix}/audio/render", files=FILE)).json()["items"]
            await ask(200, "POST", f"{prefix}/audio/inject", json={"items": items[:1]})
        await ask(400, "POST", "/v1/realtime/client_secrets", content=b"{")
        await ask(400, "POST", "/v1/audio/inject", json={"items": [{"offset": 0}]})
        await ask(400, "POST", "/v1/audio/transcriptions", files={"file": ("a.wav", b"nothing", "audio/wav")})
        await ask(403, "GET", "/v1/models", headers={"Host": "evil.example"})
        await ask(403, "GET", "/v1/webhooks")
        for form in FORMS:
            await ask(200, "POST", "/v1/audio/transcriptions", files=FILE, data=form)
        for form in STREAMED:
            answer = await ask(200, "POST", "/v1/audio/transcriptions", files=FILE, data={**form, "stream": "true"})
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert len(events) > 2 and events.pop() == "[DONE]"
            for event in events:
                check_event("/v1/audio/", event)
        query = "smart_format=true&utterances=true&diarize=true&search=w1&paragraphs=true"
        await ask(200, "POST", f"/v1/listen?{query}", content=wav(1.6))
        await ask(400, "POST", "/v1/listen?callback=http://example.com", content=b"")
        for path in ("/v1/realtime", "/v1/listen", "/v2/listen", "/realtime"):
            await ask(426, "GET", path)
        await pulled_streams(ask, web.url("/a.wav"), web)
        await webrtc_calls(ask)
        await published_sessions(ask)
        schema = await ask_events(ask)
        assert schema["$defs"].keys() >= event_schema.UNIONS.keys()
    routes = running.server.config.app.routes  # type: ignore[union-attr]
    left = set(operations(routes)) - ask.used
    # A viewer's event stream does not end, and a segment is there seconds later; tests/e2e/test_viewers.py reads both.
    sockets = {(path_of(route), "get") for route in routes if isinstance(route, WebSocketRoute)}
    # Webhooks are answered by a server with keys: tests/e2e/test_webhooks.py.
    trickling = {(f"{path}/{{id}}", "patch") for path in ("/v1/whip", "/v1/realtime/calls", "/realtime/calls")}
    elsewhere = {("/v1/sessions/{name}/captions/{number}.vtt", "get"), ("/v1/webhooks", "get")}
    # A server without trickle ICE always answers 405.
    assert left == sockets | elsewhere | trickling


async def webrtc_calls(ask: Checked) -> None:
    sdp = {"Content-Type": "application/sdp"}
    async with caller() as client:
        offer = await client.offer()
    for path in ("/v1/whip", "/v1/realtime/calls", "/realtime/calls"):
        await ask(400, "POST", path, content=b"no offer", headers=sdp)
        place = (await ask(201, "POST", path, content=offer, headers=sdp)).headers["location"]
        await ask(405, "PATCH", place)
        await ask(200, "DELETE", place)
        await ask(404, "DELETE", f"{path}/none")
        if path != "/v1/whip":
            form = {"sdp": (None, offer), "session": (None, "{}")}
            place = (await ask(201, "POST", path, files=form)).headers["location"]
            await ask(200, "POST", f"{place}/hangup")


async def ask_events(ask: Checked) -> dict[str, Any]:
    answer = await ask(200, "GET", "/events.schema.json")
    return dict(answer.json())


async def pulled_streams(ask: Checked, url: str, web: Any) -> None:
    web.pages["/a.wav"] = wav_bytes(spoken(2.0))
    stream = (await ask(201, "POST", "/v1/streams", json={"url": url})).json()
    await ask(200, "GET", "/v1/streams")
    await ask(200, "GET", f"/v1/streams/{stream['id']}")
    # The stream ends with the file, and its events with it.
    answer = await ask(200, "GET", f"/v1/streams/{stream['id']}/events")
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert {json.loads(event)["type"] for event in events} >= {"stream.session", "stream.status", COMPLETED}
    for event in events:
        check_event("/v1/streams/", event)
    await ask(400, "POST", "/v1/streams", json={"url": "http://example.com/a.wav"})
    await ask(200, "DELETE", f"/v1/streams/{stream['id']}")
    await ask(404, "GET", f"/v1/streams/{stream['id']}")


async def published_sessions(ask: Checked) -> None:
    link = (await ask(200, "POST", "/v1/sessions/talk/links", json={"expires_after": {"seconds": 60}})).json()
    await ask(200, "GET", "/v1/sessions/talk/captions.m3u8")
    await ask(404, "GET", "/v1/sessions/talk/captions/999999999999.vtt")
    await ask(400, "POST", "/v1/sessions/-/links")
    await ask(200, "DELETE", f"/v1/sessions/talk/links/{link['id']}")
    await ask(401, "GET", f"/v1/sessions/talk/captions.m3u8?token={link['token']}")
    await ask(200, "DELETE", "/v1/sessions/talk/links")


async def test_the_page_names_every_path_and_loads_nothing(serve: Serve, routes: list[Any]) -> None:
    async with serve() as running, httpx.AsyncClient(base_url=running.http) as http:
        answer = await http.get("/docs/api")
    assert all(f"<code>{path}</code>" in answer.text for path in document(routes)["paths"])
    assert not re.search(r"<script|<link|src=|@import|url\(", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


# Events against the published schema


def test_a_field_that_is_not_described_is_found() -> None:
    check_event("/v1/realtime", '{"type": "input_audio_buffer.cleared", "event_id": "e"}')
    for wrong in ('"event_id": "e", "new": 1', '"event_id": 1', ""):
        with pytest.raises(AssertionError, match="is not as"):
            check_event("/v1/realtime", f'{{"type": "input_audio_buffer.cleared"{", " * bool(wrong)}{wrong}}}')


async def test_events_of_sessions_fit_the_published_schema(serve: Serve) -> None:
    """Sessions of all dialects, with everything that a client can ask for; also what the client sends."""
    shown = event_schema.schema()
    Draft202012Validator.check_schema(shown)
    seen: dict[str, list[Any]] = {}
    rate = 16_000
    turn = tone(1.3, rate) + silence(1.0, rate)
    session = {
        "type": "transcription",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": rate},
                "transcription": {"language": "de", "keywords": ["Tape"], "format": json.loads(FORMAT)},
                "turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000},
            }
        },
        "include": list(event_schema.INCLUDED),
        "publish": "talk",
    }
    update = {"type": "session.update", "session": session}
    async with serve(engine_with_everything()) as running:
        async with raw_client(running.ws) as client:
            await client.socket.send(json.dumps(update))
            await client.append(turn)
            events = await client.until(COMPLETED)
            await client.send("input_audio_buffer.gap", duration_ms=10_000)
            events += await client.until("input_audio_buffer.timeout_triggered")
            await client.send("input_audio_buffer.clear")
            await client.send("nonsense")
            events += await client.until("error")
            seen["OpenAIServerEvent"] = events
        root = running.http.replace("http", "ws", 1)
        query = "encoding=linear16&sample_rate=16000&interim_results=true&vad_events=true&smart_format=true&search=w1"
        async with raw_client(f"{root}/v1/listen?{query}&diarize=true") as client:
            await client.socket.send(turn)
            await client.send("Configure", keyterms=["a"])
            await client.send("CloseStream")
            seen["DeepgramServerMessage"] = (await rest(client))[0]
        async with raw_client(
            f"{root}/v2/listen?encoding=linear16&sample_rate=16000&eager_eot_threshold=0.3"
        ) as client:
            await client.send("Configure", thresholds={"eot_timeout_ms": 700})
            await client.socket.send(turn)
            await client.send("CloseStream")
            seen["FluxServerMessage"] = (await rest(client))[0]
    seen["OpenAIClientEvent"] = [update, {"type": "input_audio_buffer.append", "audio": "AAAA", "event_id": "e"}]
    kinds = {event["type"] for event in seen["OpenAIServerEvent"]}
    assert kinds >= {"session.created", "session.updated", COMPLETED, "input_audio_buffer.acknowledged", "error"}
    assert {message["type"] for message in seen["DeepgramServerMessage"]} >= {"Results", "Metadata", "SpeechStarted"}
    assert {message["type"] for message in seen["FluxServerMessage"]} >= {"Connected", "TurnInfo", "ConfigureSuccess"}
    for name, events in seen.items():
        validator = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": shown["$defs"]})
        for event in events:
            assert validator.is_valid(event), (name, event)
        assert not validator.is_valid({"type": "nothing"}), "the schema must be able to fail"
