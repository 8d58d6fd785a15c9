"""The weights of the end of a turn follow from labelled pauses."""

from __future__ import annotations

import numpy as np

from benchmarks.turns import MOMENTS_S, PauseCase, Source
from training.turn_weights import fit

SOURCE = Source("clip", "speaker", np.zeros(16_000, np.float32), "Yes.", True)


def pause(is_end: bool) -> PauseCase:
    """The detector is right; the text says nothing."""
    silence = None if is_end else 0.6
    answers = dict.fromkeys(MOMENTS_S, 0.9 if is_end else 0.1)
    return PauseCase(SOURCE, 1.0, silence, 0.6, 0.9, [(0.9, "yes")], answers)


def test_a_detector_that_is_right_and_a_longer_silence_count_for_an_end() -> None:
    cases = [pause(is_end) for is_end in (True, False) * 10]
    found = fit(cases, detector=True)
    assert found["detector"] > 0 and found["growth"] > 0
    assert fit(cases, detector=False)["detector"] == 0
