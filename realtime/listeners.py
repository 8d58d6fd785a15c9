"""Opens the listening TCP sockets of a server, and raises its limit of open files.

`tickertape serve` and `realtime/app.py` call it at the start, before an engine is started; `realtime/workers/parent.py`
opens the port that its workers share, with the same errors. An address or port that cannot be used raises OSError with
a sentence for the operator. It imports nothing of the server, so that `tickertape serve` can check the port at once.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket

log = logging.getLogger(__name__)

# Connections that the system accepts before the server does.
BACKLOG = 2048
# A name may have addresses of a family that this machine does not have.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host. Raises OSError with a sentence for the operator. Blocks while a
    name is looked up."""
    found: list[socket.socket] = []
    failed: list[OSError] = []
    try:
        for family, address in _addresses(host, port):
            try:
                found.append(_listening_socket(family, address))
            except OSError as error:
                failed.append(error)
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
        if not found:
            raise failed[0]
    except OSError as error:
        for listener in found:
            listener.close()
        raise cannot_listen(host, port, error) from error
    return found


def _listening_socket(family: int, address: tuple[str, int]) -> socket.socket:
    # asyncio sends small messages at once (TCP_NODELAY) only on sockets that name their protocol;
    # `socket.create_server` does not.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _addresses(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError("this is not the name of a host") from error
    # The address of IPv6 has two more numbers.
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))  # type: ignore[misc]


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """The error with a sentence that names what to change."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return OSError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port")


def raise_file_limit() -> None:
    """Raise the limit of open files of this process and its children to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files could not be raised and stays at %d: %s", soft, error)
