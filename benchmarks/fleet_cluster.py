"""The fleet of `benchmarks.fleet`: a cluster on this machine, an operator's command line, and ways to lose parts.

Nodes are processes of `tickertape fleet join` on this machine. A balancer in this process stands before the gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet_network import Balancer
from fleet.cluster.connect import start_head
from fleet.keepers.process import Records, kill_family
from fleet.plan import read_plan

# Engines on some, gateways on the others: a machine with both would take both holders of a session with it.
ENGINE_NODES, EDGES = ("n1", "n2"), ("n3", "n4")
NODES = (*ENGINE_NODES, *EDGES)
PATIENCE_S = 300.0
# A status that is older is that of a manager that is away.
FRESH_S = 5.0
# Longer than the 4 s after which a link counts as dead.
CUT_S = 6.0
Told = dict[str, Any]
# Whether a status was written when the loss was over: one that is whole may be from before it.
Mended = Callable[[Told], bool]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is run. `streams` is how many an engine has room for."""

    model: str
    streams: int
    is_null: bool
    # Short, so that a benchmark sees what takes minutes in earnest.
    scale: str = "[scale]\nabove = 0.8\nabove_s = 2\nbelow = 0.5\nbelow_s = 5\ncool_down_s = 3\n"


class Fleet:
    """`status` is what the manager wrote down last: a command would take processor time from the speech."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder = folder
        self.balancer = Balancer()
        self._shape = shape
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._base = 21_000 + os.getpid() % 400 * 20
        self._head_port = 6400 + os.getpid() % 500
        model = "" if shape.is_null else f'name = "{shape.model}"\n'
        (folder / "server.toml").write_text(
            f"[model]\n{model}threads = 1\nmax_streams = {shape.streams}\n[limits]\nmax_load = 0.0\n"
        )
        self.write_plan(least=2, most=3)

    def write_plan(self, least: int, most: int) -> None:
        null = ["-m", "benchmarks.null_engine", "--streams", str(self._shape.streams)]
        engine = [sys.executable, *null] if self._shape.is_null else []
        gateway = [sys.executable, "-m", "benchmarks.fleet_network"]
        ports = self._base, self._base + 10
        (self.folder / "fleet.toml").write_text(
            f'name = "bench"\ncluster = "127.0.0.1:{self._head_port}"\nstate_folder = "{self.folder}/state"\n'
            f'config = "server.toml"\nhead_works = false\nlook_s = 0.5\n'
            f"[engine]\nleast = {least}\nmost = {most}\ncpus = 0.2\nport = {ports[0]}\ndrain_s = 20\n"
            f"program = {json.dumps(engine)}\n"
            f"[gateway]\ncount = 2\ncpus = 0.2\nport = {ports[1]}\ndrain_s = 2\nprogram = {json.dumps(gateway)}\n"
            + self._shape.scale
        )

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.balancer.port}/v1/realtime"

    @property
    def state(self) -> Path:
        return self.folder / "state" / "bench"

    async def run(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "realtime.cli", "fleet", *arguments),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"tickertape fleet {' '.join(arguments)}: {err.decode().strip()}")
        return out.decode()

    def status(self) -> Told:
        """The balancer learns from it which gateways serve, as others do by asking for /ready."""
        found: Told = json.loads((self.state / "status.json").read_text())
        gateways = [unit for unit in found["units"] if unit["kind"] == "gateway" and unit["pid"]]
        serving = [unit for unit in gateways if unit["state"] == "serving"] or gateways
        self.balancer.gateways = [("127.0.0.1", unit["port"]) for unit in serving]
        return found

    @property
    def is_fresh(self) -> bool:
        return time.time() - (self.state / "status.json").stat().st_mtime < FRESH_S

    async def start(self) -> None:
        await self.balancer.start()
        file = self.folder / "fleet.toml"
        await asyncio.to_thread(start_head, read_plan(file))
        nodes = NodeCount(file)
        # One after the other: nodes of one machine that start together take each other's ports.
        for there, name in enumerate(NODES, 2):
            self.join(name)
            await asyncio.to_thread(nodes.wait_for, there)
        nodes.close()
        # The first look finds all nodes, so that engines and gateways are spread over them.
        await self.run("up", "--wait", str(PATIENCE_S))
        await self.until_whole()

    def join(self, name: str) -> None:
        edge = ("--edge",) if name in EDGES else ()
        command = (sys.executable, "-m", "realtime.cli", "fleet", "join", "--name", name, *edge)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        self._nodes[name] = process

    def is_whole(self, status: Told) -> bool:
        # Of a lost keeper nobody knows the process, and what it kept counts as it was until the node is missed.
        serving = [unit for unit in status["units"] if unit["state"] == "serving" and unit["pid"]]
        wanted = status["engines_wanted"] + status["gateways_wanted"]
        return self.is_fresh and len(serving) == wanted == len(status["units"]) and len(status["nodes"]) > len(NODES)

    async def until_whole(self, is_mended: Mended = lambda status: True) -> Told:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                if self.is_whole(status := self.status()) and is_mended(status):
                    return status
            if time.monotonic() > deadline:
                raise RuntimeError(f"the fleet did not become whole: {self.status()}")
            await asyncio.sleep(0.2)

    async def spread(self) -> None:
        """What was started elsewhere when a node was lost stays there until the operator has it spread anew."""
        units = (await self.until_whole())["units"]
        if len({(unit["kind"], unit["node"]) for unit in units}) < len(units):
            await self.run("upgrade", "--wait", str(PATIENCE_S))
            await self.until_whole()

    async def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            await self.run("down", "--wait", "90")
        for process in self._nodes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for folder in (self.state / "cluster", *(self.state / "nodes").glob("*")):
            for record in Records(folder).running():
                kill_family(record)

    # What is lost, each time one that carries something, if there is one.

    def one(self, status: Told, kind: str) -> Told:
        units = [unit for unit in status["units"] if unit["kind"] == kind and unit["state"] == "serving"]
        chosen: Told = random.choice([unit for unit in units if unit["busy"]] or units)
        return chosen

    async def lose_calm(self, status: Told, away_s: float) -> Mended:
        """Nothing: what everything else is compared with."""
        return lambda now: bool(now["looks"] > status["looks"] + 2)

    async def lose_engine(self, status: Told, away_s: float) -> Mended:
        return kill_unit(self.one(status, "engine"))

    async def lose_gateway(self, status: Told, away_s: float) -> Mended:
        return kill_unit(self.one(status, "gateway"))

    async def lose_keeper(self, status: Told, away_s: float) -> Mended:
        node = self._nodes[self.one(status, random.choice(("engine", "gateway")))["node"]].pid
        killed = set(keepers_below(node))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        return lambda now: len(set(keepers_below(node)) - killed) == len(killed)

    async def lose_node(self, status: Told, away_s: float) -> Mended:
        """The machine is gone: Ray's part and ours. It comes back empty."""
        name = self.one(status, random.choice(("engine", "gateway")))["node"]
        gone = [unit for unit in status["units"] if unit["node"] == name]
        print(f"{name} goes, of {[(unit['name'], unit['node']) for unit in status['units']]}", flush=True)
        # The keepers first: they would start again what is killed.
        os.killpg(self._nodes[name].pid, signal.SIGKILL)
        for unit in gone:
            kill_unit(unit)
        await asyncio.to_thread(self._nodes[name].wait)
        self.join(name)
        # It may be back before the cluster has missed it; then the same units are started there anew.
        return are_gone(gone)

    async def lose_head(self, status: Told, away_s: float) -> Mended:
        record = Records(self.state / "cluster").read("head")
        assert record is not None
        kill_family(record)
        await asyncio.sleep(away_s)
        await self.run("up", "--wait", str(PATIENCE_S))
        return lambda now: bool(now["pid"] != status["pid"])

    async def lose_network(self, status: Told, away_s: float) -> Mended:
        engine, gateway = self.one(status, "engine"), self.one(status, "gateway")
        cut = self.state / "nodes" / gateway["node"] / f"cut-{engine['name']}"
        cut.touch()
        await asyncio.sleep(CUT_S)
        cut.unlink()
        return lambda now: True

    async def lose_upgrade(self, status: Told, away_s: float) -> Mended:
        await self.run("upgrade", "--wait", str(PATIENCE_S))
        return lambda now: bool(now["generation"] > status["generation"])


