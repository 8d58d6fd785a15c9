"""Builds and runs a server: the engine client, the gateway with its routes, and uvicorn.

This is the composition root: no other file puts engine client, gateway and uvicorn together. `running_server` is a
whole server in one gateway process. With several workers its two halves run apart: `engine_for_workers` in the parent
process, `gateway_of_several` in each worker. `Server` is uvicorn's server, which also drains sessions before its
sockets close and applies a reloaded configuration.
"""

from __future__ import annotations

import asyncio
import email.utils
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec
import uvicorn
import uvicorn.server
from prometheus_client.core import Metric

from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import START_TIMEOUT_S, EngineHandle, EngineProcess, RemoteEngine
from engine.logs import set_log_level
from engine.options import DEFAULT_MODEL, EngineConfig
from realtime.config import Changes, Config, ModelConfig, check_tls, take_over
from realtime.http.descriptors import Descriptors, http_with_reserve
from realtime.http.routes import build_app
from realtime.http.websocket_routes import WebSocketRoutes
from realtime.listeners import listening_sockets, raise_file_limit
from realtime.serving.engine_api import EngineApi
from realtime.serving.fleet_publishing import FleetNames
from realtime.serving.metrics import (
    COUNTED_BY_EACH_GATEWAY,
    PROCESS_SUMS,
    Metrics,
    build_collector,
    engine_collector,
    name_collector,
    process_collector,
    report,
)
from realtime.serving.publishing import Publisher
from realtime.serving.quota import SessionQuota
from realtime.serving.session_factory import GatewayServices
from realtime.serving.signed_tokens import Signer, fleet_secret, signing_secret
from realtime.serving.uvicorn_protocols import HttpWithDeadlines, realtime_websocket
from realtime.text_values import http_date

log = logging.getLogger("tickertape")

# Interval at which a draining server checks whether it has to stop at once.
FORCE_POLL_S = 0.1
# Seconds to wait for an answer of a remote engine before the next attempt.
REMOTE_WAIT_S = 10.0


