"""Parts of a fleet killed under live sessions: does a word change, and how long until each session goes on?

    python -m benchmarks.fleet [--kinds engine,gateway,keeper,node,head,network,upgrade,scale] [--times 10]

A Ray cluster of a head and four nodes on this machine, made by `tickertape fleet up` and `tickertape fleet join`, with
real `tickertape engine` and `tickertape serve` processes, encrypted links, and a load balancer in this process. Each
session hears the same recording at the pace of speech and resumes through any gateway. A calm run comes first; then,
for each kind and as often as asked, the part is lost in the middle. Words are compared with those of the calm run.
Needs the extra tickertape[fleet]. `--head-away` says for how long the head is gone, `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audio.containers import read_file
from benchmarks.fleet_network import Balancer
from benchmarks.survival import differences
from benchmarks.workers import RATE, Speaker
from engine.weights.store import cache_folder
from fleet.cluster.connect import start_head
from fleet.keepers.process import Records, kill_family
from fleet.plan import FleetPlan, read_plan
from realtime.client import lasting_session
from realtime.commands.pull import SAMPLE

KINDS = ("engine", "gateway", "keeper", "node", "head", "network", "upgrade", "scale")
# Engines on some, gateways on the others: a machine with both would take both holders of a session with it.
ENGINE_NODES, EDGES = ("n1", "n2"), ("n3", "n4")
NODES = (*ENGINE_NODES, *EDGES)
PATIENCE_S = 300.0
# A status that is older is that of a manager that is away.
FRESH_S = 10.0
Told = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of loss, over all its times."""

    kind: str
    times: int
    sessions: int
    # Sessions that did not come to their end, and those that had to begin anew (410).
    lost: int
    # Connections that were lost, and seconds from each loss until the session went on.
    losses: int
    resumed_p50_s: float
    resumed_max_s: float
    # Longest time in which a session got no event, over that of the calm run.
    longest_silence_s: float
    words: int
    words_that_differ: int
    wrong_numbers: int
    wrong_items: int
    # Runs at whose end the engines had more streams than there were sessions.
    owned_twice: int
    actor_calls_per_s: float


class Session(Speaker):
    """A speaker that notes how long it heard nothing."""

    def __init__(self, url: str, audio: bytes) -> None:
        super().__init__(url, audio)
        self.begun = 0
        self.longest_silence_s = 0.0
        self._heard_at = time.perf_counter()

    def _note(self, event: Told) -> None:
        super()._note(event)
        now = time.perf_counter()
        self.longest_silence_s = max(self.longest_silence_s, now - self._heard_at)
        self._heard_at = now
        self.begun += event["type"] == "session.updated"


