"""A server whose output cannot be written, because the disk of its log is full: it starts, serves and stops."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serve_process import START_S, engine_at, serving
from tests.engine.fakes import until
from tests.realtime.commands.conftest import sound, write_wav

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


# Each output by itself for one process; both at once for a server whose workers have them too.
@pytest.mark.parametrize(("redirect", "workers"), [(">/dev/full", "1"), ("2>/dev/full", "1"), (">/dev/full 2>&1", "2")])
async def test_a_server_whose_log_is_on_a_full_disk_serves_and_stops(
    tmp_path: Path, redirect: str, workers: str
) -> None:
    (ready := tmp_path / "ready").touch()
    wrapper = ("bash", "-c", f'exec "$@" {redirect} 3>{ready}', "bash")
    with engine_at(tmp_path) as address:
        arguments = ("--port", "0", "--engine", address, "--workers", workers, "--ready-fd", "3")
        async with serving(tmp_path, *arguments, wrapper=wrapper, ready=False) as server:
            async with asyncio.timeout(START_S):
                await until(lambda: ready.read_text().endswith("\n") or server.process.returncode is not None)
            assert server.process.returncode is None, "the server has ended"
            url = ready.read_text().strip()

            def get(path: str) -> int:
                with urllib.request.urlopen(url + path, timeout=20) as answer:
                    return int(answer.status)

            assert await asyncio.to_thread(get, "/ready") == 200
            assert await server.stop() == 0


async def test_a_transcript_that_cannot_be_written_is_one_sentence_and_a_failure(tmp_path: Path) -> None:
    write_wav(tmp_path / "talk.wav", sound(3.0))
    with engine_at(tmp_path) as address:
        async with serving(tmp_path, "--port", "0", "--engine", address) as server:
            command = f'exec "$0" -m realtime.cli transcribe --server {server.http} {tmp_path}/talk.wav >/dev/full'
            process = await asyncio.create_subprocess_exec(
                "bash", "-c", command, sys.executable, stderr=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(START_S):
                _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().splitlines() == ["error: cannot write to standard output: No space left on device"]
