"""What a fleet costs as it grows: idle links between gateways and engines, handoffs, and sessions that move.

    python -m benchmarks.fleet_size [--machines 50] [--spoken 8,16,32] [--seconds 10] [--json FILE]

Everything runs on this machine, without models. Costs are processor time, so that a busy machine changes them little.
Links: engines without a model, all in one process, and the engine clients of gateways in another one, over encrypted
links without audio, for a tenth of the machines and for all. Sessions: real gateways and an engine without a model,
which counts the handoffs that it is sent; sessions speak, one gateway is killed and the other one adopts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.clients import PacedClient, appends_of, looped
from benchmarks.engines import null_loop
from benchmarks.measuring import (
    RunFailed,
    cpu_seconds,
    parser_of,
    percentiles,
    private_bytes,
    run_command,
    show,
    spawned,
    until,
    write_json,
)
from benchmarks.servers import Child, free_port, wait_until_ready
from benchmarks.sounds import pcm16, speech
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import RemoteEngine
from engine.messages import SaveHandoff
from realtime.listeners import raise_limit

SECRET = b"the secret of a fleet of a benchmark"
PATIENCE_S = 400.0

Figures = dict[str, Any]


# Links


def _host_engines(ports: Sequence[int], streams: int, pipe: Connection) -> None:
    """Engines without a model, each in a thread. Answers each message with how many handoffs were saved, and bytes."""
    # Here, because they load torch, which the other processes do without.
    from engine.server.handoff import HandoffTable
    from engine.server.main import run_engine

    counts: Counter[str] = Counter()
    save = HandoffTable._save_handoff

    def counted(self: HandoffTable, peer: Any, given: SaveHandoff) -> None:
        counts.update(saves=1, save_bytes=len(msgspec.msgpack.encode(given)))
        save(self, peer, given)

    HandoffTable._save_handoff = counted  # type: ignore[method-assign]
    for port in ports:
        arguments = (f"tcp://127.0.0.1:{port}", lambda: null_loop(streams), lambda: False)
        options = {"fleet_secret": SECRET}
        threading.Thread(target=run_engine, args=arguments, kwargs=options, daemon=True).start()
    pipe.send(None)
    while True:
        pipe.recv()
        pipe.send(dict(counts))


def _link_gateways(ports: Sequence[int], clients: int, ready: Connection) -> None:
    """The parts of gateways that are linked to engines."""

    async def run() -> None:
        raise_limit()
        made = []
        for _ in range(clients):
            engines = [RemoteEngine(f"tcp://127.0.0.1:{port}", 120.0) for port in ports]
            made.append(EngineClient(engines, ClientSettings(fleet_secret=SECRET)))
            await made[-1].start()
        await until(lambda: all(len(client.capacity().engines) == len(ports) for client in made))
        ready.send(None)
        await asyncio.Event().wait()

    asyncio.run(run())


def _wait_for(pipe: Connection, what: str) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise RunFailed(f"{what} did not answer within {PATIENCE_S:.0f} s")
    return pipe.recv()


def linked(engines: int, gateways: int, seconds: float) -> Figures:
    """Processor time of both sides while nothing is spoken."""
    ports, pids = [free_port() for _ in range(engines)], []
    with ExitStack() as stack:
        for target, arguments in ((_host_engines, (ports, 64)), (_link_gateways, (ports, gateways))):
            pipe, pid = stack.enter_context(spawned(target, *arguments))
            pids.append(pid)
            _wait_for(pipe, "engines and gateways")
        time.sleep(min(2.0, seconds))
        before = [cpu_seconds(pid) for pid in pids]
        memory = [private_bytes(pid) for pid in pids]
        time.sleep(seconds)
        engine_s, gateway_s = (cpu_seconds(pid) - first for pid, first in zip(pids, before, strict=True))
    links = engines * gateways
    return {
        "links": links,
        "gateways_cpu_share": gateway_s / seconds,
        "engines_cpu_share": engine_s / seconds,
        "gateways_cpu_us_per_link_second": 1e6 * gateway_s / seconds / links,
        "gateways_mib": memory[1] / 2**20,
    }


# Sessions


async def spoken(sessions: int, seconds: float) -> Figures:
    """Sessions speak at one gateway for some seconds; then it is killed, and they resume at the other one."""
    engine_port, ports = free_port(), [free_port(), free_port()]
    with (
        tempfile.TemporaryDirectory(prefix="fleet-size-") as where,
        spawned(_host_engines, [engine_port], 1000) as (pipe, engine_pid),
    ):
        folder = Path(where)
        (folder / "secret").write_bytes(SECRET)
        table = {"number": 1, "engines": [{"name": "e1", "address": f"tcp://127.0.0.1:{engine_port}"}]}
        (folder / "table.json").write_text(json.dumps(table))
        command = [sys.executable, "-m", "realtime.cli", "serve", "--workers", "1", "--limits.max-load", "0"]
        command += ["--engine-table", str(folder / "table.json"), "--fleet-secret-file", str(folder / "secret")]
        gateways = [Child("gateway", [*command, "--port", str(port)], folder / f"{port}.log") for port in ports]
        try:
            wait_until_ready([f"http://127.0.0.1:{port}/ready" for port in ports], *gateways)
            _wait_for(pipe, "the engine")
            return await _speak_and_resume(pipe, engine_pid, gateways, ports, sessions, seconds)
        finally:
            for gateway in gateways:
                gateway.kill()


async def _speak_and_resume(
    pipe: Connection, engine_pid: int, gateways: list[Child], ports: list[int], sessions: int, seconds: float
) -> Figures:
    appends = appends_of(looped(pcm16(speech()), seconds + 60.0))
    clients = [PacedClient(f"ws://127.0.0.1:{ports[0]}/v1/realtime", appends) for _ in range(sessions)]
    tasks = [asyncio.create_task(client.speak()) for client in clients]

    async def counts() -> Counter[str]:
        pipe.send(None)
        return Counter(await asyncio.to_thread(_wait_for, pipe, "the engine"))

    try:
        await until(lambda: all(client.events for client in clients))
        await asyncio.sleep(min(2.0, seconds))
        first, began = await counts(), time.monotonic()
        await asyncio.sleep(seconds)
        counted, passed = await counts() - first, time.monotonic() - began
        for client in clients:
            client._url = f"ws://127.0.0.1:{ports[1]}/v1/realtime"
        pids = (gateways[1].pid, engine_pid)
        before = [cpu_seconds(pid) for pid in pids]
        lost_at = time.monotonic()
        gateways[0].kill()
        await until(lambda: all(client.resumed_s for client in clients))
        all_back_s = time.monotonic() - lost_at
        gateway_s, engine_s = (cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "saves_per_session_second": counted["saves"] / passed / sessions,
        "save_bytes_per_session_second": counted["save_bytes"] / passed / sessions,
        "sessions_lost": sum(client.begun - 1 for client in clients),
        "all_back_s": all_back_s,
        **percentiles("back_s", [client.resumed_s[0] for client in clients], 50, 99),
        "adopting_gateway_cpu_ms_per_session": 1000 * gateway_s / sessions,
        "adopting_engine_cpu_ms_per_session": 1000 * engine_s / sessions,
    }


# The command


def measure(options: argparse.Namespace) -> Figures:
    figures: Figures = {}

    def add(title: str, found: Figures) -> None:
        show(title, found)
        figures[title] = found
        write_json(options, figures)

    for size in sorted({max(2, options.machines // 10), options.machines}):
        add(f"links, {size} engines at 1 gateway", linked(size, 1, options.seconds))
        add(f"links, 1 engine at {size} gateways", linked(1, size, options.seconds))
    for size in map(int, options.spoken.split(",")):
        add(f"sessions, {size}", asyncio.run(spoken(size, options.seconds)))
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--machines", type=int, default=50, help="the fleet, for links")
    parser.add_argument("--spoken", default="8,16,32", help="numbers of sessions that speak")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring each size")
    run_command(parser, arguments, measure, machines=2, spoken="2", seconds=0.5)


if __name__ == "__main__":
    main()
