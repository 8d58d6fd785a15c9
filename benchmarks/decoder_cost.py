"""What it costs to decode compressed audio in separate processes: time, processor time and memory.

    python -m benchmarks.decoder_cost [--streams 16]

Files and live streams are decoded on a thread of this process and, as in the gateway, in a separate process
(`realtime/serving/isolated_decoder.py`). Live streams are WebM with Opus in pieces of 250 ms, sent without waiting.
docs/security.md has the figures and the conclusion.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, cast

import av
import numpy as np

from audio.containers import ContainerDecoder, read_upload
from realtime.serving.audio_intake import ContainerStream
from realtime.serving.isolated_decoder import decoded_file

MIB = 2**20
PIECE_S = 0.25
RATE = 48_000
LIVE_S = 20

Turn = Callable[[bytes], Awaitable[None]]


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


def private_bytes(pid: int | str = "self") -> int:
    """Private memory of a process; 0 if it has ended."""
    try:
        found = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in found if line.startswith("Private_"))


def busy_s(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> list[int]:
    """The children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def program() -> int:
    """The process that forks the decoders."""
    (found,) = below(os.getpid())
    return found


async def files() -> None:
    for seconds, rounds in ((3, 15), (60, 7), (600, 2)):
        with tempfile.TemporaryFile() as opened:
            file = cast(BinaryIO, opened)
            file.write(opus("ogg", seconds))
            threads, processes, firsts, held = [], [], [], []
            for number in range(rounds + 1):
                began = time.perf_counter()
                file.seek(0)
                await asyncio.to_thread(lambda opened=file: sum(map(len, read_upload(opened))))
                threads.append(time.perf_counter() - began)
                began = time.perf_counter()
                first = 0.0
                async for _ in decoded_file(file):
                    first = first or time.perf_counter() - began
                    held.append(max(map(private_bytes, below(program())), default=0) if number == 0 else 0)
                processes.append(time.perf_counter() - began)
                firsts.append(first)
                if number == 0 and seconds == 3:
                    say(f"the first file of all, with the start of the program: {1000 * processes[0]:.0f} ms")
            thread, process, first = (1000 * statistics.median(times[1:]) for times in (threads, processes, firsts))
            say(
                f"a file of {seconds} s: on a thread {thread:.0f} ms, in a process {process:.0f} ms, its first 5 s "
                f"after {first:.0f} ms; the process holds {max(held) / MIB:.1f} MiB"
            )
    say(f"the program that forks holds {private_bytes(program()) / MIB:.1f} MiB of its own")


async def live(count: int) -> None:
    data = opus("webm", LIVE_S)
    size = round(len(data) / LIVE_S * PIECE_S)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    decoders = [ContainerDecoder() for _ in range(count)]
    await measured("on a thread each", [in_thread(decoder) for decoder in decoders], pieces)
    for decoder in decoders:
        decoder.close()
    streams = [ContainerStream() for _ in range(count)]
    await measured("in a process each", [in_process(stream) for stream in streams], pieces)
    for stream in streams:
        stream.close()


def in_thread(decoder: ContainerDecoder) -> Turn:
    async def turn(piece: bytes) -> None:
        for _ in decoder.decode(piece):
            pass

    return turn


def in_process(stream: ContainerStream) -> Turn:
    async def turn(piece: bytes) -> None:
        async for _ in stream.decode(piece):
            pass

    return turn


async def measured(name: str, turns: list[Turn], pieces: list[bytes]) -> None:
    """Sends one piece of each stream in turn; returns how long each takes, which delays its words."""
    before, began_used, waits = private_bytes(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), []
    for piece in pieces:
        for turn in turns:
            began = time.perf_counter()
            await turn(piece)
            waits.append(time.perf_counter() - began)
    pids = below(program())
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - began_used + sum(map(busy_s, pids))
    held = private_bytes() - before + sum(map(private_bytes, pids))
    # The first piece of each stream starts a decoder.
    first, rest = waits[: len(turns)], sorted(waits[len(turns) :])
    minutes = len(pieces) * PIECE_S * len(turns) / 60
    say(
        f"{len(turns)} live streams, {name}: a piece takes {1000 * statistics.median(rest):.2f} ms in the median and "
        f"{1000 * rest[int(0.95 * len(rest))]:.2f} at p95, the first one {1000 * statistics.median(first):.1f} ms; "
        f"{spent / minutes:.2f} s of processor for a minute of sound; {held / MIB / len(turns):.1f} MiB for each"
    )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def run(streams: int) -> None:
    await files()
    await live(streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    asyncio.run(run(parser.parse_args().streams))


if __name__ == "__main__":
    main()
