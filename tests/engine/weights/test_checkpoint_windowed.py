from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.moonshine import Moonshine
from engine.models.seq2seq import Int8Linear
from engine.weights.checkpoint import BadCheckpoint, description, load_streaming_weights, pack_rows
from tests.training.tiny import SPEC
from tests.training.tiny import TINY as CONFIG

TINY = description(SPEC, "tiny")


def described(**changes: object) -> dict[str, str]:
    """What a file says of itself, with changes; None takes a word out."""
    ((name, text),) = TINY.items()
    stored = {key: value for key, value in {**json.loads(text), **changes}.items() if value is not None}
    return {name: json.dumps(stored)}


def model(seed: int = 0) -> Moonshine:
    torch.manual_seed(seed)
    return Moonshine(CONFIG).eval()


def write(source: Moonshine, file: Path, metadata: dict[str, str] | None) -> None:
    tensors: dict[str, Tensor] = {}
    for name, value in source.state_dict().items():
        if name.startswith(("encoder.", "cross_kv.")):
            tensors |= pack_rows(name, value) if value.ndim == 2 else {name: value}
    save_file(tensors, file, metadata=metadata)


def test_a_file_brings_its_weights_and_what_they_were_trained_for(tmp_path: Path) -> None:
    source, target = model(seed=1), model(seed=2)
    write(source, tmp_path / "weights.safetensors", TINY)
    assert load_streaming_weights(target, tmp_path / "weights.safetensors") == SPEC
    for name, value in source.state_dict().items():
        if name.startswith(("encoder.", "cross_kv.")):
            assert torch.allclose(target.state_dict()[name], value, atol=value.abs().max().item() / 120)
        else:
            assert torch.equal(target.state_dict()[name], model(seed=2).state_dict()[name])


def test_quantising_again_loses_nothing(tmp_path: Path) -> None:
    write(model(seed=1), tmp_path / "weights.safetensors", TINY)
    once, twice = model(), model()
    load_streaming_weights(once, tmp_path / "weights.safetensors")
    write(once, tmp_path / "again.safetensors", TINY)
    load_streaming_weights(twice, tmp_path / "again.safetensors")
    x = torch.randn(3, 16)
    first, second = (Int8Linear(loaded.cross_kv.weight, None)(x) for loaded in (once, twice))
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (None, "is not a streaming encoder"),
        ({"tickertape-streaming-encoder": '{"format": 9}'}, "its format is 9"),
        (described(sample_rate=8_000), "trained with sample_rate 8000; this engine uses 16000"),
        (described(samples_per_frame=320), "trained with samples_per_frame 320; this engine uses 384"),
        (described(look_ahead=None), "is not a streaming encoder"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, metadata: dict[str, str] | None, reason: str) -> None:
    write(model(), tmp_path / "weights.safetensors", metadata)
    with pytest.raises(BadCheckpoint, match=reason):
        load_streaming_weights(model(), tmp_path / "weights.safetensors")


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save_file(
        {"encoder.layer_norm.weight": torch.ones(16)}, tmp_path / "w.safetensors", metadata=description(SPEC, "tiny")
    )
    with pytest.raises(BadCheckpoint, match="lacks"):
        load_streaming_weights(model(), tmp_path / "w.safetensors")


def test_a_file_for_another_size_is_refused(tmp_path: Path) -> None:
    save_file(
        {"encoder.layer_norm.weight": torch.ones(8)}, tmp_path / "w.safetensors", metadata=description(SPEC, "tiny")
    )
    with pytest.raises(BadCheckpoint, match="not a streaming encoder for this model"):
        load_streaming_weights(model(), tmp_path / "w.safetensors")
