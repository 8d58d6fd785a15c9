"""`tickertape mic`: live captions of a microphone in the terminal."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from realtime.commands.transcribe import add_model_options

EPILOG = """\
Examples:
  tickertape mic                                   with an engine of its own
  tickertape mic --server http://127.0.0.1:8000    with a running server
  tickertape mic --list                            which microphones there are
  tickertape mic --input 3

Sound comes from the Python package `sounddevice` if it is installed, else from `arecord` (ALSA) or `parec`
(PulseAudio, PipeWire). TICKERTAPE_API_KEY is sent to a server that wants a key. Ctrl-C stops.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "mic",
        help="live captions of your microphone",
        description="Live captions of a microphone in the terminal.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--server", metavar="URL", help="stream to this server, not to an engine of our own")
    parser.add_argument("--input", metavar="DEVICE", help="which microphone; the default one if not given")
    parser.add_argument("--list", action="store_true", help="list the microphones and exit")
    parser.add_argument("--words", action="store_true", help="also show the times of every word")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from realtime.commands import microphone
    from realtime.commands.terminal import note, out

    recorder = microphone.find_recorder()
    if options.list:
        out(recorder.devices())
        return 0
    from realtime.commands import live_player

    async def listen() -> None:
        note(f"listening through {recorder.name}; Ctrl-C stops")
        await live_player.caption(recorder.record(options.input), options)

    try:
        asyncio.run(listen())
    except KeyboardInterrupt:
        return 0
    return 0
