"""Container audio on the event loop: in steps, with back-pressure, and never stuck behind a decoder that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from audio.containers import MAX_PACKET_SAMPLES, STEP_SAMPLES
from audio.errors import AudioError, CorruptAudio, DecodingTooSlow, TooManyDecoders, UnsupportedFormat
from realtime.serving import isolated_decoder
from realtime.serving.decoder_process import MAX_DECODER_BYTES
from realtime.serving.inbox import ContainerStream
from realtime.serving.isolated_decoder import DECODERS_AT_ONCE, IsolatedDecoder, decoded_file
from realtime.session.events import Samples
from tests.audio.test_containers import KINDS, SECONDS, assert_is_the_tone, write
from tests.waiting import stays

MINUTES_OF_SILENCE = write("flac", "flac", 16_000, {}, np.zeros((1, 16_000 * 120), np.float32))
FLAC = write(*KINDS["flac"])


async def everything(stream: ContainerStream, data: bytes) -> list[Samples]:
    steps = [samples async for samples in stream.decode(data)]
    return [*steps, *[samples async for samples in stream.decode(None)]]


def spooled(data: bytes, rolled: bool) -> BinaryIO:
    """As uploads are kept: on disk, or in memory while they are short."""
    file = tempfile.SpooledTemporaryFile(max_size=1 << 30)
    file.write(data)
    if rolled:
        file.rollover()
    return cast(BinaryIO, file)


async def file_steps(data: bytes, rolled: bool = True) -> list[Samples]:
    steps: list[Samples] = []
    file = await asyncio.to_thread(spooled, data, rolled)
    try:
        async for samples in decoded_file(file):
            steps.append(samples)  # noqa: PERF401 (what came before the error counts)
        return steps
    except AudioError as error:
        error.args = (*error.args, sum(map(len, steps)))
        raise
    finally:
        await asyncio.to_thread(file.close)


async def known(pid: int, name: str) -> str:
    """What the system says about a process."""
    return await asyncio.to_thread(Path(f"/proc/{pid}/{name}").read_text)


def parents() -> dict[int, int]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def program() -> int:
    assert isolated_decoder._forks._process is not None
    return isolated_decoder._forks._process.pid


def decoders() -> list[int]:
    """Processes that decode something now."""
    return [pid for pid, parent in parents().items() if parent == program() and not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_and_a_file_are_the_tone(kind: str) -> None:
    data = write(*KINDS[kind])
    assert_is_the_tone(np.concatenate(await everything(ContainerStream(), data)), SECONDS)
    for rolled in (True, False):
        assert_is_the_tone(np.concatenate(await file_steps(data, rolled)), SECONDS)


async def test_a_piece_comes_in_steps_and_the_next_one_waits_for_the_last() -> None:
    for steps in (await everything(ContainerStream(), MINUTES_OF_SILENCE), await file_steps(MINUTES_OF_SILENCE)):
        assert sum(map(len, steps)) == 120 * 16_000 and len(steps) > 20
        assert max(map(len, steps)) <= STEP_SAMPLES + MAX_PACKET_SAMPLES
    stream = ContainerStream()
    decoding = stream.decode(MINUTES_OF_SILENCE)
    await anext(decoding)
    (pid,) = await asyncio.to_thread(decoders)
    stat = Path(f"/proc/{pid}/stat")
    await asyncio.to_thread(until, lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
    assert stream._decoder is not None
    with pytest.raises(BlockingIOError):
        stream._decoder._line.recv(1)  # it waits, and has made nothing more
    await decoding.aclose()
    stream.close()
    await asyncio.to_thread(until, lambda: not decoders())


async def test_pieces_of_any_size_give_the_same_samples() -> None:
    for size in (1, 1000, 100_000):
        stream, steps = ContainerStream(), []
        for start in range(0, 4000 if size == 1 else len(FLAC), size):
            steps += [samples async for samples in stream.decode(FLAC[start : start + size])]
        if size > 1:
            steps += [samples async for samples in stream.decode(None)]
            assert_is_the_tone(np.concatenate(steps), SECONDS)
        stream.close()


async def test_an_end_without_a_byte_is_no_error_and_a_fault_is() -> None:
    stream = ContainerStream()
    assert [samples async for samples in stream.decode(None)] == []
    with pytest.raises(CorruptAudio):
        await everything(ContainerStream(), FLAC[:50])
    stream = ContainerStream()
    for _ in range(2):
        with pytest.raises(UnsupportedFormat, match="the codec 'mp2' is not served"):
            await everything(stream, write("matroska", "mp2", 48_000, {}))
    with pytest.raises(AudioError, match="no bytes"):
        await file_steps(b"")


async def test_what_came_before_a_fault_is_heard() -> None:
    for fault in (FLAC[: len(FLAC) // 2], write(*KINDS["mp3"])[:30_000] + bytes(20_000)):
        with pytest.raises(CorruptAudio) as error:
            await file_steps(fault)
        assert error.value.args[1] > 10_000


async def test_decoders_that_hang_are_ended_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than places."""
    streams = [ContainerStream() for _ in range(3 * DECODERS_AT_ONCE)]
    for stream in streams:
        async for _ in stream.decode(FLAC[:100]):
            pass
    hanging = await asyncio.to_thread(decoders)
    assert len(hanging) == len(streams)
    for pid in hanging:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(isolated_decoder, "MAX_STEP_S", 0.1)
    stuck = await asyncio.gather(*(everything(stream, FLAC[100:]) for stream in streams), return_exceptions=True)
    assert all(isinstance(error, DecodingTooSlow) for error in stuck)
    monkeypatch.undo()
    async with asyncio.timeout(10):
        assert_is_the_tone(np.concatenate(await everything(ContainerStream(), FLAC)), SECONDS)
        await asyncio.to_thread(until, lambda: not decoders())


