"""Snippets and command lines of the documentation, taken from its pages and run against a server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fleet.plan import read_plan
from realtime.dialects.event_schema import SessionUpdated
from realtime.http.stream_routes import Stream
from tests.e2e import ecosystem_clients as clients
from tests.e2e.conftest import Running, Serve
from tests.e2e.snippets import ROOT, block, blocks, lines
from tests.e2e.test_deepgram_files import wav
from tests.e2e.test_ecosystem import PACE_S, needs, two_turns

CLIENTS = "docs/clients.md"
TWO_TURNS = "w1 w2 w3 w4"
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting processes blocks, and so do some of these clients; that is not the server's doing."""
    yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "talk.wav").write_bytes(wav(two_turns(16_000)))
    return tmp_path


async def run(folder: Path, *command: str) -> str:
    """What a command prints; it must succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=pipe, stderr=pipe, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    )
    shown, said = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, said.decode()
    return shown.decode()


def place(running: Running) -> str:
    return f"127.0.0.1:{running.port}"


# The snippets leave it to the interpreter to close their connections.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("README.md", "python"),
        (CLIENTS, "python openai"),
        (CLIENTS, "python openai-stream"),
        pytest.param(CLIENTS, "python deepgram", marks=needs("deepgram")),
    ],
)
async def test_python_that_transcribes_a_file(serve: Serve, folder: Path, page: str, kind: str) -> None:
    shown = io.StringIO()
    async with serve() as running:
        # Here and not in a process of its own: importing these packages takes seconds.
        with contextlib.chdir(folder), contextlib.redirect_stdout(shown):
            await asyncio.to_thread(exec, block(page, kind).at(place(running)), {})
    gc.collect()  # warns of these connections here, where warnings are ignored, and not in a later test
    assert shown.getvalue().strip().lower().startswith(TWO_TURNS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        pytest.param("python livekit", 24_000, marks=needs("livekit.plugins.openai")),
        pytest.param("python livekit-deepgram", 16_000, marks=needs("livekit.plugins.deepgram")),
        pytest.param("python pipecat", 16_000, marks=needs("pipecat")),
        pytest.param("python pipecat-deepgram", 16_000, marks=needs("pipecat")),
    ],
)
async def test_speech_to_text_of_a_framework(serve: Serve, kind: str, rate: int) -> None:
    async with serve() as running, asyncio.timeout(PATIENCE_S):
        finals = await heard_by(kind, block(CLIENTS, kind).at(place(running)), rate)
    assert " ".join(finals).startswith(TWO_TURNS)


async def heard_by(kind: str, snippet: str, rate: int) -> list[str]:
    """The finals of two turns, with the service that a snippet makes."""
    made: dict[str, Any] = {}
    if "livekit" not in kind:
        exec(snippet, made)
        return await clients._pipecat(made["stt"], two_turns(rate), rate, PACE_S, 2)
    from livekit.agents.utils import http_context

    async with http_context.open():
        exec(snippet, made)
        return await clients._livekit(made["stt"], two_turns(rate), rate, PACE_S, 2)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
async def test_curl(serve: Serve, folder: Path) -> None:
    expected = ("\nw1 w2", "transcript.text.done", '"utterances"', '"object":"list"')
    async with serve() as running:
        for line, part in zip(lines(CLIENTS, "curl "), expected, strict=True):
            assert part in await run(folder, "bash", "-c", line.replace("127.0.0.1:8000", place(running)))
        (link,) = lines("docs/page.md", "curl ")
        assert '"token":"vl_' in await run(folder, "bash", "-c", link.replace("127.0.0.1:8000", place(running)))
        (document,) = lines("docs/wire.md", "curl ")
        assert '"openapi":"3.1.0"' in await run(
            folder, "bash", "-c", document.replace("127.0.0.1:8000", place(running))
        )


@pytest.mark.skipif(not shutil.which("ffmpeg"), reason="ffmpeg is not installed")
async def test_a_pipe_from_ffmpeg_to_a_server(serve: Serve, folder: Path) -> None:
    await run(folder, "ffmpeg", "-loglevel", "error", "-i", "talk.wav", "-c:a", "flac", "talk.mkv")
    (_, line) = lines("docs/cli.md", "ffmpeg ")
    async with serve() as running:
        await run(folder, "bash", "-c", line.replace("gpu-box:8000", place(running)))
    assert "w1 w2" in (folder / "talk.srt").read_text() and "-->" in (folder / "talk.srt").read_text()


async def test_plan_by_figures_of_the_documentation(folder: Path) -> None:
    by_figures, _ = lines("docs/operations.md", "tickertape plan ")
    assert "engines" in await run(folder, "bash", "-c", by_figures)


def test_objects_of_the_wire_are_as_the_schema_says() -> None:
    session, stream = [json.loads(one.text) for one in blocks(ROOT / "docs/wire.md") if one.kind == "json"]
    assert session.pop("type") == "session.updated"
    msgspec.convert({"type": "session.updated", **session}, SessionUpdated)
    msgspec.convert(stream, Stream)


def test_files_of_settings_can_be_read(tmp_path: Path) -> None:
    (settings,) = [one for one in blocks(ROOT / "docs/fleet.md") if one.kind == "toml"]
    assert tomllib.loads(settings.text)["name"] == "tickertape"
    (tmp_path / "fleet.toml").write_text(settings.text)
    assert read_plan(tmp_path / "fleet.toml").engine.most == 1
    (rules,) = [one for one in blocks(ROOT / "docs/deploy.md") if one.kind == "yaml"]
    assert set(yaml.safe_load(rules.text)["rules"]) == {"custom", "external"}
