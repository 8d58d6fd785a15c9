"""Speaker labels of an engine on a GPU, in a process of their own.

    python -m engine.server.label_process FD

Labels cost more of the processor than everything else that an engine's loop does for a stream: for hundreds of streams
they would take the loop's whole time, and the interpreter's lock lets no second thread help. So the loop sends audio
and the detector's frames to this process and gets labels back. The process computes the embeddings on the same GPU.

The engine's side is `ProcessTracks`. Its loop never waits: one thread writes and one reads. If the process ends, the
engine ends too, and its streams are rebuilt with their labels elsewhere.

A message to the process is the lengths of its two parts (two 32-bit numbers), a list of commands, and the samples of
their audio one after the other, as float32: samples are neither copied nor encoded on their way. The first message is
the pickled function that makes the embedder. Answers are lists with their length before them.
"""

from __future__ import annotations

import logging
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
# Buffers that the system takes in one call.
BUFFERS_PER_CALL = 1000
# How often the process looks for embeddings while no message comes.
LOOK_EVERY_S = 0.005
# Time within which the process ends when it is told to.
END_S = 5.0

_LENGTHS = struct.Struct("<II")


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
    """`samples` of the audio of the message, or silence."""

    stream: str
    sample: int
    position: int
    samples: int
    is_silence: bool


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


Command = _Opened | _Resumed | _Audio | _Frames | _Ended | _Dropped

# From the process.


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


Answer = _Found | _Finished | _Failed | _Late

_commands = msgpack.Decoder(list[Command])
_answers = msgpack.Decoder(list[Answer])


# The engine's side


