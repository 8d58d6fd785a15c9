"""Kills or stops parts of a fleet under live sessions, for `python -m benchmarks.survival fleet`.

The fleet is a Ray cluster of a head and four nodes on this machine, made by `tickertape fleet up` and `tickertape fleet
join`, with real `tickertape engine` and `tickertape serve` processes, encrypted links, and a load balancer in this
process. Clients open one session after the other, send the same recording at the pace of speech, and resume through any
gateway. With --null the engines have no model (`benchmarks/engines.py`); then event numbers are tested, but not a
model's words. Needs the extra tickertape[fleet].

For each kind of `LOSSES` a part is lost as often as asked, each time when the fleet is complete again. `calm` loses
nothing, and the others are compared with it. `went_on` is the time from the loss until audio that was spoken after it
has been acknowledged, for the last of all speaking clients. `head-long` takes the head away for two minutes.
`stop-PART-SECONDS` stops an engine, a gateway, the supervisors of a node, the manager or Ray's own process of a node
(SIGSTOP) and continues it. Meanwhile connections stay open without answers: clients leave a gateway after `LEAVE_S`,
some ask it again, and their messages wait there until it continues.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.clients import PacedClient, appends_of, resume_at_once, summary
from benchmarks.measuring import ROOT, percentiles, read_process, row, stat_of, until
from benchmarks.recordings import sample_speech
from benchmarks.sounds import SAMPLE_RATE, pcm16
from realtime.client import wire_client
from realtime.client.wire_client import CannotConnect

# Engines and gateways are on different nodes: with both on one, its loss would lose sessions.
ENGINE_NODES, EDGES = ("n1", "n2"), ("n3", "n4")
NODES = (*ENGINE_NODES, *EDGES)
PATIENCE_S = 300.0
# A status older than this means that the manager is away.
FRESH_S = 5.0
HEAD_SHORT_S, HEAD_LONG_S = 5.0, 120.0
# Streams that an engine has room for.
STREAMS = 8
# Seconds for which parts are stopped: links survive the first, and Ray's view of a node the second.
STOP_S = (3, 10, 40)
# Seconds without an answer after which clients leave a gateway.
LEAVE_S = 2.0
# Longer than an engine remembers a gateway without heartbeats.
SETTLE_S = 60.0
# Ray checks a node every second here and gives it up after three misses: its own 15 s would be most of the run.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

Status = dict[str, Any]
# Whether a status was written when the loss was over: one that is whole may be from before it.
Mended = Callable[[Status], bool]
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


# The load balancer


async def join(near: Stream, far: Stream) -> None:
    """Copies bytes in both directions until either end closes."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    await asyncio.gather(copy(near[0], far[1]), copy(far[0], near[1]))


