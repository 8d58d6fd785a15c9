from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.moonshine import frames_after
from engine.models.moonshine_streaming import StreamingEncoder
from engine.models.seq2seq import Encoded, Int8Linear, cross_keys_values
from tests.training.tiny import SPEC, tiny_model
from training.model import block_plan, decode_known, encode_blocks, encode_whole, rounded


@settings(max_examples=12, deadline=None)
@given(
    block=st.sampled_from(SPEC.blocks),
    samples=st.integers(895, 40_000),
    cuts=st.lists(st.integers(0, 40_000), max_size=8),
)
def test_block_after_block_equals_the_masked_whole(block: int, samples: int, cuts: list[int]) -> None:
    model = tiny_model()
    audio = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.1
    plan = block_plan(frames_after(samples, 3), block, SPEC.look_ahead, SPEC.left, "cpu")
    with torch.no_grad():
        whole = encode_blocks(model.encoder, SPEC.norm, audio[None], plan)[0][0]
    encoder = StreamingEncoder(model.encoder, SPEC, block)
    state = encoder.start()
    parts = []
    for part in torch.tensor_split(audio, sorted(cuts)):
        frames, state = encoder.step(part, state)
        parts.append(frames)
    parts.append(encoder.finish(state))
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4, rtol=0)


def test_what_a_block_looks_ahead_to_is_trained_as_it_is_heard() -> None:
    model, block = tiny_model(), 10
    audio = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 0.1
    plan = block_plan(frames_after(20_000, 3), block, SPEC.look_ahead, SPEC.left, "cpu")
    with torch.no_grad():
        _, ahead = encode_blocks(model.encoder, SPEC.norm, audio[None], plan)
    encoder = StreamingEncoder(model.encoder, SPEC, block)
    state, blocks = encoder.start(), 0
    for part in audio.split(384):
        frames, state = encoder.step(part, state)
        if len(frames):
            assert torch.allclose(state.ahead, ahead[0, plan.looking == blocks], atol=1e-4, rtol=0)
            blocks += 1
    assert blocks == 4


def test_rows_of_a_padded_batch_are_as_they_are_alone() -> None:
    model = tiny_model()
    audio = torch.randn(2, 20_000) * 0.1
    audio[1, 9_000:] = 0
    frames = [frames_after(20_000, 3), frames_after(9_000, 3)]
    with torch.no_grad():
        plan = block_plan(frames[0], 5, SPEC.look_ahead, SPEC.left, "cpu")
        both = encode_blocks(model.encoder, SPEC.norm, audio, plan, frames=torch.tensor(frames))[0]
        plan = block_plan(frames[1], 5, SPEC.look_ahead, SPEC.left, "cpu")
        alone = encode_blocks(model.encoder, SPEC.norm, audio[1:, :9_000], plan)[0]
    assert torch.allclose(both[1, : frames[1]], alone[0], atol=1e-5)


def test_the_whole_pass_is_the_published_encoder() -> None:
    model = tiny_model()
    audio = torch.randn(2, 9_000) * 0.1
    with torch.no_grad():
        assert torch.allclose(encode_whole(model.encoder, audio), model.encoder(audio, [9_000, 9_000])[0], atol=1e-5)


def test_a_known_text_decodes_as_the_engine_decodes_it() -> None:
    model = tiny_model()
    frames = torch.randn(2, 12, 16)
    tokens = torch.tensor([[1, 7, 9, 30], [1, 4, 4, 5]])
    with torch.no_grad():
        heard = model.cross_kv(frames)
        encoded = Encoded(*cross_keys_values(heard, 2, 2), [12, 12])
        expected, _ = model.decode(tokens, torch.arange(4).expand(2, -1), model.new_state(2, 4), encoded)
        assert torch.allclose(decode_known(model, tokens, heard), expected, atol=1e-5)


def test_rounded_products_are_nearly_those_of_the_8_bit_layers() -> None:
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(10, 64)
    with torch.no_grad():
        exact, engine, training = layer(x), Int8Linear(layer.weight, layer.bias)(x), rounded(layer, x)
    assert (engine - training).abs().max() < 0.03
    assert 0 < (exact - training).abs().max() < 0.03


def test_gradients_pass_through_rounding() -> None:
    layer = torch.nn.Linear(8, 8)
    rounded(layer, torch.randn(3, 8)).sum().backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.any())