class Fleet:
    """The cluster, its nodes, and the command line that an operator has."""

    def __init__(self, folder: Path, model: str, through: bool) -> None:
        self.folder = folder
        self.balancer = Balancer()
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        base = 21_000 + os.getpid() % 400 * 20
        (folder / "server.toml").write_text(
            f'[model]\nname = "{model}"\nthreads = 1\nmax_streams = 8\n[limits]\nmax_load = 0.0\n'
        )
        program = [sys.executable, "-m", "benchmarks.fleet_network"] if through else []
        (folder / "fleet.toml").write_text(
            f'name = "bench"\ncluster = "127.0.0.1:{6400 + os.getpid() % 500}"\nstate_folder = "{folder}/state"\n'
            f'config = "server.toml"\nhead_works = false\n'
            f"[engine]\nleast = 2\nmost = 3\ncpus = 0.2\nport = {base}\ndrain_s = 20\n"
            f"[gateway]\ncount = 2\ncpus = 0.2\nport = {base + 10}\ndrain_s = 2\nprogram = {json.dumps(program)}\n"
        )

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
        """As the manager wrote it down last: a command of its own would take processor time from the speech."""
        found: Told = json.loads((self.state / "status.json").read_text())
        self.balancer.gateways = [
            ("127.0.0.1", unit["port"]) for unit in found["units"] if unit["kind"] == "gateway" and unit["pid"]
        ]
        return found

    async def start(self) -> None:
        await self.balancer.start()
        plan = read_plan(self.folder / "fleet.toml")
        await asyncio.to_thread(start_head, plan)
        # One after the other: nodes of one machine that start together take each other's ports.
        for there, name in enumerate(NODES, 2):
            self.join(name)
            await asyncio.to_thread(wait_for_nodes, plan, there)
        # The first look finds all nodes, so that engines and gateways are spread over them.
        await self.run("up", "--wait", str(PATIENCE_S))
        await self.until_whole()

    def join(self, name: str) -> None:
        edge = ("--edge",) if name in EDGES else ()
        command = (sys.executable, "-m", "realtime.cli", "fleet", "join", "--name", name, *edge)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        self._nodes[name] = process

    async def until_whole(self) -> Told:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                status = self.status()
                serving = [unit for unit in status["units"] if unit["state"] == "serving"]
                wanted = status["engines_wanted"] + status["gateways_wanted"]
                is_new = time.time() - (self.state / "status.json").stat().st_mtime < FRESH_S
                if is_new and len(serving) == wanted == len(status["units"]) and len(status["nodes"]) > len(NODES):
                    return status
            if time.monotonic() > deadline:
                raise RuntimeError("the fleet did not become whole")
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            await self.run("down", "--wait", "90")
        for process in self._nodes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for folder in (self.state / "cluster", *(self.state / "nodes").glob("*")):
            for record in Records(folder).running():
                kill_family(record)

    # What is lost

    def one(self, status: Told, kind: str) -> Told:
        """One that carries something, if there is one."""
        units = [unit for unit in status["units"] if unit["kind"] == kind and unit["state"] == "serving"]
        chosen: Told = random.choice([unit for unit in units if unit["busy"]] or units)
        return chosen

    async def lose_engine(self, status: Told, away_s: float) -> None:
        os.killpg(self.one(status, "engine")["pid"], signal.SIGKILL)

    async def lose_gateway(self, status: Told, away_s: float) -> None:
        os.killpg(self.one(status, "gateway")["pid"], signal.SIGKILL)

    async def lose_keeper(self, status: Told, away_s: float) -> None:
        for pid in keepers_below(self._nodes[self.one(status, "engine")["node"]].pid):
            os.kill(pid, signal.SIGKILL)

    async def lose_node(self, status: Told, away_s: float) -> None:
        """The machine is gone: Ray's part and ours. It comes back empty."""
        name = self.one(status, "engine")["node"]
        for record in Records(self.state / "nodes" / name).running():
            kill_family(record)
        os.killpg(self._nodes[name].pid, signal.SIGKILL)
        await asyncio.to_thread(self._nodes[name].wait)
        self.join(name)

    async def lose_head(self, status: Told, away_s: float) -> None:
        record = Records(self.state / "cluster").read("head")
        assert record is not None
        kill_family(record)
        await asyncio.sleep(away_s)
        await self.run("up", "--wait", "0")

    async def lose_network(self, status: Told, away_s: float) -> None:
        engine, gateway = self.one(status, "engine"), self.one(status, "gateway")
        cut = self.state / "nodes" / gateway["node"] / f"cut-{engine['name']}"
        cut.touch()
        await asyncio.sleep(15.0)
        cut.unlink()

    async def lose_upgrade(self, status: Told, away_s: float) -> None:
        await self.run("upgrade", "--wait", str(PATIENCE_S))

    async def lose_scale(self, status: Told, away_s: float) -> None:
        await self.run("scale", "3")
        await self.until_whole()
        await self.run("scale", "2")
        await self.until_whole()


def wait_for_nodes(plan: FleetPlan, count: int) -> None:
    """In a process of its own: whoever has once spoken to Ray ends with it."""
    script = (
        "import sys, time, ray; from fleet.cluster.connect import connect; from fleet.plan import read_plan\n"
        "connect(read_plan(sys.argv[1]), 200.0)\n"
        "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]): time.sleep(0.5)"
    )
    file = plan.folder.parent.parent / "fleet.toml"
    subprocess.run([sys.executable, "-c", script, str(file), str(count)], check=True, timeout=PATIENCE_S)


