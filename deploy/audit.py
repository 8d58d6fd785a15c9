"""`make audit`: checks the versions that pyproject.toml allows and the image installs for known vulnerabilities.

It always checks the list in advisories.toml beside this file, and queries the database of published vulnerabilities
through pip-audit. Exit code 1: a version is vulnerable. Exit code 2: the database could not be reached, so only the
list was checked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
VULNERABLE, NOT_ASKED = 1, 2
# Package -> the first version without a vulnerability -> ids of that vulnerability.
Advisories = dict[str, dict[str, list[str]]]


def advisories() -> Advisories:
    return tomllib.loads((ROOT / "deploy" / "advisories.toml").read_text())


def requirements() -> list[Requirement]:
    """The requirements of pyproject.toml, with all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (line for extra in project["optional-dependencies"].values() for line in extra)
    return [Requirement(line) for line in (*project["dependencies"], *extras)]


def floor(requirement: Requirement) -> Version | None:
    """The lowest version that the requirement admits; None if it admits any."""
    lowest = [
        Version(specifier.version.removesuffix(".*"))
        for specifier in requirement.specifier
        if specifier.operator in (">=", "==", "~=", ">")
    ]
    return max(lowest, default=None)


def pins(lock: str) -> dict[str, Version]:
    """Package -> the version that a lock file names."""
    return {canonicalize_name(name): Version(version) for name, version in re.findall(r"^(\S+)==(\S+)", lock, re.M)}


def vulnerable(versions: Iterable[tuple[str, Version | None]], known: Advisories) -> list[str]:
    """A sentence for each version with an advisory; None means any version."""
    return [
        f"{name} {version or 'of any version'} has {', '.join(ids)}; {fixed} is the first version without it"
        for name, version in versions
        for fixed, ids in known.get(canonicalize_name(name), {}).items()
        if version is None or version < Version(fixed)
    ]


def from_list() -> list[str]:
    known = advisories()
    admitted = vulnerable(((requirement.name, floor(requirement)) for requirement in requirements()), known)
    installed = vulnerable(pins(LOCK.read_text()).items(), known)
    return [f"pyproject.toml admits {text}" for text in admitted] + [f"the image has {text}" for text in installed]


def from_database(report: str) -> tuple[list[str], list[str]]:
    """Vulnerabilities that pip-audit found, and packages without an answer, from its JSON report."""
    found, skipped = [], []
    for package in json.loads(report)["dependencies"]:
        if "skip_reason" in package:
            skipped.append(package["name"])
        for entry in package.get("vulns", ()):
            fixed = ", ".join(entry["fix_versions"]) or "no version yet"
            what = f"{package['name']} {package['version']}"
            found.append(f"the image has {what}, which has {entry['id']}; fixed: {fixed}")
    return found, skipped


def ask_database() -> tuple[list[str], list[str]]:
    """Runs pip-audit on the lock file. Without the database it skips packages and still exits with 0: skipped packages
    count as packages without an answer."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--disable-pip", "--require-hashes"]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True)
    try:
        return from_database(done.stdout)
    except (ValueError, KeyError):
        print(f"pip-audit failed: {done.stderr.strip()[-500:]}")
        return [], sorted(pins(LOCK.read_text()))


def main() -> int:
    listed = from_list()
    for text in listed:
        print(text)
    print(f"deploy/advisories.toml: {len(listed)} vulnerabilities found")
    found, skipped = ask_database()
    for text in found:
        print(text)
    if skipped:
        print(f"NOT COMPLETE: the database of vulnerabilities did not answer for {len(skipped)} packages, among them")
        print(f"{', '.join(skipped[:5])}; run `make audit` where https://pypi.org/pypi can be reached")
    else:
        print(f"database of vulnerabilities: {len(found)} found")
    if listed or found:
        return VULNERABLE
    return NOT_ASKED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