class Balancer:
    """One address for all gateways: each connection goes to a random one that accepts it."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self.port = 0
        # Both ends of each connection, by the port of its gateway.
        self._joined: dict[int, set[asyncio.StreamWriter]] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        if self.port:
            self._server.close()

    async def _take(self, *near: Any) -> None:
        for port in random.sample(self.ports, len(self.ports)):
            with contextlib.suppress(OSError):
                far = await asyncio.open_connection("127.0.0.1", port)
                ends, joined = {near[1], far[1]}, self._joined.setdefault(port, set())
                joined |= ends
                try:
                    return await join(near, far)
                finally:
                    joined -= ends
        near[1].close()

    def leave(self, port: int) -> None:
        """Close all connections to a gateway."""
        for end in self._joined.get(port, set()):
            end.close()


# The fleet


class Fleet:
    """A cluster on this machine, run by an operator's command line. `status` is what the manager wrote down last: a
    command would take processor time from the speech."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.state = folder, folder / "state" / "bench"
        self.balancer = Balancer()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        model = "" if options.null else f'name = "{options.model}"\n'
        (folder / "server.toml").write_text(
            f"[model]\n{model}threads = 1\nmax_streams = {STREAMS}\n[limits]\nmax_load = 0.0\n"
        )
        port, head_port = 21_000 + os.getpid() % 400 * 20, 6400 + os.getpid() % 500
        null = [sys.executable, "-m", "benchmarks.engines", "--max-streams", str(STREAMS)]
        (folder / "fleet.toml").write_text(
            f'name = "bench"\ncluster = "127.0.0.1:{head_port}"\nstate_folder = "{folder}/state"\n'
            f'config = "server.toml"\nhead_works = false\nlook_s = 0.5\n'
            f"[engine]\nleast = 2\nmost = 3\ncpus = 0.2\nport = {port}\ndrain_s = 20\n"
            f"program = {json.dumps(null if options.null else [])}\n"
            f"[gateway]\ncount = 2\ncpus = 0.2\nport = {port + 10}\ndrain_s = 2\n"
        )

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.balancer.port}/v1/realtime"

    async def run(self, *arguments: str) -> None:
        command = (sys.executable, "-m", "realtime.cli", "fleet", *arguments)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, err = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"tickertape fleet {' '.join(arguments)}: {err.decode().strip()}")

    def status(self) -> Status:
        """Tells the balancer which gateways serve; a real balancer checks /ready."""
        found: Status = json.loads((self.state / "status.json").read_text())
        gateways = [unit for unit in found["units"] if unit["kind"] == "gateway" and unit["pid"]]
        serving = [unit for unit in gateways if unit["state"] == "serving"] or gateways
        self.balancer.ports = [unit["port"] for unit in serving]
        return found

    async def start(self) -> None:
        from fleet.cluster.connect import start_head
        from fleet.plan import read_plan

        await self.balancer.start()
        file = self.folder / "fleet.toml"
        await asyncio.to_thread(start_head, read_plan(file))
        # One after the other: nodes of one machine that start together compete for ports.
        for there, name in enumerate(NODES, 2):
            self.join(name)
            await asyncio.to_thread(wait_for_nodes, file, there)
        # All nodes are there in the manager's first round, so that engines and gateways are spread over them.
        await self.run("up", "--wait", str(PATIENCE_S))
        await self.until_whole()

    def join(self, name: str) -> None:
        edge = ("--edge",) if name in EDGES else ()
        command = (sys.executable, "-m", "realtime.cli", "fleet", "join", "--name", name, *edge)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        self.nodes[name] = process

    def is_whole(self, status: Status) -> bool:
        # The process id of a lost supervisor is not reported, and its unit keeps its state until the node is given up.
        serving = [unit for unit in status["units"] if unit["state"] == "serving" and unit["pid"]]
        wanted = status["engines_wanted"] + status["gateways_wanted"]
        is_fresh = time.time() - (self.state / "status.json").stat().st_mtime < FRESH_S
        return is_fresh and len(serving) == wanted == len(status["units"]) and len(status["nodes"]) > len(NODES)

    async def until_whole(self, is_mended: Mended = lambda status: True, patience_s: float = PATIENCE_S) -> Status:
        """The status when the fleet is complete and `is_mended` says so; raises RuntimeError after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                status = self.status()
                # Called each time, because it may have side effects.
                if is_mended(status) and self.is_whole(status):
                    return status
            if time.monotonic() > deadline:
                raise RuntimeError(f"the fleet did not become whole: {self.status()}")
            await asyncio.sleep(0.2)

    async def spread(self) -> None:
        """Spreads the units again: after the loss of a node they stay on the other nodes until an upgrade."""
        units = (await self.until_whole())["units"]
        if len({(unit["kind"], unit["node"]) for unit in units}) < len(units):
            await self.run("upgrade", "--wait", str(PATIENCE_S))
            await self.until_whole()

    async def stop(self) -> None:
        from fleet.supervisors import Records, kill_process_group

        with contextlib.suppress(RuntimeError):
            await self.run("down", "--wait", "90")
        for process in self.nodes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        self.balancer.stop()
        for folder in (self.state / "cluster", *(self.state / "nodes").glob("*")):
            for record in Records(folder).running():
                kill_process_group(record)


def wait_for_nodes(file: Path, count: int) -> None:
    """Until the cluster has `count` nodes, asked in a process of its own: one that has once spoken to Ray ends with
    it."""
    script = (
        "import sys, time, ray; from fleet.cluster.connect import connect; from fleet.plan import read_plan\n"
        "connect(read_plan(sys.argv[1]), 200.0)\n"
        "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]): time.sleep(0.5)"
    )
    command = [sys.executable, "-c", script, str(file), str(count)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)


# Ways to lose a part. Each takes the fleet and its status before the loss, and returns when the fleet is repaired.


def one(status: Status, kind: str = "") -> Status:
    """A serving engine or gateway, preferably one with streams or sessions."""
    kind = kind if kind in ("engine", "gateway") else random.choice(("engine", "gateway"))
    units = [unit for unit in status["units"] if unit["kind"] == kind and unit["state"] == "serving"]
    chosen: Status = random.choice([unit for unit in units if unit["busy"]] or units)
    return chosen


def below(node: subprocess.Popen[bytes], part: str) -> list[int]:
    """The supervisors of a node, which are workers of Ray, or Ray's own process there."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    commands = {
        pid: read_process(pid, "cmdline") for pid in pids if (fields := stat_of(pid)) and int(fields[3]) == node.pid
    }
    if part == "supervisor":
        return [pid for pid, command in commands.items() if command.startswith("ray::SupervisorActor")]
    return [pid for pid, command in commands.items() if Path(command.partition("\0")[0]).name == "raylet"]


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(units: list[Status]) -> Mended:
    gone = {unit["pid"] for unit in units}
    signal_all(gone, signal.SIGKILL)
    return lambda now: not gone & {unit["pid"] for unit in now["units"]}


