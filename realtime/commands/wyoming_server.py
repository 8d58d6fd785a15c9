"""The Wyoming protocol of Home Assistant, server side: events as lines of JSON over TCP, with audio as their payload.

`tickertape wyoming` runs it. A client sends `transcribe`, `audio-start`, `audio-chunk`s and `audio-stop`, and gets a
`transcript`; `describe` is answered with `info`, `ping` with `pong`, and other events are ignored. An utterance is
transcribed while it is spoken, by a stream of an engine in this process (`LocalBackend`) or by a session of a running
server (`ServerBackend`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

import numpy as np

from audio.errors import AudioError
from audio.formats import MAX_RATE, MIN_RATE, MODEL_RATE, Resampler
from engine import messages
from engine.errors import EngineError
from engine.spec import language_code
from realtime.client.wire_client import (
    COMPLETED,
    FAILED,
    CannotConnect,
    HttpClient,
    SessionOptions,
    WireSession,
    is_expected,
    open_session,
    realtime_url,
)
from realtime.commands.terminal import KEY_VARIABLE, CommandFailed
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.session.events import Samples
from realtime.session.settings import Settings

NAME, VERSION = "tickertape", "1"
ATTRIBUTION = {"name": "Tickertape", "url": "https://www.home-assistant.io/integrations/wyoming"}
# Clients at once; further ones get an error and are disconnected.
MAX_CLIENTS = 16
# Most bytes of an event: of its line and of its data, and of its audio.
MAX_LINE_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 1024 * 1024
# Bytes of audio that are converted before other clients have their turn.
PIECE_BYTES = 16 * 1024
MAX_CHANNELS = 8
# The longest utterance in seconds; audio beyond it is ignored.
MAX_UTTERANCE_S = 600
# Seconds without an event after which a client is disconnected.
IDLE_S = 300.0
# Seconds for the text after the end of the audio.
LAST_WORDS_S = 60.0
# Seconds in which a client must read an answer, also when the connection is closed.
SEND_S = 10.0
# Sample types by their width in bytes, and the value of full scale.
WIDTHS: dict[int, tuple[np.dtype[Any], float]] = {
    1: (np.dtype(np.uint8), 128.0),
    2: (np.dtype("<i2"), 32768.0),
    4: (np.dtype("<i4"), 2147483648.0),
}


class BadEvent(Exception):
    """The client's event cannot be used; the text says why."""


class Utterance(Protocol):
    """One utterance while it is transcribed."""

    async def feed(self, samples: Samples) -> None:
        """Transcribe more samples at 16 kHz."""

    async def text(self) -> str:
        """End the audio, and return the text of the utterance."""

    async def close(self) -> None:
        """Abandon the utterance, or clean up after `text`."""


class Backend(Protocol):
    """Transcribes utterances: a local engine or a running server."""

    model: str
    languages: list[str]

    async def begin(self, language: str | None) -> Utterance:
        """Raises EngineError, CannotConnect and BadEvent."""


class LocalBackend:
    """An engine in this process."""

    def __init__(self, engine: EngineApi, language: str | None) -> None:
        self.model = engine.spec.name
        self.languages = list(engine.spec.options.languages) or [language or "en"]
        self._engine = engine
        self._language = language
        self._begun = 0

    async def begin(self, language: str | None) -> Utterance:
        self._begun += 1
        spec = self._engine.spec
        chosen = _supported_language(language, self.languages) or self._language
        # A model with a single language has no such option.
        settings = Settings(language=chosen if spec.options.languages else None)
        stream = await self._engine.open(f"wyoming-{self._begun}", options=settings.in_force(spec).engine_options())
        return _LocalUtterance(stream)


class _LocalUtterance:
    """An utterance as a stream of the engine in this process."""

    def __init__(self, stream: StreamApi) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._receiving = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        async for output in self._stream:
            if isinstance(output, messages.Text):
                self._texts.append(output.delta)
            elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                raise EngineError(output.message)

    async def feed(self, samples: Samples) -> None:
        await self._stream.feed(samples)

    async def text(self) -> str:
        await self._stream.finish()
        await self._receiving
        return "".join(self._texts).strip()

    async def close(self) -> None:
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        await self._stream.abort()


