"""What a fleet costs as it grows: the manager, links, handoffs, reconnecting clients, and viewers, at several sizes.

    python -m benchmarks.fleet_size [--parts manager,links,sessions,names,herd,ray] [--machines 50] [--sessions 20000]

Everything runs on this machine, without models. Costs are processor time, so that a busy machine changes them little.
`manager`: rounds of the real manager over simulated keepers, with the size of each call as Ray pickles it. `links`:
engines without a model, all in one process, and the engine clients of gateways in another one, over encrypted links
without audio. `sessions`: real gateways and an engine without a model, which counts the handoffs that it is sent;
sessions speak, one gateway is killed and the other one adopts them. `names`: published sessions, whose words go over
links between gateways. `herd`: a simulation of clients that lost their gateway, with the waits of our clients and the
measured cost of an adoption. `ray`: calls to actors of a cluster on this machine; needs the extra tickertape[fleet].
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import pickle
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from engine.client.pool import GatewayEntry
from engine.messages import SaveHandoff
from fleet.manager import Manager, ManagerState
from fleet.plan import EnginePlan, FleetPlan, GatewayPlan
from fleet.state import Kind, Node, Table, Unit, left_to_others
from realtime.client import resuming_session
from realtime.client.resuming_session import spread
from realtime.client.wire_client import OPEN_TIMEOUT_S
from realtime.http.info_routes import CapacityFigures
from realtime.listeners import raise_limit
from realtime.serving.fleet_publishing import FleetNames, home_of
from realtime.serving.publishing import Added

SECRET = b"the secret of a fleet of a benchmark"
# A gateway process at 70 % of a core holds this many sessions (docs/fleet.md).
SESSIONS_PER_WORKER = 140
PATIENCE_S = 400.0

Figures = dict[str, Any]
# Title and figures of each size.
Found = Iterator[tuple[str, Figures]]


def sizes_of(options: argparse.Namespace) -> list[int]:
    return sorted({max(2, options.machines // share) for share in (10, 5, 2, 1)})


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
    return {field.encode_name: example(field.type) for field in msgspec.structs.fields(kind)}


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
        engine = next(field for field in msgspec.structs.fields(CapacityFigures) if field.name == "engines")
        self._capacity = example(CapacityFigures) | {"engines_missing": []}
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


def one_manager(machines: int, rounds: int) -> Figures:
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
    figures = {
        "calls_per_round": 2 * machines,
        "round_cpu_ms": 1000 * spent / rounds,
        "to_keepers_bytes": keepers.bytes_out / rounds,
        "from_keepers_bytes": keepers.bytes_in / rounds,
        "table_bytes": len(pickle.dumps(next(iter(keepers.tables.values())))),
    }
    assert not keepers.tables_sent, "a fleet at rest sends no tables"
    keepers.there.pop()
    for _ in range(5):
        manager.step()
    return figures | {"tables_sent_after_a_loss": keepers.tables_sent}


def measure_manager(options: argparse.Namespace) -> Found:
    for size in [*sizes_of(options), 2 * options.machines]:
        yield f"manager, {size} machines", one_manager(size, 3 if options.small else 20)


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


def measure_links(options: argparse.Namespace) -> Found:
    smallest, *_, largest = sizes_of(options)
    for size in (smallest,) if options.small else (smallest, largest):
        yield f"links, {size} engines at 1 gateway", linked(size, 1, options.seconds)
        yield f"links, 1 engine at {size} gateways", linked(1, size, options.seconds)


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


def measure_sessions(options: argparse.Namespace) -> Found:
    for size in map(int, options.spoken.split(",")):
        found = asyncio.run(spoken(size, options.seconds))
        options.adoption_ms = found["adopting_gateway_cpu_ms_per_session"]
        yield f"sessions, {size}", found


# Published names


class CountingReader:
    """Counts the texts that reach a gateway."""

    heard = 0

    def on_current(self, key: Any, state: Any) -> None:
        pass

    def on_update(self, key: Any, update: Any) -> None:
        self.heard += isinstance(update, Added)


async def published(gateways: int, updates: int) -> Figures:
    """One session whose words are read at all gateways, in one process; and the links of a fleet at rest."""
    entries = [GatewayEntry(f"g{number}", f"tcp://127.0.0.1:{free_port()}") for number in range(gateways)]
    names = [FleetNames(entry.name, SECRET, 30.0) for entry in entries]
    publishers = [one.publisher() for one in names]
    readers = [CountingReader() for _ in publishers]
    for publisher, reader in zip(publishers, readers, strict=True):
        publisher.reader = reader
    try:
        for one in names:
            one.take_table(entries)
        key, speaker = ("owner", "talk"), publishers[0]
        for publisher in publishers[1:]:
            publisher.follow(key)
        await speaker.claim(key, "session")
        home = next(one for one in names if one.gateway == home_of(key, [entry.name for entry in entries]))
        remote = {one.gateway for one in names[1:]} - {home.gateway}
        await until(lambda: len(home.coordinator.channels[key].followers) >= len(remote))
        # A name is granted although its home does not answer in time; what is posted while the link is down is told as
        # one state.
        await until(lambda: home is names[0] or names[0].links[home.gateway].is_up)
        began = time.process_time()
        for number in range(updates):
            speaker.post(key, "session", Added(f"i{number // 20}", " word", [("word", 1.0, 1.2)]))
            await asyncio.sleep(0)
        await until(lambda: all(reader.heard == updates for reader in readers[1:]))
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


def measure_names(options: argparse.Namespace) -> Found:
    # All of them are in this process, with all their sockets.
    for size in sizes_of(options)[:2]:
        yield f"names, {size} gateways", asyncio.run(published(size, 100 if options.small else 500))


# Clients that come back


def herd(clients: int, gateways: int, resumes_per_s: float, is_spread: bool, seed: int = 1) -> Figures:
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


def measure_herds(options: argparse.Namespace) -> Found:
    machines, each = options.machines, options.sessions // options.machines
    rate = -(-each // SESSIONS_PER_WORKER) * 1000 / max(options.adoption_ms, 0.1)
    for how in ("in step", "spread"):
        yield f"herd, one of {machines} machines is lost, {how}", herd(each, machines - 1, rate, how == "spread")
        everyone = herd(options.sessions, machines, rate, how == "spread")
        yield f"herd, all clients of {machines} machines, {how}", everyone


# Ray


def _call_actors(counts: Sequence[int], rounds: int, result: Connection) -> None:
    """Rounds of calls to actors, which a manager makes once a second. In a process of its own: Ray stays in it."""
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


def measure_calls(options: argparse.Namespace) -> Found:
    counts, rounds = ((2,), 3) if options.small else ((2, 4, 8, 16), 20)
    with spawned(_call_actors, counts, rounds) as (pipe, _):
        for count, found in _wait_for(pipe, "Ray").items():
            yield f"ray, {count} actors", found


# The command

PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "manager": measure_manager,
    "links": measure_links,
    "sessions": measure_sessions,
    "names": measure_names,
    "herd": measure_herds,
    "ray": measure_calls,
}


def measure(options: argparse.Namespace) -> Figures:
    figures: Figures = {}
    for part in options.parts:
        for title, found in PARTS[part](options):
            show(title, found)
            figures[title] = found
            write_json(options, figures)
    return figures


def parts(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    return text.split(",")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", type=parts, default=list(PARTS)[:-1], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--machines", type=int, default=50, help="the fleet; smaller ones are measured too")
    parser.add_argument("--sessions", type=int, default=20_000, help="sessions of the simulated fleet")
    parser.add_argument("--spoken", default="8,16,32", help="numbers of sessions that speak in `sessions`")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring each size of `links` and `sessions`")
    parser.add_argument("--adoption-ms", type=float, default=20.0, help="for `herd` without `sessions`")
    run_command(parser, arguments, measure, machines=4, sessions=2000, spoken="2", seconds=0.5)


if __name__ == "__main__":
    main()
