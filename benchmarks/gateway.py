"""What the gateway itself costs: messages per second of one core, and memory per idle connection.

    python -m benchmarks.gateway [--json FILE] [--seconds S] [--connections N]

A null engine takes the audio and says nothing. Beside it, in the same run and with the same clients, a bare
`websockets` echo server shows what the machine can do. Server and load generator are processes of their own; rates
are per second of the server's CPU time, so a busy machine does not change them much, and the servers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from engine import messages
from engine.client.capacity import Capacity
from engine.spec import ModelSpec
from realtime.app import build_server
from realtime.config import Config, LimitsConfig, ServerConfig

CHUNK_MS = 50
CLIENTS = 8
ROUNDS = 3


def _pcm(rate: int) -> dict[str, Any]:
    return {"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcm", "rate": rate}}}}


# What is measured: the server, the audio's rate (24 kHz is OpenAI's, resampled; 16 kHz is the model's), the session.
CASES: dict[str, tuple[str, int, dict[str, Any] | None]] = {
    "gateway, 24000 Hz": ("gateway", 24_000, _pcm(24_000)),
    "gateway, 16000 Hz": ("gateway", 16_000, _pcm(16_000)),
    "echo, 24000 Hz": ("echo", 24_000, None),
    "echo, 16000 Hz": ("echo", 16_000, None),
}


class NullStream:
    """Takes audio, answers flushes, says nothing."""

    def __init__(self, name: str) -> None:
        self.id = name
        self._outputs: asyncio.Queue[messages.Output] = asyncio.Queue()
        self._samples = 0

    async def feed(self, samples: NDArray[Any]) -> None:
        self._samples += len(samples)

    def feed_now(self, samples: NDArray[Any]) -> bool:
        self._samples += len(samples)
        return True

    async def gap(self, samples: int) -> None:
        self._samples += samples

    async def flush(self) -> int:
        self._outputs.put_nowait(messages.Flushed(self.id, 1, self._samples))
        return 1

    async def finish(self) -> None:
        self._outputs.put_nowait(messages.Closed(self.id, self._samples))

    async def abort(self) -> None:
        await self.finish()

    def __aiter__(self) -> AsyncIterator[messages.Output]:
        return self._iterate()

    def listen(self, listener: Callable[[messages.Output], None]) -> None:
        self._telling = asyncio.create_task(self._tell(listener))

    async def _tell(self, listener: Callable[[messages.Output], None]) -> None:
        async for output in self:
            listener(output)

    async def _iterate(self) -> AsyncIterator[messages.Output]:
        while True:
            output = await self._outputs.get()
            yield output
            if isinstance(output, messages.Closed):
                return


class NullEngine:
    spec = ModelSpec(name="null", sample_rate=16_000, samples_per_position=1280)
    ready = True

    def capacity(self) -> Capacity:
        return Capacity(used=0, total=1_000_000, speaking=0, load=0.0, retry_after_s=1.0, free=1_000_000)

    async def open(self, stream: str, **options: Any) -> NullStream:
        return NullStream(stream)


async def _serve_gateway(port: Connection) -> None:
    config = Config(server=ServerConfig(port=0), limits=LimitsConfig())
    server = build_server(NullEngine(), config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    port.send(server.servers[0].sockets[0].getsockname()[1])
    await task


async def _serve_echo(port: Connection) -> None:
    async def handler(socket: ServerConnection) -> None:
        await socket.send("{}")
        async for message in socket:
            await socket.send(message)

    async with serve(handler, "127.0.0.1", 0, compression=None, max_size=21 * 1024 * 1024) as server:
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()


async def _serve_watched(port: Connection) -> None:
    """The gateway on asyncio's own loop, with the CPU time of every callback taken."""
    longest = [0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - begun)

    asyncio.Handle._run = timed  # type: ignore[method-assign]

    def answer() -> None:
        port.recv()
        port.send(longest[0])
        longest[0] = 0.0

    asyncio.get_running_loop().add_reader(port.fileno(), answer)
    await _serve_gateway(port)


def _server_process(kind: str, port: Connection) -> None:
    if kind == "watched":
        asyncio.run(_serve_watched(port))
    else:
        uvloop.run({"gateway": _serve_gateway, "echo": _serve_echo}[kind](port))


class ServerProcess:
    """A server in a process of its own, and what the kernel says about it."""

    def __init__(self, kind: str) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_server_process, args=(kind, theirs), daemon=True)
        self._process.start()
        self.kind = kind
        self.pipe = ours
        port = ours.recv()
        self.url = f"ws://127.0.0.1:{port}/v1/realtime"

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Proportional set size without shared library pages: what this process alone costs."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        private = [line.split() for line in text.splitlines() if line.startswith("Private_")]
        return sum(int(line[1]) for line in private) * 1024

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


