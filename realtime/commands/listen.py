"""`tickertape listen`: live captions of a network stream (HLS, RTMP, RTSP, SRT, Icecast).

`realtime/serving/isolated_decoder.py` pulls and decodes the stream in a process of its own; `captions.py` shows the
text. A server pulls streams itself with `POST /v1/streams`.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from realtime.commands.terminal import decimal
from realtime.commands.transcription_options import (
    add_caption_options,
    add_model_options,
    add_transcription_options,
    check_caption_options,
)

if TYPE_CHECKING:
    from realtime.commands.captions import AudioSource
    from realtime.commands.terminal import EndOnInterrupt

EPILOG = """\
Examples:
  tickertape listen https://radio.example/live.mp3                  Icecast, or a file over HTTP
  tickertape listen https://tv.example/live/index.m3u8              HLS
  tickertape listen rtmp://127.0.0.1/live/studio                    RTMP
  tickertape listen rtsp://camera.example/stream                    RTSP (over TCP)
  tickertape listen 'srt://127.0.0.1:9000' --server 127.0.0.1:8000  SRT, with a running server
  tickertape listen URL --output radio.vtt                          save the captions as txt, srt, vtt or json

The stream is pulled and decoded in a process of its own. If the connection is lost, the command reconnects, and what is
missing is a gap: it is marked in the captions and in the file, and the times of later words stay right. HLS and files
continue where they were if the audio is still there; for other streams the gap is measured by the clock. A live stream
is awaited until Ctrl-C, or for --give-up seconds; a file ends the command. SRT needs the program ffmpeg.
TICKERTAPE_API_KEY is sent to a server as the API key.
"""
SCHEMES = ("http", "https", "rtmp", "rtmps", "rtmpt", "rtmpts", "rtsp", "rtsps", "srt")


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "listen",
        help="live captions of a stream: HLS, RTMP, RTSP, SRT, Icecast, files over HTTP",
        description="Live captions of a stream on the network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help=f"the stream: {', '.join(SCHEMES)}")
    parser.add_argument("--server", metavar="URL", help="use this server instead of a local engine")
    parser.add_argument(
        "--give-up", type=decimal, metavar="S", help="end after S seconds without audio (default: try for ever)"
    )
    add_caption_options(parser)
    add_model_options(parser)
    add_transcription_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from realtime.client.wire_client import without_secrets
    from realtime.commands import captions
    from realtime.commands.terminal import UsageError, check_server, note
    from realtime.serving.isolated_decoder import PulledAudio

    check_caption_options(options)
    if options.url.partition("://")[0].lower() not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(f"{without_secrets(options.url)!r} is not the address of a stream; it begins with {schemes}")
    check_server(options.server)

    def on_problem(text: str) -> None:
        if text:
            note(text)

    def sound(interrupt: EndOnInterrupt) -> AudioSource:
        pulled = PulledAudio(options.url, on_status=on_problem, give_up_after_s=options.give_up)
        return _until_interrupted(pulled.audio(), interrupt)

    return captions.run(options, f"listening to {without_secrets(options.url)}", sound)


async def _until_interrupted(audio: Any, interrupt: Any) -> AudioSource:
    """The audio, until Ctrl-C, also while no audio comes. Raises CommandFailed."""
    from realtime.commands.terminal import CommandFailed
    from realtime.serving.isolated_decoder import PullFailed

    async with aclosing(audio):
        ended = asyncio.create_task(_interrupted(interrupt))
        try:
            while True:
                next_part = asyncio.ensure_future(anext(audio))
                await asyncio.wait((next_part, ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    next_part.cancel()
                    await asyncio.gather(next_part, return_exceptions=True)
                    return
                yield next_part.result()
        except StopAsyncIteration:
            return
        except PullFailed as error:
            raise CommandFailed(f"cannot pull the stream: {error}") from error
        finally:
            ended.cancel()


async def _interrupted(interrupt: Any) -> None:
    # Polls, because a signal handler cannot wake a task.
    while not interrupt.ended:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
