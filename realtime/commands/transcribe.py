"""`tickertape transcribe`: transcribes files to text, subtitles or JSON, with a local engine or with a server.

This module checks the files and options before a model is loaded, and writes the results. `file_transcription.py`
transcribes; with `--live` `captions.py` plays the file in real time instead.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audio.errors import AudioError
from realtime.commands.terminal import (
    FAILED,
    OK,
    STANDARD_INPUT,
    UsageError,
    check_server,
    check_writable,
    note,
    out,
    shown_name,
)
from realtime.commands.transcription_options import add_model_options, add_transcription_options

if TYPE_CHECKING:
    from realtime.commands.file_transcription import FileFailed
    from realtime.commands.transcripts import FileTranscript

EPILOG = """\
Examples:
  tickertape transcribe talk.mp3                         print the text
  tickertape transcribe --srt --output-dir subs *.mp4    write subs/NAME.srt for each file
  tickertape transcribe --json --words call.wav          print one line of JSON, with the times of every word
  tickertape transcribe --server http://gpu-box:8000 talk.mp3      use a running server
  tickertape transcribe --speakers --vtt meeting.wav     say who speaks
  tickertape transcribe --live talk.mp3                  show live captions, in real time
  ffmpeg -loglevel error -i rtsp://camera -vn -f wav - | tickertape transcribe --live -

Accepts any format that FFmpeg can read, and files of many hours. If a file fails, the others are still transcribed, one
line on standard error names the error, and the exit code is 1. The part of a damaged file that can be decoded is
written. A file that is still growing is read up to its current end.

`-` is standard input, in a format that can be read without seeking (WAV, FLAC, MP3, Ogg, WebM, fragmented MP4). It is
transcribed as it arrives, and ends with its writer or at Ctrl-C. TICKERTAPE_API_KEY is sent to a server as the API key.
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "transcribe",
        help="transcribe audio and video files",
        description="Transcribe audio and video files, with a local engine or with a server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="audio or video; - is standard input")
    formats = parser.add_argument_group("output formats (default: text)")
    formats.add_argument("--json", action="store_true", help="text, segments and length, one line for each file")
    formats.add_argument("--srt", action="store_true", help="SubRip subtitles")
    formats.add_argument("--vtt", action="store_true", help="WebVTT subtitles")
    formats.add_argument("--words", action="store_true", help="the times of every word, in text and JSON")
    formats.add_argument("--speakers", action="store_true", help="who speaks (needs `tickertape pull speakers`)")
    formats.add_argument("--output-dir", type=Path, metavar="DIR", help="write files to this folder")
    parser.add_argument("--live", action="store_true", help="show live captions, in real time")
    parser.add_argument("--server", metavar="URL", help="use this server instead of a local engine")
    add_model_options(parser)
    add_transcription_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    formats = [name for name in ("json", "srt", "vtt") if getattr(options, name)] or ["txt"]
    _check(options, formats)
    # Check everything before a model is loaded.
    if options.output_dir is not None:
        _check_output(options.output_dir, [f"{_stem(file)}.{name}" for file in options.files for name in formats])
    files = _readable(options.files, decode=not options.server)
    failed = len(options.files) - len(files)
    if not files:
        return FAILED
    if options.live:
        failed += asyncio.run(_play_all(files, options))
    elif options.server:
        failed += _send_all(files, options, formats)
    else:
        failed += asyncio.run(_transcribe_all(files, options, formats))
    return FAILED if failed else OK


def _check(options: argparse.Namespace, formats: list[str]) -> None:
    check_server(options.server)
    if options.files.count(STANDARD_INPUT) > 1:
        raise UsageError("standard input can be read only once; name - once")
    if STANDARD_INPUT in options.files and sys.stdin.isatty():
        raise UsageError("standard input is a terminal; pipe audio into it: ffmpeg -i FILE -f wav - | tickertape ...")
    if options.live and (options.output_dir or formats != ["txt"]):
        raise UsageError("--live shows captions and writes nothing else; leave the other formats out")
    if options.live and options.speakers:
        raise UsageError("--live shows words before their speakers are known; leave --speakers or --live out")
    if options.output_dir is None and len(formats) > 1:
        raise UsageError(f"--{' and --'.join(formats)} cannot both go to standard output; add --output-dir DIR")
    if options.output_dir is None and len(options.files) > 1 and formats[0] in ("srt", "vtt"):
        raise UsageError(f"--{formats[0]} of several files cannot go to standard output; add --output-dir DIR")
    if options.output_dir is not None:
        stems: dict[str, Path] = {}
        for file in options.files:
            other = stems.setdefault(_stem(file), file)
            if other is not file:
                raise UsageError(f"{other} and {file} would both be written to {_stem(file)}.{formats[0]}; rename one")


