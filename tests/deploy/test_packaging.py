"""The wheel: built from what is in the repository, installed into an empty environment, and run from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy import install
from engine.options import cache_folder
from realtime.client.wire_client import HttpClient
from tests.deploy.services import ROOT, compose

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PATH = {"PATH": "/usr/bin:/bin"}
PACKAGES = [name.rstrip("*") for name in SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"]]


def sources() -> list[Path]:
    """Everything that belongs into the wheel: modules, and files that they need."""
    found = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return sorted(path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left behind in the repository."""
    folder = tmp_path_factory.mktemp("build")
    for path in [*sources(), *map(Path, ("pyproject.toml", "README.md", "LICENSE"))]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    script = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / "dist")], cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--no-index", str(wheel)]
    # What PYTHONPATH names would count as installed.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, "--quiet"], cwd=folder, env=clean, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder


def run(environment: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As a user would: the installed script, in a folder that has nothing to do with the repository."""
    command = [str(environment / "bin" / "tickertape"), *arguments]
    return subprocess.run(command, cwd=environment, env=PATH | variables, capture_output=True, text=True, timeout=110)


def test_wheel_has_every_module_and_every_file_of_the_page_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {path.as_posix() for path in sources()}
    assert "realtime/web/index.html" in names


def test_wheel_says_what_it_is_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = archive.read(name).decode()
        assert any(entry.endswith("LICENSE") for entry in archive.namelist())
    assert f"\nVersion: {PROJECT['version']}\n" in metadata and "\nProvides-Extra: mic\n" in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])


def test_every_extra_is_real() -> None:
    """Every package that an extra installs is imported."""
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and path.name != "tests" and not path.name.startswith(".")
    ]
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for extra, packages in PROJECT["optional-dependencies"].items():
        names = [re.split(r"[<>=\[]", package)[0] for package in packages]
        assert extra == "dev" or all(name in text for name in names), extra


def test_installed_command_works_before_anything_heavy_is_there(environment: Path) -> None:
    assert run(environment, "--version").stdout == f"tickertape {PROJECT['version']}\n"
    checked = run(environment, "check-config")
    assert checked.returncode == 0 and "port = 8000" in checked.stdout
    helped = run(environment, "transcribe", "--help")
    assert helped.returncode == 0 and "Examples:" in helped.stdout


@contextmanager
def serving(environment: Path, *arguments: str, **variables: str) -> Iterator[HttpClient]:
    """The installed server; it must end without an error."""
    command = [str(environment / "bin" / "tickertape"), "serve", "--port", "0", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=environment, env=PATH | variables, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        yield HttpClient(process.stdout.readline().split()[-1])
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in said, said


def test_installed_server_serves_its_page(environment: Path, engine: dict[str, str]) -> None:
    """Dependencies are those of this environment; the product is the wheel's."""
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    with serving(environment, **engine) as server:
        assert b"<title>" in server.get("/").body and server.get("/app.js").status == 200
        assert server.get("/ready").status == 200


@pytest.fixture(scope="module")
def complete(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel and everything that it needs, from the packages that uv has in its cache."""
    uv = shutil.which("uv") or str(ROOT / install.UV_FOLDER / "bin" / "uv")
    if not Path(uv).exists():
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("complete")
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= install.of_pip_configuration(listing, variables)
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True, timeout=60)
    python = str(folder / "bin" / "python")
    command = [uv, "pip", "install", "--offline", "--index-strategy", "unsafe-best-match", "--python", python]
    done = subprocess.run([*command, str(wheel)], env=variables, capture_output=True, text=True, timeout=110)
    if "network was disabled" in done.stderr or "not found in the cache" in done.stderr:
        pytest.skip("uv has not all packages in its cache: `make setup` with uv fetches them")
    assert done.returncode == 0, done.stderr
    checked = subprocess.run([uv, "pip", "check", "--python", python], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    return folder


def test_the_wheel_alone_is_a_whole_server(complete: Path, engine: dict[str, str]) -> None:
    """The page, the shipped weights, the version and every dependency are there; fetched weights are those of this
    machine's cache, and the engine is one without a model."""
    cache = {"TICKERTAPE_CACHE": str(cache_folder())}
    assert run(complete, "--version").stdout == f"tickertape {PROJECT['version']}\n"
    checked = run(complete, "doctor", "--no-measure", **cache)
    assert checked.returncode == 0 and "No problems found" in checked.stdout, checked.stdout
    (shipped,) = complete.glob("lib/python*/site-packages/engine/weights/shipped/*.safetensors")
    assert shipped.stat().st_size > 1_000_000
    with serving(complete, **engine) as server:
        assert b"<title>" in server.get("/").body and server.get("/ready").status == 200


def test_the_image_is_built_from_every_package() -> None:
    """One that is not copied would be missing from the image alone, and nothing would say so."""
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(PACKAGES)


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert compose()["services"]["server"]["image"] == f"tickertape:{version}"
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
