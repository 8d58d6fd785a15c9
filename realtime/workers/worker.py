"""The worker process: one of several gateways that listen on the same port.

    python -m realtime.workers.worker FD

The parent starts it, and sends it the configuration, the secrets and the engines' addresses over the socket FD. The
worker asks the parent to admit sessions, reports its metrics to it, and stops when the parent is gone. The gateway
itself is built by `gateway_of_several` in `realtime/app.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

import uvloop
from prometheus_client.core import Metric

from engine.logs import WITH_PROCESS, set_log_level, set_up_logging
from realtime.app import Server, SharedParts, gateway_of_several, share_of
from realtime.config import Config, ConfigError
from realtime.serving.metrics import report
from realtime.serving.publishing import FromCoordinator, Publisher
from realtime.serving.signed_tokens import Signer
from realtime.workers.worker_link import (
    EnterAnswer,
    MetricsReport,
    OtherFigures,
    Ready,
    Reload,
    Retire,
    Scrape,
    ScrapeAnswer,
    SharedQuota,
    Start,
    WorkerConnection,
    decode_config,
)

log = logging.getLogger("tickertape.worker")

# Interval of reports. If a worker is killed, its counts since the last report are lost.
REPORT_S = 0.25
# Timeout for an answer of the parent.
ANSWER_S = 5.0


def port_socket(host: str, port: int) -> socket.socket:
    """A listening socket on the port that all workers share; the kernel distributes connections among them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=True, backlog=2048)


class SharedMetrics:
    """Reports this worker's metrics to the parent, and asks the parent for the sums over all workers.

    `families` returns the worker's metrics. The flag of each is True if every worker reports the same value, so that
    the parent does not add them up.
    """

    def __init__(self, connection: WorkerConnection, families: Callable[[], Iterable[tuple[Metric, bool]]]) -> None:
        self._connection = connection
        self._families = families
        # Requests for the metrics of all workers, by number.
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    async def run(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(REPORT_S)

    def report(self) -> None:
        self._connection.send(MetricsReport(report(self._families())))

    async def of_all(self) -> bytes:
        """The metrics of all workers as Prometheus text, with the current ones of this worker. Raises TimeoutError."""
        self._number = number = self._number + 1
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        self._connection.send(Scrape(number, report(self._families())))
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        finally:
            del self._asked[number]

    def on_message(self, message: ScrapeAnswer) -> None:
        """Handle an answer of the parent."""
        if message.number in self._asked and not self._asked[message.number].done():
            self._asked[message.number].set_result(message.text.encode())


async def work(parent_socket: socket.socket) -> None:
    """Serve until the parent ends or tells this worker to stop; `parent_socket` is the socket to the parent."""
    connection = await WorkerConnection.from_socket(parent_socket)
    messages = aiter(connection)
    start = await anext(messages)
    assert isinstance(start, Start), "the parent's first message is Start"
    config = decode_config(start.config)
    set_log_level(config.server.log_level)
    quota = SharedQuota(connection, asyncio.get_running_loop().time)
    listener = port_socket(config.server.host, start.port)
    publisher, link_signer = Publisher(connection.send), Signer(start.link_secret)
    shared_parts = SharedParts(Signer(start.secret), quota, publisher, link_signer)
    async with gateway_of_several(config, start.engines, shared_parts, listener) as server:
        gateway = server.server.gateway
        shared = SharedMetrics(connection, gateway.metrics.families)
        gateway.metrics.of_all = shared.of_all

        def handle(message: Any) -> None:
            if isinstance(message, Retire):
                gateway.sessions.hands_over = True
                server.server.should_exit = True
            elif isinstance(message, EnterAnswer | OtherFigures):
                quota.on_message(message)
            elif isinstance(message, ScrapeAnswer):
                shared.on_message(message)
            elif isinstance(message, FromCoordinator):
                publisher.on_message(message)
            elif isinstance(message, Reload):
                _reload(server.server, share_of(decode_config(message.config)))

        async def receive() -> None:
            try:
                async for message in messages:
                    handle(message)
                log.warning("the connection to the parent process has ended; this worker stops")
            except Exception:
                log.exception("a message of the parent process could not be handled; this worker stops and is replaced")
                gateway.sessions.hands_over = True
            # Without this connection a worker cannot admit sessions, and the parent cannot stop it.
            server.server.should_exit = True

        receiving = asyncio.create_task(receive(), name="messages of the parent")
        reporting = asyncio.create_task(shared.run(), name="metrics for the parent")
        try:
            if await server.wait_until_ready():
                connection.send(Ready())
                await server.wait()
        finally:
            receiving.cancel()
            reporting.cancel()
    # The last report, after all sockets were closed.
    shared.report()
    await connection.drain()
    connection.close()


def _reload(server: Server, config: Config) -> None:
    """Apply a configuration, which the parent has checked and logged."""
    try:
        server.reload(config)
    except (ConfigError, OSError) as error:
        log.error("this worker could not apply the new configuration: %s", error)


def main() -> None:
    set_up_logging(WITH_PROCESS)
    # Reload and restart signals are for the parent, which sends messages to its workers.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent_socket = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(parent_socket.fileno(), False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(parent_socket))


if __name__ == "__main__":
    main()
