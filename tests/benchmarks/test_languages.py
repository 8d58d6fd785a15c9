"""Figures of languages; lists of prompts as they are published, which prompts are taken, and packages that fail."""

from __future__ import annotations

import subprocess
import wave
from pathlib import Path

import pytest

from benchmarks import languages
from benchmarks.languages import Answer, PromptsError, choose, fetch, figures, read_list, unmarked_words
from benchmarks.recordings import Clip


def answer(seconds: float, reference: str, text: str, language: str) -> Answer:
    return Answer(Clip(Path(f"{seconds}.wav"), reference, seconds, "prompts"), text, language)


def test_accents_and_marks_are_no_errors() -> None:
    assert unmarked_words("...Contraseña número: inválida.") == ["contrasena", "numero", "invalida"]
    assert unmarked_words("Чтобы её найти") == unmarked_words("чтобы ее наити")


def test_what_is_told_right_what_is_taken_for_another_and_word_errors() -> None:
    found = [
        answer(1.6, "muchas gracias", "Muchas gracias.", "es"),
        answer(2.5, "lo siento", "lo sento", "it"),
        answer(3.9, "hasta luego", "", ""),
        answer(9.0, "la conferencia esta cerrada", "La conferencia está cerrada", "es"),
    ]
    told = [Answer(each.clip, each.clip.text, "es") for each in found[:-1]] + [Answer(found[-1].clip, "la", "es")]
    report = figures("es", found, told)
    assert report["told_right"] == 2 and report["taken_for"] == {"it": 1} and report["nothing_said"] == 1
    assert report["told_right_by_length"] == {"from 0 s": [1, 1], "from 2.5 s": [0, 2], "from 4 s": [1, 1]}
    assert report["wer_found"] == pytest.approx(3 / 10) and report["wer_told"] == pytest.approx(3 / 10)


def test_without_a_list_there_are_no_word_errors() -> None:
    report = figures("fr", [answer(2.0, "", "Merci", "fr")], [answer(2.0, "", "Merci", "fr")])
    assert report["wer_found"] is None and report["wer_told"] is None


def test_a_bad_limit_is_refused_before_anything_is_fetched() -> None:
    with pytest.raises(SystemExit) as stopped:
        languages.main(["--limit", "0"])
    assert stopped.value.code == 2


# Prompts


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
    monkeypatch.setattr(languages.subprocess, "run", run)
    reason = {"missing": "apt-get", "fails": "Unable to locate package", "changed": "digest"}[broken]
    with pytest.raises(PromptsError, match=reason):
        fetch("es")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