class ProcessTracks(SpeakerTracks):
    """The loop's view of the labels: commands go out, labels come in. For models whose streams are not saved as values:
    the state of the labels is in the labels themselves. `make` makes the embedder, in the process."""

    def __init__(
        self,
        spec: ModelSpec,
        embedder: Embedder,
        make: Callable[[], Embedder],
        end_failed: Callable[[str, Exception], None],
    ) -> None:
        super().__init__(spec, embedder, end_failed)
        self._make = make
        self._names: set[str] = set()
        self._late: dict[str, int] = {}
        # What the next message has: commands, and the audio that belongs to them.
        self._commands: list[Command] = []
        self._audio: list[Samples] = []
        self._out: SimpleQueue[tuple[list[Command], list[Samples]] | None] = SimpleQueue()
        self._in: deque[Answer] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._broken = False
        # Bytes of audio: each number is changed by one thread alone.
        self._queued = self._written = 0
        self._is_dropping = False

    def open(self, name: str, options: Mapping[str, str], live: bool) -> None:
        if SPEAKERS in options:
            self.start()
            self._names.add(name)
            self._commands.append(_Opened(name, {SPEAKERS: options[SPEAKERS]}, live))

    def resume(self, name: str, saved: Saved, earlier: int = 0) -> None:
        if name in self._names:
            self._commands.append(_Resumed(name, saved, earlier))

    def close(self, name: str) -> Closed | None:
        if name in self._names:
            self._names.remove(name)
            self._late.pop(name, None)
            self._commands.append(_Dropped(name))
        return self._held.pop(name, None)

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
        if name not in self._names:
            return
        for item in items:
            audio = new_samples(item, self._spec)
            if isinstance(audio, int) or self._is_overloaded():
                silence = audio if isinstance(audio, int) else len(audio)
                self._commands.append(_Audio(name, item.sample, item.offset, silence, True))
            else:
                self._queued += audio.nbytes
                self._audio.append(audio)
                self._commands.append(_Audio(name, item.sample, item.offset, len(audio), False))

    def labels(self, name: str) -> bool:
        return name in self._names

    def judge(self, speech: Speech, voiced: Sequence[bool]) -> None:
        if speech.stream in self._names:
            told = [False] * len(voiced) if self._is_dropping else list(voiced)
            self._commands.append(_Frames(speech.stream, speech.sample, speech.frame_samples, told))

    @property
    def has_work(self) -> bool:
        return bool(self._in) or self._broken

    @property
    def is_waiting(self) -> bool:
        return bool(self._names)

    def waiting_from(self, name: str) -> int | None:
        return self._late.get(name)

    def add_labels(self, outputs: list[Output]) -> None:
        """As in the loop; all commands since the last call are sent. Raises EngineDead if the process has ended."""
        if self._broken:
            raise EngineDead("the process of speaker labels ended")
        for output in [one for one in outputs if isinstance(one, Closed) and one.stream in self._names]:
            outputs.remove(output)
            self._held[output.stream] = output
            self._commands.append(_Ended(output.stream))
        if self._commands:
            self._out.put((self._commands, self._audio))
            self._commands, self._audio = [], []
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
        """Of the process; None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "engine.server.label_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._line = ours
        self._threads = [
            threading.Thread(target=work, name="speaker labels", daemon=True, args=(ours,))
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

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

    def _write(self, line: socket.socket) -> None:
        """A thread: sends the messages of the loop, and an end when there are no more."""
        encoder = msgpack.Encoder()
        try:
            make = pickle.dumps(self._make)
            _send(line, [_LENGTHS.pack(len(make), 0), make])
            while (message := self._out.get()) is not None:
                commands, audio = message
                told, length = encoder.encode(commands), sum(samples.nbytes for samples in audio)
                _send(line, [_LENGTHS.pack(len(told), length), told, *audio])
                self._written += length
            line.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the process has ended, which the other thread finds too

    def _read(self, line: socket.socket) -> None:
        """A thread: receives labels for the loop."""
        try:
            with line.makefile("rb") as file:
                while len(head := file.read(_LENGTHS.size)) == _LENGTHS.size:
                    self._in.extend(_answers.decode(file.read(_LENGTHS.unpack(head)[0])))
        except (OSError, ValueError):
            logger.exception("what the process of speaker labels sent cannot be read")
        self._broken = self._process is not None


def _send(line: socket.socket, buffers: Sequence[Any]) -> None:
    for start in range(0, len(buffers), BUFFERS_PER_CALL):
        part = [memoryview(buffer).cast("B") for buffer in buffers[start : start + BUFFERS_PER_CALL]]
        sent = line.sendmsg(part)
        for buffer in part:
            if sent < len(buffer):
                line.sendall(buffer[sent:])
            sent = max(0, sent - len(buffer))


# The process


class _Process:
    """Applies the commands of the engine, and collects the answers to them."""

    def __init__(self, embedder: Embedder) -> None:
        self.answers: list[Answer] = []
        # The model's items are not sent, so its specification is not needed.
        self.tracks = SpeakerTracks(ModelSpec("labels", 16_000, 1280), embedder, self._fail)
        # Uploads, each with the sample from which on it waits for embeddings, as it was last told.
        self._uploads: dict[str, int | None] = {}

    def apply(self, commands: list[Command], audio: Samples) -> None:
        outputs: list[Output] = []
        at = 0
        for command in commands:
            try:
                if isinstance(command, _Audio):
                    samples = command.samples if command.is_silence else audio[at : at + command.samples]
                    at += 0 if command.is_silence else command.samples
                    self.tracks.add_part(command.stream, command.sample, command.position, samples)
                elif isinstance(command, _Ended):
                    outputs.append(Closed(command.stream, 0))
                else:
                    self._apply(command)
            except StreamError as error:
                self._fail(command.stream, error)
        self.tracks.add_labels(outputs)
        for output in outputs:
            if isinstance(output, Labels):
                self.answers.append(_Found(output))
            elif isinstance(output, Closed):
                self.answers.append(_Finished(output.stream))
        for name, told in self._uploads.items():
            late = self.tracks.waiting_from(name)
            if late != told:
                self._uploads[name] = late
                self.answers.append(_Late(name, late))

    def _apply(self, command: Command) -> None:
        if isinstance(command, _Frames):
            speech = Speech(command.stream, command.sample, command.frame_samples, [0.0] * len(command.voiced))
            self.tracks.judge(speech, command.voiced)
        elif isinstance(command, _Opened):
            if not command.live:
                self._uploads[command.stream] = None
            self.tracks.open(command.stream, command.options, command.live)
        elif isinstance(command, _Resumed):
            self.tracks.resume(command.stream, command.state, command.earlier)
        elif isinstance(command, _Dropped):
            self._uploads.pop(command.stream, None)
            self.tracks.close(command.stream)

    def _fail(self, name: str, error: Exception) -> None:
        self.tracks.close(name)
        self.answers.append(_Failed(name, str(error)))


def main() -> None:
    # The engine decides when this process ends: it closes the socket.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line, encoder = socket.socket(fileno=int(sys.argv[1])), msgpack.Encoder()
    with line:
        if not (head := _exactly(line, _LENGTHS.size)):
            return
        embedder: Embedder = pickle.loads(_exactly(line, _LENGTHS.unpack(head)[0]))()
        embedder.warm_up()
        process = _Process(embedder)
        while True:
            patience = LOOK_EVERY_S if process.tracks.is_waiting else None
            commands, audio = list[Command](), np.zeros(0, np.float32)
            if select.select([line], [], [], patience)[0]:
                head = _exactly(line, _LENGTHS.size)
                if not head:
                    break
                told, length = _LENGTHS.unpack(head)
                commands = _commands.decode(_exactly(line, told))
                audio = np.frombuffer(_exactly(line, length), np.float32)
            process.apply(commands, audio)
            if process.answers:
                answers = encoder.encode(process.answers)
                line.sendall(_LENGTHS.pack(len(answers), 0) + answers)
                process.answers.clear()
        embedder.close()


def _exactly(line: socket.socket, count: int) -> bytearray:
    """The next bytes; fewer only if the engine has ended."""
    found, at = bytearray(count), 0
    while at < count and (got := line.recv_into(memoryview(found)[at:])):
        at += got
    return found[:at]


if __name__ == "__main__":
    main()
