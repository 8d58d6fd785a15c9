"""The engine as something that runs: in a process of its own, in a thread, or somewhere else altogether.

Each kind can be started, waited for and stopped in the same way, so the client that restarts a dead engine and rebuilds
its streams does not care which it has.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import numpy as np
import zmq

from engine import messages
from engine.boundary.crash_record import Flight, FlightRecord
from engine.boundary.sockets import EngineSocket, check_address
from engine.client.processor import WARM_UP_SECONDS, make_cutter, prepare
from engine.errors import EngineDead, EngineError
from engine.server.collector import calm_collector
from engine.server.host import EngineHost
from engine.server.loop import EngineLoop
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Builds the loop where it will run; must be picklable to run in another process.
Build = Callable[[], EngineLoop]

# What every model needs, torch first of all.
MODEL_MODULES = ("engine.runner.load",)

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
# Streams whose steps are measured at the start.
MEASURED_STREAMS = 8
# A process whose connection broke is given so long to end by itself before it is ended.
LAST_WORDS_S = 2.0


def run_engine(
    address: str, build: Build, stop: Callable[[], bool], warm: bool = True, record: FlightRecord | None = None
) -> None:
    """Build, warm up, listen and serve until `stop`. Raises EngineDead when the runner fails for all streams."""
    check_address(address)
    began = time.perf_counter()
    loop = build()
    logger.info("the model is loaded after %.1f s", time.perf_counter() - began)
    if warm:
        began = time.perf_counter()
        warm_up(loop)
        logger.info("the model is warm after %.1f s", time.perf_counter() - began)
    calm_collector()
    socket = EngineSocket(zmq.Context.instance(), address)
    try:
        logger.info("%s listens on %s", loop.scheduler.spec.name, socket.bound_to)
        EngineHost(loop, socket, uuid4().hex, time.monotonic, record).serve(stop)
    finally:
        socket.close()
        loop.runner.close()


def warm_up(loop: EngineLoop) -> None:
    """Let the model run what a first user would have to wait for: its own warm-up, then one whole short stream.

    Where noise costs what speech does, more streams show what a step costs, so that the first users are not turned
    away for want of a measurement. A model that hears speech alone has to wait for some.
    """
    loop.runner.warm_up()
    _run_noise(loop, 1)
    loop.live_cost.forget()
    if not loop.silence_is_free:
        _run_noise(loop, 1)
        _run_noise(loop, min(MEASURED_STREAMS, loop.scheduler.limits.max_streams))


def _run_noise(loop: EngineLoop, streams: int) -> None:
    """So many short streams at once, from beginning to end. Raises EngineDead if the model fails."""
    for number in range(streams):
        name = f"warm-up {number}"
        items = _noise(loop.scheduler.spec, number)
        loop.submit([messages.Open(name), messages.Feed(name, items), messages.Finish(name)], time.monotonic_ns())
    while loop.has_work():
        result = loop.step()
        for output in [] if result is None else result.outputs:
            if isinstance(output, (messages.Dead, messages.Failed)):
                raise EngineDead(f"warm-up failed: {output.message}")


def _noise(spec: ModelSpec, seed: int) -> list[messages.Item]:
    cutter = make_cutter(spec)
    noise = 0.01 * np.random.default_rng(seed).standard_normal(WARM_UP_SECONDS * spec.sample_rate, dtype=np.float32)
    items = prepare(cutter, cutter.push(noise), spec)
    return items + prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)


class Engine(Protocol):
    """Where an engine comes from."""

    address: str
    # How long a start may take until the engine answers.
    start_timeout_s: float

    async def start(self) -> None:
        """Have it running; does nothing if it is."""

    async def exited(self) -> str:
        """Waits until it has stopped running; says why. Never returns for an engine that is not ours to watch."""

    async def crashed(self) -> bool:
        """After its connection was lost: is it known to have ended by its own doing? Ends what is left of it."""

    def in_flight(self) -> list[Flight] | None:
        """After its end: the streams in the step that it died in. None if that is not known."""

    async def stop(self) -> None: ...


class RemoteEngine:
    """Started and restarted by somebody else."""

    def __init__(self, address: str, start_timeout_s: float = 10.0) -> None:
        self.address = check_address(address)
        self.start_timeout_s = start_timeout_s

    async def start(self) -> None:
        return None

    async def exited(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def crashed(self) -> bool:
        return False

    def in_flight(self) -> list[Flight] | None:
        return None

    async def stop(self) -> None:
        return None


class EngineProcess:
    """A child process, started anew when it has died.

    It is forked from a process that has imported `preload` and this module, and nothing else: a new engine is there
    sooner by the time those imports take. Preloaded modules must not touch an accelerator when they are imported.
    """

    def __init__(
        self, build: Build, address: str | None = None, warm: bool = True, preload: Sequence[str] = MODEL_MODULES
    ) -> None:
        self.start_timeout_s = START_TIMEOUT_S
        self._folder = tempfile.TemporaryDirectory(prefix="tickertape-")
        self.address = check_address(address or f"ipc://{Path(self._folder.name) / 'engine'}")
        self._record_path = Path(self._folder.name) / "record"
        self._record = FlightRecord.at(self._record_path)
        self._build = build
        self._warm = warm
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *preload])
        self._process: BaseProcess | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        if self._process is not None:
            self._process.close()
            self._process = None
        self._record.wipe()
        arguments = (self.address, self._build, self._warm, self._record_path)
        process = self._context.Process(target=_child, args=arguments, name="tickertape-engine", daemon=True)
        # Whoever gives up waiting must still be able to stop what has been started.
        self._process = process
        self._starting = asyncio.create_task(asyncio.to_thread(process.start))
        await asyncio.shield(self._starting)

    async def exited(self) -> str:
        assert self._process is not None, "start it first"
        process = self._process
        await _end_of(process)
        return f"the engine process ended with {_exit_text(process.exitcode)}"

    async def crashed(self) -> bool:
        process = self._process
        if process is None:
            return False
        if not await _ends_within(process, LAST_WORDS_S):
            process.kill()
            await _end_of(process)
            return False
        # Whoever kills from outside says nothing about the streams; a crash does.
        return process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM)

    def in_flight(self) -> list[Flight] | None:
        return self._record.read()

    async def stop(self) -> None:
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None and process.is_alive():
            process.terminate()
            if not await _ends_within(process, STOP_TIMEOUT_S):
                process.kill()
                await _end_of(process)
        if process is not None:
            process.close()
        self._record.close()
        self._folder.cleanup()


async def _end_of(process: BaseProcess) -> None:
    """Waits on the event loop, never in a thread: two threads that collect one exit status get it wrong."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(process.sentinel, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


