"""`tickertape demo`: starts a server, streams a recording to it in real time, and shows the captions.

The server runs in this process (`realtime/app.py`) with an engine process beside it; the captions come over its socket
(`captions.py`). `make demo` calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from realtime.commands.terminal import decimal, integer, note, out
from realtime.commands.transcription_options import add_model_options, add_transcription_options

EPILOG = """\
Examples:
  tickertape demo                    keeps running afterwards, so that you can open the page; Ctrl-C stops
  tickertape demo --once             stops at the end of the recording
  tickertape demo talk.mp3           your own recording
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="try it: a server, a recording, live captions",
        description="Start a server, stream a recording of speech to it in real time, and show the captions.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, help="a recording; without one, a sample is downloaded")
    parser.add_argument("--port", type=integer, default=8000)
    parser.add_argument("--once", action="store_true", help="stop at the end of the recording")
    parser.add_argument("--words", action="store_true", help="also show the times of every word")
    # Given by `make demo`, so that the times at the end include what it did before.
    parser.add_argument("--installed-in", type=decimal, metavar="SECONDS", help=argparse.SUPPRESS)
    add_model_options(parser)
    add_transcription_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from realtime.commands.pull import SAMPLE, fetch, fetch_for_serving, model_name
    from realtime.commands.serve import check_port
    from realtime.commands.terminal import read_config

    flags = {"model.name": options.model, "model.device": options.device, "server.port": options.port}
    config = read_config(None, flags)
    check_port(config.server.host, config.server.port)
    began = time.monotonic()
    fetch_for_serving(model_name(options.model))
    recording = options.file or fetch(SAMPLE)
    seconds = {"weights": time.monotonic() - began}
    if options.installed_in is not None:
        seconds = {"packages (download and install)": options.installed_in, **seconds}
    try:
        asyncio.run(_demo(config, recording, options, seconds))
    except KeyboardInterrupt:
        note("stopped")
    return 0


def shown_times(seconds: dict[str, float]) -> str:
    """How long each part took, in their order, with the sum."""
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return f"Times: {parts}; {sum(seconds.values()):.1f} s until the server was ready."


async def _demo(config: Any, recording: Path, options: argparse.Namespace, seconds: dict[str, float]) -> None:
    from realtime.app import running_server
    from realtime.commands.captions import play_file

    note("starting the server and loading the model")
    began = time.monotonic()
    async with running_server(config) as server:
        if not await server.wait_until_ready():
            return
        seconds["start of the server"] = time.monotonic() - began
        out(f"The page is at {server.url}/")
        out(f"Now streaming {recording.name} in real time:\n")
        options.server = server.url
        await play_file(recording, options)
        out("\n" + shown_times(seconds))
        if options.once or not sys.stdin.isatty():
            return
        out(f"\nThe server is still running: open {server.url}/ and speak. Ctrl-C stops it.")
        await server.wait()
