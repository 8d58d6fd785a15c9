"""The accuracy benchmark: refusals with exit status, its output, and figures compared with hand-made ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import accuracy
from benchmarks.accuracy import delays_of, rounds_of, transcripts_of
from benchmarks.playing import Cost, Played
from benchmarks.recordings import Clip, Part, Session
from benchmarks.scoring import Word
from engine.weights.store import UnknownModel
from realtime.bench.words import english_normaliser
from tests.benchmarks.test_playing import make_loop
from tests.benchmarks.test_recordings import write_wav


class Parrot:
    """Says the same of everything it hears."""

    def transcribe(self, samples: NDArray[np.float32]) -> str:
        return "Good day, colour!"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights nor the table of spellings are fetched for these tests."""

    def unknown(name: str) -> Path:
        raise UnknownModel(f"no {name} here")

    monkeypatch.setattr(accuracy, "pull", unknown)
    monkeypatch.setattr(accuracy, "resolve", lambda name: Path(name))
    monkeypatch.setattr(accuracy.OfflineTranscriber, "load", lambda model: Parrot())
    # The process keeps the thread count that other tests rely on.
    monkeypatch.setattr(accuracy, "compute_on_one_thread", lambda: None)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    write_wav(tmp_path / "a.wav", 1.0)
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
    monkeypatch.setattr(accuracy, "compute_on_one_thread", lambda: None)
    monkeypatch.setattr(accuracy, "pull", missing)
    monkeypatch.setattr(accuracy, "resolve", missing)
    assert status(manifest, "--model", "nonesuch") == 2
    assert "no model named 'nonesuch'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--live", "--joined", "0"],
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
    assert "0.333" in output.out
    assert "colour is not color" in output.err


def test_spellings_are_evened_out_where_the_table_is_at_hand(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "english.json"
    table.write_text('{"colour": "color"}')
    monkeypatch.setattr(accuracy, "pull", lambda name: table)
    assert status(manifest, "--json", tmp_path / "figures.json") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["offline"]["wer"] == 0.0
    assert figures["spelling_table"] is True


def test_figures_of_files_stand_beside_those_of_whole_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Parrot, "transcribe", lambda parrot, samples: "tick " * 10)
    monkeypatch.setattr(accuracy, "spelling_table", dict)
    monkeypatch.setattr(accuracy, "warm_loop", lambda model, streams, threads: make_loop())
    manifest = tmp_path / "manifest.jsonl"
    write_wav(tmp_path / "noise.wav", 3.0)
    manifest.write_text(json.dumps({"path": "noise.wav", "text": "tick " * 10, "seconds": 3.0}))
    assert accuracy.main([str(manifest), "--file", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    # Three seconds have eight words of the ten that the whole clip is said to have.
    assert figures["offline"]["wer"] == 0.0 and figures["file"]["wer"] == pytest.approx(0.2)
    assert figures["file_minus_offline_points"] == pytest.approx(20.0)
    assert figures["file"]["cpu_per_audio_second"] > 0
    assert "File is +20.00 points from offline." in capsys.readouterr().out


# Figures

normalise = english_normaliser({})


def clip(text: str, seconds: float = 10.0) -> Clip:
    return Clip(Path(f"{text[:5]}.wav"), text, seconds, "clips" if text else "noise")


def run_of(parts: list[Part], words: list[tuple[str, float, float, float]], seconds: float) -> Played:
    """Words as (text, start, end, shown at)."""
    run = Played(Session("s", tuple(part.clip for part in parts), 0.0), parts, seconds, closed_at=seconds + 0.3)
    for text, start, end, at in words:
        run.emissions.add(at, f" {text}", [Word(text, start, end)])
    return run


def test_speech_and_silence_are_reported_apart() -> None:
    figures = accuracy.accuracy(
        [
            (clip("one two three four"), "one two tree four"),
            (clip("five six"), "six"),
            (clip("", 30.0), "Thank you."),
            (clip("", 90.0), " ... "),
        ],
        normalise,
    )
    assert figures["clips"] == 2
    assert figures["words_in_silence"] == 2
    assert figures["silent_minutes"] == 2.0
    assert figures["texts_in_silence"] == {".wav": "Thank you."}


def test_nothing_but_silence_has_no_error_rate() -> None:
    assert "wer" not in accuracy.accuracy([(clip(""), "")], normalise)


def test_the_words_of_a_joined_session_go_to_the_clip_they_were_said_in() -> None:
    parts = [Part(clip("good day"), 0.0, 4.0), Part(clip("fine thanks"), 4.0, 8.0)]
    run = run_of(parts, [("Good", 0.5, 1.0, 2.0), ("day.", 1.0, 3.9, 4.5), ("Fine", 3.9, 4.3, 5.0)], 8.0)
    assert [text for _, text in transcripts_of(run)] == ["Good day.", "Fine"]


def test_a_session_of_one_clip_is_its_whole_text() -> None:
    run = run_of([Part(clip("good day"), 0.0, 4.0)], [("Good", 0.5, 1.0, 2.0), ("day.", 9.0, 9.5, 9.9)], 4.0)
    assert [text for _, text in transcripts_of(run)] == [" Good day."]


def test_delays() -> None:
    run = run_of([Part(clip("good day sir"), 0.0, 4.0)], [("Good", 0.5, 1.0, 2.0), ("day.", 1.0, 1.5, 3.0)], 4.0)
    run.probabilities, run.frame_seconds = [0.0, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0], 0.5
    run.lags = [0.1, 0.4]
    figures = delays_of([run])
    assert figures["emission_delay_p50"] == pytest.approx(1.25)
    assert figures["words_timed"] == 2
    assert figures["time_to_final_p50"] == pytest.approx(1.5)
    assert figures["lag_max"] == 0.4


def test_delays_of_nothing() -> None:
    assert delays_of([])["emission_delay_p95"] is None


def test_rounds_compare_the_same_words_early_and_late() -> None:
    parts = [Part(clip(text), 2.0 * at, 2.0 * at + 2) for at, text in enumerate(["good day", "so long"] * 2)]
    words = [(word, 1.0 * at + 0.2, 1.0 * at + 0.8, 9.0) for at, word in enumerate("good day so long good day".split())]
    costs = [Cost(0.0, 1.0, 2**20), Cost(4.1, 3.0, 2**21), Cost(8.1, 4.0, 2**21)]
    first, second = rounds_of([run_of(parts, words, 8.0)], 2, costs, normalise)
    assert (first["wer"], second["wer"]) == (0.0, 0.5)
    assert first["cpu_per_audio_second"] == pytest.approx(2 / 4.1) and second["cpu_per_audio_second"] == 0.25
    assert (first["seconds"], second["resident_mib"]) == (4.0, 2.0)
