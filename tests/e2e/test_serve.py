"""`tickertape serve` and `tickertape engine` as processes: they start, say where they are, and stop when told to."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import sys
import threading
import time
import wave
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from engine.options import cache_folder
from engine.server.loop import EngineLoop
from engine.server.main import run_engine
from tests.cached_models import skip_unless_cached
from tests.e2e.raw_client import raw_client
from tests.e2e.serve_process import serving
from tests.engine.fakes import build
from tests.waiting import until


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


@pytest.fixture
def engine_address(tmp_path: Path) -> Iterator[str]:
    """An engine that runs elsewhere: for the server it makes no difference that it is a thread of this process."""
    stop = threading.Event()
    address = f"ipc://{tmp_path}/engine"
    thread = threading.Thread(target=run_engine, args=(address, build, stop.is_set))
    thread.start()
    yield address
    stop.set()
    thread.join()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "realtime.cli", *arguments, stdout=pipe, stderr=pipe, env=environment
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_server_says_where_it_is_and_stops_when_told(engine_address: str, number: signal.Signals) -> None:
    process = await start("serve", "--engine", engine_address, "--port", "0")
    assert process.stdout is not None
    async with asyncio.timeout(60):
        page = (await process.stdout.readline()).decode()
        found = re.search(r"http://127.0.0.1:(\d+)/", page)
        assert found is not None, page
        async with raw_client(f"ws://127.0.0.1:{found[1]}/v1/realtime") as client:
            assert (await client.receive())["type"] == "session.created"
        process.send_signal(number)
        _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert "Traceback" not in said.decode()


async def test_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("serve", "--engine", "ipc:///nobody/there", "--port", str(port))
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert (
        said.decode()
        == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --host or --port\n"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def status(http: httpx.AsyncClient, path: str) -> tuple[int, str]:
    """The status of an answer, and what it calls itself."""
    answer = await http.get(path)
    body = answer.json()
    return answer.status_code, body.get("status") or body.get("error", {}).get("code", "")


async def until_it_listens(http: httpx.AsyncClient) -> None:
    while True:
        try:
            assert await status(http, "/health") == (200, "ok")
            return
        except httpx.TransportError:
            await asyncio.sleep(0.05)


async def test_server_waits_for_an_engine_that_comes_later(tmp_path: Path) -> None:
    address, port = f"ipc://{tmp_path}/engine", free_port()
    process = await start("serve", "--engine", address, "--port", str(port))
    assert process.stdout is not None
    assert process.stderr is not None
    said_first = ""
    stop = threading.Event()
    engine = threading.Thread(target=run_engine, args=(address, build, stop.is_set))
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            await until_it_listens(http)
            assert await status(http, "/ready") == (503, "starting")
            assert await status(http, "/v1/models") == (503, "engine_not_ready")
            assert (await http.get("/capacity")).json()["streams_total"] == 0
            assert b"tickertape_engine_streams_max 0.0" in (await http.get("/metrics")).content
            secret = await http.post("/v1/realtime/client_secrets", json={})
            assert (secret.status_code, secret.json()["error"]["code"]) == (503, "engine_not_ready")
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://127.0.0.1:{port}/v1/realtime", proxy=None):
                    pass
            assert refused.value.response.status_code == 503
            assert b"engine_not_ready" in (refused.value.response.body or b"")
            while f"waiting for an engine at {address}" not in said_first:
                said_first += (await process.stderr.readline()).decode()
            engine.start()
            assert b"the page:" in await process.stdout.readline(), "said when sessions are served"
            assert await status(http, "/ready") == (200, "ready")
            async with raw_client(f"ws://127.0.0.1:{port}/v1/realtime") as client:
                assert (await client.receive())["type"] == "session.created"
            process.send_signal(signal.SIGTERM)
            _, said = await process.communicate()
    finally:
        stop.set()
        engine.join()
    assert process.returncode == 0, said.decode()
    assert "Traceback" not in said_first + said.decode()


async def test_server_that_waits_for_an_engine_can_be_stopped(tmp_path: Path) -> None:
    port = free_port()
    process = await start("serve", "--engine", f"ipc://{tmp_path}/nobody", "--port", str(port))
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        await until_it_listens(http)
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()
    assert process.returncode == 0 and "Traceback" not in said.decode()


async def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    process = await start("serve", "--model", str(tmp_path), "--port", "0")
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    assert process.returncode == 1
    assert said.decode().splitlines()[-1].startswith("error: ") and "Traceback" not in said.decode()


@pytest.fixture
def stuck_engine(tmp_path: Path) -> Iterator[str]:
    """An engine that takes streams, and from then on is in one step until the test is over."""
    over = threading.Event()

    def build_stuck() -> EngineLoop:
        loop = build()
        loop.runner.compute = lambda *_: over.wait() and []  # type: ignore[attr-defined]
        return loop

    address = f"ipc://{tmp_path}/engine"
    thread = threading.Thread(target=run_engine, args=(address, build_stuck, over.is_set, False), daemon=True)
    thread.start()
    yield address
    over.set()
    thread.join()


@pytest.mark.parametrize("signals", [1, 2])
async def test_the_second_interrupt_stops_at_once(stuck_engine: str, signals: int) -> None:
    """A turn waits for its text: the first lets it finish, for as long as it may take."""
    drain_s = 4
    process = await start("serve", "--engine", stuck_engine, "--port", "0", "--server.drain-s", str(drain_s))
    assert process.stdout is not None
    async with asyncio.timeout(60):
        found = re.search(r"http://127.0.0.1:(\d+)/", (await process.stdout.readline()).decode())
        assert found is not None
        async with raw_client(f"ws://127.0.0.1:{found[1]}/v1/realtime") as client:
            await client.update(turn_detection=None)
            await client.append(bytes(48_000))
            await client.send("input_audio_buffer.commit")
            await client.until("input_audio_buffer.committed")
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            # The first one is taken in before the second comes.
            await client.until("session.closing")
            if signals == 2:
                process.send_signal(signal.SIGINT)
            _, said = await process.communicate()
            took = time.monotonic() - began
    assert process.returncode == 0 and "Traceback" not in said.decode(), said.decode()
    assert said.decode().endswith("stopped\n")
    assert took >= drain_s if signals == 1 else took < drain_s - 1


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_two_servers_on_one_port_are_one_sentence(tmp_path: Path, engine_address: str, workers: str) -> None:
    async with serving(tmp_path, "--engine", engine_address, "--port", "0", "--workers", workers) as first:
        for others in ("1", "2"):
            flags = ("--engine", engine_address, "--port", str(first.port), "--workers", others)
            process = await start("serve", *flags)
            _, said = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 1
            text = f"error: cannot listen on 127.0.0.1 port {first.port}: Address already in use; "
            assert said.decode() == f"{text}choose another --host or --port\n"
        assert await first.stop() == 0


# The command as it is, but that it finds the port free: as if it were taken between the check and listening.
WITHOUT_CHECK = """
import sys
import realtime.commands.serve
realtime.commands.serve.check_port = lambda host, port: None
from realtime.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_port_that_is_taken_after_the_check_is_one_sentence_and_no_engine_is_left(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--port", str(port), "--workers", workers, "--model", "moonshine-tiny")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WITHOUT_CHECK, "serve", *flags, start_new_session=True,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            # Its output ends with its last process: the engine has it too.
            said, _ = await asyncio.wait_for(process.communicate(), 60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    text = f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --host or --port"
    assert said.decode() == f"{text}\n"


async def test_a_folder_as_the_table_of_engines_is_one_sentence(tmp_path: Path) -> None:
    process = await start("serve", "--engine-table", str(tmp_path), "--port", "0")
    try:
        _, said = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 2
    text = f"error: fleet.table: '{tmp_path}' is not a regular file; set the path of a JSON file that the fleet's"
    assert said.decode() == f"{text} supervisor writes\n"


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "said"),
    [
        (["--server.prot", "1"], {}, 2, "unrecognized arguments: --server.prot"),
        ([], {"TICKERTAPE_SERVER_PROT": "1"}, 2, "TICKERTAPE_SERVER_PROT; did you mean 'TICKERTAPE_SERVER_PORT'?"),
        (["--config", "{folder}/c.toml"], {}, 2, "unknown key 'server.prot'; did you mean 'server.port'?"),
        (["--config", "{folder}/none.toml"], {}, 2, "cannot read the configuration file"),
        (
            ["--server.tls-cert", "{folder}/a", "--server.tls-key", "{folder}/b"],
            {},
            2,
            "server.tls_cert: there is no file",
        ),
        (["--server.tls-cert", "{folder}/c.toml", "--server.tls-key", "{folder}/c.toml"], {}, 2, "must be PEM files"),
        (
            [],
            {"TMPDIR": "{folder}/none"},
            1,
            "where no file can be created: No such file or directory; create the folder",
        ),
        ([], {"TMPDIR": "{folder}/c.toml"}, 1, "where no file can be created: Not a directory; create the folder"),
        (
            ["--host", "192.0.2.1", "--no-auth"],
            {},
            1,
            "Cannot assign requested address; choose another --host",
        ),
    ],
)
async def test_a_start_that_cannot_be_is_one_sentence_with_the_way_out(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], code: int, said: str
) -> None:
    (tmp_path / "c.toml").write_text("[server]\nprot = 1\n")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    variables = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    flags = ("--engine", "ipc:///nobody/there", *filled)
    async with serving(tmp_path, *flags, environment=variables, ready=False) as server:
        async with asyncio.timeout(60):
            assert await server.process.wait() == code, server.said
        lines = [line for line in server.said.splitlines() if not line.startswith(("usage: ", " "))]
        assert len(lines) == 1 and said in lines[0], server.said


