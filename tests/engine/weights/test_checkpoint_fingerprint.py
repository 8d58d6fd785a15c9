"""Fingerprints of weights depend on their content, not on their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.weights.checkpoint import BLOCK_BYTES, MAX_BLOCKS, fingerprint


def folder(path: Path, data: bytes, **others: bytes) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(data)
    for name, content in others.items():
        (path / name.replace("_", ".")).write_bytes(content)
    return path


def test_equal_weights_have_equal_marks_wherever_they_are(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", b"weights", README_md=b"one", digests_json=b"{}")
    second = folder(tmp_path / "b", b"weights", README_md=b"another")
    assert fingerprint(first) == fingerprint(second) != ""


def test_one_byte_of_a_small_file_makes_a_difference(tmp_path: Path) -> None:
    assert fingerprint(folder(tmp_path / "a", b"weights")) != fingerprint(folder(tmp_path / "b", b"weighty"))
    assert fingerprint(folder(tmp_path / "c", b"")) != fingerprint(folder(tmp_path / "d", b"", more_bin=b"x"))


def test_large_files_are_sampled_all_over_and_to_the_end(tmp_path: Path) -> None:
    data = np.zeros(4 * MAX_BLOCKS * BLOCK_BYTES // 2, np.int16)
    marks = {fingerprint(folder(tmp_path / "plain", data.tobytes()))}
    for name, change in {"first": slice(0, 1), "last": slice(-1, None), "most": slice(None, None, 1000)}.items():
        other = data.copy()
        other[change] = 1
        marks.add(fingerprint(folder(tmp_path / name, other.tobytes())))
    marks.add(fingerprint(folder(tmp_path / "longer", data.tobytes() + b"x")))
    assert len(marks) == 5


def test_a_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    assert len(fingerprint(file)) == 16
