"""`tickertape` as a process beside a running server: refused, cut off, left alone; uploads, pipes and a microphone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Running, Serve
from tests.e2e.test_examples import cut_sockets
from tests.realtime.commands.conftest import sound, write_wav
from tests.realtime.gateway_doubles import MULTILINGUAL

KEYS = {"keys": ("a-long-secret",)}


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Starting a process blocks a little; that is this test's doing, not the server's."""
    yield


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "realtime.cli", *arguments),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=clean | environment,
    )


async def run(*arguments: str, given: bytes | None = None, **environment: str) -> tuple[int, str, str]:
    process = await start(*arguments, **environment)
    shown, said = await asyncio.wait_for(process.communicate(given), 60)
    return process.returncode or 0, shown.decode(), said.decode()


# Files


async def test_server_that_is_not_there_or_does_not_let_us_in_is_said(serve: Serve, tmp_path: Path) -> None:
    file = str(write_wav(tmp_path / "a.wav", sound(1.0)))
    code, shown, said = await run("transcribe", "--server", "http://127.0.0.1:9", file)
    assert (code, shown) == (1, "") and "no server answers at http://127.0.0.1:9" in said and said.count("\n") == 1
    async with serve(auth=KEYS) as running:
        code, _, said = await run("transcribe", "--server", running.http, file)
        assert code == 1 and "refused with 401" in said and "TICKERTAPE_API_KEY" in said
        code, shown, said = await run("transcribe", "--server", running.http, file, TICKERTAPE_API_KEY="a-long-secret")
        assert (code, shown) == (0, "w1 w2\n"), said
        code, shown, _ = await run("status", "--json", running.http, TICKERTAPE_API_KEY="a-long-secret")
        assert code == 0 and json.loads(shown)["status"] == "ready"


async def test_file_that_the_server_refuses_is_named_and_the_others_are_done(serve: Serve, tmp_path: Path) -> None:
    good = write_wav(tmp_path / "good.wav", sound(1.0))
    large = write_wav(tmp_path / "large.wav", sound(8.0))
    (tmp_path / "text.wav").write_text("this is not audio at all, only words in a file")
    async with serve(limits={"upload_bytes": 100_000}) as running:
        files = [str(large), str(tmp_path / "text.wav"), str(good)]
        code, shown, said = await run("transcribe", "--server", running.http, *files)
    assert code == 1 and shown == f"== {good}\nw1 w2\n"
    assert "large.wav: the server refused with 413" in said and "text.wav: the server refused with 400" in said


async def test_server_answers_become_every_format(serve: Serve, tmp_path: Path) -> None:
    file = write_wav(tmp_path / "a.wav", sound(2.0))
    async with serve() as running:
        running.engine.words = ["One", "two.", "Three", "four."]
        out = ["--json", "--srt", "--vtt", "--words", "--output-dir", str(tmp_path / "out")]
        code, _, said = await run("transcribe", "--server", f"{running.http}/v1", *out, str(file))
        assert code == 0, said
        local = tmp_path / "out" / "a.json"
        body = json.loads(local.read_text())
    assert body["text"] == "One two. Three four." and body["model"] == "fake-model" and body["seconds"] == 2.0
    assert [word["word"] for word in body["words"]] == ["One", "two.", "Three", "four."]
    assert (tmp_path / "out" / "a.srt").read_text().count(" --> ") == 2


async def test_what_the_servers_model_does_not_take_is_said_once(serve: Serve, tmp_path: Path) -> None:
    files = [str(write_wav(tmp_path / name, sound(0.9))) for name in ("a.wav", "b.wav")]
    async with serve() as running:
        running.engine.takes(replace(MULTILINGUAL, prompt=False))
        wishes = ["--language", "de", "--keyword", "tape", "--server", running.http]
        code, _, said = await run("transcribe", *wishes, *files)
        assert code == 0 and said.count("fake-model does not support keywords; continuing without") == 1
        assert [opened["options"] for opened in running.engine.opened] == [{"language": "de"}] * 2
        code, shown, said = await run("transcribe", "--live", *wishes, files[0])
        assert code == 0 and said.count("does not support keywords") == 1 and "w1 w2" in shown
        assert running.engine.opened[-1]["options"] == {"language": "de"}


async def test_pipe_goes_to_the_server_whole_or_live(serve: Serve, tmp_path: Path) -> None:
    data = bytearray(write_wav(tmp_path / "a.wav", sound(3.0)).read_bytes())
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"
    async with serve() as running:
        code, shown, said = await run("transcribe", "--server", running.http, "-", given=bytes(data))
        assert (code, shown) == (0, "w1 w2 w3 w4 w5 w6 w7\n"), said
        code, shown, said = await run("transcribe", "--live", "--server", running.http, "-", given=bytes(data))
        assert code == 0 and "w1 w2 w3 w4 w5 w6 w7" in shown, said
        code, _, said = await run("transcribe", "--server", running.http, "-", given=b"")
        assert code == 1 and said.startswith("error: standard input: the server refused with 400")


# A microphone


