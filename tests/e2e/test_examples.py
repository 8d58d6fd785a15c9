"""The examples, as a reader would run them, against a real server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Running, Serve
from tests.realtime.commands.conftest import sound, write_wav

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting a process blocks a little; that is this test's doing, not the server's."""
    yield


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two turns of three words, with a pause between them."""
    pause = np.zeros(16_000, np.float32)
    return write_wav(tmp_path / "talk.wav", np.concatenate((sound(1.2), pause, sound(1.2), pause)))


async def run_example(name: str, *arguments: str, audio: bytes | None = None) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )
    shown, said = await asyncio.wait_for(process.communicate(audio), 60)
    return process.returncode or 0, shown.decode(), said.decode()


async def test_without_arguments_they_say_how_to_be_used() -> None:
    for name in ("file.py", "openai_sdk.py", "load_test.py"):
        code, _, said = await run_example(name)
        assert code == 1 and f"python examples/{name}" in said


async def test_file_prints_a_line_for_each_turn(serve: Serve, recording: Path) -> None:
    async with serve() as running:
        code, shown, said = await run_example("file.py", str(recording), running.ws)
    assert code == 0, said
    lines = shown.splitlines()
    assert [line.split("   [")[0] for line in lines] == ["w1 w2 w3", "w4 w5 w6"]
    assert all("s after the last word]" in line for line in lines)


async def test_openai_package_transcribes_file_and_session(serve: Serve, recording: Path) -> None:
    async with serve() as running:
        code, shown, said = await run_example("openai_sdk.py", str(recording), running.base_url)
    assert code == 0, said
    assert shown.splitlines() == ["as a file: w1 w2 w3 w4 w5 w6", "live: w1 w2 w3 w4 w5 w6 "]


async def test_load_test_counts_finals_and_failures(serve: Serve, tmp_path: Path) -> None:
    recording = write_wav(tmp_path / "short.wav", np.concatenate((sound(0.9), np.zeros(12_000, np.float32))))
    async with serve() as running:
        code, shown, said = await run_example("load_test.py", str(recording), "2", running.ws)
        assert code == 0, said
        assert shown.startswith("2 streams, 0 failed, 2 finals\ntime to final: p50 ")
    code, shown, said = await run_example("load_test.py", str(recording), "1", running.ws)
    assert code == 1 and shown.startswith("1 streams, 1 failed, 0 finals") and "failed: " in said


async def test_long_session_outlives_lost_connections(serve: Serve) -> None:
    """Every word comes once, in order, although the socket is cut twice."""
    pcm = (np.concatenate([sound(4.0), np.zeros(16_000, np.float32)]) * 32767).astype("<i2").tobytes()
    async with serve() as running:
        pipe = asyncio.subprocess.PIPE
        arguments = (sys.executable, str(EXAMPLES / "long_session.py"), running.ws)
        process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin is not None
        for number in range(10):
            process.stdin.write(pcm[len(pcm) * number // 10 : len(pcm) * (number + 1) // 10])
            await asyncio.sleep(0.15 if number else 1.0)
            if number in (3, 6):
                while not running.gateway.sessions.connected:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                cut_sockets(running)
        process.stdin.close()
        shown, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, said.decode()
    assert said.decode().count("connection lost") == 2
    assert shown.decode().split() == [f"w{number}" for number in range(1, 11)]
    assert len(running.engine.streams) == 1, "the session was resumed, not begun anew"


async def test_microphone_drops_the_oldest_sound_when_the_server_is_too_slow(serve: Serve, tmp_path: Path) -> None:
    """Three hundred chunks at once: a hundred wait, and each that had to go is said."""
    (tmp_path / "sounddevice.py").write_text(
        "class RawInputStream:\n"
        "    def __init__(self, callback, blocksize, **rest):\n"
        "        self.speak = lambda: [callback(bytes(2 * blocksize), blocksize, None, None) for _ in range(300)]\n"
        "    def __enter__(self): self.speak()\n"
        "    def __exit__(self, *error): pass\n"
    )
    async with serve() as running:
        pipe = asyncio.subprocess.PIPE
        arguments = (sys.executable, str(EXAMPLES / "microphone.py"), running.ws)
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(*arguments, stdout=pipe, stderr=pipe, env=environment)
        async with asyncio.timeout(60):
            while running.metric("audio_received_seconds_total") < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        process.terminate()
        _, said = await process.communicate()
    assert said.decode().count("a tenth of a second was lost") == 200
    assert running.metric("audio_received_seconds_total") == pytest.approx(10, abs=0.2)


def cut_sockets(running: Running) -> None:
    """As a broken network would: no close frame, no goodbye."""
    for protocol in list(running.server.server_state.connections):
        protocol.transport.abort()  # type: ignore[union-attr]
