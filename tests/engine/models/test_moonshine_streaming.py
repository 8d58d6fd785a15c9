from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import EncoderState, StreamingEncoder, UntrainedBlock
from tests.training.tiny import SPEC
from tests.training.tiny import TINY as CONFIG


def model(seed: int = 0) -> Moonshine:
    torch.manual_seed(seed)
    return Moonshine(CONFIG).eval()


def audio(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.1


def encode(encoder: StreamingEncoder, sound: Tensor, cuts: list[int]) -> Tensor:
    state = encoder.start()
    parts = []
    for part in torch.tensor_split(sound, sorted(cuts)):
        frames, state = encoder.step(part, state)
        parts.append(frames)
    return torch.cat([*parts, encoder.finish(state)])


@settings(max_examples=15, deadline=None)
@given(
    block=st.sampled_from(SPEC.blocks),
    samples=st.integers(0, 30_000),
    cuts=st.lists(st.integers(0, 30_000), max_size=12),
)
def test_any_cutting_of_the_audio_gives_the_same_frames_to_the_last_bit(
    block: int, samples: int, cuts: list[int]
) -> None:
    encoder = StreamingEncoder(model().encoder, SPEC, block)
    sound = audio(samples)
    assert torch.equal(encode(encoder, sound, cuts), encode(encoder, sound, []))


def test_a_block_comes_as_soon_as_its_look_ahead_is_there_and_not_before() -> None:
    encoder = StreamingEncoder(model().encoder, SPEC, 5)
    needed = 5 * 384 + encoder.delay_samples
    frames, state = encoder.step(audio(needed - 1), encoder.start())
    assert frames.shape == (0, 16)
    frames, _ = encoder.step(audio(1), state)
    assert frames.shape == (5, 16)


def test_frames_given_out_do_not_depend_on_what_comes_later() -> None:
    encoder = StreamingEncoder(model().encoder, SPEC, 5)
    same = audio(12_000)
    first, _ = encoder.step(torch.cat((same, audio(8_000, seed=1))), encoder.start())
    second, _ = encoder.step(torch.cat((same, audio(8_000, seed=2))), encoder.start())
    settled = (12_000 - encoder.delay_samples) // (5 * 384) * 5
    assert torch.equal(first[:settled], second[:settled])
    assert not torch.equal(first, second)


def test_a_stream_stays_as_small_as_it_is() -> None:
    encoder = StreamingEncoder(model().encoder, SPEC, 5)

    def size(state: EncoderState) -> int:
        return sum(part.numel() for part in (state.audio, state.waiting, state.keys_values))

    _, state = encoder.step(audio(16_000), encoder.start())
    early = size(state)
    for second in range(20):
        _, state = encoder.step(audio(16_000, seed=second), state)
    assert size(state) <= early + 5 * 384
    assert state.position > SPEC.left


def test_streams_share_weights_and_nothing_else() -> None:
    encoder = StreamingEncoder(model().encoder, SPEC, 5)
    alone = encode(encoder, audio(9_000), [])
    one, other = encoder.start(), encoder.start()
    parts = []
    for piece, noise in zip(audio(9_000).split(1_000), audio(9_000, seed=3).split(1_000), strict=True):
        frames, one = encoder.step(piece, one)
        _, other = encoder.step(noise, other)
        parts.append(frames)
    assert torch.equal(torch.cat([*parts, encoder.finish(one)]), alone)


def test_audio_that_is_not_numbers_is_refused_and_the_stream_goes_on() -> None:
    encoder = StreamingEncoder(model().encoder, SPEC, 5)
    _, state = encoder.step(audio(3_000), encoder.start())
    with pytest.raises(ValueError, match="NaN or infinite"):
        encoder.step(torch.tensor([0.0, float("nan")]), state)
    frames, _ = encoder.step(audio(6_000, seed=1), state)
    expected, _ = encoder.step(torch.cat((audio(3_000), audio(6_000, seed=1))), encoder.start())
    assert torch.equal(frames, expected)


def test_a_block_it_was_not_trained_for_is_refused() -> None:
    with pytest.raises(UntrainedBlock, match="blocks of 5 and 10 frames, not of 7"):
        StreamingEncoder(model().encoder, SPEC, 7)
