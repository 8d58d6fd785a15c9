"""Lists of prompts as they are published, which prompts are taken, and packages that cannot be had."""

from __future__ import annotations

import subprocess
import wave
from pathlib import Path

import pytest

from benchmarks import voice_prompts
from benchmarks.voice_prompts import PromptsError, choose, fetch, read_list


def record(folder: Path, name: str, seconds: float) -> None:
    path = folder / f"{name}.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8_000)
        file.writeframes(bytes(2 * round(seconds * 8_000)))


def test_a_list_has_the_words_of_each_prompt(tmp_path: Path) -> None:
    path = tmp_path / "core-sounds-es.txt"
    path.write_text(
        "; Core Asterisk Sounds in Spanish\n\nauth-thankyou: Gracias\nfollowme/sorry.wav: Lo siento: adios.\n"
        "beep: [tono simple]\nconfbridge-join: (beep)\nconfbridge-leave: <beep decending>\nvm-none:\nno words here\n"
        "conf-usermenu: Por favor marque 1 para salir.\n"
    )
    assert read_list(path) == {"auth-thankyou": "Gracias", "followme/sorry": "Lo siento: adios."}


@pytest.mark.parametrize("content", [b"", b"; nothing\n", b"auth: \xff\xfe\n"])
def test_a_list_without_words_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "core-sounds-ru.txt"
    path.write_bytes(content)
    with pytest.raises(PromptsError, match=r"core-sounds-ru\.txt"):
        read_list(path)


def test_sentences_are_taken_and_single_words_and_tones_are_not(tmp_path: Path) -> None:
    for name, seconds in {
        "b-long": 4.0, "a-enough": 1.5, "c-short": 1.4, "digits/9": 2.0, "letters/a": 2.0, "silence/5": 5.0,
        "beep": 2.0, "followme/sorry": 3.0,
    }.items():  # fmt: skip
        record(tmp_path, name, seconds)
    taken = choose(tmp_path, None, 10)
    assert [(prompt.path.stem, prompt.seconds, prompt.text) for prompt in taken] == [
        ("a-enough", 1.5, ""),
        ("b-long", 4.0, ""),
        ("sorry", 3.0, ""),
    ]
    # With a list, only prompts whose words are known.
    told = choose(tmp_path, {"followme/sorry": "Lo siento", "c-short": "No"}, 10)
    assert [(prompt.path.stem, prompt.text) for prompt in told] == [("sorry", "Lo siento")]


def test_a_limit_takes_prompts_from_all_of_the_list(tmp_path: Path) -> None:
    for number in range(10):
        record(tmp_path, f"prompt-{number}", 2.0)
    assert [prompt.path.stem[-1] for prompt in choose(tmp_path, None, 4)] == ["0", "2", "5", "7"]


@pytest.mark.parametrize("broken", ["missing", "fails", "changed"])
def test_a_package_that_cannot_be_had_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def run(command: list[str], *, cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        if broken == "missing":
            raise FileNotFoundError(command[0])
        if broken == "fails":
            raise subprocess.CalledProcessError(100, command, stderr="W: unsandboxed\nE: Unable to locate package\n")
        (cwd / "asterisk.deb").write_bytes(b"another package")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("TICKERTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(voice_prompts.subprocess, "run", run)
    reason = {"missing": "apt-get", "fails": "Unable to locate package", "changed": "digest"}[broken]
    with pytest.raises(PromptsError, match=reason):
        fetch("es")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
