"""`tickertape transcribe`: bad files are named and the others done; output is machine-readable."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realtime import cli
from realtime.commands import file_transcription
from realtime.commands.file_transcription import duration_of, read_audio
from tests.realtime.commands.conftest import sound, write_wav
from tests.realtime.gateway_doubles import MULTILINGUAL, FakeEngine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--srt", "--vtt", "a.wav"], "cannot both go to standard output"),
        (["--srt", "a.wav", "b.wav"], "several files cannot go to standard output"),
        (["-", "a.wav", "-"], "standard input can be read only once"),
        (["--live", "--json", "a.wav"], "--live shows captions"),
        (["--output-dir", "o", "x/a.wav", "y/a.mp3"], "would both be written to a.txt"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    arguments: list[str], said: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["transcribe", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not engine.opened


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that begins to load a model fails the test. What models take is as the product knows it."""

    def loads(model: str, device: str, live: bool = True, speakers: bool = True) -> None:
        pytest.fail("a model would be loaded")

    monkeypatch.setattr(file_transcription, "local_engine", loads)


@pytest.mark.parametrize("mode", [[], ["--live"]])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--language", "de"], "error: The model does not support the language 'de'. It supports en."),
        (["--language", "klingon"], "error: 'klingon' is not a language"),
        (
            ["--language", "de", "--model", "whisper-base.en"],
            "error: The model does not support the language 'de'. It supports en.",
        ),
        (["--translate"], "it does not translate"),
        (["--keyword", "a\x00b"], "holds control characters"),
        (["--keyword", "x" * 65], "a keyword has at most 64 characters"),
        (["--prompt", "x" * 17_000, "--model", "whisper-base"], "A prompt may have at most 16384 characters."),
    ],
)
def test_what_the_model_cannot_do_is_said_before_it_is_loaded(
    tmp_path: Path,
    no_engine: None,
    mode: list[str],
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["transcribe", *mode, *arguments, str(write_wav(tmp_path / "a.wav", sound(0.5)))]) == 1
    assert said.lower() in capsys.readouterr().err.lower()


