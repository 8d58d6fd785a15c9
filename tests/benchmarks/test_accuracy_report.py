"""Figures of runs that are small enough to be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy_report import (
    Transcript,
    accuracy,
    delays_of,
    drift_of,
    print_accuracy,
    print_live,
    rounds_of,
    transcripts_of,
)
from benchmarks.live_run import Cost, SessionRun
from benchmarks.recordings import Clip, Part, Session
from benchmarks.scoring import TimedWord
from realtime.bench.words import english_normaliser

normalise = english_normaliser({})


def clip(text: str, seconds: float = 10.0) -> Clip:
    return Clip(Path(f"{text[:5]}.wav"), text, seconds, "clips" if text else "noise")


def run_of(parts: list[Part], words: list[tuple[str, float, float, float]], seconds: float) -> SessionRun:
    """Words as (text, start, end, shown at)."""
    run = SessionRun(Session("s", tuple(part.clip for part in parts), 0.0), parts, seconds, closed_at=seconds + 0.3)
    for text, start, end, at in words:
        run.emissions.add(at, f" {text}", [TimedWord(text, start, end)])
    return run


def test_speech_and_silence_are_reported_apart() -> None:
    figures = accuracy(
        [
            Transcript(clip("one two three four"), "one two tree four"),
            Transcript(clip("five six"), "six"),
            Transcript(clip("", 30.0), "Thank you."),
            Transcript(clip("", 90.0), " ... "),
        ],
        normalise,
    )
    assert figures["clips"] == 2
    assert figures["words_in_silence"] == 2
    assert figures["insertions_per_silent_minute"] == pytest.approx(1.0)
    assert figures["texts_in_silence"] == {".wav": "Thank you."}


def test_edges_are_the_first_and_last_words_of_clips() -> None:
    figures = accuracy([Transcript(clip("so here we are then"), "here we are")], normalise)
    assert (figures["edge_words"], figures["edge_deletions"]) == (2, 2)
    assert figures["edge_deletion_rate"] == 1.0
    assert figures["inside_deletion_rate"] == 0.0
    assert figures["wer"] == pytest.approx(2 / 5)


def test_nothing_but_silence_has_no_error_rate() -> None:
    assert "wer" not in accuracy([Transcript(clip(""), "")], normalise)


def test_the_words_of_a_joined_session_go_to_the_clip_they_were_said_in() -> None:
    parts = [Part(clip("good day"), 0.0, 4.0), Part(clip("fine thanks"), 4.0, 8.0)]
    run = run_of(parts, [("Good", 0.5, 1.0, 2.0), ("day.", 1.0, 3.9, 4.5), ("Fine", 3.9, 4.3, 5.0)], 8.0)
    assert [item.text for item in transcripts_of(run)] == ["Good day.", "Fine"]


def test_a_session_of_one_clip_is_its_whole_text() -> None:
    run = run_of([Part(clip("good day"), 0.0, 4.0)], [("Good", 0.5, 1.0, 2.0), ("day.", 9.0, 9.5, 9.9)], 4.0)
    assert [item.text for item in transcripts_of(run)] == [" Good day."]


def test_delays() -> None:
    run = run_of([Part(clip("good day sir"), 0.0, 4.0)], [("Good", 0.5, 1.0, 2.0), ("day.", 1.0, 1.5, 3.0)], 4.0)
    run.probabilities, run.frame_seconds = [0.0, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0], 0.5
    run.lags = [0.1, 0.4]
    figures = delays_of([run]).figures()
    assert figures["emission_delay_p50"] == pytest.approx(1.25)
    assert figures["words_timed"] == 2
    assert figures["time_to_final_p50"] == pytest.approx(1.5)
    assert figures["lag_max"] == 0.4
    assert figures["closed_after_end_max"] == pytest.approx(0.3)


def test_delays_of_nothing() -> None:
    assert delays_of([]).figures()["emission_delay_p95"] is None


def test_drift_compares_the_first_and_the_last_third_of_long_sessions() -> None:
    parts = [Part(clip("good day"), 60.0 * minute, 60.0 * minute + 60) for minute in range(6)]
    words = [("good", 60.0 * minute + 1, 60.0 * minute + 2, 60.0 * minute + 3 + minute) for minute in range(6)]
    words += [("day", 60.0 * minute + 4, 60.0 * minute + 5, 60.0 * minute + 7) for minute in range(4)]
    figures = drift_of([run_of(parts, sorted(words, key=lambda word: word[1]), 359.0)], normalise)
    assert figures["wer_by_minute"] == [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    assert (figures["wer_first_third"], figures["wer_last_third"]) == (0.0, 0.5)
    assert figures["delay_p50_by_minute"][5] == pytest.approx(6.0)


def test_rounds_compare_the_same_words_early_and_late() -> None:
    parts = [Part(clip(text), 2.0 * at, 2.0 * at + 2) for at, text in enumerate(["good day", "so long"] * 2)]
    words = [(word, 1.0 * at + 0.2, 1.0 * at + 0.8, 9.0) for at, word in enumerate("good day so long good day".split())]
    costs = [Cost(0.0, 1.0, 2**20), Cost(4.1, 3.0, 2**21), Cost(8.1, 4.0, 2**21)]
    first, second = rounds_of([run_of(parts, words, 8.0)], 2, costs, normalise)
    assert (first["wer"], second["wer"]) == (0.0, 0.5)
    assert first["cpu_per_audio_second"] == pytest.approx(2 / 4.1) and second["cpu_per_audio_second"] == 0.25
    assert (first["seconds"], second["resident_mib"]) == (4.0, 2.0)


def test_drift_within_one_long_recording_goes_word_by_word() -> None:
    recording = Part(clip("alpha beta gamma delta"), 0.0, 330.0)
    words = [("alpha", 10.0, 11.0, 12.0), ("beta", 100.0, 101.0, 102.0), ("gamma", 310.0, 311.0, 312.0)]
    figures = drift_of([run_of([recording], words, 330.0)], normalise)
    assert figures["wer_by_minute"] == [0.0, 0.0, None, None, None, 0.5]


def test_short_sessions_do_not_drift() -> None:
    assert drift_of([run_of([Part(clip("good day"), 0.0, 4.0)], [], 4.0)], normalise) == {}


def test_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [Part(clip("good day"), 60.0 * minute, 60.0 * minute + 60) for minute in range(6)]
    run = run_of(parts, [("good", 1.0, 2.0, 3.0), ("day", 4.0, 5.0, 7.0)], 359.0)
    figures = accuracy([*transcripts_of(run), Transcript(clip("", 60.0), "you")], normalise)
    print_accuracy("Live", figures | {"cpu_per_audio_second": 0.1234})
    print_live(delays_of([run]).figures() | drift_of([run], normalise))
    printed = capsys.readouterr().out
    for expected in ("83.33 %", "'you'", "1 words in 1.0 minutes", "0.123 s", "p50 1.50 s", "last third 100.00 %"):
        assert expected in printed
