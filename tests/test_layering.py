"""The import rules of the architecture, checked against the source.

Every folder is a layer. `FLOORS` lists the packages of ours that the modules of a folder may import; all other imports
are errors. `OPENINGS` are the few modules that may import more, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("audio", "engine", "fleet", "realtime")
TORCH = {"torch", "torchaudio", "triton"}
TORCH_HOMES = ("engine/runner/", "engine/models/", "engine/weights/")
MOST_MODULES = 10

# `engine` and `realtime` stand for the modules at their root: the vocabulary of either.
FLOORS: dict[str, set[str]] = {
    "audio": set(),
    "engine": set(),
    "engine/core": {"engine"},
    "engine/boundary": {"audio", "engine"},
    "engine/client": {"engine", "engine/boundary"},
    "engine/models": {"engine"},
    "engine/weights": {"engine", "engine/models"},
    "engine/runner": {
        "engine",
        "engine/core",
        "engine/models",
        "engine/weights",
        "engine/runner/frames",
        "engine/runner/windowed",
    },
    "engine/runner/frames": {"engine", "engine/core", "engine/models", "engine/weights", "engine/runner"},
    "engine/runner/windowed": {"engine", "engine/core", "engine/models", "engine/runner"},
    "engine/server": {"audio", "engine", "engine/boundary", "engine/core", "engine/runner", "engine/weights"},
    "realtime": set(),
    "realtime/session": {"audio", "engine", "realtime"},
    "realtime/dialects": {"realtime", "realtime/session"},
    "realtime/serving": {
        "audio",
        "engine",
        "engine/client",
        "realtime",
        "realtime/dialects",
        "realtime/session",
    },
    "realtime/http": {
        "audio",
        "engine",
        "engine/client",
        "realtime",
        "realtime/dialects",
        "realtime/serving",
        "realtime/session",
    },
    "realtime/webrtc": {"audio", "realtime/serving"},
    "realtime/workers": {"engine", "realtime", "realtime/serving"},
    "realtime/client": set(),
    "realtime/bench": {"audio", "realtime/client"},
    "realtime/commands": {
        "audio",
        "engine",
        "engine/client",
        "engine/weights",
        "realtime",
        "realtime/bench",
        "realtime/client",
        "realtime/serving",
        "realtime/session",
        "realtime/workers",
    },
    "fleet": set(),
    "fleet/cluster": {"fleet"},
}
OPENINGS: dict[str, set[str]] = {
    # The one place in the gateway that starts an engine.
    "engine/client/engine_handles.py": {"engine/server"},
    # Gateways are linked to each other with the sockets and keys of the links to engines.
    "realtime/serving/fleet_publishing.py": {"engine/boundary"},
    # A process of its own: it sets its log up as the others do.
    "realtime/workers/worker.py": {"engine"},
    # This command is the engine process.
    "realtime/commands/engine.py": {"engine/server", "engine/boundary"},
    # The fleet, its engines and its gateways have one secret.
    "fleet/cluster/connect.py": {"engine"},
    "fleet/supervisors.py": {"engine"},
    # Files that an operator names are read by one rule.
    "fleet/plan.py": {"engine"},
    "realtime/config.py": {"engine"},
    # This command alone speaks to a fleet.
    "realtime/commands/fleet.py": {"fleet", "fleet/cluster"},
    # The composition root: the only module that builds objects of all packages, and the server around them.
    "realtime/app.py": {"engine", "engine/client", "realtime/http", "realtime/serving"},
    "realtime/cli.py": {"engine", "realtime/commands"},
}


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of everything a file imports, wherever in the file it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def sources() -> dict[str, Path]:
    """Every module of ours, by its path from the root of the repository."""
    found = {
        path.relative_to(ROOT).as_posix(): path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))
    }
    assert len(found) > 100
    return found


def module_of(name: str) -> str | None:
    """The file that an imported name comes from, if it is one of ours."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return None
    for length in range(len(parts), 0, -1):
        stem = "/".join(parts[:length])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if (ROOT / candidate).is_file():
                return candidate
    raise AssertionError(f"{name} is imported and does not exist")


def folder(path: str) -> str:
    return path.rpartition("/")[0]


@cache
def graph() -> dict[str, set[str]]:
    """Which files of ours each file imports."""
    return {
        path: {module for name in imports(file) if (module := module_of(name)) is not None and module != path}
        for path, file in sources().items()
    }


