"""Telling whoever started the server how far it is: systemd through its socket, others through a file descriptor."""

from __future__ import annotations

import os
import socket

from realtime.commands.terminal import UsageError, note

# Where systemd listens (Type=notify).
SOCKET_VARIABLE = "NOTIFY_SOCKET"


class Readiness:
    """Says READY once the server takes sessions and STOPPING once it takes no more. Nobody listening is no error."""

    def __init__(self, ready_fd: int | None = None) -> None:
        if ready_fd is not None:
            _check_writable(ready_fd)
        self._ready_fd = ready_fd
        # The engine process must not speak for us.
        self._address = os.environ.pop(SOCKET_VARIABLE, "")

    def ready(self, url: str) -> None:
        self._notify(f"READY=1\nSTATUS=listening on {url}\n")
        if self._ready_fd is None:
            return
        try:
            os.write(self._ready_fd, f"{url}\n".encode())
        except OSError as error:
            note(f"nobody reads file descriptor {self._ready_fd}: {error.strerror}")
        os.close(self._ready_fd)
        self._ready_fd = None

    def stopping(self) -> None:
        self._notify("STOPPING=1\nSTATUS=running turns may finish\n")

    def _notify(self, text: str) -> None:
        if not self._address:
            return
        # A name that begins with @ lives in the abstract space, which has no files.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
                notifier.connect(address)
                notifier.sendall(text.encode())
        except OSError as error:
            note(f"cannot notify {self._address}: {error.strerror or error}")


def _check_writable(fd: int) -> None:
    """Raise UsageError: a descriptor that cannot be written to is better known now than after a model is loaded."""
    try:
        os.write(fd, b"")
        os.set_inheritable(fd, False)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no such descriptor"
        raise UsageError(f"--ready-fd {fd}: {reason}; open it for writing, as in `--ready-fd 3 3>file`") from error
