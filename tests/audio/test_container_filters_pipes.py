"""The byte pipe: one side has the turn at a time, and either can leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from audio.container_filters import MAX_SILENT_BYTES, BytePipe, IteratorSource, LibavSource, PipeClosed
from audio.errors import CorruptAudio


class Run:
    """A reader on a thread of its own, and the side that feeds it."""

    def __init__(self, reader: Callable[[BytePipe], None]) -> None:
        self.turns: SimpleQueue[None] = SimpleQueue()
        self.pipe = BytePipe(lambda: self.turns.put(None))
        self.thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self.thread.start()

    def _read(self, reader: Callable[[BytePipe], None]) -> None:
        try:
            self.pipe.begin()
            reader(self.pipe)
        except Exception as error:
            self.pipe.finish(error)
        else:
            self.pipe.finish(None)

    def give(self, piece: bytes | None) -> None:
        self.pipe.hand_over(piece)
        self.turns.get(timeout=5)

    def end(self) -> BytePipe:
        self.thread.join(timeout=5)
        assert not self.thread.is_alive()
        return self.pipe


def run(pieces: list[bytes], reader: Callable[[BytePipe], None]) -> BytePipe:
    """Feed the pieces and the end to a reader on another thread."""
    running = Run(reader)
    for piece in [*pieces, None]:
        running.give(piece)
    return running.end()


def test_pieces_are_read_as_they_come_and_nothing_stays_behind() -> None:
    seen: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        while part := pipe.read(3):
            seen.append(part)

    pipe = run([b"abcde", b"f"], reader)
    assert seen == [b"abc", b"de", b"f"] and pipe.bytes_read == 6


def test_a_piece_is_used_up_before_the_reader_is_hungry_again() -> None:
    seen: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        while part := pipe.read(2):
            seen.append(part)
            pipe.pause()

    running = Run(reader)
    running.give(b"abcde")
    assert seen == [b"ab"] and not running.pipe.needs_bytes
    running.give(b"")
    running.give(b"")
    assert seen == [b"ab", b"cd", b"e"] and not running.pipe.needs_bytes
    running.give(b"")
    assert running.pipe.needs_bytes
    running.give(None)
    assert running.end().finished


def test_peeking_and_skipping() -> None:
    heads: list[bytes] = []
    seen: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        heads.extend([pipe.peek(4), pipe.peek(2)])
        pipe.skip(2)
        seen.append(pipe.read_all(100))
        heads.append(pipe.peek(4))

    pipe = run([b"a", b"b", b"cdef", b"g"], reader)
    assert heads == [b"abcd", b"ab", b""]
    assert seen == [b"cdefg"] and pipe.bytes_read == 7


def test_nobody_waits_for_a_reader_that_is_done() -> None:
    failure = ValueError("no")

    def reader(pipe: BytePipe) -> None:
        pipe.read(1)
        raise failure

    pipe = run([b"a", b"b", b"c"], reader)
    assert pipe.failure is failure


def test_a_closed_pipe_stops_its_reader_in_the_middle_of_a_piece() -> None:
    def reading(pipe: BytePipe) -> None:
        while pipe.read(1):
            pipe.pause()

    running = Run(reading)
    running.give(b"abc" * 1000)
    running.pipe.close()
    assert isinstance(running.end().failure, PipeClosed)

    waiting = Run(lambda pipe: pipe.skip(10))
    waiting.give(b"abc")
    waiting.pipe.close()
    assert waiting.end().failure is None


def test_bytes_without_sound_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SILENT_BYTES <= 16 << 20
    monkeypatch.setattr("audio.container_filters.MAX_SILENT_BYTES", 100)

    def listening(pipe: BytePipe) -> None:
        while pipe.read(50):
            pipe.audio_decoded()

    assert run([bytes(60)] * 10, listening).failure is None
    deaf = run([bytes(60)] * 10, lambda pipe: pipe.skip(600))
    assert isinstance(deaf.failure, CorruptAudio) and "without any audio" in str(deaf.failure)
    assert deaf.bytes_read == 120


def test_a_fault_in_what_is_let_through_looks_like_an_end() -> None:
    def parts() -> object:
        yield b"abc"
        raise CorruptAudio("broken")

    source: LibavSource = IteratorSource(parts())  # type: ignore[arg-type]
    assert [source.read(2) for _ in range(4)] == [b"ab", b"c", b"", b""]
    assert isinstance(source.fault, CorruptAudio)