async def test_a_decoder_that_dies_costs_its_own_audio_only() -> None:
    dying, other = ContainerStream(), ContainerStream()
    async for _ in dying.decode(FLAC[:100]):
        pass
    (pid,) = await asyncio.to_thread(decoders)
    async for _ in other.decode(FLAC[:100]):
        pass
    os.kill(pid, signal.SIGSEGV)
    for _ in range(2):
        with pytest.raises(CorruptAudio, match="decoder crashed on this audio"):
            await everything(dying, FLAC[100:])
    assert_is_the_tone(np.concatenate(await everything(other, FLAC[100:])), SECONDS)


async def test_the_program_is_started_anew_when_it_is_gone() -> None:
    await file_steps(FLAC)
    gone = program()
    os.kill(gone, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: is_zombie(gone))
    assert_is_the_tone(np.concatenate(await file_steps(FLAC)), SECONDS)
    assert program() != gone


async def test_a_decoder_may_take_only_so_much_memory_and_has_no_secrets() -> None:
    with closing(ContainerStream()) as stream:
        async for _ in stream.decode(FLAC[:100]):
            pass
        (pid,) = await asyncio.to_thread(decoders)
        limits = {line[:26].strip(): line[26:].split() for line in (await known(pid, "limits")).splitlines()}
        pages = int((await known(pid, "statm")).split()[0]) * os.sysconf("SC_PAGE_SIZE")
        assert int(limits["Max address space"][0]) <= pages + MAX_DECODER_BYTES
        assert limits["Max file size"][0] == "0" and int(limits["Max open files"][0]) == 16
        # Settings and secrets have this prefix; the format of the log is passed on by another name.
        assert not [name for name in (await known(pid, "environ")).split("\0") if name.startswith("TICKERTAPE_")]


async def test_a_machine_that_can_start_no_decoder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", no_descriptors)
    with pytest.raises(TooManyDecoders, match="Too many open files"):
        await everything(ContainerStream(), FLAC)


async def test_a_closed_stream_gives_nothing_more() -> None:
    stream = ContainerStream()
    decoding = stream.decode(MINUTES_OF_SILENCE)
    await anext(decoding)
    stream.close()
    stream.close()
    assert [samples async for samples in stream.decode(b"more")] == []
    await decoding.aclose()
    await asyncio.to_thread(until, lambda: not decoders())


async def test_a_stream_that_is_closed_while_it_decodes_gives_nothing_more() -> None:
    stream = ContainerStream()
    async for _ in stream.decode(FLAC[:100]):
        pass
    (pid,) = await asyncio.to_thread(decoders)
    os.kill(pid, signal.SIGSTOP)
    decoding = asyncio.ensure_future(everything(stream, FLAC[100:]))
    await stays(lambda: not decoding.done(), 0.05)
    stream.close()
    async with asyncio.timeout(5):
        assert await decoding == []
    await asyncio.to_thread(until, lambda: not decoders())


async def test_a_decoder_whose_beginning_is_not_waited_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = isolated_decoder._start_fork, []
    entered, go_on = threading.Event(), threading.Event()

    def seen(file: BinaryIO | None, kind: bytes) -> Any:
        entered.set()
        go_on.wait(60)
        begun.append(begin(file, kind))
        return begun[-1]

    monkeypatch.setattr(isolated_decoder, "_start_fork", seen)
    beginning = asyncio.ensure_future(IsolatedDecoder.begin())
    assert await asyncio.to_thread(entered.wait, 60)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    go_on.set()
    await asyncio.to_thread(until, lambda: len(begun) == 1 and begun[0][0].fileno() < 0)
    await asyncio.to_thread(until, lambda: not decoders())
