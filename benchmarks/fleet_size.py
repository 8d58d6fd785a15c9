"""What a fleet costs as it grows: the manager, links, handoffs, reconnecting clients, and viewers, at several sizes.

    python -m benchmarks.fleet_size [--parts manager,links,sessions,names,herd,ray] [--machines 50] [--sessions 20000]

Everything runs on this machine, without models. Costs are processor time, so that a busy machine changes them little.
`manager`: rounds of the real manager over simulated keepers, with the size of each call as Ray pickles it. `links`:
engines without a model, all in one process, and the engine clients of gateways in another one, over encrypted links
without audio. `sessions`: real gateways and an engine without a model; sessions speak, one gateway is killed and the
other one adopts them. `names`: published sessions, whose words go over links between gateways. `herd`: a simulation of
clients that lost their gateway, with the waits of our clients and the measured cost of an adoption. `ray`: calls to
actors of a cluster on this machine; needs the extra tickertape[fleet].

    python -m benchmarks.fleet_size serve ...

runs there instead of `tickertape serve`: a gateway that counts the handoffs that it saves.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from benchmarks.clients import PacedClient, appends_of, looped
from benchmarks.engines import null_loop
from benchmarks.measuring import (
    RunFailed,
    cpu_seconds,
    parser_of,
    percentiles,
    private_bytes,
    show,
    spawned,
    until,
    write_json,
)
from benchmarks.servers import Child, free_port, is_ready
from benchmarks.sounds import pcm16, speech
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import RemoteEngine
from engine.client.link import EngineLink
from engine.client.pool import GatewayEntry
from engine.messages import Command, Item, SaveHandoff
from fleet.manager import Manager, ManagerState
from fleet.plan import EnginePlan, FleetPlan, GatewayPlan
from fleet.state import Kind, Node, Table, Unit, left_to_others
from realtime.client import resuming_session
from realtime.client.resuming_session import spread
from realtime.client.wire_client import OPEN_TIMEOUT_S
from realtime.http.info_routes import CapacityFigures
from realtime.listeners import raise_limit
from realtime.serving.fleet_publishing import FleetNames, home_of
from realtime.serving.publishing import Added, Publisher

PARTS = ("manager", "links", "sessions", "names", "herd", "ray")
SECRET = b"the secret of a fleet of a benchmark"
# A gateway process at 70 % of a core holds this many sessions (docs/fleet.md).
SESSIONS_PER_WORKER = 140
# The file in which a gateway that counts writes its counts.
COUNTS = "FLEET_SIZE_COUNTS"


# The manager


def example(kind: Any) -> Any:
    """A value of a type, as long as a usual one."""
    origin = get_origin(kind)
    if kind is str:
        return "tcp://10.0.0.123:5600"
    if kind in (int, float, bool):
        return {int: 123, float: 0.123, bool: False}[kind]
    if origin is list:
        return []
    if origin is Literal:
        return get_args(kind)[0]
    if origin is not None:
        return next((example(one) for one in get_args(kind) if one in (int, float, str)), None)
    return {f.encode_name: example(f.type) for f in _fields(kind)}


def _fields(kind: Any) -> tuple[Any, ...]:
    return msgspec.structs.fields(kind)


class AnsweringKeepers:
    """Keepers of units that serve from the first round on; what calls carry is counted as Ray would pickle it."""

    def __init__(self, machines: int) -> None:
        self.there = [Node(f"n{number}", f"10.0.0.{number}", cpus=4.0, gpus=1.0) for number in range(machines)]
        self.units: dict[str, Unit] = {}
        self.tables: dict[str, Table] = {}
        # Time that is the keepers', not the manager's.
        self.spent_s = 0.0
        self._left: dict[str, frozenset[str]] = {}
        self.bytes_out = self.bytes_in = self.tables_sent = 0
        engine = next(f for f in _fields(CapacityFigures) if f.name == "engines")
        self._capacity = {f.encode_name: example(f.type) for f in _fields(CapacityFigures)} | {"engines_missing": []}
        self._engine = example(get_args(engine.type)[0])

    def nodes(self) -> list[Node]:
        return list(self.there)

    def units_on_node(self, node: Node) -> list[Unit]:
        return []

    def start_keeper(self, unit: Unit, plan: FleetPlan) -> None:
        self.units[unit.name] = unit

    def reports(self, table: Table, outdated: Collection[str], figures: Mapping[str, Any]) -> dict[str, Any]:
        began = time.process_time()
        engines = [name for name, unit in self.units.items() if unit.kind is Kind.ENGINE]
        found = {}
        for name, unit in self.units.items():
            sent = table if name in outdated else None
            if sent is not None:
                self.tables[name], self.tables_sent = sent, self.tables_sent + 1
                self._left[name] = left_to_others(name, sent)
            self.bytes_out += len(pickle.dumps((sent, figures)))
            found[name] = self._report(name, unit, engines)
            self.bytes_in += len(pickle.dumps(found[name]))
        self.spent_s += time.process_time() - began
        return found

    def _report(self, name: str, unit: Unit, engines: list[str]) -> dict[str, Any]:
        report = {
            "name": name, "kind": str(unit.kind), "node": unit.node, "time": time.time(), "port": unit.port,
            "generation": 1, "state": "serving", "pid": 12345, "restarts": 0, "error": "", "blame": "",
        }  # fmt: skip
        if unit.kind is Kind.ENGINE:
            return report
        table = self.tables.get(name)
        seen = [
            self._engine | {"name": engine, "state": "serving", "beat_age_s": 0.1}
            for engine in engines
            if engine not in self._left.get(name, ())
        ]
        number = None if table is None else table["number"]
        return report | {"table": number, "is_up": True, "refused": 0, "capacity": self._capacity | {"engines": seen}}

    def drain(self, name: str) -> None:
        raise AssertionError("nothing is drained here")

    def dismiss(self, name: str) -> None:
        del self.units[name]


def measure_manager(machines: int, rounds: int) -> dict[str, Any]:
    """One engine and one gateway on each machine; then one machine is lost."""
    keepers = AnsweringKeepers(machines)
    plan = FleetPlan(engine=EnginePlan(machines, machines, gpus=1.0), gateway=GatewayPlan(machines))
    manager = Manager(keepers, ManagerState.of(plan), lambda state: None)
    for _ in range(5):
        manager.step()
    keepers.bytes_out = keepers.bytes_in = keepers.tables_sent = 0
    keepers.spent_s = 0.0
    began = time.process_time()
    for _ in range(rounds):
        manager.step()
        json.dumps(manager.status())
    spent = time.process_time() - began - keepers.spent_s
    rest = {"to_keepers_bytes": keepers.bytes_out / rounds, "from_keepers_bytes": keepers.bytes_in / rounds}
    assert not keepers.tables_sent, "a fleet at rest sends no tables"
    keepers.there.pop()
    for _ in range(5):
        manager.step()
    table = len(pickle.dumps(next(iter(keepers.tables.values()))))
    return {
        "calls_per_round": 2 * machines,
        "round_cpu_ms": 1000 * spent / rounds,
        **rest,
        "table_bytes": table,
        "tables_sent_after_a_loss": keepers.tables_sent,
        "table_bytes_sent_after_a_loss": keepers.tables_sent * table,
    }


# Links


def _host_engines(ports: Sequence[int], ready: Connection) -> None:
    """Engines without a model, each in a thread."""
    # Here, because it loads torch, which the other processes do without.
    from engine.server.main import run_engine

    for port in ports:
        arguments = (f"tcp://127.0.0.1:{port}", lambda: null_loop(64), lambda: False)
        options = {"fleet_secret": SECRET}
        threading.Thread(target=run_engine, args=arguments, kwargs=options, daemon=True).start()
    ready.send(None)
    threading.Event().wait()


def _link_gateways(ports: Sequence[int], clients: int, ready: Connection) -> None:
    """The parts of gateways that are linked to engines."""

    async def run() -> None:
        raise_limit()
        made = []
        for _ in range(clients):
            client = EngineClient([RemoteEngine(f"tcp://127.0.0.1:{port}", 120.0) for port in ports],
                                  ClientSettings(fleet_secret=SECRET))  # fmt: skip
            await client.start()
            made.append(client)
        await until(lambda: all(len(client.capacity().engines) == len(ports) for client in made))
        ready.send(None)
        await asyncio.Event().wait()

    asyncio.run(run())


def measure_links(engines: int, gateways: int, seconds: float) -> dict[str, Any]:
    """Processor time of both sides while nothing is spoken."""
    ports, pids = [free_port() for _ in range(engines)], []
    with ExitStack() as stack:
        for target, arguments in ((_host_engines, (ports,)), (_link_gateways, (ports, gateways))):
            pipe, pid = stack.enter_context(spawned(target, *arguments))
            pids.append(pid)
            if not pipe.poll(300):
                raise RunFailed("engines and gateways are not linked after 300 s")
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


def serve_counting(arguments: list[str]) -> None:
    """`tickertape serve` that counts what it saves with engines."""
    counts: Counter[str] = Counter()
    send = EngineLink.send

    def counted(self: EngineLink, command: Command, items: list[Item] | None = None) -> None:
        if isinstance(command, SaveHandoff):
            counts["saves"] += 1
            counts["save_bytes"] += len(msgspec.msgpack.encode(command))
        send(self, command, items)

    EngineLink.send = counted  # type: ignore[method-assign]

    def write() -> None:
        path = Path(os.environ[COUNTS])
        while True:
            beside = path.with_suffix(".new")
            beside.write_text(json.dumps(counts))
            os.replace(beside, path)
            time.sleep(0.2)

    threading.Thread(target=write, daemon=True).start()
    from realtime.cli import main as tickertape

    tickertape(["serve", *arguments])


def start_part(folder: Path, name: str, *command: str) -> Child:
    """An engine or a gateway as a process; a gateway that counts writes to `counts_file`."""
    environment = os.environ | {COUNTS: str(counts_file(folder, name))}
    return Child(name, [sys.executable, "-m", *command], folder / f"{name}.log", env=environment)


def counts_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.counts"


def read_counts(path: Path) -> dict[str, int]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


async def measure_sessions(sessions: int, seconds: float) -> dict[str, Any]:
    """Sessions speak at one gateway for some seconds; then it is killed, and they resume at the other one."""
    with tempfile.TemporaryDirectory(prefix="fleet-size-") as where:
        folder = Path(where)
        (folder / "secret").write_bytes(SECRET)
        engine_port, ports = free_port(), [free_port(), free_port()]
        address = f"tcp://127.0.0.1:{engine_port}"
        table = {"number": 1, "engines": [{"name": "e1", "address": address}]}
        (folder / "table.json").write_text(json.dumps(table))
        secret = ("--fleet-secret-file", str(folder / "secret"))
        engine_command = ("benchmarks.engines", "--listen", address, "--max-streams", "1000", *secret)
        engine = start_part(folder, "engine", *engine_command)
        gateways = [
            start_part(
                folder, f"gateway{port}", "benchmarks.fleet_size", "serve", "--port", str(port), "--workers", "1",
                "--engine-table", str(folder / "table.json"), "--limits.max-load", "0", *secret,
            )
            for port in ports
        ]  # fmt: skip
        try:
            async with asyncio.timeout(300):
                for port in ports:
                    while not await asyncio.to_thread(is_ready, f"http://127.0.0.1:{port}/ready"):  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
            counts = counts_file(folder, gateways[0].name)
            return await _speak_and_resume(engine, gateways, ports, counts, sessions, seconds)
        finally:
            for part in (engine, *gateways):
                part.kill()


async def _speak_and_resume(
    engine: Child, gateways: list[Child], ports: list[int], counts: Path, sessions: int, seconds: float
) -> dict[str, Any]:
    appends = appends_of(looped(pcm16(speech()), seconds + 60.0))
    clients = [PacedClient(f"ws://127.0.0.1:{ports[0]}/v1/realtime", appends) for _ in range(sessions)]
    tasks = [asyncio.create_task(client.speak()) for client in clients]
    try:
        await until(lambda: all(client.events for client in clients))
        await asyncio.sleep(min(2.0, seconds))
        first, began = read_counts(counts), time.monotonic()
        await asyncio.sleep(seconds)
        counted, passed = read_counts(counts), time.monotonic() - began
        for client in clients:
            client._url = f"ws://127.0.0.1:{ports[1]}/v1/realtime"
        pids = (gateways[1].pid, engine.pid)
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
    rate = {name: (counted.get(name, 0) - first.get(name, 0)) / passed / sessions for name in counted}
    return {
        "saves_per_session_second": rate.get("saves", 0.0),
        "save_bytes_per_session_second": rate.get("save_bytes", 0.0),
        "sessions_lost": sum(client.begun - 1 for client in clients),
        "all_back_s": all_back_s,
        **percentiles("back_s", [client.resumed_s[0] for client in clients], 50, 99),
        "adopting_gateway_cpu_ms_per_session": 1000 * gateway_s / sessions,
        "adopting_engine_cpu_ms_per_session": 1000 * engine_s / sessions,
    }


# Published names


async def measure_names(gateways: int, updates: int) -> dict[str, Any]:
    """One session whose words are read at all gateways, in one process; and the links of a fleet at rest."""
    entries = [GatewayEntry(f"g{number}", f"tcp://127.0.0.1:{free_port()}") for number in range(gateways)]
    names = [FleetNames(entry.name, SECRET, 30.0) for entry in entries]
    publishers = [one.publisher() for one in names]
    heard: Counter[int] = Counter()

    class Reader:
        def __init__(self, number: int) -> None:
            self.number = number

        def on_current(self, key: Any, state: Any) -> None:
            pass

        def on_update(self, key: Any, update: Any) -> None:
            heard[self.number] += isinstance(update, Added)

    for number, publisher in enumerate(publishers):
        publisher.reader = Reader(number)
    try:
        for one in names:
            one.take_table(entries)
        key = ("owner", "talk")
        speaker: Publisher = publishers[0]
        for publisher in publishers[1:]:
            publisher.follow(key)
        await speaker.claim(key, "session")
        home = next(one for one in names if one.gateway == home_of(key, [entry.name for entry in entries]))
        remote = {one.gateway for one in names[1:]} - {home.gateway}
        await until(lambda: len(home.coordinator.channels[key].followers) >= len(remote))
        began = time.process_time()
        for number in range(updates):
            speaker.post(key, "session", Added(f"i{number // 20}", " word", [("word", 1.0, 1.2)]))
            await asyncio.sleep(0)
        await until(lambda: all(heard[number] == updates for number in range(1, gateways)))
        spent = time.process_time() - began
        # To the home, and from there to the gateways with viewers; those at the home's own gateway need none.
        messages = (home is not names[0]) + len(remote)
    finally:
        for one in names:
            one.close()
    return {
        "messages_per_update": messages,
        "cpu_us_per_update_and_gateway": 1e6 * spent / updates / gateways,
    }


# Clients that come back


def herd(clients: int, gateways: int, resumes_per_s: float, is_spread: bool, seed: int = 1) -> dict[str, Any]:
    """A simulation: all clients lose their gateway in one moment, and come back through a load balancer that chooses at
    random. A gateway serves one after the other; who waits too long asks again."""
    random.seed(seed)
    first, longest = resuming_session.FIRST_WAIT_S, resuming_session.LONGEST_WAIT_S

    def wait(tries: int) -> float:
        base = min(first * 2**tries, longest)
        return spread(base) if is_spread else base

    asks = [(wait(0), client, 0) for client in range(clients)]
    heapq.heapify(asks)
    free_at = [0.0] * gateways
    back: list[float] = []
    arrivals: Counter[tuple[int, int]] = Counter()
    repeated = 0
    while asks:
        now, client, tries = heapq.heappop(asks)
        gateway = random.randrange(gateways)
        arrivals[gateway, int(now * 10)] += 1
        done = max(now, free_at[gateway]) + 1 / resumes_per_s
        if done - now > OPEN_TIMEOUT_S:
            # The gateway finds out that the client has left when it gets there, which costs it nothing here.
            repeated += 1
            heapq.heappush(asks, (now + OPEN_TIMEOUT_S + wait(tries + 1), client, tries + 1))
            continue
        free_at[gateway] = done
        back.append(done)
    return {
        "most_asks_at_a_gateway_in_100_ms": max(arrivals.values()),
        "asked_again": repeated,
        **percentiles("back_s", back, 50, 99, 100),
    }


# Ray


def _call_actors(counts: Sequence[int], rounds: int, result: Connection) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    class Keeper:
        def report(self, table: Any, figures: Any) -> dict[str, Any]:
            return {"capacity": dict.fromkeys(map(str, range(60)), 0.123)}

    actor = ray.remote(num_cpus=0)(Keeper)
    actors: list[Any] = []
    figures = dict.fromkeys(map(str, range(10)), 0.123)
    found = {}
    for count in counts:
        actors += [actor.remote() for _ in range(count - len(actors))]
        ray.get([one.report.remote(None, figures) for one in actors])
        cpu, began = time.process_time(), time.monotonic()
        for _ in range(rounds):
            ray.get([one.report.remote(None, figures) for one in actors])
        passed, spent = time.monotonic() - began, time.process_time() - cpu
        found[count] = {"round_ms": 1000 * passed / rounds, "caller_cpu_ms": 1000 * spent / rounds}
    ray.shutdown()
    cluster.shutdown()
    result.send(found)


def measure_ray(counts: Sequence[int], rounds: int) -> dict[int, Any]:
    """Rounds of calls to actors, which a manager makes once a second. In a process of its own: Ray stays in it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_call_actors, args=(counts, rounds, theirs))
    child.start()
    try:
        if not ours.poll(400):
            raise RunFailed("Ray did not answer within 400 s")
        found: dict[int, Any] = ours.recv()
        child.join(60)
        return found
    finally:
        child.kill()


