"""The speech detector on the device equals that on the host, for any division of the audio and any batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import AtCapacity, BadItem, DuplicateStream, UnknownStream
from engine.models.silero import FRAME_SAMPLES, SileroVad, load_silero
from engine.runner.speech import ROUND_SAMPLES, SETTLED_FRAMES, DeviceSpeechDetector, SpeechDetector
from tests.engine.models.test_silero import voice
from tests.gpu.steps import detection_error

Samples = NDArray[np.float32]
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model() -> SileroVad:
    return load_silero(fft_as_matmul=True)


@pytest.fixture(scope="module")
def reference() -> SileroVad:
    return load_silero()


def sound(seconds: float, seed: int = 0) -> Samples:
    """Speech, a second of digital silence in the middle, more speech."""
    audio = voice(seconds, pitch_hz=90.0 + 20 * seed, seed=seed).numpy().copy()
    middle = len(audio) // 2
    audio[middle : middle + 16_000] = 0.0
    return audio


def heard(detector: SpeechDetector | DeviceSpeechDetector, batches: list[list[tuple[str, Samples]]]) -> dict[str, list]:
    """What each stream heard, batch by batch; frames follow each other without a gap."""
    found: dict[str, list[float]] = {}
    pending = []
    for batch in batches:
        for stream, _ in batch:
            if stream not in found:
                detector.open(stream)
                found[stream] = []
        answers = detector.launch(batch) if isinstance(detector, DeviceSpeechDetector) else detector.detect(batch)
        pending.append(answers)
    # The host may be many batches ahead before it asks.
    for answers in pending:
        for speech in answers() if callable(answers) else answers:
            assert speech.sample == FRAME_SAMPLES * len(found[speech.stream])
            found[speech.stream] += speech.probabilities
    return found


def assert_equal(mine: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    assert mine.keys() == theirs.keys()
    for stream in mine:
        assert len(mine[stream]) == len(theirs[stream])
        assert np.allclose(mine[stream], theirs[stream], rtol=0, atol=CLOSE), stream


def test_live_streams_of_any_phase_are_heard_as_on_the_cpu(model: SileroVad, reference: SileroVad) -> None:
    audio = {f"s{seed}": sound(8, seed) for seed in range(5)}
    batches = []
    for start in range(0, 8 * 16_000, ROUND_SAMPLES):
        # Not every stream has a frame in every round.
        present = [name for index, name in enumerate(audio) if (start // ROUND_SAMPLES + index) % 3]
        batches.append([(name, audio[name][:ROUND_SAMPLES]) for name in present])
        audio |= {name: audio[name][ROUND_SAMPLES:] for name in present}
    wanted = heard(SpeechDetector(reference, 5), batches)
    assert max(map(max, wanted.values())) > 0.9, "somebody speaks"
    assert_equal(heard(DeviceSpeechDetector(model, 5), batches), wanted)


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(0, 30_000), min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_cut_gives_the_same_probabilities(model: SileroVad, reference: SileroVad, lengths: list[list[int]]) -> None:
    rounds = max(map(len, lengths))
    batches: list[list[tuple[str, Samples]]] = [[] for _ in range(rounds)]
    for index, cuts in enumerate(lengths):
        for batch, piece in zip(batches, np.split(sound(1.6, index), np.cumsum(cuts)), strict=False):
            batch.append((str(index), piece))
    assert_equal(heard(DeviceSpeechDetector(model, 4), batches), heard(SpeechDetector(reference, 4), batches))


def test_a_settled_silence_keeps_its_answer(model: SileroVad, reference: SileroVad) -> None:
    silence = np.zeros((SETTLED_FRAMES + 20) * FRAME_SAMPLES, np.float32)
    pieces = [sound(2, 1)[:16_000], silence, sound(2, 2)[:16_000]]
    batches = [[("a", piece)] for piece in pieces]
    found = heard(DeviceSpeechDetector(model, 1), batches)
    assert_equal(found, heard(SpeechDetector(reference, 1), batches))
    # A frame that begins in the sound and 32 silent ones.
    settled = found["a"][32 + SETTLED_FRAMES : 31 + SETTLED_FRAMES + 20]
    assert len(set(settled)) == 1


def test_a_silence_that_is_passed_over(model: SileroVad, reference: SileroVad) -> None:
    before, after = sound(2, 1)[:20_000], sound(2, 2)[:16_000]
    silence = np.zeros(40 * FRAME_SAMPLES, np.float32)
    mine, theirs = DeviceSpeechDetector(model, 1), SpeechDetector(reference, 1)
    found = []
    for detector in (mine, theirs):
        answers = heard(detector, [[("a", before)], [("a", silence)]])["a"]
        frame = detector.pass_silence("a", 100 * FRAME_SAMPLES + 300)
        assert frame.sample == len(answers) * FRAME_SAMPLES
        passed = frame.frame_samples // FRAME_SAMPLES
        last = mine.launch([("a", after)])() if detector is mine else theirs.detect([("a", after)])
        answers += frame.probabilities * passed + [value for speech in last for value in speech.probabilities]
        found.append(answers)
    assert_equal({"a": found[0]}, {"a": found[1]})


def test_more_streams_than_a_round_holds_and_pieces_longer_than_one(
    model: SileroVad, reference: SileroVad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runner.speech.MAX_ROUND_STREAMS", 2)
    monkeypatch.setattr("engine.runner.speech.LONGER_ROUNDS", ((2, 2), (3, 1)))
    batches = [[(f"s{seed}", sound(1.5, seed)[: 9_000 - 1_700 * seed]) for seed in range(5)]]
    assert_equal(heard(DeviceSpeechDetector(model, 6), batches), heard(SpeechDetector(reference, 6), batches))


def test_a_slot_is_clean_for_its_next_stream_and_the_last_one_is_not_answered(model: SileroVad) -> None:
    detector = DeviceSpeechDetector(model, 1)
    detector.open("a")
    late = detector.launch([("a", sound(1, 3)[:4_000])])
    detector.close("a")
    detector.open("a", sample=4_000)
    answers = detector.launch([("a", sound(1, 4)[:4_000])])
    assert late() == []
    (first, *_) = answers()
    assert first.sample == 4_000
    detector.close("a")
    found = [value for speech in answers() for value in speech.probabilities]
    assert found == []
    wanted = heard(DeviceSpeechDetector(model, 1), [[("b", sound(1, 4)[:4_000])]])["b"]
    assert first.probabilities == wanted[: len(first.probabilities)]


def test_mistakes_are_refused_and_nothing_is_heard(model: SileroVad) -> None:
    detector = DeviceSpeechDetector(model, 2)
    detector.open("a")
    detector.open("b")
    with pytest.raises(DuplicateStream):
        detector.open("a")
    with pytest.raises(AtCapacity, match="its maximum"):
        detector.open("c")
    with pytest.raises(UnknownStream):
        detector.close("c")
    good = ("a", sound(1)[:4_000])
    for bad in [("c", good[1]), ("b", np.zeros(512)), ("b", np.zeros((2, 512), np.float32)), good]:
        with pytest.raises((UnknownStream, BadItem)):
            detector.launch([good, bad])
    said = detector.launch([good])()
    assert said[0].sample == 0 and sum(len(speech.probabilities) for speech in said) == 4_000 // FRAME_SAMPLES
    assert detector.launch([])() == []


def test_the_check_that_runs_on_a_gpu_holds_on_the_cpu() -> None:
    assert detection_error("cpu", streams=7, rounds=12) < CLOSE


def test_a_long_piece_has_one_answer_for_each_stream(model: SileroVad) -> None:
    """What a stream replays may be many rounds; the caller does not see them."""
    detector = DeviceSpeechDetector(model, 3)
    sound = np.random.default_rng(1).standard_normal(40 * ROUND_SAMPLES).astype(np.float32)
    for stream in "ab":
        detector.open(stream)
    answers = detector.detect([("a", sound), ("b", sound[:2000])])
    assert {(speech.stream, speech.sample, len(speech.probabilities)) for speech in answers} == {
        ("a", 0, 40 * ROUND_SAMPLES // FRAME_SAMPLES),
        ("b", 0, 2000 // FRAME_SAMPLES),
    }


def test_a_replay_is_few_rounds(model: SileroVad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live streams wait for all rounds before their step, so an item of sixteen positions is not sixteen rounds."""
    detector = DeviceSpeechDetector(model, 40)
    rounds: list[int] = []
    compute = detector._round
    monkeypatch.setattr(detector, "_round", lambda buffers, size: (rounds.append(size), compute(buffers, size)))
    names = [f"s{number}" for number in range(40)]
    for name in names:
        detector.open(name)
    position, item = np.zeros(ROUND_SAMPLES, np.float32), np.zeros(16 * ROUND_SAMPLES, np.float32)
    detector.detect([(name, item if number < 24 else position) for number, name in enumerate(names)])
    assert rounds == [16, 24]
    rounds.clear()
    detector.detect([(name, item[: 3 * ROUND_SAMPLES]) for name in names])
    assert rounds == [40]