def test_what_the_model_cannot_do_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    """As a user would: the import alone takes seconds, and a model that is not here would be fetched first."""
    script = """
import sys
from realtime import cli
code = cli.main(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules else code)
"""
    file = write_wav(tmp_path / "a.wav", sound(0.5))
    command = [sys.executable, "-c", script, "transcribe", "--language", "de", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (
        1,
        "error: The model does not support the language 'de'. It supports en.\n",
    )


def test_files_that_cannot_be_read_are_said_before_the_model_is_loaded(
    tmp_path: Path, no_engine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.wav").write_text("this is not audio at all, only words in a file")
    forbidden = write_wav(tmp_path / "forbidden.wav", sound(0.5))

    def refused(path: object, *arguments: object, **options: object) -> object:
        if path == forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)  # type: ignore[call-overload]

    real = builtins.open
    monkeypatch.setattr(builtins, "open", refused)
    assert cli.main(["transcribe", str(tmp_path / "text.wav"), str(forbidden)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert "text.wav: " in said[0] and "not audio" in said[0]
    assert said[1] == f"error: {forbidden}: Permission denied" and len(said) == 2


def test_outputs_that_cannot_be_written_are_said_before_the_model_is_loaded(
    tmp_path: Path, no_engine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_wav(tmp_path / "a.wav", sound(0.5)))
    assert cli.main(["transcribe", "--output-dir", file, file]) == 2
    assert capsys.readouterr().err == f"error: cannot write to {file}: File exists; name another --output-dir\n"
    assert cli.main(["transcribe", "--output-dir", "/proc", file]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write to /proc: ")
    (tmp_path / "out" / "a.srt").mkdir(parents=True)
    assert cli.main(["transcribe", "--srt", "--output-dir", str(tmp_path / "out"), file]) == 2
    assert "a.srt: a folder with that name exists" in capsys.readouterr().err


def test_bad_files_are_named_and_the_others_are_done(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_wav(tmp_path / "good.wav", sound(2.0))
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("this is not audio at all, only words in a file")
    (tmp_path / "folder").mkdir()
    names = ["missing.wav", "empty.wav", "text.wav", "folder", "good.wav"]
    assert cli.main(["transcribe", *(str(tmp_path / name) for name in names)]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"== {good}\nw1 w2 w3 w4\n"
    for name, said in zip(names, ("no such file", "is empty", "not audio", "is a folder"), strict=False):
        assert any(name in line and said in line for line in shown.err.splitlines()), name
    assert not engine.active, "every stream must have ended"


def test_damaged_file_gives_its_good_part_and_fails(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_wav(tmp_path / "cut.wav", sound(4.0))
    whole.write_bytes(whole.read_bytes()[:-64_000])
    assert cli.main(["transcribe", str(whole)]) == 1
    shown = capsys.readouterr()
    assert shown.out == "w1 w2 w3 w4\n" and "cut short" in shown.err


def test_engine_that_fails_ends_the_file_not_the_command(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.realtime import gateway_doubles

    feed = gateway_doubles.FakeStream.feed

    async def failing(self: gateway_doubles.FakeStream, samples: object) -> None:
        if self.id == "file-0":
            self.fail("the model fell over")
        else:
            await feed(self, samples)  # type: ignore[arg-type]

    monkeypatch.setattr(gateway_doubles.FakeStream, "feed", failing)
    files = [str(write_wav(tmp_path / name, sound(1.0))) for name in ("a.wav", "b.wav")]
    assert cli.main(["transcribe", *files]) == 1
    shown = capsys.readouterr()
    assert f"{files[0]}: the model fell over" in shown.err and shown.out == f"== {files[1]}\nw1 w2\n"


def test_every_format_is_written_for_every_file(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.words = ["One", "two", "three.", "Four", "five."]
    files = [write_wav(tmp_path / f"{name}.wav", sound(2.0)) for name in ("a", "b")]
    folder = tmp_path / "deep" / "out"
    options = ["--json", "--srt", "--vtt", "--words", "--output-dir", str(folder)]
    assert cli.main(["transcribe", *map(str, files), *options]) == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["a.json", "a.srt", "a.vtt", "b.json", "b.srt", "b.vtt"]
    body = json.loads((folder / "a.json").read_text())
    assert body["text"] == "One two three. Four" and body["seconds"] == 2.0 and body["model"] == "fake-model"
    assert [word["word"] for word in body["words"]] == ["One", "two", "three.", "Four"]
    assert [segment["text"] for segment in body["segments"]] == ["One two three.", "Four"]
    assert (folder / "a.srt").read_text().startswith("1\n00:00:00,")
    assert (folder / "b.vtt").read_text().startswith("WEBVTT\n")
    assert capsys.readouterr().out == ""


def test_json_of_several_files_is_json_lines(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write_wav(tmp_path / f"{name}.wav", sound(1.0))) for name in ("a", "b")]
    assert cli.main(["transcribe", "--json", *files]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == files and all("words" not in line for line in lines)


def test_words_as_text_have_times(tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["transcribe", "--words", str(write_wav(tmp_path / "a.wav", sound(1.0)))]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[2] for row in rows] == ["w1", "w2"]
    assert all(float(row[0]) < float(row[1]) for row in rows)


def test_what_the_model_does_not_take_is_said_once_and_left_out(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.takes(replace(MULTILINGUAL, prompt=False))
    files = [str(write_wav(tmp_path / name, sound(1.0))) for name in ("a.wav", "b.wav")]
    transcription_options = ["--language", "de", "--prompt", "Hello.", "--keyword", "tape", "--keyword", "ticker"]
    transcription_options += ["--model", "fake-model"]
    for mode in ([], ["--live"]):
        engine.opened.clear()
        assert cli.main(["transcribe", *mode, *transcription_options, *files[: 1 if mode else 2]]) == 0
        said = capsys.readouterr().err
        assert said.count("note: fake-model does not support prompt, keywords; continuing without") == 1
        assert all(opened["options"] == {"language": "de"} for opened in engine.opened)
    engine.takes(replace(MULTILINGUAL, keywords=2))
    assert cli.main(["transcribe", *transcription_options, files[0]]) == 0
    assert engine.opened[-1]["options"] == {"language": "de", "prompt": "Hello.", "keywords": "tape\t1\nticker\t1"}
    assert "does not support" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode,end",
    [
        ([], "error: these keywords are too long together\n"),
        (["--live"], "error: the server says: these keywords are too long together.\n"),
    ],
)
def test_wishes_that_only_the_engine_can_refuse_are_no_surprise(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str], mode: list[str], end: str
) -> None:
    engine.refuse_open = ValueError("these keywords are too long together")
    assert cli.main(["transcribe", *mode, str(write_wav(tmp_path / "a.wav", sound(0.5)))]) == 1
    assert capsys.readouterr().err.endswith(end)


def test_file_that_grows_is_read_as_it_was_and_said(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_wav(tmp_path / "growing.wav", sound(1.0))

    def grow(number: int) -> str:
        with path.open("ab") as file:
            file.write(bytes(1000))
        return f"w{number}"

    engine.word = grow  # type: ignore[method-assign]
    assert cli.main(["transcribe", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "w1 w2\n" and "grew from 32044 to" in shown.err


def test_live_takes_as_long_as_the_recording_and_shows_lines(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    began = time.monotonic()
    assert cli.main(["transcribe", "--live", str(write_wav(tmp_path / "a.wav", sound(1.4)))]) == 0
    assert time.monotonic() - began >= 1.3, "audio must not arrive before it is spoken"
    assert "w1 w2 w3" in capsys.readouterr().out
    assert engine.opened[0]["live"] is True


def test_long_file_is_never_held_whole(tmp_path: Path) -> None:
    """Pieces are short however long the file is, and only the piece at hand is alive."""
    path = write_wav(tmp_path / "long.wav", np.tile(sound(60.0), 10))
    lengths = [len(piece) for piece in read_audio(path)]
    assert sum(lengths) == 600 * 16_000 and max(lengths) <= 2 * 16_000
    assert duration_of(path) == pytest.approx(600, abs=0.1)
    assert duration_of(tmp_path / "none.wav") is None