class ServerBackend:
    """A running server."""

    def __init__(self, url: str, model: str, languages: list[str], language: str | None) -> None:
        self.model = model
        self.languages = languages
        self._url = url
        self._language = language

    @classmethod
    async def of(cls, address: str, language: str | None) -> ServerBackend:
        """Ask the server for its model. Raises CommandFailed."""
        try:
            url = realtime_url(address)
            answer = await asyncio.to_thread(HttpClient(address, os.environ.get(KEY_VARIABLE)).get, "/v1/models")
            served: dict[str, Any] = answer.json()["data"][0]
        except CannotConnect as error:
            raise CommandFailed(str(error)) from error
        except (ValueError, KeyError, TypeError, IndexError):
            raise CommandFailed(f"{address} does not list its model; is it a Tickertape server?") from None
        return cls(url, str(served["id"]), list(served.get("languages") or [language or "en"]), language)

    async def begin(self, language: str | None) -> Utterance:
        chosen = _supported_language(language, self.languages) or self._language
        session_options = SessionOptions(MODEL_RATE, None, language=chosen if len(self.languages) > 1 else None)
        stack = AsyncExitStack()
        session = await stack.enter_async_context(open_session(self._url, os.environ.get(KEY_VARIABLE)))
        try:
            await session.configure(session_options)
        except BaseException:
            await stack.aclose()
            raise
        return _ServerUtterance(session, stack)


class _ServerUtterance:
    """An utterance as a session of a running server."""

    def __init__(self, session: WireSession, stack: AsyncExitStack) -> None:
        self._session = session
        self._stack = stack
        self._texts: list[str] = []
        self._receiving = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        async for event in self._session.events():
            kind = event.get("type")
            if kind == COMPLETED:
                self._texts.append(event["transcript"])
            elif kind == FAILED or (kind == "error" and not is_expected(event)):
                raise CannotConnect(f"the server says: {event['error'].get('message')}")
            if self._session.is_over:
                return

    async def feed(self, samples: Samples) -> None:
        if self._receiving.done():
            await self._receiving
            raise CannotConnect("the server closed the session")
        await self._session.append((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())

    async def text(self) -> str:
        await self._session.finish()
        await self._receiving
        return " ".join(self._texts).strip()

    async def close(self) -> None:
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        await self._stack.aclose()


def _supported_language(language: str | None, languages: list[str]) -> str | None:
    """The language that a client asks for, if the model has it. Raises BadEvent."""
    if not language:
        return None
    try:
        code = language_code(language)
    except ValueError:
        code = ""
    if code is not None and code not in languages:
        raise BadEvent(f"the model has no language {language[:40]!r}; it has {', '.join(languages)}")
    return code


class _AudioConverter:
    """Converts the audio of one utterance to 16 kHz mono."""

    def __init__(self, data: dict[str, Any]) -> None:
        """Raises BadEvent."""
        rate, width, channels = (_integer_or_minus_one(data.get(name)) for name in ("rate", "width", "channels"))
        if not MIN_RATE <= rate <= MAX_RATE or width not in WIDTHS or not 1 <= channels <= MAX_CHANNELS:
            text = f"rate {MIN_RATE} to {MAX_RATE}, width 1, 2 or 4, and 1 to {MAX_CHANNELS} channels"
            raise BadEvent(f"audio of this format is not supported; send {text}")
        self._channels = channels
        self._kind, self._scale = WIDTHS[width]
        self._resampler = Resampler(rate)
        # Bytes of an incomplete frame.
        self._rest = b""
        self.samples = 0

    def convert(self, payload: bytes) -> Samples:
        data = self._rest + payload
        frame = self._kind.itemsize * self._channels
        complete = len(data) // frame * frame
        self._rest = data[complete:]
        samples = np.frombuffer(data[:complete], self._kind).reshape(-1, self._channels).mean(axis=1, dtype=np.float32)
        if self._kind.itemsize == 1:
            samples = samples - np.float32(self._scale)
        return self._limited(self._resampler.resample((samples / np.float32(self._scale)).astype(np.float32)))

    def flush(self) -> Samples:
        return self._limited(self._resampler.flush())

    def _limited(self, samples: Samples) -> Samples:
        room = max(0, MAX_UTTERANCE_S * MODEL_RATE - self.samples)
        self.samples += len(samples)
        return samples[:room]


class WyomingServer:
    """Serves clients; `serve` is the callback for their connections."""

    MAX_LINE_BYTES = MAX_LINE_BYTES

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self._backend, reader, writer)
        self._clients += 1
        try:
            if self._clients > MAX_CLIENTS:
                raise BadEvent(f"at most {MAX_CLIENTS} clients may be connected at once; try again")
            await client.run()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has disconnected, or sends nothing
        except BadEvent as error:
            await client.fail(error)
        except asyncio.CancelledError:
            pass  # the command ends; asyncio would log a stack trace for each client
        finally:
            try:
                await client.end()
            finally:
                await client.close()
                self._clients -= 1


