"""Recordings through a real engine loop as uploads: as fast as the engine takes them, without sockets.

Speech detection, windows and batches are those of a server: what comes out is what an upload would be answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.accuracy_report import Transcript
from benchmarks.live_run import RunFailed
from benchmarks.recordings import SAMPLE_RATE, Clip, load_audio
from benchmarks.scoring import TimedWord, utterances
from engine.boundary.preparation import make_cutter, prepare
from engine.client.client import ClientSettings
from engine.messages import Closed, Command, Dead, Failed, Feed, Finish, Open, Output, Refused, Speech, Text
from engine.server.loop import EngineLoop

# What a gateway reads of a file at a time, about.
PIECE_SAMPLES = SAMPLE_RATE


@dataclass(slots=True)
class FileOutcome:
    transcript: Transcript
    seconds: float
    words: list[TimedWord]
    # Where somebody spoke.
    utterances: list[tuple[float, float]]
    # The code of the first language that the model told with words, as an upload is answered.
    language: str = ""


@dataclass(slots=True)
class _Upload:
    clip: Clip
    commands: Iterator[tuple[Command, int]]
    seconds: float
    fed: int = 0
    text: str = ""
    words: list[TimedWord] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    frame_seconds: float = 0.0
    language: str = ""


class FileRun:
    """Sends files, at most `at_once` at a time, all with the same `options` of the model; `cpu_seconds` is what the
    engine took for them."""

    def __init__(self, loop: EngineLoop, at_once: int, options: Mapping[str, str] | None = None) -> None:
        self._loop = loop
        self._options = dict(options or {})
        self._at_once = at_once
        spec = loop.scheduler.spec
        self._ahead = int(ClientSettings().ahead_seconds * spec.sample_rate / spec.samples_per_position)
        self._uploads: dict[str, _Upload] = {}
        self.cpu_seconds = 0.0

    def send(self, clips: Iterable[Clip], progress: Callable[[FileOutcome], None]) -> None:
        waiting = deque(enumerate(clips))
        while waiting or self._uploads:
            while waiting and len(self._uploads) < self._at_once:
                number, clip = waiting.popleft()
                self._uploads[f"file-{number}"] = self._upload(f"file-{number}", clip)
            due = [command for upload in self._uploads.items() for command in self._due(*upload)]
            began = time.process_time()
            self._loop.submit(due, 0)
            step = self._loop.step()
            self.cpu_seconds += time.process_time() - began
            if step is None and not due and not self._loop.has_work():
                raise RunFailed(f"the engine is idle, but these files never ended: {', '.join(self._uploads)}")
            for output in step.outputs if step is not None else ():
                self._take(output, progress)

    def _upload(self, name: str, clip: Clip) -> _Upload:
        samples = load_audio(clip.path)
        spec = self._loop.scheduler.spec
        cutter = make_cutter(spec)

        def commands() -> Iterator[tuple[Command, int]]:
            """Each with the position that has been fed after it."""
            yield Open(name, live=False, options=self._options), 0
            end = 0
            for start in range(0, len(samples), PIECE_SAMPLES):
                items = prepare(cutter, cutter.cut(samples[start : start + PIECE_SAMPLES]), spec)
                if start + PIECE_SAMPLES >= len(samples):
                    silence = spec.flush_positions_for(spec.default_delay_positions)
                    items += prepare(cutter, cutter.flush(silence), spec)
                if items:
                    end = items[-1].offset + items[-1].length
                    yield Feed(name, items), end
            yield Finish(name), end

        return _Upload(clip, commands(), len(samples) / SAMPLE_RATE)

    def _due(self, name: str, upload: _Upload) -> Iterator[Command]:
        """As much as may wait in the engine."""
        stream = self._loop.scheduler.streams.get(name)
        computed = 0 if stream is None else stream.computed
        while upload.fed - computed < self._ahead:
            following = next(upload.commands, None)
            if following is None:
                return
            command, upload.fed = following
            yield command

    def _take(self, output: Output, progress: Callable[[FileOutcome], None]) -> None:
        if isinstance(output, Dead | Failed | Refused):
            raise RunFailed(output.message)
        upload = self._uploads.get(output.stream)
        if upload is None:
            return
        if isinstance(output, Text):
            upload.text += output.delta
            if output.delta or output.words:
                upload.language = upload.language or output.language
            upload.words += [
                TimedWord(word.text, word.start_sample / SAMPLE_RATE, word.end_sample / SAMPLE_RATE)
                for word in output.words
            ]
        elif isinstance(output, Speech):
            upload.probabilities += output.probabilities
            upload.frame_seconds = output.frame_samples / SAMPLE_RATE
        elif isinstance(output, Closed):
            del self._uploads[output.stream]
            spoken = utterances(upload.probabilities, upload.frame_seconds)
            transcript = Transcript(upload.clip, upload.text.strip())
            progress(FileOutcome(transcript, upload.seconds, upload.words, spoken, upload.language))
