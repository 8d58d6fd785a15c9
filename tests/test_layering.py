"""Who may import whom: the rules of the architecture, read off the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = {"audio", "engine", "realtime"}
TORCH_HOMES = ("engine/runner/", "engine/models/", "engine/weights/")


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(package: str) -> Iterator[tuple[str, list[str]]]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no sources in {package}"
    for path in files:
        yield path.relative_to(ROOT).as_posix(), list(imports(path))


def top(name: str) -> str:
    return name.partition(".")[0]


def test_audio_imports_neither_of_the_others() -> None:
    for path, names in sources("audio"):
        assert not {top(name) for name in names} & {"engine", "realtime"}, path


def test_engine_never_imports_realtime() -> None:
    for path, names in sources("engine"):
        assert "realtime" not in {top(name) for name in names}, path


def test_core_imports_only_plain_python_and_the_shared_data() -> None:
    allowed = ("engine.core.", "engine.spec.", "engine.messages.", "engine.errors.")
    forbidden = {"threading", "asyncio", "time", "datetime", "multiprocessing"}
    for path, names in sources("engine/core"):
        for name in names:
            assert name.startswith(allowed) or (top(name) in sys.stdlib_module_names and top(name) not in forbidden), (
                f"{path} imports {name}"
            )


def test_torch_stays_where_it_lives() -> None:
    for package in OURS:
        for path, names in sources(package):
            if not path.startswith(TORCH_HOMES):
                assert not {top(name) for name in names} & {"torch", "torchaudio", "triton"}, path


def test_audio_and_gateway_sources_do_no_engine_work() -> None:
    """Only the composition root builds across packages; the rest of the gateway talks to the engine's public face."""
    for path, names in sources("realtime"):
        if path == "realtime/app.py":
            continue
        for name in names:
            assert not name.startswith(("engine.core", "engine.runner", "engine.models", "engine.server.loop")), (
                f"{path}: {name}"
            )


def test_examples_speak_the_wire_only() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        # That one shows the Python interface itself.
        if path.name != "prepare_elsewhere.py":
            assert not {top(name) for name in imports(path)} & OURS, path