async def lose_nothing(fleet: Fleet, status: Status) -> Mended:
    return lambda now: bool(now["looks"] > status["looks"] + 2)


async def lose_unit(kind: str, fleet: Fleet, status: Status) -> Mended:
    return kill([one(status, kind)])


async def lose_supervisors(fleet: Fleet, status: Status) -> Mended:
    node = fleet.nodes[one(status)["node"]]
    killed = below(node, "supervisor")
    signal_all(killed, signal.SIGKILL)
    return lambda now: len(set(below(node, "supervisor")) - set(killed)) == len(killed)


async def lose_node(fleet: Fleet, status: Status) -> Mended:
    """Kills all processes of a node, Ray's and the fleet's. It comes back empty."""
    name = one(status)["node"]
    print(f"{name} goes, of {[(unit['name'], unit['node']) for unit in status['units']]}", flush=True)
    # The supervisors first: they would restart the killed processes.
    os.killpg(fleet.nodes[name].pid, signal.SIGKILL)
    is_mended = kill([unit for unit in status["units"] if unit["node"] == name])
    await asyncio.to_thread(fleet.nodes[name].wait)
    fleet.join(name)
    # It may be back before the cluster has given it up; then the same units are started there again.
    return is_mended


async def lose_head(away_s: float, fleet: Fleet, status: Status) -> Mended:
    from fleet.supervisors import Records, kill_process_group

    record = Records(fleet.state / "cluster").read("head")
    assert record is not None
    kill_process_group(record)
    await asyncio.sleep(away_s)
    await fleet.run("up", "--wait", str(PATIENCE_S))
    return lambda now: bool(now["pid"] != status["pid"])


async def stop(part: str, seconds: float, fleet: Fleet, status: Status) -> Mended:
    """Stop a part for these seconds. A node that was given up meanwhile ends when it continues, and is started again,
    as a service is."""
    unit = one(status, part)
    node = unit["node"]
    if part == "manager":
        pids = [status["pid"]]
    else:
        pids = [unit["pid"]] if part == unit["kind"] else below(fleet.nodes[node], part)
    if not pids:
        raise RuntimeError(f"there is no {part} to stop")
    signal_all(pids, signal.SIGSTOP)
    try:
        if part == "gateway":
            await asyncio.sleep(LEAVE_S)
            fleet.balancer.leave(unit["port"])
            seconds -= LEAVE_S
        await asyncio.sleep(seconds)
    finally:
        signal_all(pids, signal.SIGCONT)
    went_on_at = time.time()

    def is_mended(now: Status) -> bool:
        if fleet.nodes[node].poll() is not None:
            fleet.join(node)
        # At least two rounds of the manager later: Ray takes a moment to report that a node is gone.
        return time.time() > went_on_at + 2 * FRESH_S

    return is_mended


async def upgrade(fleet: Fleet, status: Status) -> Mended:
    await fleet.run("upgrade", "--wait", str(PATIENCE_S))
    return lambda now: bool(now["generation"] > status["generation"])


LOSSES: dict[str, Callable[[Fleet, Status], Awaitable[Mended]]] = {
    "calm": lose_nothing,
    "engine": partial(lose_unit, "engine"),
    "gateway": partial(lose_unit, "gateway"),
    "supervisor": lose_supervisors,
    "node": lose_node,
    "head": partial(lose_head, HEAD_SHORT_S),
    "head-long": partial(lose_head, HEAD_LONG_S),
    "upgrade": upgrade,
    **{
        f"stop-{part}-{seconds}": partial(stop, part, seconds)
        for part in ("engine", "gateway", "supervisor", "manager", "raylet")
        for seconds in STOP_S
    },
}
STOPS = ",".join(f"{kind}:2" for kind in LOSSES if kind.startswith("stop-"))
DEFAULT_KINDS = f"calm:3,engine:10,gateway:10,supervisor:10,node:10,head:10,head-long:1,{STOPS},upgrade:2"


# Clients


