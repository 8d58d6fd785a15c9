"""Which headers decide a client's address, behind a proxy and without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from realtime.config import ConfigError, load_config
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client, raw_client
from tests.waiting import until

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


class IdleProxy:
    """Passes bytes on, and cuts a connection on which nothing was sent for some seconds, in either direction."""

    def __init__(self, server_port: int, idle_s: float) -> None:
        self._server_port, self._idle_s = server_port, idle_s
        self.port = 0
        # Pieces that came from the server, and connections that were cut.
        self.pieces = 0
        self.cut = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[IdleProxy]:
        async with await asyncio.start_server(self._pass_on, "127.0.0.1", 0) as listening:
            self.port = listening.sockets[0].getsockname()[1]
            yield self

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._idle_s) as idle:

                async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                    while data := await source.read(65536):
                        idle.reschedule(loop.time() + self._idle_s)
                        self.pieces += source is from_server
                        sink.write(data)
                    sink.close()

                await asyncio.gather(copy(reader, to_server), copy(from_server, writer))
        except TimeoutError:
            self.cut += 1
        finally:
            for end in (writer, to_server):
                with suppress(OSError):
                    end.transport.abort()


async def test_a_proxy_that_cuts_idle_sockets_cuts_no_silent_session(serve: Serve) -> None:
    """60 s in practice, where the server pings every 20 s."""
    async with (
        serve(server={"ping_interval_s": 0.25}) as running,
        IdleProxy(running.port, idle_s=3.0).running() as proxy,
        greeted_client(f"ws://127.0.0.1:{proxy.port}/v1/realtime") as client,
    ):
        # The client says nothing for longer than the proxy waits.
        began = proxy.pieces
        await until(lambda: proxy.pieces >= began + 4 * 5, 30)
        await client.send("input_audio_buffer.clear")
        assert (await client.receive())["type"] == "input_audio_buffer.cleared"
        assert proxy.cut == 0


async def test_without_pings_such_a_proxy_breaks_the_connection_and_a_session_can_be_resumed(serve: Serve) -> None:
    async with (
        serve(server={"ping_interval_s": 60.0}) as running,
        IdleProxy(running.port, idle_s=0.5).running() as proxy,
    ):
        url = f"ws://127.0.0.1:{proxy.port}/v1/realtime"
        async with greeted_client(url, ping_interval=None) as client:
            token = (await client.update(include=["session.resume"]))["resume"]["token"]
            await until(lambda: proxy.cut == 1, 30)
            await client.socket.wait_closed()
            assert client.socket.close_code == 1006
        async with raw_client(f"{running.ws}?resume={token}&after=0") as again:
            assert (await again.receive())["type"] == "session.resumed"
