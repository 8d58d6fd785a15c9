"""Background process: computes speaker labels and runs the turn detector for a frame-synchronous model on a GPU.

    python -m engine.server.background_process FD

The engine starts it beside itself. `BackgroundProcess` is the engine's side, used by the loop, with `ProcessTracks` for
the labels and `SentAudio` for the questions; `main` is the process. Windowed models, and models on a CPU, do the same
work on threads of the engine instead (`engine/runner/background.py`).

Labels cost more of the processor than everything else that an engine's loop does for a stream, and so does the audio
for a turn detector. For hundreds of streams they would use all of the loop's time, and because of the interpreter's
lock a second thread would not help. So the loop sends audio, the detector's frames and questions about turns to this
process, and receives labels and answers. The process computes its models on the same GPU. The loop never waits: one
thread writes and one reads. If the process ends, the engine ends too, and its streams are rebuilt with their labels
elsewhere.

A message to the process is the lengths of its two parts (two 32-bit numbers), a list of commands, and the samples of
their audio one after the other, as float32: samples are neither copied nor encoded on their way. The first message is
the pickled functions that make the embedder and the turn detector. Answers are lists with their length before them.
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
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, msgpack

from engine.errors import BadItem, EngineDead, StreamError
from engine.logs import WITH_PROCESS, set_up_logging
from engine.messages import Closed, Item, Labels, Output, Saved, Speech
from engine.options import SPEAKERS
from engine.runner.base import Background, Embedder, TurnDetector
from engine.server.recent_audio import PART_SAMPLES, new_samples
from engine.server.speaker_labels import Samples
from engine.server.speakers import SpeakerTracks
from engine.server.turn_questions import LocalTurnAudio, TurnAudio
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Audio that waits to be written to the process, in bytes: two seconds of 600 streams. With more the process does not
# keep up, and audio gets no labels and questions no answers until it does.
MAX_QUEUED_BYTES = 64 * 1024 * 1024
# Questions about turns without an answer; one more has none. A GPU answers 32 in some milliseconds.
MAX_QUESTIONS = 512
# Messages that wait to be written, one for each step: a process that takes none is lost.
MAX_QUEUED_MESSAGES = 5000
# Batches that fail one after the other, after which a model's device is lost.
FAILURES_OF_A_LOST_DEVICE = 8
# Buffers that the system takes in one call.
BUFFERS_PER_CALL = 1000
# How often the process polls its models for results while no message comes.
RESULT_POLL_S = 0.005
# Time within which the process must end after its socket is closed; it has nothing to save.
END_S = 1.0
# Time that the engine waits for it to load, before it serves.
READY_S = 180.0

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


class _Asks(_Message):
    """There will be questions about the audio that follows."""

    stream: str


class _Question(_Message):
    """Whether the turn is complete at this sample; the answer is `_Judged`."""

    stream: str
    number: int
    sample: int


class _NotNeeded(_Message):
    """No question will need audio before this sample."""

    stream: str
    sample: int


class _Dropped(_Message):
    stream: str


Command = _Opened | _Resumed | _Audio | _Frames | _Ended | _Asks | _Question | _NotNeeded | _Dropped

# From the process.


class _Ready(_Message):
    """The models are loaded, if they could be."""


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


class _Judged(_Message):
    """None: the turn detector has failed."""

    number: int
    probability: float | None


Answer = _Ready | _Found | _Finished | _Failed | _Late | _Judged

_commands = msgpack.Decoder(list[Command])
_answers = msgpack.Decoder(list[Answer])


# The engine's side


class Recipes(NamedTuple):
    """The functions that make the models in the process; None: the process does not have this model."""

    embedder: Callable[[], Background[Any, Any]] | None
    turn_detector: Callable[[], Background[Any, Any]] | None


class BackgroundProcess:
    """The engine's side of the process. The loop collects commands during a step and sends them at its end."""

    def __init__(self, spec: ModelSpec, recipes: Recipes, window_samples: int = 0) -> None:
        self.spec = spec
        # Audio that the turn detector judges.
        self.window_samples = window_samples
        self.recipes = recipes
        # The next message: commands, and the audio that belongs to them.
        self._commands: list[Command] = []
        self._audio: list[Samples] = []
        self._out: SimpleQueue[tuple[list[Command], list[Samples]] | None] = SimpleQueue()
        self._in: deque[Answer] = deque()
        # Called with the answers about labels.
        self.on_labels: Callable[[Answer], None] = lambda answer: None
        self._questions: dict[int, Future[float]] = {}
        self._last_question = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._broken = False
        self._ready = threading.Event()
        # Bytes of audio: each number is changed by one thread alone.
        self._queued = self._written = 0
        self._is_dropping = False
        # By stream: the end of the audio that was replaced by silence, because the process did not keep up.
        self._dropped_until: dict[str, int] = {}

    def add_command(self, command: Command) -> None:
        """Send a command with the next message."""
        self._commands.append(command)
        if isinstance(command, _Dropped):
            self._dropped_until.pop(command.stream, None)

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
        """New audio of a stream; silence instead if the process does not keep up."""
        is_overloaded = self._is_overloaded()
        for item in items:
            audio = new_samples(item, self.spec)
            if isinstance(audio, int):
                self._commands.append(_Audio(name, item.sample, item.offset, audio, True))
            elif is_overloaded:
                self._commands.append(_Audio(name, item.sample, item.offset, len(audio), True))
                self._dropped_until[name] = item.sample + len(audio)
            else:
                self._queued += audio.nbytes
                self._audio.append(audio)
                self._commands.append(_Audio(name, item.sample, item.offset, len(audio), False))

    def dropped_until(self, name: str) -> int:
        """The process was not sent audio before this sample, because it did not keep up; 0 if it was sent all."""
        return self._dropped_until.get(name, 0)

    def ask(self, name: str, sample: int) -> Future[float]:
        found: Future[float] = Future()
        if len(self._questions) >= MAX_QUESTIONS:
            found.set_exception(RuntimeError("too many questions wait for the turn detector"))
            return found
        self._last_question += 1
        self._questions[self._last_question] = found
        self._commands.append(_Question(name, self._last_question, sample))
        return found

    @property
    def has_work(self) -> bool:
        """Whether something is to be sent or was received."""
        return bool(self._in or self._commands) or self._broken

    def take_answers(self) -> None:
        """Take in the answers that have arrived. Raises EngineDead if the process has ended."""
        if self._broken:
            raise EngineDead("the process of speaker labels and the turn detector ended")
        for _ in range(len(self._in)):
            answer = self._in.popleft()
            if not isinstance(answer, _Judged):
                self.on_labels(answer)
                continue
            future = self._questions.pop(answer.number)
            if not future.set_running_or_notify_cancel():
                continue  # the stream waits no longer
            if answer.probability is None:
                future.set_exception(RuntimeError("the turn detector failed"))
            else:
                future.set_result(answer.probability)

    def send(self) -> None:
        """Send all commands since the last call. Raises EngineDead if the process accepts none."""
        if self._out.qsize() > MAX_QUEUED_MESSAGES:
            raise EngineDead("the process of speaker labels and the turn detector accepts no messages")
        if self._commands:
            self._out.put((self._commands, self._audio))
            self._commands, self._audio = [], []

    @property
    def pid(self) -> int | None:
        """The process id; None if the process does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "engine.server.background_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._line = ours
        self._threads = [
            threading.Thread(target=work, name="background process", daemon=True, args=(ours,))
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_ready(self) -> None:
        """Wait until the models are loaded. Raises EngineDead if the process has ended."""
        if not self._ready.wait(READY_S):
            logger.warning("speaker labels and the turn detector are still loading after %.0f s", READY_S)
        if self._broken:
            raise EngineDead("the process of speaker labels and the turn detector ended while it started")

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
            logger.warning(
                "the process of speaker labels and the turn detector does not keep up: some speech gets no labels, "
                "and some turns end by text and silence"
            )
        return self._is_dropping

    def _write(self, line: socket.socket) -> None:
        """A thread: sends the messages of the loop, and an end when there are no more."""
        encoder = msgpack.Encoder()
        try:
            recipes = pickle.dumps(self.recipes)
            _send(line, [_LENGTHS.pack(len(recipes), 0), recipes])
            while (message := self._out.get()) is not None:
                commands, audio = message
                encoded, length = encoder.encode(commands), sum(samples.nbytes for samples in audio)
                _send(line, [_LENGTHS.pack(len(encoded), length), encoded, *audio])
                self._written += length
            line.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the process has ended, which the other thread finds too
        except Exception:
            logger.exception("a message to the process of speaker labels and the turn detector cannot be sent")
            line.shutdown(socket.SHUT_RDWR)  # so the other thread finds the end

    def _read(self, line: socket.socket) -> None:
        """A thread: receives answers for the loop."""
        try:
            with line.makefile("rb") as file:
                while len(head := file.read(_LENGTHS.size)) == _LENGTHS.size:
                    for answer in _answers.decode(file.read(_LENGTHS.unpack(head)[0])):
                        if isinstance(answer, _Ready):
                            self._ready.set()
                        else:
                            self._in.append(answer)
        except (OSError, ValueError):
            logger.exception("what the process of speaker labels and the turn detector sent cannot be read")
        self._broken = self._process is not None
        self._ready.set()


class ProcessTracks(SpeakerTracks):
    """The loop's view of the labels: commands go out, labels come in. For models whose streams are not saved as values:
    the state of the labels is in the labels themselves."""

    def __init__(
        self, process: BackgroundProcess, embedder: Embedder, end_failed: Callable[[str, Exception], None]
    ) -> None:
        super().__init__(process.spec, embedder, end_failed)
        self._process = process
        process.on_labels = self._take
        self._names: set[str] = set()
        self._late: dict[str, int] = {}
        self._found: list[Output] = []

    def open(self, name: str, options: Mapping[str, str], live: bool) -> None:
        if SPEAKERS in options:
            self._process.start()
            self._names.add(name)
            self._process.add_command(_Opened(name, {SPEAKERS: options[SPEAKERS]}, live))

    def resume(self, name: str, saved: Saved, earlier: int = 0) -> None:
        if name in self._names:
            self._process.add_command(_Resumed(name, saved, earlier))

    def close(self, name: str) -> Closed | None:
        if name in self._names:
            self._names.remove(name)
            self._late.pop(name, None)
            self._process.add_command(_Dropped(name))
        return self._delayed_ends.pop(name, None)

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
        if name in self._names:
            self._process.add_audio(name, items)

    def has_labels(self, name: str) -> bool:
        return name in self._names

    def add_frames(self, speech: Speech, is_speech: Sequence[bool]) -> None:
        if speech.stream in self._names:
            dropped, has_voice = self._process.dropped_until(speech.stream), list(is_speech)
            if speech.sample < dropped:
                # The process has silence there, which has no voice.
                starts = range(speech.sample, speech.end, speech.frame_samples)
                has_voice = [voice and start >= dropped for voice, start in zip(has_voice, starts, strict=True)]
            self._process.add_command(_Frames(speech.stream, speech.sample, speech.frame_samples, has_voice))

    @property
    def has_work(self) -> bool:
        return bool(self._found)

    @property
    def is_waiting(self) -> bool:
        return bool(self._names)

    def upload_waits_from(self, name: str) -> int | None:
        return self._late.get(name)

    def add_labels(self, outputs: list[Output]) -> None:
        for output in [one for one in outputs if isinstance(one, Closed) and one.stream in self._names]:
            outputs.remove(output)
            self._delayed_ends[output.stream] = output
            self._process.add_command(_Ended(output.stream))
        outputs += self._found
        self._found.clear()

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, _Found):
            if answer.labels.stream in self._names:
                self._found.append(answer.labels)
        elif isinstance(answer, _Late):
            self._late.pop(answer.stream, None)
            if answer.sample is not None and answer.stream in self._names:
                self._late[answer.stream] = answer.sample
        elif isinstance(answer, _Finished):
            if answer.stream in self._delayed_ends:
                self._found.append(self._delayed_ends.pop(answer.stream))
        elif isinstance(answer, _Failed) and answer.stream in self._names:
            self._end_failed(answer.stream, BadItem(answer.stream, answer.message))


class SentAudio(TurnAudio):
    """Audio that is sent to the process; if `labels` says that the stream has labels too, it is sent for those. For
    models whose streams are not saved as values."""

    position = None

    def __init__(self, process: BackgroundProcess, labels: Callable[[str], bool], name: str) -> None:
        self._process = process
        self._labels = labels
        self._name = name
        self.window_samples = process.window_samples
        self._needed_from = 0
        process.start()
        process.add_command(_Asks(name))

    def add(self, items: Sequence[Item]) -> None:
        if not self._labels(self._name):
            self._process.add_audio(self._name, items)

    def drop_before(self, sample: int) -> None:
        # Now and then: the process keeps audio in parts.
        if sample >= self._needed_from + PART_SAMPLES:
            self._needed_from = sample
            self._process.add_command(_NotNeeded(self._name, sample))

    def ask(self, sample: int) -> Future[float]:
        if max(0, sample - self.window_samples) < self._process.dropped_until(self._name):
            found: Future[float] = Future()
            found.set_exception(RuntimeError("the process of the turn detector does not keep up"))
            return found
        return self._process.ask(self._name, sample)

    def close(self) -> None:
        self._process.add_command(_Dropped(self._name))


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

    def __init__(self, embedder: Embedder | None, turn_detector: TurnDetector | None) -> None:
        self.answers: list[Answer] = []
        self._turn_detector = turn_detector
        # The model's items are not sent, so nothing reads its specification.
        self._spec = ModelSpec("labels", 16_000, 1280)
        self._tracks = SpeakerTracks(self._spec, embedder, self._fail)
        # Uploads, each with the sample from which it waits for embeddings, as reported last.
        self._uploads: dict[str, int | None] = {}
        # The audio of streams with questions, and the numbers of questions that are being answered.
        self._asked: dict[str, LocalTurnAudio] = {}
        self._questions: dict[int, Future[float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether models are computing."""
        return bool(self._questions) or self._tracks.is_waiting

    def apply(self, commands: list[Command], audio: Samples) -> None:
        outputs: list[Output] = []
        at = 0
        for command in commands:
            try:
                if isinstance(command, _Audio):
                    samples = command.samples if command.is_silence else audio[at : at + command.samples]
                    at += 0 if command.is_silence else command.samples
                    self._add_audio(command, samples)
                elif isinstance(command, _Ended):
                    outputs.append(Closed(command.stream, 0))
                else:
                    self._apply(command)
            except Exception as error:
                self._refuse(command, error)
        self._tracks.add_labels(outputs)
        self._answer(outputs)

    def _add_audio(self, command: _Audio, samples: Samples | int) -> None:
        self._tracks.add_part(command.stream, command.sample, command.position, samples)
        if command.stream in self._asked:
            self._asked[command.stream].recent.add_part(command.sample, command.position, samples)

    def _refuse(self, command: Command, error: Exception) -> None:
        if not isinstance(error, StreamError):
            logger.exception("an unexpected error in the process of speaker labels and the turn detector")
        if isinstance(command, _Question):
            self.answers.append(_Judged(command.number, None))
        else:
            self._fail(command.stream, error)

    def _answer(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Labels):
                self.answers.append(_Found(output))
            elif isinstance(output, Closed):
                self.answers.append(_Finished(output.stream))
        for name, reported in self._uploads.items():
            late = self._tracks.upload_waits_from(name)
            if late != reported:
                self._uploads[name] = late
                self.answers.append(_Late(name, late))
        for number in [number for number, future in self._questions.items() if future.done()]:
            future = self._questions.pop(number)
            self.answers.append(_Judged(number, None if future.exception() is not None else future.result()))

    def _apply(self, command: Command) -> None:
        if isinstance(command, _Frames):
            speech = Speech(command.stream, command.sample, command.frame_samples, [0.0] * len(command.voiced))
            self._tracks.add_frames(speech, command.voiced)
        elif isinstance(command, _Opened):
            if not command.live:
                self._uploads[command.stream] = None
            self._tracks.open(command.stream, command.options, command.live)
        elif isinstance(command, _Resumed):
            self._tracks.resume(command.stream, command.state, command.earlier)
        elif isinstance(command, _Asks):
            assert self._turn_detector is not None
            self._asked[command.stream] = LocalTurnAudio(self._spec, self._turn_detector)
        elif isinstance(command, _NotNeeded):
            self._asked[command.stream].drop_before(command.sample)
        elif isinstance(command, _Question):
            self._questions[command.number] = self._asked[command.stream].ask(command.sample)
        elif isinstance(command, _Dropped):
            self._uploads.pop(command.stream, None)
            self._asked.pop(command.stream, None)
            self._tracks.close(command.stream)

    def _fail(self, name: str, error: Exception) -> None:
        self._tracks.close(name)
        self.answers.append(_Failed(name, str(error)))


