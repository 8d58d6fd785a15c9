"""Kills or replaces parts of a running system under live speech: do words change, and how long is the pause?

    python -m benchmarks.survival engine MANIFEST [--kills 20] [--sessions 2] [--seconds 120] [--model NAME]
    python -m benchmarks.survival spare [--kills 5] [--sessions 2] [--alive 3] [--model NAME] [--voxtral]
    python -m benchmarks.survival server [--kinds calm:2,worker:1,restart:1] [--sessions 8] [--workers 2] [--model NAME]
                                         [--nginx] [--plain 2]
    python -m benchmarks.survival fleet [--kinds engine:10,gateway:10,...] [--null]

All speech comes at the pace of a microphone. `engine`: plays recordings, with a flush after each as turn detection
would ask for; the engine is killed repeatedly, and words are compared with a calm run, ignoring case and punctuation; a
second calm run shows how much two calm runs differ. Words of finals are compared too, in the parts that both runs have
decoded again: how many these are depends on the load. `spare`: measures seconds from a kill of the engine until the
next word, with and without a spare engine, and the same from moments without a kill. Both run the engine and its client
alone, without sockets; `--voxtral` has random weights of full size on a GPU, made on the device: a real checkpoint
would also be read from disk at each start.

`server`: the whole server with clients that resume, over sockets. `worker` kills a worker, `restart` replaces all of
them (SIGUSR2); texts are compared with those of the first calm run. The time to reconnect runs from the moment a client
notices the loss of its connection to the first event on the next one. With --nginx the machine's nginx with
deploy/proxies/nginx.conf is in front of the server, and `reload` reloads it. --plain adds clients that cannot resume
(benchmarks/plain_clients.py). `fleet`: see benchmarks/fleet.py.
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
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fleet
from benchmarks.clients import ClientProcesses, Schedule, play_whole, summary
from benchmarks.engines import engine_client, null_loop
from benchmarks.measuring import (
    RunFailed,
    parser_of,
    percentiles,
    private_bytes,
    resident_bytes,
    row,
    show,
    until,
    with_common_options,
    write_json,
)
from benchmarks.recordings import joined_sessions, read_manifest, sample_path, sample_speech
from benchmarks.scoring import differing_words, plain_words
from benchmarks.servers import Nginx, Server, add_server_options, use_default_model
from benchmarks.sounds import Samples, speech, voice
from engine.client.engine_handles import EngineProcess
from engine.client.stream import EngineStream
from engine.messages import Closed, Revised, Text, Word
from engine.options import DEFAULT_MODEL, REVISED, EngineConfig

PACKET_S = 0.08
PAUSE_S = 1.0
# Longest wait for a word or an engine.
PATIENCE_S = 300.0
# When a loss happens, as a share of the time for which clients speak.
HAPPENS_AT = 0.45

Figures = dict[str, Any]
RevisedParts = dict[tuple[int, int], list[Word] | None]
# Makes an engine; the argument is the number of engines that share its device.
MakeEngine = Callable[[int], EngineProcess]


# Engine and engine client alone


class SpeakingClient:
    """Sends audio to one stream at the pace of a microphone, once or in a loop, and collects its text."""

    def __init__(self, stream: EngineStream, parts: Sequence[Samples], rate: int, endless: bool = False) -> None:
        self._stream = stream
        self._parts = parts
        self._packet = round(PACKET_S * rate)
        self._endless = endless
        self._text = ""
        # The parts that were decoded again, by their samples; None: the engine gave it up, or heard no words.
        self.revised: RevisedParts = {}
        self._has_text = asyncio.Event()
        self._speaking = asyncio.create_task(self._speak())
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_done(self) -> bool:
        return self._listening.done()

    async def next_words(self) -> float:
        """Returns the time of the next text."""
        self._has_text.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self._has_text.wait()
        return time.perf_counter()

    async def text(self) -> str:
        """Waits for the last text."""
        await asyncio.gather(self._speaking, self._listening)
        return self._text

    async def stop(self) -> None:
        self._speaking.cancel()
        await self._stream.abort()
        await asyncio.gather(self._speaking, self._listening, return_exceptions=True)

    async def _speak(self) -> None:
        due = time.perf_counter()
        for part in itertools.cycle(self._parts) if self._endless else self._parts:
            for start in range(0, len(part), self._packet):
                due += PACKET_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await self._stream.feed(part[start : start + self._packet])
            if not self._endless:
                await self._stream.flush()
        await self._stream.finish()

    async def _listen(self) -> None:
        async for output in self._stream:
            if isinstance(output, Text) and output.delta:
                self._text += output.delta
                self._has_text.set()
            elif isinstance(output, Revised):
                self.revised.setdefault((output.start, output.end), output.words)
        assert isinstance(output, Closed), output


async def play_with_kills(make: MakeEngine, sessions: list[list[Samples]], kills: int, alive_s: float) -> Figures:
    """Plays all sessions at once and kills the engine `kills` times, each time at a random moment of its life."""
    engine, chance, memory = make(1), random.Random(1), list[int]()
    async with engine_client(engine) as client:
        rate, asked = client.spec.sample_rate, {REVISED: "yes"} if client.spec.options.revises else {}
        streams = [await client.open(f"s{number}", options=asked) for number in range(len(sessions))]
        speakers = [SpeakingClient(stream, parts, rate) for stream, parts in zip(streams, sessions, strict=True)]
        while len(memory) < kills and not all(speaker.is_done for speaker in speakers):
            await until(lambda: client.ready, PATIENCE_S)
            await asyncio.sleep(chance.uniform(0.0, 2 * alive_s))
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            memory.append(resident_bytes())
            await until(lambda: not client.ready, PATIENCE_S)
        texts = [await speaker.text() for speaker in speakers]
        revised = [speaker.revised for speaker in speakers]
        return {"texts": texts, "revised": revised, "metrics": client.metrics(), "memory": memory}


def differing_finals(calm: Sequence[RevisedParts], other: Sequence[RevisedParts]) -> Figures:
    """Words of finals that differ between two runs, in the parts that both have decoded again."""
    said: tuple[list[str], list[str]] = [], []
    alone = 0
    for left, right in zip(calm, other, strict=True):
        for part in left.keys() | right.keys():
            texts = left.get(part), right.get(part)
            if texts[0] is not None and texts[1] is not None:
                for all_texts, words in zip(said, texts, strict=True):
                    all_texts.append(" ".join(word.text for word in words))
            else:
                alone += texts != (None, None)
    changed, words = differing_words(*said)
    return {
        "final_parts_in_both_runs": len(said[0]),
        "final_parts_in_one_run_only": alone,
        "words_of_final_parts": words,
        "words_of_final_parts_changed": changed,
    }


def load_sessions(options: argparse.Namespace) -> list[list[Samples]]:
    """Each session's clips with a pause after each, up to about `--seconds`."""
    loaded = []
    clips = read_manifest(options.manifest, kind="clips")
    for session in joined_sessions(clips, options.sessions, PAUSE_S):
        audio, parts = session.load()
        rate = len(audio) / parts[-1].end
        chosen = [part for part in parts if part.end <= options.seconds] or parts[:1]
        loaded.append([audio[round(part.start * rate) : round(part.end * rate)] for part in chosen])
    return loaded


