"""Kill the engine again and again under live sessions, and compare what was said with a run without kills.

    python -m benchmarks.survival MANIFEST [--kills 20] [--sessions 2] [--seconds 120] [--model NAME] [--json FILE]

Recordings are played at the pace of a microphone, with a flush after each, as turn detection would ask for. What is
compared is words, case and punctuation aside. A second run without kills shows how much two runs differ by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.live_run import resident_bytes
from benchmarks.recordings import Session, joined_sessions, read_manifest
from benchmarks.scoring import align, plain_words
from engine.client.client import EngineClient
from engine.client.handles import EngineProcess
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.messages import Closed, Text

PACKET_SECONDS = 0.08
PAUSE_SECONDS = 1.0
# How long an engine lives until it is killed, on average.
ALIVE_SECONDS = 4.0


async def play(client: EngineClient, name: str, parts: list[NDArray[np.float32]]) -> str:
    """One session in real time; what it said."""
    stream = await client.open(name)
    said: list[str] = []

    async def listen() -> None:
        async for output in stream:
            if isinstance(output, Text):
                said.append(output.delta)
        assert isinstance(output, Closed), output

    listener = asyncio.create_task(listen())
    packet = round(PACKET_SECONDS * client.spec.sample_rate)
    due = time.perf_counter()
    for part in parts:
        for start in range(0, len(part), packet):
            due += PACKET_SECONDS
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await stream.feed(part[start : start + packet])
        await stream.flush()
    await stream.finish()
    await listener
    return "".join(said)


async def run(config: EngineConfig, sessions: list[list[NDArray[np.float32]]], kills: int) -> dict[str, Any]:
    """All sessions at once; the engine is killed `kills` times, each time at a random moment of its life."""
    engine = EngineProcess(config)
    client = EngineClient([engine])
    await client.start()
    playing = [asyncio.create_task(play(client, f"s{i}", parts)) for i, parts in enumerate(sessions)]
    chance, memory = random.Random(1), []
    while len(memory) < kills and not all(session.done() for session in playing):
        await until(lambda: client.ready)
        await asyncio.sleep(chance.uniform(0.0, 2 * ALIVE_SECONDS))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        memory.append(resident_bytes())
        await until(lambda: not client.ready)
    texts = await asyncio.gather(*playing)
    metrics = client.metrics()
    await client.close()
    return {"texts": texts, "metrics": metrics, "memory": memory}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - readiness has no event
        await asyncio.sleep(0.01)


def differences(texts: list[str], others: list[str]) -> tuple[int, int]:
    """Words that differ, and words in all."""
    wrong = total = 0
    for text, other in zip(texts, others, strict=True):
        left, right = plain_words(text), plain_words(other)
        total += len(left)
        wrong += sum(1 for i, j in align(left, right) if i is None or j is None or left[i] != right[j])
    return wrong, total


def load(sessions: list[Session], seconds: float) -> list[list[NDArray[np.float32]]]:
    """Each session's clips with a pause behind each, up to about so many seconds."""
    loaded = []
    for session in sessions:
        audio, parts = session.load()
        rate = len(audio) / parts[-1].end
        chosen = [part for part in parts if part.end <= seconds] or parts[:1]
        loaded.append([audio[round(part.start * rate) : round(part.end * rate)] for part in chosen])
    return loaded


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    clips = read_manifest(arguments.manifest, kind="clips")
    sessions = load(joined_sessions(clips, arguments.sessions, PAUSE_SECONDS), arguments.seconds)
    config = EngineConfig(model=arguments.model, threads=1)
    calm = await run(config, sessions, 0)
    again = await run(config, sessions, 0)
    killed = await run(config, sessions, arguments.kills)
    metrics = killed["metrics"]
    recoveries = metrics.recent_recovery_seconds
    changed, words = differences(calm["texts"], killed["texts"])
    noise, _ = differences(calm["texts"], again["texts"])
    memory = killed["memory"]
    for name, other in (("again", again), ("killed", killed)):
        for left, right in zip(calm["texts"], other["texts"], strict=True):
            if plain_words(left) != plain_words(right) and arguments.show:
                print(f"--- calm:  {left}\n--- {name}: {right}")
    return {
        "sessions": len(sessions),
        "words": words,
        "kills": metrics.restarts,
        "words_changed_by_kills": changed,
        "words_changed_between_calm_runs": noise,
        "streams_recovered": metrics.streams_recovered,
        "streams_lost": metrics.streams_given_up + metrics.poisonous_streams,
        "recovery_s_p50": statistics.median(recoveries) if recoveries else None,
        "recovery_s_max": max(recoveries, default=None),
        "gateway_bytes_at_first_kill": memory[0] if memory else None,
        "gateway_bytes_at_last_kill": memory[-1] if memory else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("manifest", type=Path, help="recordings with known words, as for benchmarks.accuracy")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="audio per session")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--show", action="store_true", help="print the texts that differ")
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args()
    report = asyncio.run(compare(arguments))
    for name, value in report.items():
        print(f"{name:36s} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
