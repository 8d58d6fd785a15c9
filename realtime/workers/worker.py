"""One gateway process of several: `python -m realtime.workers.worker FD`, started by the parent.

It listens on the server's port beside the others, uses the engine that the parent started, and ends with the parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import uvloop

from engine.logs import WITH_PROCESS, set_log_level, set_up_logging
from realtime.app import Server, gateway_of_several, share_of
from realtime.config import Config, ConfigError
from realtime.workers.shared_metrics import SharedMetrics
from realtime.workers.shared_quota import SharedQuota
from realtime.workers.worker_link import Entered, Line, Others, Ready, Reload, Retire, Scraped, Start, decode_config

log = logging.getLogger("tickertape.worker")


def port_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on a port which others of ours listen on too; the system spreads connections over them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=True, backlog=2048)


async def work(end: socket.socket) -> None:
    line = await Line.over(end)
    messages = aiter(line)
    start = await anext(messages)
    assert isinstance(start, Start), "a parent says first what to do"
    config = decode_config(start.config)
    set_log_level(config.server.log_level)
    quota = SharedQuota(line, asyncio.get_running_loop().time)
    listener = port_socket(config.server.host, start.port)
    async with gateway_of_several(config, start.engines, start.secret, quota, listener) as server:
        gateway = server.server.gateway
        shared = SharedMetrics(line, gateway.metrics.families)
        gateway.metrics.of_all = shared.of_all

        async def hear() -> None:
            async for message in messages:
                if isinstance(message, Retire):
                    gateway.sessions.hands_over = True
                    server.server.should_exit = True
                elif isinstance(message, Entered | Others):
                    quota.hear(message)
                elif isinstance(message, Scraped):
                    shared.hear(message)
                elif isinstance(message, Reload):
                    _reload(server.server, share_of(decode_config(message.config)))
            log.warning("the parent is gone; stopping")
            server.server.should_exit = True

        hearing = asyncio.create_task(hear(), name="what the parent says")
        reporting = asyncio.create_task(shared.run(), name="metrics for the parent")
        try:
            if await server.wait_until_ready():
                line.send(Ready())
                await server.wait()
        finally:
            hearing.cancel()
            reporting.cancel()
    # All sockets are closed and counted.
    shared.tell()
    await line.drain()
    line.close()


def _reload(server: Server, config: Config) -> None:
    """The parent has checked and logged it."""
    try:
        server.reload(config)
    except (ConfigError, OSError) as error:
        log.error("this worker did not take over the configuration: %s", error)


def main() -> None:
    set_up_logging(WITH_PROCESS)
    # The parent is told, and tells its workers.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(end))


if __name__ == "__main__":
    main()
