"""Raw sample formats: bad input, exact values, and the same samples however the bytes are cut."""

from __future__ import annotations

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audio.errors import AudioError, BadSamples
from audio.formats import MAX_OVERSHOOT, Decoder, Encoding


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_float32_that_is_not_a_number_is_refused(value: float) -> None:
    with pytest.raises(BadSamples, match="NaN or infinity") as error:
        Decoder(Encoding.FLOAT32).decode(floats(0.1, value, 0.2))
    assert isinstance(error.value, AudioError)
    assert error.value.code == "invalid_samples"


@pytest.mark.parametrize("value", [12000.0, -12000.0])
def test_float32_far_out_of_range_names_the_likely_cause(value: float) -> None:
    with pytest.raises(BadSamples, match=r"holds 12000.*divide integer samples by their full scale"):
        Decoder(Encoding.FLOAT32).decode(floats(0.0, value))


def test_a_refused_piece_leaves_the_decoder_as_it_was() -> None:
    decoder = Decoder(Encoding.FLOAT32)
    sound = floats(0.25, 0.5)
    assert decoder.decode(sound[:5]).tolist() == [0.25]
    with pytest.raises(BadSamples):
        decoder.decode(sound[5:] + floats(np.nan))
    assert decoder.decode(sound[5:]).tolist() == [0.5]
    assert decoder.flush() == 0


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="pcm24"):
        Decoder("pcm24")  # type: ignore[arg-type]


def test_slight_overshoot_is_clipped_and_full_scale_is_kept() -> None:
    samples = Decoder(Encoding.FLOAT32).decode(floats(1.0, -1.0, 1.25, -MAX_OVERSHOOT, MAX_OVERSHOOT))
    assert samples.tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]


def test_float32_is_a_view_of_the_bytes() -> None:
    data = floats(0.5, -0.5)
    samples = Decoder(Encoding.FLOAT32).decode(data)
    assert np.shares_memory(samples, np.frombuffer(data, np.uint8))


def test_pcm16_is_exact_at_both_ends_of_the_scale() -> None:
    samples = Decoder(Encoding.PCM16).decode(np.array([-32768, -1, 0, 1, 32767], "<i2").tobytes())
    assert samples.dtype == np.float32
    assert samples.tolist() == [-1.0, -1 / 32768, 0.0, 1 / 32768, 32767 / 32768]


@pytest.mark.parametrize("encoding", list(Encoding))
def test_nothing_in_nothing_out(encoding: Encoding) -> None:
    decoder = Decoder(encoding)
    assert len(decoder.decode(b"")) == 0
    assert decoder.flush() == 0


@pytest.mark.parametrize(
    ("encoding", "data", "dangling"),
    [
        (Encoding.PCM16, b"\x00\x01\x02", 1),
        (Encoding.FLOAT32, b"\x00" * 7, 3),
        (Encoding.FLOAT32, b"\x00" * 5, 1),
        (Encoding.ULAW, b"\x00" * 3, 0),
        (Encoding.ALAW, b"\x00" * 3, 0),
    ],
)
def test_flush_reports_the_bytes_of_an_unfinished_sample_and_forgets_them(
    encoding: Encoding, data: bytes, dangling: int
) -> None:
    decoder = Decoder(encoding)
    decoder.decode(data)
    assert decoder.flush() == dangling
    assert decoder.flush() == 0
    assert len(decoder.decode(data)) == len(data) // encoding.sample_bytes


def test_memoryviews_are_taken_too() -> None:
    decoder = Decoder(Encoding.PCM16)
    data = memoryview(np.array([1, 2, 3], "<i2").tobytes())
    parts = [decoder.decode(data[:3]), decoder.decode(data[3:])]
    assert (np.concatenate(parts) * 32768).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("encoding", "codec"), [(Encoding.ULAW, "pcm_mulaw"), (Encoding.ALAW, "pcm_alaw")])
def test_every_g711_code_agrees_with_an_independent_decoder(encoding: Encoding, codec: str) -> None:
    codes = bytes(range(256))
    context = av.CodecContext.create(codec, "r")
    context.sample_rate = 8000
    context.layout = "mono"
    (frame,) = context.decode(av.Packet(codes))
    assert frame.format.name == "s16"
    expected = frame.to_ndarray()[0].astype(np.float32) / 32768
    assert Decoder(encoding).decode(codes).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("encoding", "code", "value"),
    # Ends of the decoder output columns of ITU-T G.711, tables 1 and 2 (A-law, 13 bits) and 2a and 2b (u-law, 14 bits).
    [
        (Encoding.ULAW, 0x80, 8031 * 4),
        (Encoding.ULAW, 0x00, -8031 * 4),
        (Encoding.ULAW, 0xFF, 0),
        (Encoding.ULAW, 0x7F, 0),
        (Encoding.ULAW, 0xFE, 2 * 4),
        (Encoding.ALAW, 0xAA, 4032 * 8),
        (Encoding.ALAW, 0x2A, -4032 * 8),
        (Encoding.ALAW, 0xD5, 1 * 8),
        (Encoding.ALAW, 0x55, -1 * 8),
    ],
)
def test_g711_values_of_the_standard(encoding: Encoding, code: int, value: int) -> None:
    assert Decoder(encoding).decode(bytes([code])).tolist() == [value / 32768]


@pytest.mark.parametrize("encoding", list(Encoding))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_split_of_the_bytes_gives_the_same_samples(encoding: Encoding, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 64))
    if encoding is Encoding.FLOAT32:
        sound = np.random.default_rng(count).uniform(-1.2, 1.2, count).astype("<f4").tobytes()
    else:
        sound = data.draw(st.binary(min_size=count, max_size=count))
    sound += b"\x00" * data.draw(st.integers(0, 3))
    whole = Decoder(encoding)
    expected, dangling = whole.decode(sound), whole.flush()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sound)), max_size=10)))
    for edges in ([0, *cuts, len(sound)], list(range(len(sound) + 1))):
        decoder = Decoder(encoding)
        parts = [decoder.decode(sound[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
        assert b"".join(part.tobytes() for part in parts) == expected.tobytes()
        assert decoder.flush() == dangling
