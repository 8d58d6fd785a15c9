"""What one append and one session cost a gateway: processor time and memory of a worker with all features on.

    python -m benchmarks.append_cost [--sessions 100] [--periods 100] [--json FILE]

This process is one worker as `tickertape serve --workers N` starts it: sockets, sessions, handoffs, engine client. The
engine is a process without a model (`benchmarks/engines.py`). The clients are another process; they ask for turn
detection, word times, acknowledgements and resuming. The figure includes all messages from and to engine and clients.
The memory is what the sessions add to this process before they speak.

Appends come in slices of 5 ms of speech, spread evenly over the clients. The next slice is sent when 5 ms have passed
and the last slice was read, so on a machine that is too busy the run takes longer, and the figure is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import selectors
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from benchmarks.engines import engine_client, null_loop
from benchmarks.measuring import parser_of, private_bytes, run_command, spawned
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


def text_frame(body: dict[str, Any]) -> bytes:
    return Frame(Opcode.TEXT, json.dumps(body).encode()).serialize(mask=True)


def connected(port: int, case: Case) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    protocol = ClientProtocol(parse_uri(f"ws://localhost:{port}/v1/realtime"))
    protocol.send_request(protocol.connect())
    line.sendall(b"".join(protocol.data_to_send()))
    assert line.recv(65536).startswith(b"HTTP/1.1 101")
    audio = {"format": {"type": "audio/pcm", "rate": case.rate}, "turn_detection": {"type": "server_vad"}}
    session = {"type": "transcription", "audio": {"input": audio}, "include": INCLUDE}
    line.sendall(text_frame({"type": "session.update", "session": session}))
    return line


def run_clients(port: int, case: Case, sessions: int, orders: Connection) -> None:
    """Sends one slice for each number that it is given, and reads all answers."""
    noise = np.random.default_rng(1).integers(-8000, 8000, (POOL, case.samples)).astype("<i2")
    pool = [
        text_frame({"type": "input_audio_buffer.append", "audio": base64.b64encode(row.tobytes()).decode()})
        for row in noise
    ]
    lines = [connected(port, case) for _ in range(sessions)]
    watch = selectors.DefaultSelector()
    for line in (*lines, orders):
        watch.register(line, selectors.EVENT_READ)
    orders.send("ready")
    sent = [0] * sessions
    while True:
        for key, _ in watch.select():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(65536)
                continue
            for client in range(orders.recv(), sessions, case.slices):
                lines[client].sendall(pool[(client + sent[client] * (client + 1)) % POOL])
                sent[client] += 1


# The process of the gateway


async def speak(orders: Connection, sessions: Sessions, case: Case, slices: list[int], periods: int) -> None:
    for _ in range(periods):
        for number in range(case.slices):
            due = time.monotonic() + SLICE_S
            slices[number] += 1
            orders.send(number)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            # Until every append of this slice was read.
            for entry in list(sessions.entries.values())[number :: case.slices]:
                while entry.live.session.source_samples < slices[number] * case.samples:  # noqa: ASYNC110
                    await asyncio.sleep(0.0005)


async def measure(case: Case, clients: int, periods: int) -> tuple[float, float]:
    """Microseconds of processor time per append, and bytes of memory per session."""
    freeze_modules()
    config = Config(server=ServerConfig(port=0, drain_s=0.0), limits=LimitsConfig(max_load=0.0, sessions_per_key=0))
    async with (
        engine_client(EngineProcess(null_loop, preload=()), max_load=0.0) as engine,
        listening(engine, config, GatewayServices(handoff_store=engine)) as running,
    ):
        before = private_bytes(os.getpid())
        with spawned(run_clients, running.port, case, clients) as (orders, _):
            await asyncio.to_thread(orders.recv)
            held = (private_bytes(os.getpid()) - before) / clients
            sessions, slices = running.server.gateway.sessions, [0] * case.slices
            await speak(orders, sessions, case, slices, min(WARM_UP_PERIODS, periods))
            began = time.process_time()
            await speak(orders, sessions, case, slices, periods)
            took = time.process_time() - began
    return 1e6 * took / (clients * periods), held


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    found = {case.name: uvloop.run(measure(case, options.sessions, options.periods)) for case in CASES}
    for name, (cost, _) in found.items():
        print(f"{name} appends, {options.sessions} sessions: {cost:.0f} us of the gateway for each", flush=True)
    # Later sessions use the memory that the first ones have left.
    held = found[CASES[0].name][1]
    print(f"{held / 1000:.1f} kB of the gateway's memory for each session")
    return {
        "sessions": options.sessions,
        "periods": options.periods,
        "us_per_append": {name: cost for name, (cost, _) in found.items()},
        "bytes_per_session": held,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--periods", type=int, default=100, help="appends of each session that are counted")
    run_command(parser, arguments, measure_all, sessions=4, periods=3)


if __name__ == "__main__":
    main()
