"""From bytes to items: streaming equals offline through decoding, resampling and cutting."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.formats import MODEL_RATE, Decoder, Encoding, Resampler
from engine.boundary.items import AudioItem, ItemCutter

VOXTRAL = (1280, 680, 40)
DELAY_POSITIONS = 6


def recording(encoding: Encoding, samples: int) -> bytes:
    random = np.random.default_rng(samples)
    if encoding is Encoding.FLOAT32:
        return random.uniform(-1, 1, samples).astype("<f4").tobytes()
    return random.bytes(samples * encoding.sample_bytes)


def items_of(encoding: Encoding, rate: int, data: bytes, edges: list[int]) -> list[AudioItem]:
    decoder, resampler, cutter = Decoder(encoding), Resampler(rate), ItemCutter(*VOXTRAL)
    items = [item for a, b in pairwise(edges) for item in cutter.cut(resampler.resample(decoder.decode(data[a:b])))]
    return items + cutter.cut(resampler.flush()) + cutter.flush(DELAY_POSITIONS)


def as_rows(items: list[AudioItem]) -> list[tuple[int, int, int, bytes | None]]:
    return [(i.offset, i.length, i.sample, None if i.pcm is None else i.pcm.tobytes()) for i in items]


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 44100, 48000])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_one_byte_at_a_time_gives_identical_items(encoding: Encoding, rate: int) -> None:
    data = recording(encoding, rate // 5 + 3)
    whole = items_of(encoding, rate, data, [0, len(data)])
    assert as_rows(items_of(encoding, rate, data, list(range(len(data) + 1)))) == as_rows(whole)
    positions = -(-round((rate // 5 + 3) * MODEL_RATE / rate) // 1280)
    assert sum(item.length for item in whole) == positions + DELAY_POSITIONS


@settings(max_examples=60, deadline=None)
@given(
    encoding=st.sampled_from(Encoding),
    rate=st.sampled_from([8000, 16000, 22050, 24000, 44100, 48000]),
    samples=st.integers(0, 12_000),
    cuts=st.lists(st.floats(0, 1), max_size=15),
)
def test_any_split_of_the_bytes_gives_identical_items(
    encoding: Encoding, rate: int, samples: int, cuts: list[float]
) -> None:
    data = recording(encoding, samples)
    edges = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    assert as_rows(items_of(encoding, rate, data, edges)) == as_rows(items_of(encoding, rate, data, [0, len(data)]))
