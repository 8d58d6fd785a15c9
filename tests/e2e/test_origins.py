"""Pages of other websites, at real sockets: without keys a server is for its own page and for programs."""

from __future__ import annotations

import asyncio
import json
import re
import socket as sockets
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from realtime.config import ConfigError, load_config
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client
from tests.e2e.test_openai_client import wav

FOREIGN = "https://example.org"
# Refusals, each with the setting that it names.
NO_ORIGIN, NO_HOST = (403, "server.allowed_origins"), (403, "server.allowed_hosts")
# Every route with effects or information, and the page.
ROUTES = [
    ("GET", "/capacity"), ("GET", "/metrics"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"),
    ("GET", "/models/fake-model"), ("GET", "/"), ("GET", "/app.js"), ("GET", "/nowhere"),
    ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/audio/translations"), ("POST", "/v1/audio/render"),
    ("POST", "/v1/audio/inject"), ("POST", "/v1/realtime/client_secrets"), ("POST", "/v1/listen"),
    ("POST", "/v1/realtime/transcription_sessions"), ("OPTIONS", "/v1/audio/transcriptions"),
]  # fmt: skip
SOCKETS = ["/v1/realtime", "/realtime", "/v1/listen?encoding=linear16&sample_rate=16000"]


async def upgrade(port: int, path: str, host: str, origin: str | None) -> tuple[int, str]:
    """The status of an upgrade with exactly these headers, and the setting that its refusal names."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        told = f"Origin: {origin}\r\n" if origin is not None else ""
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{told}Upgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
        status = int(head.split()[1])
        return status, "" if status == 101 else setting_in(await asyncio.wait_for(reader.read(), 10))
    finally:
        writer.close()


async def request(port: int, method: str, path: str, host: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.request(method, f"http://127.0.0.1:{port}{path}", headers={"Host": host, **headers})


def setting_in(body: bytes) -> str:
    """What a refusal tells to change. Deepgram's clients read another shape than all others."""
    told = json.loads(body)
    found = re.findall(r"server\.\w+", told.get("err_msg") or told["error"]["message"])
    return found[0] if found else ""


async def test_without_keys_no_page_of_another_origin_gets_anything(serve: Serve) -> None:
    async with serve() as running:
        host = f"127.0.0.1:{running.port}"
        for origin in (FOREIGN, f"http://127.0.0.1:{running.port + 1}", f"http://localhost:{running.port}", "null", ""):
            for path in SOCKETS:
                assert await upgrade(running.port, path, host, origin) == NO_ORIGIN, (
                    path,
                    origin,
                )
            for method, path in ROUTES:
                answer = await request(running.port, method, path, host, Origin=origin)
                assert (answer.status_code, setting_in(answer.content)) == NO_ORIGIN, (
                    path,
                    origin,
                )
                assert "access-control-allow-origin" not in answer.headers
        assert not len(running.gateway.sessions)
        assert running.metric("refused_total", reason="origin") > 50


async def test_without_keys_only_names_of_this_machine_are_answered(serve: Serve) -> None:
    """A website may have its own name lead here; to the browser the server is then a part of that website."""
    async with serve() as running:
        for name in (
            "example.org",
            "localhost.example.org",
            "127.0.0.1.example.org",
            "8.8.8.8",
            "0.0.0.0",
            "x",
            "[::2]",
            "[::1].example.org",
        ):
            host = f"{name}:{running.port}"
            for path in SOCKETS:
                for origin in (f"http://{host}", None):
                    assert await upgrade(running.port, path, host, origin) == NO_HOST, (
                        path,
                        name,
                    )
            for method, path in ROUTES:
                answer = await request(running.port, method, path, host, Origin=f"http://{host}")
                assert (answer.status_code, setting_in(answer.content)) == NO_HOST, (path, name)
        assert running.metric("refused_total", reason="host") > 50


async def test_the_own_page_and_programs_work_as_before(serve: Serve) -> None:
    async with serve() as running:
        for name in ("127.0.0.1", "localhost", "LocalHost", "localhost.", "captions.localhost", "127.1.2.3", "[::1]"):
            host = f"{name}:{running.port}"
            # A TLS proxy before the server changes the scheme and nothing else.
            for origin in (None, f"http://{host.lower()}", f"https://{host.lower()}"):
                for path in SOCKETS:
                    assert await upgrade(running.port, path, host, origin) == (101, ""), (path, host, origin)
                headers = {} if origin is None else {"Origin": origin}
                assert (await request(running.port, "GET", "/capacity", host, **headers)).status_code == 200
        # Behind a forwarded port, and on the usual one, names go without the server's own port.
        assert await upgrade(running.port, SOCKETS[0], "localhost", "http://localhost") == (101, "")
        assert await upgrade(running.port, SOCKETS[0], "localhost:80", "http://localhost") == (101, "")
        async with greeted_client(running.ws), httpx.AsyncClient() as http:
            file = {"file": ("a.wav", wav(0.2), "audio/wav")}
            assert (await http.post(f"{running.base_url}/audio/transcriptions", files=file)).status_code == 200


async def test_a_request_without_a_host_is_no_browsers(serve: Serve) -> None:
    async with serve() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in (await asyncio.wait_for(reader.read(), 10)).split(b"\r\n")[0]
        writer.close()


async def preflight(running: Any, origin: str) -> httpx.Response:
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    host = f"127.0.0.1:{running.port}"
    return await request(running.port, "OPTIONS", "/v1/audio/transcriptions", host, Origin=origin, **headers)


@pytest.mark.parametrize("keys", [(), ("the-real-key",)], ids=["without keys", "with keys"])
async def test_listed_origins_may_use_the_server_and_others_may_not(serve: Serve, keys: tuple[str, ...]) -> None:
    headers = {"Authorization": "Bearer the-real-key"}
    settings = {"allowed_origins": (FOREIGN, "null")}
    async with serve(server=settings, auth={"keys": keys}) as running:
        for origin in (FOREIGN, "null"):
            async with greeted_client(running.ws, origin=origin, additional_headers=headers):
                pass
            answer = await preflight(running, origin)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
            answer = await request(running.port, "GET", "/v1/models", "127.0.0.1", Origin=origin, **headers)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
        for origin in (
            "http://example.org",
            "https://example.org:8443",
            "https://sub.example.org",
            "https://other.org",
        ):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(running.ws, origin=origin, additional_headers=headers):  # type: ignore[arg-type]
                    pass
            assert refused.value.response.status_code == 403
            assert (await preflight(running, origin)).status_code == 403


async def test_with_keys_any_page_that_has_one_may_ask_unless_origins_are_listed(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        headers = {"Authorization": "Bearer the-real-key"}
        answer = await preflight(running, FOREIGN)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        answer = await request(running.port, "GET", "/v1/models", "example.org", Origin=FOREIGN, **headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        async with greeted_client(running.ws, origin=FOREIGN, additional_headers=headers):
            pass
        assert (await request(running.port, "GET", "/v1/models", "example.org", Origin=FOREIGN)).status_code == 401


async def test_everything_can_be_allowed_without_keys(serve: Serve) -> None:
    async with serve(server={"allowed_origins": ("*",), "allowed_hosts": ("*",)}) as running:
        assert await upgrade(running.port, SOCKETS[0], "example.net", FOREIGN) == (101, "")
        answer = await request(running.port, "GET", "/capacity", "example.net", Origin=FOREIGN)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


async def test_names_can_be_allowed_without_keys(serve: Serve) -> None:
    async with serve(server={"allowed_hosts": ("Captions.Example.org",)}) as running:
        origin = "https://captions.example.org"
        assert await upgrade(running.port, SOCKETS[0], "captions.example.org", origin) == (101, "")
        assert await upgrade(running.port, SOCKETS[0], "captions.example.org:8443", f"{origin}:8443") == (101, "")
        assert (await upgrade(running.port, SOCKETS[0], "captions.example.org", FOREIGN))[0] == 403
        assert (await upgrade(running.port, SOCKETS[0], "other.example.org", "https://other.example.org"))[0] == 403


async def test_without_keys_on_all_addresses_the_machine_is_asked_by_address_or_by_its_name(serve: Serve) -> None:
    """An address leads nowhere else, so no website can have one as its name."""
    own = sockets.gethostname()
    async with serve(server={"host": "0.0.0.0"}, auth={"no_auth": True}) as running:
        for name in ("192.168.1.5", "10.1.2.3", "[fe80::1]", "127.0.0.1", "localhost", own, f"{own}.local"):
            host = f"{name}:{running.port}"
            assert await upgrade(running.port, SOCKETS[0], host, None) == (101, ""), name
            assert await upgrade(running.port, SOCKETS[0], host, f"http://{host}".lower()) == (101, ""), name
            assert (await upgrade(running.port, SOCKETS[0], host, FOREIGN))[0] == 403
        rebound = f"example.org:{running.port}"
        assert await upgrade(running.port, SOCKETS[0], rebound, f"http://{rebound}") == NO_HOST


async def test_keys_that_come_and_go_change_who_is_asked_for_an_origin(serve: Serve) -> None:
    async with serve(auth={"keys": ("the-real-key",)}) as running:
        headers = {"Authorization": "Bearer the-real-key"}
        async with greeted_client(running.ws, origin=FOREIGN, additional_headers=headers):
            pass
        running.gateway.context.authenticator.use_keys(())
        assert (await upgrade(running.port, SOCKETS[0], f"127.0.0.1:{running.port}", FOREIGN))[0] == 403


async def test_pages_may_read_answers_when_the_first_key_has_come(serve: Serve) -> None:
    asking = {"Origin": FOREIGN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "api-key"}
    async with serve() as running, httpx.AsyncClient(base_url=running.http) as http:
        assert (await http.options("/v1/models", headers=asking)).status_code == 403
        running.gateway.context.authenticator.use_keys(("the-real-key",))
        assert (await http.options("/v1/models", headers=asking)).status_code == 200
        answer = await http.get("/v1/models", headers={"Origin": FOREIGN, "api-key": "the-real-key"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        running.gateway.context.authenticator.use_keys(())
        assert (await http.get("/v1/models", headers={"Origin": FOREIGN})).status_code == 403


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("server.allowed_origins", "https://example.org/"),
        ("server.allowed_origins", "https://example.org/page"),
        ("server.allowed_origins", "example.org"),
        ("server.allowed_origins", "https://*.example.org"),
        ("server.allowed_origins", "https://user@example.org"),
        ("server.allowed_origins", "https://example.org:443"),
        ("server.allowed_origins", "http://example.org:80"),
        ("server.allowed_hosts", "https://example.org"),
        ("server.allowed_hosts", "example.org:8000"),
        ("server.allowed_hosts", "example.org/"),
        ("server.allowed_hosts", "*.example.org"),
    ],
)
def test_an_origin_or_a_name_that_would_never_match_is_refused(key: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(environment={}, flags={key: wrong})
    assert load_config(environment={}, flags={"server.allowed_origins": "*, null, file://, http://[::1]:8080, app://x"})
    assert load_config(environment={}, flags={"server.allowed_hosts": "*, example.org, ::1, 10.0.0.1, box"})


@pytest.mark.parametrize("path", ["/health", "/v1/listen", "/v1/sessions/x/events"])
async def test_query_of_thousands_of_parameters_is_refused_before_it_is_parsed(serve: Serve, path: str) -> None:
    async with serve() as running:
        many = await request(running.port, "GET", f"{path}?{'a&' * 7_900}", "localhost")
        assert (many.status_code, "more than 600 parameters" in many.text) == (400, True)
        assert (await upgrade(running.port, f"/v1/realtime?{'a&' * 600}", "localhost", None))[0] == 400
        assert (await request(running.port, "GET", f"/health?{'a=b&' * 500}", "localhost")).status_code == 200
