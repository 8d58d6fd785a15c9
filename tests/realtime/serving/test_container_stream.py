"""Container audio on the event loop: in steps, with back-pressure, and never stuck behind a decoder that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from audio.containers import MAX_PACKET_SAMPLES, STEP_SAMPLES
from audio.errors import CorruptAudio, DecodingTooSlow
from realtime.serving.container_stream import AT_ONCE, ContainerStream
from realtime.session.events import Samples
from tests.audio.test_containers import KINDS, write

MINUTES_OF_SILENCE = write("flac", "flac", 16_000, {}, np.zeros((1, 16_000 * 120), np.float32))


async def everything(stream: ContainerStream, data: bytes) -> list[Samples]:
    steps = [samples async for samples in stream.decode(data)]
    return [*steps, *[samples async for samples in stream.decode(None)]]


async def test_a_piece_comes_in_steps_and_the_next_one_waits_for_the_last() -> None:
    stream = ContainerStream()
    steps = await everything(stream, MINUTES_OF_SILENCE)
    assert sum(map(len, steps)) == 120 * 16_000 and len(steps) > 20
    assert max(map(len, steps)) <= STEP_SAMPLES + MAX_PACKET_SAMPLES
    stream = ContainerStream()
    decoding = stream.decode(MINUTES_OF_SILENCE)
    await anext(decoding)
    await asyncio.sleep(0.2)
    assert stream._decoder is not None and stream._decoder._made.samples == 0
    await decoding.aclose()
    stream.close()


async def test_an_end_without_a_byte_is_no_error_and_a_fault_is() -> None:
    stream = ContainerStream()
    assert [samples async for samples in stream.decode(None)] == []
    with pytest.raises(CorruptAudio):
        await everything(ContainerStream(), write(*KINDS["flac"])[:50])


async def test_decoders_that_hang_are_given_up_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than places, and than threads of the pool."""
    go_on = threading.Event()

    def hanging(*_: object) -> Iterator[NDArray[np.float32]]:
        go_on.wait()
        return iter(())

    monkeypatch.setattr("audio.containers._decode", hanging)
    monkeypatch.setattr("realtime.serving.container_stream.MAX_STEP_S", 0.1)
    stuck = await asyncio.gather(
        *(everything(ContainerStream(), b"OggS" + bytes(100)) for _ in range(3 * AT_ONCE)), return_exceptions=True
    )
    assert all(isinstance(error, DecodingTooSlow) for error in stuck)
    monkeypatch.undo()
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(lambda: 1) == 1
        assert len(await everything(ContainerStream(), write(*KINDS["flac"])))
    go_on.set()


async def test_a_closed_stream_gives_nothing_more() -> None:
    stream = ContainerStream()
    decoding = stream.decode(MINUTES_OF_SILENCE)
    await anext(decoding)
    stream.close()
    stream.close()
    assert [samples async for samples in stream.decode(b"more")] == []
    await decoding.aclose()
