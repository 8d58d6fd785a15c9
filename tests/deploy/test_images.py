"""What can be said of the images without building them: users, locks, arguments, and the packages of each platform."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.version import Version

from deploy import audit
from deploy.cpu_lock import cpu_lock
from engine.weights.registry import REGISTRY
from tests.deploy.services import ROOT, compose

DOCKERFILE = (ROOT / "Dockerfile").read_text()
LINES = DOCKERFILE.replace("\\\n", " ").splitlines()
CPU_LOCK = (ROOT / "requirements-cpu.lock").read_text()
MACHINES = ("x86_64", "aarch64")


def on(machine: str, lock: str) -> dict[str, Version]:
    """What a lock installs on Linux with this processor."""
    platform = {"platform_machine": machine, "sys_platform": "linux", "platform_system": "Linux"}
    entries = re.findall(r"^(\S+==\S+)(?: ; (.*?))? \\$", lock, re.MULTILINE)
    taken = [pin for pin, marker in entries if not marker or Marker(marker).evaluate({**platform, "extra": ""})]
    return audit.pins("\n".join(taken))


def test_the_image_does_not_run_as_root_and_says_when_it_is_ready() -> None:
    users = [line.split()[1] for line in LINES if line.startswith("USER")]
    assert users == ["10001:10001"], "a number: Kubernetes refuses a name with runAsNonRoot"
    assert "useradd --create-home --uid 10001 tickertape" in DOCKERFILE
    assert "HEALTHCHECK" in DOCKERFILE and '"status", "--ready"' in DOCKERFILE
    assert all(re.search(r":\d+\.\d+\.\d+", line) for line in LINES if line.startswith("FROM"))


def test_packages_come_from_a_lock_with_digests() -> None:
    commands = "; ".join(line for line in LINES if line.startswith("RUN"))
    pytorch, rest, own = (found.split() for found in re.findall(r"pip install ([^;&]*)", commands))
    assert {"--require-hashes", "-r", "$list"} <= set(rest)
    assert {"--no-deps", "--index-url"} <= set(pytorch)
    assert {"--no-deps", "--no-build-isolation", "."} <= set(own)
    (resolved_for,) = re.findall(r"--python-version (\S+)", (ROOT / "Makefile").read_text())
    pythons = set(re.findall(r"^FROM python:(\d+\.\d+)\.", DOCKERFILE, re.MULTILINE))
    assert pythons == {resolved_for}, "the lock is resolved for the Python of the image"


def test_the_lock_for_the_cpu_is_up_to_date() -> None:
    assert cpu_lock(audit.LOCK.read_text()) == CPU_LOCK, "run `make lock`"
    entries = re.split(r"\n(?=[a-z])", CPU_LOCK.partition("\n")[2].strip())
    assert len(entries) > 20 and all("--hash=sha256:" in entry for entry in entries)


def test_the_image_for_the_cpu_has_no_cuda_and_lacks_nothing_else() -> None:
    whole = {machine: on(machine, audit.LOCK.read_text()) for machine in MACHINES}
    cuda = {name for name in whole["x86_64"] if name.startswith(("nvidia-", "cuda-")) or name == "triton"}
    assert cuda and not cuda & whole["aarch64"].keys(), "the package index has builds for the CPU on arm64"
    assert on("aarch64", CPU_LOCK) == whole["aarch64"]
    from_pytorch = {"torch", "torchaudio"}
    assert whole["x86_64"].keys() - on("x86_64", CPU_LOCK).keys() == cuda | from_pytorch


def script_of(step: str) -> str:
    (line,) = [line for line in LINES if line.startswith("RUN") and step in line]
    return line.removeprefix("RUN ")


@pytest.mark.parametrize(
    ("torch", "machine", "installed"),
    [
        ("cpu", "aarch64", ["--require-hashes -r requirements-cpu.lock"]),
        (
            "cpu",
            "x86_64",
            [
                "--no-deps --index-url https://index.example torch=={torch} torchaudio=={torchaudio}",
                "--require-hashes -r requirements-cpu.lock",
            ],
        ),
        ("cuda", "x86_64", ["--require-hashes -r requirements.lock"]),
        ("cuda", "aarch64", "the image with CUDA is for x86-64 only"),
        ("rocm", "x86_64", "TORCH is cpu or cuda, not rocm"),
    ],
)
def test_each_platform_gets_its_packages(torch: str, machine: str, installed: list[str] | str, tmp_path: Path) -> None:
    """The step of the Dockerfile, with a pip that only says what it was asked for."""
    programs = tmp_path / "programs"
    programs.mkdir()
    pip = '#!/bin/sh\necho "$@"\n'
    for name, text in {"python": "#!/bin/sh\n", "uname": f"#!/bin/sh\necho {machine}\n", "pip": pip}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    script = script_of("requirements.lock").replace("/opt/tickertape/bin/pip", "pip")
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=ROOT,
        env={"PATH": f"{programs}:/usr/bin:/bin", "TORCH": torch, "TORCH_CPU_INDEX": "https://index.example"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if isinstance(installed, str):
        assert done.returncode == 1 and done.stdout.strip() == installed
        return
    pins = audit.pins(audit.LOCK.read_text())
    wanted = [line.format(torch=pins["torch"], torchaudio=pins["torchaudio"]) for line in installed]
    assert done.returncode == 0 and done.stdout.splitlines() == [f"install --no-cache-dir {line}" for line in wanted]


def test_weights_are_baked_before_their_folder_becomes_a_volume() -> None:
    steps = [line.split()[0] for line in LINES if line and not line.startswith(("#", " "))]
    at = next(number for number, line in enumerate(LINES) if "tickertape pull" in line)
    assert at < next(number for number, line in enumerate(LINES) if line.startswith("VOLUME"))
    assert steps.index("USER") < steps.index("VOLUME"), "the user of the image owns the weights"
    (folder,) = re.findall(r"TICKERTAPE_CACHE=(\S+)", DOCKERFILE)
    assert folder in next(line for line in LINES if line.startswith("VOLUME"))


def test_weights_of_the_examples_have_names_that_pull_knows() -> None:
    pages = (ROOT / name for name in ("Dockerfile", "docker-compose.yml", "docs/operations.md"))
    examples = [found for page in pages for found in re.findall(r'WEIGHTS="([\w. -]+)"', page.read_text())]
    assert len(examples) == 3 and {name for names in examples for name in names.split()} <= set(REGISTRY)


def test_services_build_the_image_that_they_need() -> None:
    services = compose()["services"]
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for name, kind in (("server", "cpu"), ("server-gpu", "cuda")):
        build = services[name]["build"]["args"]
        assert build["TORCH"] == kind and build.keys() <= arguments
    assert services["server-gpu"]["image"] == services["server"]["image"] + "-cuda"