def test_every_floor_imports_only_what_it_may() -> None:
    broken = []
    for path, imported in graph().items():
        allowed = {folder(path)} | FLOORS[folder(path)] | OPENINGS.get(path, set())
        broken += [f"{path} imports {module}" for module in imported if folder(module) not in allowed]
    assert not broken, "\n".join(broken)


def test_no_module_is_part_of_a_circle() -> None:
    edges = graph()
    below: dict[str, set[str]] = {}

    def reach(path: str) -> set[str]:
        seen: set[str] = set()
        stack = list(edges[path])
        while stack:
            found = stack.pop()
            if found not in seen:
                seen.add(found)
                stack += edges[found]
        return seen

    for path in edges:
        below[path] = reach(path)
    circles = [path for path in edges if path in below[path]]
    assert not circles, f"these import each other: {circles}"


def test_core_imports_only_plain_python_and_the_shared_data() -> None:
    forbidden = {"threading", "asyncio", "time", "datetime", "multiprocessing"}
    for path, file in sources().items():
        if folder(path) == "engine/core":
            for top in {name.partition(".")[0] for name in imports(file)} - {"engine"}:
                assert top in sys.stdlib_module_names and top not in forbidden, f"{path} imports {top}"


def test_the_session_core_does_no_io() -> None:
    for path, file in sources().items():
        if folder(path) in ("realtime/session", "realtime/dialects", "audio"):
            names = {name.partition(".")[0] for name in imports(file)}
            assert not names & {"asyncio", "anyio", "time", "zmq", "starlette", "uvicorn", "websockets"}, path


def test_torch_stays_where_it_lives() -> None:
    for path, file in sources().items():
        if not path.startswith(TORCH_HOMES):
            assert not {name.partition(".")[0] for name in imports(file)} & TORCH, path


def test_a_gateway_does_not_load_libav() -> None:
    """What strangers send is decoded in other processes: a fault in libav must not be a fault of the gateway."""
    edges, seen, stack = graph(), set(), ["realtime/app.py", "realtime/commands/serve.py", "realtime/workers/worker.py"]
    while stack:
        path = stack.pop()
        if path not in seen:
            seen.add(path)
            stack += edges[path]
    assert len(seen) > 50
    for path in seen:
        assert "av" not in {name.partition(".")[0] for name in imports(ROOT / path)}, path


def test_ray_stays_where_it_lives() -> None:
    """If Ray stops, speech goes on: neither a gateway nor an engine may ever import it."""
    for path, file in sources().items():
        if folder(path) != "fleet/cluster":
            assert "ray" not in {name.partition(".")[0] for name in imports(file)}, path


def test_the_loop_runs_where_the_packages_of_the_server_are_not_installed() -> None:
    """GPU benchmarks build the loop on machines that have msgspec, and no other package of the server."""
    edges, seen, stack = graph(), set(), ["engine/server/loop.py", "engine/runner/load.py"]
    while stack:
        path = stack.pop()
        if path not in seen:
            seen.add(path)
            stack += edges[path]
    for path in seen:
        names = {name.partition(".")[0] for name in imports(ROOT / path)}
        assert not names & {"zmq", "websockets", "starlette", "uvicorn"}, path


def test_examples_speak_the_wire_only() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        # That one shows the Python interface itself.
        if path.name != "prepare_elsewhere.py":
            assert not {name.partition(".")[0] for name in imports(path)} & set(OURS), path


@pytest.mark.parametrize("package", OURS)
def test_a_root_has_few_modules(package: str) -> None:
    modules = [path for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES


def test_every_folder_says_what_lives_there() -> None:
    for path, file in sources().items():
        if path.endswith("__init__.py"):
            said = ast.get_docstring(ast.parse(file.read_text())) or ""
            assert 2 <= len(said.splitlines()) <= 5, f"{path}: say in two to four lines what lives here"


# One judge of speech.

JUDGE = "engine/server/speech_track.py"
JUDGED = ("engine/server", "engine/client", "engine/boundary", "realtime")


def _names(node: ast.AST) -> set[str]:
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def test_only_the_speech_track_compares_a_speech_probability() -> None:
    """A second threshold would be a second idea of where speech is."""
    compared = []
    for folder in JUDGED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == JUDGE:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare) or (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
                ):
                    ordered = not isinstance(node, ast.Compare) or any(
                        isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops
                    )
                    if ordered and _names(node) & {"probability", "probabilities"}:
                        compared.append(f"{name}:{node.lineno}")
    assert not compared, f"compare events of the speech track instead: {compared}"
    judge = ast.parse((ROOT / JUDGE).read_text())
    assert any(isinstance(node, ast.Compare) and _names(node) & {"probability"} for node in ast.walk(judge))
