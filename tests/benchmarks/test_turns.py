"""Pauses are labelled by the reference, and rules are judged at them: wrong cuts inside sentences, delays at ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.playing import Played
from benchmarks.recordings import sound_session
from benchmarks.scoring import Word
from benchmarks.turns import (
    MOMENTS_S,
    PauseCase,
    Rule,
    Source,
    cases_of,
    figures_of,
    judged_rule,
    learnt_rule,
    manifest_sources,
    room_tone,
    silence_rule,
    silences,
    wrong_share,
)
from engine.end_of_turn import EAGERNESS
from realtime.bench.clients import BadManifest

FRAME_S = 0.032


def source(reference: str, marks: bool = True) -> Source:
    return Source("clip", "speaker", np.zeros(16_000, np.float32), reference, marks)


def heard(words: list[tuple[str, float, float]], speech: list[tuple[float, float]], seconds: float) -> Played:
    """Words come 0.3 s after they ended; speech is loud where it says so."""
    frames = [number * FRAME_S for number in range(int(seconds / FRAME_S))]
    loud = [0.9 if any(start <= at < end for start, end in speech) else 0.05 for at in frames]
    played = Played(sound_session("clip", np.zeros(1, np.float32)), [], seconds)
    played.probabilities, played.frame_seconds = loud, FRAME_S
    for word, start, end in words:
        played.emissions.add(end + 0.3, f" {word}", [Word(word, start, end)])
    return played


TWO_SENTENCES = heard(
    [("I", 0.1, 0.3), ("think", 0.3, 0.9), ("so.", 1.5, 1.9), ("Good", 2.6, 3.0), ("day.", 3.0, 3.4)],
    [(0.0, 1.0), (1.5, 2.0), (2.5, 3.5)],
    5.0,
)


def test_pauses_inside_and_at_ends_are_told_apart() -> None:
    cases = cases_of(source("I think so. Good day."), TWO_SENTENCES)
    assert [case.silence is None for case in cases] == [False, True, True]
    assert cases[0].silence == pytest.approx(0.5, abs=2 * FRAME_S)
    assert [case.last_word for case in cases] == [0.9, 1.9, 3.4]


def test_a_pause_whose_words_do_not_match_is_left_out() -> None:
    cases = cases_of(source("I sink so. Good day."), TWO_SENTENCES)
    assert [case.silence is None for case in cases] == [True, True]


def test_a_turn_that_ended_begins_a_new_text() -> None:
    cases = cases_of(source("I think so. Good day."), TWO_SENTENCES)
    assert cases[0].text(5.0).split() == ["I", "think"]
    assert cases[2].text(5.0).split() == ["Good", "day."]
    assert cases[1].text(2.0).split() == ["I", "think"], "its last word has not come yet"


def test_short_silences_are_no_pauses() -> None:
    assert silences(heard([], [(0.0, 1.0), (1.15, 2.0)], 2.1)) == []


def test_rules_are_judged_at_pauses() -> None:
    cases = cases_of(source("I think so. Good day."), TWO_SENTENCES)
    for case in cases:
        case.answers = dict.fromkeys(MOMENTS_S, 0.1 if case.silence is not None else 0.9)
    assert wrong_share(silence_rule(0.3), cases) == 1 and wrong_share(silence_rule(0.7), cases) == 0
    assert wrong_share(learnt_rule(0.5), cases) == 0
    found = figures_of(learnt_rule(0.5), cases, question_s=0.05, speech_s=60)
    assert found["wrong_cuts"] == 0
    assert found["end_after_speech_fell_s_p50"] == pytest.approx(0.25)
    text = judged_rule(EAGERNESS["medium"], learnt=False)
    assert text.end(cases[0]) == np.inf and text.end(cases[1]) == 0.5


@pytest.mark.parametrize(("end", "known"), [(0.1, 0.1), (0.2, 0.35), (0.3, 0.35), (0.5, 0.5), (0.61, 0.75)])
def test_an_end_is_not_known_before_the_answer(end: float, known: float) -> None:
    case = PauseCase(source("a"), 1.0, None, 3.0, 0.9, [])
    found = figures_of(Rule(lambda case: end, MOMENTS_S), [case], question_s=0.15, speech_s=60)
    assert found["end_after_speech_fell_s_p50"] == pytest.approx(known)


def test_the_product_rule_asks_only_while_the_pause_lasts() -> None:
    case = PauseCase(source("a"), 1.0, 0.5, 0.5, 0.9, [])
    high, low = (judged_rule(EAGERNESS[name], learnt=True) for name in ("high", "low"))
    case.answers = {high.moments[0]: 0.99}
    assert high.end(case) < 0.5 and high.asked(case) == [high.moments[0]]
    assert low.end(case) == np.inf and low.asked(case) == []


def test_the_detector_gets_the_audio_up_to_its_question() -> None:
    clip = Source("clip", "speaker", np.arange(32_000, dtype=np.float32), "a", True)
    inside, at_end = (PauseCase(clip, 1.0, silence, 0.5, 0.9, []) for silence in (0.5, None))
    assert inside.audio_until(0.2).tolist() == list(range(19_200))
    assert inside.lasts(0.5) and not inside.lasts(0.6) and at_end.lasts(0.6)
    assert at_end.audio_until(0.6).tolist() == [*range(24_000), *range(23_999, 22_399, -1)]


def test_references_without_sentences_are_left_out(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps({"path": "none.wav", "text": "no marks here", "seconds": 1.0, "style": "read"}))
    with pytest.raises(BadManifest, match="no recording whose sentences are known"):
        manifest_sources(manifest)
    with pytest.raises(BadManifest):
        manifest_sources(tmp_path / "nowhere")


def test_room_tone_is_the_quietest_part() -> None:
    audio = np.ones(32_000, np.float32)
    audio[10_000:16_000] = 0.01
    assert np.allclose(room_tone(audio, 40_000), 0.01)
    assert len(room_tone(audio[:100], 500)) == 500
