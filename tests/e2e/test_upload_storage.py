"""The resources of uploads: texts of forms in memory, files on a full disk, answers that clients do not read."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import resource
import socket
import subprocess
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import httpx
import pytest

from realtime.http.prepared_audio_routes import PrepareRoutes
from realtime.http.upload_forms import IN_MEMORY_BYTES, MAX_FORM_BYTES, Form, Spool, Upload
from tests.e2e.conftest import Running, Serve
from tests.e2e.test_deepgram_files import wav as pcm_wav
from tests.e2e.test_openai_client import wav
from tests.e2e.test_uploads import PART, file, until
from tests.realtime.gateway_doubles import FakeEngine

INJECTS = {"inject": True}
HEAD = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def request(
    running: Running, path: str = "/v1/audio/transcriptions"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose body is sent by hand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(HEAD.format(path=path).encode())
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))


def text_field(number: int, letters: int) -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="f{number}"\r\n\r\n'.encode()
    return head + b"x" * letters + "😀".encode() + b"\r\n"


async def test_texts_of_unfinished_forms_are_bounded_and_given_back(serve: Serve, spools: list[Spool]) -> None:
    """Three forms of 600 fields of 64 KiB each held 441 MiB, and none of them was ever complete."""
    async with serve() as running:
        for _ in range(3):
            async with request(running) as (reader, writer):
                for number in range(600):
                    writer.write(chunk(text_field(number, 60_000)))
                    await asyncio.sleep(0)
                    if reader._buffer:  # type: ignore[attr-defined]
                        break
                status, body = await answer(reader)
                assert (status, body["error"]["code"]) == (413, "form_too_large")
                assert str(MAX_FORM_BYTES) in body["error"]["message"]
        assert running.metric("refused_total", reason="form_too_large") == 3
        # A form that is begun and left holds what it sent, and then nothing.
        async with request(running) as (_, writer):
            writer.write(chunk(text_field(0, 50_000) + text_field(1, 50_000)))
            await until(lambda: spools[0].text_bytes >= 100_000)
            assert spools[0].text_bytes < 130_000, "a letter of four bytes does not make the others as long"
        await until(lambda: spools[0].text_bytes == 0)
        assert (spools[0].uploads, spools[0].bytes) == (0, 0)


# A disk that is full, and no more open files


@contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    """A real disk with room for a megabyte and a half."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("only root may mount a disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(params=["a tiny disk", "/dev/full"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR is on a disk without room: what is written there fails in the system, as it would on any full disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "/dev/full":
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "r+b"))
        yield tmp_path
        return
    with tiny_disk(tmp_path):
        yield tmp_path


def free_bytes(folder: Path) -> int:
    """How much room there is on a tiny disk; other disks have too many users to say."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks * found.f_frsize < 4 * IN_MEMORY_BYTES else 0


async def test_a_full_disk_is_told_counted_and_leaves_nothing_behind(
    serve: Serve, full_disk: Path, spools: list[Spool], caplog: pytest.LogCaptureFixture
) -> None:
    large, free = wav(80.0), await asyncio.to_thread(free_bytes, full_disk)
    assert len(large) > 2 * IN_MEMORY_BYTES
    async with serve() as running, httpx.AsyncClient() as http:
        for number in range(1, 3):
            response = await http.post(f"{running.base_url}/audio/transcriptions", files={"file": ("a.wav", large)})
            assert response.status_code == 507, response.text
            assert response.json()["error"]["code"] == "disk_full" and "disk" in response.json()["error"]["message"]
            assert running.metric("refused_total", reason="disk_full") == number
        response = await http.post(f"{running.base_url}/listen", content=large)
        assert response.status_code == 507 and "disk" in response.json()["err_msg"]
        assert await asyncio.to_thread(os.listdir, full_disk) == []
        assert await asyncio.to_thread(free_bytes, full_disk) == free, "files without a name take room too"
        assert (spools[0].uploads, spools[0].bytes) == (0, 0)
        # A file that needs no disk goes on.
        assert (await http.post(f"{running.base_url}/audio/transcriptions", files=file())).status_code == 200
    said = [record for record in caplog.records if record.name == "tickertape.uploads"]
    assert len(said) == 1 and str(full_disk) in said[0].getMessage() and said[0].exc_info is None
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == said, "nothing but that"


async def test_a_server_without_a_free_descriptor_says_so_and_goes_on(serve: Serve, spools: list[Spool]) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        async with request(running) as (reader, writer):
            writer.write(chunk(PART + bytes(IN_MEMORY_BYTES // 2)))
            await until(lambda: spools[0].bytes > IN_MEMORY_BYTES // 2)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            try:
                writer.write(chunk(bytes(IN_MEMORY_BYTES)))
                status, body = await answer(reader)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (status, body["error"]["code"]) == (503, "too_many_open_files")
        assert running.metric("refused_total", reason="too_many_open_files") == 1
        assert (spools[0].uploads, spools[0].bytes) == (0, 0)
        assert (await http.post(f"{running.base_url}/audio/transcriptions", files=file())).status_code == 200


# Answers that clients do not read


@asynccontextmanager
async def unread(running: Running, path: str, form: dict[str, Any]) -> AsyncIterator[None]:
    """Send a request and read nothing of its answer, with as small a buffer as the system allows; then leave."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    built = httpx.Request("POST", f"{running.http}{path}", **form)
    head = "".join(f"{name}: {value}\r\n" for name, value in built.headers.items())
    with connection:
        await loop.sock_connect(connection, ("127.0.0.1", running.port))
        await loop.sock_sendall(connection, f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + built.read())
        yield
        # What is unread makes the system reset the connection.


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> list[PrepareRoutes]:
    made: list[PrepareRoutes] = []

    class Seen(PrepareRoutes):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("realtime.http.routes.PrepareRoutes", Seen)
    return made