class Server(uvicorn.Server):
    """uvicorn's server, with a drain before the sockets are closed, and with reloading of the configuration."""

    def __init__(self, config: uvicorn.Config, gateway: WebSocketRoutes) -> None:
        super().__init__(config)
        self.gateway = gateway
        # Called with the configuration after each reload.
        self.on_reload: list[Callable[[Config], None]] = []
        self._listening = asyncio.Event()
        self.stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn listens without TLS: each connection begins it itself, after it was counted (`TlsHandshake`).
        context, self.config.ssl = self.config.ssl, None
        try:
            await super().startup(sockets)
        finally:
            self.config.ssl = context
        self._listening.set()

    async def wait_until_listening(self, task: asyncio.Task[None]) -> None:
        """Wait until the server listens. `task` runs the server; if it fails, its error is raised here."""
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait((listening, task), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if task.done():
            task.result()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Keep only the first captured signal.

        uvicorn raises captured signals again when it has stopped. A second one would interrupt the rest of the
        shutdown, such as stopping the engine.
        """
        with super().capture_signals():
            try:
                yield
            finally:
                del self._captured_signals[1:]

    def reload(self, new: Config) -> Changes:
        """Apply the reloadable keys of another configuration; no socket is closed. The certificate files in force are
        read again, because they may have been renewed. Raises ConfigError, with nothing changed."""
        config = self.gateway.config
        # Before any value changes: a certificate that cannot be used must not leave half of a reload in force.
        check_tls(config.server)
        changes = take_over(config, new)
        if self.config.ssl is not None and config.server.tls_cert is not None:
            self.config.ssl.load_cert_chain(config.server.tls_cert, config.server.tls_key)
        # uvicorn reads these values for every new connection.
        self.config.ws_max_size = config.limits.message_bytes
        self.config.ws_ping_interval = config.server.ping_interval_s or None
        self.config.ws_ping_timeout = config.server.dead_after_s or None
        cast(type[HttpWithDeadlines], self.config.http_protocol_class).handshake_s = config.server.handshake_s
        set_log_level(config.server.log_level)
        self.gateway.reloaded()
        for listener in self.on_reload:
            listener(config)
        return changes

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stopping.set()
        for server in self.servers:
            server.close()
        draining = asyncio.create_task(self._drain())
        # Polled, because the signal handler that sets `force_exit` wakes no task.
        while not draining.done() and not self.force_exit:
            await asyncio.wait((draining,), timeout=FORCE_POLL_S)
        if self.force_exit:
            draining.cancel()
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await asyncio.gather(draining, return_exceptions=True)
        if self.gateway.audience is not None:
            # After the drain, so that viewers get the last words.
            await self.gateway.audience.close()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # `super().shutdown` skips it in this case

    async def _drain(self) -> None:
        config = self.gateway.config
        await self.gateway.sessions.drain(config.server.drain_s)
        if self.gateway.webhooks is not None:
            # After the sessions: their last finals and their ends are delivered too.
            await self.gateway.webhooks.close(config.webhooks.drain_s)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is listening."""

    server: Server
    task: asyncio.Task[None]
    url: str
    # Done when the first engine is ready; None if the engine was running before.
    starting: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self.server.servers[0].sockets[0].getsockname()[1])

    async def wait_until_ready(self) -> bool:
        """Wait until an engine is ready or the server stops; returns whether it still runs. Raises EngineError if our
        own engine cannot start."""
        if self.starting is not None:
            await asyncio.wait((self.starting, self.task), return_when=asyncio.FIRST_COMPLETED)
            if self.starting.done():
                self.starting.result()
        return not self.task.done()

    async def wait_until_stopping(self) -> None:
        """Wait until the server begins to stop; turns may still finish after that."""
        stopping = asyncio.create_task(self.server.stopping.wait())
        await asyncio.wait((stopping, self.task), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        await self.task


def limit_http_dates() -> None:
    """Make uvicorn and websockets write Date headers for any time.

    Their own functions fail if the system's clock is set beyond the year 9999, and uvicorn's failure ends the server.
    """
    email.utils.formatdate = http_date
    uvicorn.server.formatdate = http_date  # type: ignore[attr-defined]


def build_server(engine: EngineApi, config: Config, services: GatewayServices | None = None) -> Server:
    """uvicorn's server with the gateway, ready to `serve()`. The engine may still be starting."""
    limit_http_dates()
    app = build_app(engine, config, services)
    app.state.api_docs.make()
    settings = config.server
    metrics = app.state.gateway.metrics
    descriptors = Descriptors(lambda: metrics.refused.labels("descriptors").inc())
    uvicorn_config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=http_with_reserve(settings.handshake_s, descriptors),
        ws=realtime_websocket(config.limits.control_bytes),
        ws_max_size=config.limits.message_bytes,
        ws_ping_interval=settings.ping_interval_s or None,
        ws_ping_timeout=settings.dead_after_s or None,
        # For audio in base64, compression costs more time than it saves.
        ws_per_message_deflate=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        # By default uvicorn trusts these headers from every client on this machine.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        # Request lines may contain tokens; the gateway has its own log lines without them.
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return Server(uvicorn_config, app.state.gateway)


def freeze_modules() -> None:
    """Exclude the loaded modules from garbage collection: they are never freed, and each collection would block the
    event loop for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@asynccontextmanager
async def listening(
    engine: EngineApi,
    config: Config,
    services: GatewayServices | None = None,
    sockets: list[socket.socket] | None = None,
) -> AsyncIterator[RunningServer]:
    """A listening gateway, which is stopped at the end; its engine is not, and may still be starting. Without
    `sockets` it opens its own, and raises OSError if it cannot."""
    if sockets is None:
        sockets = await asyncio.to_thread(listening_sockets, config.server.host, config.server.port)
    server = build_server(engine, config, services)
    task = asyncio.create_task(_serve(server, sockets), name="server")
    try:
        await server.wait_until_listening(task)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if config.server.tls_cert else "http"
        shown = f"[{host}]" if ":" in host else host
        yield RunningServer(server, task, f"{scheme}://{shown}:{port}")
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


async def _serve(server: Server, sockets: list[socket.socket]) -> None:
    try:
        await server.serve(sockets)
    except SystemExit as error:
        # In a task it would end the event loop, and leave the engine running.
        raise OSError("the server could not start; the log says why") from error


@asynccontextmanager
async def running_server(config: Config) -> AsyncIterator[RunningServer]:
    """A complete server in one process: our own engine or remote engines, the engine client, and a listening gateway.
    It listens before an engine is ready, and refuses sessions until then: see `RunningServer.wait_until_ready`.
    Raises OSError if it cannot listen; no engine has been started then."""
    raise_file_limit()
    metrics = Metrics()
    freeze_modules()
    engines: list[EngineHandle] = [RemoteEngine(address) for address in config.model.engines]
    if not config.engines_elsewhere:
        engines += _own_engines(config.model)
    client = EngineClient(engines, _client_settings(config))
    metrics.add_collector(engine_collector(client.metrics, client.capacity), COUNTED_BY_EACH_GATEWAY)
    metrics.add_collector(name_collector(config.gateway_name))
    metrics.add_collector(build_collector())
    metrics.add_collector(process_collector(), PROCESS_SUMS)
    # Before the engine starts: a process that took the port since it was checked costs no loaded model.
    sockets = await asyncio.to_thread(listening_sockets, config.server.host, config.server.port)
    starting = asyncio.create_task(_start(client), name="start of the engine")
    linking: asyncio.Task[None] | None = None
    stop_at_once = False
    try:
        services = GatewayServices(metrics, Signer(signing_secret(config)), client if config.in_fleet else None)
        names = FleetNames.of(config)
        if names is not None:
            services = replace(services, publisher=names.publisher(), link_signer=Signer(names.link_secret))
            linking = asyncio.create_task(names.run(str(config.fleet.table)), name="links to other gateways")
        async with listening(client, config, services, sockets) as server:
            server.server.gateway.sessions.hands_over = config.in_fleet
            server.server.on_reload.append(partial(_limit_engines, client))
            log.info("listening on %s", server.url)
            try:
                yield replace(server, starting=starting)
            finally:
                stop_at_once = server.server.force_exit
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if linking is not None:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)
        await client.close(stop_at_once)
        for listener in sockets:
            listener.close()


@dataclass(frozen=True, slots=True)
class EnginesForWorkers:
    """The engines that workers connect to."""

    addresses: list[str]
    # Done when the engine of this process is ready, or at once for remote engines.
    starting: asyncio.Task[None]
    # Reports the engines' counters since their start, which workers that connect later cannot know; None for remote
    # engines.
    counters: Callable[[], msgspec.Raw] | None = None


def _engine_counters(metrics: Iterable[Metric]) -> msgspec.Raw:
    own = {f"tickertape_{name}" for name in COUNTED_BY_EACH_GATEWAY}
    return report((metric, True) for metric in metrics if metric.type == "counter" and metric.name not in own)


@asynccontextmanager
async def engine_for_workers(config: Config) -> AsyncIterator[EnginesForWorkers]:
    """The engines for workers. If the engine is our own, this process starts it and restarts it."""
    raise_file_limit()
    if config.engines_elsewhere:
        yield EnginesForWorkers(list(config.model.engines), asyncio.create_task(asyncio.sleep(0)))
        return
    engines = _own_engines(config.model)
    client = EngineClient(engines, _client_settings(config))
    starting = asyncio.create_task(_start(client), name="start of the engine")
    try:
        collect = engine_collector(client.metrics, client.capacity)
        yield EnginesForWorkers([engine.address for engine in engines], starting, lambda: _engine_counters(collect()))
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await client.close()


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts of `GatewayServices` that the parent gives to a worker: they are the same in all workers, or ask the
    parent."""

    signer: Signer
    quota: SessionQuota
    publisher: Publisher
    link_signer: Signer


@asynccontextmanager
async def gateway_of_several(
    config: Config, engines: Sequence[str], shared: SharedParts, listener: socket.socket
) -> AsyncIterator[RunningServer]:
    """One of several gateways over the same engines, which can adopt each other's sessions."""
    metrics = Metrics()
    freeze_modules()
    # An engine that the parent starts has to load its model first.
    wait_s = REMOTE_WAIT_S if config.engines_elsewhere else START_TIMEOUT_S
    client = EngineClient([RemoteEngine(address, wait_s) for address in engines], _client_settings(config))
    metrics.add_collector(engine_collector(client.metrics, client.capacity), COUNTED_BY_EACH_GATEWAY)
    metrics.add_collector(name_collector(config.gateway_name))
    metrics.add_collector(build_collector())
    metrics.add_collector(process_collector(), PROCESS_SUMS)
    starting = asyncio.create_task(_start(client), name="start of the engine")
    try:
        services = GatewayServices(metrics, shared.signer, client, shared.quota, shared.publisher, shared.link_signer)
        async with listening(client, share_of(config), services, [listener]) as server:
            server.server.gateway.sessions.hands_over = config.in_fleet
            server.server.on_reload.append(partial(_limit_engines, client))
            yield replace(server, starting=starting)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await client.close()


def share_of(config: Config) -> Config:
    """The configuration of one of several gateways: limits that are not counted over all of them are divided."""
    limits, workers = config.limits, config.server.workers
    share = replace(
        limits,
        uploads=-(-limits.uploads // workers),
        uploads_waiting=-(-limits.uploads_waiting // workers),
        spool_bytes=limits.spool_bytes // workers,
        inject_bytes=limits.inject_bytes // workers,
        viewers=-(-limits.viewers // workers),
    )
    return replace(config, limits=share)


def _limit_engines(client: EngineClient, config: Config) -> None:
    client.set_limits(config.limits.max_load, config.limits.replay_s)


def _client_settings(config: Config) -> ClientSettings:
    return ClientSettings(
        spares=1 if config.model.spare else 0,
        cache_bytes=config.model.input_cache_bytes,
        keep_seconds=config.limits.replay_s,
        max_load=config.limits.max_load,
        table=config.fleet.table,
        fleet_secret=fleet_secret(config),
    )


async def _start(client: EngineClient) -> None:
    await client.start()
    await client.wait_until_ready()


def _own_engines(model: ModelConfig) -> list[EngineProcess]:
    return [EngineProcess(_engine_config(model)) for _ in range(2 if model.spare else 1)]


def _engine_config(model: ModelConfig) -> EngineConfig:
    config = EngineConfig.from_settings(DEFAULT_MODEL if model.name == "default" else model.name, model)
    return replace(config, share_of=2 if model.spare else 1)
