"""`tickertape serve`: checks the configuration and runs the server: the gateway, its workers, and an engine process.

With workers this process is their parent; with `--engine` engines run elsewhere and none is started. Gateway and engine
are built in `realtime/app.py`.

- `Readiness` tells systemd (Type=notify) or a file descriptor when the server is ready and when it stops.
- `SignalHandlers` handles SIGHUP (reload the configuration) and SIGUSR2 (reload it and replace the workers);
  `Reloading` does the reload.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.logs import set_up_logging
from realtime.commands.pull import fetch_for_serving, is_here, model_name
from realtime.commands.terminal import CommandFailed, UsageError, announce, integer, note, read_config
from realtime.config import Changes, Config, ConfigError, check_tls, known_keys, shown
from realtime.listeners import listening_sockets, raise_file_limit

# systemd's socket for Type=notify.
SOCKET_VARIABLE = "NOTIFY_SOCKET"


class Readiness:
    """Sends READY when the server takes sessions, and STOPPING when it takes no more. Errors are only noted."""

    def __init__(self, ready_fd: int | None = None) -> None:
        if ready_fd is not None:
            _check_writable(ready_fd)
        self._ready_fd = ready_fd
        # Removed from the environment, because the engine process must not notify systemd.
        self._address = os.environ.pop(SOCKET_VARIABLE, "")

    def ready(self, url: str) -> None:
        self._notify(f"READY=1\nSTATUS=listening on {url}\n")
        if self._ready_fd is None:
            return
        try:
            os.write(self._ready_fd, f"{url}\n".encode())
        except OSError as error:
            note(f"cannot write to file descriptor {self._ready_fd}: {error.strerror}")
        os.close(self._ready_fd)
        self._ready_fd = None

    def stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=running turns may finish\n")

    def _notify(self, text: str) -> None:
        if not self._address:
            return
        # A name that begins with @ is in the abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
                notifier.connect(address)
                notifier.sendall(text.encode())
        except OSError as error:
            note(f"cannot notify {self._address}: {error.strerror or error}")


def _check_writable(fd: int) -> None:
    """Raise UsageError if the descriptor is not writable; checked before the model is loaded."""
    try:
        os.write(fd, b"")
        os.set_inheritable(fd, False)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no such descriptor"
        raise UsageError(f"--ready-fd {fd}: {reason}; open it for writing, as in `--ready-fd 3 3>file`") from error


log = logging.getLogger("tickertape")


class Reloading:
    """Reads the configuration again from the same sources, and applies it to the server.

    `apply` raises ConfigError if the new values contradict keys that need a restart. `restart` replaces the workers;
    None for a server without workers.
    """

    def __init__(
        self,
        read: Callable[[], Config],
        apply: Callable[[Config], Changes],
        restart: Callable[[], object] | None = None,
    ) -> None:
        self._read = read
        self._apply = apply
        self._restart = restart
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, with_restart: bool = False) -> None:
        task = asyncio.create_task(self.run(with_restart), name="reload")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, with_restart: bool = False) -> None:
        if with_restart and self._restart is None:
            log.warning("SIGUSR2 replaces workers, but this server has none: restart it, or send SIGHUP to reload")
            return
        async with self._lock:
            await self._run(with_restart)

    async def _run(self, with_restart: bool) -> None:
        try:
            # On a thread, because the disk may be slow.
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


class SignalHandlers:
    """Handles SIGHUP and SIGUSR2 from the start of the command, because by default they end the process.

    A terminal that is closed sends SIGHUP too; the server then stops as with Ctrl-C.
    """

    def __init__(self) -> None:
        self._has_terminal = os.isatty(0)
        self._reloading: Reloading | None = None
        for number in (signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, lambda number, _: self._on_signal(number))

    def reload(self, reloading: Reloading) -> None:
        """Reload this server on a signal from now on; called in its event loop."""
        self._reloading = reloading
        for number in (signal.SIGHUP, signal.SIGUSR2):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._has_terminal and not os.isatty(0):
            signal.raise_signal(signal.SIGINT)
        elif self._reloading is None:
            note("the server is still starting; there is nothing to reload yet")
        else:
            self._reloading.begin(number == signal.SIGUSR2)


EPILOG = """\
Examples:
  tickertape serve                                     for this machine only, at http://127.0.0.1:8000
  tickertape serve --model whisper-base.en --port 9000
  tickertape serve --config tickertape.toml            every key is explained in docs/tickertape.toml
  TICKERTAPE_AUTH_KEYS=a-long-secret tickertape serve --host 0.0.0.0
  tickertape serve --engine tcp://gpu1:5555,tcp://gpu2:5555    engines started with `tickertape engine`

