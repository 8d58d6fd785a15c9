"""What the gateway itself costs: messages per second of one core, and memory per idle connection.

    python -m benchmarks.gateway_cost [--json FILE]

A null engine takes the audio and gives no text. A bare `websockets` echo server with the same clients in the same run
shows what the machine can do. Servers and load generator are separate processes; rates are per second of the server's
processor time, so a busy machine does not change them much, and the servers take turns.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.measuring import cpu_seconds, parser_of, private_bytes, show, write_json
from engine import messages
from engine.client.pool import Capacity
from engine.spec import ModelSpec
from realtime.app import listening
from realtime.config import Config, ServerConfig

CHUNK_S = 0.05
# 24 kHz is OpenAI's rate, which is resampled; 16 kHz is the model's.
RATES = (24_000, 16_000)


class NullStream:
    """Takes audio, answers flushes, gives no text."""

    def __init__(self, name: str) -> None:
        self.id = name
        self._samples = 0
        self._listener: Callable[[messages.Output], None] = lambda output: None

    async def feed(self, samples: NDArray[Any]) -> None:
        self._samples += len(samples)

    def feed_now(self, samples: NDArray[Any]) -> bool:
        self._samples += len(samples)
        return True

    async def gap(self, samples: int) -> None:
        self._samples += samples

    async def flush(self) -> int:
        self._tell(messages.Flushed(self.id, 1, self._samples))
        return 1

    async def finish(self) -> None:
        self._tell(messages.Closed(self.id, self._samples))

    async def abort(self) -> None:
        await self.finish()

    def subscribe(self, listener: Callable[[messages.Output], None]) -> None:
        self._listener = listener

    def _tell(self, output: messages.Output) -> None:
        asyncio.get_running_loop().call_soon(self._listener, output)


class NullEngine:
    spec = ModelSpec(name="null", sample_rate=16_000, samples_per_position=1280)
    ready = True

    def capacity(self) -> Capacity:
        return Capacity(used=0, total=1_000_000, speaking=0, load=0.0, retry_after_s=1.0, free=1_000_000)

    async def open(self, stream: str, **options: Any) -> NullStream:
        return NullStream(stream)


# Servers, each in its own process


async def serve_gateway(port: Connection) -> None:
    async with listening(NullEngine(), Config(server=ServerConfig(port=0, drain_s=0.0))) as running:
        port.send(running.port)
        await asyncio.Event().wait()


async def serve_echo(port: Connection) -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.send("{}")
        async for message in socket:
            await socket.send(message)

    async with serve(handler, "127.0.0.1", 0, compression=None, max_size=21 * 1024 * 1024) as server:
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()


async def serve_watched(port: Connection) -> None:
    """The gateway on asyncio's own loop, with the processor time of every callback measured."""
    longest = [0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - begun)

    asyncio.Handle._run = timed  # type: ignore[assignment]

    def answer() -> None:
        port.recv()
        port.send(longest[0])
        longest[0] = 0.0

    asyncio.get_running_loop().add_reader(port.fileno(), answer)
    await serve_gateway(port)


def run_server(kind: str, port: Connection) -> None:
    serves = {"watched": serve_watched, "gateway": serve_gateway, "echo": serve_echo}[kind](port)
    (asyncio if kind == "watched" else uvloop).run(serves)


class ServerProcess:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=run_server, args=(kind, theirs), daemon=True)
        self._process.start()
        self._url = f"ws://127.0.0.1:{self.pipe.recv()}/v1/realtime"
        self.pid = self._process.pid or 0

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def connect(self) -> connect:
        return connect(self._url, compression=None, ping_interval=None)


# Clients


def append_frame(rate: int) -> str:
    audio = base64.b64encode(os.urandom(2 * round(rate * CHUNK_S))).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


