"""Kills or replaces parts of a running system under live speech: do words change, and how long is the pause?

    python -m benchmarks.survival spare [--kills 5] [--sessions 2] [--alive 3] [--model NAME] [--voxtral]
    python -m benchmarks.survival server [--kinds calm:2,worker:1,restart:1] [--sessions 8] [--workers 2] [--model NAME]
                                         [--speakers]
    python -m benchmarks.survival fleet [--kinds engine:10,gateway:10,...] [--null]

All speech comes at the pace of a microphone. `spare`: measures seconds from a kill of the engine until the next word,
with and without a spare engine, and the same from moments without a kill. It runs the engine and its client alone,
without sockets; `--voxtral` has random weights of full size on a GPU, made on the device: a real checkpoint would also
be read from disk at each start.

`server`: the whole server with clients that resume, over sockets. `engine` kills the engine and starts it again,
`worker` kills a worker, `restart` replaces all of them (SIGUSR2); final texts are compared with those of the first calm
run, ignoring case and punctuation. The time to reconnect runs from the moment a client notices the loss of its
connection to the first event on the next one; the longest wait is that for an acknowledgement of new audio.
--speakers asks for speaker labels and compares those of finals. `fleet`: see benchmarks/fleet.py.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import fleet
from benchmarks.clients import ClientProcesses, Schedule, play_whole, speaker_summary, summary
from benchmarks.engines import engine_client, null_loop
from benchmarks.measuring import (
    parser_of,
    percentiles,
    private_bytes,
    row,
    show,
    until,
    with_common_options,
    with_descendants,
    write_json,
)
from benchmarks.recordings import sample_path, sample_speech
from benchmarks.servers import Server, add_server_options, use_default_model
from benchmarks.sounds import Samples, speech
from engine.client.engine_handles import EngineProcess
from engine.client.stream import EngineStream
from engine.messages import Closed, Text
from engine.options import DEFAULT_MODEL, EngineConfig

PACKET_S = 0.08
# Longest wait for a word or an engine.
PATIENCE_S = 300.0
# When a loss happens, as a share of the time for which clients speak.
HAPPENS_AT = 0.45

Figures = dict[str, Any]
# Makes an engine; the argument is the number of engines that share its device.
MakeEngine = Callable[[int], EngineProcess]


# Engine and engine client alone


class SpeakingClient:
    """Sends audio to one stream in a loop, at the pace of a microphone, and tells when text comes."""

    def __init__(self, stream: EngineStream, audio: Samples, rate: int) -> None:
        self._stream = stream
        self._has_text = asyncio.Event()
        self._tasks = [asyncio.create_task(self._speak(audio, round(PACKET_S * rate)))]
        self._tasks.append(asyncio.create_task(self._listen()))

    async def next_words(self) -> float:
        """Returns the time of the next text."""
        self._has_text.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self._has_text.wait()
        return time.perf_counter()

    async def stop(self) -> None:
        self._tasks[0].cancel()
        await self._stream.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _speak(self, audio: Samples, packet: int) -> None:
        due = time.perf_counter()
        for start in itertools.cycle(range(0, len(audio), packet)):
            due += PACKET_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self._stream.feed(audio[start : start + packet])

    async def _listen(self) -> None:
        async for output in self._stream:
            if isinstance(output, Text) and output.delta:
                self._has_text.set()
        assert isinstance(output, Closed), output


def make_engine(options: argparse.Namespace, share_of: int) -> EngineProcess:
    if options.voxtral:
        from benchmarks.random_weights import voxtral_loop

        # Streams are limited to the sessions, to leave memory for the other engine.
        return EngineProcess(partial(voxtral_loop, options.kv, options.sessions, options.small))
    if options.small:
        return EngineProcess(partial(null_loop, 8, by_audio=True), preload=())
    return EngineProcess(EngineConfig(options.model, options.device, threads=1, share_of=share_of))


async def measure_pauses(
    make: MakeEngine, audio: Samples, sessions: int, kills: int, spares: int, alive_s: tuple[float, float]
) -> Figures:
    """Seconds until the next words, over all sessions and kills, with this number of spare engines."""
    engines = [make(1 + spares) for _ in range(1 + spares)]
    began = time.perf_counter()

    async def waits(since: float) -> list[float]:
        moments = await asyncio.gather(*(speaker.next_words() for speaker in speakers))
        return [moment - since for moment in moments]

    async with engine_client(*engines, spares=spares) as client:
        start_s = time.perf_counter() - began
        await until(lambda: client.capacity().spares_ready == spares, PATIENCE_S)
        rate = client.spec.sample_rate
        speakers = [
            # No two streams send the same bytes, which a cache would answer.
            SpeakingClient(
                await client.open(f"s{number}"),
                np.roll(audio, number * rate) * np.float32(1.0 - 0.3 * number / sessions),
                rate,
            )
            for number in range(sessions)
        ]
        await waits(0.0)
        chance, calm, killed = random.Random(1), list[float](), list[float]()
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(*alive_s))
            calm += await waits(time.perf_counter())
        spare_bytes = private_bytes(engines[1].pid or 0) if spares else 0
        for _ in range(kills):
            await until(lambda: client.ready and client.capacity().spares_ready == spares, PATIENCE_S)
            await asyncio.sleep(chance.uniform(*alive_s))
            # Words that were on their way at the kill do not count.
            victim, pooled = next((at, engine) for at, engine in enumerate(client.supervisor.pool.all) if engine.serves)
            pid = engines[victim].pid
            assert pid is not None
            link, moment = pooled.link, time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pooled.link is not link, PATIENCE_S)  # noqa: B023
            killed += await waits(moment)
            print(row(percentiles("killed_s", killed, 50, 100)), flush=True)
        await until(lambda: client.metrics().streams_recovered == sessions * kills, PATIENCE_S)
        metrics = client.metrics()
        for speaker in speakers:
            await speaker.stop()
    return {
        "spares": spares,
        "sessions": sessions,
        "kills": kills,
        # Start of the first engine until it is ready.
        "start_s": start_s,
        **percentiles("calm_s", calm, 50, 100),
        **percentiles("killed_s", killed, 50, 100),
        # Until a stream had caught up.
        **percentiles("recovered_s", metrics.recent_recovery_seconds, 50),
        "streams_recovered": metrics.streams_recovered,
        "spare_private_bytes": spare_bytes,
    }


def compare_spares(options: argparse.Namespace) -> list[Figures]:
    """`survival spare`."""
    alive_s = 2.0 / 3.0 * options.alive, 4.0 / 3.0 * options.alive
    if options.small:
        options.kills, options.sessions, alive_s = 1, 1, (0.0, 0.2)
    # The engine skips silence and noise: random weights need a voice as input.
    audio = speech() if options.small or options.voxtral else sample_speech()
    make, results = partial(make_engine, options), []
    for spares in (0, 1) if options.spares is None else (options.spares,):
        results.append(asyncio.run(measure_pauses(make, audio, options.sessions, options.kills, spares, alive_s)))
        show(f"The next words, {'with' if spares else 'without'} a spare engine", results[-1])
    return results


# Clients that resume: the whole server


# Losses of a server, by kind.
SERVER_LOSSES: dict[str, Callable[[Server], None]] = {
    "calm": lambda server: None,
    "engine": Server.restart_engine,
    "worker": lambda server: os.kill(server.workers()[0], signal.SIGKILL),
    "restart": lambda server: os.kill(server.gateway.pid, signal.SIGUSR2),
}


def play_server(server: Server, clients: ClientProcesses, kind: str, options: argparse.Namespace) -> list[Any]:
    """The outcome of each client."""
    begins, join_s = time.monotonic() + 0.5, options.sessions / options.joins_per_second
    clients.begin(Schedule(begins, join_s))
    time.sleep(max(0.0, begins + join_s + HAPPENS_AT * options.seconds - time.monotonic()))
    SERVER_LOSSES[kind](server)
    found = [outcome for process in clients.findings() for outcome in process]
    server.check()
    return found


def server_figures(server: Server) -> Figures:
    """Since the server's start: streams that were rebuilt on a new engine, and seconds until they were (mean)."""
    recovered = server.counter("engine_streams_recovered")
    return {
        "streams_recovered": round(recovered),
        "recovery_s_mean": server.counter("engine_recovery_seconds") / recovered if recovered else None,
        "gateway_bytes": sum(map(private_bytes, with_descendants(server.gateway.pid))),
    }


