"""A quick measurement for `tickertape doctor`: the load of an engine with a few live streams of real-time speech."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from audio.formats import MODEL_RATE
from engine import messages
from engine.client.client import EngineClient
from engine.client.stream import EngineStream
from realtime.commands.captions import CHUNK_SAMPLES
from realtime.commands.file_transcription import read_audio
from realtime.session.events import Samples

STREAMS = 2
# Seconds before the measurement, in which streams have less than a full window of audio.
WARM_UP_S = 4.0
MEASURED_S = 8.0
# Load above which streams would wait for each other.
USABLE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Measured:
    streams: int
    load: float
    text: str
    # CPU seconds of this process per second of speech and stream.
    cpu_share: float = 0.0

    @property
    def expected(self) -> int:
        """Streams to expect. An underestimate, because streams share steps."""
        return int(USABLE_SHARE * self.streams / max(self.load, 1e-3))


async def measure_load(client: EngineClient, sound: Path) -> Measured:
    """Play the recording into `STREAMS` streams and measure the engine's load."""
    audio = np.concatenate(list(read_audio(sound)))
    texts = [""] * STREAMS
    streams = [await client.open(f"measure-{number}") for number in range(STREAMS)]
    # Different audio for each stream, so that no result is shared through caches.
    tasks = [
        asyncio.create_task(_play(stream, np.roll(audio, -number * len(audio) // STREAMS)))
        for number, stream in enumerate(streams)
    ]
    tasks += [asyncio.create_task(_listen(stream, texts, number)) for number, stream in enumerate(streams)]
    try:
        await asyncio.sleep(WARM_UP_S)
        loads = []
        cpu = time.process_time()
        for _ in range(round(MEASURED_S)):
            await asyncio.sleep(1.0)
            loads.append(client.capacity().load)
        cpu = time.process_time() - cpu
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.abort()
    return Measured(STREAMS, sum(loads) / len(loads), texts[0].strip(), cpu / MEASURED_S / STREAMS)


async def _play(stream: EngineStream, audio: Samples) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for start in range(0, len(audio), CHUNK_SAMPLES):
        chunk = audio[start : start + CHUNK_SAMPLES]
        await asyncio.sleep(max(0.0, began + (start + len(chunk)) / MODEL_RATE - loop.time()))
        await stream.feed(chunk)


async def _listen(stream: EngineStream, texts: list[str], number: int) -> None:
    async for output in stream:
        if isinstance(output, messages.Text):
            texts[number] += output.delta
