"""SIGHUP and SIGUSR2 of `tickertape serve`: read the configuration again, and replace the workers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from realtime.commands.terminal import note
from realtime.config import Changes, Config, ConfigError

log = logging.getLogger("tickertape")


class Reloading:
    """Reads the configuration from where it was read at the start, and gives it to the server.

    `apply` raises ConfigError for one that cannot be used beside what stays as it is. `restart` replaces the workers;
    None for a server without any.
    """

    def __init__(
        self, read: Callable[[], Config], apply: Callable[[Config], Changes], restart: Callable[[], None] | None = None
    ) -> None:
        self._read = read
        self._apply = apply
        self._restart = restart
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, with_restart: bool = False) -> None:
        task = asyncio.create_task(self.run(with_restart), name="reload")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def run(self, with_restart: bool = False) -> None:
        if with_restart and self._restart is None:
            log.warning("SIGUSR2 replaces workers, and this server has none: restart it, or send SIGHUP to reload")
            return
        async with self._one_at_a_time:
            await self._run(with_restart)

    async def _run(self, with_restart: bool) -> None:
        try:
            # Files may be on a disk that takes its time.
            changes = self._apply(await asyncio.to_thread(self._read))
        except (ConfigError, OSError) as error:
            log.error(
                "the configuration was not reloaded, and the old one stays in force: %s", " ".join(str(error).split())
            )
            return
        level = logging.WARNING if changes.need_restart else logging.INFO
        log.log(level, "the configuration was reloaded: %s", changes)
        if with_restart and self._restart is not None:
            self._restart()


class Hangup:
    """What SIGHUP and SIGUSR2 do, from the first moment of the command: the default would end the process.

    A terminal that is closed sends SIGHUP too. Nobody can press Ctrl-C there any more, so the server stops as by that.
    """

    def __init__(self) -> None:
        self._has_terminal = os.isatty(0)
        self._reloading: Reloading | None = None
        for number in (signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, lambda number, _: self._heard(number))

    def reload(self, reloading: Reloading) -> None:
        """From now on there is a server that can be reloaded; called inside its event loop."""
        self._reloading = reloading
        for number in (signal.SIGHUP, signal.SIGUSR2):
            asyncio.get_running_loop().add_signal_handler(number, self._heard, number)

    def _heard(self, number: int) -> None:
        if number == signal.SIGHUP and self._has_terminal and not os.isatty(0):
            signal.raise_signal(signal.SIGINT)
        elif self._reloading is None:
            note("the server has not begun: there is nothing to reload yet")
        else:
            self._reloading.begin(number == signal.SIGUSR2)
