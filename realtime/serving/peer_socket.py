"""What the system knows of a client's socket before anybody has read it.

A request may wait in a socket while this process stands still, and its client may have closed the socket since. That
is known here even if bytes that came before are yet to be read.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct

# Of Linux's `struct tcp_info`: eight bytes, then numbers of four bytes; the twelfth says how many milliseconds ago data
# came.
_LAST_DATA = struct.Struct("8x44xI")


def peer_has_closed(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has closed, or at least sends no more. Not known everywhere: then it has not."""
    found = transport.get_extra_info("socket")
    if found is None or not hasattr(select, "POLLRDHUP"):
        return False
    if found.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(found.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def seconds_since_data(transport: asyncio.BaseTransport) -> float:
    """How long ago the last bytes came, whether they were read or not. Not known everywhere: then just now."""
    found = transport.get_extra_info("socket")
    if found is None or found.fileno() < 0 or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
    except OSError:
        return 0.0
    return float(_LAST_DATA.unpack(info)[0]) / 1000 if len(info) == _LAST_DATA.size else 0.0
