"""Files sent to a real loop with a stand-in model: all of each, in bounds, and failures are told."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.file_run import FileOutcome, FileRun
from benchmarks.live_run import RunFailed
from benchmarks.recordings import Clip
from engine.messages import Command, Open, Text
from engine.server.loop import StepOutput
from tests.benchmarks.test_live_run import make_loop

SECONDS = (3.0, 2.01, 0.9, 70.0)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    folder = tmp_path_factory.mktemp("files")
    clips = []
    for number, seconds in enumerate(SECONDS):
        path = folder / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            noise = np.random.default_rng(number).integers(-900, 900, round(seconds * 16_000))
            file.writeframes(noise.astype(np.int16).tobytes())
        clips.append(Clip(path, "tick " * 10, seconds, "clips"))
    return clips


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_file_is_heard_to_its_end(clips: list[Clip], at_once: int) -> None:
    outcomes: list[FileOutcome] = []
    FileRun(make_loop(), at_once).send(clips, outcomes.append)
    assert sorted(outcome.seconds for outcome in outcomes) == sorted(SECONDS)
    for outcome in outcomes:
        # The model says a word at positions 2, 7, 12 ... of 80 ms.
        positions = int(np.ceil(outcome.seconds / 0.08))
        assert outcome.transcript.text == " ".join(["tick"] * ((positions + 4) // 5))
        assert len(outcome.words) == (positions + 4) // 5


def test_files_are_opened_with_options_and_tell_their_language(
    clips: list[Clip], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop()
    opened: list[dict[str, str]] = []
    outcomes: list[FileOutcome] = []
    submit, step = loop.submit, loop.step

    def note(commands: list[Command], now: int) -> None:
        opened.extend(command.options for command in commands if isinstance(command, Open))
        submit(commands, now)

    def tell() -> StepOutput | None:
        result = step()
        for output in result.outputs if result is not None else ():
            if isinstance(output, Text):
                # A text without words may come before anything was understood.
                output.language = "fr" if output.delta else "en"
        return result

    monkeypatch.setattr(loop, "submit", note)
    monkeypatch.setattr(loop, "step", tell)
    FileRun(loop, 2, {"task": "translate"}).send(clips[:3], outcomes.append)
    assert opened == [{"task": "translate"}] * 3
    assert [outcome.language for outcome in outcomes] == ["fr"] * 3


@pytest.mark.parametrize(("broken", "message"), [("dead", "out of luck"), ("failed", "out of tune")])
def test_an_engine_that_fails_ends_the_run(clips: list[Clip], broken: str, message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        FileRun(make_loop(broken), 2).send(clips, lambda outcome: None)


def test_figures_of_files_stand_beside_those_of_whole_clips(
    clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Parrot:
        def transcribe(self, samples: object) -> str:
            return "tick " * 10

    monkeypatch.setattr(accuracy, "_transcriber", lambda model: Parrot())
    monkeypatch.setattr(accuracy, "_spelling_table", dict)
    monkeypatch.setattr(accuracy, "build_loop", lambda config: make_loop())
    monkeypatch.setattr(accuracy, "warm_up", lambda loop: None)
    monkeypatch.setattr(accuracy.torch, "set_num_threads", lambda count: None)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps({"path": str(clips[0].path), "text": "tick " * 10, "seconds": 3.0}))
    assert accuracy.main([str(manifest), "--file", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    # Three seconds have eight words of the ten that the whole clip is said to have.
    assert figures["offline"]["wer"] == 0.0 and figures["file"]["wer"] == pytest.approx(0.2)
    assert figures["file_minus_offline_points"] == pytest.approx(20.0)
    assert figures["file"]["cpu_per_audio_second"] > 0
    assert "File is +20.00 points from offline." in capsys.readouterr().out
