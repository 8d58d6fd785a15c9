"""Recording: missing programs are named, and a program's output becomes chunks of audio."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from realtime import cli
from realtime.commands import mic
from realtime.commands.mic import CHUNK_SAMPLES, Program, find_recorder
from realtime.commands.terminal import CommandFailed
from tests.realtime.gateway_doubles import FakeEngine


@pytest.fixture(autouse=True)
def no_recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing to record with, but for what a test puts into this folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(mic.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / name) if (folder / name).exists() else None)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def install(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_nothing_to_record_with_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mic"]) == 1
    said = capsys.readouterr().err
    assert "sounddevice" in said and "arecord" in said and "parec" in said


def test_no_microphone_is_what_the_program_says(
    no_recorder: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    install(no_recorder, "arecord", "echo 'arecord: main:831: audio open error: No such file or directory' >&2; exit 1")
    assert cli.main(["mic"]) == 1
    assert "no sound from the microphone: arecord says: arecord: main:831: audio open error" in capsys.readouterr().err
    assert not engine.active


def test_microphones_are_listed(no_recorder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(no_recorder, "arecord", "test \"$1\" = --list-pcms && echo 'hw:CARD=Mic'")
    assert cli.main(["mic", "--list"]) == 0
    assert capsys.readouterr().out == "hw:CARD=Mic\n"


async def test_sound_comes_in_chunks_until_the_program_ends(no_recorder: Path, tmp_path: Path) -> None:
    samples = np.arange(3 * CHUNK_SAMPLES + 100, dtype="<i2")
    (tmp_path / "sound").write_bytes(samples.tobytes())
    install(no_recorder, "parec", f'for last; do :; done; test "$last" = --device=usb && cat {tmp_path / "sound"}')
    recorder = find_recorder()
    assert isinstance(recorder, Program) and recorder.name == "parec"
    heard = []
    with pytest.raises(CommandFailed, match="it ended without a message"):
        async for chunk in recorder.record("usb"):
            heard.append(chunk)  # noqa: PERF401 (the error must not lose what came before it)
    assert [len(chunk) for chunk in heard] == [CHUNK_SAMPLES] * 3
    assert heard[0].dtype == np.float32 and heard[2][-1] == samples[3 * CHUNK_SAMPLES - 1] / 32768


async def test_leaving_early_ends_the_program(no_recorder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    install(
        no_recorder, "parec", f"trap 'touch {mark}; exit' TERM\nwhile :; do head -c 2560 /dev/zero; sleep 0.05; done"
    )
    sound = find_recorder().record(None)
    assert len(await anext(aiter(sound))) == CHUNK_SAMPLES
    await sound.aclose()  # type: ignore[attr-defined]
    assert mark.exists()
