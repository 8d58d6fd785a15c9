"""A short mark by which two sets of weights are told apart, whatever they are called.

Reading all of a large checkpoint once more would make every start longer, so large files are sampled: blocks all over
them, and their size. Weights that were trained differ nearly everywhere, so a few hundred blocks find them out; this is
no proof against somebody who wants two files to look alike.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ort", ".onnx")
BLOCK_BYTES = 1 << 16
MOST_BLOCKS = 256


def fingerprint(path: Path) -> str:
    """Of a checkpoint: a file, or all files with weights in a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in WEIGHT_FILES)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        # Whole blocks from the first to the last one.
        count = min(MOST_BLOCKS, -(-size // BLOCK_BYTES))
        last = max(0, size - BLOCK_BYTES)
        with file.open("rb") as data:
            for index in range(count):
                data.seek(last * index // max(1, count - 1))
                digest.update(data.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
