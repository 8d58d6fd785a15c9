"""pyproject.toml allows no version with a known vulnerability, and the image installs tested versions, by digest."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy import audit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIRECT = {canonicalize_name(one.name): one for one in map(Requirement, PROJECT["project"]["dependencies"])}
# What the code touches of them is not promised to stay as it is.
WITH_CEILING = ("uvicorn", "h11", "websockets", "starlette", "av")


def test_no_floor_admits_a_known_vulnerability() -> None:
    assert audit.from_list() == []
    assert set(audit.advisories()) >= {"h11", "starlette", "python-multipart", "websockets", "uvicorn"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("h11>=0.14", ["h11 0.14 has CVE-2025-43859; 0.16.0 is the first version without it"]),
        ("h11", ["h11 of any version has CVE-2025-43859; 0.16.0 is the first version without it"]),
        ("h11<0.17,>=0.16", []),
        (
            "Python_Multipart>=0.0.30",
            ["Python_Multipart 0.0.30 has CVE-2026-53540; 0.0.31 is the first version without it"],
        ),
        ("torch==2.10.*", []),
        ("unheard-of", []),
    ],
)
def test_a_floor_below_an_advisory_is_said(line: str, said: list[str]) -> None:
    requirement = Requirement(line)
    assert audit.vulnerable([(requirement.name, audit.floor(requirement))], audit.advisories()) == said


def test_every_dependency_has_a_floor_and_patched_ones_have_a_ceiling() -> None:
    for name, requirement in DIRECT.items():
        assert audit.floor(requirement) is not None, name
    for name in WITH_CEILING:
        assert any(specifier.operator in ("<", "==") for specifier in DIRECT[name].specifier), name


def test_what_is_imported_is_a_dependency() -> None:
    """An import that another package happens to bring has no floor."""
    optional = {"aioice", "aiortc", "ray", "sounddevice", "soundfile", "triton"}
    ours = {"audio", "engine", "fleet", "realtime"}
    homes = packages_distributions()
    for folder in ours:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in {name.partition(".")[0] for name in names} - ours - optional - sys.stdlib_module_names:
                    found = {canonicalize_name(home) for home in homes.get(name, ())}
                    assert found & DIRECT.keys(), f"{path.relative_to(ROOT)} imports {name}"


def test_the_tests_run_with_versions_that_are_admitted() -> None:
    for name, requirement in DIRECT.items():
        assert requirement.specifier.contains(Version(version(name)).base_version), name


def test_the_lock_has_every_dependency_in_a_version_that_is_admitted() -> None:
    pins = audit.pins(audit.LOCK.read_text())
    for name, requirement in DIRECT.items():
        assert name in pins and requirement.specifier.contains(pins[name]), f"{name}: run `make lock`"
    # The image builds the package with what is installed.
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert requirement.specifier.contains(pins[requirement.name])


def test_everything_in_the_lock_has_a_digest() -> None:
    entries = re.split(r"\n(?=\S)", audit.LOCK.read_text().strip())
    pinned = [entry for entry in entries if not entry.startswith("#")]
    assert len(pinned) == len(audit.pins(audit.LOCK.read_text()))
    for entry in pinned:
        assert re.match(r"[\w.-]+==\S+", entry) and "--hash=sha256:" in entry, entry.splitlines()[0]


def report(**package: object) -> str:
    return json.dumps({"dependencies": [{"name": "good", "version": "1", "vulns": []}, package]})


def test_a_database_that_does_not_answer_is_no_clean_bill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip-audit ends with 0 and "no known vulnerabilities" then."""
    skipped = report(name="h11", skip_reason="Dependency not found on PyPI and could not be audited: h11 (0.16.0)")
    monkeypatch.setattr(audit, "ask_database", lambda: audit.from_database(skipped))
    assert audit.main() == audit.NOT_ASKED
    assert "NOT COMPLETE: the database of vulnerabilities did not answer for 1 packages" in capsys.readouterr().out


def test_what_the_database_finds_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"id": "PYSEC-2026-1", "fix_versions": ["2.0"]}
    monkeypatch.setattr(
        audit, "ask_database", lambda: audit.from_database(report(name="h11", version="1.0", vulns=[entry]))
    )
    assert audit.main() == audit.VULNERABLE
    assert "the image has h11 1.0, which has PYSEC-2026-1; fixed: 2.0" in capsys.readouterr().out
    monkeypatch.setattr(audit, "ask_database", lambda: audit.from_database(report(name="h11", version="1", vulns=[])))
    assert audit.main() == 0


def test_shapes_are_those_that_the_oldest_msgspec_can_describe() -> None:
    """`make test-lowest` would find it too, much later: a server would not start."""
    found = [
        path.relative_to(ROOT).as_posix()
        for package in ("realtime", "engine", "audio", "fleet")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"Literal\[(True|False)", path.read_text())
    ]
    assert found == []
