"""`tickertape wyoming` with the unmodified client of the package `wyoming`, and with clients that break its rules."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realtime.commands import wyoming_server
from realtime.commands.terminal import INTERRUPTED
from realtime.commands.wyoming_server import Backend, LocalBackend, ServerBackend, WyomingServer
from tests.e2e.conftest import Serve
from tests.e2e.test_commands import start
from tests.realtime.commands.conftest import sound
from tests.realtime.gateway_doubles import MULTILINGUAL, FakeEngine
from tests.waiting import until

wyoming_client = pytest.importorskip("wyoming.client", reason="the package wyoming is not installed")
asr = pytest.importorskip("wyoming.asr")
audio = pytest.importorskip("wyoming.audio")
info = pytest.importorskip("wyoming.info")


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting a process blocks a little; that is this test's doing."""
    yield


@asynccontextmanager
async def serving(backend: Backend) -> AsyncIterator[int]:
    server = WyomingServer(backend)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=server.MAX_LINE_BYTES)
    async with listener:
        yield listener.sockets[0].getsockname()[1]
        listener.close()


def client(port: int) -> Any:
    return wyoming_client.AsyncTcpClient("127.0.0.1", port)


async def say(
    connection: Any, seconds: float, rate: int = 16_000, channels: int = 1, language: str | None = None
) -> str:
    """What Home Assistant does for one utterance."""
    samples = np.interp(np.arange(0, seconds, 1 / rate), np.arange(0, seconds, 1 / 16_000), sound(seconds))
    pcm = np.repeat((samples * 32767).astype("<i2"), channels).tobytes()
    form = {"rate": rate, "width": 2, "channels": channels}
    await connection.write_event(asr.Transcribe(language=language).event())
    await connection.write_event(audio.AudioStart(**form).event())
    for at in range(0, len(pcm), 2048):
        await connection.write_event(audio.AudioChunk(audio=pcm[at : at + 2048], **form).event())
    await connection.write_event(audio.AudioStop().event())
    event = await asyncio.wait_for(connection.read_event(), 60)
    assert asr.Transcript.is_type(event.type), event
    text: str = asr.Transcript.from_event(event).text
    return text


@pytest.mark.parametrize("where", ["engine", "server"])
async def test_unmodified_client_gets_info_and_transcripts(where: str, serve: Serve) -> None:
    async with serve() as running:
        backend = LocalBackend(FakeEngine(), None) if where == "engine" else await ServerBackend.of(running.http, None)
        async with serving(backend) as port, client(port) as connection:
            await connection.write_event(info.Describe().event())
            found = info.Info.from_event(await asyncio.wait_for(connection.read_event(), 60))
            assert found.asr[0].name == "tickertape" and found.asr[0].models[0].name == "fake-model"
            assert "en" in found.asr[0].models[0].languages
            assert await say(connection, 2.1) == "w1 w2 w3 w4 w5"
            # Another utterance on the same connection, in stereo at 48 kHz, with a language that the model has.
            assert await say(connection, 2.1, 48_000, 2, "en-US") == "w1 w2 w3 w4 w5"
            # Nothing was said.
            await connection.write_event(audio.AudioStop().event())
            event = await asyncio.wait_for(connection.read_event(), 60)
            assert asr.Transcript.from_event(event).text == ""
        await until(lambda: len(running.gateway.sessions) == 0)


async def test_language_of_the_request_reaches_the_model_or_is_refused() -> None:
    engine = FakeEngine()
    engine.takes(replace(MULTILINGUAL, prompt=False))
    async with serving(LocalBackend(engine, None)) as port, client(port) as connection:
        await say(connection, 1.0, language="de-AT")
        assert engine.opened[-1]["options"] == {"language": "de"}
        await connection.write_event(asr.Transcribe(language="tlh").event())
        await connection.write_event(audio.AudioStart(16_000, 2, 1).event())
        event = await asyncio.wait_for(connection.read_event(), 60)
        assert event.type == "error" and "no language 'tlh'" in event.data["text"]
        assert await say(connection, 1.0, language="de") != ""


async def raw(port: int, *pieces: bytes) -> dict[str, Any] | None:
    """The first event that comes back for these bytes; None if the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
        async with asyncio.timeout(60):
            line = await reader.readline()
            if not line:
                return None
            head: dict[str, Any] = json.loads(line)
            return {**head, "data": json.loads(await reader.readexactly(head["data_length"]))}
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()


async def test_broken_events_are_answered_and_harm_nobody() -> None:
    chunk = b'{"type": "audio-chunk", "data": {"rate": %s, "width": %s, "channels": %s}, "payload_length": 2}\nab'
    async with serving(LocalBackend(FakeEngine(), None)) as port, client(port) as good:
        for bad in (
            b"no json\n", b"[]\n", b"{}\n", b'{"type": 5}\n', b'{"type": "x", "data": [1]}\n',
            b"[" * 60_000 + b"\n",
            b'{"type": "describe", "data_length": 99999999}\n', b'{"type": "describe", "data_length": -1}\n',
            b'{"type": "describe", "payload_length": 1e9}\n', b'{"type": "x", "payload_length": 99999999999}\n',
            b'{"type": "x", "data_length": 3}\n\xff\xff\xff', b"x" * 200_000,
            chunk % (b"0", b"2", b"1"), chunk % (b"16000", b"3", b"1"), chunk % (b"16000", b"2", b"1000"),
            chunk % (b'"x"', b"2", b"1"), chunk % (b"1e5", b"null", b"true"),
        ):  # fmt: skip
            answer = await raw(port, bad)
            assert answer is not None and answer["type"] == "error" and answer["data"]["text"], bad[:60]
        assert (await raw(port, b'{"type": "ping", "data": {"text": "hello"}}\n') or {})["data"] == {"text": "hello"}
        assert await say(good, 1.0) == "w1 w2"


async def test_half_a_surrogate_pair_is_echoed_as_it_came() -> None:
    """JSON can say it, UTF-8 cannot."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with serving(LocalBackend(FakeEngine(), None)) as port:
        answer = await raw(port, b'{"type": "ping", "data": {"text": "\\ud83d \xc3\xa4"}}\n')
        assert answer is not None and answer["data"] == {"text": "\ud83d \u00e4"}
        say_nothing = b'{"type": "transcribe", "data": {"language": "\\udc00"}}\n{"type": "audio-stop"}\n'
        answer = await raw(port, say_nothing)
        assert answer is not None and answer["data"] == {"text": "", "language": "\udc00"}
        begin = b'{"type": "audio-start", "data": {"rate": 16000, "width": 2, "channels": 1}}\n'
        answer = await raw(port, b'{"type": "transcribe", "data": {"language": "\\udc00"}}\n' + begin)
        assert answer is not None and answer["type"] == "error"
    assert not failures


