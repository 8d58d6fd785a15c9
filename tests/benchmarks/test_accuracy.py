"""The program: what it refuses, with which exit status, and what it writes."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import accuracy
from engine.weights.store import UnknownModel


class Parrot:
    """Says the same of everything it hears."""

    def transcribe(self, samples: NDArray[np.float32]) -> str:
        return "Good day, colour!"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights nor the table of spellings are fetched for these tests."""

    def unknown(name: str, report: object) -> Path:
        raise UnknownModel(f"no {name} here")

    monkeypatch.setattr(accuracy, "pull", unknown)
    monkeypatch.setattr(accuracy, "resolve", lambda name: Path(name))
    monkeypatch.setattr(accuracy, "_transcriber", lambda model: Parrot())
    # The process keeps the thread count that other tests rely on.
    monkeypatch.setattr(accuracy.torch, "set_num_threads", lambda count: None)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.zeros(16_000, np.int16).tobytes())
    entries = [
        {"path": "a.wav", "text": "good day color", "seconds": 1.0},
        {"path": "a.wav", "text": "", "seconds": 1.0},
    ]
    path = tmp_path / "manifest.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def status(*arguments: object) -> int:
    return accuracy.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("content", ["", "{", '{"path": "gone.wav", "text": "a", "seconds": 1}'])
def test_a_manifest_that_cannot_be_used(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "manifest.jsonl"
    path.write_text(content)
    assert status(path) == 2
    assert "manifest.jsonl" in capsys.readouterr().err


def test_a_model_that_does_not_exist(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Path:
        raise UnknownModel(f"no model named {name!r}")

    monkeypatch.undo()
    monkeypatch.setattr(accuracy.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(accuracy, "pull", lambda name, report: missing(name))
    monkeypatch.setattr(accuracy, "resolve", missing)
    assert status(manifest, "--model", "nonesuch") == 2
    assert "no model named 'nonesuch'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--streams", "2"],
        ["--paced"],
        ["--joined"],
        ["--live", "--rounds", "2"],
        ["--live", "--streams", "0"],
        ["--limit", "x"],
    ],
)
def test_options_that_make_no_sense(manifest: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        status(manifest, *arguments)
    assert stopped.value.code == 2


def test_offline_figures_are_printed_and_written(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(manifest, "--json", tmp_path / "figures.json") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    # Without the table of spellings one of three words differs. The clip without speech is not run offline.
    assert figures["offline"]["wer"] == pytest.approx(1 / 3)
    assert figures["offline"]["clips"] == 1
    assert figures["spelling_table"] is False
    output = capsys.readouterr()
    assert "33.33 %" in output.out
    assert "colour is not color" in output.err


def test_spellings_are_evened_out_where_the_table_is_at_hand(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "english.json"
    table.write_text('{"colour": "color"}')
    monkeypatch.setattr(accuracy, "pull", lambda name, report: table)
    assert status(manifest, "--json", tmp_path / "figures.json") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["offline"]["wer"] == 0.0
    assert figures["spelling_table"] is True
