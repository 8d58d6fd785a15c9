"""Moonshine against transformers, alone and in ragged batches; and its weights out of quantised graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MoonshineConfig as ReferenceConfig
from transformers import MoonshineForConditionalGeneration

from engine.models import seq2seq
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.seq2seq import Int8Linear, quantise_linears
from engine.options import cache_folder
from engine.weights.onnx import moonshine_tensors

SIZES = {"hidden_size": 48, "intermediate_size": 96, "vocab_size": 120}
LAYERS = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3}
HEADS = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}


@pytest.fixture(scope="module")
def reference() -> MoonshineForConditionalGeneration:
    torch.manual_seed(1)
    config = ReferenceConfig(**SIZES, **LAYERS, **HEADS, partial_rotary_factor=0.62, pad_token_id=0)
    return MoonshineForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def model(reference: MoonshineForConditionalGeneration) -> Moonshine:
    config = MoonshineConfig.from_json(reference.config.to_dict())
    return Moonshine.load(config, reference.state_dict())


def say(model: Moonshine, audio: Tensor, lengths: list[int], tokens: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        encoded = model.encode(audio, lengths)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden, attention = model.decode(tokens, positions, model.new_state(len(tokens), 16), encoded)
        return model.logits(hidden), attention


def test_unused_or_missing_tensors_are_errors(model: Moonshine, reference: MoonshineForConditionalGeneration) -> None:
    tensors = dict(reference.state_dict())
    with pytest.raises(RuntimeError, match="surprise"):
        Moonshine.load(model.config, {**tensors, "model.surprise": torch.zeros(1)})
    tensors.pop("model.encoder.layer_norm.weight")
    with pytest.raises(RuntimeError, match="layer_norm"):
        Moonshine.load(model.config, tensors)


def test_grouped_heads_are_refused(reference: MoonshineForConditionalGeneration) -> None:
    config = {**reference.config.to_dict(), "decoder_num_key_value_heads": 2}
    with pytest.raises(ValueError, match="grouped"):
        MoonshineConfig.from_json(config)


def test_same_logits_as_transformers(model: Moonshine, reference: MoonshineForConditionalGeneration) -> None:
    audio = torch.randn(1, 16_000) * 0.1
    tokens = torch.tensor([[1, 40, 7, 99, 3]])
    with torch.inference_mode():
        expected = reference(input_values=audio, decoder_input_ids=tokens).logits
    logits, attention = say(model, audio, [16_000], tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(attention.sum(dim=-1), torch.ones(1, 5))


def test_token_by_token_is_the_same_as_all_at_once(model: Moonshine) -> None:
    audio = torch.randn(1, 12_000) * 0.1
    tokens = torch.tensor([[1, 40, 7, 99]])
    at_once, _ = say(model, audio, [12_000], tokens)
    with torch.inference_mode():
        encoded, state = model.encode(audio, [12_000]), model.new_state(1, 16)
        for position in range(4):
            at = torch.tensor([[position]])
            hidden, _ = model.decode(tokens[:, position : position + 1], at, state, encoded)
        logits = model.logits(hidden)[:, 0]
    torch.testing.assert_close(logits, at_once[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shorter", [Moonshine.min_samples, 5_000, 15_999])
def test_ragged_batch_is_each_row_alone(model: Moonshine, shorter: int) -> None:
    long, short = torch.randn(16_000) * 0.1, torch.randn(shorter) * 0.1
    tokens = torch.tensor([[1, 5, 6], [1, 8, 9]])
    batch = torch.stack([long, torch.nn.functional.pad(short, (0, 16_000 - shorter))])
    together, _ = say(model, batch, [16_000, shorter], tokens)
    for row, audio in enumerate((long, short)):
        alone, _ = say(model, audio[None], [len(audio)], tokens[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)


def test_8_bit_encoder_stays_close_and_does_not_mix_rows(
    reference: MoonshineForConditionalGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seq2seq, "SMALLEST_8_BIT", 0)
    exact = Moonshine.load(MoonshineConfig.from_json(reference.config.to_dict()), reference.state_dict())
    quantised = Moonshine.load(exact.config, reference.state_dict())
    quantised.quantise()
    audio = torch.randn(1, 16_000) * 0.1
    with torch.inference_mode():
        keys, expected = quantised.encode(audio, [16_000]).keys, exact.encode(audio, [16_000]).keys
    assert float((keys - expected).norm() / expected.norm()) < 0.1
    assert not torch.equal(keys, expected)


def test_only_large_matrices_become_8_bit() -> None:
    layers = torch.nn.ModuleDict({"small": torch.nn.Linear(416, 416), "large": torch.nn.Linear(416, 832)})
    quantise_linears(layers)
    assert isinstance(layers["small"], torch.nn.Linear) and isinstance(layers["large"], Int8Linear)


def test_a_row_of_an_8_bit_layer_does_not_depend_on_its_neighbours_to_the_last_bit() -> None:
    torch.manual_seed(5)
    linear = torch.nn.Linear(48, 32)
    layer = Int8Linear(linear.weight, linear.bias)
    # Rows of other sizes and of other signs: a range that rows share would round them differently.
    rows = torch.randn(7, 48) * torch.logspace(-2, 2, 7)[:, None]
    rows[3].abs_()
    rows[5] = 0.0
    together = layer(rows[None])
    for index in range(7):
        assert torch.equal(layer(rows[None, index : index + 1])[0], together[0, index : index + 1])


@pytest.mark.parametrize("name", ["moonshine-tiny", "moonshine-base"])
def test_published_weights_match_transformers(name: str) -> None:
    folder = cache_folder() / name
    if not folder.exists():
        pytest.skip(f"run `tickertape pull {name}` first")
    from engine.weights.checkpoint import load_speech_model

    model, pieces = load_speech_model(folder)
    assert isinstance(model, Moonshine)
    assert len(pieces) == model.config.vocabulary and pieces.count(b" the") == 1
    config = model.config
    published = ReferenceConfig(
        hidden_size=config.width,
        intermediate_size=config.inner,
        encoder_num_hidden_layers=config.encoder_layers,
        decoder_num_hidden_layers=config.decoder_layers,
        partial_rotary_factor=0.9 if config.width == 288 else 0.62,
    )
    reference = MoonshineForConditionalGeneration(published).eval()
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    reference.load_state_dict(tensors | {"proj_out.weight": tensors["model.decoder.embed_tokens.weight"]})
    audio, tokens = torch.randn(1, 24_000) * 0.1, torch.tensor([[1, 300, 500]])
    with torch.inference_mode():
        expected = reference(input_values=audio, decoder_input_ids=tokens).logits
    torch.testing.assert_close(say(model, audio, [24_000], tokens)[0], expected, atol=1e-3, rtol=1e-4)


def test_not_an_onnx_file(tmp_path: Path) -> None:
    for junk in (b"", b"hello", bytes(range(256)), b"\0\0\0\0ORTM" + bytes(20)):
        with pytest.raises(ValueError, match="ONNX"):
            moonshine_tensors(junk, junk)


def test_initializers_are_dequantised() -> None:
    """A hand-made graph: one matrix product in 8 bits with its scale and zero point, one convolution, one norm."""

    def field(number: int, content: bytes) -> bytes:
        length = bytes([len(content) & 0x7F | 0x80, len(content) >> 7])
        return bytes([number << 3 | 2]) + length + content

    def tensor(name: str, dtype: int, dims: list[int], raw: bytes) -> bytes:
        sizes = b"".join(bytes([1 << 3, size]) for size in dims)
        return field(5, sizes + bytes([2 << 3, dtype]) + field(8, name.encode()) + field(9, raw))

    def node(inputs: list[str], output: str) -> bytes:
        names = b"".join(field(1, name.encode()) for name in inputs)
        return field(1, names + field(2, output.encode()))

    one = np.array([1.0], np.float32).tobytes()
    half = np.array([0.5], np.float32).tobytes()
    encoder = (
        tensor("w_quantized", 2, [2, 2], bytes([10, 12, 14, 8]))
        + tensor("w_scale", 1, [1], half)
        + tensor("w_zero_point", 2, [1], bytes([10]))
        + tensor("conv1.weight_quantized", 3, [1, 1, 1], bytes([254]))
        + tensor("conv1.weight_scale", 1, [1], half)
        + tensor("conv1.weight_zero_point", 1, [1], one)
        + tensor("layers.0.input_layernorm.weight", 1, [1], half)
        + node(["x_quantized", "w_quantized"], "/layers.0/mlp/fc1/MatMul_output_0_output_quantized")
    )
    decoder = tensor("model.decoder.embed_tokens.weight", 1, [1, 1], one)
    found = moonshine_tensors(field(7, encoder), field(7, decoder))
    assert found["model.encoder.layers.0.mlp.fc1.weight"].tolist() == [[0.0, 2.0], [1.0, -1.0]]
    assert found["model.encoder.conv1.weight"].tolist() == [[[0.0]]]
    assert found["model.encoder.layers.0.input_layernorm.weight"].tolist() == [0.5]


def test_a_loaded_model_draws_no_weights_and_shares_those_of_the_file(
    reference: MoonshineForConditionalGeneration, model: Moonshine
) -> None:
    config, tensors = MoonshineConfig.from_json(reference.config.to_dict()), reference.state_dict()
    before = torch.get_rng_state()
    loaded = Moonshine.load(config, tensors)
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.decoder.embed_tokens.weight"
    assert loaded.decoder.embed_tokens.weight.data_ptr() == tensors[name].data_ptr()
    seq2seq.copy_weights(loaded)
    kept = loaded.decoder.embed_tokens.weight.clone()
    # A file that changes after that changes nothing.
    assert loaded.decoder.embed_tokens.weight.data_ptr() != tensors[name].data_ptr()
    assert torch.equal(kept, model.decoder.embed_tokens.weight)


def test_a_second_encoder_shares_the_decoder_and_keeps_its_own_weights(model: Moonshine) -> None:
    other = model.with_shared_decoder()
    assert other.decoder is model.decoder and other.encoder is not model.encoder
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    changed = {f"encoder.{name}": value + 1.0 for name, value in before.items()}
    other.load_state_dict(changed, strict=False, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items())
    assert all(torch.equal(value, changed[f"encoder.{name}"]) for name, value in other.encoder.state_dict().items())
