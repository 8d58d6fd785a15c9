"""nginx in front of two workers, reloaded and restarted under live speech: who loses a session, a word or a turn?

    python -m benchmarks.behind_nginx [--minutes 30] [--resuming 2] [--plain 2] [--disturbances 6] [--model NAME]

nginx is that of the machine, with deploy/proxies/nginx.conf; the server has two workers. All clients connect to nginx
and speak at the pace of a microphone: rounds of the sample recording that `tickertape pull` provides and a pause,
always the same. Resuming clients are those of our commands. Plain clients are the openai package, which cannot resume:
when they are closed they open another session, and the audio in between is lost. Disturbances come at equal distances:
in turn a reload of nginx (`nginx -s reload`), and a rolling restart of the workers (SIGUSR2).

The words of each round are compared with the most frequent words of a calm round of the same client: a round that no
disturbance overlaps, nor the seconds after one. Calm rounds that differ from it show how much two calm runs differ. A
drain begins for a plain client with the event `session.closing`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks.clients import APPEND_MS, TURNS, PacedClient, resume_at_once, sleep_until, summary
from benchmarks.measuring import ROOT, RunFailed, parser_of, percentiles, show, write_json
from benchmarks.recordings import sample_speech
from benchmarks.scoring import differing_words, plain_words
from benchmarks.servers import Child, Server, add_server_options, free_port
from benchmarks.sounds import SAMPLE_RATE, Samples, pcm16, resampled, voice
from engine.options import DEFAULT_MODEL
from realtime.client.wire_client import COMPLETED, CannotConnect

EXAMPLE = ROOT / "deploy/proxies/nginx.conf"
SPEECH_STARTED = "input_audio_buffer.speech_started"
# A round is a whole number of the embedded model's strides (1.04 s) and of appends, so that all rounds are alike to it.
ROUND_S, SMALL_ROUND_S = 57.2, 3.2
# The rate of OpenAI's clients.
PLAIN_RATE = 24_000
# Seconds after a disturbance that still belong to it, and the longest wait for a rolling restart.
SETTLES_S = 10.0
RESTART_PATIENCE_S = 180.0
ASK_AGAIN_S = 0.5
RESTARTED = 1012

Figures = dict[str, Any]
Span = tuple[float, float]


# nginx


def nginx_program() -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise RunFailed("nginx is not installed")
    return program


@contextmanager
def nginx_before(port: int) -> Iterator[Nginx]:
    """nginx with our example, in front of the server at this port."""
    with tempfile.TemporaryDirectory(prefix="nginx-") as folder:
        nginx = Nginx(port, Path(folder))
        try:
            nginx.wait_until_it_listens()
            yield nginx
        finally:
            nginx.child.stop()


class Nginx:
    def __init__(self, server_port: int, folder: Path) -> None:
        program = nginx_program()
        self.port = free_port()
        text = EXAMPLE.read_text().replace("8080", str(self.port)).replace("127.0.0.1:8000", f"127.0.0.1:{server_port}")
        (folder / "nginx.conf").write_text(text)
        self._command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        self._directives = f"pid {folder}/pid; error_log stderr;"
        self.child = Child("nginx", [*self._command, "-g", f"daemon off; {self._directives}"], folder / "log")

    def wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            self.child.check()
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def reload(self) -> None:
        subprocess.run([*self._command, "-g", self._directives, "-s", "reload"], check=True, capture_output=True)


# Clients


class RoundClient(PacedClient):
    """A client that resumes; its words can be read round by round."""

    def __init__(self, url: str, appends: Sequence[bytes], rounds: int) -> None:
        super().__init__(url, (append for _ in range(rounds) for append in appends))
        self._per_round = len(appends)

    def rounds(self) -> list[tuple[Span, str]]:
        """When each round was spoken, and the words of the turns that began in it."""
        began = {event["item_id"]: event["audio_start_ms"] for event in self.events if event["type"] == SPEECH_STARTED}
        count = len(self.sent_at) // self._per_round
        texts: list[list[str]] = [[] for _ in range(count)]
        for event in self.events:
            if event["type"] == COMPLETED:
                number = int(began.get(event["item_id"], 0) / (self._per_round * APPEND_MS))
                texts[min(number, count - 1)].append(event["transcript"])
        starts = [self.sent_at[number * self._per_round] for number in range(count)]
        ends = [*starts[1:], self.sent_at[-1]]
        return [(span, " ".join(text)) for span, text in zip(zip(starts, ends, strict=True), texts, strict=True)]


@dataclass
class PlainSession:
    """One session of a client that does not resume, as it ended."""

    # Seconds from the lost session to this one; None for the first.
    reconnected_s: float | None
    words: int = 0
    turns: set[str] = field(default_factory=set)
    told_at: float | None = None
    # The server's close code, and seconds from `session.closing` to it; None: the client itself hung up.
    code: int | None = None
    drained_s: float | None = None


class PlainClient:
    """The openai package with a microphone that never stops: what is said between two sessions is lost."""

    def __init__(self, port: int, audio: bytes, until: float) -> None:
        self.sessions: list[PlainSession] = []
        self.refusals = 0
        self._openai = AsyncOpenAI(base_url=f"http://localhost:{port}/v1", api_key="unused", max_retries=0)
        self._audio, self._until = audio, until

    async def speak(self) -> None:
        lost_at: float | None = None
        while time.monotonic() < self._until:
            try:
                connecting = self._openai.realtime.connect(extra_query={"intent": "transcription"})
                async with connecting as connection:
                    await connection.recv()
                    wait_s = None if lost_at is None else time.monotonic() - lost_at
                    self.sessions.append(PlainSession(wait_s))
                    await self._converse(connection, self.sessions[-1])
                    lost_at = time.monotonic()
            except (InvalidHandshake, ConnectionClosed, OSError):
                self.refusals += 1
                await asyncio.sleep(ASK_AGAIN_S)

    async def _converse(self, connection: Any, session: PlainSession) -> None:
        format_ = {"type": "audio/pcm", "rate": PLAIN_RATE}
        await connection.session.update(
            session={"type": "transcription", "audio": {"input": {"format": format_, "turn_detection": TURNS}}}
        )
        sending = asyncio.create_task(self._send(connection))
        try:
            async with asyncio.timeout(max(0.0, self._until - time.monotonic())):
                while True:
                    self._take(await connection.recv(), session)
        except TimeoutError:
            pass
        except ConnectionClosed as closed:
            session.code = closed.rcvd.code if closed.rcvd else 1006
            session.drained_s = None if session.told_at is None else time.monotonic() - session.told_at
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _take(self, event: Any, session: PlainSession) -> None:
        if event.type == SPEECH_STARTED:
            session.turns.add(event.item_id)
        elif event.type == COMPLETED:
            session.turns.discard(event.item_id)
            session.words += len(event.transcript.split())
        elif event.type == "session.closing":
            session.told_at = time.monotonic()

    async def _send(self, connection: Any) -> None:
        size, due, at = 2 * PLAIN_RATE * APPEND_MS // 1000, time.monotonic(), 0
        while True:
            due += APPEND_MS / 1000
            await sleep_until(due)
            data = self._audio[at : at + size]
            at = (at + size) % len(self._audio)
            await connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())


# Disturbances


async def disturb(server: Server, nginx: Nginx, moments: Sequence[float]) -> list[tuple[str, Span]]:
    """At each moment, in turn, a reload of nginx and a rolling restart; returns when they began and were over."""
    done = []
    for number, moment in enumerate(moments):
        await sleep_until(moment)
        kind, began = ("restart", time.monotonic()) if number % 2 else ("reload", time.monotonic())
        if kind == "reload":
            await asyncio.to_thread(nginx.reload)
        else:
            old = set(server.workers())
            os.kill(server.gateways[0].pid, signal.SIGUSR2)
            while old & set(server.workers()) or len(server.workers()) < len(old):
                if time.monotonic() > began + RESTART_PATIENCE_S:
                    raise RunFailed(f"the rolling restart was not over after {RESTART_PATIENCE_S:.0f} s")
                await asyncio.sleep(0.2)
        done.append((kind, (began, time.monotonic())))
        print(f"{kind} {number + 1} of {len(moments)}, {done[-1][1][1] - began:.1f} s", flush=True)
    return done


# Figures


def word_figures(clients: Sequence[Sequence[tuple[Span, str]]], disturbances: Sequence[Span]) -> Figures:
    """Words of calm and of disturbed rounds that differ from the most frequent calm round of their client. The first
    round has no words before it that the model knows, and counts only if it is disturbed."""
    counts: Figures = {"calm_rounds": 0, "calm_words": 0, "calm_words_that_differ": 0}
    counts |= {"disturbed_rounds": 0, "disturbed_words": 0, "disturbed_words_that_differ": 0}
    for rounds in clients:
        sorted_: dict[str, list[str]] = {"calm": [], "disturbed": []}
        for number, ((start, end), text) in enumerate(rounds):
            is_disturbed = any(start < last + SETTLES_S and first < end for first, last in disturbances)
            if number or is_disturbed:
                sorted_["disturbed" if is_disturbed else "calm"].append(text)
        # In a small run on a busy machine no round may be calm.
        judges = sorted_["calm"] or sorted_["disturbed"]
        usual = Counter(" ".join(plain_words(text)) for text in judges).most_common(1)[0][0]
        for kind, texts in sorted_.items():
            differ, words = differing_words([usual] * len(texts), texts)
            counts[f"{kind}_rounds"] += len(texts)
            counts[f"{kind}_words"] += words
            counts[f"{kind}_words_that_differ"] += differ
            for text in texts:
                if plain_words(text) != usual.split():
                    print(f"--- usual:  {usual}\n--- {kind}: {text}")
    return counts


def plain_figures(clients: Sequence[PlainClient]) -> Figures:
    sessions = [session for client in clients for session in client.sessions]
    ended = [session for session in sessions if session.code is not None]
    drained = [session for session in ended if session.code == RESTARTED]
    return {
        "clients": len(clients),
        "sessions": len(sessions),
        "words": sum(session.words for session in sessions),
        "closed_with_1012": len(drained),
        "of_them_told_before": sum(session.told_at is not None for session in drained),
        "closed_otherwise": len(ended) - len(drained),
        "turns_cut": sum(len(session.turns) for session in ended),
        # From `session.closing` to the close.
        **percentiles(
            "drained_s", [session.drained_s for session in drained if session.drained_s is not None], 50, 100
        ),
        **percentiles("reconnected_s", [s.reconnected_s for s in sessions if s.reconnected_s is not None], 50, 100),
        "refused": sum(client.refusals for client in clients),
    }


# The run


async def play(server: Server, nginx: Nginx, sound: Samples, round_s: float, options: argparse.Namespace) -> Figures:
    """`sound` is one round."""
    rounds = max(2, int(60 * options.minutes / round_s))
    size = 2 * SAMPLE_RATE * APPEND_MS // 1000
    data = pcm16(sound)
    appends = [data[start : start + size] for start in range(0, len(data), size)]
    begins, lasts_s = time.monotonic() + 0.5, rounds * round_s
    url = f"ws://localhost:{nginx.port}/v1/realtime"
    resuming = [RoundClient(url, appends, rounds) for _ in range(options.resuming)]
    plain_audio = pcm16(resampled(sound, SAMPLE_RATE, PLAIN_RATE))
    plain = [PlainClient(nginx.port, plain_audio, begins + lasts_s) for _ in range(options.plain)]

    async def joined(number: int, client: RoundClient | PlainClient) -> None:
        """Clients begin at different times, so that they do not all pause together."""
        await sleep_until(begins + round_s * number / (options.resuming + options.plain))
        try:
            await client.speak()
        except CannotConnect as error:
            assert isinstance(client, RoundClient)
            client.failure = str(error)

    distance = lasts_s / (options.disturbances + 1)
    moments = [begins + distance * (number + 1) for number in range(options.disturbances)]
    disturbing = asyncio.create_task(disturb(server, nginx, moments))
    everybody = [asyncio.create_task(joined(*one)) for one in enumerate([*resuming, *plain])]
    await asyncio.gather(disturbing, *everybody)
    server.check()
    nginx.child.check()
    done = disturbing.result()
    outcomes, rounds_of = [client.outcome() for client in resuming], [client.rounds() for client in resuming]
    # Words are compared round by round, not with another run.
    figures = summary(outcomes, [outcome["text"] for outcome in outcomes])
    for name in ("words_that_differ", "sessions_that_differ"):
        del figures[name]
    spans = [span for _, span in done]
    figures |= word_figures(rounds_of, spans)
    return {
        "minutes": lasts_s / 60,
        "reloads": sum(kind == "reload" for kind, _ in done),
        "restarts": sum(kind == "restart" for kind, _ in done),
        **percentiles("restart_s", [end - start for kind, (start, end) in done if kind == "restart"], 100),
        "resuming": figures,
        "plain": plain_figures(plain),
    }


def one_round(sound: Samples, round_s: float) -> Samples:
    return np.concatenate([sound, np.zeros(round(round_s * SAMPLE_RATE) - len(sound), np.float32)])


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--resuming", type=int, default=2, help="clients that resume")
    parser.add_argument("--plain", type=int, default=2, help="clients that do not")
    parser.add_argument("--disturbances", type=int, default=6, help="reloads and restarts, in turn")
    add_server_options(parser)
    parser.set_defaults(workers=2)
    options = parser.parse_args(arguments)
    if options.small:
        options.null, options.minutes, options.disturbances = True, 6 * SMALL_ROUND_S / 60, 2
        options.resuming = options.plain = 1
    elif not (options.null or options.voxtral or options.whisper or options.model):
        options.model = DEFAULT_MODEL
    if options.null:
        round_s, sound = SMALL_ROUND_S, voice(SMALL_ROUND_S - 1.0, 130.0, seed=1)
    else:
        round_s, sound = ROUND_S, sample_speech()
    resume_at_once()
    flags = ["--server.trusted-proxies", "127.0.0.1"]
    with Server(options, counts_streams_only=True, flags=flags) as server:
        port = int(server.urls[0].split(":")[2].split("/")[0])
        with nginx_before(port) as nginx:
            figures = asyncio.run(play(server, nginx, one_round(sound, round_s), round_s, options))
    show("nginx in front of workers, reloaded and restarted", figures)
    write_json(options, {"command": " ".join(sys.argv[1:]), "cores": os.cpu_count(), "results": figures})


if __name__ == "__main__":
    main()
