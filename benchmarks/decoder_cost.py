"""What it costs to decode compressed audio in separate processes: time, processor time and memory.

    python -m benchmarks.decoder_cost [--streams 16] [--json FILE]

Files and live streams are decoded on a thread of this process and, as in the gateway, in a separate process
(`realtime/serving/isolated_decoder.py`), and both are printed. Live streams are WebM with Opus in pieces of 250 ms,
sent without waiting; one piece of each stream is sent in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, BinaryIO, cast

import av
import numpy as np

from audio.containers import ContainerDecoder, read_upload
from benchmarks.measuring import (
    cpu_seconds,
    parser_of,
    percentiles,
    private_bytes,
    read_process,
    run_command,
    show,
    with_descendants,
)
from realtime.serving.inbox import ContainerStream
from realtime.serving.isolated_decoder import decoded_file
from realtime.serving.media_processes import DECODER_PROGRAM

MIB = 2**20
PIECE_S = 0.25
RATE = 48_000

Figures = dict[str, Any]
Send = Callable[[bytes], Awaitable[None]]


def opus(container: str, seconds: float) -> bytes:
    """Noise as loud as speech."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0)
    with av.open(buffer, "w", format=container) as output:
        track = output.add_stream("libopus", rate=RATE, layout="mono")
        track.bit_rate = 24_000
        for start in range(0, int(RATE * seconds), 960):
            sound = (3000 * noise.standard_normal((1, 960))).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(sound, format="s16", layout="mono")
            frame.sample_rate, frame.pts = RATE, start
            output.mux(track.encode(frame))
        output.mux(track.encode(None))
    return buffer.getvalue()


def decoder_processes() -> tuple[int, list[int]]:
    """The program that forks the decoders, and the decoders."""
    for pid in with_descendants(os.getpid()):
        if DECODER_PROGRAM in read_process(pid, "cmdline"):
            return pid, with_descendants(pid)[1:]
    raise RuntimeError("the program that forks the decoders is not running")


async def measure_file(seconds: float, rounds: int) -> Figures:
    """Medians in milliseconds without the first round, which may start the program."""
    with tempfile.TemporaryFile() as opened:
        file = cast(BinaryIO, opened)
        file.write(opus("ogg", seconds))
        threads, processes, held = [], [], 0
        for number in range(rounds + 1):
            began = time.perf_counter()
            file.seek(0)
            await asyncio.to_thread(lambda: sum(map(len, read_upload(file))))
            threads.append(1000 * (time.perf_counter() - began))
            began = time.perf_counter()
            async for _ in decoded_file(file):
                if number == 0:
                    held = max([held, *map(private_bytes, decoder_processes()[1])])
            processes.append(1000 * (time.perf_counter() - began))
    return {
        "thread_ms": statistics.median(threads[1:]),
        "process_ms": statistics.median(processes[1:]),
        "first_round_ms": processes[0],
        "process_mib": held / MIB,
    }


async def measure_live(sends: list[Send], pieces: list[bytes]) -> Figures:
    """How long each piece takes, which delays its words. The first piece of each stream starts a decoder."""
    began_bytes, began_cpu, took = private_bytes(os.getpid()), time.process_time(), []
    for piece in pieces:
        for send in sends:
            began = time.perf_counter()
            await send(piece)
            took.append(1000 * (time.perf_counter() - began))
    decoders = decoder_processes()[1]
    spent = time.process_time() - began_cpu + sum(map(cpu_seconds, decoders))
    held = private_bytes(os.getpid()) - began_bytes + sum(map(private_bytes, decoders))
    return {
        "first_piece_ms": statistics.median(took[: len(sends)]),
        **percentiles("piece_ms", took[len(sends) :], 50, 95),
        "cpu_s_per_minute": spent / (len(pieces) * PIECE_S * len(sends) / 60),
        "mib_per_stream": held / MIB / len(sends),
    }


async def measure(options: argparse.Namespace) -> Figures:
    report: Figures = {}
    for seconds, rounds in ((3, 1),) if options.small else ((3, 15), (60, 7), (600, 2)):
        report[f"a file of {seconds} s"] = await measure_file(seconds, rounds)
    report["program_mib"] = private_bytes(decoder_processes()[0]) / MIB
    seconds = 2 if options.small else 20
    data = opus("webm", seconds)
    size = round(len(data) / seconds * PIECE_S)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    threads, processes = ([kind() for _ in range(options.streams)] for kind in (ContainerDecoder, ContainerStream))

    async def on_thread(decoder: ContainerDecoder, piece: bytes) -> None:
        for _ in decoder.decode(piece):
            pass

    async def in_process(stream: ContainerStream, piece: bytes) -> None:
        async for _ in stream.decode(piece):
            pass

    for name, send, streams in (("thread", on_thread, threads), ("process", in_process, processes)):
        sends = [partial(send, stream) for stream in streams]
        report[f"{options.streams} live streams, a {name} each"] = await measure_live(sends, pieces)
    for stream in (*threads, *processes):
        stream.close()
    show("Decoders on threads and in processes", report)
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=16)
    run_command(parser, arguments, lambda options: asyncio.run(measure(options)), streams=2)


if __name__ == "__main__":
    main()
