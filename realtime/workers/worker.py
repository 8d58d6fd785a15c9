"""A worker, one gateway process of several: `python -m realtime.workers.worker FD`, started by the parent.

It listens on the same port as the other workers, uses the parent's engine, and ends when the parent ends.
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
    """A listening socket on the port that all workers share; the kernel distributes connections among them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=True, backlog=2048)


async def work(end: socket.socket) -> None:
    """Serve until the parent ends or tells this worker to stop; `end` is the socket to the parent."""
    line = await Line.over(end)
    messages = aiter(line)
    start = await anext(messages)
    assert isinstance(start, Start), "the parent's first message is Start"
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
                    quota.on_message(message)
                elif isinstance(message, Scraped):
                    shared.on_message(message)
                elif isinstance(message, Reload):
                    _reload(server.server, share_of(decode_config(message.config)))
            log.warning("the parent process has ended; this worker stops")
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
    # The last report, after all sockets were closed.
    shared.report()
    await line.drain()
    line.close()


def _reload(server: Server, config: Config) -> None:
    """Apply a configuration, which the parent has checked and logged."""
    try:
        server.reload(config)
    except (ConfigError, OSError) as error:
        log.error("this worker could not apply the new configuration: %s", error)


def main() -> None:
    set_up_logging(WITH_PROCESS)
    # Reload and restart signals are for the parent, which tells its workers.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(end))


if __name__ == "__main__":
    main()
