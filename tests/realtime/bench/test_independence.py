"""The load generator measures any server: it imports nothing of ours but the wire client."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_generator_imports_nothing_of_engine_or_gateway() -> None:
    files = [*(ROOT / "realtime" / "bench").glob("*.py"), ROOT / "realtime" / "client" / "wire_client.py"]
    assert {"clients.py", "load_test.py", "words.py", "wire_client.py"} <= {path.name for path in files}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names.append(node.module)
            for name in names:
                ours = name.split(".")[0] in ("engine", "realtime")
                allowed = name.startswith("realtime.bench") or name == "realtime.client.wire_client"
                assert allowed or not ours, f"{path.name} imports {name}"
