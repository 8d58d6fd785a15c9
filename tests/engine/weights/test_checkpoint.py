"""Checkpoint directories: a mismatch is refused by name, before anything is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights.checkpoint import BadCheckpoint, read_config, read_tensors

SHAPES = {"model.a.weight": (2, 3), "model.b.bias": (4,)}
GOOD = {"model.a.weight": torch.ones(2, 3), "model.b.bias": torch.zeros(4)}
TIED = {"head.weight": "model.a.weight"}


def write(directory: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    save_file(tensors, directory / name)
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    return read_tensors(directory, SHAPES, torch.float32, "cpu", tied=TIED)


def test_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"model\.b\.bias is missing"):
        read(write(tmp_path, {"model.a.weight": GOOD["model.a.weight"]}))


def test_extra_tensor(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"surprise is not a tensor of this model"):
        read(write(tmp_path, {**GOOD, "surprise": torch.ones(1)}))


def test_misshaped_tensor(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"model\.a\.weight has shape \[3, 2\] instead of \[2, 3\]"):
        read(write(tmp_path, {**GOOD, "model.a.weight": torch.ones(3, 2)}))


def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"and 4 more$"):
        read(write(tmp_path, {**GOOD, **{f"extra {i}": torch.ones(1) for i in range(12)}}))


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"lacks model\.safetensors"):
        read(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    index = {"weight_map": {"model.a.weight": "one.safetensors", "model.b.bias": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write(tmp_path, {"model.a.weight": GOOD["model.a.weight"]}, "one.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lacks two\.safetensors"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["[", "[]", '{"weight_map": 3}', "{}"])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="not a weight index"):
        read(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    index = {"weight_map": {"model.a.weight": "one.safetensors", "model.b.bias": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write(tmp_path, GOOD, "one.safetensors")
    write(tmp_path, {"model.b.bias": GOOD["model.b.bias"]}, "two.safetensors")
    with pytest.raises(BadCheckpoint, match="is stored twice"):
        read(tmp_path)


def test_tied_copy_must_be_equal(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"head\.weight differs from model\.a\.weight"):
        read(write(tmp_path, {**GOOD, "head.weight": torch.zeros(2, 3)}))


@pytest.mark.parametrize("text", ["", "nonsense", "[]"])
def test_bad_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no readable config\.json"):
        read_config(tmp_path)


def test_whole_sharded_and_tied(tmp_path: Path) -> None:
    whole = read(write(tmp_path, {**GOOD, "head.weight": torch.ones(2, 3)}))
    assert set(whole) == set(SHAPES)
    index = {"weight_map": {"model.a.weight": "one.safetensors", "model.b.bias": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, file in index["weight_map"].items():
        write(tmp_path, {name: GOOD[name]}, file)
    sharded = read(tmp_path)
    assert all(torch.equal(sharded[name], GOOD[name]) for name in SHAPES)


def test_names_of_older_releases(tmp_path: Path) -> None:
    shapes = {"model.language_model.norm.weight": (2,), "model.audio_tower.norm.weight": (3,), "lm_head.weight": (1, 2)}
    old = {
        "language_model.model.norm.weight": torch.ones(2),
        "audio_tower.norm.weight": torch.ones(3),
        "language_model.lm_head.weight": torch.ones(1, 2),
    }
    assert set(read_tensors(write(tmp_path, old), shapes, torch.bfloat16, "cpu")) == set(shapes)