def fork_servers(session: int) -> list[int]:
    """The fork servers among the processes of a session, which import the engine's modules for seconds."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"multiprocessing.forkserver" in path.read_bytes() and os.getsid(int(path.parent.name)) == session:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_ctrl_c_while_the_engine_starts_prints_no_traceback(workers: str) -> None:
    flags = ("--port", str(free_port()), "--workers", workers, "--model", "moonshine-tiny")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "realtime.cli", "serve", *flags, start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(200):
            await until(lambda: fork_servers(process.pid))
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            said, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in said.decode()


@pytest.mark.timeout(300)
async def test_the_command_of_an_engine_serves_a_gateway_and_ends_when_told(tmp_path: Path) -> None:
    """`tickertape engine` and `tickertape serve --engine`, with a real model."""
    skip_unless_cached("moonshine-tiny", "sample-two-cities")
    (recording,) = (cache_folder() / "sample-two-cities").glob("*.wav")
    beginning = io.BytesIO()
    with wave.open(str(recording)) as file, wave.open(beginning, "wb") as part:
        part.setparams(file.getparams())
        part.writeframes(file.readframes(6 * file.getframerate()))
    address = f"ipc://{tmp_path}/engine"
    engine = await start("engine", "--listen", address, "--model", "moonshine-tiny")
    assert engine.stderr is not None
    try:
        async with serving(tmp_path, "--engine", address, "--port", "0") as server:
            async with httpx.AsyncClient(base_url=server.http, trust_env=False, timeout=200) as http:
                form = {"model": (None, "moonshine-tiny"), "file": ("a.wav", beginning.getvalue())}
                answer = await http.post("/v1/audio/transcriptions", files=form)
            assert answer.status_code == 200 and "best of times" in answer.json()["text"].lower()
            engine.send_signal(signal.SIGTERM)
            _, said = await asyncio.wait_for(engine.communicate(), 60)
            assert engine.returncode == 0 and b"Traceback" not in said, said
            assert await server.stop() == 0
    finally:
        with suppress(ProcessLookupError):
            engine.kill()
        await engine.wait()
