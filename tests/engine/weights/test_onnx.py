"""ONNX files: matrices get their names from the nodes or biases beside them; broken files are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.whisper import Whisper, WhisperConfig
from engine.weights.onnx import BadOnnxFile, read_graph, turn_detector_tensors, whisper_tensors
from tests.onnx_files import WHISPER_CONFIG, node, part, tensor, whisper_files


def detector_file(*, packed_zero: bool = True, with_query: bool = True) -> bytes:
    """A query with a bias, a key without one, a convolution with a scale per row and an 8-bit bias."""
    tensors = []
    for name, step in (("val_1", 2.0), ("val_2", 3.0)):
        tensors += [
            tensor(f"{name}_quantized", np.array([[1, 2], [3, 4]], np.int8)),
            tensor(f"{name}_scale", np.array([step, 10 * step], np.float32)),
            tensor(f"{name}_zero_point", np.zeros(2, np.int8)),
        ]
    convolution = "inner.encoder.conv1.weight"
    tensors += [
        tensor(f"{convolution}_quantized", np.array([[[1, 2]], [[3, 4]]], np.int8)),
        tensor(f"{convolution}_scale", np.array([1.0, 0.5], np.float32)),
        tensor(f"{convolution}_zero_point", np.zeros(2, np.int8)),
        tensor("inner.encoder.conv1.bias_quantized", np.array([-7, 300], np.int32), packed=True),
        tensor("inner.encoder.conv1.bias_quantized_scale", np.array([2.0, 2.0], np.float32)),
        tensor("inner.encoder.conv1.bias_quantized_zero_point", np.zeros(2, np.int32), packed=packed_zero),
        tensor("inner.encoder.layers.0.self_attn.q_proj.bias", np.array([5.0, 6.0], np.float32)),
    ]
    read = "_DequantizeLinear_Output"
    nodes = [node([f"norm{read}", f"val_2{read}"], ["keys"]), node([f"norm{read}", f"val_1{read}"], ["product"])]
    if with_query:
        nodes.append(node([f"product{read}", "inner.encoder.layers.0.self_attn.q_proj.bias"], ["queries"]))
    graph = b"".join(part(1, item) for item in nodes) + b"".join(part(5, item) for item in tensors)
    return part(7, graph)


@pytest.mark.parametrize("packed", [False, True])
def test_matrices_get_the_names_of_their_biases(packed: bool) -> None:
    found = turn_detector_tensors(detector_file(packed_zero=packed))
    assert set(found) == {
        "encoder.conv1.weight",
        "encoder.conv1.bias",
        "encoder.layers.0.self_attn.q_proj.weight",
        "encoder.layers.0.self_attn.q_proj.bias",
        "encoder.layers.0.self_attn.k_proj.weight",
    }
    # Columns of a product are rows of a linear layer, each with its own scale.
    assert found["encoder.layers.0.self_attn.q_proj.weight"].tolist() == [[2, 6], [40, 80]]
    assert found["encoder.layers.0.self_attn.k_proj.weight"].tolist() == [[3, 9], [60, 120]]
    assert found["encoder.conv1.weight"].tolist() == [[[1, 2]], [[1.5, 2]]]
    assert found["encoder.conv1.bias"].tolist() == [-14, 600]


def test_a_graph_without_the_expected_nodes_is_refused() -> None:
    with pytest.raises(BadOnnxFile, match="not the turn detector"):
        turn_detector_tensors(detector_file(with_query=False))


@pytest.mark.parametrize("data", [b"", b"no model", b"\xff" * 40])
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises(BadOnnxFile):
        turn_detector_tensors(data)


def test_a_file_that_is_cut_off_is_refused() -> None:
    data = detector_file()
    for length in (10, len(data) // 2, len(data) - 3):
        with pytest.raises(BadOnnxFile):
            read_graph(data[:length])


def test_whispers_matrices_get_the_names_of_their_nodes() -> None:
    encoder, decoder = whisper_files()
    found = whisper_tensors(encoder.data(), decoder.data())
    expected = encoder.weights | decoder.weights
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name
    # Nothing is missing and nothing is left over, also for the model.
    Whisper.load(
        WhisperConfig.from_json(WHISPER_CONFIG),
        {name: torch.from_numpy(np.array(values)) for name, values in found.items()},
    )


def test_a_whisper_file_without_a_scale_is_refused() -> None:
    encoder, decoder = whisper_files()
    broken = decoder.data().replace(b"embed_tokens.weight_merged_0_scale", b"embed_tokens.weight_merged_0_other")
    with pytest.raises(BadOnnxFile, match="embed_tokens.* has no scale"):
        whisper_tensors(encoder.data(), broken)
