"""Starts the fork server: a process that imports torch and the engine's modules in advance, and is forked for engines.

These imports take most of an engine's start. `tickertape serve` calls `start_fork_server` before it imports the
gateway, so that both run at the same time on two cores; `engine/client/engine_handles.py` then forks every engine from
it. The fork server itself is `multiprocessing.forkserver`. This module chooses what the fork server imports, replaces
it if its socket was deleted, and keeps Ctrl-C from it. The module's own imports are quick.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

# Modules that the fork server imports; they must not touch an accelerator when they are imported.
SERVER_MODULES = ("engine.server.fast_import", "engine.client.engine_handles")
MODEL_MODULES = ("engine.runner.load",)


def start_fork_server(preload: Sequence[str] = MODEL_MODULES) -> None:
    """Start the fork server if it does not run yet, and return while it imports. Raises OSError."""
    set_preload(preload)
    with interrupt_blocked():
        forkserver.ensure_running()


def set_preload(preload: Sequence[str]) -> None:
    """The fork server imports `SERVER_MODULES` and these modules when it starts. No effect if it runs already."""
    multiprocessing.set_forkserver_preload([*SERVER_MODULES, *preload])


def forget_if_unreachable() -> None:
    """Forget the fork server if its socket was deleted: the next start of a process starts another one. Raises OSError.

    The old one ends with the last process that was forked from it.
    """
    server: Any = forkserver._forkserver
    with server._lock:
        if server._forkserver_pid is None or os.path.exists(server._forkserver_address):
            return
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    create_private_folder(Path(util.get_temp_dir()))


def create_private_folder(folder: Path) -> None:
    """Create a folder for this user alone, if it does not exist. Raises OSError if it belongs to another user."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, f"{folder} belongs to another user; delete it")


@contextmanager
def interrupt_blocked() -> Iterator[None]:
    """Processes that are started in this context have SIGINT blocked: Ctrl-C reaches all processes of a terminal, and
    the fork server would print a traceback of the module that it is importing."""
    resource_tracker.ensure_running()  # its start, which is part of the fork server's, would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
