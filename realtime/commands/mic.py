"""`tickertape mic`: live captions of a microphone in the terminal.

It joins the recorder of `microphone.py` to `captions.py`, which transcribes with a local engine or a server.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from realtime.commands.transcribe import add_model_options
from realtime.commands.transcription_options import (
    add_caption_options,
    add_transcription_options,
    check_caption_options,
)

if TYPE_CHECKING:
    from realtime.commands.microphone import Recorder

EPILOG = """\
Examples:
  tickertape mic                                   with its own engine
  tickertape mic --server http://127.0.0.1:8000    with a running server
  tickertape mic --output talk.srt                 save the captions as txt, srt, vtt or json, by the file name
  tickertape mic --list                            list the microphones
  tickertape mic --input 3

The audio is recorded with the Python package `sounddevice` if it is installed, else with `arecord` (ALSA) or `parec`
(PulseAudio, PipeWire). TICKERTAPE_API_KEY is sent to a server as the API key. If the connection to the server is lost,
the command reconnects and resumes the session; two minutes of audio are kept meanwhile. Ctrl-C ends the recording and
waits for the last text; twice stops at once. JSON is one line for each caption.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "mic",
        help="live captions of your microphone",
        description="Live captions of a microphone in the terminal.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--server", metavar="URL", help="use this server instead of a local engine")
    parser.add_argument("--input", metavar="DEVICE", help="the microphone to use (default: the system's default)")
    parser.add_argument("--list", action="store_true", help="list the microphones and exit")
    add_caption_options(parser)
    add_model_options(parser)
    add_transcription_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from realtime.commands import microphone
    from realtime.commands.terminal import check_server, out

    check_caption_options(options)
    check_server(options.server)
    recorder = microphone.find_recorder()
    if options.list:
        out(recorder.devices())
        return 0
    return _record(recorder, options)


def _record(recorder: Recorder, options: argparse.Namespace) -> int:
    from realtime.commands import captions

    return captions.run(
        options,
        f"recording with {recorder.name}",
        lambda interrupt: captions.until(recorder.record(options.input), lambda: interrupt.ended),
    )