def _stem(file: Path) -> str:
    return "standard-input" if file == STANDARD_INPUT else file.stem


async def _transcribe_all(files: list[Path], options: argparse.Namespace, formats: list[str]) -> int:
    """Transcribe files with a local engine; returns how many failed."""
    from realtime.commands import file_transcription
    from realtime.commands.file_transcription import FileFailed, FileTranscriber
    from realtime.commands.transcription_options import TranscriptionOptions

    failed = 0
    transcription_options = TranscriptionOptions.of(options).without_unsupported(options.model)
    async with file_transcription.local_engine(
        options.model, options.device, live=False, speakers=options.speakers
    ) as client:
        transcriber = FileTranscriber(client, transcription_options)
        for file in files:
            size = _size(file)
            try:
                _write(await transcriber.transcribe(file), options, formats)
            except FileFailed as error:
                failed += 1
                _write_valid_part(file, error, options, formats)
            _note_growth(file, size)
    return failed


def _send_all(files: list[Path], options: argparse.Namespace, formats: list[str]) -> int:
    """Transcribe files with a server; returns how many failed."""
    from realtime.commands.file_transcription import FileFailed, FileSender
    from realtime.commands.transcription_options import TranscriptionOptions

    failed = 0
    sender = FileSender(options.server, options.model, TranscriptionOptions.of(options))
    for file in files:
        size = _size(file)
        try:
            _write(sender.transcribe(file), options, formats)
        except FileFailed as error:
            failed += 1
            _write_valid_part(file, error, options, formats)
        _note_growth(file, size)
    return failed


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _note_growth(file: Path, before: int | None) -> None:
    """Print a note if the file has grown meanwhile, because its new end may not have been read."""
    after = _size(file)
    if before is not None and after is not None and after > before:
        note(f"note: {file} grew from {before} to {after} bytes meanwhile; its end may be missing in the transcript")


async def _play_all(files: list[Path], options: argparse.Namespace) -> int:
    from realtime.commands import captions
    from realtime.commands.file_transcription import FileFailed

    failed = 0
    for file in files:
        try:
            await captions.play_file(file, options)
        except FileFailed as error:
            failed += 1
            note(f"error: {shown_name(file)}: {error}")
    return failed


def _check_output(folder: Path, names: list[str]) -> None:
    """Raise UsageError if files with these names cannot be written to the folder."""
    check_writable(folder, "--output-dir")
    for name in names:
        if (folder / name).is_dir():
            raise UsageError(f"cannot write {folder / name}: a folder with that name exists; name another --output-dir")


def _readable(files: list[Path], *, decode: bool) -> list[Path]:
    """The files that can be read and, with `decode`, decoded. The others are reported on standard error."""
    good = []
    for file in files:
        problem = _problem_of(file, decode)
        if problem is None:
            good.append(file)
        else:
            note(f"error: {file}: {problem}")
    return good


def _problem_of(file: Path, decode: bool) -> str | None:
    """Why the file cannot be transcribed, judged by its beginning; None if it can.

    Pipes are not read, because the bytes would be lost.
    """
    if file == STANDARD_INPUT:
        return None
    if file.is_dir():
        return "this is a folder; name the files in it"
    if not file.exists():
        return "there is no such file"
    if not file.is_file():
        return None
    if not file.stat().st_size:
        return "the file is empty"
    from audio.containers import read_file

    try:
        if decode:
            next(read_file(file), None)
        else:
            file.open("rb").close()
    except OSError as error:
        return error.strerror or str(error)
    except AudioError as error:
        return str(error)
    return None


def _write_valid_part(file: Path, error: FileFailed, options: argparse.Namespace, formats: list[str]) -> None:
    note(f"error: {shown_name(file)}: {error}")
    if error.transcript is not None and error.transcript.text:
        _write(error.transcript, options, formats)


def _write(transcript: FileTranscript, options: argparse.Namespace, formats: list[str]) -> None:
    from realtime.commands.transcripts import FORMATS, write_whole

    for name in formats:
        text = FORMATS[name](transcript, options.words)
        if options.output_dir is not None:
            target = options.output_dir / f"{_stem(transcript.path)}.{name}"
            write_whole(target, text)
            note(f"{shown_name(transcript.path)} -> {target}")
        else:
            if len(options.files) > 1 and name == "txt":
                out(f"== {shown_name(transcript.path)}")
            out(text, end="")
