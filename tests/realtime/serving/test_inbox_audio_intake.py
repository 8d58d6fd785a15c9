"""The intake: any split of the bytes gives the same samples, and every sample is counted once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.serving.inbox import AudioIntake
from realtime.session.settings import AudioFormat

RATE = 16_000


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), st.sampled_from([8000, 16000, 24000, 44100]))
def test_intake_counts_every_sample_once_however_the_bytes_are_cut(cuts: list[int], rate: int) -> None:
    data = np.random.default_rng(0).integers(-3000, 3000, sum(cuts), np.int16).tobytes()
    whole, pieces = AudioIntake(AudioFormat("audio/pcm", rate)), AudioIntake(AudioFormat("audio/pcm", rate))
    expected = [whole.decode(data), whole.flush()]
    appended, start = [], 0
    for number, cut in enumerate(cuts):
        end = start + 2 * cut + (1 if number % 2 else 0)
        appended.append(pieces.decode(data[start : min(end, len(data))]))
        start = min(end, len(data))
    appended += [pieces.decode(data[start:]), pieces.flush()]
    assert sum(item.source_samples for item in appended) == len(data) // 2
    one, other = (np.concatenate([item.samples for item in items]) for items in (expected, appended))
    assert len(one) == (len(data) // 2 * RATE + rate // 2) // rate
    np.testing.assert_array_equal(one, other)


def test_intake_flush_of_nothing_is_nothing() -> None:
    intake = AudioIntake(AudioFormat())
    assert len(intake.flush().samples) == 0
    assert intake.silence(24_000).samples == RATE
