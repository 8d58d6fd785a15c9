"""Composition root: the only file that builds objects of all packages, and the server around them."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from realtime.config import Config
from realtime.engine_face import EngineClient
from realtime.metrics import Metrics
from realtime.protocols import RealtimeWebSocket, patient_http
from realtime.server import Gateway, build_app

log = logging.getLogger("tickertape")


class Server(uvicorn.Server):
    """uvicorn that lets running turns finish before it closes their sockets."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._gateway.sessions.drain(self._gateway.config.server.drain_s)
        await super().shutdown(sockets)


def build_server(engine: EngineClient, config: Config, metrics: Metrics | None = None) -> Server:
    """The gateway over a running engine, ready to `serve()`."""
    app = build_app(engine, config, metrics)
    settings = config.server
    uvicorn_config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=patient_http(settings.handshake_s),
        ws=RealtimeWebSocket,
        ws_max_size=config.limits.message_bytes,
        ws_ping_interval=settings.ping_interval_s or None,
        ws_ping_timeout=settings.dead_after_s or None,
        # Compression costs more time than it saves on audio in base64.
        ws_per_message_deflate=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        # Request lines may carry tokens; the gateway logs what matters without them.
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return Server(uvicorn_config, app.state.gateway)


async def serve(engine: EngineClient, config: Config, metrics: Metrics | None = None) -> None:
    """Serve until the process is told to stop."""
    server = build_server(engine, config, metrics)
    scheme = "https" if config.server.tls_cert else "http"
    log.info("listening on %s://%s:%d", scheme, config.server.host, config.server.port)
    await server.serve()
    await asyncio.sleep(0)
