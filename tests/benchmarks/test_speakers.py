"""Scores of speaker labels, and the conversations that they are measured on."""

from __future__ import annotations

import json
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.conversations import COLUMNS_PER_SECOND, Conversation, loudness_of, mixed, stretches
from benchmarks.sounds import SAMPLE_RATE, pcm16, voice
from benchmarks.speakers import Labelled, best_mapping, error_of_time, main, read_rttm, read_voices, score
from engine.models.silero import FRAME_SAMPLES
from engine.server.speaker_labels import Label
from realtime.bench.clients import BadManifest

VOICES = {f"{pitch} Hz": [voice(10.0, pitch, seed)] for seed, pitch in enumerate((95.0, 130.0, 190.0))}


def two_people(seconds: int = 8) -> Conversation:
    """Ada for four seconds, then Bob."""
    loudness = np.zeros((2, seconds * COLUMNS_PER_SECOND), np.float32)
    loudness[0, : 4 * COLUMNS_PER_SECOND] = 1
    loudness[1, 4 * COLUMNS_PER_SECOND :] = 1
    return Conversation("two", ("Ada", "Bob"), np.zeros(seconds * SAMPLE_RATE, np.float32), loudness)


def told(*labels: tuple[float, float, int], seconds: int = 8) -> Labelled:
    found = [Label(round(start * SAMPLE_RATE), round(end * SAMPLE_RATE), who, 1.0) for start, end, who in labels]
    speech = np.ones(seconds * SAMPLE_RATE // FRAME_SAMPLES, bool)
    return Labelled(found, [label.end + SAMPLE_RATE for label in found], speech, 1.0)


def saved(path: Path, seconds: float = 9.0) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(pcm16(voice(seconds, 120.0, 0)))
    return path


# Conversations


def test_a_seed_always_mixes_the_same_conversation() -> None:
    one, again = (mixed("same", VOICES, 12.0, seed=1) for _ in range(2))
    other = mixed("other", VOICES, 12.0, seed=2)
    assert np.array_equal(one.samples, again.samples) and np.array_equal(one.loudness, again.loudness)
    assert not np.array_equal(one.samples, other.samples)
    assert one.seconds == 12.0 and one.samples.dtype == np.float32 and np.abs(one.samples).max() <= 1


def test_everyone_speaks_and_the_reference_says_when() -> None:
    conversation = mixed("all", VOICES, 180.0, seed=4)
    spoken = {conversation.speaker_at((start + end) / 2) for start, end in conversation.words()}
    assert spoken == set(VOICES)
    quiet = np.flatnonzero(conversation.loudness.sum(axis=0) == 0)
    columns = conversation.samples[: conversation.loudness.size // 3 * 160].reshape(-1, 160)
    power = np.square(columns).mean(axis=1)
    assert np.median(power[quiet]) < np.median(power[conversation.loudness.sum(axis=0) > 0]) / 10


def test_people_speak_into_each_others_turns() -> None:
    assert ((mixed("rude", VOICES, 60.0, seed=5).loudness > 0).sum(axis=0) > 1).any()


def test_in_an_overlap_the_louder_person_counts() -> None:
    conversation = two_people()
    conversation.loudness[1, : 2 * COLUMNS_PER_SECOND] = 5
    assert [conversation.speaker_at(second) for second in (1.0, 3.0, 5.0)] == ["Bob", "Ada", "Bob"]
    conversation.loudness[1, : 2 * COLUMNS_PER_SECOND] = 1
    assert conversation.speaker_at(1.0) is None, "the reference does not say who is louder"


def test_silence_has_no_loudness() -> None:
    assert not loudness_of(np.zeros(0, np.float32)).size
    assert not loudness_of(np.zeros(SAMPLE_RATE, np.float32)).any()
    assert stretches(np.array([True, False, True, True])) == [(0, 1), (2, 4)]


# Scores


def test_the_mapping_with_the_most_right_words_is_found() -> None:
    """The largest number first would give 7 to Ada and leave 3 for Bob."""
    pairs = Counter({("Ada", 7): 10, ("Ada", 3): 9, ("Bob", 7): 8, ("Bob", None): 4})
    assert best_mapping(pairs) == {"Ada": 3, "Bob": 7}
    assert best_mapping(Counter({("Ada", None): 2})) == {}


def test_right_labels_are_right_whatever_their_numbers() -> None:
    found = score(two_people(), two_people().words(), told((0.0, 4.0, 5), (4.0, 8.0, 2)))
    assert (found.wrong, found.people, found.speakers, found.error_of_time) == (0, 2, 2, 0.0)


def test_two_people_under_one_number_are_half_wrong() -> None:
    found = score(two_people(), two_people().words(), told((0.0, 8.0, 0)))
    assert found.rate == pytest.approx(0.5) and found.error_of_time == pytest.approx(0.5)


def test_a_person_with_two_numbers_has_an_invented_one() -> None:
    found = score(two_people(), two_people().words(), told((0.0, 2.0, 0), (2.0, 4.0, 9), (4.0, 8.0, 1)))
    assert found.speakers == 3 and found.rate == pytest.approx(0.25, abs=0.03)


def test_an_edge_that_is_a_fifth_of_a_second_late_is_inside_the_collar() -> None:
    assert error_of_time(two_people(), told((0.0, 4.2, 0), (4.2, 8.0, 1)), {"Ada": 0, "Bob": 1}) == 0.0
    late = error_of_time(two_people(), told((0.0, 4.5, 0), (4.5, 8.0, 1)), {"Ada": 0, "Bob": 1})
    assert late is not None and 0 < late < 0.1


def test_a_delay_counts_from_the_end_of_the_word() -> None:
    found = score(two_people(), [(3.0, 3.5)], told((0.0, 4.0, 0)))
    assert found.delays == [1.5]


# Input that cannot be used


@pytest.mark.parametrize("content", ["", "{", '{"path": "a.wav", "text": "", "seconds": 1}'])
def test_a_manifest_without_four_people_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(content)
    with pytest.raises(BadManifest):
        read_voices(manifest, None)


def test_halves_have_no_person_in_common(tmp_path: Path) -> None:
    saved(tmp_path / "a.wav")
    lines = [{"path": "a.wav", "text": "a", "seconds": 9, "speaker": f"person {number}"} for number in range(16)]
    lines.append({"path": "a.wav", "text": "a", "seconds": 9, "speaker": "film", "style": "dialogue-film"})
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    one, other, all_of_them = (set(read_voices(manifest, half)) for half in (0, 1, None))
    assert not one & other and one | other == all_of_them == {f"person {number}" for number in range(16)}


def test_a_reference_of_turns_is_read(tmp_path: Path) -> None:
    rttm = tmp_path / "a.rttm"
    rttm.write_text("SPEAKER a 1 0.5 1.0 <NA> <NA> Ada <NA> <NA>\nSPEAKER a 1 2.0 1.0 <NA> <NA> Bob <NA> <NA>\n")
    conversation = read_rttm("a", saved(tmp_path / "a.wav"), rttm)
    assert [conversation.speaker_at(second) for second in (1.0, 2.5, 5.0)] == ["Ada", "Bob", None]
    rttm.write_text("SPEAKER a 1 x\n")
    with pytest.raises(BadManifest, match=r"cannot read the reference .*a\.rttm"):
        read_rttm("a", tmp_path / "a.wav", rttm)


def test_the_command_says_that_the_manifest_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "the manifest is missing" in capsys.readouterr().err
