"""A client of a running server: one WebSocket session in OpenAI's Realtime API (`WireSession`), and HTTP requests.

Used by the commands that take the address of a server, and by the load generator.

- `WireSession` configures the session, appends audio and reads events. It does not reconnect: `resuming_session.py`
  does.
- `HttpClient` gets status pages, and uploads files to be transcribed, with the standard library only. An upload may
  take hours, so it has no timeout; TCP keepalive detects a dead server.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import SplitResult, quote, urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

TRANSCRIPTION = "conversation.item.input_audio_transcription"
DELTA = f"{TRANSCRIPTION}.delta"
COMPLETED = f"{TRANSCRIPTION}.completed"
FAILED = f"{TRANSCRIPTION}.failed"
INCLUDE_WORDS = "item.input_audio_transcription.words"
INCLUDE_SPEAKERS = "item.input_audio_transcription.speakers"
# The event_id of the last commit, which an error about it repeats.
LAST_COMMIT = "last-commit"
OPEN_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# Accepted schemes, and the scheme of the WebSocket URL.
WEBSOCKET_SCHEMES = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}


class CannotConnect(Exception):
    """The server cannot be used: no connection, or no usable answer. The text says why."""


class Refused(CannotConnect):
    """The server refused the connection with an HTTP status."""

    def __init__(self, message: str, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        # Seconds after which the server wants the next attempt; 0 if it does not say.
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session: 16-bit samples at `rate`, turn detection, and the model's options."""

    rate: int
    turn_detection: dict[str, Any] | None
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    keywords: tuple[str, ...] = ()
    task: str | None = None
    speakers: bool = False
    # `streamed`: finals have the words of the deltas.
    finals: str | None = None
    # The name that the session is published under.
    publish: str | None = None

    def session(self, include: Sequence[str]) -> dict[str, Any]:
        """The session object for `session.update`. Word times are requested too."""
        model_options = {
            "model": self.model,
            "language": self.language,
            "prompt": self.prompt,
            "keywords": list(self.keywords),
            "task": self.task,
            "finals": self.finals,
        }
        audio_input: dict[str, Any] = {
            "format": {"type": "audio/pcm", "rate": self.rate},
            "turn_detection": self.turn_detection,
            "transcription": {name: value for name, value in model_options.items() if value},
        }
        speakers = [INCLUDE_SPEAKERS] if self.speakers else []
        included = [INCLUDE_WORDS, *speakers, *include]
        published = {"publish": self.publish} if self.publish else {}
        return {"type": "transcription", "audio": {"input": audio_input}, "include": included, **published}