async def send(server: ServerProcess, clients: int, seconds: float, rate: int, paced: bool) -> int:
    """Clients that send at the pace of speech, or as fast as the server takes it; the number of messages that it has
    certainly read."""
    frame = append_frame(rate)
    session = {"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcm", "rate": rate}}}}

    async def pour(socket: ClientConnection, number: int) -> int:
        count, begun = 0, time.monotonic() + number * CHUNK_S / clients
        while count < seconds / CHUNK_S if paced else time.monotonic() < begun + seconds:
            if paced:
                await asyncio.sleep(max(0.0, begun + count * CHUNK_S - time.monotonic()))
            await socket.send(frame)
            count += 1
        return count

    async def read_until(socket: ClientConnection, last: str) -> None:
        while await socket.recv() != last:
            pass

    async def one(number: int) -> int:
        async with server.connect() as socket:
            await socket.recv()
            if server.kind == "echo":
                # The echo server answers every message, and each answer must be read.
                reading = asyncio.create_task(read_until(socket, "last"))
                count = await pour(socket, number)
                await socket.send("last")
                await reading
                return count
            await socket.send(json.dumps({"type": "session.update", "session": session}))
            await socket.recv()
            count = await pour(socket, number)
            # The answer to a wrong message shows that everything before it was read.
            await socket.send(json.dumps({"type": "x"}))
            await socket.recv()
            return count

    return sum(await asyncio.gather(*(one(number) for number in range(clients))))


def message_rate(server: ServerProcess, clients: int, seconds: float, rate: int) -> float:
    """Messages per second of the server's processor time."""
    before = cpu_seconds(server.pid)
    count = uvloop.run(send(server, clients, seconds, rate, paced=False))
    return count / (cpu_seconds(server.pid) - before)


async def idle_bytes(server: ServerProcess, connections: int) -> int:
    """Memory of these idle connections together."""
    async with server.connect() as first:
        await first.recv()
        before, sockets = private_bytes(server.pid), []
        for _ in range(connections):
            sockets.append(await server.connect())
            await sockets[-1].recv()
        await asyncio.sleep(1.0)
        after = private_bytes(server.pid)
        await asyncio.gather(*(socket.close() for socket in sockets))
    return after - before


def live_load(streams: int, seconds: float) -> dict[str, float]:
    """The longest callback of the loop in processor seconds, and the share of one core, while clients talk."""
    with ServerProcess("watched") as server:
        uvloop.run(send(server, streams, 1.0, 24_000, paced=True))
        server.pipe.send(None)
        server.pipe.recv()
        before, begun = cpu_seconds(server.pid), time.monotonic()
        uvloop.run(send(server, streams, seconds, 24_000, paced=True))
        share = (cpu_seconds(server.pid) - before) / (time.monotonic() - begun)
        server.pipe.send(None)
        return {"streams": streams, "longest_callback_s": float(server.pipe.recv()), "core_share": share}


def main(arguments: list[str] | None = None) -> None:
    options = parser_of(__doc__).parse_args(arguments)
    seconds, count, clients, streams, connections = (0.1, 1, 2, 4, 10) if options.small else (3.0, 3, 8, 100, 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * connections)), hard))
    with ServerProcess("gateway") as gateway, ServerProcess("echo") as echo:
        rounds: dict[str, list[float]] = {}
        for number in range(count + 1):
            for server, rate in itertools.product((gateway, echo), RATES):
                # The first round warms up.
                measured = message_rate(server, clients, seconds if number else min(0.5, seconds), rate)
                rounds.setdefault(f"{server.kind}, {rate} Hz", []).extend([measured] if number else [])
        memory = {server.kind: uvloop.run(idle_bytes(server, connections)) for server in (gateway, echo)}
    medians = {name: statistics.median(rates) for name, rates in rounds.items()}
    report: dict[str, Any] = {
        "rates": {
            f"gateway, {rate} Hz": {
                "messages_per_cpu_second": medians[f"gateway, {rate} Hz"],
                "of_echo": medians[f"gateway, {rate} Hz"] / medians[f"echo, {rate} Hz"],
            }
            for rate in RATES
        },
        "memory": {
            kind: {"connections": connections, "bytes": held, "bytes_each": held / connections}
            for kind, held in memory.items()
        },
        "live": live_load(streams, 2 * seconds),
    }
    show(f"Appends of 50 ms, {clients} clients that do not pace themselves, medians of {count} rounds", report)
    write_json(options, report)


if __name__ == "__main__":
    main()
