"""`tickertape doctor`: missing parts fail, present ones are shown, and streams are estimated from a measured load."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.errors import EngineError
from realtime import cli
from realtime.commands import doctor, file_transcription
from realtime.commands.doctor import MeasuredLoad
from tests.realtime.commands.conftest import sound, write_wav
from tests.realtime.gateway_doubles import FakeEngine


def test_missing_weights_say_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model", "whisper-tiny.en"]) == 1
    shown = capsys.readouterr().out
    assert "whisper-tiny.en is not on this machine; run `tickertape pull whisper-tiny.en`" in shown
    assert "torch 2" in shown and "this process may use" in shown
    assert shown.endswith("1 problem found; a line with !! says what to do.\n")


def test_another_torch_is_a_problem_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.version_conflicts() == []
    found = {"torch": "2.11.1+cpu", "torchaudio": "2.10.0+cpu"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: found.get(name, "1"))
    assert cli.main(["doctor", "--model", "whisper-tiny.en"]) == 1
    shown = capsys.readouterr().out
    assert "torch 2.11.1+cpu is installed, and this version of Tickertape needs 2.10.0: run `pip install" in shown
    assert "torchaudio 2.10.0+cpu is installed" not in shown


def test_model_too_large_for_the_memory_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(doctor, "available_memory", lambda: 700 * 2**20)
    assert cli.main(["doctor", "--model", str(tmp_path), "--no-measure"]) == 0
    assert "a spare engine (model.spare) needs the same again and does not fit" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "available_memory", lambda: 1400 * 2**20)
    assert cli.main(["doctor", "--model", str(tmp_path), "--no-measure"]) == 0
    assert "needs the same again and fits too" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "available_memory", lambda: 500 * 2**20)
    assert cli.main(["doctor", "--model", str(tmp_path), "--no-measure"]) == 1
    assert "choose a smaller model" in capsys.readouterr().out


def test_without_a_recording_streams_are_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    # The server does not need it.
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not measured, because the recording to play is missing: `tickertape pull sample-two-cities`" in said


@pytest.mark.parametrize(("load", "expected"), [(0.2, 8), (0.8, 2), (1.0, 1), (0.0, 1600)])
def test_streams_follow_from_the_load(load: float, expected: int) -> None:
    assert MeasuredLoad(streams=2, load=load, text="").expected == expected


@pytest.fixture
def measurable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model and a recording to play to it, for a short while."""
    (tmp_path / "model.safetensors").write_bytes(b"x")
    sample = tmp_path / "cache" / "sample-two-cities"
    sample.mkdir(parents=True)
    write_wav(sample / "two_cities.wav", sound(4.0))
    monkeypatch.setattr(doctor, "WARM_UP_S", 1.0)
    monkeypatch.setattr(doctor, "MEASURED_S", 1.0)
    return ["doctor", "--model", str(tmp_path)]


def test_engine_that_cannot_start_is_reported(
    measurable: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def broken(model: str, device: str, live: bool = True) -> AsyncIterator[FakeEngine]:
        raise EngineError("the weights\nare damaged")
        yield

    monkeypatch.setattr(file_transcription, "local_engine", broken)
    assert cli.main(measurable) == 1
    assert "!!   engine     the weights are damaged" in capsys.readouterr().out


def test_speech_is_played_and_streams_are_counted(
    measurable: list[str], engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(measurable) == 0
    shown = capsys.readouterr().out
    assert "transcribed 'w1 w2" in shown and "No problems found: `tickertape serve` can start.\n" in shown
    assert "expect about 16 live streams at once: 2 streams of continuous speech kept the engine busy 10% of" in shown
    assert len(engine.opened) == 2 and not engine.active
    assert re.search(r"the engine with 2 streams uses \d+ MiB\n", shown)
    assert re.search(r"of the time, with 0\.\d\d CPU cores for each\n.*`tickertape bench`", shown)


def test_memory_on_the_gpu_is_what_was_free_before_and_is_not_any_more(
    measurable: list[str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([["A Card, 8192 MiB, 8000 MiB"]] * 2 + [["A Card, 8192 MiB, 5500 MiB"]])
    monkeypatch.setattr(doctor, "graphics_cards", lambda: next(answers))
    assert cli.main(measurable) == 0
    assert "MiB, and 2500 MiB on the GPU" in capsys.readouterr().out
