"""`tickertape transcribe`: files to text, subtitles or JSON, with the engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realtime.commands.terminal import FAILED, OK, UsageError, note, out
from realtime.config import ModelConfig

if TYPE_CHECKING:
    from realtime.commands.transcripts import FileTranscript

EPILOG = """\
Examples:
  tickertape transcribe talk.mp3                         the text, on standard output
  tickertape transcribe --srt --output-dir subs *.mp4    subs/NAME.srt for each file
  tickertape transcribe --json --words call.wav          one line of JSON, with the times of every word
  tickertape transcribe --live talk.mp3                  at the pace of the recording, as live captions
  tickertape transcribe --live --server http://127.0.0.1:8000 talk.mp3

Any format that FFmpeg reads. A file of many hours is read piece by piece. When a file fails, the others are still
done, one line on standard error says why, and the exit code is 1. The part of a damaged file that can be decoded is
written all the same.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "transcribe",
        help="transcribe audio and video files",
        description="Transcribe audio and video files, with no server running.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    formats = parser.add_argument_group("what to write (text if none is given)")
    formats.add_argument("--json", action="store_true", help="text, segments and length, one line for each file")
    formats.add_argument("--srt", action="store_true", help="SubRip subtitles")
    formats.add_argument("--vtt", action="store_true", help="WebVTT subtitles")
    formats.add_argument("--words", action="store_true", help="the times of every word, in text and JSON")
    formats.add_argument("--output-dir", type=Path, metavar="DIR", help="write files there instead of standard output")
    live = parser.add_argument_group("as if it were spoken now")
    live.add_argument("--live", action="store_true", help="at the pace of the recording, with live captions")
    live.add_argument("--server", metavar="URL", help="with --live: stream to this server, not to an engine of our own")
    add_model_options(parser)
    parser.set_defaults(run=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--model", default=ModelConfig().name, help="a name from `tickertape models`, or a path to a checkpoint"
    )
    group.add_argument("--device", default=ModelConfig().device, choices=("auto", "cpu", "cuda"))
    group.add_argument("--language", metavar="CODE", help="what is spoken, for models that know several languages")


def run(options: argparse.Namespace) -> int:
    formats = [name for name in ("json", "srt", "vtt") if getattr(options, name)] or ["txt"]
    _check(options, formats)
    files = _readable(options.files)
    failed = len(options.files) - len(files)
    if files:
        failed += asyncio.run(_play_all(files, options) if options.live else _transcribe_all(files, options, formats))
    return FAILED if failed else OK


def _check(options: argparse.Namespace, formats: list[str]) -> None:
    if options.server and not options.live:
        raise UsageError("--server needs --live; a server takes whole files at POST /v1/audio/transcriptions")
    if options.live and (options.output_dir or formats != ["txt"]):
        raise UsageError("--live shows captions and writes nothing else; leave the other formats out")
    if options.output_dir is None and len(formats) > 1:
        raise UsageError(f"--{' and --'.join(formats)} cannot both go to standard output; add --output-dir DIR")
    if options.output_dir is None and len(options.files) > 1 and formats[0] in ("srt", "vtt"):
        raise UsageError(f"--{formats[0]} of several files cannot go to standard output; add --output-dir DIR")
    if options.output_dir is not None:
        stems: dict[str, Path] = {}
        for file in options.files:
            other = stems.setdefault(file.stem, file)
            if other is not file:
                raise UsageError(f"{other} and {file} would both be written to {file.stem}.{formats[0]}; rename one")


async def _transcribe_all(files: list[Path], options: argparse.Namespace, formats: list[str]) -> int:
    """Returns how many files failed."""
    from realtime.commands import local_engine
    from realtime.commands.file_reader import FileFailed, FileTranscriber

    failed = 0
    if options.output_dir is not None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    async with local_engine.local_engine(options.model, options.device) as client:
        transcriber = FileTranscriber(client, options.language)
        for file in files:
            try:
                transcript = await transcriber.transcribe(file)
            except FileFailed as error:
                failed += 1
                note(f"error: {file}: {error}")
                if error.transcript is None or not error.transcript.text:
                    continue
                transcript = error.transcript
            _write(transcript, options, formats, headline=len(options.files) > 1)
    return failed


async def _play_all(files: list[Path], options: argparse.Namespace) -> int:
    from realtime.commands import live_player
    from realtime.commands.file_reader import FileFailed

    failed = 0
    for file in files:
        try:
            await live_player.play_file(file, options)
        except FileFailed as error:
            failed += 1
            note(f"error: {file}: {error}")
    return failed


def _readable(files: list[Path]) -> list[Path]:
    """Say at once what is missing, before a model is loaded."""
    good = []
    for file in files:
        if file.is_dir():
            note(f"error: {file}: this is a folder; name the files in it")
        elif not file.exists():
            note(f"error: {file}: there is no such file")
        elif not file.stat().st_size and file.is_file():
            note(f"error: {file}: the file is empty")
        else:
            good.append(file)
    return good


def _write(transcript: FileTranscript, options: argparse.Namespace, formats: list[str], headline: bool) -> None:
    from realtime.commands.transcripts import FORMATS, write_whole

    for name in formats:
        text = FORMATS[name](transcript, options.words)
        if options.output_dir is not None:
            target = options.output_dir / f"{transcript.path.stem}.{name}"
            write_whole(target, text)
            note(f"{transcript.path} -> {target}")
        else:
            if headline and name == "txt":
                out(f"== {transcript.path}")
            sys.stdout.write(text)
            sys.stdout.flush()