Every key of the configuration is also a flag (--limits.max-sessions 100) and an environment variable
(TICKERTAPE_LIMITS_MAX_SESSIONS=100). Flags override the environment, which overrides the file.
The first start downloads the model. Ctrl-C lets running turns finish, then stops; twice stops at once.
SIGHUP reloads the configuration: keys, limits and the log level change, and no socket is closed. SIGUSR2 also replaces
the workers one by one.
systemd is notified when the server is ready and when it stops (Type=notify); other programs can read --ready-fd.
"""

# Short flags of frequently used keys, with their help.
SHORT_FLAGS = {
    "--host": ("server.host", "address to listen on; addresses that other machines can reach need keys or --no-auth"),
    "--port": ("server.port", "port to listen on"),
    "--workers": ("server.workers", "gateway processes (default: chosen by the engine and the number of cores)"),
    "--model": ("model.name", "a name from `tickertape models`, or a path to a checkpoint"),
    "--device": ("model.device", "auto, cpu, cuda, or cuda:1 for the second GPU"),
    "--max-streams": ("model.max_streams", "most streams at once (default: as many as the machine can serve)"),
    "--threads": ("model.threads", "CPU threads of the model (default: chosen by the model)"),
    "--engine": ("model.engines", "addresses of running engines, separated by commas"),
    "--engine-table": (
        "fleet.table",
        "a JSON file that lists the engines; changes of the file are applied",
    ),
    "--fleet-secret-file": ("fleet.secret_file", "a file with the secret that engines and gateways of a fleet share"),
}


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="start the server",
        description="Start the server: WebSockets, uploads, metrics and the web page on one port.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_options(parser, known_keys())
    parser.add_argument(
        "--no-auth",
        dest="flag:auth.no_auth",
        action="store_const",
        const=True,
        help="serve without keys on an address that other machines can reach",
    )
    parser.add_argument(
        "--ready-fd", type=integer, metavar="N", help="write the URL to this file descriptor when the server is ready"
    )
    parser.set_defaults(run=run)


def add_config_options(parser: argparse.ArgumentParser, keys: Collection[str], about: str | None = None) -> None:
    """Add flags for these keys of the configuration. The help shows the long names with the text `about`; without it
    they are hidden."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file with the configuration")
    for flag, (key, meaning) in SHORT_FLAGS.items():
        if key in keys:
            parser.add_argument(flag, dest=f"flag:{key}", metavar=flag.removeprefix("--").upper(), help=meaning)
    for key in keys:
        flag = f"--{key.replace('_', '-')}"
        parser.add_argument(flag, dest=f"flag:{key}", metavar="VALUE", help=about or argparse.SUPPRESS)


def config_of(options: argparse.Namespace) -> Config:
    """The configuration by file, environment and flags. Raises ConfigError."""
    given = {
        name.removeprefix("flag:"): value
        for name, value in vars(options).items()
        if name.startswith("flag:") and value is not None
    }
    return read_config(options.config, given)


def run(options: argparse.Namespace) -> int:
    config = config_of(options)
    readiness = Readiness(options.ready_fd)
    check_tls(config.server)
    check_fleet_secret(config)
    check_spool()
    check_threads()
    check_port(config.server.host, config.server.port)
    signals = SignalHandlers()
    set_up_logging(level=config.server.log_level, log_format=config.server.log_format)
    if not config.engines_elsewhere:
        name = model_name(config.model.name)
        # The engine inherits the limit.
        raise_file_limit()
        if is_here(name):
            from engine.client.fork_server import start_fork_server

            # The fork server imports torch, which takes seconds; meanwhile this process checks the model.
            start_fork_server()
        fetch_for_serving(name)

    import uvloop

    from realtime.workers.parent import workers_for

    stop_by_terminate()

    def read_again() -> Config:
        if options.config is not None and Path(options.config).exists() and not Path(options.config).is_file():
            # A pipe that was read is empty, and an empty configuration has no keys.
            raise ConfigError(
                f"{shown(options.config)} is not a regular file and cannot be read again; restart the server"
            )
        again = config_of(options)
        check_tls(again.server)
        return again

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            workers = workers_for(config)
            if workers > 1:
                runner.run(_serve_workers(config, workers, readiness, read_again, signals))
            else:
                runner.run(_serve(config, readiness, read_again, signals))
    except KeyboardInterrupt:
        note("stopped")
    return 0


def check_fleet_secret(config: Config) -> bytes | None:
    """The fleet's secret, if there is one. Raises CommandFailed if it cannot be used."""
    # Imported here, because `--help` and `--version` must work without the packages of the server.
    from realtime.serving.signed_tokens import fleet_secret

    try:
        return fleet_secret(config)
    except ConfigError as error:
        raise CommandFailed(str(error)) from error


