"""Starts and stops engines for a gateway. An engine is a child process, a thread of this process, or a remote engine.

The three classes (`EngineProcess`, `EngineThread`, `RemoteEngine`) have one interface, `EngineHandle`, so the
supervisor that restarts a dead engine need not know which kind it has. A handle owns the process or thread and its
crash record; the connection to the engine is in `engine/client/link.py`. The gateway imports this module before torch,
so it imports the engine's own code only inside functions.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from engine.boundary.crash_suspects import CrashRecord, StreamInStep
from engine.boundary.sockets import check_address
from engine.client.fork_server import (
    MODEL_MODULES,
    create_private_folder,
    forget_if_unreachable,
    interrupt_blocked,
    set_preload,
)
from engine.errors import EngineDead
from engine.options import EngineConfig

if TYPE_CHECKING:
    from engine.server.loop import EngineLoop


logger = logging.getLogger(__name__)

# Builds the loop in the process where it will run; must be picklable for another process.
Build = Callable[[], "EngineLoop"]

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
# How long an engine whose connection broke may take to exit by itself before it is killed.
EXIT_GRACE_S = 2.0


class EngineHandle(Protocol):
    """The interface of all handles: an engine that can be connected to and, if it is ours, started and stopped."""

    address: str
    # Longest time from the start until the engine answers.
    start_timeout_s: float
    # Whether this gateway starts and stops it. Any other engine may disappear and return at any time.
    is_ours: bool

    async def start(self) -> None:
        """Start it; does nothing if it is running."""

    async def exited(self) -> str:
        """Wait until the engine has ended; returns the reason. Never returns for a remote engine."""

    async def crashed(self) -> bool:
        """After the loss of the connection: wait for the engine's end, and return whether it is known to have crashed.

        A process that does not end by itself is killed.
        """

    def in_flight(self) -> list[StreamInStep] | None:
        """After the engine's end: the streams in its last step. None if they are not known."""

    async def stop(self, at_once: bool = False) -> None:
        """End the engine. `at_once`: a process also in the middle of a step; a thread always finishes its step."""


class RemoteEngine:
    """An engine that is started and restarted by another program."""

    is_ours = False

    def __init__(self, address: str, start_timeout_s: float = 10.0) -> None:
        self.address = check_address(address)
        self.start_timeout_s = start_timeout_s

    async def start(self) -> None:
        return None

    async def exited(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    async def crashed(self) -> bool:
        return False

    def in_flight(self) -> list[StreamInStep] | None:
        return None

    async def stop(self, at_once: bool = False) -> None:
        return None


class EngineProcess:
    """A child process, restarted after it has died.

    It is forked from a fork server that has imported the engine's modules and `preload`, which makes a start faster by
    the time of these imports.
    """

    is_ours = True

    def __init__(
        self,
        engine: EngineConfig | Build,
        address: str | None = None,
        warm: bool = True,
        preload: Sequence[str] = MODEL_MODULES,
    ) -> None:
        self.start_timeout_s = START_TIMEOUT_S
        self._folder = tempfile.TemporaryDirectory(prefix="tickertape-")
        self.address = check_address(address or f"ipc://{Path(self._folder.name) / 'engine'}")
        self._record_path = Path(self._folder.name) / "record"
        self._record = CrashRecord.at(self._record_path)
        self._build = _builder(engine)
        self._warm = warm
        self._context = multiprocessing.get_context("forkserver")
        set_preload(preload)
        self._process: BaseProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        # Whether `exited` has returned how the process ended.
        self._end_reported = False

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
        self._end_reported = False
        arguments = (self.address, self._build, self._warm, self._record_path)
        process = self._context.Process(target=_child, args=arguments, name="tickertape-engine", daemon=True)
        # Set first, so that `stop` works even if the caller gives up waiting.
        self._process = process
        self._starting = asyncio.create_task(asyncio.to_thread(self._start, process))
        try:
            await asyncio.shield(self._starting)
        except (OSError, EOFError, RuntimeError) as error:
            # EOFError: the fork server has ended because it could not fork. RuntimeError: no thread can be started.
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise EngineDead(
                f"the engine process cannot be started ({reason}); raise the limits of the server's user on processes "
                "and open files (ulimit -u, ulimit -n)"
            ) from error

    def _start(self, process: BaseProcess) -> None:
        """Start the process, and the fork server too if it does not run yet. The folders of both may have been deleted,
        for example with all old files in /tmp."""
        create_private_folder(Path(self._folder.name))
        if not self._record_path.exists():
            self._record.close()
            self._record = CrashRecord.at(self._record_path)
        with interrupt_blocked():
            forget_if_unreachable()
            process.start()

    async def exited(self) -> str:
        assert self._process is not None, "start it first"
        process = self._process
        await _wait_for_end(process)
        self._end_reported = True
        return f"the engine process ended with {_exit_text(process.exitcode)}"

    async def crashed(self) -> bool:
        process = self._process
        if process is None:
            return False
        if not await _ends_within(process, EXIT_GRACE_S):
            process.kill()
            await _wait_for_end(process)
            logger.warning("the engine process %s did not end by itself and was killed", process.pid)
            return False
        if not self._end_reported:
            # The connection broke first, which does not show the cause; the exit status does.
            logger.warning("the engine process %s ended with %s", process.pid, _exit_text(process.exitcode))
        # A kill from outside is no evidence against the streams; a crash is.
        return process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM)

    def in_flight(self) -> list[StreamInStep] | None:
        return self._record.read()

    async def stop(self, at_once: bool = False) -> None:
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        process, self._process = self._process, None
        if process is not None and process.is_alive():
            process.terminate()
            if at_once or not await _ends_within(process, STOP_TIMEOUT_S):
                process.kill()
                await _wait_for_end(process)
        if process is not None:
            process.close()
        self._record.close()
        self._folder.cleanup()