class OpenTurns:
    """The committed turns that have no final text yet.

    The session is over when there are none, and the server has answered the last `input_audio_buffer.clear`.
    """

    def __init__(self) -> None:
        # Item ids of committed turns without final text.
        self._unanswered: set[str] = set()
        self._cleared = False

    @property
    def is_over(self) -> bool:
        return self._cleared and not self._unanswered

    def resume(self) -> None:
        """After a resume: the end of the session has to be requested again, because the request may have been lost."""
        self._cleared = False

    def note(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "input_audio_buffer.committed":
            self._unanswered.add(event["item_id"])
        elif kind in (COMPLETED, FAILED):
            self._unanswered.discard(event["item_id"])
        elif kind == "input_audio_buffer.cleared":
            self._cleared = True


def realtime_url(text: str, model: str | None = None) -> str:
    """The WebSocket URL of a server, given as `host:port` or as the URL of its page, `/v1` or socket. Raises
    CannotConnect."""
    split = split_address(text)
    path = split.path.rstrip("/")
    if not path.endswith("/realtime"):
        path = f"{path or '/v1'}/realtime"
    query = {"intent": "transcription"} | ({"model": model} if model else {})
    return urlunsplit((WEBSOCKET_SCHEMES[split.scheme], split.netloc, path, split.query or urlencode(query), ""))


def split_address(text: str) -> SplitResult:
    """The parts of an address; the default scheme is `http`. Raises CannotConnect if it is not valid."""
    url = text if "://" in text else f"http://{text}"
    try:
        split = urlsplit(url)
        (split.hostname or "").encode("idna")
        usable = split.path.isascii() and url.isprintable() and " " not in url
        usable = usable and split.scheme in WEBSOCKET_SCHEMES and bool(split.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise CannotConnect(f"{without_secrets(text)!r} is not the address of a server; write http://HOST:PORT")
    try:
        split.port  # noqa: B018  (the property raises for an invalid port)
    except ValueError:
        raise CannotConnect(f"{without_secrets(text)!r} has an invalid port; write http://HOST:PORT") from None
    return split


def without_secrets(url: str) -> str:
    """An address for messages: without password and without query, which may contain a token."""
    scheme, separator, rest = url.partition("?")[0].rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def authorization(key: str | None) -> dict[str, str]:
    """The header with the key. Raises CannotConnect, without the key in its text."""
    if not key or not key.strip():
        return {}
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise CannotConnect("the key has characters that a header cannot contain; check it for line breaks and quotes")
    return {"Authorization": f"Bearer {key}"}


def is_expected(error: dict[str, Any]) -> bool:
    """Whether this error only says that there was no audio left for the last commit."""
    return bool(error["error"].get("event_id") == LAST_COMMIT)


class WireSession:
    """One open socket of a session. After `finish`, `is_over` becomes True when every turn has its text or has
    failed."""

    def __init__(self, socket: ClientConnection, turns: OpenTurns) -> None:
        self._socket = socket
        self._turns = turns

    @property
    def is_over(self) -> bool:
        return self._turns.is_over

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def configure(self, session_options: SessionOptions, include: Sequence[str] = ()) -> None:
        await self.send("session.update", session=session_options.session(include))

    async def append(self, pcm16: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm16).decode())

    async def finish(self) -> None:
        """End the last turn. The server answers in order, so its answer to `clear` follows its answer to the commit."""
        await self.send("input_audio_buffer.commit", event_id=LAST_COMMIT)
        await self.send("input_audio_buffer.clear")

    async def receive(self) -> dict[str, Any]:
        """The next event. Raises ConnectionClosed."""
        return self._event(await self._socket.recv())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events until the socket is closed. Raises ConnectionClosedError if it was not closed properly."""
        async for frame in self._socket:
            yield self._event(frame)

    def _event(self, frame: str | bytes) -> dict[str, Any]:
        try:
            event = json.loads(frame)
            self._turns.note(event)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CannotConnect("the server sends messages that are not in the Realtime API") from None
        return event  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._socket.close()


@asynccontextmanager
async def open_session(
    url: str, key: str | None = None, turns: OpenTurns | None = None, ping_timeout_s: float | None = None
) -> AsyncIterator[WireSession]:
    """Connect to `url`, a result of `realtime_url`; `turns` are those of a resumed session. Raises CannotConnect."""
    headers = authorization(key) or None
    try:
        socket = await connect(
            url,
            additional_headers=headers,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=OPEN_TIMEOUT_S,
            ping_timeout=ping_timeout_s,
            # Connect directly, also if a proxy is configured in the environment.
            proxy=None,
        )
    except InvalidStatus as error:
        header = error.response.headers.get("Retry-After", "")
        retry_after_s = float(header) if header.isascii() and header.isdigit() and len(header) < 10 else 0.0
        raise Refused(_refusal(url, error), error.response.status_code, retry_after_s) from error
    except InvalidURI as error:
        # Without the cause, whose text contains the whole URL with the token.
        raise CannotConnect(f"{_shown(url)} is not the address of a server: {error.msg}") from None
    except InvalidHandshake as error:
        raise CannotConnect(f"{_shown(url)} does not speak WebSocket: {error}") from error
    except TimeoutError as error:
        raise CannotConnect(f"{_shown(url)} did not answer within {OPEN_TIMEOUT_S:g} s") from error
    except OSError as error:
        text = f"no server answers at {_shown(url)} ({error.strerror or error}); start one with `tickertape serve`"
        raise CannotConnect(text) from error
    async with socket:
        yield WireSession(socket, turns or OpenTurns())


def _refusal(url: str, error: InvalidStatus) -> str:
    """An error text with the status and the message in the server's refusal."""
    response = error.response
    try:
        message = json.loads(response.body or b"")["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "it gives no reason"
    return f"{_shown(url)} refused with {response.status_code}: {message}"


def _shown(url: str) -> str:
    split = urlsplit(url)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}"


# HTTP requests

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