def real_engine(options: argparse.Namespace, share_of: int) -> EngineProcess:
    return EngineProcess(EngineConfig(options.model, options.device, threads=1, share_of=share_of))


def null_engine(share_of: int) -> EngineProcess:
    return EngineProcess(partial(null_loop, 8, by_audio=True), preload=())


def random_engine(options: argparse.Namespace, share_of: int) -> EngineProcess:
    """Limits the streams to the sessions, to leave memory for the other engine."""
    from benchmarks.random_weights import voxtral_loop

    return EngineProcess(partial(voxtral_loop, options.kv, options.sessions, options.small))


def compare_words(options: argparse.Namespace) -> Figures:
    """`survival engine`."""
    # Average seconds from an engine's start to its kill.
    make: MakeEngine = partial(real_engine, options)
    alive_s = 4.0
    if options.small:
        make, alive_s, options.kills = null_engine, 0.2, 1
        sessions = [[voice(1.5, pitch, seed=number)] for number, pitch in enumerate((95.0, 190.0))]
    else:
        sessions = load_sessions(options)
    calm, again, killed = (
        asyncio.run(play_with_kills(make, sessions, kills, alive_s)) for kills in (0, 0, options.kills)
    )
    metrics, memory = killed["metrics"], killed["memory"]
    changed, words = differing_words(calm["texts"], killed["texts"])
    for name, other in (("again", again), ("killed", killed)):
        for left, right in zip(calm["texts"], other["texts"], strict=True):
            if plain_words(left) != plain_words(right):
                print(f"--- calm:  {left}\n--- {name}: {right}")
    report = {
        "sessions": len(sessions),
        "words": words,
        "kills": metrics.restarts,
        "words_changed_by_kills": changed,
        "words_changed_between_calm_runs": differing_words(calm["texts"], again["texts"])[0],
        "finals": differing_finals(calm["revised"], killed["revised"]),
        "streams_recovered": metrics.streams_recovered,
        "streams_lost": metrics.streams_given_up + metrics.crashing_streams,
        **percentiles("recovery_s", metrics.recent_recovery_seconds, 50, 100),
        "gateway_bytes_at_first_kill": memory[0] if memory else None,
        "gateway_bytes_at_last_kill": memory[-1] if memory else None,
    }
    show("The engine killed under live speech", report)
    return report


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
                [np.roll(audio, number * rate) * np.float32(1.0 - 0.3 * number / sessions)],
                rate,
                endless=True,
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
    make: MakeEngine = partial(real_engine, options)
    alive_s, audio = (2.0 / 3.0 * options.alive, 4.0 / 3.0 * options.alive), None
    if options.small:
        options.kills, options.sessions, alive_s, make, audio = 1, 1, (0.0, 0.2), null_engine, speech()
    if options.voxtral:
        # The engine skips silence and noise: random weights need a voice as input.
        make, audio = partial(random_engine, options), speech()
    results = []
    for spares in (0, 1) if options.spares is None else (options.spares,):
        sound = sample_speech() if audio is None else audio
        results.append(asyncio.run(measure_pauses(make, sound, options.sessions, options.kills, spares, alive_s)))
        show(f"The next words, {'with' if spares else 'without'} a spare engine", results[-1])
    return results