def _builder(engine: EngineConfig | Build) -> Build:
    return partial(_build, engine) if isinstance(engine, EngineConfig) else engine


# Imported inside functions, so that the gateway does not import the engine's own code.


def _build(config: EngineConfig) -> EngineLoop:
    from engine.server.main import build_loop

    return build_loop(config)


def _child(address: str, build: Build, warm: bool, record_path: Path) -> None:
    from engine.server.main import run_child

    run_child(address, build, warm, record_path)


async def _wait_for_end(process: BaseProcess) -> None:
    """Wait for the end of the process on the event loop, not in a thread: two threads that wait for one exit status
    interfere."""
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
        async with asyncio.timeout(seconds):
            await _wait_for_end(process)
    except TimeoutError:
        return False
    return True


# What the signals that end an engine usually mean.
_CAUSES = {
    signal.SIGKILL: "killed from outside, or by the system for lack of memory: see `dmesg` or the container's events; "
    "`tickertape doctor` says how much the model needs",
    signal.SIGTERM: "stopped from outside",
    signal.SIGSEGV: "a crash in native code; its own lines before this one may say where",
    signal.SIGABRT: "native code gave up; its own lines before this one say why",
    signal.SIGBUS: "a file or shared memory ended while it was read: check the disks",
    signal.SIGILL: "native code uses an instruction that this processor does not have",
}


def _exit_text(code: int | None) -> str:
    """How a process ended, with the likely cause."""
    if code is not None and code < 0:
        number = signal.Signals(-code)
        return f"signal {number.name}" + (f" ({_CAUSES[number]})" if number in _CAUSES else "")
    return f"exit status {code}" + (" (its own lines before this one say why)" if code else "")


def import_ahead() -> None:
    """Import the modules of an `EngineThread` on a thread of their own, while its caller waits for something else."""
    threading.Thread(target=_import_engine, name="import the engine").start()


def _import_engine() -> None:
    import engine.server.fast_import  # noqa: F401


class EngineThread:
    """An engine in a thread of this process, for tests and small set-ups: the same messages without a process."""

    is_ours = True

    def __init__(self, engine: EngineConfig | Build, warm: bool = True) -> None:
        self.start_timeout_s = START_TIMEOUT_S
        self.address = f"inproc://engine-{uuid4().hex}"
        self._build = _builder(engine)
        self._warm = warm
        self._thread: threading.Thread | None = None
        self._record = CrashRecord()
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
        import engine.server.fast_import  # noqa: F401
        from engine.server.main import run_engine

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
            async with asyncio.timeout(EXIT_GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            return False  # a thread cannot be killed; the client connects to it again
        return self._error is not None

    def in_flight(self) -> list[StreamInStep] | None:
        return self._record.read()

    async def stop(self, at_once: bool = False) -> None:
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
