"""Files that an operator names by mistake: endless, silent, or slow to parse. Each is one sentence, soon."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import toml_file
from engine.toml_file import MAX_FILE_BYTES, MAX_KEY_PARTS, BadTomlFile, read_toml

ROOT = Path(__file__).parents[2]


def checked(path: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "realtime.cli", "check-config", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def test_a_file_without_an_end_is_refused_by_its_size() -> None:
    done = checked("/dev/zero")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: the configuration file '/dev/zero' has more than 1024 KiB"]


def test_a_pipe_without_a_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml_file, "MAX_READ_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadTomlFile, match="has not arrived within 0.2 s; is it a pipe without a writer"):
        read_toml(tmp_path / "pipe")


def test_a_pipe_that_stops_in_the_middle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml_file, "MAX_READ_SECONDS", 0.5)
    os.mkfifo(tmp_path / "pipe")
    stop = threading.Event()

    def write() -> None:
        with open(tmp_path / "pipe", "w") as pipe:
            pipe.write("a = 1")
            pipe.flush()
            stop.wait(30)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(BadTomlFile, match="has not arrived"):
            read_toml(tmp_path / "pipe")
    finally:
        stop.set()
        writer.join()


def test_a_pipe_is_read_to_its_end_however_it_arrives(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    value = "x" * 200_000

    def write() -> None:
        with open(tmp_path / "pipe", "w") as pipe:
            for piece in ("a = '", value, "'\n"):
                pipe.write(piece)
                pipe.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_toml(tmp_path / "pipe") == {"a": value}
    writer.join()


def test_a_pipe_that_was_closed_before_it_is_read_keeps_its_content() -> None:
    command = f'exec "{sys.executable}" -m realtime.cli check-config <(echo "[server]"; echo "port = 8123")'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "port = 8123" in done.stdout


def test_the_empty_device_is_an_empty_file() -> None:
    assert read_toml(os.devnull) == {}


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        read_toml(tmp_path)


def test_a_file_of_the_greatest_size_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a = 1\n#" + "x" * (MAX_FILE_BYTES - 7))
    assert read_toml(file) == {"a": 1}
    file.write_text("a = 1\n#" + "x" * (MAX_FILE_BYTES - 6))
    with pytest.raises(BadTomlFile, match="more than 1024 KiB"):
        read_toml(file)


LONG = ".".join(["a"] * 20_000)
QUOTED = " . ".join(['"a b"', "'c.d'"] * 10)


@pytest.mark.parametrize(
    "text",
    [f"{LONG} = 1", f"[{LONG}]", f"[[{LONG}]]", f"x = {{ {LONG} = 1 }}", f"b = 1\n{LONG}.c = 1", f"{QUOTED} = 1"],
)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text(text)
    monkeypatch.setattr(toml_file.tomllib, "loads", pytest.fail)
    with pytest.raises(BadTomlFile, match="has a key with more than 16 parts"):
        read_toml(tmp_path / "file")


def test_a_key_of_a_few_parts_and_texts_with_many_dots_are_read(tmp_path: Path) -> None:
    address = ".".join(map(str, range(40)))
    key = ".".join(["a"] * MAX_KEY_PARTS)
    (tmp_path / "file").write_text(f"{key} = 1\nhost = '{address}'\nhosts = [\"{address}\", '{address}']\r\n# ...\n")
    tree = read_toml(tmp_path / "file")
    assert tree["host"] == address and tree["hosts"] == [address] * 2


UNITS = ["a" * 64, '"', "'", "a.", "a ", " . ", "a . ", "'\"", "a.b\n", '"a".', "\t", '"a', "[a]", "-."]


def test_the_search_for_long_keys_ends_for_every_text_of_the_greatest_size() -> None:
    """A search whose time grows with the square of the length would need hours."""
    program = (
        "from engine.toml_file import _LONG_KEY, MAX_FILE_BYTES as most\n"
        f"for unit in {UNITS!r}: _LONG_KEY.search((unit * most)[:most])"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
