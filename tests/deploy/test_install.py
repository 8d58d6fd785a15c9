"""The first minute: what `make` says before it fetches, and which installer it uses with which settings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import install
from realtime.commands.demo import shown_times
from tests.deploy.services import ROOT


def test_a_python_that_is_too_old_gets_one_sentence_with_the_way_out() -> None:
    said = install.wrong_python((3, 9, 2))
    assert "needs Python 3.11 or newer, and this is Python 3.9" in said and "make demo PYTHON=" in said
    assert install.wrong_python((3, 11, 0)) == install.wrong_python((3, 14, 1)) == ""
    # A Python that is too old must be able to read the file, or it shows a syntax error instead.
    ast.parse((ROOT / "deploy/install.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("machine", "has_nvidia", "cpu_torch", "said"),
    [
        ("x86_64", False, False, "3 GB (PyTorch with CUDA, because PyTorch's own index cannot be reached"),
        ("x86_64", True, False, "3 GB (PyTorch with CUDA, for the GPU of this machine"),
        ("x86_64", False, True, "because this machine has no NVIDIA driver"),
        ("aarch64", False, False, "MB, half of it PyTorch"),
    ],
)
def test_what_is_fetched_is_said_with_its_size_and_the_reason(
    machine: str, has_nvidia: bool, cpu_torch: bool, said: str
) -> None:
    assert said in install.announcement(machine, has_nvidia, cpu_torch)


def test_uv_gets_the_indexes_of_pip_unless_it_has_its_own() -> None:
    listing = "global.index-url='https://mirror.example/simple'\n:env:.extra-index-url='file:///a file:///b'\n"
    listing += "install.no-cache-dir='1'\n"
    assert install.of_pip_configuration(listing, {}) == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "file:///a file:///b",
    }
    assert install.of_pip_configuration(listing, {"UV_DEFAULT_INDEX": "x", "UV_INDEX": "y"}) == {}


class Runs:
    """Records commands in place of running them; those whose words include one of `failing` fail."""

    def __init__(self, *failing: str) -> None:
        self.commands: list[list[str]] = []
        self._failing = failing

    def call(self, command: list[str], **options: object) -> int:
        self.commands.append([str(word) for word in command])
        return int(any(word in " ".join(command) for word in self._failing))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    recorded = Runs()
    monkeypatch.setattr(install.subprocess, "call", recorded.call)
    return recorded


def test_packages_are_installed_with_uv_and_progress(runs: Runs, tmp_path: Path) -> None:
    assert install.install("/bin/uv", str(tmp_path), ".[dev]", "https://cpu.example") == 0
    made, installed = runs.commands
    assert made[:2] == ["/bin/uv", "venv"] and "--seed" in made
    assert installed[:3] == ["/bin/uv", "pip", "install"] and installed[-2:] == ["--editable", ".[dev]"]
    assert "https://cpu.example" in installed and "--quiet" not in installed


def test_pip_is_used_where_uv_fails_or_is_not_wanted(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.install(None, str(tmp_path), ".", "") == 0
    assert runs.commands[-1][0] == str(tmp_path / "bin/pip") and "--quiet" not in runs.commands[-1]
    failing = Runs("uv pip install")
    monkeypatch.setattr(install.subprocess, "call", failing.call)
    assert install.install("/bin/uv", str(tmp_path), ".", "") == 0
    assert failing.commands[-1][0] == str(tmp_path / "bin/pip") and "trying pip" in capsys.readouterr().out


@pytest.mark.parametrize(("failing", "said"), [("-m venv", "install python3-venv"), ("pip install", "PIP_INDEX_URL")])
def test_an_installation_that_fails_says_what_to_do(
    failing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install.subprocess, "call", Runs(failing).call)
    assert install.install(None, str(tmp_path), ".", "") == 1
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


def test_uv_that_cannot_be_fetched_leaves_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "ROOT", str(tmp_path))
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    monkeypatch.setattr(install.subprocess, "call", Runs("uv>=0.9").call)
    assert install.find_uv("") is None and "continuing with pip" in capsys.readouterr().out
    assert install.find_uv("pip") is None


def test_an_interrupted_installation_ends_with_one_line(tmp_path: Path) -> None:
    """The interrupt comes while another program installs: here, while it looks for one."""
    program = (
        "import runpy, shutil, sys\n"
        "def interrupt(*_):\n    raise KeyboardInterrupt\n"
        "shutil.which = interrupt\n"
        "sys.argv = ['install.py', sys.argv[1], '--cpu-index', '']\n"
        f"runpy.run_path({str(ROOT / 'deploy/install.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr.startswith("stopped; the same command"), done.stderr


def test_make_demo_hands_the_seconds_of_the_installation_to_the_demo_once(tmp_path: Path) -> None:
    """`make` with an environment whose tickertape only prints its arguments."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/tickertape"
    script.write_text("#!/bin/sh\necho called with: $*\n")
    script.chmod(0o755)
    (tmp_path / ".installed").touch()
    (tmp_path / install.SECONDS_FILE).write_text("12.5\n")
    # `make test` runs this test inside another make, which prints the directory too.
    command = ["make", "--no-print-directory", f"VENV={tmp_path}", "demo"]
    outputs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout for _ in range(2)]
    assert "called with: demo --installed-in 12.5" in outputs[0] and outputs[1].strip() == "called with: demo"


def test_the_demo_shows_the_parts_and_their_sum() -> None:
    seconds = {"packages (download and install)": 182.04, "weights": 4.0, "start of the server": 3.5}
    assert shown_times(seconds) == (
        "Times: packages (download and install) 182.0 s, weights 4.0 s, start of the server 3.5 s; "
        "189.5 s until the server was ready."
    )