@pytest.fixture
def microphone(tmp_path: Path) -> dict[str, str]:
    """A recorder that plays `sound` in real time, then silence, until it is told to stop."""
    (tmp_path / "pcm").write_bytes((sound(4.0) * 32767).astype("<i2").tobytes())
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "arecord"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, time, itertools\n"
        f"sound = open({str(tmp_path / 'pcm')!r}, 'rb').read() + bytes(32000)\n"
        f"played = open({str(tmp_path / 'played')!r}, 'a')\n"
        "began = time.monotonic()\n"
        "for number in itertools.count():\n"
        "    chunk = sound[2560 * number : 2560 * (number + 1)] or bytes(2560)\n"
        "    time.sleep(max(0.0, began + 0.08 * number - time.monotonic()))\n"
        "    sys.stdout.buffer.write(chunk)\n"
        "    sys.stdout.buffer.flush()\n"
        "    played.write('.')\n"
        "    played.flush()\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    blocked = tmp_path / "without"
    blocked.mkdir()
    # A machine that has the package would use it.
    (blocked / "sounddevice.py").write_text("raise OSError('no PortAudio here')\n")
    root = Path(__file__).parents[2]
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{root}:{blocked}"}


async def until(condition: object, seconds: float = 40.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def said_words(text: str) -> list[str]:
    return [word for word in text.split() if word.startswith("w") and word[1:].isdigit()]


ALL_WORDS = [f"w{number}" for number in range(1, 11)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_microphone_is_saved_while_it_is_heard(
    serve: Serve, microphone: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    talk = tmp_path / "talk.srt"
    async with serve() as running:
        process = await start("mic", "--server", running.http, "--output", str(talk), **microphone)
        await until(lambda: talk.exists() and "w10" in talk.read_text())
        process.send_signal(number)
        shown, said = await asyncio.wait_for(process.communicate(), 30)
    assert said_words(talk.read_text()) == ALL_WORDS and talk.read_text().startswith("1\n00:00:0")
    if number == signal.SIGINT:
        assert process.returncode == 0, said.decode()
        assert said_words(shown.decode().partition("words were shown")[0]) == ALL_WORDS


async def test_microphone_goes_on_after_the_line_dropped(
    serve: Serve, microphone: dict[str, str], tmp_path: Path
) -> None:
    talk = tmp_path / "talk.txt"
    async with serve() as running:
        process = await start("mic", "--server", running.http, "--output", str(talk), "--words", **microphone)
        for word in ("w2", "w6"):
            await until(lambda word=word: talk.exists() and word in talk.read_text())
            cut_sockets(running)
            await until(lambda: running.gateway.sessions.connected)
        await until(lambda: "w10" in talk.read_text())
        process.send_signal(signal.SIGINT)
        shown, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, said.decode()
    assert "the connection broke off" in shown.decode()
    assert said_words(talk.read_text()) == ALL_WORDS
    assert len(running.engine.streams) == 1, "the session was resumed, not begun anew"
    starts = [float(line.split("\t")[0]) for line in talk.read_text().splitlines()]
    assert np.allclose(np.diff(starts), 0.4, atol=0.05)


async def test_server_that_restarts_gets_the_sound_that_was_kept(
    serve: Serve, microphone: dict[str, str], tmp_path: Path
) -> None:
    """The old session is gone: a new one begins with what the old server had not got, at the right time."""
    talk = tmp_path / "talk.txt"
    async with serve() as first:
        arguments = ("mic", "--server", first.http, "--output", str(talk), "--words")
        process = await start(*arguments, **microphone)
        await until(lambda: talk.exists() and "w2" in talk.read_text())
        port = first.port
    # A second is spoken while there is no server.
    before = len((tmp_path / "played").read_text())
    await until(lambda: len((tmp_path / "played").read_text()) > before + 12)
    async with serve(server={"port": port}) as second:
        assert isinstance(second, Running)
        await until(lambda: second.engine.streams and len(talk.read_text().splitlines()) > 5)
        await until(lambda: float(talk.read_text().splitlines()[-1].split("\t")[1]) > 3.0)
        process.send_signal(signal.SIGINT)
        shown, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, said.decode()
    ends = [float(line.split("\t")[1]) for line in talk.read_text().splitlines()]
    assert ends == sorted(ends) and 3.0 < ends[-1] <= 4.2, "times go on from where the old server was left"
    assert "trying again" in shown.decode()


async def test_microphone_says_what_is_wrong_before_it_records(
    serve: Serve, microphone: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "there.srt").write_text("1\n")
    for arguments, code, told in (
        (("--output", str(tmp_path / "there.srt")), 2, "exists already"),
        (("--output", str(tmp_path / "talk")), 2, "is not known; end its name in"),
        (("--format", "srt"), 2, "add --output FILE"),
        (("--output", str(tmp_path / "new.srt"), "--server", "http://127.0.0.1:9"), 1, "no server answers"),
    ):
        got, _, said = await run("mic", *arguments, **microphone)
        assert (got, told in said) == (code, True), said
    assert not (tmp_path / "new.srt").exists(), "nothing was said, so nothing is left behind"
