"""An engine computes without the parts of torch that are left out, and its process collects garbage again."""

from __future__ import annotations

import subprocess
import sys

import pytest

QUICK = """
import gc, sys
import engine.server.fast_import
import torch
from pathlib import Path
has_gpu = Path("/dev/nvidiactl").exists()
assert has_gpu or not vars(sys.modules["torch._meta_registrations"]).get("register_meta")
assert gc.isenabled() and gc.get_freeze_count() > 10_000
from engine.runner.windowed.decoder import compiled_decode
from tests.engine.runner.windowed.test_decoder_traced import heard, in_8_bits
model = in_8_bits()
with torch.inference_mode():
    sound = heard(model, [9])
    plain, ours = (
        way(torch.full((1, 2), 3), torch.arange(2)[None], model.new_state(1, 2), sound)
        for way in (model.decode, compiled_decode(model, 2))
    )
assert all(map(torch.equal, plain, ours))
"""
LATE = """
import gc, sys
import torch
import engine.server.fast_import
assert vars(sys.modules["torch._meta_registrations"]).get("register_meta")
assert gc.isenabled() and not gc.get_freeze_count()
"""


@pytest.mark.parametrize("script", [QUICK, LATE], ids=["before torch", "after torch"])
def test_modules_are_imported_in_a_short_way_unless_torch_is_there(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
