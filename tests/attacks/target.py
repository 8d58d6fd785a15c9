"""The attacker's tools: raw sockets, hand-made WebSocket frames, and clients that send any message."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.addresses import Addresses
from tests.attacks.real_server import BAD_KEY

TEXT, BINARY, CLOSE, PING, PONG, CONTINUED = 0x1, 0x2, 0x8, 0x9, 0xA, 0x0
WAIT_S = 30.0
BOUNDARY = "the-boundary-of-the-form"


@dataclass(frozen=True, slots=True)
class Attack:
    """`gateway_mib` and `engine_mib` bound what the attack may cost while it lasts."""

    name: str
    about: str
    run: Callable[[Target], Coroutine[Any, Any, None]]
    gateway_mib: float
    engine_mib: float
    # It is for a server without keys, on which few sessions have room.
    few_sessions: bool = False


ATTACKS: dict[str, Attack] = {}


# Without any attack the engine's memory swings by tens of MB: two streams are read at a time, what a pass listens to
# is encoded or copied for it.
ENGINE_MIB = 64


def attack(
    gateway_mib: float = 24, engine_mib: float = ENGINE_MIB, few_sessions: bool = False
) -> Callable[[Callable[[Target], Coroutine[Any, Any, None]]], Callable[[Target], Coroutine[Any, Any, None]]]:
    """Register an attack under the name of its function. It ends when the attacker has been told off."""

    def register(
        run: Callable[[Target], Coroutine[Any, Any, None]],
    ) -> Callable[[Target], Coroutine[Any, Any, None]]:
        name = run.__name__
        assert name not in ATTACKS, name
        about = (run.__doc__ or "").split("\n")[0].rstrip(".")
        ATTACKS[name] = Attack(name, about, run, gateway_mib, engine_mib, few_sessions)
        return run

    return register


@dataclass(slots=True)
class Target(Addresses):
    """A server to attack, with the attacker's key. Counts what is sent to it."""

    port: int
    key: str = BAD_KEY
    sent: int = 0

    @property
    def authorization(self) -> str:
        return f"Authorization: Bearer {self.key}\r\n"

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[RawSocket]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            yield RawSocket(self, reader, writer)
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def upgraded(self, path: str = "/v1/realtime") -> AsyncIterator[RawSocket]:
        """A raw socket that has been let in."""
        async with self.raw() as socket:
            await socket.send(self.upgrade_head(path))
            head = await socket.read_head()
            assert head.startswith(b"HTTP/1.1 101"), head[:200]
            yield socket

    def upgrade_head(self, path: str = "/v1/realtime", extra: str = "") -> bytes:
        key = base64.b64encode(os.urandom(16)).decode()
        return (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{self.authorization}{extra}\r\n"
        ).encode()

    @asynccontextmanager
    async def client(
        self, url: str | None = None, key: str | None = None, greeted: bool = True, **options: Any
    ) -> AsyncIterator[Client]:
        """A session in the GA dialect, or in whatever the URL says."""
        headers = {"Authorization": f"Bearer {key or self.key}", **options.pop("headers", {})}
        settings = {"compression": None, "proxy": None, "max_size": None, "open_timeout": WAIT_S}
        settings |= {"ping_interval": None, "close_timeout": 0.5}
        async with connect(url or self.ws, additional_headers=headers, **{**settings, **options}) as socket:
            client = Client(self, socket)
            if greeted:
                await client.until("session.created")
            yield client

    async def refused(self, url: str, key: str | None = None, **options: Any) -> tuple[int, str]:
        """The status and the error code that an upgrade is refused with."""
        headers = {"Authorization": f"Bearer {key or self.key}"}
        try:
            async with connect(url, additional_headers=headers, proxy=None, open_timeout=WAIT_S, **options):
                raise AssertionError(f"{url} was let in")
        except InvalidStatus as error:
            body = json.loads(error.response.body)
            # Deepgram's clients read another shape than all others.
            return error.response.status_code, body.get("err_code") or body["error"]["code"]

    async def exchange(self, data: bytes, seconds: float = WAIT_S) -> bytes:
        """Send bytes; what comes back until the server closes, which it may do before it has read all of them."""
        async with self.raw() as socket:
            answer = asyncio.create_task(socket.read_rest(seconds))
            await socket.try_send(data, seconds)
            return await answer

    async def post(
        self, path: str, body: bytes, content_type: str = "application/json", key: str | None = None, extra: str = ""
    ) -> Answer:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key or self.key}\r\nConnection: close\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        )
        return Answer.parse(await self.exchange(head.encode() + body, 60))

    async def upload(self, *parts: bytes, key: str | None = None) -> Answer:
        """Parts of a form, each made by `form_field` or `form_file`."""
        body = b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
        return await self.post("/v1/audio/transcriptions", body, FORM, key)

    async def listened(self, data: bytes) -> int:
        """The status of a file on Deepgram's path, whose refusals have Deepgram's shape."""
        answer = await self.post("/v1/listen", data, "application/octet-stream")
        assert answer.status == 200 or json.loads(answer.body)["err_msg"], answer.body
        return answer.status


FORM = f"multipart/form-data; boundary={BOUNDARY}"