class _Client:
    """One connection. An error in an utterance is answered; an error in the framing of events ends the connection."""

    def __init__(self, backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._backend = backend
        self._reader = reader
        self._writer = writer
        self._language: str | None = None
        self._converter: _AudioConverter | None = None
        self._utterance: Utterance | None = None

    async def run(self) -> None:
        """Handle events until the client leaves. Raises OSError, TimeoutError, IncompleteReadError and BadEvent."""
        while True:
            async with asyncio.timeout(IDLE_S):
                event = await self._read()
            if event is None:
                return
            kind, data, payload = event
            try:
                await self._handle(kind, data, payload)
            except (BadEvent, AudioError, EngineError, CannotConnect) as error:
                await self.end()
                await self.fail(error)

    async def _read(self) -> tuple[str, dict[str, Any], bytes] | None:
        try:
            line = await self._reader.readline()
        except ValueError:
            raise BadEvent(f"a line has more than {MAX_LINE_BYTES} bytes") from None
        if not line:
            return None
        head = _object(line)
        kind, data = head.get("type"), head.get("data") or {}
        if not isinstance(kind, str) or not isinstance(data, dict):
            raise BadEvent("an event needs a 'type' and its 'data' is an object")
        if length := _length(head, "data_length", MAX_LINE_BYTES):
            data = data | _object(await self._reader.readexactly(length))
        length = _length(head, "payload_length", MAX_PAYLOAD_BYTES)
        return kind, data, await self._reader.readexactly(length) if length else b""

    async def _handle(self, kind: str, data: dict[str, Any], payload: bytes) -> None:
        match kind:
            case "describe":
                await self.send("info", self._info())
            case "ping":
                await self.send("pong", {"text": data.get("text")})
            case "transcribe":
                await self.end()
                language = data.get("language")
                self._language = language if isinstance(language, str) else None
            case "audio-start":
                await self.end()
                await self._begin(data)
            case "audio-chunk":
                if self._utterance is None or self._converter is None:
                    await self._begin(data)
                assert self._utterance is not None and self._converter is not None
                for start in range(0, len(payload), PIECE_BYTES):
                    if len(samples := self._converter.convert(payload[start : start + PIECE_BYTES])):
                        await self._utterance.feed(samples)
                    await asyncio.sleep(0)
            case "audio-stop":
                await self._finish()

    async def _begin(self, data: dict[str, Any]) -> None:
        self._converter = _AudioConverter(data)
        self._utterance = await self._backend.begin(self._language)

    async def _finish(self) -> None:
        """Send the transcript; without audio it is empty."""
        text = ""
        if self._utterance is not None and self._converter is not None:
            utterance = self._utterance
            if len(rest := self._converter.flush()):
                await utterance.feed(rest)
            if self._converter.samples:
                text = await _with_timeout(utterance.text())
        await self.end()
        language = {"language": self._language} if self._language else {}
        await self.send("transcript", {"text": text, **language})

    async def end(self) -> None:
        """Abandon the current utterance."""
        utterance, self._utterance, self._converter = self._utterance, None, None
        if utterance is not None:
            await utterance.close()

    def _info(self) -> dict[str, Any]:
        backend = self._backend
        common = {"attribution": ATTRIBUTION, "installed": True, "version": VERSION}
        model = {"name": backend.model, "description": backend.model, "languages": backend.languages, **common}
        program = {"name": NAME, "description": "Tickertape, realtime transcription", "models": [model], **common}
        return {"asr": [program], "tts": [], "handle": [], "intent": [], "wake": [], "mic": [], "snd": []}

    async def fail(self, error: Exception) -> None:
        try:
            await self.send("error", {"text": str(error), "code": type(error).__name__})
        except OSError:
            pass  # the client has disconnected

    async def send(self, kind: str, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        head = json.dumps({"type": kind, "data_length": len(body), "payload_length": 0}).encode()
        self._writer.write(head + b"\n" + body)
        await self._send_or_disconnect(self._writer.drain())

    async def close(self) -> None:
        """Close the connection when the client has read its answers, or soon."""
        self._writer.close()
        with suppress(OSError):
            await self._send_or_disconnect(self._writer.wait_closed())

    async def _send_or_disconnect(self, sending: Coroutine[Any, Any, None]) -> None:
        """Disconnect a client that does not read. Raises OSError and TimeoutError."""
        try:
            async with asyncio.timeout(SEND_S):
                await sending
        except BaseException:
            self._writer.transport.abort()
            raise


async def _with_timeout(text: Coroutine[Any, Any, str]) -> str:
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            return await text
    except TimeoutError:
        raise EngineError(f"no text came for {LAST_WORDS_S:g} s after the audio") from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadEvent("an event is not valid JSON") from None
    if not isinstance(value, dict):
        raise BadEvent("an event must be a JSON object")
    return value


def _integer_or_minus_one(value: Any) -> int:
    """The value if it is a whole number, else -1."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _length(head: dict[str, Any], name: str, maximum: int) -> int:
    value = _integer_or_minus_one(head.get(name) or 0)
    if not 0 <= value <= maximum:
        raise BadEvent(f"'{name}' must be between 0 and {maximum}")
    return value