def lose_in_server(options: argparse.Namespace) -> list[Figures]:
    """`survival server`."""
    if options.small:
        options.null, options.sessions, options.seconds, options.clients = True, 2, 2.0, 1
        options.kinds = [(kind, 1) for kind in ("calm", "worker", "engine")]
    use_default_model(options)
    results: list[Figures] = []
    calm: list[dict[str, Any]] | None = None
    with Server(options, counts_streams_only=True) as server:
        orders = {
            "url": server.url,
            "recording": sample_path() if options.audio is None and options.model else options.audio,
            "seconds": options.seconds,
            # With random weights no two sessions may send the same audio, which a cache would answer for the model.
            "own_parts": not options.model,
            "speakers": options.speakers,
        }
        with ClientProcesses(play_whole, options.sessions, options.clients, **orders) as clients:
            for kind in [kind for kind, times in options.kinds for _ in range(times)]:
                outcomes = play_server(server, clients, kind, options)
                calm = calm or outcomes
                figures = summary(outcomes, [outcome["text"] for outcome in calm])
                figures |= speaker_summary(outcomes, calm) if options.speakers else {}
                results.append({"kind": kind, **figures, **server_figures(server)})
                print(row(results[-1]), flush=True)
    return results


def lose_in_fleet(options: argparse.Namespace) -> list[Figures]:
    """`survival fleet`."""
    if options.small:
        options.null, options.sessions, options.seconds = True, 2, 8.0
        options.kinds = [("calm", 1), ("engine", 1), ("gateway", 1), ("stop-gateway-3", 1)]
    return asyncio.run(fleet.measure(options))


