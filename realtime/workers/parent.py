"""The parent process of several workers: starts them, restarts those that die, and replaces all of them on request.

`tickertape serve` runs a `Parent` if there is more than one worker; `workers_for` chooses how many. The parent reserves
the port, on which the workers listen. It owns the state that workers share: the count of all sessions, the sums of
their metrics, and the names of published sessions. The same process starts and restarts the engine
(`engine_for_workers` in `realtime/app.py`). It serves no clients itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.logs import set_log_level
from realtime.config import Changes, Config, check_tls, take_over
from realtime.listeners import cannot_listen
from realtime.serving.fleet_publishing import FleetNames
from realtime.serving.metrics import Totals
from realtime.serving.publishing import Coordinator, ToCoordinator
from realtime.serving.signed_tokens import signing_secret
from realtime.workers.worker_link import (
    Enter,
    Leave,
    MetricsReport,
    OwnFigures,
    QuotaCoordinator,
    Ready,
    Reload,
    Retire,
    Scrape,
    ScrapeAnswer,
    Start,
    WorkerConnection,
    encode_config,
)

# About half of the live streams that one gateway process can serve on one core: the rest is for bursts.
STREAMS_PER_WORKER = 150
# Expected streams of an engine on an accelerator, if no limit is configured.
STREAMS_OF_AN_ENGINE = 600
# One core for the engine's thread, and one for everything else.
CORES_FOR_OTHERS = 2


def workers_for(config: Config, cores: int | None = None, has_gpu: bool | None = None) -> int:
    """The configured number of workers; else one per `STREAMS_PER_WORKER` expected streams, limited by the cores."""
    if config.server.workers:
        return config.server.workers
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    has_gpu = Path("/dev/nvidiactl").exists() if has_gpu is None else has_gpu
    model = config.model
    if not config.engines_elsewhere and (model.name == "default" or model.device == "cpu" or not has_gpu):
        return 1  # an engine on these cores fills them before one worker is full
    expected = config.limits.max_sessions or model.max_streams or STREAMS_OF_AN_ENGINE * max(1, len(model.engines))
    return max(1, min(-(-expected // STREAMS_PER_WORKER), cores - CORES_FOR_OTHERS))


log = logging.getLogger("tickertape.workers")

# Seconds before a worker that died is started again; doubles with each death.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0
# When a worker has run this many seconds, the backoff starts again at `FIRST_BACKOFF_S`.
STABLE_AFTER_S = 10.0
STOP_POLL_S = 0.05
# Seconds to read the remaining messages of a worker that has ended.
LAST_MESSAGES_S = 1.0
# The parent's number in `Totals`; workers are numbered from 1.
PARENT = 0


class WorkerFailed(Exception):
    """A worker cannot be started, or ended before it was ready."""


class Worker:
    """A worker process, with the connection to it."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, connection: WorkerConnection) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.receiving: asyncio.Task[None] | None = None

    async def wait_until_ready(self) -> None:
        """Wait until the worker is ready. Raises WorkerFailed if it ends before that."""
        ended = asyncio.create_task(self._end())
        await asyncio.wait((ended, self.ready), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not self.ready.done():
            status = self.process.returncode
            raise WorkerFailed(f"a worker ended with status {status} before it was ready; see its log lines above")

    async def _end(self) -> None:
        await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Parent:
    """Starts, supervises and replaces the workers.

    `engines` are addresses of running engines. `engine_counters` reports their counters, if this process has been
    connected to them from their start.
    """

    def __init__(
        self,
        config: Config,
        workers: int,
        engines: Sequence[str],
        reserved: socket.socket,
        engine_counters: Callable[[], msgspec.Raw] | None = None,
    ) -> None:
        self.config = config
        self.port = int(reserved.getsockname()[1])
        self.workers: dict[int, Worker] = {}
        self.stopping = asyncio.Event()
        self._wanted = workers
        self._engines = list(engines)
        self._secret = signing_secret(config) or secrets.token_bytes(32)
        self._quota = QuotaCoordinator(config.limits, asyncio.get_running_loop().time)
        self._names = FleetNames.of(config)
        self.coordinator = self._names or Coordinator(config.session.resume_s)
        self._link_secret = secrets.token_bytes(32) if self._names is None else self._names.link_secret
        self._linking: asyncio.Task[None] | None = None
        self._numbers = 0
        self._supervisors: set[asyncio.Task[None]] = set()
        self._retiring: set[int] = set()
        self._restarting: asyncio.Task[None] | None = None
        self._engine_counters = engine_counters
        self.totals = Totals()

    async def start(self) -> None:
        """Start all workers; returns when they listen and have an engine. Raises an ExceptionGroup of WorkerFailed."""
        if self._names is not None:
            run = self._names.run(str(self.config.fleet.table))
            self._linking = asyncio.create_task(run, name="links to other gateways")
        workers = [await self._spawn() for _ in range(self._wanted)]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.wait_until_ready())
        for worker in workers:
            self._supervise(worker)

    def restart(self) -> asyncio.Task[None]:
        """Rolling restart: replace all workers one by one; the other workers adopt their sessions."""
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._replace_all(), name="rolling restart")
        return self._restarting

    def reload(self, new: Config) -> Changes:
        """Apply another configuration here and in all workers, without closing a socket. Raises ConfigError, with
        nothing changed."""
        # As each worker does, so that all processes refuse a certificate that cannot be used.
        check_tls(self.config.server)
        changes = take_over(self.config, new)
        set_log_level(self.config.server.log_level)
        encoded = encode_config(self.config)
        for worker in self.workers.values():
            worker.connection.send(Reload(encoded))
        return changes

    async def stop(self, force: Callable[[], bool]) -> None:
        """Stop all workers and let their turns finish; when `force` returns True they are killed."""
        self.stopping.set()
        terminated: set[int] = set()
        # Tasks that are starting a worker finish that first, and then notice the stop.
        while self.workers or self._supervisors or not (self._restarting is None or self._restarting.done()):
            for worker in list(self.workers.values()):
                if worker.process.returncode is not None:
                    await self._forget(worker)
                elif force():
                    worker.signal(signal.SIGKILL)
                elif worker.number not in terminated:
                    terminated.add(worker.number)
                    worker.signal(signal.SIGTERM)
            await asyncio.sleep(STOP_POLL_S)
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.gather(self._linking, return_exceptions=True)

    async def _spawn(self) -> Worker:
        """Start a worker. Raises WorkerFailed if the system has no process, memory or descriptor for it."""
        try:
            process, connection = await self._start_process()
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or "out of memory"
            text = f"a worker cannot be started: {reason}; raise the limits for processes, memory and open files"
            raise WorkerFailed(text) from error
        self._numbers += 1
        worker = Worker(self._numbers, process, connection)
        self.workers[worker.number] = worker
        self._quota.add(worker.number, worker.connection)
        config = encode_config(self.config)
        worker.connection.send(Start(config, self._secret, self._engines, self.port, self._link_secret))
        self.coordinator.add(worker.number, worker.connection.send)
        worker.receiving = asyncio.create_task(self._receive(worker), name=f"worker {worker.number}")
        return worker

    async def _start_process(self) -> tuple[asyncio.subprocess.Process, WorkerConnection]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "realtime.workers.worker", str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C must reach only the parent.
                    start_new_session=True,
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        return process, await WorkerConnection.from_socket(ours)

    async def _spawn_again(self) -> Worker | None:
        """Start a worker, and retry until the system can start it; None if the server stops."""
        backoff, is_logged = FIRST_BACKOFF_S, False
        while True:
            try:
                return await self._spawn()
            except WorkerFailed as error:
                if not is_logged:
                    log.error("%s; the parent keeps trying", error)
                is_logged = True
            if await self._stops_within(backoff):
                return None
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
            return True
        return False

    async def _receive(self, worker: Worker) -> None:
        """Handle the messages of a worker until its connection ends or a message fails. Then the worker must stop, and
        is replaced."""
        try:
            async for message in worker.connection:
                self._handle(worker, message)
        except Exception:
            log.exception("a message of worker %d could not be handled; the worker is replaced", worker.number)
        finally:
            worker.connection.send(Retire())
            worker.connection.close()

    def _handle(self, worker: Worker, message: Any) -> None:
        if isinstance(message, Ready):
            if not worker.ready.done():
                worker.ready.set_result(None)
        elif isinstance(message, Enter | Leave | OwnFigures):
            self._quota.on_message(worker.number, message)
        elif isinstance(message, ToCoordinator):
            self.coordinator.on_message(worker.number, message)
        elif isinstance(message, MetricsReport | Scrape):
            self.totals.add_report(worker.number, message.report)
            if isinstance(message, Scrape):
                worker.connection.send(ScrapeAnswer(message.number, self._exposition()))

    def _exposition(self) -> str:
        if self._engine_counters is not None:
            self.totals.add_report(PARENT, self._engine_counters())
        return self.totals.exposition().decode()

    def _supervise(self, worker: Worker) -> None:
        task = asyncio.create_task(self._replace_when_it_dies(worker), name=f"supervisor of worker {worker.number}")
        self._supervisors.add(task)
        task.add_done_callback(self._supervisors.discard)

    async def _replace_when_it_dies(self, worker: Worker) -> None:
        clock = asyncio.get_running_loop().time
        backoff, began = 0.0, clock()
        while True:
            status = await worker.process.wait()
            await self._forget(worker)
            if self.stopping.is_set() or worker.number in self._retiring:
                self._retiring.discard(worker.number)
                return
            log.error(
                "worker %d ended with status %d; its clients can resume at the other workers", worker.number, status
            )
            longer = min(2 * backoff, MAX_BACKOFF_S)
            backoff = FIRST_BACKOFF_S if clock() - began >= STABLE_AFTER_S else max(longer, FIRST_BACKOFF_S)
            if await self._stops_within(backoff):
                return
            successor = await self._spawn_again()
            if successor is None:
                return
            worker, began = successor, clock()

    async def _forget(self, worker: Worker) -> None:
        """Remove a worker that has ended; its last metrics stay in the totals."""
        self.workers.pop(worker.number, None)
        if worker.receiving is not None:
            await asyncio.wait((worker.receiving,), timeout=LAST_MESSAGES_S)
        self._quota.remove(worker.number)
        self.coordinator.remove(worker.number)
        self.totals.forget(worker.number)
        worker.connection.close()

    async def _replace_all(self) -> None:
        for old in list(self.workers.values()):
            if self.stopping.is_set():
                return
            if old.process.returncode is not None:
                continue  # it died meanwhile, and its supervisor starts another one
            new = None
            try:
                new = await self._spawn()
                await new.wait_until_ready()
            except WorkerFailed as error:
                log.error("the rolling restart was stopped: %s; worker %d stays", error, old.number)
                if new is not None:
                    await self._forget(new)
                return
            self._supervise(new)
            # If the old one died while the new one started, its supervisor starts another one too: stop the new one.
            surplus = old if old.process.returncode is None else new
            self._retiring.add(surplus.number)
            surplus.connection.send(Retire())
            await surplus.process.wait()
            log.info("worker %d has replaced worker %d", new.number, old.number)


@asynccontextmanager
async def reserved_port(host: str, port: int) -> AsyncIterator[socket.socket]:
    """Reserve a port for the workers without listening on it. Raises OSError with a sentence if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as reservation:
        try:
            # First without SO_REUSEPORT, which fails if any other process listens there, even another server of ours.
            with socket.create_server((host, port), family=family) as probe:
                port = probe.getsockname()[1]
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.bind((host, port))
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        yield reservation
