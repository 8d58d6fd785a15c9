"""Which headers decide a client's address, behind a proxy and without one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from realtime.config import ConfigError, load_config
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client

ONE_EACH: dict[str, Any] = {"limits": {"sessions_per_key": 1}}


async def admitted(url: str, forwarded: list[str]) -> int:
    """How many sockets with these values of X-Forwarded-For can be open at once."""
    async with AsyncExitStack() as sockets:
        count = 0
        for said in forwarded:
            headers = {"X-Forwarded-For": said, "X-Forwarded-Proto": "https", "Forwarded": f"for={said}"}
            try:
                await sockets.enter_async_context(greeted_client(url, additional_headers=headers))
                count += 1
            except InvalidStatus as refused:
                assert refused.response.status_code == 429
        return count


async def test_forwarded_headers_of_a_client_are_not_believed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    # uvicorn's own variable is not ours.
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with serve(**ONE_EACH) as running:
        assert await admitted(running.ws, [f"10.0.0.{number}" for number in range(20)]) == 1


@pytest.mark.parametrize("proxy", ["127.0.0.1", "127.0.0.0/8"])
async def test_a_trusted_proxy_says_where_its_clients_come_from(serve: Serve, proxy: str) -> None:
    async with serve(**ONE_EACH, server={"trusted_proxies": (proxy,)}) as running:
        assert await admitted(running.ws, ["10.0.0.1", "10.0.0.2"]) == 2
        # What the client itself wrote stands before what the proxy added.
        assert await admitted(running.ws, [f"10.9.9.{number}, 10.0.0.3" for number in range(5)]) == 1


async def test_others_than_the_trusted_proxies_are_not_believed(serve: Serve) -> None:
    async with serve(**ONE_EACH, server={"trusted_proxies": ("10.0.0.0/8", "::1")}) as running:
        assert await admitted(running.ws, ["10.0.0.1", "10.0.0.2"]) == 1


@pytest.mark.parametrize("wrong", ["*", "proxy.example.org", "10.0.0.1/8", "10.0.0.0/40", "127.0.0.1:80"])
def test_a_proxy_that_is_no_address_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.trusted_proxies.*" + wrong.replace("*", r"\*")):
        load_config(environment={}, flags={"server.trusted_proxies": f"127.0.0.1,{wrong}"})
