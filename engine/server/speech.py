"""Speech detection in the engine loop (`Listener`): runs the detector over all streams, and passes its results on.

Before a step is planned, the detector processes all audio that has arrived since the last step (`PendingAudio`). Its
probabilities go to the speech track of each stream (`engine/server/speech_track.py`), which decides where speech is.
The listener sends the events of the track to the gateway as `Speech`, applies the decisions of a windowed model's gate
(begin, pause, end, skip) to the scheduler, and passes the frames on to skipped silence, speaker labels and turn
questions. `LastSpeech` serves flushes of frame-synchronous models: it returns where the last speech ended, once the
audio before the flush has been processed. The detector itself is in `engine/runner/speech.py`.

`WordTimes` corrects the times of a windowed model's words by the detected speech, in every text before it is sent. A
windowed model locates a word by its attention. That is accurate to a few tenths of a second and changes from pass to
pass: a word may seem to last into the silence after it, or to begin before the word before has ended. The speech
detector finds speech to the frame. So words end with the speech they are in, and do not overlap.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.scheduler import Scheduler
from engine.errors import EngineDead, StreamError
from engine.messages import Flush, Item, Open, Output, Saved, Speech, SpeechEnded, Text, TurnRule, Word
from engine.runner.base import Detector
from engine.server.speakers import SpeakerTracks
from engine.server.speech_track import (
    DECISIONS,
    Begin,
    Decision,
    End,
    GateSettings,
    Pause,
    Resume,
    Skip,
    SpeechGate,
    SpeechTrack,
    SplitUtterance,
    TrackEvent,
    voiced_frames,
)
from engine.server.turn_questions import TurnQuestions
from engine.spec import ModelSpec

Samples = NDArray[np.float32]

# Only this much of a declared silence goes through the detector: after it the probability does not change any more.
SETTLING_SECONDS = 2


@dataclass(slots=True)
class PendingSpan:
    """Consecutive audio: samples for the detector, then declared silence that it need not process."""

    pieces: list[Samples] = field(default_factory=list)
    # Samples of declared silence after the pieces.
    silence: int = 0
    # Samples of declared silence at the end of the pieces.
    settling: int = 0

    def samples(self) -> Samples:
        if len(self.pieces) == 1:
            # The common case of live streams.
            return self.pieces[0]
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)


class PendingAudio:
    """Audio of one stream that the detector has not processed. A declared silence is kept as a number."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spans = [PendingSpan()]
        self.length = 0  # samples for the detector
        self.end = 0  # sample at which the received audio ends
        self._spec = spec
        self._settling = SETTLING_SECONDS * spec.sample_rate

    def add(self, items: Sequence[Item]) -> int:
        """Add items; returns the sample at which the received audio ends."""
        spec, end = self._spec, 0
        for item in items:
            count = item.covered_samples(spec.samples_per_position)
            if item.payload is None or item.payload.ndim > 1:
                self._add_silence(count)  # the detector cannot process features
            else:
                # Without look-back, look-ahead and padding.
                self._add_samples(item.payload[spec.look_back_samples : spec.look_back_samples + count])
            end = self.end = item.sample + count
        return end

    def _add_samples(self, samples: Samples) -> None:
        if self.spans[-1].silence:
            self.spans.append(PendingSpan())
        self.spans[-1].pieces.append(samples)
        self.length += len(samples)
        self.spans[-1].settling = 0

    def _add_silence(self, count: int) -> None:
        span = self.spans[-1]
        processed = min(count, self._settling - span.settling)
        if processed:
            span.pieces.append(np.zeros(processed, np.float32))
            self.length += processed
            span.settling += processed
        span.silence += count - processed


