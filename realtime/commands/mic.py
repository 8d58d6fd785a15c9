"""`tickertape mic`: live captions of a microphone in the terminal.

It records with the first recorder found (sounddevice, arecord or parec); `captions.py` transcribes with a local engine
or a server, and shows the text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import subprocess
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from realtime.commands.terminal import CommandFailed, check_server, out
from realtime.commands.transcription_options import (
    add_caption_options,
    add_model_options,
    add_transcription_options,
    check_caption_options,
)

if TYPE_CHECKING:
    from realtime.session.events import Samples

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

# Audio is recorded at the engine's rate, in chunks of this many samples (80 ms).
RATE = 16_000
CHUNK_SAMPLES = RATE * 80 // 1000
CHUNK_BYTES = 2 * CHUNK_SAMPLES
# Most recorded chunks that wait to be read, a minute of audio; beyond that the oldest is dropped.
MAX_QUEUED_CHUNKS = 750


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
    check_caption_options(options)
    check_server(options.server)
    recorder = find_recorder()
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


class Recorder(Protocol):
    name: str

    def devices(self) -> str:
        """A list of the microphones, as text."""

    def record(self, device: str | None) -> AsyncIterator[Samples]:
        """Chunks of 16 kHz mono. Raises CommandFailed."""


def find_recorder() -> Recorder:
    """The first recorder that is installed. Raises CommandFailed."""
    import shutil

    if importlib.util.find_spec("sounddevice") is not None:
        with contextlib.suppress(OSError):  # the package is installed, but PortAudio is not
            return SoundDevice()
    if shutil.which("arecord"):
        rate = str(RATE)
        command = ["arecord", "--quiet", "--file-type", "raw", "--format", "S16_LE", "--channels", "1", "--rate", rate]
        return Program(command, "--device", ["arecord", "--list-pcms"])
    if shutil.which("parec"):
        command = ["parec", "--raw", "--format=s16le", "--channels=1", f"--rate={RATE}", "--latency-msec=80"]
        return Program(command, "--device", ["pactl", "list", "short", "sources"])
    raise CommandFailed(
        "no recorder was found: install the Python package sounddevice (pip install sounddevice), or "
        "arecord (in alsa-utils), or parec (in pulseaudio-utils)"
    )


class Program:
    """A program that writes raw samples to its standard output."""

    def __init__(self, command: list[str], device_option: str, list_devices: list[str]) -> None:
        self.name = command[0]
        self._command = command
        self._device_option = device_option
        self._list_devices = list_devices

    def devices(self) -> str:
        try:
            result = subprocess.run(self._list_devices, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CommandFailed(f"{self._list_devices[0]} cannot list the microphones: {error}") from error
        return result.stdout.strip() or f"{self.name} found no microphone"

    async def record(self, device: str | None) -> AsyncIterator[Samples]:
        import numpy as np

        from audio.formats import PCM16_SCALE

        chosen = [] if device is None else [f"{self._device_option}={device}"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, *chosen, stdout=pipe, stderr=pipe)
        assert process.stdout is not None and process.stderr is not None
        try:
            while True:
                try:
                    data = await process.stdout.readexactly(CHUNK_BYTES)
                except asyncio.IncompleteReadError:
                    errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
                    reason = errors[-1] if errors else "it ended without a message"
                    raise CommandFailed(f"no sound from the microphone: {self.name} says: {reason}") from None
                yield np.frombuffer(data, "<i2") * PCM16_SCALE
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


class SoundDevice:
    """The `sounddevice` package, which includes PortAudio."""

    name = "sounddevice"

    def __init__(self) -> None:
        self._package: Any = importlib.import_module("sounddevice")

    def devices(self) -> str:
        return str(self._package.query_devices())

    async def record(self, device: str | None) -> AsyncIterator[Samples]:
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Samples] = asyncio.Queue(MAX_QUEUED_CHUNKS)

        def put(chunk: Samples) -> None:
            if chunks.full():
                chunks.get_nowait()
            chunks.put_nowait(chunk)

        def on_sound(samples: Any, frames: int, times: Any, status: Any) -> None:
            loop.call_soon_threadsafe(put, samples[:, 0].copy())

        chosen: int | str | None = int(device) if device is not None and device.isdigit() else device
        try:
            stream = self._package.InputStream(
                samplerate=RATE,
                channels=1,
                dtype="float32",
                blocksize=CHUNK_SAMPLES,
                device=chosen,
                callback=on_sound,
            )
        except (self._package.PortAudioError, ValueError) as error:
            raise CommandFailed(f"the microphone cannot be opened: {error}; see `tickertape mic --list`") from error
        with stream:
            while True:
                yield await chunks.get()
