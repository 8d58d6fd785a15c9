"""A release: the bill of materials has every locked package with its digests, and checksums are those of the files."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from deploy import audit, release
from tests.deploy.services import ROOT
from tests.deploy.test_packaging import PROJECT

LOCK = (ROOT / "requirements.lock").read_text()


def test_the_bill_of_materials_has_every_locked_package() -> None:
    bill = release.bill_of_materials(PROJECT, LOCK)
    parts = {part["name"]: part for part in bill["components"]}
    pins = audit.pins(LOCK)
    assert {name: part["version"] for name, part in parts.items()} == {
        name: str(pin) for name, pin in dict(pins).items()
    }
    assert all(part["hashes"] for part in parts.values())
    assert sum(len(part["hashes"]) for part in parts.values()) == LOCK.count("--hash=sha256:")
    assert parts["triton"]["properties"][0]["value"].startswith("platform_machine == 'x86_64'")
    assert bill["metadata"]["component"]["version"] == PROJECT["version"]
    assert bill["dependencies"][0]["dependsOn"] == [part["bom-ref"] for part in bill["components"]]


def test_the_checksums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"one")
    (tmp_path / "b.tar.gz").write_bytes(b"two")
    text = release.checksums(list(tmp_path.iterdir()))
    assert text.splitlines()[0] == f"{hashlib.sha256(b'one').hexdigest()}  a.whl"
    (tmp_path / "SHA256SUMS").write_text(text)
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