class Run:
    """The sizes of a run, and its figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_small: bool = options.small
        self.machines: int = 4 if self.is_small else options.machines
        self.seconds: float = 1.0 if self.is_small else options.seconds
        self.spoken = [2] if self.is_small else [int(size) for size in options.spoken.split(",")]
        self.sizes = sorted({max(2, self.machines // share) for share in (10, 5, 2, 1)})
        self.figures: dict[str, Any] = {}
        # Processor time of a gateway for an adoption; `sessions` measures it.
        self.adoption_ms: float = options.adoption_ms

    def tell(self, title: str, found: dict[str, Any]) -> None:
        show(title, found)
        self.figures[title] = found
        write_json(self.options, self.figures)

    def manager(self) -> None:
        for size in [*self.sizes, 2 * self.machines]:
            self.tell(f"manager, {size} machines", measure_manager(size, 3 if self.is_small else 20))

    def links(self) -> None:
        for size in self.sizes[:1] if self.is_small else (self.sizes[0], self.sizes[-1]):
            self.tell(f"links, {size} engines at 1 gateway", measure_links(size, 1, self.seconds))
        for size in () if self.is_small else (self.sizes[0], self.sizes[-1]):
            self.tell(f"links, 1 engine at {size} gateways", measure_links(1, size, self.seconds))

    def sessions(self) -> None:
        for size in self.spoken:
            found = asyncio.run(measure_sessions(size, self.seconds))
            self.adoption_ms = found["adopting_gateway_cpu_ms_per_session"]
            self.tell(f"sessions, {size}", found)

    def names(self) -> None:
        # All of them are in this process, with all their sockets.
        for size in self.sizes[:2]:
            self.tell(f"names, {size} gateways", asyncio.run(measure_names(size, 100 if self.is_small else 500)))

    def herd(self) -> None:
        per_machine = self.options.sessions // self.machines
        workers = -(-per_machine // SESSIONS_PER_WORKER)
        rate = workers * 1000 / max(self.adoption_ms, 0.1)
        for how in ("in step", "spread"):
            lost = herd(per_machine, self.machines - 1, rate, how == "spread")
            self.tell(f"herd, one of {self.machines} machines is lost, {how}", lost)
            everyone = herd(self.options.sessions, self.machines, rate, how == "spread")
            self.tell(f"herd, all clients of {self.machines} machines, {how}", everyone)

    def ray(self) -> None:
        counts, rounds = ((2,), 3) if self.is_small else ((2, 4, 8, 16), 20)
        for count, found in measure_ray(counts, rounds).items():
            self.tell(f"ray, {count} actors", found)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["serve"]:
        serve_counting(arguments[1:])
        return 0
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS[:-1]), help=f"parts to measure, of {', '.join(PARTS)}")
    parser.add_argument("--machines", type=int, default=50, help="the fleet; smaller ones are measured too")
    parser.add_argument("--sessions", type=int, default=20_000, help="sessions of the simulated fleet")
    parser.add_argument("--spoken", default="8,16,32", help="numbers of sessions that speak in `sessions`")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring each size of `links` and `sessions`")
    parser.add_argument("--adoption-ms", type=float, default=20.0, help="for `herd` without `sessions`")
    run = Run(parser.parse_args(arguments))
    for part in run.options.parts.split(","):
        if part not in PARTS:
            parser.error(f"there is no part {part!r}; choose from {', '.join(PARTS)}")
        getattr(run, part)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
