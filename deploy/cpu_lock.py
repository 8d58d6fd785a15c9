"""Writes requirements-cpu.lock, the locked packages of the CPU image: requirements.lock without CUDA and Triton.

    python deploy/cpu_lock.py

`make lock` runs it. torch and torchaudio stay for arm64 only, where the package index has builds for the CPU. On x86-64
the Dockerfile installs the same versions from PyTorch's index of CPU builds.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADER = "# Written by `make lock` from requirements.lock.\n"
FROM_PYTORCH = ("torch", "torchaudio")
ONLY_CUDA = re.compile(r"(nvidia|cuda)-|triton$")


def cpu_lock(lock: str) -> str:
    entries = [entry for entry in re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE) if not entry.startswith("#")]
    kept = []
    for entry in entries:
        name = entry.partition("==")[0]
        if ONLY_CUDA.match(name):
            continue
        if name in FROM_PYTORCH:
            entry = re.sub(r"^(\S+) ", r"\1 ; platform_machine != 'x86_64' ", entry)
        kept.append(entry)
    return HEADER + "".join(kept)


if __name__ == "__main__":
    (ROOT / "requirements-cpu.lock").write_text(cpu_lock((ROOT / "requirements.lock").read_text()))
