"""Voxtral's dimensions, names and angles; the numbers themselves are compared in tests/engine/runner."""

from __future__ import annotations

from decimal import Decimal, getcontext
from typing import Any

import pytest
import torch
from transformers import VoxtralRealtimeConfig, VoxtralRealtimeForConditionalGeneration

from engine.models.layers import inverse_frequencies, rotary_angles
from engine.models.voxtral_realtime import VoxtralConfig, VoxtralRealtime, tensor_shapes, voxtral_mini_4b, weight_bytes

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def small_reference() -> Any:
    audio = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "num_mel_bins": 16, "sliding_window": 42,
    }  # fmt: skip
    text = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24,
    }  # fmt: skip
    return VoxtralRealtimeConfig(audio_config=audio, text_config=text)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="'whisper'.*'voxtral_realtime'"):
        VoxtralConfig.from_dict({"model_type": "whisper"})


@pytest.mark.parametrize(("part", "field"), [(None, "text_config"), ("audio_config", "num_mel_bins")])
def test_a_config_that_lacks_a_field_is_refused_by_name(part: str | None, field: str) -> None:
    config = small_reference().to_dict()
    del (config[part] if part else config)[field]
    with pytest.raises(ValueError, match=f"lacks '{field}'"):
        VoxtralConfig.from_dict(config)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("audio_config", "hidden_act", "relu"),
        ("text_config", "hidden_act", "gelu"),
        (None, "projector_hidden_act", "x"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(part: str | None, field: str, value: str) -> None:
    config = small_reference().to_dict()
    (config[part] if part else config)[field] = value
    with pytest.raises(ValueError, match=field):
        VoxtralConfig.from_dict(config)


def test_other_rotary_kinds_are_refused() -> None:
    config = small_reference().to_dict()
    config["text_config"]["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e6}
    with pytest.raises(ValueError, match=r"text_config\.rope_type = 'yarn'"):
        VoxtralConfig.from_dict(config)


def test_names_and_shapes_are_those_of_the_reference() -> None:
    reference = VoxtralRealtimeForConditionalGeneration(small_reference())
    wanted = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    del wanted["lm_head.weight"]  # tied to the embedding
    config = VoxtralConfig.from_dict(reference.config.to_dict())
    assert tensor_shapes(config) == wanted


def test_full_dimensions() -> None:
    config = voxtral_mini_4b()
    assert weight_bytes(config, torch.bfloat16) == pytest.approx(8.86e9, rel=0.01)
    assert config.samples_per_position == 1280


def test_a_tensor_too_many_is_refused() -> None:
    config = VoxtralConfig.from_dict(small_reference().to_dict())
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
    tensors["model.extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"model\.extra"):
        VoxtralRealtime(config, tensors)


@pytest.mark.parametrize("position", [5, 50_000_000, 200_000_003])
def test_angles_are_exact_at_any_position(position: int) -> None:
    """Against 60-digit arithmetic: position 50,000,000 (encoder row 200,000,000) is as good as position 5."""
    getcontext().prec = 60
    frequencies = inverse_frequencies(128, 1e6, "cpu")
    cosine, sine = rotary_angles(torch.tensor([position]), frequencies)
    for index, frequency in enumerate(frequencies.tolist()):
        reduced = float(position * Decimal(frequency) % (2 * PI))
        exact = torch.tensor(reduced, dtype=torch.float64)
        assert abs(cosine[0, index].item() - exact.cos().item()) < 1e-6
        assert abs(sine[0, index].item() - exact.sin().item()) < 1e-6


def test_frequencies_are_the_float32_ones_of_the_reference() -> None:
    reference = VoxtralRealtimeForConditionalGeneration(small_reference()).model.language_model.rotary_emb.inv_freq
    assert torch.equal(inverse_frequencies(16, 1e6, "cpu").float(), reference)