def kill_unit(unit: Told) -> Mended:
    """A gateway without the process that stands between it and the engines: what it has sent is on its way."""
    of_gateway = Path(f"/proc/{unit['pid']}/task/{unit['pid']}/children").read_text().split()
    for pid in map(int, of_gateway if unit["kind"] == "gateway" else [unit["pid"]]):
        os.kill(pid, signal.SIGKILL)
    return are_gone([unit])


def are_gone(units: list[Told]) -> Mended:
    pids = {unit["pid"] for unit in units}
    return lambda now: not pids & {unit["pid"] for unit in now["units"]}


class NodeCount:
    """Counts the nodes of the cluster, in a process of its own: whoever has once spoken to Ray ends with it."""

    SCRIPT = (
        "import sys, time, ray; from fleet.cluster.connect import connect; from fleet.plan import read_plan\n"
        "connect(read_plan(sys.argv[1]), 200.0)\n"
        "while True: print(sum(node['Alive'] for node in ray.nodes()), flush=True); time.sleep(0.5)"
    )

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", self.SCRIPT, str(file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_for(self, count: int) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Ray has things to say of its own on the way.
            if line.strip().isdigit() and int(line) >= count:
                return
        raise RuntimeError("the cluster cannot be asked for its nodes")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def keepers_below(node: int) -> list[int]:
    """Ray's workers of a node that are keepers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            if session == node and (path / "cmdline").read_text().startswith("ray::KeeperActor"):
                found.append(int(path.name))
    return found