# The command


def kinds_of(known: Sequence[str]) -> Callable[[str], list[tuple[str, int]]]:
    """Reads `engine:10,gateway`: what is lost, and how often."""

    def parse(text: str) -> list[tuple[str, int]]:
        found = [(name, int(times or 1)) for name, _, times in (part.partition(":") for part in text.split(","))]
        if unknown := {name for name, _ in found} - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return found

    return parse


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    one = with_common_options(commands.add_parser("spare", help="time until the next words, with and without a spare"))
    one.add_argument("--model", default=DEFAULT_MODEL)
    one.add_argument("--device", default="auto")
    one.add_argument("--voxtral", action="store_true", help="a Voxtral Realtime with random weights")
    one.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="its keys and values")
    one.add_argument("--sessions", type=int, default=2)
    one.add_argument("--kills", type=int, default=5)
    one.add_argument("--alive", type=float, default=3.0, help="seconds, on average, before each look and each kill")
    one.add_argument("--spares", type=int, choices=(0, 1), help="only without or only with a spare")
    one.set_defaults(run=compare_spares)
    one = with_common_options(commands.add_parser("server", help="kill and replace workers of a server"))
    one.add_argument("--kinds", type=kinds_of(list(SERVER_LOSSES)), default="calm:2,worker:1,restart:1")
    one.add_argument("--sessions", type=int, default=8)
    one.add_argument("--seconds", type=float, default=30.0, help="duration of each session")
    one.add_argument("--speakers", action="store_true", help="sessions ask for speaker labels, which are compared too")
    add_server_options(one)
    one.set_defaults(run=lose_in_server, workers=2)
    one = with_common_options(commands.add_parser("fleet", help="lose parts of a fleet", description=fleet.__doc__))
    one.add_argument("--kinds", type=kinds_of(list(fleet.LOSSES)), default=fleet.DEFAULT_KINDS, help="and how often")
    one.add_argument("--sessions", type=int, default=4, help="clients that speak at the same time")
    one.add_argument("--seconds", type=float, default=20.0, help="length of the recording that a session sends")
    one.add_argument("--model", default="moonshine-tiny")
    one.add_argument("--null", action="store_true", help="engines without a model")
    one.set_defaults(run=lose_in_fleet)
    options = parser.parse_args(arguments)
    results = options.run(options)
    write_json(options, {"command": " ".join(sys.argv[1:]), "cores": os.cpu_count(), "results": results})


if __name__ == "__main__":
    main()
