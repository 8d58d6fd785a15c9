"""`tickertape bench`: a load test of a running server: number of streams, time to final, word errors under load.

This module reads the options and the manifest and prints the result; the load test itself is
`realtime/bench/load_test.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from realtime.commands.terminal import (
    FAILED,
    KEY_VARIABLE,
    OK,
    CommandFailed,
    UsageError,
    check_server,
    check_writable,
    decimal,
    integer,
    note,
    out,
)

EPILOG = """\
Examples:
  tickertape bench                                              the server on this machine, the sample recording
  tickertape bench http://gpu-box:8000 --manifest speech.jsonl
  tickertape bench --streams 4 --hold 300                       no search: run four streams for five minutes
  tickertape bench --slo-final 1.0 --slo-lag 1.5 --most 64

Clients in separate processes play speech in real time. The number of streams is doubled, then bisected, to find the
largest number that meets the objective; a longer run with that number follows. The result is the number of streams,
the time to final, the word error rate alone and under load, and whether the words are the same, which they must be. A
Tickertape server refuses streams beyond its expected capacity: start it with --limits.max-load 0 to search beyond that.

A manifest has JSON lines with `path`, `text` and `seconds`. Without one, the sample recording is used, with a different
start for each client; it has no reference text, so the text under load is compared with the text of a client alone.
Run it on another machine than the server if you can: on the same one, both share the cores.

Written to --output: results.json, plot.svg, and the record of every event (*.jsonl).
Exit code 1 if not even one stream meets the objective, or if the text differs under load.
"""
DEFAULT_URL = "http://127.0.0.1:8000"


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="load-test a server: streams, time to final, word error rate",
        description="Load-test any server with the OpenAI Realtime API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"the server (default {DEFAULT_URL})")
    parser.add_argument("--manifest", type=Path, help="recordings with their reference texts, as JSON lines")
    parser.add_argument("--streams", type=_positive, help="run this many streams, without a search")
    parser.add_argument("--most", type=_positive, default=1024, help="most streams in the search")
    parser.add_argument(
        "--seconds", type=_seconds, default=30.0, help="seconds of audio of each client in a search run"
    )
    parser.add_argument("--hold", type=_seconds, default=120.0, help="seconds of audio of each client in the final run")
    parser.add_argument("--warm-up", type=_number, default=5.0, help="seconds at the start of a run that do not count")
    parser.add_argument("--slo-final", type=_number, default=1.5, help="objective: time to final p95, in seconds")
    parser.add_argument("--slo-lag", type=_number, default=2.5, help="objective: lag p95, in seconds")
    parser.add_argument("--alone", type=_positive, default=2, help="clients to repeat alone, to compare the text")
    parser.add_argument("--chunk-ms", type=_positive, default=100, help="milliseconds of audio in one message")
    parser.add_argument("--silence-ms", type=_positive, default=500, help="milliseconds of silence that end a turn")
    parser.add_argument("--rate", type=_rate, default=24_000, help="sample rate of the audio that is sent")
    parser.add_argument("--model", help="the model to request")
    parser.add_argument("--speakers", action="store_true", help="ask for speaker labels too")
    parser.add_argument("--processes", type=_positive, help="generator processes (default: half of the cores)")
    parser.add_argument("--output", type=Path, default=Path("bench-results"), metavar="DIR")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _seconds(text: str) -> float:
    value = decimal(text)
    if not 2 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be between 2 and 86400 seconds")
    return value


def _number(text: str) -> float:
    value = decimal(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be between 0 and 86400 seconds")
    return value


def _rate(text: str) -> int:
    from audio.formats import MAX_RATE, MIN_RATE

    value = integer(text)
    if not MIN_RATE <= value <= MAX_RATE:
        raise argparse.ArgumentTypeError(f"must be between {MIN_RATE} and {MAX_RATE} Hz, not {value}")
    return value


def run(options: argparse.Namespace) -> int:
    from realtime.bench.clients import BadManifest, Target, build_bank
    from realtime.bench.load_test import LoadTest, Objective
    from realtime.client.wire_client import CannotConnect, realtime_url

    if options.warm_up >= min(options.seconds, options.hold):
        raise UsageError("--warm-up must be shorter than --seconds and --hold")
    check_server(options.url)
    check_writable(options.output, "--output")
    try:
        url = realtime_url(options.url, options.model)
        files = _recordings(options)
        asyncio.run(_try_to_connect(url))
        note(f"reading {len(files)} recordings")
        bank = build_bank(files, options.rate, options.output / "audio.raw")
    except (CannotConnect, BadManifest) as error:
        raise CommandFailed(str(error)) from error
    key = os.environ.get(KEY_VARIABLE)
    target = Target(url, key, options.model, options.chunk_ms, options.silence_ms, options.speakers)
    objective = Objective(options.slo_final, options.slo_lag)
    processes = options.processes or max(1, (os.cpu_count() or 2) // 2)
    load_test = LoadTest(target, bank, objective, options, processes, note)
    try:
        result = load_test.measure()
    finally:
        bank.path.unlink()
    result.write(options.output)
    out(result.text())
    note(f"written to {options.output}: results.json, plot.svg and every event")
    return OK if result.good else FAILED


async def _try_to_connect(url: str) -> None:
    """Open a session once. Raises CannotConnect if that can never succeed; a server that is busy or starting is part
    of what is measured."""
    from realtime.client.wire_client import Refused, open_session

    try:
        async with open_session(url, os.environ.get(KEY_VARIABLE)):
            pass
    except Refused as error:
        if error.status not in (429, 503):
            raise


def _recordings(options: argparse.Namespace) -> list[tuple[Path, str | None]]:
    """The recordings of the manifest with their texts, or the sample recording."""
    if options.manifest:
        from realtime.bench.clients import read_manifest

        return read_manifest(options.manifest, options.seconds)
    from realtime.commands.pull import SAMPLE, fetch

    return [(fetch(SAMPLE), None)]
