"""Workers killed and replaced under sessions: how long until each session goes on, and whether a word changed.

    python -m benchmarks.workers [--model NAME] [--sessions 8] [--workers 2] [--json FILE]

The whole server: `tickertape serve --workers N` with the model's own engine process, and clients that ask for
`session.resume`, over real sockets in this process. Each session hears the same recording at the pace of speech, at
16 kHz with server-side turn detection, three times: nothing happens; one worker is killed (SIGKILL) in the middle; all
workers are replaced (SIGUSR2). The time to resume runs from the moment a client misses its connection to the first
event on the next one. Words are those of all completed items.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from audio.containers import read_file
from benchmarks.lasting_clients import Speaker
from benchmarks.server_processes import workers_of
from benchmarks.survival import differences
from engine.weights.store import cache_folder
from realtime.client import lasting_session
from realtime.commands.pull import SAMPLE

RATE = 16_000
KILL_AT = 0.5
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run of all sessions."""

    what: str
    sessions: int
    # Connections that were lost, and seconds from each loss until the session went on.
    losses: int
    resumed_p50_s: float
    resumed_max_s: float
    # Words of all sessions, and how many of them are not those of a session that was alone.
    words: int
    words_that_differ: int
    # Numbers of events that are missing or came twice, and items that were completed more or less than once.
    wrong_numbers: int
    wrong_items: int


@contextlib.asynccontextmanager
async def server(model: str, workers: int) -> AsyncIterator[tuple[str, int]]:
    """A running server: its address, and the process id of the parent."""
    reader, writer = os.pipe()
    command = ("serve", "--port", "0", "--workers", str(workers), "--model", model, "--limits.max-load", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "realtime.cli", *command, "--ready-fd", str(writer), pass_fds=(writer,)
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as ready:
            url = (await asyncio.wait_for(asyncio.to_thread(ready.readline), PATIENCE_S)).strip()
        yield url.replace("http", "ws", 1) + "/v1/realtime", process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def run(what: str, url: str, parent: int, audio: bytes, sessions: int, alone: str) -> Result:
    speakers = [Speaker(url, audio) for _ in range(sessions)]
    speaking = asyncio.gather(*(speaker.speak() for speaker in speakers))
    await asyncio.sleep(KILL_AT * len(audio) / (2 * RATE))
    if what == "a worker killed":
        os.kill(workers_of(parent)[0], signal.SIGKILL)
    elif what == "all workers replaced":
        os.kill(parent, signal.SIGUSR2)
    await asyncio.wait_for(speaking, PATIENCE_S)
    waits = [wait for speaker in speakers for wait in speaker.resumed_s]
    differ, words = differences([" ".join(speaker.transcripts) for speaker in speakers], [alone] * sessions)
    return Result(
        what,
        sessions,
        len(waits),
        statistics.median(waits) if waits else 0.0,
        max(waits, default=0.0),
        words,
        differ,
        sum(speaker.wrong_numbers for speaker in speakers),
        sum(speaker.wrong_items for speaker in speakers),
    )


async def measure(arguments: argparse.Namespace) -> list[Result]:
    sound = next(file for file in (cache_folder() / SAMPLE).iterdir() if file.suffix == ".wav")
    samples = np.concatenate(list(read_file(sound)))[: int(arguments.seconds * RATE)]
    audio = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    lasting_session.FIRST_WAIT_S = 0.1
    results: list[Result] = []
    async with server(arguments.model, arguments.workers) as (url, parent):
        alone = Speaker(url, audio)
        await alone.speak()
        for what in ("calm", "a worker killed", "all workers replaced"):
            results.append(await run(what, url, parent, audio, arguments.sessions, " ".join(alone.transcripts)))
            print(asdict(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="how much of the recording each session hears")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