class LastSpeech:
    """Answers where the last speech of one stream ended, in samples.

    A question about a pause is asked when the audio before it has arrived, and answered when the speech track has
    processed that audio. So the answer depends only on the audio, not on when the device returned its results, and the
    question does not block.
    """

    def __init__(self, track: SpeechTrack) -> None:
        self._track = track
        # Samples at which the received audio ends, and at which it ended at the last flush without a pause.
        self.received_until = self.asked_until = 0
        # Length of the shortest frame so far, in samples.
        self._frame = 0
        # (end of the audio at the time of the question, callback)
        self._asked: deque[tuple[int, Callable[[int], None]]] = deque()

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def ask(self, then: Callable[[int], None]) -> None:
        """Call `then` with the end of the last speech in the audio received so far, as soon as that is known."""
        self._asked.append((self.received_until, then))
        self.answer()

    @property
    def frames_until_answer(self) -> int:
        """How many more frames, at least one, the track must process to answer the next question."""
        return max(1, (self._asked[0][0] - self._track.sample) // self._frame)

    def answer_all(self) -> None:
        """Answer all questions by the audio processed so far."""
        while self._asked:
            self._asked.popleft()[1](self._track.last_sound)

    def set_frame(self, frame_samples: int) -> None:
        """The next frames have this length. Before the first frame the length is not known."""
        self._frame = min(self._frame, frame_samples) or frame_samples
        self.answer()

    def answer(self) -> None:
        """Answer the questions whose audio has been processed, except for less than a frame."""
        while self._asked and self._asked[0][0] < self._track.sample + self._frame:
            self._asked.popleft()[1](self._track.last_sound)


# A stream that is about to be computed, and its positions [start, end).
Target = tuple[str, int, int]
# Most consecutive failures of the detector on single streams; after one more the detector itself counts as broken.
MAX_CONSECUTIVE_FAILURES = 3

logger = logging.getLogger(__name__)


class TrackFollower(Protocol):
    """The interface of `SilenceSkipper`, which follows the speech tracks of frame-synchronous streams."""

    def gate(self, name: str) -> SpeechGate | None:
        """The gate that the stream's track has to drive, if any."""

    def needs_each_frame(self, name: str, track: SpeechTrack, probabilities: Sequence[float]) -> bool:
        """Whether `on_track` must be called after each of the next frames, and not only after the last one; runs in
        which the track finds nothing but more speech may be passed on whole."""

    def on_track(self, name: str, sample: int, frame_samples: int) -> bool:
        """The track has processed the audio up to this sample, in frames of this length. Returns whether the stream's
        silence is skipped."""


class Listener:
    """Runs the speech detector and the gates for all streams of an engine.

    The detector processes each sample of a stream once, in order, before the step that may read it is planned. With
    gate settings, a model gets only audio that passes its gate. If the detector fails on a batch, each stream is tried
    alone, and only a stream that fails ends. An asynchronous detector is launched first and asked for its results
    later (`collect`).

    Callbacks: `emit` sends an output, `announce` is called with the streams about to be processed, and `end_failed`
    ends a stream with an error. `skipper` and `speakers` get the results of the tracks; `questions` delays the `Speech`
    messages while the turn detector is asked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        detector: Detector,
        gate: GateSettings | None,
        emit: Callable[[Output], None],
        announce: Callable[[Iterable[Target]], None],
        end_failed: Callable[[str, Exception], None],
        skipper: TrackFollower,
        speakers: SpeakerTracks,
        questions: TurnQuestions,
    ) -> None:
        self._skipper = skipper
        self._speakers = speakers
        self._questions = questions
        self._detector = detector
        self._tracks: dict[str, SpeechTrack] = {}
        # Per stream: the sample at which the received audio ends.
        self._received_until: dict[str, int] = {}
        # The gates of windowed models; each is part of its track.
        self._gates: dict[str, SpeechGate] = {}
        # For streams with a gate: where their words can be.
        self._times: dict[str, WordTimes] = {}
        # Share of the audio processed last that belongs to live streams.
        self.live_share = 0.0
        self._scheduler = scheduler
        self._gate_settings = gate
        # An utterance that ends with less silence than this was cut off.
        self._pause_samples = 0 if gate is None else gate.pause_samples
        if gate is not None:
            spec = scheduler.spec
            # An utterance must fit into a window: two positions are left for its rounding to positions.
            self._file_settings = gate.for_files((spec.window_for(live=False) - 2) * spec.samples_per_position)
        self._emit = emit
        self._announce = announce
        self._end_failed = end_failed
        self._open: set[str] = set()
        # Functions that wait for results not collected yet, in the order of the launches; and the launches so far.
        self._results: deque[Callable[[], list[Speech]]] = deque()
        self.launches = 0
        self._pending_audio: dict[str, PendingAudio] = {}
        # Consecutive single streams on which the detector failed.
        self._consecutive_failures = 0
        # For streams of a frame-synchronous model.
        self._last_speech: dict[str, LastSpeech] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._pending_audio)

    def open(self, message: Open) -> None:
        """Start speech detection for a stream that was just admitted."""
        name = message.stream
        self._detector.open(name)
        self._open.add(name)
        self._received_until[name] = 0
        gate = self._skipper.gate(name)
        if self._gate_settings is not None:
            live = self._scheduler.streams[name].live
            gate = self._gates[name] = SpeechGate(self._gate_settings if live else self._file_settings)
            self._times[name] = WordTimes()
            self._scheduler.hold(name, True)
        track = SpeechTrack(message.turns, gate, finds_sounds=name in self._times)
        if message.track is not None and message.state is None:
            track.continue_from(message.track)
        self._tracks[name] = track
        if self._gate_settings is None and not self._scheduler.spec.rereads_window:
            self._last_speech[name] = LastSpeech(track)

    def change_turns(self, name: str, rule: TurnRule | None) -> None:
        """Use another rule from the end of the audio received so far."""
        if name in self._tracks:
            self._tracks[name].change(rule, self._received_until[name])

    def end_speech(self, name: str) -> None:
        """The client has ended the turn at the end of the audio received so far."""
        if name in self._tracks:
            self._tracks[name].restart(self._received_until[name])

    def end_questions(self, name: str, pause: int) -> None:
        """The turn before this pause has ended: the turn detector is not asked about it any more."""
        if name in self._tracks:
            self._tracks[name].end_questions(pause)

    def close(self, name: str) -> None:
        """Drop a stream. Does nothing for an unknown stream, such as one whose Open was refused."""
        if name in self._open:
            self._open.remove(name)
            self._detector.close(name)
            self._tracks.pop(name, None)
            self._received_until.pop(name, None)
            self._gates.pop(name, None)
            self._times.pop(name, None)
            self._last_speech.pop(name, None)
            self._pending_audio.pop(name, None)

    def add_audio(self, name: str, items: Sequence[Item]) -> None:
        """Keep new audio for the next `detect`."""
        pending_audio = self._pending_audio.get(name)
        if pending_audio is None:
            pending_audio = self._pending_audio[name] = PendingAudio(self._scheduler.spec)
        end, spoken = pending_audio.add(items), self._last_speech.get(name)
        if items:
            self._received_until[name] = end
            if spoken is not None:
                spoken.received_until = end

    def detect(self) -> None:
        """Detect speech in the audio received since the last call, and apply the gates' decisions."""
        streams = self._scheduler.streams
        waiting, self._pending_audio = self._pending_audio, {}
        pending_audio = {name: audio for name, audio in waiting.items() if name in streams}
        samples = sum(audio.length for audio in pending_audio.values())
        live_samples = sum(audio.length for name, audio in pending_audio.items() if streams[name].live)
        self.live_share = live_samples / samples if samples else 0.0
        spans = {name: audio.spans for name, audio in pending_audio.items()}
        for name in self._suspects_among(pending_audio):
            # A crash suspect is processed alone, so that a second crash identifies it.
            self._process({name: spans.pop(name)})
        self._process(spans)

    def _suspects_among(self, pending_audio: dict[str, PendingAudio]) -> list[str]:
        """Return the crash suspects whose pending audio reaches the positions at which an engine died."""
        suspects, streams = self._scheduler.suspects, self._scheduler.streams
        return [
            name
            for name in pending_audio.keys() & suspects.keys()
            if streams[name].clock.position_at(pending_audio[name].end) > suspects[name].start
        ]

    def collect(self, launches: int) -> None:
        """Apply the results of the first `launches` launches. Waits for the device."""
        while len(self._results) > self.launches - launches:
            for speech in self._results.popleft()():
                self._apply_speech(speech)

    def end_at_pause(self, flush: Flush, pause: int, then: Callable[[Callable[[], int | None]], None]) -> None:
        """Handle a flush at a pause (a sample in silence): an utterance that began before it ends.

        `then` is called with a function that returns the position up to which the stream must be computed. The function
        must be called when the scheduler has all audio before the flush that is not skipped, because a skip changes
        positions. Audio that the gate still holds back may be the beginning of the next utterance. If the turn rule has
        already ended the turn, the flush is only answered.

        A frame-synchronous model must be computed beyond the last speech by its delay. That audio follows in any case,
        so no silence is inserted. `then` is called when the audio so far has been processed.
        """
        name, scheduler = flush.stream, self._scheduler
        stream, gate, spoken = scheduler.streams[name], self._gates.get(name), self._last_speech.get(name)
        if spoken is not None:
            beyond, clock, asked = scheduler.spec.pause_positions_for(stream.delay), stream.clock, spoken.asked_until
            # Not before the position of an earlier flush, answered or not.
            spoken.ask(lambda end: then(lambda: max(clock.position_at(end) + beyond, clock.position_at(asked))))
            return
        if name in self._pending_audio:
            self.detect()
        if gate is None:
            then(lambda: None)
        elif name in self._gates:  # else an error in `detect` has ended the stream
            track = self._tracks[name]
            if track.ends_text and track.turn_end >= pause:
                scheduler.mark(name, flush.tag)
            elif gate.is_open and gate.began >= pause:
                # No rule has ended the text at the pause. It ends now, unless it has words of the next utterance.
                first = stream.clock.sample_at(stream.clock.position_at(gate.floor))
                word, start, *_ = stream.text.builder.unfinished
                scheduler.mark(name, flush.tag, ends_text=bool(stream.flushes or (word and start < first)))
            else:
                self._apply_decisions(name, gate.flush_at_pause())
                position = min(stream.clock.position_at(gate.floor), stream.available)
                then(lambda: position)

    def end_now(self, name: str) -> None:
        """Text is wanted now: end an open utterance at the end of the received audio, and skip doubtful audio."""
        gate, stream, spoken = self._gates.get(name), self._scheduler.streams.get(name), self._last_speech.get(name)
        if stream is None or stream.finished:
            return
        waits = spoken is not None and spoken.is_asked
        if (gate is not None or waits) and name in self._pending_audio:
            self.detect()
        if spoken is not None:
            spoken.asked_until = spoken.received_until
            if waits:
                self.collect(self.launches)
            if name in self._last_speech:
                spoken.answer_all()
        if gate is not None and name in self._gates:
            self._apply_decisions(name, gate.flush(stream.clock.end_sample))

    def bound_words(self, outputs: Iterable[Output]) -> None:
        """Correct the times of words that are about to be sent, by the detected speech."""
        for output in outputs:
            if isinstance(output, Text) and output.words and output.stream in self._times:
                self._times[output.stream].bound(output.words)

    def bound_revised(self, name: str, words: Iterable[Word]) -> None:
        """As `bound_words`, for words in place of earlier ones."""
        if name in self._times:
            self._times[name].bound_revised(words)

    def save(self, name: str) -> dict[str, Saved]:
        """Return the state of speech detection of a stream, as plain data."""
        parts = {"detector": self._detector.save(name), "track": self._tracks[name].save()}
        if name in self._gates:
            parts["gate"] = self._gates[name].save()
            parts["times"] = self._times[name].save()
        return parts

    def resume(self, name: str, parts: dict[str, Saved]) -> None:
        """Restore a saved state, with the rule of that moment."""
        self._detector.resume(name, parts["detector"])
        self._tracks[name].load(parts["track"])
        self._received_until[name] = self._scheduler.streams[name].clock.end_sample
        if name in self._gates:
            self._gates[name].resume(parts["gate"])
            self._times[name].resume(parts["times"])

    def _process(self, pending_audio: dict[str, list[PendingSpan]]) -> None:
        """Process streams in batches, one span of each at a time; almost always each stream has one span."""
        streams = self._scheduler.streams
        self._announce((name, streams[name].computed, streams[name].available) for name in pending_audio)
        for turn in range(max((len(spans) for spans in pending_audio.values()), default=0)):
            present = [
                (name, spans[turn]) for name, spans in pending_audio.items() if turn < len(spans) and name in streams
            ]
            for speech in self._detect([(name, span.samples()) for name, span in present]):
                self._apply_speech(speech)
            for name, span in present:
                if span.silence and name in streams:
                    self.collect(self.launches)  # results of the audio before the silence come first
                    self._pass_silence(name, span.silence)

    def _detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        """Process all streams as one batch. If that fails, its audio is unprocessed, and each stream is tried alone;
        those that fail end. Raises EngineDead if all of several streams fail: then the detector is broken."""
        try:
            results = self._detector.launch(batch)
            if not self._detector.overlaps_steps:
                speech = results()
                self._consecutive_failures = 0
                return speech
            self._results.append(results)
            self.launches += 1
            self._consecutive_failures = 0
            return []
        except Exception as error:
            if len(batch) == 1:
                self._consecutive_failures += 1
                if self._consecutive_failures > MAX_CONSECUTIVE_FAILURES:
                    raise EngineDead(f"the speech detector failed: {type(error).__name__}: {error}") from error
                self._end_failed(batch[0][0], error)
                return []
            logger.warning("speech detection failed for a batch of streams, trying them one by one: %r", error)
        return self._detect_apart(batch)

    def _detect_apart(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        """Process each stream of a failed batch alone."""
        speech: list[Speech] = []
        failed: list[tuple[str, Exception]] = []
        for name, samples in batch:
            try:
                results = self._detector.launch([(name, samples)])
                if self._detector.overlaps_steps:
                    self._results.append(results)
                    self.launches += 1
                else:
                    speech += results()
            except Exception as error:
                failed.append((name, error))
        if len(failed) == len(batch):
            last = failed[-1][1]
            raise EngineDead(f"the speech detector failed: {type(last).__name__}: {last}") from last
        self._consecutive_failures = 0
        for name, reason in failed:
            self._end_failed(name, reason)
        return speech

    def _pass_silence(self, name: str, samples: int) -> None:
        try:
            speech = self._detector.pass_silence(name, samples)
        except Exception as error:
            self._end_failed(name, error)
        else:
            self._apply_speech(speech)

    def _apply_speech(self, speech: Speech) -> None:
        """Apply the detector's results for the next frames of a stream."""
        try:
            if speech.probabilities and speech.stream in self._tracks:
                self._track(speech)
            if self._speakers.has_labels(speech.stream):
                self._speakers.add_frames(speech, voiced_frames(speech.probabilities))
        except StreamError as error:
            self._scheduler.fail(error)
        except Exception as error:
            self._end_failed(speech.stream, error)
        else:
            for ready in self._questions.add(speech):
                self._emit(ready)

    def _track(self, speech: Speech) -> None:
        """Pass the frames to the stream's track, and its results to the scheduler, `LastSpeech` and the skipper."""
        name, frame = speech.stream, speech.frame_samples
        track, spoken, gate = self._tracks[name], self._last_speech.get(name), self._gates.get(name)
        if spoken is not None:
            spoken.set_frame(frame)
        for probabilities in self._parts(speech, track, spoken):
            events = track.add_frames(probabilities, frame)
            if events:
                speech.events += [event for event in events if not isinstance(event, DECISIONS)]
            if gate is not None and not self._scheduler.streams[name].finished:
                self._apply_events(name, track, events)
            if spoken is not None and spoken.is_asked:
                spoken.answer()
            speech.skipped = self._skipper.on_track(name, track.sample, frame)
        speech.track, speech.spoken = track.state, track.take_spoken()

    def _parts(self, speech: Speech, track: SpeechTrack, spoken: LastSpeech | None) -> Iterator[Sequence[float]]:
        """Divide the frames into the parts to be passed on. A question is answered after exactly the frames that it
        needs. Each part must have been processed before the next one is taken."""
        rest: Sequence[float] = speech.probabilities
        while rest:
            part = rest
            if spoken is not None and spoken.is_asked:
                part = rest[: spoken.frames_until_answer]
            rest = rest[len(part) :]
            if self._skipper.needs_each_frame(speech.stream, track, part):
                yield from track.split(part, speech.frame_samples)
            else:
                yield part

    def _apply_events(self, name: str, track: SpeechTrack, events: list[TrackEvent]) -> None:
        """Apply the track's events to the scheduler and to the word times of a windowed model's stream."""
        stream, times = self._scheduler.streams[name], self._times[name]
        times.forget_before(stream.clock.sample_at(stream.base))
        times.add_sounds(track.take_sounds())
        for event in events:
            if isinstance(event, DECISIONS):
                self._apply_decision(name, event)
            elif isinstance(event, SpeechEnded) and track.ends_text:
                self._scheduler.mark(name, ends_text=True)

    def _apply_decisions(self, name: str, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._apply_decision(name, decision)

    def _apply_decision(self, name: str, decision: Decision) -> None:
        """Apply a gate's decision to the scheduler."""
        scheduler = self._scheduler
        stream, size = scheduler.streams[name], scheduler.spec.samples_per_position
        clock = stream.clock

        def position_after(sample: int) -> int:
            """Return the first received position that begins at or after a sample."""
            return min(clock.position_at(sample + size - 1), stream.available)

        match decision:
            case Begin():
                scheduler.skip(name, clock.position_at(decision.sample))
                scheduler.hold(name, False)
            case Pause():
                scheduler.pause(name, position_after(decision.sample))
                scheduler.hold(name, True)
            case Resume():
                scheduler.hold(name, False)
            case End():
                # Audio after the utterance may have arrived already; it is not part of the utterance.
                cut_off = decision.sample - decision.speech_end < self._pause_samples
                scheduler.flush(name, None, position_after(decision.sample), cut_off=cut_off)
                scheduler.hold(name, True)
            case SplitUtterance():
                scheduler.flush(name, None, position_after(decision.sample))
            case Skip():
                scheduler.skip(name, clock.position_at(decision.sample))


# The times of words.

SAMPLE_RATE = 16_000
# A word may end this long after the last frame with speech: the detector is a little early where a word fades out.
GRACE_SAMPLES = SAMPLE_RATE // 10
# A word in silence belongs to speech that is detected at most this much later.
ONSET_SAMPLES = 6 * SAMPLE_RATE // 10
# How long intervals of sound before the model's window are kept: unfinished words may come late.
KEPT_SAMPLES = 10 * SAMPLE_RATE


class WordTimes:
    """Where one stream has sound, and the end of its last word."""

    def __init__(self) -> None:
        # Starts and ends (samples) of the intervals of sound. They neither touch nor overlap.
        self._starts: list[int] = []
        self._ends: list[int] = []
        # End of the last word.
        self._said_until = 0

    def add_sounds(self, sounds: Iterable[tuple[int, int]]) -> None:
        """Add the next intervals (start, end) of sound, which the speech track has found."""
        for start, end in sounds:
            if self._ends and self._ends[-1] >= start:
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)

    def forget_before(self, sample: int) -> None:
        """The model needs no audio before this sample any more."""
        old = bisect_left(self._ends, sample - KEPT_SAMPLES)
        del self._starts[:old], self._ends[:old]

    def bound(self, words: Iterable[Word]) -> None:
        """Correct the times of words, in the order in which they were spoken."""
        for word in words:
            word.end_sample = max(self._latest_end(word), self._said_until)
            word.start_sample = min(max(word.start_sample, self._said_until), word.end_sample)
            self._said_until = word.end_sample

    def bound_revised(self, words: Iterable[Word]) -> None:
        """Correct the times of words that replace earlier ones."""
        until = 0
        for word in words:
            word.end_sample = max(self._latest_end(word), until)
            word.start_sample = min(max(word.start_sample, until), word.end_sample)
            until = word.end_sample

    def _latest_end(self, word: Word) -> int:
        """Where the word ends: at the end of the last speech that begins before its end, or at its own end."""
        start, end = word.start_sample, word.end_sample
        behind = bisect_left(self._starts, end)
        if not behind:
            return end
        limit = self._ends[behind - 1] + GRACE_SAMPLES
        follows = behind < len(self._starts) and self._starts[behind] <= end + ONSET_SAMPLES
        if start >= limit and follows:
            return end  # the word begins the next speech, which was detected late
        return min(end, limit)

    def save(self) -> Saved:
        return {"starts": list(self._starts), "ends": list(self._ends), "said_until": self._said_until}

    def resume(self, saved: Saved) -> None:
        self._starts, self._ends = list(saved["starts"]), list(saved["ends"])
        self._said_until = saved["said_until"]