async def test_clients_that_leave_or_are_too_many_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wyoming_server, "MAX_CLIENTS", 3)
    engine = FakeEngine()
    begin = b'{"type": "audio-start", "data": {"rate": 16000, "width": 2, "channels": 1}}\n'
    async with serving(LocalBackend(engine, None)) as port:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in crowd:
            writer.write(begin)
        await until(lambda: len(engine.opened) == 3)
        answer = await raw(port, b'{"type": "describe"}\n')
        assert answer is not None and "at most 3 clients" in answer["data"]["text"]
        for _, writer in crowd:
            writer.transport.abort()

        async def has_room() -> bool:
            return (await raw(port, b'{"type": "describe"}\n') or {}).get("type") == "info"

        async with asyncio.timeout(60):
            while not await has_room():  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.05)
        assert engine.capacity().used == 0


LONG_PING = b'{"type": "ping", "data": {"text": "%s"}}\n' % (b"x" * 60_000)


@pytest.mark.parametrize("last", [LONG_PING, b"no json\n"], ids=["answered", "closed"])
async def test_client_that_does_not_read_is_disconnected(last: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an answer is sent, and when the connection is closed with answers that were not read."""
    monkeypatch.setattr(wyoming_server, "SEND_S", 0.3, raising=False)
    monkeypatch.setattr(wyoming_server, "MAX_CLIENTS", 1)
    server = WyomingServer(LocalBackend(FakeEngine(), None))
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await server.serve(reader, writer)

    # Small buffers of the kernel, so that a part of the first answer stays in the server.
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as deaf:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        port = listening.getsockname()[1]
        async with await asyncio.start_server(serve, sock=listening, limit=server.MAX_LINE_BYTES):
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", port))
            await loop.sock_sendall(deaf, LONG_PING)
            await until(lambda: writers and writers[0].transport.get_write_buffer_size())
            line = writers[0].get_extra_info("socket")
            await loop.sock_sendall(deaf, last)
            await until(lambda: line.fileno() == -1, 20)
            answer = await raw(port, b'{"type": "describe"}\n')
            assert answer is not None and answer["type"] == "info"


async def test_utterance_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wyoming_server, "MAX_UTTERANCE_S", 3)
    async with serving(LocalBackend(FakeEngine(), None)) as port, client(port) as connection:
        assert len((await say(connection, 8.0)).split()) in (7, 8)


async def test_long_chunk_is_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    convert, sizes = wyoming_server._AudioConverter.convert, []

    def counted(sound: Any, payload: bytes) -> Any:
        sizes.append(len(payload))
        return convert(sound, payload)

    monkeypatch.setattr(wyoming_server._AudioConverter, "convert", counted)
    pcm = (sound(8.0) * 32767).astype("<i2").tobytes()
    async with serving(LocalBackend(FakeEngine(), None)) as port, client(port) as connection:
        await connection.write_event(audio.AudioStart(rate=16_000, width=2, channels=1).event())
        await connection.write_event(audio.AudioChunk(audio=pcm, rate=16_000, width=2, channels=1).event())
        await connection.write_event(audio.AudioStop().event())
        event = await asyncio.wait_for(connection.read_event(), 60)
    assert sum(sizes) == len(pcm) and max(sizes) <= wyoming_server.PIECE_BYTES
    assert event is not None and len(asr.Transcript.from_event(event).text.split()) >= 19


async def test_command_serves_and_says_what_is_wrong(serve: Serve) -> None:
    async with serve() as running:
        process = await start("wyoming", "--port", "0", "--server", running.http)
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            port = int(line.partition(";")[0].rpartition(":")[2])
            async with client(port) as connection:
                assert await say(connection, 2.1) == "w1 w2 w3 w4 w5"
                # Ctrl-C while a client is connected.
                process.send_signal(signal.SIGINT)
                _, said = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == INTERRUPTED and b"Traceback" not in said, said
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        busy = await start("wyoming", "--port", str(running.port), "--server", running.http)
        _, said = await asyncio.wait_for(busy.communicate(), 60)
        assert busy.returncode == 1 and b"choose another --host or --port" in said
