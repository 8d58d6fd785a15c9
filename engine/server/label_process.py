"""Speaker labels of an engine on a GPU, in a process of their own.

    python -m engine.server.label_process FD

Labels cost more of the processor than everything else that an engine's loop does for a stream: for hundreds of streams
they would take the loop's whole time, and the interpreter's lock lets no second thread help. So the loop sends audio
and the detector's frames to this process and gets labels back. The process cuts pieces and assigns voices
(`speaker_tracks.py`); it has no model and sends each piece back to the engine, where a thread computes its embedding on
the GPU (`SpeakerEmbedder`).

The engine's side is `ProcessTracks`. Its loop never waits: one thread writes and one reads. If the process ends, the
engine ends too, and its streams are rebuilt with their labels elsewhere.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
from msgspec import Struct, msgpack

from engine.errors import BadItem, EngineDead, StreamError
from engine.messages import Closed, Item, Labels, Output, Saved, Speech
from engine.options import SPEAKERS
from engine.runner.base import Embedder
from engine.server.recent_audio import new_samples
from engine.server.speaker_tracks import SpeakerTracks
from engine.server.speakers import Samples
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Audio that waits to be written to the process, in bytes: two seconds of 600 streams. With more the process does not
# keep up, and audio gets no labels until it does.
MAX_QUEUED_BYTES = 64 * 1024 * 1024
# Times within which the process ends when it is told to.
END_S = 2.0


class _Message(Struct, array_like=True, tag=True):
    pass


# To the process.


class _Opened(_Message):
    stream: str
    options: dict[str, str]
    live: bool


class _Resumed(_Message):
    stream: str
    state: Saved
    earlier: int


class _Audio(_Message):
    """float32 samples, or a number of samples of silence."""

    stream: str
    sample: int
    position: int
    samples: bytes | int


class _Frames(_Message):
    """Frames of the detector, and which of them have a voice."""

    stream: str
    sample: int
    frame_samples: int
    voiced: list[bool]


class _Ended(_Message):
    """No more audio comes; the answer is `_Finished`."""

    stream: str


class _Dropped(_Message):
    stream: str


class _Embedded(_Message):
    """The embedding of a piece, or why there is none."""

    number: int
    embedding: bytes
    error: str = ""


Command = _Opened | _Resumed | _Audio | _Frames | _Ended | _Dropped | _Embedded

# From the process.


class _Piece(_Message):
    """Its audio with 16 bits."""

    number: int
    samples: bytes


class _Found(_Message):
    labels: Labels


class _Finished(_Message):
    """All labels of a stream that has ended are sent."""

    stream: str


class _Failed(_Message):
    stream: str
    message: str


class _Late(_Message):
    """An upload waits for embeddings from this sample on; None: no longer."""

    stream: str
    sample: int | None


Answer = _Piece | _Found | _Finished | _Failed | _Late

_commands = msgpack.Decoder(list[Command])
_answers = msgpack.Decoder(list[Answer])


# The engine's side


class ProcessTracks(SpeakerTracks):
    """The loop's view of the labels: commands go out, labels come in. For models whose streams are not saved as values:
    the state of the labels is in the labels themselves."""

    def __init__(self, spec: ModelSpec, embedder: Embedder, end_failed: Callable[[str, Exception], None]) -> None:
        super().__init__(spec, embedder, end_failed)
        self._models = embedder
        self._names: set[str] = set()
        self._late: dict[str, int] = {}
        self._out: SimpleQueue[Command | None] = SimpleQueue()
        self._in: deque[Answer] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._threads: list[threading.Thread] = []
        self._broken = False
        # Bytes of audio: each number is changed by one thread alone.
        self._queued = self._written = 0
        self._is_dropping = False

    def open(self, name: str, options: Mapping[str, str], live: bool) -> None:
        if SPEAKERS in options:
            self._start()
            self._models.prepare()
            self._names.add(name)
            self._out.put(_Opened(name, {SPEAKERS: options[SPEAKERS]}, live))

    def resume(self, name: str, saved: Saved, earlier: int = 0) -> None:
        if name in self._names:
            self._out.put(_Resumed(name, saved, earlier))

    def close(self, name: str) -> Closed | None:
        if name in self._names:
            self._names.remove(name)
            self._late.pop(name, None)
            self._out.put(_Dropped(name))
        return self._held.pop(name, None)

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
        if name not in self._names:
            return
        for item in items:
            audio = new_samples(item, self._spec)
            if isinstance(audio, int) or self._is_overloaded():
                silence = audio if isinstance(audio, int) else len(audio)
                self._out.put(_Audio(name, item.sample, item.offset, silence))
            else:
                self._queued += audio.nbytes
                self._out.put(_Audio(name, item.sample, item.offset, audio.tobytes()))

    def labels(self, name: str) -> bool:
        return name in self._names

    def judge(self, speech: Speech, voiced: Sequence[bool]) -> None:
        if speech.stream in self._names:
            told = [False] * len(voiced) if self._is_dropping else list(voiced)
            self._out.put(_Frames(speech.stream, speech.sample, speech.frame_samples, told))

    @property
    def has_work(self) -> bool:
        return bool(self._in) or self._broken

    @property
    def is_waiting(self) -> bool:
        return bool(self._names)

    def waiting_from(self, name: str) -> int | None:
        return self._late.get(name)

    def add_labels(self, outputs: list[Output]) -> None:
        """As in the loop. Raises EngineDead if the process has ended."""
        if self._broken:
            raise EngineDead("the process of speaker labels ended")
        if not self._names:
            self._in.clear()
            return
        for output in [one for one in outputs if isinstance(one, Closed) and one.stream in self._names]:
            outputs.remove(output)
            self._held[output.stream] = output
            self._out.put(_Ended(output.stream))
        for _ in range(len(self._in)):
            self._take(self._in.popleft(), outputs)

    def _take(self, answer: Answer, outputs: list[Output]) -> None:
        if isinstance(answer, _Found):
            if answer.labels.stream in self._names:
                outputs.append(answer.labels)
        elif isinstance(answer, _Late):
            self._late.pop(answer.stream, None)
            if answer.sample is not None and answer.stream in self._names:
                self._late[answer.stream] = answer.sample
        elif isinstance(answer, _Finished):
            if answer.stream in self._held:
                outputs.append(self._held.pop(answer.stream))
        elif isinstance(answer, _Failed) and answer.stream in self._names:
            self._end_failed(answer.stream, BadItem(answer.stream, answer.message))

    @property
    def pid(self) -> int | None:
        """Of the process; None if no stream has asked for labels."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        process, line = self._process, self._line
        if process is None or line is None:
            return
        self._process = None
        self._out.put(None)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        line.close()

    def _is_overloaded(self) -> bool:
        was_dropping, self._is_dropping = self._is_dropping, self._queued - self._written > MAX_QUEUED_BYTES
        if self._is_dropping and not was_dropping:
            logger.warning("the process of speaker labels does not keep up: some speech gets no labels")
        return self._is_dropping

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "engine.server.label_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._line = Connection(ours.detach())
        self._threads = [
            threading.Thread(target=work, name="speaker labels", daemon=True) for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        """A thread: sends commands, all that wait in one message. A message without commands ends the process."""
        assert self._line is not None
        encoder = msgpack.Encoder()
        is_last = False
        while not is_last:
            commands = [self._out.get()]
            while not self._out.empty():
                commands.append(self._out.get())
            is_last = None in commands
            sent = [command for command in commands if command is not None]
            try:
                self._line.send_bytes(encoder.encode(sent))
                if is_last and sent:
                    self._line.send_bytes(encoder.encode([]))
            except OSError:
                break
            audio = (one.samples for one in sent if isinstance(one, _Audio))
            self._written += sum(len(samples) for samples in audio if isinstance(samples, bytes))

    def _read(self) -> None:
        """A thread: receives labels for the loop, and pieces for the model."""
        assert self._line is not None
        try:
            while True:
                for answer in _answers.decode(self._line.recv_bytes()):
                    if isinstance(answer, _Piece):
                        audio = np.frombuffer(answer.samples, np.int16).astype(np.float32)
                        audio /= 32768
                        self._models.submit(audio).add_done_callback(partial(self._embedded, answer.number))
                    else:
                        self._in.append(answer)
        except (EOFError, OSError):
            self._broken = self._process is not None

    def _embedded(self, number: int, embedding: Future[Samples]) -> None:
        if embedding.cancelled():
            return
        error = embedding.exception()
        vector = b"" if error is not None else embedding.result().astype(np.float32).tobytes()
        self._out.put(_Embedded(number, vector, "" if error is None else f"{type(error).__name__}: {error}"))


# The process


class _Embeddings(Embedder):
    """Sends pieces to the engine, and has their embeddings when they come."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self._waiting: dict[int, Future[Samples]] = {}
        self._next = 0

    def submit(self, task: Samples) -> Future[Samples]:
        found: Future[Samples] = Future()
        self._waiting[self._next] = found
        self._answers.append(_Piece(self._next, np.rint(task * 32768).astype(np.int16).tobytes()))
        self._next += 1
        return found

    def take(self, answer: _Embedded) -> None:
        waiting = self._waiting.pop(answer.number)
        if not waiting.set_running_or_notify_cancel():
            return
        if answer.error:
            waiting.set_exception(RuntimeError(answer.error))
        else:
            waiting.set_result(np.frombuffer(answer.embedding, np.float32))


class _Process:
    """Applies the commands of the engine, and collects the answers to them."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self._embeddings = _Embeddings(self.answers)
        # The model's items are not sent, so its specification is not needed.
        self._tracks = SpeakerTracks(ModelSpec("labels", 16_000, 1280), self._embeddings, self._fail)
        # Uploads, each with the sample from which on it waits for embeddings, as it was last told.
        self._uploads: dict[str, int | None] = {}

    def apply(self, commands: list[Command]) -> None:
        ended: list[Output] = []
        for command in commands:
            if isinstance(command, _Embedded):
                self._embeddings.take(command)
            elif isinstance(command, _Ended):
                ended.append(Closed(command.stream, 0))
            else:
                try:
                    self._apply(command)
                except StreamError as error:
                    self._fail(command.stream, error)
        self._tracks.add_labels(ended)
        for output in ended:
            if isinstance(output, Labels):
                self.answers.append(_Found(output))
            elif isinstance(output, Closed):
                self.answers.append(_Finished(output.stream))
        for name, told in self._uploads.items():
            late = self._tracks.waiting_from(name)
            if late != told:
                self._uploads[name] = late
                self.answers.append(_Late(name, late))

    def _apply(self, command: Command) -> None:
        if isinstance(command, _Audio):
            audio = command.samples
            samples = audio if isinstance(audio, int) else np.frombuffer(audio, np.float32)
            self._tracks.add_part(command.stream, command.sample, command.position, samples)
        elif isinstance(command, _Frames):
            speech = Speech(command.stream, command.sample, command.frame_samples, [0.0] * len(command.voiced))
            self._tracks.judge(speech, command.voiced)
        elif isinstance(command, _Opened):
            if not command.live:
                self._uploads[command.stream] = None
            self._tracks.open(command.stream, command.options, command.live)
        elif isinstance(command, _Resumed):
            self._tracks.resume(command.stream, command.state, command.earlier)
        elif isinstance(command, _Dropped):
            self._uploads.pop(command.stream, None)
            self._tracks.close(command.stream)

    def _fail(self, name: str, error: Exception) -> None:
        self._tracks.close(name)
        self.answers.append(_Failed(name, str(error)))


def main() -> None:
    # The engine decides when this process ends: it closes the socket.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line, process, encoder = Connection(int(sys.argv[1])), _Process(), msgpack.Encoder()
    try:
        while commands := _commands.decode(line.recv_bytes()):
            process.apply(commands)
            if process.answers:
                line.send_bytes(encoder.encode(process.answers))
                process.answers.clear()
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