async def test_rendering_is_off_unless_configured(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        response = await http.post(f"{running.base_url}/audio/render", files=file())
        assert (response.status_code, response.json()["error"]["code"]) == (403, "render_not_allowed")
        assert "server.inject" in response.json()["error"]["message"]


async def test_unread_renderings_count_until_they_have_left(
    serve: Serve, spools: list[Spool], renders: list[PrepareRoutes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realtime.http.prepared_audio_routes.MAX_RENDERED_BYTES", 30_000_000)
    # Noise: items that are equal go out once.
    form = {"files": {"file": ("a.wav", pcm_wav(random.Random(0).randbytes(2 * 120 * 16_000)), "audio/wav")}}
    async with serve(server=INJECTS) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/render"
        async with unread(running, "/v1/audio/render", form):
            await until(lambda: renders[0].rendered_bytes > 15_000_000 and spools[0].bytes == 0)
            refused = await http.post(url, **form)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "render_busy")
            assert refused.headers["retry-after"] and renders[0].rendered_bytes < 20_000_000
        await until(lambda: renders[0].rendered_bytes == 0 and spools[0].uploads == 0)
        response = await http.post(url, **form)
        assert response.status_code == 200 and response.json()["samples"] == 120 * 16_000
        assert renders[0].rendered_bytes == 0


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_an_answer_that_nobody_reads_keeps_its_place_until_its_client_is_gone(
    serve: Serve, spools: list[Spool], stream: str
) -> None:
    """Otherwise any number of them could wait in memory."""
    engine = FakeEngine(words=["w" * 4000])
    limits = {"uploads": 1, "uploads_waiting": 0}
    async with serve(engine, limits=limits) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        form = {"files": {"file": ("a.wav", wav(400.0), "audio/wav")}, "data": {"stream": stream}}
        async with unread(running, "/v1/audio/transcriptions", form):
            await until(lambda: len(engine.streams) == 1 and (stream == "true" or not engine.active))
            await until(lambda: spools[0].bytes == 0 or stream == "true")
            refused = await http.post(url, files=file())
            assert refused.status_code == 503 and spools[0].uploads == 1
        await until(lambda: spools[0].uploads == 0 and spools[0].bytes == 0)
        assert (await http.post(url, files=file())).status_code == 200


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
async def test_a_refused_upload_leaves_no_memory_to_the_garbage_collector(
    serve: Serve, full_disk: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The error of a full disk refers to the frames that it came through, and so to the megabyte that was not stored.
    If a frame refers to the error in turn, both stay until a collection, which is rare in a server."""
    kept: list[weakref.ref[Any]] = []

    class Store(SpooledTemporaryFile):  # type: ignore[type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            kept.append(weakref.ref(self._file))  # type: ignore[attr-defined]

    class SeenUpload(Upload):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(weakref.ref(self))

    monkeypatch.setattr("realtime.http.upload_forms.SpooledTemporaryFile", Store)
    monkeypatch.setattr("realtime.http.upload_forms.Upload", SeenUpload)
    large = wav(80.0)
    form: dict[str, Any] = {"content": large} if path == "/v1/listen" else {"files": {"file": ("a.wav", large)}}
    async with serve() as running, httpx.AsyncClient() as http:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert (await http.post(f"{running.http}{path}", **form)).status_code == 507
            await until(lambda: not any(found() is not None for found in kept))
        finally:
            gc.enable()
        assert len(kept) == 10


async def test_forms_leave_no_memory_to_the_garbage_collector(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a form are counted until the request ends, so they must be gone then, whether it was accepted or not."""
    kept: list[weakref.ref[Any]] = []

    class SeenForm(Form):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(weakref.ref(self))

    monkeypatch.setattr("realtime.http.upload_forms.Form", SeenForm)
    good = {"files": file(), "data": {"prompt": "x" * 10_000}}
    forms: list[tuple[int, dict[str, Any]]] = [
        (200, good),
        (400, {"data": {"prompt": "x" * 10_000}, "files": {"other": ("a.wav", b"x")}}),
        (413, {"files": file(), "data": {f"f{number}": "x" * 60_000 for number in range(6)}}),
        (400, {"content": b"--b\r\nno form", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}),
    ]
    async with serve() as running, httpx.AsyncClient() as http:
        gc.collect()
        gc.disable()
        try:
            for status, form in forms:
                response = await http.post(f"{running.base_url}/audio/transcriptions", **form)
                assert response.status_code == status, response.text
                await until(lambda: not any(found() is not None for found in kept))
        finally:
            gc.enable()
        assert len(kept) >= len(forms)
