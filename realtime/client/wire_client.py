"""A client of OpenAI's Realtime API: one WebSocket session of a running server, without reconnecting.

`WireSession` configures the session, appends audio and reads events. Used by the commands that take the address of a
server, and by the load generator. `resuming_session.py` reconnects; `http_client.py` makes HTTP requests.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit, urlunsplit

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
    """No session can be opened; the text says why and what to do."""


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
    """One open socket of a session. After `finish`, `is_over` becomes True when every turn has its text."""

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