class Crowd:
    """A fixed number of clients at a time. Each sends all of the audio in a session, then another one begins."""

    def __init__(self, url: str, audio: bytes, count: int, apart_s: float) -> None:
        self.clients: list[PacedClient] = []
        self._url, self._audio = url, audio
        self._is_over = False
        self._living = [asyncio.create_task(self._live(number * apart_s)) for number in range(count)]

    @property
    def speaking(self) -> list[PacedClient]:
        return [client for client in self.clients if client.is_speaking]

    async def until_all_speak(self) -> None:
        await until(lambda: sum(bool(client.begun) for client in self.speaking) == len(self._living), PATIENCE_S)

    async def until_heard(self) -> float:
        """Waits until new audio of all speaking clients is acknowledged; returns the seconds of the last one."""
        marks = [client.mark() for client in self.speaking]
        if not marks:
            return 0.0
        await asyncio.wait(marks)
        return max((mark.result() for mark in marks if not mark.cancelled()), default=0.0)

    async def end(self) -> None:
        """Waits until all clients have finished their sessions; no new ones begin."""
        self._is_over = True
        await asyncio.gather(*self._living)

    async def _live(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while not self._is_over:
            client = PacedClient(self._url, appends_of(self._audio))
            self.clients.append(client)
            try:
                await client.speak()
            except CannotConnect as error:
                if not client.begun:
                    self.clients.remove(client)
                    await asyncio.sleep(0.5)
                    continue
                client.failure = str(error)


# The measurements


class Matrix:
    """One fleet, and everything that is done to it."""

    def __init__(self, fleet: Fleet, audio: bytes, options: argparse.Namespace) -> None:
        self._fleet, self._audio, self._options = fleet, audio, options
        self._alone = ""

    def _crowd(self, clients: int, apart_s: float) -> Crowd:
        return Crowd(self._fleet.url, self._audio, clients, apart_s)

    async def play_alone(self) -> None:
        crowd = self._crowd(1, 0.0)
        await asyncio.sleep(1.0)
        await crowd.end()
        if len(crowd.clients) != 1 or crowd.clients[0].failure:
            raise RuntimeError(f"the calm run failed: {[client.outcome() for client in crowd.clients]}")
        self._alone = crowd.clients[0].text
        print(f"alone: {self._alone}", flush=True)

    async def series(self, kind: str, times: int) -> dict[str, Any]:
        """Repeats the same loss."""
        clients, fleet = self._options.sessions, self._fleet
        crowd = self._crowd(clients, len(self._audio) / (2 * SAMPLE_RATE) / clients)
        watching = asyncio.create_task(self._watch_gateways())
        begun, went_on_s, owned_twice = time.monotonic(), list[float](), 0
        calls = set[float]()
        try:
            await crowd.until_all_speak()
            for _ in range(times):
                await fleet.spread()
                owned_twice += not await self._settled(crowd)
                before = fleet.status()
                hearing = asyncio.create_task(crowd.until_heard())
                is_mended = await LOSSES[kind](fleet, before)
                went_on_s.append(await hearing)
                after = await fleet.until_whole(is_mended)
                # A new manager counts from 0.
                if (looks := after["looks"] - before["looks"]) > 0:
                    calls.add(round((after["actor_calls"] - before["actor_calls"]) / looks, 2))
            owned_twice += not await self._settled(crowd)
            await crowd.end()
            owned_twice += not await self._has_at_most(0)
        finally:
            watching.cancel()
        for client in crowd.clients:
            if client.failure or client.begun > 1 or client.wrong_numbers or client.text != self._alone:
                print(f"a session differs: {client.outcome()}", flush=True)
        return {
            "kind": kind,
            "times": times,
            "at_once": clients,
            **percentiles("went_on_s", went_on_s, 50, 100),
            **summary([client.outcome() for client in crowd.clients], [self._alone] * len(crowd.clients)),
            # Engines had more streams than there were clients: a stream was left over.
            "owned_twice": owned_twice,
            "calls_per_look": sorted(calls),
            "took_s": round(time.monotonic() - begun),
        }

    async def _watch_gateways(self) -> None:
        """The balancer learns which gateways serve."""
        while True:
            with contextlib.suppress(OSError):
                self._fleet.status()
            await asyncio.sleep(0.1)

    async def _settled(self, crowd: Crowd) -> bool:
        """Waits until the fleet is complete and all audio is acknowledged; False if streams are left over."""
        await self._fleet.until_whole()
        await crowd.until_heard()
        return await self._has_at_most(self._options.sessions)

    async def _has_at_most(self, streams: int) -> bool:
        await self._fleet.until_whole()
        try:
            await self._fleet.until_whole(lambda now: bool(now["capacity"]["streams"] <= streams), SETTLE_S)
        except RuntimeError:
            return False
        return True


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    resume_at_once()
    wire_client.OPEN_TIMEOUT_S = LEAVE_S
    # Parts of the fleet run with other working folders and import modules from this one.
    os.environ |= HEALTH | {"PYTHONPATH": str(ROOT)}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = Fleet(Path(folder), options)
        matrix = Matrix(fleet, pcm16(sample_speech(options.seconds)), options)
        try:
            await fleet.start()
            await matrix.play_alone()
            for kind, times in options.kinds:
                results.append(await matrix.series(kind, times))
                print(row(results[-1]), flush=True)
        finally:
            await fleet.stop()
    return results
