"""What goes wrong at a first start: one sentence for each, with the way out, and no stack trace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("tickertape")


def fails_with_one_sentence(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [str(SCRIPT), *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode in (1, 2) and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A disk that cannot be written, which root cannot either."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,ro", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a disk here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("command", ["pull", "serve"])
def test_a_home_that_cannot_be_written(read_only: Path, command: str) -> None:
    said = fails_with_one_sentence(command, HOME=str(read_only), XDG_CACHE_HOME="", TICKERTAPE_CACHE="")
    assert "Read-only file system" in said and "name another TICKERTAPE_CACHE" in said


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("engine", "--listen", "tcp://127.0.0.1:0")])
def test_a_secret_that_is_missing(command: tuple[str, ...]) -> None:
    said = fails_with_one_sentence(*command, "--fleet-secret-file", "/does/not/exist")
    assert "'/does/not/exist': No such file" in said and "openssl rand -hex 32" in said


@pytest.mark.parametrize("command", [("serve",), ("serve", "--workers", "2"), ("demo",)])
def test_a_second_server_on_the_port(command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = str(first.getsockname()[1])
        said = fails_with_one_sentence(*command, "--port", port)
    assert f"port {port}: Address already in use" in said and "choose another --host or --port" in said
