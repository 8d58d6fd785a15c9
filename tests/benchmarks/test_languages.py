"""Figures of languages: who was taken for whom, by length, and errors where words are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import languages
from benchmarks.languages import Answer, figures, print_figures, unmarked_words
from benchmarks.recordings import Clip


def answer(seconds: float, reference: str, text: str, language: str) -> Answer:
    return Answer(Clip(Path(f"{seconds}.wav"), reference, seconds, "prompts"), text, language)


def test_accents_and_marks_are_no_errors() -> None:
    assert unmarked_words("...Contraseña número: inválida.") == ["contrasena", "numero", "invalida"]
    assert unmarked_words("Чтобы её найти") == unmarked_words("чтобы ее наити")


def test_what_is_told_right_what_is_taken_for_another_and_word_errors(capsys: pytest.CaptureFixture[str]) -> None:
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
    print_figures("es", report)
    assert "30.0 % without, 30.0 % with the language told" in capsys.readouterr().out


def test_without_a_list_there_are_no_word_errors(capsys: pytest.CaptureFixture[str]) -> None:
    report = figures("fr", [answer(2.0, "", "Merci", "fr")], [answer(2.0, "", "Merci", "fr")])
    assert report["wer_found"] is None and report["wer_told"] is None
    print_figures("fr", report)
    assert "word errors" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--languages", "es,xx"], ["--limit", "0"]])
def test_bad_arguments_are_told_before_anything_is_fetched(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        languages.main(arguments)
    assert stopped.value.code == 2
