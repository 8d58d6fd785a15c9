"""Prepares audio in one process, transcribes it in another, and prints how many bytes were sent.

    tickertape engine --listen ipc:///tmp/tickertape-engine
    python examples/prepare_elsewhere.py recording.wav --engine ipc:///tmp/tickertape-engine

A worker process (an edge device, a preprocessing tier) cuts the recording into items, hashes them and answers with
plain JSON. This process injects the items into the engine's cache, then transcribes by sending their hashes: no audio
is sent twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from audio.containers import read_file
from engine.boundary.input_cache import SenderCache
from engine.client.client import EngineClient
from engine.client.engine_handles import RemoteEngine
from engine.client.link import ItemChecker
from engine.client.prepared_audio import check_same_model, parse_items, render
from engine.messages import Failed, Text
from engine.spec import ModelSpec


def prepare_in_worker(path: str, spec: ModelSpec) -> str:
    """Runs in the worker, which has the model's spec, but neither the model nor a connection to the engine."""
    samples = np.concatenate(list(read_file(path)))
    rendered = render(ItemChecker("preparing", spec, SenderCache(1 << 24)), samples, engine_cache=SenderCache(0))
    return json.dumps(rendered.as_json())


async def transcribe(path: str, address: str) -> None:
    client = EngineClient([RemoteEngine(address)])
    await client.start()
    await client.wait_until_ready()
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as worker:
        loop = asyncio.get_running_loop()
        answer = json.loads(await loop.run_in_executor(worker, prepare_in_worker, path, client.spec))
    check_same_model(answer["model"], client.spec)
    print(f"prepared elsewhere: {len(answer['items'])} items, {answer['payload_bytes']:,} bytes of audio")

    items = parse_items(answer["items"])
    await client.inject(items)
    stream = await client.open("prepared-elsewhere", live=False)
    for item in items:
        if item is not None:
            item.payload = None
    before = client.metrics().input_cache.bytes_sent
    await stream.feed_items(items)
    await stream.finish()
    async for output in stream:
        if isinstance(output, Text):
            print(output.delta, end="", flush=True)
        elif isinstance(output, Failed):
            print(f"\n{output.message}")
    stats = client.metrics().input_cache
    print(
        f"\ninjected: {before:,} bytes; transcribed by hash: {stats.bytes_sent - before:,} bytes more, "
        f"{stats.hits} of {stats.queries} lookups were hits"
    )
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recording", help="an audio file")
    parser.add_argument("--engine", required=True, help="the address an engine listens on")
    arguments = parser.parse_args()
    asyncio.run(transcribe(arguments.recording, arguments.engine))


if __name__ == "__main__":
    main()
