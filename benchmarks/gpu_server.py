"""How many sessions the whole server holds: sockets, gateways, engine process, speech detection, limits as they are.

    python -m benchmarks.gpu_server --sessions 600 500:24000:50 1000:16000:80:0.5 --kv fp8 --seconds 60 --workers 6 \\
        --kill-worker --rolling-restart --json docs/data/h200-server.json

The model is Voxtral Realtime at full dimensions with random weights (`benchmarks.random_engine`); everything else is
what `tickertape serve --engine` runs. N clients in processes of their own send speech in real time over sockets, with
turn detection. A word's lag is the time from the moment its last sample was sent to the delta with its text, less the
model's delay; appends of 80 ms alone make that up to 80 ms, because an item needs 2.5 ms of what follows it. A point
holds if the 99th percentile is at most 250 ms, the lag does not grow and no session fails. The model says
a word in three frames of ten, as speech has them, and in pauses too, where words are told when the turn before is
completed: such words, by the server's own detector on the sound that is sent, are counted and not scored.

With --whisper SIZE the model is Whisper with random weights that say what a script has (`benchmarks.random_whisper`),
with --model NAME a windowed model with its real weights. All their words are scored, but they wait for the next pass,
and for another if the first is not sure. A point holds if 95 of 100 turns have their final text at most 1.5 s after the
end of speech, and if the stream that is furthest behind has at most 1.5 s of audio that no pass has read, 95 of 100
times that the server is asked.

Several loads share one start: SESSIONS[:RATE[:APPEND_MS[:SILENT_SHARE]]]. Then, with --kill-worker and
--rolling-restart, clients that resume speak in several runs, of which the first is calm, and their texts are compared
with those of that run; another calm run says how much they differ without a cause. With --small everything runs in
seconds on a CPU, with a tiny model, and with --null without any: that checks the benchmark, and measures no more than
what gateways spend.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import lasting_clients, paced_clients
from benchmarks.lasting_clients import Moved
from benchmarks.paced_clients import Schedule
from benchmarks.server_processes import Child, cpu_of, free_port, with_descendants, workers_of
from benchmarks.server_result import FRAMES, WINDOWS, Load, Result, Said, print_result, summary
from benchmarks.speech_sound import SAMPLE_RATE, spans, speech

START_S = 180.0
SETTLE_S = 3.0
ASK_EVERY_S = 0.5
# When something happens to clients that resume, as a share of the time for which they speak.
HAPPENS_AT = 0.45
CALM, CALM_AGAIN, KILLED, REPLACED = "calm", "calm again", "a worker killed", "all workers replaced"


class Bench:
    """The server and its clients; `measure` may be called again and again."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._address = f"ipc://{folder / 'engine'}"
        self.engine: Child | None = None
        self.gateways: list[Child] = []
        self._urls: list[str] = []
        self.objective = WINDOWS if options.whisper or options.model else FRAMES
        self._speech = heard_speech(options.audio, everywhere=options.null or self.objective.windowed)

    def start(self) -> None:
        options = self._options
        self.engine = Child("engine", self._engine_command(), self._folder / "engine.log")
        for index in range(options.gateways):
            port = free_port()
            command = [sys.executable, "-m", "realtime.cli", "serve", "--engine", self._address, "--port", str(port)]
            command += ["--workers", str(options.workers)] if options.workers else []
            command += [] if options.max_load is None else ["--limits.max-load", str(options.max_load)]
            log = self._folder / f"gateway{index}.log"
            self.gateways.append(Child(f"gateway {index}", command, log, stdout=subprocess.DEVNULL))
            self._urls.append(f"ws://127.0.0.1:{port}/v1/realtime?intent=transcription")
        self._wait_until_ready()

    def _engine_command(self) -> list[str]:
        options, listen = self._options, ["--listen", self._address]
        if options.null:
            return [sys.executable, "-m", "benchmarks.null_engine", *listen]
        if options.model:
            device = "cpu" if options.small else "cuda"
            command = [sys.executable, "-m", "realtime.cli", "engine", *listen, "--model", options.model]
            command += ["--device", device]
            return command + (["--model.max-streams", str(options.max_streams)] if options.max_streams else [])
        command = [sys.executable, "-m", "benchmarks.random_engine", *listen, "--kv", options.kv]
        command += ["--window", str(options.window)]
        command += ["--whisper", options.whisper] if options.whisper else []
        command += ["--max-streams", str(options.max_streams)] if options.max_streams else []
        return command + (["--small"] if options.small else [])

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        waiting = [url + "/ready" for url in self._http_urls()]
        while waiting:
            self._check()
            if time.monotonic() > until:
                raise RuntimeError(f"the server was not ready within {START_S:.0f} s")
            try:
                with urllib.request.urlopen(waiting[0], timeout=2):
                    waiting.pop(0)
            except OSError:
                time.sleep(0.2)

    def _http_urls(self) -> list[str]:
        return [url.replace("ws", "http", 1).partition("/v1")[0] for url in self._urls]

    def _check(self) -> None:
        for child in [self.engine, *self.gateways]:
            assert child is not None
            child.check()

    def stop(self) -> None:
        for child in [*self.gateways, self.engine]:
            if child is not None:
                child.stop()

    def measure(self, load: Load) -> Result:
        seconds = self._options.seconds
        clients = self._start_clients("paced_clients", load.sessions, lambda numbers: self._orders(load, numbers))
        try:
            schedule = self._schedule(load.sessions)
            for client in clients:
                client.tell(asdict(schedule))
            time.sleep(max(0.0, schedule.counts_from - time.monotonic()))
            before = self._cpu(clients)
            said = self._ask_until(schedule.counts_until)
            after = self._cpu(clients)
            findings = [json.loads(client.hear()) for client in clients]
        finally:
            for client in clients:
                client.stop()
        self._check()
        cores = {name: (after[name] - before.get(name, 0.0)) / seconds for name in after}
        return summary(load, seconds, findings, cores, said)

    def _ask_until(self, moment: float) -> list[Said]:
        """What the server tells of itself, again and again."""
        said: list[Said] = []
        while time.monotonic() < moment:
            with urllib.request.urlopen(self._http_urls()[0] + "/capacity", timeout=5) as answer:
                told = json.load(answer)
            behind = max((engine["lag_ms"] for engine in told["engines"]), default=0)
            said.append(Said(told["streams_that_hold"], behind))
            time.sleep(max(0.0, min(ASK_EVERY_S, moment - time.monotonic())))
        return said

    def move(self, what: str, calm: list[str] | None) -> tuple[Moved, list[str]]:
        """Clients that resume, and what happens to them. Returns their texts too."""
        sessions, seconds = self._options.move_sessions, self._options.move_seconds
        url = self._urls[0].partition("?")[0]
        clients = self._start_clients(
            "lasting_clients",
            sessions,
            lambda numbers: asdict(lasting_clients.Orders(url, numbers, seconds, self._options.audio)),
        )
        try:
            begins, join_s = time.monotonic() + 0.5, sessions / self._options.joins_per_second
            for client in clients:
                client.tell({"begins": begins, "join_s": join_s, "all_sessions": sessions})
            time.sleep(max(0.0, begins + join_s + HAPPENS_AT * seconds - time.monotonic()))
            parent = self.gateways[0].process.pid
            if what == KILLED:
                os.kill(workers_of(parent)[0], signal.SIGKILL)
            elif what == REPLACED:
                os.kill(parent, signal.SIGUSR2)
            findings = [json.loads(client.hear()) for client in clients]
        finally:
            for client in clients:
                client.stop()
        self._check()
        texts = [text for found in findings for text in found["texts"]]
        return lasting_clients.moved(what, findings, texts if calm is None else calm), texts

    def _schedule(self, sessions: int) -> Schedule:
        begins, join_s = time.monotonic() + 0.5, sessions / self._options.joins_per_second
        counts_from = begins + join_s + SETTLE_S
        return Schedule(begins, join_s, counts_from, counts_from + self._options.seconds)

    def _cpu(self, clients: list[Child]) -> dict[str, float]:
        """Processor seconds of the engine, of all clients together, of each process of the gateways."""
        assert self.engine is not None
        pids = [pid for gateway in self.gateways for pid in with_descendants(gateway.process.pid)]
        return {
            "engine": self.engine.cpu_seconds(),
            "clients": sum(client.cpu_seconds() for client in clients),
            **{f"gateway {pid}": cpu_of(pid) for pid in pids},
        }

    def _orders(self, load: Load, numbers: list[int]) -> dict[str, Any]:
        orders = paced_clients.Orders(
            urls=self._urls,
            sessions=numbers,
            all_sessions=load.sessions,
            rate=load.rate,
            append_ms=load.append_ms,
            delay_ms=self.objective.delay_ms,
            language="en" if self.objective.windowed else None,
            silent_share=load.silent,
            recording=self._options.audio,
            speech=self._speech,
        )
        return asdict(orders)

    def _start_clients(self, module: str, sessions: int, orders: Callable[[list[int]], dict[str, Any]]) -> list[Child]:
        """Processes of clients that are ready to be told when to begin."""
        processes = min(self._options.clients, sessions)
        clients = []
        for index in range(processes):
            command, log = [sys.executable, "-m", f"benchmarks.{module}"], self._folder / f"clients{index}.log"
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            clients.append(Child(f"clients {index}", command, log, **pipes))
            clients[-1].tell(orders(list(range(index, sessions, processes))))
        for client in clients:
            client.hear()
        return clients