def check_spool() -> None:
    """Raise CommandFailed if the folder for uploads (`TMPDIR`) cannot be used.

    Without this check Python would silently choose another folder, which may be smaller or in memory.
    """
    import tempfile

    folder = next((value for name in ("TMPDIR", "TEMP", "TMP") if (value := os.environ.get(name))), None)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        where = repr(folder) if folder else "the folder for temporary files"
        text = f"uploads are stored in {where}, where no file can be created: {error.strerror}"
        raise CommandFailed(f"{text}; create the folder for the server's user, or set TMPDIR to another one") from error


# Threads and processes that a small server needs at least.
MIN_THREADS = 24


def check_threads() -> None:
    """Raise CommandFailed if the user's limit on processes is too low for the server's threads and processes.

    Without this check ZeroMQ would abort the process when it cannot start its threads.
    """
    started: list[threading.Thread] = []
    finished = threading.Event()
    try:
        for _ in range(MIN_THREADS):
            thread = threading.Thread(target=finished.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        text = f"only {len(started)} of at least {MIN_THREADS} threads and processes can be started"
        raise CommandFailed(f"{text}; raise the limit of the server's user on processes (ulimit -u)") from error
    finally:
        finished.set()
        for thread in started:
            thread.join()


def check_port(host: str, port: int) -> None:
    """Raise CommandFailed if the port cannot be used; checked before the model is loaded."""
    try:
        for listener in listening_sockets(host, port):
            listener.close()
    except OSError as error:
        raise CommandFailed(str(error)) from error


async def _serve(
    config: Config, readiness: Readiness, read_again: Callable[[], Config], signals: SignalHandlers
) -> None:
    from realtime.app import running_server

    addresses = ", ".join(config.model.engines) or config.fleet.table and f"those in {config.fleet.table}"
    async with running_server(config) as server:
        signals.reload(Reloading(read_again, server.server.reload))
        note(f"waiting for an engine at {addresses}" if addresses else "starting the engine")
        if not await server.wait_until_ready():
            return
        announce(f"the page:    {server.url}/")
        announce(f"the socket:  {server.url.replace('http', 'ws', 1)}/v1/realtime")
        announce("Ctrl-C stops the server.")
        readiness.ready(server.url)
        await server.wait_until_stopping()
        readiness.stopping()
        await server.wait()


async def _serve_workers(
    config: Config, workers: int, readiness: Readiness, read_again: Callable[[], Config], signals: SignalHandlers
) -> None:
    from engine.errors import EngineError
    from realtime.app import engine_for_workers
    from realtime.workers.parent import Parent, WorkerFailed, reserved_port

    config = _with_workers(config, workers)
    stop = _Stop()
    server = config.server
    async with reserved_port(server.host, server.port) as port, engine_for_workers(config) as engines:
        parent = Parent(config, workers, engines.addresses, port, engines.counters)
        starting = engines.starting
        signals.reload(Reloading(lambda: _with_workers(read_again(), workers), parent.reload, parent.restart))
        note(f"starting {workers} workers" + ("" if config.engines_elsewhere else " and the engine"))
        ready = asyncio.create_task(parent.start())
        try:
            await asyncio.wait({ready, starting, stop.task}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not stop.task.done():
                starting.result()
                await asyncio.wait({ready, stop.task}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                host = f"[{server.host}]" if ":" in server.host else server.host
                url = f"{'https' if server.tls_cert else 'http'}://{host}:{parent.port}"
                announce(f"the page:    {url}/")
                announce(f"the socket:  {url.replace('http', 'ws', 1)}/v1/realtime")
                announce(f"{workers} workers. SIGUSR2 replaces them one by one; Ctrl-C stops the server.")
                readiness.ready(url)
                await stop.task
                readiness.stopping()
        except (EngineError, WorkerFailed) as error:
            raise CommandFailed(str(error)) from error
        except ExceptionGroup as group:
            raise CommandFailed(str(group.exceptions[0])) from group
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
            await parent.stop(lambda: stop.twice)


def _with_workers(config: Config, workers: int) -> Config:
    """The configuration with this number of workers, if it has none."""
    chosen = config.server.workers or workers
    return replace(config, server=replace(config.server, workers=chosen))


class _Stop:
    """Ctrl-C and SIGTERM: the first lets turns finish, the second stops at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._requested = asyncio.Event()
        self.twice = False
        self.task = asyncio.create_task(self._requested.wait())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.twice = self._requested.is_set()
        self._requested.set()


def stop_by_terminate() -> None:
    """Make SIGTERM work like Ctrl-C: turns finish first, then the engine is stopped too."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