def keepers_below(node: int) -> list[int]:
    """Ray's workers of a node that are keepers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            if session == node and (path / "cmdline").read_text().startswith("ray::KeeperActor"):
                found.append(int(path.name))
    return found


async def watch(fleet: Fleet, sessions: int, over: asyncio.Event, twice: list[int]) -> None:
    """Look now and then: the balancer learns of new gateways, and no stream may be there twice for long."""
    while not over.is_set():
        with contextlib.suppress(OSError):
            status = fleet.status()
            twice.append(max(0, status["capacity"]["streams"] - sessions))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 2.0)


async def once(
    fleet: Fleet, audio: bytes, sessions: int, lose: Callable[[Told, float], Awaitable[None]] | None, away_s: float
) -> tuple[list[Session], int, int]:
    """All sessions at once, the loss in the middle: the sessions, how many failed, whether a stream was there twice."""
    await fleet.until_whole()
    speakers = [Session(f"ws://127.0.0.1:{fleet.balancer.port}/v1/realtime", audio) for _ in range(sessions)]
    over, twice = asyncio.Event(), list[int]()
    watching = asyncio.create_task(watch(fleet, sessions, over, twice))
    speaking = asyncio.gather(*(speaker.speak() for speaker in speakers), return_exceptions=True)
    if lose is not None:
        await asyncio.sleep(random.uniform(0.3, 0.6) * len(audio) / (2 * RATE))
        await lose(fleet.status(), away_s)
    ends = await asyncio.wait_for(speaking, PATIENCE_S)
    over.set()
    await watching
    for end in ends:
        if end is not None:
            print(f"a session failed: {end!r}", flush=True)
    return speakers, sum(end is not None for end in ends), sum(count > 0 for count in twice[-1:])


async def measure(arguments: argparse.Namespace) -> list[Result]:
    sound = next(file for file in (cache_folder() / SAMPLE).iterdir() if file.suffix == ".wav")
    samples = np.concatenate(list(read_file(sound)))[: int(arguments.seconds * RATE)]
    audio = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    lasting_session.FIRST_WAIT_S = 0.1
    kinds = arguments.kinds.split(",")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = Fleet(Path(folder), arguments.model, "network" in kinds)
        try:
            await fleet.start()
            (alone,), failed, _ = await once(fleet, audio, 1, None, 0.0)
            if failed:
                raise RuntimeError("the calm run failed: what follows would mean nothing")
            print(f"calm: {len(' '.join(alone.transcripts).split())} words", flush=True)
            for kind in kinds:
                results.append(await series(fleet, kind, audio, alone, arguments))
                print(asdict(results[-1]), flush=True)
        finally:
            await fleet.stop()
    return results


async def series(fleet: Fleet, kind: str, audio: bytes, alone: Session, arguments: argparse.Namespace) -> Result:
    """The same loss again and again."""
    begun, before = time.monotonic(), fleet.status()["actor_calls"]
    all_sessions: list[Session] = []
    lost = owned_twice = 0
    lose = None if kind == "calm" else getattr(fleet, f"lose_{kind}")
    for _ in range(arguments.times):
        speakers, failed, twice = await once(fleet, audio, arguments.sessions, lose, arguments.head_away)
        all_sessions += speakers
        lost += failed + sum(speaker.begun > 1 for speaker in speakers)
        owned_twice += twice
    calls = (await fleet.until_whole())["actor_calls"] - before
    waits = [wait for speaker in all_sessions for wait in speaker.resumed_s]
    said = [" ".join(speaker.transcripts) for speaker in all_sessions]
    differ, words = differences(said, [" ".join(alone.transcripts)] * len(said))
    silence = max(speaker.longest_silence_s for speaker in all_sessions) - alone.longest_silence_s
    return Result(
        kind,
        arguments.times,
        arguments.sessions,
        lost,
        len(waits),
        statistics.median(waits) if waits else 0.0,
        max(waits, default=0.0),
        round(silence, 2),
        words,
        differ,
        sum(speaker.wrong_numbers for speaker in all_sessions),
        sum(speaker.wrong_items for speaker in all_sessions),
        owned_twice,
        # A manager that was lost counts from nothing again: a figure below 0 says so.
        round(calls / (time.monotonic() - begun), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, separated by commas; calm is one too")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="how much of the recording each session hears")
    parser.add_argument("--model", default="moonshine-tiny")
    parser.add_argument("--head-away", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.kinds.split(",")) - {*KINDS, "calm"}
    if unknown:
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
    results = asyncio.run(measure(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