async def _ends_within(process: BaseProcess, seconds: float) -> bool:
    try:
        await asyncio.wait_for(_end_of(process), seconds)
    except TimeoutError:
        return False
    return True


def _child(address: str, build: Build, warm: bool, record_path: Path) -> None:
    """Main function of the engine process. Ends with the gateway that started it."""
    asked_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.set())
    # Ctrl-C reaches the whole group; the gateway decides when its engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_stop_with_parent, args=(asked_to_stop,), daemon=True).start()
    try:
        run_engine(address, build, asked_to_stop.is_set, warm, FlightRecord.at(record_path))
    except EngineError as error:
        # Its text says what to change; where in the code it came up does not help.
        logger.error("%s", error)
        raise SystemExit(1) from None


def _stop_with_parent(asked_to_stop: threading.Event) -> None:
    gateway = multiprocessing.parent_process()
    assert gateway is not None
    gateway.join()
    asked_to_stop.set()


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


class EngineThread:
    """In this very process, for tests and small set-ups: the same messages, without a process around them."""

    def __init__(self, build: Build, warm: bool = True) -> None:
        self.start_timeout_s = START_TIMEOUT_S
        self.address = f"inproc://engine-{uuid4().hex}"
        self._build = build
        self._warm = warm
        self._thread: threading.Thread | None = None
        self._record = FlightRecord()
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    async def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._ended.clear()
        self._error = None
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="tickertape-engine", daemon=True)
        self._thread.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._record.wipe()
            run_engine(self.address, self._build, self._stop.is_set, self._warm, self._record)
        except Exception as error:
            logger.exception("the engine thread failed")
            self._error = error
        try:
            loop.call_soon_threadsafe(self._ended.set)
        except RuntimeError:
            logger.debug("the event loop was closed before the engine")

    async def exited(self) -> str:
        await self._ended.wait()
        return f"the engine thread ended: {self._error or 'it was stopped'}"

    async def crashed(self) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), LAST_WORDS_S)
        except TimeoutError:
            return False  # a thread cannot be ended from outside; it is connected to again
        return self._error is not None

    def in_flight(self) -> list[Flight] | None:
        return self._record.read()

    async def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
