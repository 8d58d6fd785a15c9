"""What one append and one session cost a gateway: processor time and memory of a worker with all features on.

    python -m benchmarks.append_cost [--sessions 100] [--periods 100] [--profile FILE] [--json FILE]

This process is one worker as `tickertape serve --workers N` starts it: sockets, sessions, handoffs, engine client. The
engine is a process without a model (`benchmarks/engines.py`). The clients are another process; they ask for turn
detection, word times, acknowledgements and resuming. The figure includes all messages from and to engine and clients.
The memory is what the sessions add to this process before they speak.

Appends come in slices of 5 ms of speech, spread evenly over the clients. The next slice is sent when 5 ms have passed
and the last slice was read, so on a machine that is too busy the run takes longer, and the figure is the same.
"""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import os
import selectors
import socket
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.engines import engine_client, null_loop
from benchmarks.measuring import Profile, parser_of, private_bytes, write_json
from engine.client.engine_handles import EngineProcess
from realtime.app import freeze_modules, listening
from realtime.config import Config, LimitsConfig, ServerConfig
from realtime.serving.registry import Sessions
from realtime.serving.session_factory import GatewayServices

SLICE_S = 0.005
WARM_UP_PERIODS = 10
# Different appends. A prime number: clients step through them with different strides, so that no two send the same.
POOL = 997
INCLUDE = ["item.input_audio_transcription.words", "input_audio_buffer.acks", "session.resume"]


@dataclass(frozen=True)
class Case:
    """How clients send."""

    rate: int
    append_ms: int

    @property
    def name(self) -> str:
        return f"{self.rate // 1000} kHz, {self.append_ms} ms"

    @property
    def samples(self) -> int:
        return self.rate * self.append_ms // 1000

    @property
    def slices(self) -> int:
        return round(self.append_ms / 1000 / SLICE_S)


CASES = (Case(16_000, 80), Case(24_000, 50))


# The process of the clients


def text_frame(text: str) -> bytes:
    """A masked WebSocket frame. The cost of unmasking does not depend on the value of the mask."""
    data, mask = text.encode(), bytes((1, 2, 3, 4))
    key = np.resize(np.frombuffer(mask, np.uint8), len(data))
    head = bytes((0x81, 0x80 | len(data))) if len(data) < 126 else bytes((0x81, 0xFE)) + len(data).to_bytes(2)
    return head + mask + (np.frombuffer(data, np.uint8) ^ key).tobytes()


def connected(port: int, case: Case) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    key = base64.b64encode(os.urandom(16)).decode()
    line.sendall(
        f"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert line.recv(65536).startswith(b"HTTP/1.1 101")
    audio = {"format": {"type": "audio/pcm", "rate": case.rate}, "turn_detection": {"type": "server_vad"}}
    session = {"type": "transcription", "audio": {"input": audio}, "include": INCLUDE}
    line.sendall(text_frame(json.dumps({"type": "session.update", "session": session})))
    return line


def run_clients(port: int, case: Case, sessions: int, orders: socket.socket) -> None:
    """Sends one slice for each byte on the order pipe, and reads all answers."""
    noise = np.random.default_rng(1).integers(-8000, 8000, (POOL, case.samples)).astype("<i2")
    pool = [
        text_frame(json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(row.tobytes()).decode()}))
        for row in noise
    ]
    lines = [connected(port, case) for _ in range(sessions)]
    watch = selectors.DefaultSelector()
    for line in (*lines, orders):
        watch.register(line, selectors.EVENT_READ)
    orders.sendall(b".")
    sent = [0] * sessions
    while True:
        for key, _ in watch.select():
            received = key.fileobj.recv(65536)  # type: ignore[union-attr]
            if key.fileobj is not orders:
                continue
            if not received:
                return
            for number in received:
                for client in range(number, sessions, case.slices):
                    lines[client].sendall(pool[(client + sent[client] * (client + 1)) % POOL])
                    sent[client] += 1


# The process of the gateway


async def speak(orders: socket.socket, sessions: Sessions, case: Case, slices: list[int], periods: int) -> None:
    for _ in range(periods):
        for number in range(case.slices):
            due = time.monotonic() + SLICE_S
            slices[number] += 1
            orders.send(bytes((number,)))
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            # Until every append of this slice was read.
            for entry in list(sessions.entries.values())[number :: case.slices]:
                while entry.live.session.source_samples < slices[number] * case.samples:  # noqa: ASYNC110
                    await asyncio.sleep(0.0005)


async def measure(case: Case, clients: int, periods: int, profile: Profile | None) -> tuple[float, float]:
    """Microseconds of processor time per append, and bytes of memory per session."""
    freeze_modules()
    config = Config(server=ServerConfig(port=0, drain_s=0.0), limits=LimitsConfig(max_load=0.0, sessions_per_key=0))
    ours, theirs = socket.socketpair()
    async with (
        engine_client(EngineProcess(null_loop, preload=()), max_load=0.0) as engine,
        listening(engine, config, GatewayServices(handoff_store=engine)) as running,
    ):
        sessions = running.server.gateway.sessions
        context = multiprocessing.get_context("spawn")
        before = private_bytes(os.getpid())
        process = context.Process(target=run_clients, args=(running.port, case, clients, theirs), daemon=True)
        process.start()
        theirs.close()
        await asyncio.get_running_loop().run_in_executor(None, ours.recv, 1)
        held = (private_bytes(os.getpid()) - before) / clients
        slices = [0] * case.slices
        await speak(ours, sessions, case, slices, min(WARM_UP_PERIODS, periods))
        began = time.process_time()
        with profile.running() if profile else nullcontext():
            await speak(ours, sessions, case, slices, periods)
        took = time.process_time() - began
        ours.close()
        await asyncio.to_thread(process.join)
    return 1e6 * took / (clients * periods), held


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--periods", type=int, default=100, help="appends of each session that are counted")
    parser.add_argument("--profile", type=Path, help="split the figures by folder, and write the stacks here")
    options = parser.parse_args(arguments)
    if options.small:
        options.sessions, options.periods = 4, 3
    costs, memory = {}, list[float]()
    for case in CASES:
        profile = Profile() if options.profile else None
        cost, held = uvloop.run(measure(case, options.sessions, options.periods, profile))
        costs[case.name] = cost
        memory.append(held)
        print(f"{case.name} appends, {options.sessions} sessions: {cost:.0f} us of the gateway for each", flush=True)
        if profile is not None:
            profile.show(cost, "us")
            profile.write(options.profile.with_suffix(f".{case.rate}.txt"))
    # Later sessions use the memory that the first ones have left.
    print(f"{memory[0] / 1000:.1f} kB of the gateway's memory for each session")
    sizes = {"sessions": options.sessions, "periods": options.periods}
    write_json(options, sizes | {"us_per_append": costs, "bytes_per_session": memory[0]})


if __name__ == "__main__":
    main()