def heard_speech(audio: str | None, everywhere: bool) -> list[tuple[float, float]]:
    """Where the server's detector hears speech in the sound that clients send, which goes round, in seconds. Models
    that say nothing in pauses by themselves need no detector to score their words."""
    sound = speech(None if audio is None else Path(audio))
    seconds = len(sound) / SAMPLE_RATE
    if everywhere:
        return [(0.0, seconds)]
    from engine.models.silero import FRAME_SAMPLES, load_silero
    from engine.runner.speech import SpeechDetector

    detector = SpeechDetector(load_silero(), 1)
    detector.open("sound")
    # It comes to the beginning as it does to clients that have gone round.
    detector.detect([("sound", sound[-2 * SAMPLE_RATE :])])
    (found,) = detector.detect([("sound", sound)])
    return spans(found.probabilities, FRAME_SAMPLES / SAMPLE_RATE, seconds)


def main(arguments: list[str] | None = None) -> tuple[list[Result], list[Moved]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="+", default=["600"], metavar="LOAD", help="see above")
    parser.add_argument("--seconds", type=float, default=60.0, help="that are counted, for each load")
    parser.add_argument("--joins-per-second", type=float, default=50.0)
    parser.add_argument("--rate", type=int, default=SAMPLE_RATE, help="of loads that do not say theirs, 16000 or 24000")
    parser.add_argument("--append-ms", type=int, default=80, help="of loads that do not say it")
    parser.add_argument("--silent", type=float, default=0.0, help="share of the time for which each session is silent")
    parser.add_argument("--kill-worker", action="store_true", help="under clients that resume, after the loads")
    parser.add_argument("--rolling-restart", action="store_true", help="of all workers, under clients that resume")
    parser.add_argument("--move-sessions", type=int, default=200, help="clients that resume")
    parser.add_argument("--move-seconds", type=float, default=20.0, help="for which each of them speaks")
    parser.add_argument("--audio", help="a WAV file of speech; default: voices that are made up")
    parser.add_argument("--whisper", help="not Voxtral: Whisper of this size with random weights, see random_whisper")
    parser.add_argument("--model", help="not Voxtral: real weights of a windowed model, a name or a path")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--window", type=int, default=1024, help="decoder window in tokens")
    parser.add_argument("--max-streams", type=int, help="streams to make room for; default: all that fit")
    parser.add_argument("--gateways", type=int, default=1, help="processes of `tickertape serve` before the one engine")
    parser.add_argument("--workers", type=int, help="workers of each; default: what the server chooses")
    parser.add_argument("--max-load", type=float, help="another limit on the engine's load; 0 counts streams only")
    parser.add_argument("--clients", type=int, default=4, help="processes of clients")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, to check the benchmark itself")
    parser.add_argument("--null", action="store_true", help="no model: what the gateways spend")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--logs", help="folder for what the processes log")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-server-") as name:
        folder = Path(options.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, folder)
        try:
            return run(bench, options)
        finally:
            bench.stop()


def run(bench: Bench, options: argparse.Namespace) -> tuple[list[Result], list[Moved]]:
    results: list[Result] = []
    moves: list[Moved] = []

    def write() -> None:
        if options.json:
            record = {"arguments": vars(options)}
            record |= {"results": [asdict(result) for result in results], "moves": [asdict(move) for move in moves]}
            Path(options.json).write_text(json.dumps(record, indent=1))

    began = time.monotonic()
    bench.start()
    print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
    for said in options.sessions:
        load = Load.parse(said, options.rate, options.append_ms, options.silent)
        results.append(bench.measure(load))
        print_result(results[-1], bench.objective)
        write()
    happens = [KILLED] * options.kill_worker + [REPLACED] * options.rolling_restart
    calm: list[str] | None = None
    for what in [CALM, CALM_AGAIN, *happens] if happens else []:
        move, texts = bench.move(what, calm)
        calm = texts if calm is None else calm
        moves.append(move)
        print(json.dumps(asdict(move)), flush=True)
        write()
    return results, moves


if __name__ == "__main__":
    main()
