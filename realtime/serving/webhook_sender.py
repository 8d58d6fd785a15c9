"""Sends one webhook: a signed POST to a checked address, without redirects, within a deadline.

The signature is that of the Standard Webhooks scheme. The URL may come from a client, so host and address are checked
by the rules of `checked_fetch.py`, and the connection is made to the address that was checked. Only the status of the
response counts; a bounded part of the rest is read and dropped. The queues of webhooks are in `webhooks.py`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult

from realtime.serving.checked_fetch import ResolvedAddress, check_addresses, check_url, port_of, request_target
from realtime.serving.daemon_thread import in_thread

HOSTS_SETTING = "webhooks.hosts"
SECRET_PREFIX = "whsec_"
# The longest line of a response, and how many interim responses (100 to 199) may come before the final one.
MAX_LINE_BYTES = 16 * 1024
MAX_INTERIM_ANSWERS = 5
MAX_HEADER_LINES = 100
# Bytes of the response's body that are read, so that the receiver can finish it, and the seconds for that.
MAX_BODY_BYTES = 64 * 1024
BODY_S = 1.0
# Addresses of a host name that are tried.
MAX_ADDRESSES = 4


def signing_secret(secret: str, key: str) -> bytes:
    """The secret that webhooks of one API key are signed with; an empty key stands for a server without keys. It is
    derived, so that a receiver of one key cannot sign for another."""
    return hmac.digest(secret.encode(), b"tickertape webhook\0" + key.encode("utf-8", "surrogateescape"), "sha256")


def shown_secret(secret: bytes) -> str:
    """The secret as libraries for Standard Webhooks read it."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()


class WebhookSender:
    """Sends to any number of URLs. A name is looked up once at a time, in a thread of its own: a name whose lookup
    hangs delays only its own webhooks."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext | None = None
        self._lookups: dict[tuple[str, int], asyncio.Future[list[ResolvedAddress]]] = {}

    async def send(self, url: str, hosts: Sequence[str], headers: dict[str, str], body: bytes, seconds: float) -> int:
        """The status of the answer. Raises NotAllowed, OSError and TimeoutError."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(seconds):
                split = check_url(url, hosts, HOSTS_SETTING)
                found = await self._addresses(split)
                check_addresses(found, hosts, HOSTS_SETTING)
                reader, writer = await self._connect(split, found[:MAX_ADDRESSES], seconds)
                writer.write(_head(split, headers, len(body)) + body)
                await writer.drain()
                status = await _status(reader)
            await _finish(reader)
            return status
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _addresses(self, split: SplitResult) -> list[ResolvedAddress]:
        assert split.hostname is not None
        place = (split.hostname, port_of(split))
        lookup = self._lookups.get(place)
        if lookup is None:
            lookup = in_thread(lambda: _look_up(*place), f"lookup of {place[0]}")
            self._lookups[place] = lookup
            lookup.add_done_callback(lambda done: self._forget(place, done))
        return await asyncio.shield(lookup)

    def _forget(self, place: tuple[str, int], lookup: asyncio.Future[list[ResolvedAddress]]) -> None:
        del self._lookups[place]
        if not lookup.cancelled():
            lookup.exception()  # it may be that all that waited for it have given up

    async def _connect(
        self, split: SplitResult, found: Sequence[ResolvedAddress], seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = await self._context() if split.scheme == "https" else None
        failure: OSError = OSError("the host has no address")
        for *_, address in found:
            try:
                # An address that does not answer leaves time for the next one.
                async with asyncio.timeout(seconds / len(found)):
                    return await asyncio.open_connection(
                        str(address[0]),
                        address[1],
                        ssl=context,
                        server_hostname=split.hostname if context is not None else None,
                        limit=MAX_LINE_BYTES,
                    )
            except OSError as error:  # TimeoutError is one
                failure = error
        raise failure

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            # Reads the system's certificates.
            self._tls = await in_thread(ssl.create_default_context, "certificates")
        return self._tls


def _look_up(host: str, port: int) -> list[ResolvedAddress]:
    return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _head(split: SplitResult, headers: dict[str, str], length: int) -> bytes:
    """The head of the request. `check_url` has refused URLs with line ends and spaces."""
    host = split.netloc.rpartition("@")[2]
    lines = [
        f"POST {request_target(split)} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: tickertape",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode()


async def _status(reader: asyncio.StreamReader) -> int:
    for _ in range(MAX_INTERIM_ANSWERS + 1):
        version, _, rest = (await _line(reader)).partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit() or len(code) != 3:
            raise OSError("the answer is not HTTP")
        if not 100 <= int(code) < 200:
            return int(code)
        for _ in range(MAX_HEADER_LINES):
            if not (await _line(reader)).strip():
                break
    raise OSError("the answer has no end")


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        raise OSError("the connection was closed before the answer") from None
    except asyncio.LimitOverrunError:
        raise OSError("the answer has a line that is too long") from None


async def _finish(reader: asyncio.StreamReader) -> None:
    """Read the rest of the answer, within bounds, so that the receiver does not see a reset."""
    count = 0
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(BODY_S):
            while count < MAX_BODY_BYTES and (data := await reader.read(MAX_LINE_BYTES)):
                count += len(data)