# Clients that resume: the whole server


def reload(server: Server, nginx: Nginx | None) -> None:
    if nginx is None:
        raise RunFailed("`reload` needs --nginx")
    nginx.reload()


# Losses of a server, by kind.
SERVER_LOSSES: dict[str, Callable[[Server, Nginx | None], None]] = {
    "calm": lambda server, nginx: None,
    "worker": lambda server, nginx: os.kill(server.workers()[0], signal.SIGKILL),
    "restart": lambda server, nginx: os.kill(server.gateways[0].pid, signal.SIGUSR2),
    "reload": reload,
}


def play_server(
    server: Server, nginx: Nginx | None, groups: Sequence[ClientProcesses], kind: str, options: argparse.Namespace
) -> list[list[Any]]:
    """What each client of each group has to tell."""
    begins, join_s = time.monotonic() + 0.5, options.sessions / options.joins_per_second
    for group in groups:
        group.begin(Schedule(begins, join_s))
    time.sleep(max(0.0, begins + join_s + HAPPENS_AT * options.seconds - time.monotonic()))
    SERVER_LOSSES[kind](server, nginx)
    found = [[outcome for process in group.findings() for outcome in process] for group in groups]
    server.check()
    return found


def lose_in_server(options: argparse.Namespace) -> list[Figures]:
    """`survival server`."""
    if options.small:
        options.null, options.sessions, options.seconds, options.clients, options.plain = True, 2, 2.0, 1, 1
        options.kinds = [("calm", 1), ("worker", 1), *([("reload", 1)] if options.nginx else [])]
    use_default_model(options)
    results: list[Figures] = []
    references: list[str] | None = None
    with ExitStack() as stack:
        flags = ["--server.trusted-proxies", "127.0.0.1"] if options.nginx else []
        server = stack.enter_context(Server(options, counts_streams_only=True, flags=flags))
        nginx = stack.enter_context(Nginx(server)) if options.nginx else None
        orders = {
            "urls": [nginx.url if nginx else server.urls[0].partition("?")[0]],
            "recording": sample_path() if options.audio is None and options.model else options.audio,
            "seconds": options.seconds,
            # With random weights no two sessions may send the same audio, which a cache would answer for the model.
            "own_parts": not options.model,
        }
        groups = [stack.enter_context(ClientProcesses(play_whole, options.sessions, options.clients, **orders))]
        if options.plain:
            # Here, because others do without the openai package.
            from benchmarks.plain_clients import plain_summary, play_plain

            groups.append(stack.enter_context(ClientProcesses(play_plain, options.plain, 1, **orders)))
        for kind in [kind for kind, times in options.kinds for _ in range(times)]:
            outcomes, *plain = play_server(server, nginx, groups, kind, options)
            references = references or [outcome["text"] for outcome in outcomes]
            results.append({"kind": kind, **summary(outcomes, references)})
            print(row(results[-1]), flush=True)
            if plain:
                results[-1]["plain"] = plain_summary(plain[0])
                print(f"  clients that cannot resume: {row(results[-1]['plain'])}", flush=True)
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
    one = with_common_options(commands.add_parser("engine", help="kill the engine, compare words"))
    one.add_argument("manifest", type=Path, nargs="?", help="recordings with known words, as for benchmarks.accuracy")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--sessions", type=int, default=2)
    one.add_argument("--seconds", type=float, default=120.0, help="audio per session")
    one.add_argument("--model", default=DEFAULT_MODEL)
    one.set_defaults(run=compare_words, device="auto")
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
    one.add_argument("--nginx", action="store_true", help="nginx in front of the server")
    one.add_argument("--plain", type=int, default=0, help="clients that cannot resume, beside the others")
    add_server_options(one)
    one.set_defaults(run=lose_in_server, workers=2)
    one = with_common_options(commands.add_parser("fleet", help="lose parts of a fleet", description=fleet.__doc__))
    one.add_argument(
        "--kinds",
        type=kinds_of(fleet.KINDS),
        default=fleet.DEFAULT_KINDS,
        help="and how often",
    )
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
