"""A small client of the OpenAI realtime wire, for commands that talk to a running server."""

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
LAST_COMMIT = "last-commit"
OPEN_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
PLAIN_SCHEMES = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}


class CannotConnect(Exception):
    """There is no session to be had; the text says why and what to do."""


class Refused(CannotConnect):
    """The server answered, and did not want us."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session should be: 16-bit samples at `rate`, and what the model is told beside the sound."""

    rate: int
    turn_detection: dict[str, Any] | None
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    keywords: tuple[str, ...] = ()
    task: str | None = None

    def session(self, include: Sequence[str]) -> dict[str, Any]:
        """As the wire has it. Word times come if the server has them."""
        hints = {
            "model": self.model,
            "language": self.language,
            "prompt": self.prompt,
            "keywords": list(self.keywords),
            "task": self.task,
        }
        audio_input: dict[str, Any] = {
            "format": {"type": "audio/pcm", "rate": self.rate},
            "turn_detection": self.turn_detection,
            "transcription": {name: value for name, value in hints.items() if value},
        }
        return {"type": "transcription", "audio": {"input": audio_input}, "include": [INCLUDE_WORDS, *include]}


class OpenTurns:
    """Which turns still wait for their text. It is all over when the last commit was answered and none waits."""

    def __init__(self) -> None:
        self._unanswered: set[str] = set()
        self._cleared = False

    @property
    def is_over(self) -> bool:
        return self._cleared and not self._unanswered

    def go_on(self) -> None:
        """The end will be asked for again: whether the server heard of it is not known."""
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
    """The socket of a server given as people write it: `host:port`, its page, its `/v1`, or the socket itself."""
    split = split_address(text)
    scheme = PLAIN_SCHEMES.get(split.scheme)
    if scheme is None or not split.netloc:
        raise CannotConnect(f"{without_secrets(text)!r} is not the address of a server; write http://HOST:PORT")
    path = split.path.rstrip("/")
    if not path.endswith("/realtime"):
        path = f"{path or '/v1'}/realtime"
    query = {"intent": "transcription"} | ({"model": model} if model else {})
    return urlunsplit((scheme, split.netloc, path, split.query or urlencode(query), ""))


def split_address(text: str) -> SplitResult:
    """The parts of an address; `http` if it names no scheme. Raises CannotConnect for what no request can carry."""
    url = text if "://" in text else f"http://{text}"
    try:
        split = urlsplit(url)
        (split.hostname or "").encode("idna")
        usable = split.path.isascii() and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        raise CannotConnect(f"{without_secrets(text)!r} is not the address of a server; write http://HOST:PORT")
    return split


def without_secrets(url: str) -> str:
    """An address as a message may show it: without a password, and without a query, which may hold a token."""
    scheme, separator, rest = url.partition("?")[0].rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries a key. Raises CannotConnect, which does not show the key."""
    if not key or not key.strip():
        return {}
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise CannotConnect("the key has characters that no header can carry; look for line breaks and quotes in it")
    return {"Authorization": f"Bearer {key}"}


def is_expected(error: dict[str, Any]) -> bool:
    """Nothing was left to commit at the end: no error, only an answer."""
    return bool(error["error"].get("event_id") == LAST_COMMIT)


class WireSession:
    """One open socket of a session. After `finish`, it `is_over` once every turn has got its text."""

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
        """End the last turn. Answers come in order, so the answer to `clear` says that the commit was answered too."""
        await self.send("input_audio_buffer.commit", event_id=LAST_COMMIT)
        await self.send("input_audio_buffer.clear")

    async def receive(self) -> dict[str, Any]:
        """The next event. Raises ConnectionClosed."""
        event: dict[str, Any] = json.loads(await self._socket.recv())
        self._turns.note(event)
        return event

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Until the socket is closed. Raises ConnectionClosedError if it was not closed properly."""
        async for frame in self._socket:
            event: dict[str, Any] = json.loads(frame)
            self._turns.note(event)
            yield event

    async def close(self) -> None:
        await self._socket.close()


@asynccontextmanager
async def open_session(
    url: str, key: str | None = None, turns: OpenTurns | None = None, dead_after_s: float | None = None
) -> AsyncIterator[WireSession]:
    """Raises CannotConnect. `url` is what `realtime_url` returns; `turns` are those of a session that goes on."""
    headers = authorization(key) or None
    try:
        socket = await connect(
            url,
            additional_headers=headers,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=OPEN_TIMEOUT_S,
            ping_timeout=dead_after_s,
            # A load test must not depend on whether a proxy is configured; servers here are named directly.
            proxy=None,
        )
    except InvalidStatus as error:
        raise Refused(_refusal(url, error), error.response.status_code) from error
    except InvalidURI as error:
        # Its text repeats the whole address, with the token in it.
        raise CannotConnect(f"{_shown(url)} cannot be the address of a server: {error.msg}") from None
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
    """What the server says in the body of its refusal, if it says something."""
    response = error.response
    try:
        message = json.loads(response.body or b"")["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "it gives no reason"
    return f"{_shown(url)} refused with {response.status_code}: {message}"


def _shown(url: str) -> str:
    split = urlsplit(url)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}"
