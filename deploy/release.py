"""`make release`: builds a release into a folder: sdist, wheel (built from the sdist), SBOM and checksums.

    python3 deploy/release.py UV dist

The SBOM (CycloneDX 1.5, JSON) lists what the image installs: the packages of requirements.lock with their digests.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCKED = re.compile(
    r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\]+?))? \\$((?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+)", re.MULTILINE
)


def bill_of_materials(project: dict[str, Any], lock: str) -> dict[str, Any]:
    """The product and every locked package, with the condition under which it is installed."""
    parts = []
    for name, version, condition, hashes in LOCKED.findall(lock):
        part: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower()}@{version}",
            "bom-ref": f"pkg:pypi/{name.lower()}@{version}",
            "hashes": [{"alg": "SHA-256", "content": one} for one in re.findall(r"sha256:([0-9a-f]{64})", hashes)],
        }
        if condition:
            part["properties"] = [{"name": "python:marker", "value": condition.strip()}]
        parts.append(part)
    product = {
        "type": "application",
        "name": project["name"],
        "version": project["version"],
        "purl": f"pkg:pypi/{project['name']}@{project['version']}",
        "bom-ref": project["name"],
        "licenses": [{"license": {"id": project["license"]}}],
    }
    depends = [{"ref": project["name"], "dependsOn": [part["bom-ref"] for part in parts]}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": product},
        "components": parts,
        "dependencies": depends,
    }


def checksums(files: list[Path]) -> str:
    """As `sha256sum` writes and checks them."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files))


def main(uv: str, folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    # Without arguments uv builds the sdist, and the wheel from it: what the sdist lacks, the wheel would lack too.
    subprocess.run([uv, "build", "--out-dir", str(folder), str(ROOT)], check=True)
    bill = folder / f"tickertape-{project['version']}.cdx.json"
    bill.write_text(json.dumps(bill_of_materials(project, (ROOT / "requirements.lock").read_text()), indent=1) + "\n")
    built = [file for file in folder.iterdir() if file.suffix in (".whl", ".gz", ".json")]
    (folder / "SHA256SUMS").write_text(checksums(built))
    print(f"built in {folder}: " + ", ".join(sorted(file.name for file in built)) + ", SHA256SUMS")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
