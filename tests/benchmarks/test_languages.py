"""Figures of languages, and which recordings are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import languages
from benchmarks.languages import Answer, clips_by_language, figures, unmarked_words
from benchmarks.recordings import BadManifest, Clip


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


def test_clips_of_each_language_are_chosen_evenly(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.jsonl"
    lines = [
        {"path": f"{number}.wav", "text": "", "seconds": 2.0, "language": "fr" if number % 3 else "es"}
        for number in range(9)
    ]
    manifest.write_text("\n".join(map(json.dumps, lines)))
    clips = clips_by_language(manifest, 2)
    assert {language: [clip.path.stem for clip in mine] for language, mine in clips.items()} == {
        "es": ["0", "3"],
        "fr": ["1", "5"],
    }
    with pytest.raises(BadManifest):
        clips_by_language(tmp_path / "nowhere", 2)


def test_a_language_that_the_manifest_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps({"path": "a.wav", "text": "", "seconds": 2.0, "language": "fr"}))
    assert languages.main([str(manifest), "--language", "es"]) == 2
    assert "has no recording in 'es'" in capsys.readouterr().err
