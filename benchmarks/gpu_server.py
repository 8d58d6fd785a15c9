"""How many sessions the whole server holds: sockets, gateways, engine process, speech detection, limits as they are.

    python -m benchmarks.gpu_server --sessions 600 --kv fp8 --seconds 60 --json docs/data/h200-server.json

The model is Voxtral Realtime at full dimensions with random weights (`benchmarks.random_engine`); everything else is
what `tickertape serve --engine` runs. N clients in processes of their own send speech in real time over sockets, with
turn detection. A word's lag is the time from the moment its last sample was sent to the delta with its text, less the
model's delay; appends of 80 ms alone make that up to 80 ms, because an item needs 2.5 ms of what follows it. A point
holds if the 99th percentile is at most 250 ms, the lag does not grow and no session fails. Random weights choose a word
in nearly every frame, where speech has blanks in four of five: gateways and clients have several times the events.
With --small everything runs in seconds on a CPU, with a tiny model: that checks the benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paced_clients import Orders, Schedule
from benchmarks.speech_sound import SAMPLE_RATE

MAX_LAG_MS = 250.0
# A lag that grows by more than this in a minute does not stay.
MAX_GROWTH_MS_PER_MIN = 100.0
DELAY_MS = 480
START_S = 180.0
SETTLE_S = 3.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Result:
    """One measurement. Times in milliseconds, processor time in cores."""

    sessions: int
    connected: int
    refusals: int
    failures: list[str]
    seconds: float
    words: int
    lag_p50: float
    lag_p95: float
    lag_p99: float
    lag_max: float
    growth_per_min: float
    appends: int
    append_late_p99: float
    engine_cores: float
    gateway_cores: list[float]
    client_cores: float
    gateway_us_per_append: float
    engine_us_per_append: float
    events: dict[str, int]

    @property
    def holds(self) -> bool:
        whole = self.connected == self.sessions and not self.failures and self.words > 0
        return whole and self.lag_p99 <= MAX_LAG_MS and self.growth_per_min <= MAX_GROWTH_MS_PER_MIN


class Child:
    """A process of the benchmark and all that it starts; ended with it."""

    def __init__(self, name: str, command: list[str], log: Path, **options: Any) -> None:
        self.name = name
        self.log = log
        self._file = log.open("w")
        # A group of its own: workers and forked engines end with it.
        self.process = subprocess.Popen(command, stderr=self._file, start_new_session=True, **options)

    def cpu_seconds(self) -> float:
        """Of the process and of its descendants that live."""
        return sum(_cpu_of(pid) for pid in _with_descendants(self.process.pid))

    def check(self) -> None:
        if self.process.poll() is not None:
            tail = self.log.read_text()[-2000:]
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{tail}")

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            self.check()
        return str(line)

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._file.close()


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_of(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS if fields else 0.0


def _with_descendants(pid: int) -> list[int]:
    """By asking all processes for their parents: not every kernel lists children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Bench:
    """The server and its clients; `measure` may be called again and again."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._address = f"ipc://{folder / 'engine'}"
        self.engine: Child | None = None
        self.gateways: list[Child] = []
        self._urls: list[str] = []

    def start(self) -> None:
        options = self._options
        command = [sys.executable, "-m", "benchmarks.random_engine", "--listen", self._address]
        command += ["--kv", options.kv, "--window", str(options.window)]
        command += ["--max-streams", str(options.max_streams)] if options.max_streams else []
        command += ["--small"] if options.small else []
        self.engine = Child("engine", command, self._folder / "engine.log")
        for index in range(options.gateways):
            port = _free_port()
            command = [sys.executable, "-m", "realtime.cli", "serve", "--engine", self._address, "--port", str(port)]
            command += ["--workers", str(options.workers)] if options.workers else []
            command += [] if options.max_load is None else ["--limits.max-load", str(options.max_load)]
            log = self._folder / f"gateway{index}.log"
            self.gateways.append(Child(f"gateway {index}", command, log, stdout=subprocess.DEVNULL))
            self._urls.append(f"ws://127.0.0.1:{port}/v1/realtime?intent=transcription")
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        waiting = [url.replace("ws", "http", 1).partition("/v1")[0] + "/ready" for url in self._urls]
        while waiting:
            self._check()
            if time.monotonic() > until:
                raise RuntimeError(f"the server was not ready within {START_S:.0f} s")
            try:
                with urllib.request.urlopen(waiting[0], timeout=2):
                    waiting.pop(0)
            except OSError:
                time.sleep(0.2)

    def _check(self) -> None:
        for child in [self.engine, *self.gateways]:
            assert child is not None
            child.check()

    def stop(self) -> None:
        for child in [*self.gateways, self.engine]:
            if child is not None:
                child.stop()

    def measure(self, sessions: int) -> Result:
        seconds = self._options.seconds
        clients = self._start_clients(sessions)
        try:
            schedule = self._schedule(sessions)
            for client in clients:
                client.tell(asdict(schedule))
            time.sleep(max(0.0, schedule.counts_from - time.monotonic()))
            before = self._cpu(clients)
            time.sleep(max(0.0, schedule.counts_until - time.monotonic()))
            after = self._cpu(clients)
            findings = [json.loads(client.hear()) for client in clients]
        finally:
            for client in clients:
                client.stop()
        self._check()
        cores = [(end - start) / seconds for start, end in zip(before, after, strict=True)]
        return summary(sessions, seconds, findings, cores)

    def _schedule(self, sessions: int) -> Schedule:
        begins, join_s = time.monotonic() + 0.5, sessions / self._options.joins_per_second
        counts_from = begins + join_s + SETTLE_S
        return Schedule(begins, join_s, counts_from, counts_from + self._options.seconds)

    def _cpu(self, clients: list[Child]) -> list[float]:
        """Of the engine, of all clients together, of each gateway."""
        assert self.engine is not None
        together = sum(client.cpu_seconds() for client in clients)
        return [self.engine.cpu_seconds(), together, *(gateway.cpu_seconds() for gateway in self.gateways)]

    def _start_clients(self, sessions: int) -> list[Child]:
        """Processes of clients that are ready to be told when to begin."""
        options = self._options
        processes = min(options.clients, sessions)
        clients = []
        for index in range(processes):
            orders = Orders(
                urls=self._urls,
                sessions=list(range(index, sessions, processes)),
                all_sessions=sessions,
                rate=options.rate,
                append_ms=options.append_ms,
                delay_ms=DELAY_MS,
                silent_share=options.silent,
                recording=options.audio,
            )
            command, log = [sys.executable, "-m", "benchmarks.paced_clients"], self._folder / f"clients{index}.log"
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            clients.append(Child(f"clients {index}", command, log, **pipes))
            clients[-1].tell(asdict(orders))
        for client in clients:
            client.hear()
        return clients


def summary(sessions: int, seconds: float, findings: list[dict[str, Any]], cores: list[float]) -> Result:
    """`cores` are those of the engine, of the clients, then of each gateway."""
    pairs = [tuple(pair) for found in findings for pair in found["lags"]]
    moments, lags = np.array(pairs or [(0.0, float("nan"))]).T
    grows = len(pairs) > 1 and np.ptp(moments) > 0
    slope = float(np.polyfit(moments, lags, 1)[0]) * 60 if grows else 0.0
    appends = sum(found["appends"] for found in findings)
    late = [value for found in findings for value in found["late_ms"]]
    events: Counter[str] = Counter()
    for found in findings:
        events.update(found["events"])
    p50, p95, p99 = (float(np.percentile(lags, share)) for share in (50, 95, 99))
    engine, clients, *gateways = cores
    each = 1e6 * seconds / max(1, appends)
    return Result(
        sessions=sessions,
        connected=sum(found["connected"] for found in findings),
        refusals=sum(found["refusals"] for found in findings),
        failures=[text for found in findings for text in found["failures"]][:20],
        seconds=seconds,
        words=len(pairs),
        lag_p50=p50,
        lag_p95=p95,
        lag_p99=p99,
        lag_max=float(lags.max()),
        growth_per_min=slope,
        appends=appends,
        append_late_p99=float(np.percentile(late, 99)) if late else 0.0,
        engine_cores=engine,
        gateway_cores=gateways,
        client_cores=clients,
        gateway_us_per_append=sum(gateways) * each,
        engine_us_per_append=engine * each,
        events=dict(events),
    )


def print_result(result: Result) -> None:
    gateways = " + ".join(f"{cores:.2f}" for cores in result.gateway_cores)
    print(
        f"whole server, {result.sessions} sessions for {result.seconds:.0f} s: {'holds' if result.holds else 'FAILS'}\n"
        f"  connected {result.connected}, refusals {result.refusals}, failures {len(result.failures)}"
        f"{' (' + result.failures[0] + ')' if result.failures else ''}\n"
        f"  lag of {result.words} words, model delay taken off: p50 {result.lag_p50:.0f} p95 {result.lag_p95:.0f} "
        f"p99 {result.lag_p99:.0f} max {result.lag_max:.0f} ms, {result.growth_per_min:+.0f} ms a minute\n"
        f"  cores: engine {result.engine_cores:.2f}, gateways {gateways}, clients {result.client_cores:.2f}\n"
        f"  processor time per append: gateway {result.gateway_us_per_append:.0f} us, engine "
        f"{result.engine_us_per_append:.0f} us; appends late p99 {result.append_late_p99:.1f} ms",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[600])
    parser.add_argument("--seconds", type=float, default=60.0, help="that are counted, for each number of sessions")
    parser.add_argument("--joins-per-second", type=float, default=50.0)
    parser.add_argument("--rate", type=int, choices=(16_000, 24_000), default=SAMPLE_RATE)
    parser.add_argument("--append-ms", type=int, default=80)
    parser.add_argument("--silent", type=float, default=0.0, help="share of the time for which each session is silent")
    parser.add_argument("--audio", help="a WAV file of speech; default: voices that are made up")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--window", type=int, default=1024, help="decoder window in tokens")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--gateways", type=int, default=1, help="processes of `tickertape serve` before the one engine")
    parser.add_argument("--workers", type=int, help="workers of each; default: what the server chooses")
    parser.add_argument("--max-load", type=float, help="another limit on the engine's load; 0 counts streams only")
    parser.add_argument("--clients", type=int, default=4, help="processes of clients")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, to check the benchmark itself")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--logs", help="folder for what the processes log")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-server-") as name:
        folder = Path(options.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, folder)
        results = []
        try:
            began = time.monotonic()
            bench.start()
            print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
            for sessions in options.sessions:
                results.append(bench.measure(sessions))
                print_result(results[-1])
                if options.json:
                    record = {"arguments": vars(options), "results": [asdict(result) for result in results]}
                    Path(options.json).write_text(json.dumps(record, indent=1))
        finally:
            bench.stop()
    return results


if __name__ == "__main__":
    main()