async def _send_for(server: ServerProcess, seconds: float, frame: str, session: dict[str, Any] | None) -> int:
    """Send as fast as the server takes it; the number of messages it has certainly read."""

    async def drain(socket: ClientConnection, last: str) -> None:
        while await socket.recv() != last:
            pass

    async def one() -> int:
        count = 0
        async with connect(server.url, compression=None, ping_interval=None) as socket:
            await socket.recv()
            if session is None:
                # The echo server answers every message; somebody must read that.
                async with asyncio.TaskGroup() as group:
                    group.create_task(drain(socket, "last"))
                    count = await pour(socket)
                    await socket.send("last")
                return count
            await socket.send(json.dumps({"type": "session.update", "session": session}))
            await socket.recv()
            count = await pour(socket)
            # The answer to a wrong message shows that everything before it was read.
            await socket.send(json.dumps({"type": "x"}))
            await socket.recv()
            return count

    async def pour(socket: ClientConnection) -> int:
        count = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                await socket.send(frame)
            count += 20
        return count

    return sum(await asyncio.gather(*(one() for _ in range(CLIENTS))))


def measure_rate(server: ServerProcess, seconds: float, frame: str, session: dict[str, Any] | None) -> float:
    """Messages per second of the server's CPU time."""
    before = server.cpu_seconds()
    count = uvloop.run(_send_for(server, seconds, frame, session))
    return count / (server.cpu_seconds() - before)


async def _hold(server: ServerProcess, connections: int) -> tuple[int, int]:
    sockets = []
    async with connect(server.url, compression=None, ping_interval=None) as first:
        await first.recv()
        before = server.memory_bytes()
        for _ in range(connections):
            socket = await connect(server.url, compression=None, ping_interval=None)
            await socket.recv()
            sockets.append(socket)
        await asyncio.sleep(1.0)
        after = server.memory_bytes()
        await asyncio.gather(*(socket.close() for socket in sockets))
    return before, after


async def _talk(server: ServerProcess, streams: int, seconds: float) -> None:
    """So many clients at the pace of speech."""
    frame = append_frame(24_000)

    async def one(number: int) -> None:
        async with connect(server.url, compression=None, ping_interval=None) as socket:
            await socket.recv()
            begun = time.monotonic() + number * CHUNK_MS / 1000 / streams
            for chunk in range(int(seconds * 1000 / CHUNK_MS)):
                await asyncio.sleep(max(0.0, begun + chunk * CHUNK_MS / 1000 - time.monotonic()))
                await socket.send(frame)

    await asyncio.gather(*(one(number) for number in range(streams)))


def measure_callbacks(streams: int, seconds: float) -> tuple[float, float]:
    """The longest callback of the loop in CPU seconds, and the CPU share of one core, while people talk."""
    server = ServerProcess("watched")
    try:
        uvloop.run(_talk(server, streams, 1.0))
        server.pipe.send(None)
        server.pipe.recv()
        before, begun = server.cpu_seconds(), time.monotonic()
        uvloop.run(_talk(server, streams, seconds))
        share = (server.cpu_seconds() - before) / (time.monotonic() - begun)
        server.pipe.send(None)
        return float(server.pipe.recv()), share
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--streams", type=int, default=100, help="live streams to look at the event loop under")
    parser.add_argument("--connections", type=int, default=1000, help="idle connections to hold")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * options.connections)), hard))

    servers = {kind: ServerProcess(kind) for kind in ("gateway", "echo")}
    try:
        rates: dict[str, list[float]] = {name: [] for name in CASES}
        for round_number in range(ROUNDS + 1):
            for name, (kind, rate, session) in CASES.items():
                # The first round warms up.
                seconds = options.seconds if round_number else 0.5
                measured = measure_rate(servers[kind], seconds, append_frame(rate), session)
                rates[name] += [measured] if round_number else []
        memory = {kind: uvloop.run(_hold(server, options.connections)) for kind, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()
    report = make_report(rates, memory, options.connections)
    longest, share = measure_callbacks(options.streams, 2 * options.seconds)
    print(f"{options.streams} live streams: longest callback {longest * 1000:.1f} ms CPU, {share:.2f} of a core")
    report["live"] = {"streams": options.streams, "longest_callback_s": longest, "core_share": share}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def append_frame(rate: int) -> str:
    audio = base64.b64encode(os.urandom(rate * 2 * CHUNK_MS // 1000)).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


def make_report(rates: dict[str, list[float]], memory: dict[str, tuple[int, int]], connections: int) -> dict[str, Any]:
    """Print the table; the same as data."""
    report: dict[str, Any] = {"chunk_ms": CHUNK_MS, "clients": CLIENTS, "rates": {}, "memory": {}}
    print(f"append messages of {CHUNK_MS} ms, {CLIENTS} clients, unpaced; medians of {ROUNDS} rounds")
    print(f"{'case':<28}{'messages / CPU s':>18}{'of echo':>10}")
    for name, (_, rate, _) in CASES.items():
        median, echo = statistics.median(rates[name]), statistics.median(rates[f"echo, {rate} Hz"])
        print(f"{name:<28}{median:>18,.0f}{median / echo:>10.2f}")
        report["rates"][name] = {"messages_per_cpu_second": median, "of_echo": median / echo, "rounds": rates[name]}
    print(f"{connections} idle connections")
    for kind, (before, after) in memory.items():
        each = (after - before) / connections
        print(f"{kind:<28}{(after - before) / 1e6:>15.1f} MB{each / 1024:>16.1f} KiB each")
        report["memory"][kind] = {"connections": connections, "bytes": after - before, "bytes_each": each}
    return report


if __name__ == "__main__":
    sys.exit(main())
