"""Any division of the audio, alone or in a batch, gives the same probabilities; silent streams cost nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import AtCapacity, BadItem, DuplicateStream, UnknownStream
from engine.models.silero import FRAME_SAMPLES, SileroVad, load_silero
from engine.runner.speech import SETTLED_FRAMES, SpeechDetector

Samples = NDArray[np.float32]


class CountingModel(SileroVad):
    """The real model, with a count of the frames it has looked at."""

    frames = 0

    def encode(self, frames: Tensor) -> Tensor:
        self.frames += len(frames)
        return super().encode(frames)


@pytest.fixture(scope="module")
def model() -> SileroVad:
    return load_silero()


@pytest.fixture
def counting(model: SileroVad) -> CountingModel:
    counting = CountingModel.__new__(CountingModel)
    counting.__dict__ = dict(model.__dict__)
    return counting


def sound(frames: float, seed: int = 0) -> Samples:
    """Loud and quiet stretches of noise."""
    random = np.random.default_rng(seed)
    count = int(frames * FRAME_SAMPLES)
    loudness = np.repeat(random.choice([0.001, 0.05, 0.3], size=count // 1000 + 1), 1000)[:count]
    return (loudness * random.standard_normal(count)).astype(np.float32)


def heard(model: SileroVad, samples: Samples, cuts: list[int] | None = None) -> list[float]:
    detector = SpeechDetector(model, max_streams=1)
    detector.open("a")
    probabilities = []
    for piece in np.split(samples, cuts or []):
        answer = detector.detect([("a", piece)])[0]
        assert answer.sample == len(probabilities) * FRAME_SAMPLES
        probabilities += answer.probabilities
    return probabilities


class BreakingModel(SileroVad):
    """The real model, which fails at its last touch."""

    breaks = False

    def probability(self, hidden: Tensor) -> Tensor:
        if self.breaks:
            raise RuntimeError("broken")
        return super().probability(hidden)


def test_a_call_that_fails_has_heard_nothing(model: SileroVad) -> None:
    breaking = BreakingModel.__new__(BreakingModel)
    breaking.__dict__ = dict(model.__dict__)
    detector = SpeechDetector(breaking, max_streams=2)
    detector.open("a")
    detector.open("b")
    first, second = [("a", sound(3.5)), ("b", sound(1.25, 1))], [("a", sound(2.75, 2)), ("b", sound(6.5, 3))]
    detector.detect(first)
    before = [detector.save(name) for name in "ab"]
    breaking.breaks = True
    with pytest.raises(RuntimeError):
        detector.detect(second)
    assert [detector.save(name) for name in "ab"] == before
    breaking.breaks = False
    said = detector.detect(second)
    assert [len(speech.probabilities) for speech in said] == [3, 6]


def test_a_stream_that_is_not_open_is_refused(model: SileroVad) -> None:
    detector = SpeechDetector(model, max_streams=1)
    with pytest.raises(UnknownStream, match="'a'"):
        detector.detect([("a", sound(1))])
    with pytest.raises(UnknownStream, match="'a'"):
        detector.close("a")


def test_a_stream_is_opened_once_and_not_beyond_capacity(model: SileroVad) -> None:
    detector = SpeechDetector(model, max_streams=1)
    detector.open("a")
    with pytest.raises(DuplicateStream):
        detector.open("a")
    with pytest.raises(AtCapacity, match="its maximum"):
        detector.open("b")
    detector.close("a")
    detector.open("b")


@pytest.mark.parametrize("bad", [np.zeros(512), np.zeros((2, 512), np.float32), np.zeros(512, np.int16)])
def test_samples_of_another_kind_are_refused_and_nothing_is_heard(model: SileroVad, bad: Samples) -> None:
    detector = SpeechDetector(model, max_streams=2)
    detector.open("good")
    detector.open("bad")
    with pytest.raises(BadItem, match="'bad'"):
        detector.detect([("good", sound(4)), ("bad", bad)])
    assert detector.detect([("good", sound(4))])[0].probabilities == heard(model, sound(4))


def test_a_stream_comes_once_in_a_batch(model: SileroVad) -> None:
    detector = SpeechDetector(model, max_streams=1)
    detector.open("a")
    with pytest.raises(BadItem, match="twice"):
        detector.detect([("a", sound(1)), ("a", sound(1))])


def test_the_detector_takes_one_thread_and_leaves_the_model_its_own(model: SileroVad) -> None:
    threads: list[int] = []

    class Watching(SileroVad):
        def encode(self, frames: Tensor) -> Tensor:
            threads.append(torch.get_num_threads())
            return super().encode(frames)

    watching = Watching.__new__(Watching)
    watching.__dict__ = dict(model.__dict__)
    detector = SpeechDetector(watching, max_streams=1)
    detector.open("a")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        detector.detect([("a", sound(4))])
        assert threads == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_nothing_new_is_nothing_to_do(counting: CountingModel) -> None:
    detector = SpeechDetector(counting, max_streams=2)
    detector.open("a")
    assert detector.detect([]) == []
    assert detector.detect([("a", sound(0))])[0].probabilities == []
    assert detector.detect([("a", sound(0.9))])[0].probabilities == []
    assert counting.frames == 0


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 20 * FRAME_SAMPLES), max_size=8).map(sorted))
def test_any_cut_gives_the_same_probabilities(model: SileroVad, cuts: list[int]) -> None:
    samples = sound(20.5)
    assert np.allclose(heard(model, samples, cuts), heard(model, samples), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 5 * FRAME_SAMPLES), min_size=1, max_size=6), rounds=st.integers(1, 3))
def test_company_does_not_change_what_a_stream_hears(model: SileroVad, lengths: list[int], rounds: int) -> None:
    detector = SpeechDetector(model, max_streams=len(lengths))
    streams = {str(number): sound(rounds * length / FRAME_SAMPLES, number) for number, length in enumerate(lengths)}
    together: dict[str, list[float]] = {stream: [] for stream in streams}
    for stream in streams:
        detector.open(stream)
    for turn in range(rounds):
        batch = [
            (name, samples[turn * len(samples) // rounds : (turn + 1) * len(samples) // rounds])
            for name, samples in streams.items()
        ]
        for answer in detector.detect(batch):
            together[answer.stream] += answer.probabilities
    for stream, samples in streams.items():
        assert np.allclose(together[stream], heard(model, samples), atol=1e-5)


def test_digital_silence_is_free_once_it_has_settled(counting: CountingModel) -> None:
    detector = SpeechDetector(counting, max_streams=1)
    detector.open("a")
    detector.detect([("a", sound(10))])
    frames = counting.frames
    for _ in range(100):
        answer = detector.detect([("a", np.zeros(10 * FRAME_SAMPLES, np.float32))])[0]
    # One more than the settled ones: the first silent frame still has sound in its context.
    assert counting.frames == frames + SETTLED_FRAMES + 1
    assert answer.probabilities == [answer.probabilities[0]] * 10
    assert answer.probabilities[0] < 0.05


def test_sound_after_long_silence_is_heard_as_after_short_silence(model: SileroVad) -> None:
    silence = np.zeros(3 * SETTLED_FRAMES * FRAME_SAMPLES, np.float32)
    after_long = heard(model, np.concatenate([sound(20), silence, silence, sound(20, 1)]))[-20:]
    after_short = heard(model, np.concatenate([sound(20), silence, sound(20, 1)]))[-20:]
    assert np.allclose(after_long, after_short, atol=1e-5)


def test_a_slot_is_clean_for_its_next_stream(model: SileroVad) -> None:
    detector = SpeechDetector(model, max_streams=1)
    detector.open("first")
    detector.detect([("first", sound(10.5))])
    detector.close("first")
    detector.open("second", sample=4_000)
    answer = detector.detect([("second", sound(5, 2))])[0]
    assert answer.sample == 4_000
    assert answer.probabilities == heard(model, sound(5, 2))


def test_state_is_bounded_over_a_long_stream(model: SileroVad) -> None:
    detector = SpeechDetector(model, max_streams=1)
    detector.open("a")
    for number in range(50):
        detector.detect([("a", sound(2.7, number))])
        assert len(detector._stream_states["a"].carried) < 64 + FRAME_SAMPLES
        assert detector._stream_states["a"].carried.base is None, "a view would keep every piece alive"


def test_a_long_piece_is_heard_as_in_passes(model: SileroVad) -> None:
    samples = sound(600)
    assert np.allclose(heard(model, samples), heard(model, samples, [300 * FRAME_SAMPLES]), atol=1e-5)


def test_a_silence_that_is_passed_over_changes_nothing(model: SileroVad) -> None:
    before, silence, after = sound(40.3, 1), np.zeros(70 * FRAME_SAMPLES + 300, np.float32), sound(30, 2)
    listened = heard(model, np.concatenate([before, silence, after]))
    detector = SpeechDetector(model, max_streams=1)
    detector.open("a")
    passed = detector.detect([("a", np.concatenate([before, silence[: 40 * FRAME_SAMPLES]]))])[0].probabilities
    frame = detector.pass_silence("a", len(silence) - 40 * FRAME_SAMPLES)
    assert frame.sample == len(passed) * FRAME_SAMPLES
    passed += frame.probabilities * (frame.frame_samples // FRAME_SAMPLES)
    passed += detector.detect([("a", after)])[0].probabilities
    assert np.allclose(passed, listened, atol=1e-5) and len(passed) == len(listened)


def test_a_detector_goes_on_from_what_another_saved(model: SileroVad) -> None:
    samples, cut = sound(33.7, 3), 9_001
    first, second = SpeechDetector(model, max_streams=1), SpeechDetector(model, max_streams=2)
    first.open("a")
    probabilities = first.detect([("a", samples[:cut])])[0].probabilities
    second.open("other")
    second.open("b")
    second.resume("b", first.save("a"))
    answer = second.detect([("b", samples[cut:])])[0]
    assert answer.sample == len(probabilities) * FRAME_SAMPLES
    assert np.allclose(probabilities + answer.probabilities, heard(model, samples), atol=1e-5)