def form_field(name: str, value: str) -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def form_file(data: bytes, name: str = "file") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="a.wav"\r\n'
    return head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n"


@dataclass(slots=True)
class Answer:
    status: int
    headers: bytes
    body: bytes

    @property
    def code(self) -> str:
        """The error code in the body, as every refusal has one."""
        code: str = json.loads(self.body)["error"]["code"]
        return code

    @classmethod
    def parse(cls, data: bytes) -> Answer:
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), f"no answer but {data[:200]!r}"
        return cls(int(head.split()[1]), head, body)


@dataclass(slots=True)
class RawSocket:
    """Bytes, and frames made by hand."""

    target: Target
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.target.sent += len(data)
        self.writer.write(data)
        await self.writer.drain()

    async def try_send(self, data: bytes, seconds: float = 2.0) -> bool:
        """False if the server does not take it within so long, or has cut the line."""
        try:
            await asyncio.wait_for(self.send(data), seconds)
        except (TimeoutError, ConnectionError):
            return False
        return True

    async def send_until_answered(self, piece: bytes, most: int) -> bytes:
        """Send a piece over and over, at most so many bytes; what the server says before it closes."""
        answer = asyncio.create_task(self.read_rest())
        while not answer.done() and self.target.sent < most and await self.try_send(piece):  # noqa: ASYNC110
            # The answer would be lost with the line if we wrote on before it is read.
            await asyncio.sleep(0.002)
        return await answer

    async def send_frame(self, opcode: int, payload: bytes = b"", **options: Any) -> None:
        await self.send(frame(opcode, payload, **options))

    async def send_event(self, **event: Any) -> None:
        await self.send_frame(TEXT, json.dumps(event).encode())

    async def read_head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)

    async def read_rest(self, seconds: float = WAIT_S) -> bytes:
        """Until the server closes; raises TimeoutError if it does not."""
        parts = []
        try:
            async with asyncio.timeout(seconds):
                while part := await self.reader.read(2**16):
                    parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)

    async def read_frame(self) -> tuple[int, bytes]:
        first, second = await self.reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", await self.reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self.reader.readexactly(8))
        return first & 0xF, await self.reader.readexactly(size)

    async def error_code(self) -> str:
        """The code of the next error event."""
        async with asyncio.timeout(WAIT_S):
            while True:
                opcode, payload = await self.read_frame()
                event = json.loads(payload) if opcode == TEXT else {}
                if event.get("type") == "error":
                    code: str = event["error"]["code"]
                    return code

    async def close_code_while_sending(self, piece: bytes, most: int) -> int:
        """The same for the close code of a WebSocket."""
        code = asyncio.create_task(self.close_code())
        while not code.done() and self.target.sent < most and await self.try_send(piece):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return await code

    async def close_code(self, seconds: float = WAIT_S) -> int:
        """The code the server closes with; 1006 if it cuts the line without a word."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    opcode, payload = await self.read_frame()
                    if opcode == CLOSE:
                        return int(struct.unpack("!H", payload[:2])[0]) if payload else 1005
        except (asyncio.IncompleteReadError, ConnectionError):
            return 1006


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, reserved: int = 0, masked: bool = True) -> bytes:
    """One frame with a mask of zeros, which leaves the payload as it is."""
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode])
    mask_bit = 0x80 if masked else 0
    if len(payload) < 126:
        head += bytes([mask_bit | len(payload)])
    elif len(payload) < 2**16:
        head += bytes([mask_bit | 126]) + struct.pack("!H", len(payload))
    else:
        head += bytes([mask_bit | 127]) + struct.pack("!Q", len(payload))
    return head + (bytes(4) if masked else b"") + payload


@dataclass(slots=True)
class Client:
    """A WebSocket client of the real kind."""

    target: Target
    socket: ClientConnection
    seen: list[dict[str, Any]] = field(default_factory=list)

    async def send_raw(self, message: str | bytes) -> None:
        self.target.sent += len(message)
        await self.socket.send(message)

    async def send(self, kind: str, **fields: Any) -> None:
        await self.send_raw(json.dumps({"type": kind, **fields}))

    async def append(self, audio: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode())

    async def update(self, include: list[str] | None = None, **audio_input: Any) -> dict[str, Any]:
        session: dict[str, Any] = {"type": "transcription", "audio": {"input": audio_input}}
        if include is not None:
            session["include"] = include
        await self.send("session.update", session=session)
        found: dict[str, Any] = (await self.until("session.updated"))["session"]
        return found

    async def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), WAIT_S))
        assert "Traceback" not in str(message)
        return message

    async def until(self, kind: str) -> dict[str, Any]:
        while True:
            event = await self.receive()
            if event["type"] == kind:
                return event

    async def error(self) -> dict[str, Any]:
        """The next error event of the OpenAI dialects."""
        found: dict[str, Any] = (await self.until("error"))["error"]
        return found

    async def still_works(self) -> None:
        """The session answers: what was wrong cost one message and no more."""
        await self.send("session.update", session={})
        await self.until("session.updated")

    async def close_code(self) -> int:
        try:
            while True:
                await self.receive()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd is not None else 1006