def main() -> None:
    """Main function of the process: apply commands and send answers until the engine closes the socket."""
    # The engine decides when this process ends: it closes the socket.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(WITH_PROCESS)
    line, encoder = socket.socket(fileno=int(sys.argv[1])), msgpack.Encoder()
    with line:
        if not (head := _exactly(line, _LENGTHS.size)):
            return
        recipes: Recipes = pickle.loads(_exactly(line, _LENGTHS.unpack(head)[0]))
        embedder, turn_detector = (None if make is None else make() for make in recipes)
        models = [model for model in (embedder, turn_detector) if model is not None]
        for model in models:
            model.warm_up()
        process = _Process(embedder, turn_detector)  # type: ignore[arg-type]
        process.answers.append(_Ready())
        while True:
            timeout_s = RESULT_POLL_S if process.is_waiting else 0.0 if process.answers else None
            commands, audio = list[Command](), np.zeros(0, np.float32)
            if select.select([line], [], [], timeout_s)[0]:
                head = _exactly(line, _LENGTHS.size)
                if not head:
                    break
                size, length = _LENGTHS.unpack(head)
                commands = _commands.decode(_exactly(line, size))
                audio = np.frombuffer(_exactly(line, length), np.float32)
            process.apply(commands, audio)
            if process.answers:
                answers = encoder.encode(process.answers)
                line.sendall(_LENGTHS.pack(len(answers), 0) + answers)
                process.answers.clear()
            if any(model.consecutive_failures >= FAILURES_OF_A_LOST_DEVICE for model in models):
                # A lost device does not come back: the engine is to start both again.
                logger.error(
                    "%d batches of speaker labels or the turn detector failed in a row", FAILURES_OF_A_LOST_DEVICE
                )
                raise SystemExit(1)
        for model in models:
            model.close()


def _exactly(line: socket.socket, count: int) -> bytearray:
    """The next bytes; fewer only if the engine has ended."""
    found, at = bytearray(count), 0
    while at < count and (got := line.recv_into(memoryview(found)[at:])):
        at += got
    return found[:at]


if __name__ == "__main__":
    main()
