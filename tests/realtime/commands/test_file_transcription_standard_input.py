"""Audio from a pipe: empty, damaged, cut, endless; the writer sets the pace, and the text ends with the pipe."""

from __future__ import annotations

import array
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from audio.errors import AudioError
from realtime import cli
from realtime.commands.file_transcription import StandardInput, join_blocks, read_standard_input
from tests.realtime.commands.conftest import sound, write_wav
from tests.realtime.gateway_doubles import FakeEngine
from tests.waiting import until_so

Write = Callable[[bytes], None]


@contextmanager
def pipe(write: Callable[[Write], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard input is what `write` writes, on a thread of its own."""
    reader, writer = os.pipe()

    def run() -> None:
        with os.fdopen(writer, "wb", buffering=0) as file:
            try:
                write(lambda data: [file.write(data[at : at + 4096]) for at in range(0, len(data), 4096)] and None)
            except BrokenPipeError:
                pass

    thread = threading.Thread(target=run)
    with os.fdopen(reader, "rb", buffering=0) as file:
        monkeypatch.setattr(sys, "stdin", file)
        thread.start()
        yield
    thread.join()


def wav(seconds: float, tmp_path: Path, *, length: int | None = None) -> bytes:
    """As a program writes it to a pipe: without knowing how long it will be, unless a length is given."""
    data = bytearray(write_wav(tmp_path / "made.wav", sound(seconds)).read_bytes())
    declared = (0xFFFFFFFF if length is None else length).to_bytes(4, "little")
    data[4:8] = data[40:44] = declared
    return bytes(data)


def read(data: bytes, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    with pipe(lambda write: write(data), monkeypatch):
        pieces = list(join_blocks(read_standard_input(StandardInput(lambda: False)), 1280))
    return np.concatenate(pieces)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "there are no bytes to decode"),
        (b"RI", "none of WebM"),
        (b"this is no sound at all, only words", "none of WebM"),
        (b"RIFF\xff\xff\xff\xffWAVE", "incomplete"),
        (b"RIFF\xff\xff\xff\xffAVI list", "the format AVI is not served"),
        (b"RIFF\xff\xff\xff\xffWAVEdata\xff\xff\xff\xff" + bytes(100), "incomplete"),
        (b"RIFF\xff\xff\xff\xffWAVEJUNK\xf0\xff\xff\x7f" + bytes(100), "incomplete"),
    ],
)
def test_what_is_no_sound_is_said(
    data: bytes, said: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pipe(lambda write: write(data), monkeypatch):
        assert cli.main(["transcribe", "-"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: standard input: ") and said in shown.err and not shown.out
    assert not engine.active


def test_terminal_is_no_pipe(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli.main(["transcribe", "-"]) == 2
    os.close(controller)
    assert "standard input is a terminal; pipe audio into it" in capsys.readouterr().err


def test_pipe_that_closes_too_early_gives_its_good_part_and_fails(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = wav(2.0, tmp_path, length=100_000)
    with pipe(lambda write: write(cut), monkeypatch):
        assert cli.main(["transcribe", "-"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "w1 w2 w3 w4\n"
    assert "standard input: the audio is cut short: 2.00 s came, 36000 bytes are missing" in shown.err


def test_pipe_without_a_length_is_read_to_its_end(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pipe(lambda write: write(wav(2.0, tmp_path)), monkeypatch):
        assert cli.main(["transcribe", "--json", "--output-dir", str(tmp_path / "out"), "-"]) == 0
    assert '"text": "w1 w2 w3 w4"' in (tmp_path / "out" / "standard-input.json").read_text()


def test_what_follows_the_declared_length_is_no_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wav(1.0, tmp_path, length=32_000)
    assert len(read(whole + b"LIST" + bytes(5000), monkeypatch)) == 16_000


def test_plain_wav_is_heard_before_libav_would_hand_out_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a second is there although the writer stays silent afterwards."""
    more = threading.Event()

    def write(put: Write) -> None:
        put(wav(0.1, tmp_path))
        more.wait(20)

    with pipe(write, monkeypatch):
        blocks = join_blocks(read_standard_input(StandardInput(lambda: False)), 1280)
        began = time.monotonic()
        first = next(blocks)
        assert len(first) == 1600 and time.monotonic() - began < 5 and not more.is_set()
        more.set()
        assert list(blocks) == []


def plain_wav(samples: np.ndarray, rate: int, channels: int, kind: int = 1) -> bytes:
    data = samples.astype("<i2").tobytes()
    extra = b"" if kind == 1 else (22).to_bytes(2, "little") + bytes(6) + (1).to_bytes(2, "little") + bytes(14)
    fields = ((kind, 2), (channels, 2), (rate, 4), (rate * 2 * channels, 4), (2 * channels, 2), (16, 2))
    body = b"".join(value.to_bytes(size, "little") for value, size in fields) + extra
    fmt = b"fmt " + len(body).to_bytes(4, "little") + body
    names = b"LIST" + (5).to_bytes(4, "little") + b"INFOx\0"
    return b"RIFF\xff\xff\xff\xffWAVE" + names + fmt + b"data\xff\xff\xff\xff" + data


@pytest.mark.parametrize("kind", [1, 0xFFFE])
def test_channels_are_mixed_and_rates_are_brought_to_the_model(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = (np.sin(np.arange(48_000) * 0.02) * 20_000).astype(np.int16)
    stereo = np.stack((one, np.zeros_like(one)), axis=1).reshape(-1)
    heard = read(plain_wav(stereo, 48_000, 2, kind), monkeypatch)
    assert len(heard) == 16_000 and heard.dtype == np.float32
    assert np.abs(heard[2000:-2000]).max() == pytest.approx(10_000 / 32768, rel=0.02)


def test_other_wav_and_other_containers_go_through_libav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import av

    for name, codec in (("a.wav", "pcm_s24le"), ("a.flac", "flac"), ("a.ogg", "libopus")):
        with av.open(tmp_path / name, "w") as container:
            track = container.add_stream(codec, rate=48_000, layout="mono")
            samples = (np.sin(np.arange(48_000) * 0.05) * 8_000).astype(np.int16).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = 48_000
            for made in (frame, None):
                container.mux(track.encode(made))
        heard = read((tmp_path / name).read_bytes(), monkeypatch)
        assert len(heard) == pytest.approx(16_000, abs=400), name


def test_damaged_container_gives_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = plain_wav(np.arange(16_000), 4_000, 1)
    with pytest.raises(AudioError, match="sample rate 4000"):
        read(odd, monkeypatch)


def test_live_hears_a_pipe_as_it_comes_and_waits_for_nobody(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = wav(8.0, tmp_path)
    began = time.monotonic()
    with pipe(lambda write: write(data), monkeypatch):
        assert cli.main(["transcribe", "--live", "-"]) == 0
    assert time.monotonic() - began < 6, "the pipe was faster than speech, and so were the captions"
    assert capsys.readouterr().out.split("\n")[0].endswith(" ".join(f"w{number}" for number in range(1, 21)))


def bytes_waiting_in(pipe: object) -> int:
    """Bytes that were written to a pipe and not read yet."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)  # type: ignore[call-overload]
    return count[0]


def test_interrupt_ends_the_pipe_and_what_was_heard_is_written(tmp_path: Path) -> None:
    """A pipe whose writer goes on: the first Ctrl-C is its end."""
    script = """
import sys
from contextlib import asynccontextmanager
from realtime import cli
from realtime.commands import file_transcription
from tests.realtime.gateway_doubles import FakeEngine

@asynccontextmanager
async def fake(model, device, live=True, speakers=True):
    yield FakeEngine()

file_transcription.local_engine = fake
sys.exit(cli.main(["transcribe", "-"]))
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    process.stdin.write(wav(2.0, tmp_path))
    process.stdin.flush()
    # All of it has been read, by a command that knows what Ctrl-C means by then.
    until_so(lambda: not bytes_waiting_in(process.stdin))
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(20) == 0
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == b"w1 w2 w3 w4\n"
        assert b"ending; Ctrl-C again stops at once" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_ffmpeg_writes_and_we_hear(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not shutil.which("ffmpeg"):
        pytest.skip("ffmpeg writes the pipe")
    file = write_wav(tmp_path / "a.wav", sound(2.0))
    command = ["ffmpeg", "-loglevel", "error", "-i", str(file), "-ar", "48000", "-ac", "2", "-f", "wav", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ffmpeg:
        monkeypatch.setattr(sys, "stdin", ffmpeg.stdout)
        assert cli.main(["transcribe", "-"]) == 0
    assert capsys.readouterr().out == "w1 w2 w3 w4\n"
