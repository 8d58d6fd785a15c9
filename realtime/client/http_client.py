"""An HTTP client of a running server: gets status pages, and uploads files to be transcribed.

It uses the standard library only. An upload may take hours, so it has no timeout; TCP keepalive detects a dead server.
"""

from __future__ import annotations

import http.client
import json
import math
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote

from realtime.client.wire_client import CannotConnect, authorization, split_address

# Upload routes.
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
# Seconds for connecting, and for each read and write.
TIMEOUT_S = 10.0
# Most seconds and bytes of a status page, and most bytes of a transcript: a day of speech with the times of its words
# has some 30 MB.
STATUS_S = 30.0
MAX_STATUS_BYTES = 16 * 1024 * 1024
MAX_TRANSCRIPT_BYTES = 256 * 1024 * 1024
# Characters of a server's reason that an error repeats.
MAX_MESSAGE_CHARACTERS = 500
# Bytes of one read or write.
PIECE_BYTES = 64 * 1024
# Accepted schemes, and whether they are encrypted.
SCHEMES = {"http": False, "ws": False, "https": True, "wss": True}
# TCP keepalive: seconds until the first probe, seconds between probes, and number of probes. There is no timeout for a
# transcription, so a dead server must be detected this way.
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class FileUnreadable(Exception):
    """The file to upload cannot be read, or became shorter during the upload."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    @property
    def refusal(self) -> str:
        """Status and error message of a refused request, for an error text."""
        try:
            message = self.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = "it gives no reason"
        return f"refused with {self.status}: {str(message)[:MAX_MESSAGE_CHARACTERS]}"


@dataclass(frozen=True, slots=True)
class Form:
    """A multipart form with a file. `size` is the file's number of bytes, or None for a pipe."""

    fields: Sequence[tuple[str, str]]
    name: str
    file: BinaryIO
    size: int | None
    # Called with the bytes of the file that were sent so far.
    on_sent: Callable[[int], None] = lambda sent: None


class HttpClient:
    """A server by its address: `host:port`, or the URL of its page, `/v1` or socket. Methods raise CannotConnect."""

    def __init__(self, url: str, key: str | None = None, trust: ssl.SSLContext | None = None) -> None:
        split = split_address(url)
        self._port = split.port
        self._encrypted = SCHEMES[split.scheme]
        self._host = split.hostname or ""
        self._path = split.path.rstrip("/").removesuffix("/realtime").removesuffix("/v1")
        self._headers = authorization(key)
        self._trust = trust
        self.url = f"{'https' if self._encrypted else 'http'}://{split.netloc.rpartition('@')[2]}{self._path}"

    def get(self, path: str) -> HttpAnswer:
        with closing(self._connect()) as connection:
            return self._request(
                connection,
                lambda: connection.request("GET", self._path + path, headers=self._headers),
                MAX_STATUS_BYTES,
                STATUS_S,
            )

    def upload(self, form: Form, to: str = TRANSCRIPTIONS) -> HttpAnswer:
        """Upload a file to be transcribed, and wait for the result without a timeout. Raises FileUnreadable."""
        path = f"{self._path}{to}"
        boundary = secrets.token_hex(16)
        headers = self._headers | {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        head, tail = _head(form, boundary), f"\r\n--{boundary}--\r\n".encode()
        chunked = form.size is None
        headers |= {"Transfer-Encoding": "chunked"} if chunked else {}
        headers |= {} if form.size is None else {"Content-Length": str(len(head) + form.size + len(tail))}

        def body() -> Iterator[bytes]:
            yield head
            yield from _pieces(form)
            yield tail

        with closing(self._connect()) as connection:
            connection.sock.settimeout(None)
            return self._request(
                connection,
                lambda: connection.request("POST", path, body(), headers, encode_chunked=chunked),
                MAX_TRANSCRIPT_BYTES,
            )

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        if self._encrypted:
            trust = self._trust or ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=trust)
        try:
            connection.connect()
        except TimeoutError as error:
            raise CannotConnect(f"{self.url} did not answer within {TIMEOUT_S:g} s") from error
        except ssl.SSLError as error:
            if error.reason == "WRONG_VERSION_NUMBER":
                text = f"{self.url} does not speak TLS; write http:// if the server has no certificate"
                raise CannotConnect(text) from error
            raise CannotConnect(f"the certificate of {self.url} is not trusted: {error}") from error
        except OSError as error:
            text = f"no server answers at {self.url} ({error.strerror or error}); start one with `tickertape serve`"
            raise CannotConnect(text) from error
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in KEEPALIVE.items():
            if hasattr(socket, option):
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        return connection

    def _request(
        self,
        connection: http.client.HTTPConnection,
        request: Callable[[], None],
        max_bytes: int,
        max_s: float = math.inf,
    ) -> HttpAnswer:
        """Send the request and read the answer.

        Raises CannotConnect for an answer of more than `max_bytes`, or one that takes longer than `max_s`: any program
        may answer at this address.
        """
        deadline = time.monotonic() + max_s
        try:
            try:
                request()
            except (BrokenPipeError, ConnectionResetError):
                # A server that refuses a request may not read all of it; its response may have arrived nevertheless.
                pass
            with connection.getresponse() as response:
                body = bytearray()
                while piece := response.read1(PIECE_BYTES):
                    body += piece
                    if len(body) > max_bytes:
                        raise CannotConnect(f"the answer of {self.url} has more than {max_bytes} bytes")
                    if time.monotonic() > deadline:
                        raise CannotConnect(f"{self.url} did not answer within {max_s:g} s")
                if response.length:  # `read1` does not notice an answer that breaks off
                    raise http.client.IncompleteRead(b"", response.length)
                return HttpAnswer(response.status, bytes(body))
        except TimeoutError as error:
            raise CannotConnect(f"{self.url} did not answer within {TIMEOUT_S:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise CannotConnect(f"the connection to {self.url} broke off: {error or type(error).__name__}") from error


def _head(form: Form, boundary: str) -> bytes:
    part = f"--{boundary}\r\nContent-Disposition: form-data; name="
    parts = [f'{part}"{name}"\r\n\r\n{value}\r\n' for name, value in form.fields]
    # File names and shell arguments need not be UTF-8; their bytes are sent unchanged.
    name = quote(form.name, safe=" ()[]!#&+,'=@", errors="surrogateescape")
    parts.append(f'{part}"file"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n')
    return "".join(parts).encode(errors="surrogateescape")


def _pieces(form: Form) -> Iterator[bytes]:
    sent = 0
    while form.size is None or sent < form.size:
        wanted = PIECE_BYTES if form.size is None else min(PIECE_BYTES, form.size - sent)
        try:
            # Do not wait until a pipe has `wanted` bytes.
            piece = form.file.read1(wanted) if form.size is None else form.file.read(wanted)  # type: ignore[attr-defined]
        except OSError as error:
            raise FileUnreadable(f"cannot be read: {error.strerror}") from error
        if not piece:
            if form.size is not None:
                raise FileUnreadable(f"became shorter while it was sent: it has {sent} instead of {form.size} bytes")
            return
        sent += len(piece)
        form.on_sent(sent)
        yield piece
