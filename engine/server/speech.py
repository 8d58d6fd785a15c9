"""Finds speech in the streams of an engine and decides which audio the model gets.

`Listener` runs the speech detector over all pending audio before a step is planned, sends the result as `Speech`, and
applies the decisions of the gates to the scheduler. `SpeechGate` decides for one stream of a windowed model,
`PendingAudio` holds audio that the detector has not seen, `LastSpeech` finds the end of the last speech for
frame-synchronous models, and `TurnEnds` finds the ends of turns.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audio.speech_edges import EdgeDetector, EdgeMemory, EdgeSettings, EdgeState, Fall
from engine.core.scheduler import Scheduler
from engine.errors import EngineDead
from engine.messages import Flush, Item, Output, Saved, Speech, Text, TurnRule, Word
from engine.runner.base import Detector
from engine.server.word_times import WordTimes
from engine.spec import ModelSpec

_SAMPLE_RATE = 16_000
_SAMPLES_PER_MS = _SAMPLE_RATE // 1000

# Log-odds that count neither for nor against speech (a probability of 0.73), and the most a frame can add or subtract.
_NEUTRAL_LOG_ODDS = 1.0
_MOST_FOR = 6.0
_MOST_AGAINST = -1.0
# Frames over which the probability is averaged to find where a long utterance is split.
_CALM_FRAMES = 8
# Probabilities are clamped this far from 0 and 1, so that the log-odds stay finite.
_SURE = 1e-4


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Durations in samples at 16 kHz, evidence in log-odds times seconds. The defaults were measured."""

    # Evidence that opens the gate: a quarter of a second that leaves no doubt, or a second at a probability of 0.9.
    evidence: float = 1.5
    # Evidence that is enough if there was speech within the last `conversation_samples`.
    conversation_evidence: float = 0.2
    conversation_samples: int = 10_000 * _SAMPLES_PER_MS
    # Audio kept from before the first evidence: soft beginnings of words are detected late.
    pre_roll_samples: int = 512 * _SAMPLES_PER_MS
    # A frame below this probability is silence. Silence of `pause_samples` is a pause of the utterance; silence of
    # `hang_over_samples` ends it.
    stop_threshold: float = 0.35
    pause_samples: int = 96 * _SAMPLES_PER_MS
    hang_over_samples: int = 608 * _SAMPLES_PER_MS
    # Doubtful audio is held back no longer than this.
    hold_samples: int = 5_000 * _SAMPLES_PER_MS
    # A longer utterance is split at the quietest place in its second half (None: it is never split).
    longest_samples: int | None = None

    def for_files(self, longest_samples: int) -> GateSettings:
        """Return the settings for uploads. Latency does not matter there, so pauses stay in the windows: a model that
        gets a pause and the audio after it decides better whether a sentence ended. Long silences are skipped."""
        return replace(
            self,
            pre_roll_samples=1_000 * _SAMPLES_PER_MS,
            pause_samples=1_000 * _SAMPLES_PER_MS,
            hang_over_samples=3_000 * _SAMPLES_PER_MS,
            longest_samples=longest_samples,
        )

    def __post_init__(self) -> None:
        if not 0 < self.stop_threshold < 1:
            raise ValueError(f"stop_threshold is a probability between 0 and 1, not {self.stop_threshold}")
        if min(self.evidence, self.conversation_evidence) <= 0:
            raise ValueError("the evidence that opens the speech gate must be above zero")
        if not 0 < self.pause_samples < self.hang_over_samples:
            raise ValueError("a pause of an utterance must be shorter than the hang-over that ends it")
        if min(self.conversation_samples, self.pre_roll_samples, self.hold_samples) < 0:
            raise ValueError("durations of the speech gate cannot be negative")


@dataclass(frozen=True, slots=True)
class Skip:
    """The model does not need audio before `sample`. The stream is held: the audio after it may be speech."""

    sample: int


@dataclass(frozen=True, slots=True)
class Begin:
    """An utterance begins: the model gets the audio from `sample` on, until the utterance ends."""

    sample: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The utterance pauses: compute it up to `sample`, then hold. It ends there unless speech follows soon."""

    sample: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The utterance continues after a pause; this was detected at `sample`."""

    sample: int


@dataclass(frozen=True, slots=True)
class End:
    """The utterance has ended: commit everything before `sample`, then hold. Speech itself ended at `speech_end`."""

    sample: int
    speech_end: int


@dataclass(frozen=True, slots=True)
class SplitUtterance:
    """The utterance continues after `sample`, but is too long for one window: commit everything before `sample`."""

    sample: int


Decision = Skip | Begin | Pause | Resume | End | SplitUtterance


class GateState(Enum):
    QUIET = auto()
    DOUBTFUL = auto()
    OPEN = auto()


class SpeechGate:
    """Decides from speech probabilities which audio of one stream a windowed model gets.

    A windowed model makes up words in silence, and a window without speech is wasted work. The gate skips silence and
    noise, holds doubtful audio back, opens when there is enough evidence of speech, and ends utterances, so that their
    text becomes final:

        QUIET --evidence above zero--> DOUBTFUL --enough evidence--> OPEN --silence for the hang-over--> QUIET
                                           `--evidence back at zero--> QUIET

    Evidence is a running sum of the frames' log-odds of speech, never below zero. Coughs and music reach high
    probabilities for short times; speech reaches very high ones and stays there, so its evidence grows many times
    faster. In a conversation, where a short "yes" is likely, less evidence is enough.

    A pause is reported long before it has lasted for the hang-over, so that the model can already compute the utterance
    up to it. If no speech follows, the utterance ends at the pause, and its text is ready.

    Time is a count of samples from the first frame on. The decisions do not depend on how frames are split into calls.
    """

    def __init__(self, settings: GateSettings, sample: int = 0, is_open: bool = False) -> None:
        self.settings = settings
        self.state = GateState.OPEN if is_open else GateState.QUIET
        # End of the last frame.
        self._sample = sample
        # Audio before this has been dropped or committed.
        self._floor = sample
        self._evidence = 0.0
        self._speech_start = sample
        self._speech_end = sample
        self._paused_at: int | None = None
        self._last_utterance_end: int | None = None
        # The last probabilities; (sum of probabilities, sample) of the best place to split the utterance.
        self._recent: list[float] = []
        self._calmest: tuple[float, int] | None = None

    def save(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {**vars(self), "settings": None, "state": self.state.name}

    def resume(self, saved: dict[str, Any]) -> None:
        """Restore a saved state; the settings stay this gate's own."""
        vars(self).update(saved, settings=self.settings, state=GateState[saved["state"]])

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    def judge(self, probabilities: Iterable[float], frame_samples: int) -> list[Decision]:
        """Judge the next frames. Returns decisions in order of time, with at most one Skip, at the end."""
        decisions: list[Decision] = []
        may_cut = self.settings.longest_samples is not None
        for probability in probabilities:
            self._sample += frame_samples
            if self.state is GateState.OPEN:
                found: Decision | None = self._follow(probability)
                cut = self._cut_if_long(probability, frame_samples) if may_cut else None
            else:
                found, cut = self._weigh(probability, frame_samples), None
            if found is not None:
                decisions.append(found)
            if cut is not None:
                decisions.append(cut)
        if not self.is_open:
            kept = self._held_from() if self.state is GateState.DOUBTFUL else self._sample
            decisions += self._skip(kept - self.settings.pre_roll_samples)
        return decisions

    def flush(self, sample: int) -> list[Decision]:
        """Text for everything before `sample` is wanted now: end an open utterance, skip doubtful audio.

        `sample` may lie ahead of the frames seen so far, which trail the audio by up to a frame. An utterance that
        pauses ends at the pause, because there has been no speech since.
        """
        if sample < self._sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self._sample} have been judged")
        if self.is_open:
            return [self._end(sample if self._paused_at is None else self._paused_at), *self._skip(sample)]
        self._rest()
        return self._skip(sample)

    def flush_at_pause(self) -> list[Decision]:
        """Text before the last pause is wanted now. Doubtful audio is kept: it may be the beginning of an utterance."""
        if not self.is_open:
            return []
        return [self._end(self._sample if self._paused_at is None else self._paused_at)]

    @property
    def began(self) -> int:
        """Sample of the first evidence of the current or last utterance."""
        return self._speech_start

    @property
    def certain_until(self) -> int | None:
        """Audio before this sample certainly belongs to the utterance; None while the gate is not open."""
        return self._speech_end + self.settings.hang_over_samples if self.is_open else None

    @property
    def floor(self) -> int:
        """Audio before this sample was skipped, or belongs to an utterance that has ended."""
        return self._floor

    def _weigh(self, probability: float, frame_samples: int) -> Begin | None:
        """In QUIET and DOUBTFUL: add the frame's evidence; returns Begin if there is enough."""
        probability = min(max(probability, _SURE), 1 - _SURE)
        odds = math.log(probability / (1 - probability)) - _NEUTRAL_LOG_ODDS
        self._evidence += min(max(odds, _MOST_AGAINST), _MOST_FOR) * frame_samples / _SAMPLE_RATE
        if self._evidence <= 0:
            self._rest()
            return None
        if self.state is GateState.QUIET:
            self.state = GateState.DOUBTFUL
            self._speech_start = self._sample - frame_samples
        if self._evidence < self._needed():
            return None
        self.state = GateState.OPEN
        self._speech_end = self._sample
        self._paused_at = None
        self._floor = max(self._floor, self._held_from() - self.settings.pre_roll_samples)
        return Begin(self._floor)

    def _follow(self, probability: float) -> Pause | Resume | End | None:
        """In OPEN: return whether the utterance pauses, continues after a pause, or ends."""
        if probability >= self.settings.stop_threshold:
            self._speech_end = self._sample
            paused, self._paused_at = self._paused_at is not None, None
            return Resume(self._sample) if paused else None
        quiet = self._sample - self._speech_end
        if self._paused_at is None:
            if quiet < self.settings.pause_samples:
                return None
            self._paused_at = self._sample
            return Pause(self._sample)
        return self._end(self._paused_at) if quiet >= self.settings.hang_over_samples else None

    def _cut_if_long(self, probability: float, frame_samples: int) -> SplitUtterance | None:
        """In OPEN: split an utterance that is too long at the quietest place in its second half."""
        longest = self.settings.longest_samples
        if longest is None or not self.is_open:
            return None
        self._recent = [*self._recent, probability][-_CALM_FRAMES:]
        middle = self._sample - frame_samples * _CALM_FRAMES // 2
        if middle - self._floor >= longest // 2 and (self._calmest is None or sum(self._recent) <= self._calmest[0]):
            self._calmest = sum(self._recent), middle
        if self._sample - self._floor < longest or self._calmest is None:
            return None
        self._floor, self._calmest = self._calmest[1], None
        return SplitUtterance(self._floor)

    def _needed(self) -> float:
        settings, last = self.settings, self._last_utterance_end
        in_conversation = last is not None and self._speech_start - last <= settings.conversation_samples
        return settings.conversation_evidence if in_conversation else settings.evidence

    def _held_from(self) -> int:
        return max(self._speech_start, self._sample - self.settings.hold_samples)

    def _end(self, sample: int) -> End:
        self._rest()
        self._floor = sample = max(sample, self._floor)
        self._last_utterance_end = self._speech_end
        return End(sample, self._speech_end)

    def _rest(self) -> None:
        self.state = GateState.QUIET
        self._calmest = None
        self._evidence = 0.0

    def _skip(self, sample: int) -> list[Decision]:
        if sample <= self._floor:
            return []
        self._floor = sample
        return [Skip(sample)]


Samples = NDArray[np.float32]

# Only this much of a declared silence goes through the detector: after it the probability does not change.
SETTLING_SECONDS = 2


@dataclass(slots=True)
class PendingSpan:
    """Samples for the detector, and the length of the declared silence after them that it need not process."""

    pieces: list[Samples] = field(default_factory=list)
    silence: int = 0
    # Samples of declared silence at the end of the pieces.
    settling: int = 0

    def samples(self) -> Samples:
        if len(self.pieces) == 1:
            return self.pieces[0]  # the common case of live streams
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
            count = item.length * spec.samples_per_position if item.samples is None else item.samples
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
        listened = min(count, self._settling - span.settling)
        if listened:
            span.pieces.append(np.zeros(listened, np.float32))
            self.length += listened
            span.settling += listened
        span.silence += count - listened


# A frame of at least this probability may be speech.
SPOKEN = GateSettings().stop_threshold


class LastSpeech:
    """Finds where the last speech of one stream ended, in samples.

    A question about a pause is asked when the audio before it has arrived, and answered when the detector has processed
    that audio: the answer depends only on the audio, not on when the device returned its results, and the question does
    not block.
    """

    def __init__(self) -> None:
        # End of the received audio, and end of the audio at the last flush without a pause.
        self.came = self.asked_until = 0
        # End of the last speech.
        self._until = 0
        # End of the audio processed, and the length of the shortest frame so far.
        self._judged = self._frame = 0
        # (end of the audio at the time of the question, callback)
        self._asked: deque[tuple[int, Callable[[int], None]]] = deque()

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def ask(self, then: Callable[[int], None]) -> None:
        """Call `then` with the end of the last speech in the audio received so far, as soon as that is known."""
        self._asked.append((self.came, then))
        self._answer()

    def answer_all(self) -> None:
        """Answer all questions with what is known now."""
        while self._asked:
            self._asked.popleft()[1](self._until)

    def note(self, speech: Speech) -> None:
        frame, count = speech.frame_samples, len(speech.probabilities)
        if not count:
            return
        self._frame = min(self._frame, frame) or frame
        if self._asked:
            self._answer()  # this may be the first frame; before it the frame length was not known
            for number in range(count):
                self._take(speech.probabilities[number : number + 1], speech.sample + number * frame, frame)
                self._answer()
        else:
            self._take(speech.probabilities, speech.sample, frame)

    def _take(self, probabilities: list[float], sample: int, frame: int) -> None:
        self._judged = sample + len(probabilities) * frame
        for number in range(len(probabilities), 0, -1):
            if probabilities[number - 1] >= SPOKEN:
                self._until = sample + number * frame
                return

    def _answer(self) -> None:
        """Answer the questions whose audio has been processed, except for less than a frame."""
        while self._asked and self._asked[0][0] < self._judged + self._frame:
            self._asked.popleft()[1](self._until)


class TurnEnds:
    """Finds where the turns of one stream end, by its gateway's rule, from the same frames and with the same code.

    The gateway's flush at the end of a turn may come late: the engine was busy, or this engine is catching up after
    the loss of another. Utterances and sentences must not depend on that, so the engine ends both by itself at the end
    of the turn, and the flush is only answered.
    """

    def __init__(self, rule: TurnRule) -> None:
        self._rule = rule
        self._edges = EdgeDetector(_settings(rule))
        # End of the last turn, in samples.
        self.last = 0

    def change(self, rule: TurnRule) -> None:
        """Use another rule from the next frame on; an open turn stays open."""
        self._rule = rule
        self._edges.settings = _settings(rule)

    def restart(self) -> None:
        """A flush ended the turn before its rule did: start again without an open turn."""
        self._edges.reset()

    def split(self, speech: Speech) -> Iterator[tuple[list[float], bool]]:
        """Yield the probabilities in parts, each with whether a turn ends at its end."""
        edges, frame, start = self._edges, speech.frame_samples, 0
        edges.sample = speech.sample
        for number, probability in enumerate(speech.probabilities, 1):
            edge = edges.judge(probability, frame)
            if isinstance(edge, Fall):
                self.last = edge.sample
                yield speech.probabilities[start:number], True
                start = number
        if start < len(speech.probabilities):
            yield speech.probabilities[start:], False

    def save(self) -> Saved:
        state, *counts = astuple(self._edges.save())
        return {
            "rule": (self._rule.threshold, self._rule.min_speech_samples, self._rule.silence_samples),
            "last": self.last,
            "state": state.name,
            "counts": counts,
        }

    @classmethod
    def resumed(cls, saved: Saved) -> TurnEnds:
        turns = cls(TurnRule(*saved["rule"]))
        turns.last = saved["last"]
        turns._edges.load(EdgeMemory(EdgeState[saved["state"]], *saved["counts"]))
        return turns


def _settings(rule: TurnRule) -> EdgeSettings:
    return EdgeSettings(rule.threshold, rule.min_speech_samples, rule.silence_samples, prefix_samples=0)


# A stream that is about to be computed, and its positions [start, end).
Target = tuple[str, int, int]
# Consecutive streams that may fail in the detector; after one more failure the detector itself is broken.
MOST_UNHEARD = 3

logger = logging.getLogger(__name__)


class Listener:
    """Runs the speech detector and the gates for all streams of an engine.

    The detector processes each sample of a stream once, in order, before the step that may read it is planned. With
    gate settings, a model gets only audio that passes its gate. If the detector fails on a batch, each stream is tried
    alone, and only a stream that fails ends. An asynchronous detector is launched first and asked for its results
    later (`collect`).

    Callbacks: `emit` sends an output, `on_speech` is called with each `Speech`, `announce` with the streams about to be
    processed, and `end_failed` ends a stream with an error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        detector: Detector,
        gate: GateSettings | None,
        emit: Callable[[Output], None],
        announce: Callable[[Iterable[Target]], None],
        end_failed: Callable[[str, Exception], None],
        on_speech: Callable[[Speech], None],
    ) -> None:
        self._on_speech = on_speech
        self._detector = detector
        self._gates: dict[str, SpeechGate] = {}
        # For streams with a gate: where their words can be.
        self._times: dict[str, WordTimes] = {}
        # For streams with a gate and a turn rule.
        self._turns: dict[str, TurnEnds] = {}
        # Share of the audio processed last that belongs to live streams.
        self.live_share = 0.0
        self._scheduler = scheduler
        self._gate_settings = gate
        # An utterance that ends with less silence than this was cut off.
        self._pause_samples = 0 if gate is None else gate.pause_samples
        if gate is not None:
            spec = scheduler.spec
            self._file_settings = gate.for_files((spec.window_for(live=False) - 2) * spec.samples_per_position)
        self._emit = emit
        self._announce = announce
        self._end_failed = end_failed
        self._open: set[str] = set()
        # Results not collected yet, in the order of the launches, and the number of launches so far.
        self._answers: deque[Callable[[], list[Speech]]] = deque()
        self.launches = 0
        self._pending_audio: dict[str, PendingAudio] = {}
        # Consecutive streams on which the detector failed.
        self._unheard_in_a_row = 0
        # For streams of a frame-synchronous model.
        self._spoken: dict[str, LastSpeech] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._pending_audio)

    def open(self, name: str, turns: TurnRule | None = None) -> None:
        """Start speech detection for a stream that was just admitted."""
        self._detector.open(name)
        self._open.add(name)
        if self._gate_settings is not None:
            live = self._scheduler.streams[name].live
            self._gates[name] = SpeechGate(self._gate_settings if live else self._file_settings)
            self._times[name] = WordTimes(self._gate_settings.stop_threshold)
            self._scheduler.hold(name, True)
            self.change_turns(name, turns)
        elif not self._scheduler.spec.rereads_window:
            self._spoken[name] = LastSpeech()

    def change_turns(self, name: str, rule: TurnRule | None) -> None:
        """Set the turn rule from now on; audio received so far is judged by the old rule."""
        if name in self._gates and name in self._pending_audio:
            self.detect()
        if rule is None or name not in self._gates:
            self._turns.pop(name, None)
        elif name in self._turns:
            self._turns[name].change(rule)
        else:
            self._turns[name] = TurnEnds(rule)

    def close(self, name: str) -> None:
        """Drop a stream. Does nothing for an unknown stream, such as one whose Open was refused."""
        if name in self._open:
            self._open.remove(name)
            self._detector.close(name)
            self._gates.pop(name, None)
            self._times.pop(name, None)
            self._turns.pop(name, None)
            self._spoken.pop(name, None)
            self._pending_audio.pop(name, None)

    def add_audio(self, name: str, items: Sequence[Item]) -> None:
        """Keep new audio for the next `detect`."""
        pending_audio = self._pending_audio.get(name)
        if pending_audio is None:
            pending_audio = self._pending_audio[name] = PendingAudio(self._scheduler.spec)
        end, spoken = pending_audio.add(items), self._spoken.get(name)
        if spoken is not None and items:
            spoken.came = end

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
            self._hear({name: spans.pop(name)})
        self._hear(spans)

    def _suspects_among(self, pending_audio: dict[str, PendingAudio]) -> list[str]:
        """Return the crash suspects whose pending audio reaches the positions at which an engine died."""
        suspects, streams = self._scheduler.suspects, self._scheduler.streams
        return [
            name
            for name in pending_audio.keys() & suspects.keys()
            if streams[name].clock.position_at(pending_audio[name].end) > suspects[name].start
        ]

    def collect(self, launches: int) -> None:
        """Take in the results of the first `launches` launches. Waits for the device."""
        while len(self._answers) > self.launches - launches:
            for speech in self._answers.popleft()():
                self._found(speech)

    def end_at_pause(self, flush: Flush, pause: int, then: Callable[[int | None], None]) -> None:
        """Handle a flush at a pause (a sample in silence): an utterance that began before it ends.

        `then` is called with the position up to which the stream must be computed. Audio that the gate still holds may
        be the beginning of the next utterance. If the turn rule has already ended the turn, the flush is only answered.

        A frame-synchronous model must be computed beyond the last speech by its delay. That audio follows in any case,
        so no silence is inserted. `then` is called when the audio so far has been processed.
        """
        name, scheduler = flush.stream, self._scheduler
        stream, gate, spoken = scheduler.streams[name], self._gates.get(name), self._spoken.get(name)
        if spoken is not None:
            said, clock, asked = scheduler.spec.said_positions_for(stream.delay), stream.clock, spoken.asked_until
            # Not before the position of an earlier flush, answered or not.
            spoken.ask(lambda at: then(max(clock.position_at(at) + said, clock.position_at(asked))))
            return
        if name in self._pending_audio:
            self.detect()
        if gate is None:
            then(None)
        elif name in self._gates:  # else an error in `detect` has ended the stream
            turns = self._turns.get(name)
            if turns is not None and turns.last >= pause:
                scheduler.mark(name, flush.tag)
            elif gate.is_open and gate.began >= pause:
                # No rule has ended the text at the pause. End it now, unless it has words of the next utterance.
                first = stream.clock.sample_at(stream.clock.position_at(gate.floor))
                word, start, *_ = stream.text.builder.unfinished
                scheduler.mark(name, flush.tag, ends_text=bool(stream.flushes or (word and start < first)))
            else:
                self._apply_decisions(name, gate.flush_at_pause())
                then(min(stream.clock.position_at(gate.floor), stream.available))

    def end_now(self, name: str) -> None:
        """Text is wanted now: end an open utterance here, and skip doubtful audio."""
        gate, stream, spoken = self._gates.get(name), self._scheduler.streams.get(name), self._spoken.get(name)
        if stream is None or stream.finished:
            return
        waits = spoken is not None and spoken.is_asked
        if (gate is not None or waits) and name in self._pending_audio:
            self.detect()
        if spoken is not None:
            spoken.asked_until = spoken.came
            if waits:
                self.collect(self.launches)
            if name in self._spoken:
                spoken.answer_all()
        if gate is not None and name in self._gates:
            self._apply_decisions(name, gate.flush(stream.clock.end_sample))
            if name in self._turns:
                self._turns[name].restart()

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
        parts = {"detector": self._detector.save(name)}
        if name in self._gates:
            parts["gate"] = self._gates[name].save()
            parts["times"] = self._times[name].save()
        if name in self._turns:
            parts["turns"] = self._turns[name].save()
        return parts

    def resume(self, name: str, parts: dict[str, Saved]) -> None:
        """Restore a saved state."""
        self._detector.resume(name, parts["detector"])
        if name in self._gates:
            self._gates[name].resume(parts["gate"])
            if "times" in parts:  # missing in the states of older engines
                self._times[name].resume(parts["times"])
        # Restore the rule of the state: it may have changed since the stream was opened.
        self.change_turns(name, None)
        if "turns" in parts:
            self._turns[name] = TurnEnds.resumed(parts["turns"])

    def _hear(self, pending_audio: dict[str, list[PendingSpan]]) -> None:
        """Process streams in batches, one span of each at a time; almost always each stream has one span."""
        streams = self._scheduler.streams
        self._announce((name, streams[name].computed, streams[name].available) for name in pending_audio)
        for turn in range(max((len(spans) for spans in pending_audio.values()), default=0)):
            present = [
                (name, spans[turn]) for name, spans in pending_audio.items() if turn < len(spans) and name in streams
            ]
            for speech in self._detect([(name, span.samples()) for name, span in present]):
                self._found(speech)
            for name, span in present:
                if span.silence and name in streams:
                    self.collect(self.launches)  # results of the audio before the silence come first
                    self._pass_silence(name, span.silence)

    def _detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        """Process all streams as one batch. If that fails, its audio is unprocessed, and each stream is tried alone;
        those that fail end. Raises EngineDead if all of several streams fail: then the detector is broken."""
        try:
            answers = self._detector.launch(batch)
            if not self._detector.overlaps_steps:
                found = answers()
                self._unheard_in_a_row = 0
                return found
            self._answers.append(answers)
            self.launches += 1
            self._unheard_in_a_row = 0
            return []
        except Exception as error:
            if len(batch) == 1:
                self._unheard_in_a_row += 1
                if self._unheard_in_a_row > MOST_UNHEARD:
                    raise EngineDead(f"the speech detector failed: {type(error).__name__}: {error}") from error
                self._end_failed(batch[0][0], error)
                return []
            logger.warning("speech detection failed for a batch of streams, trying them one by one: %r", error)
        return self._detect_apart(batch)

    def _detect_apart(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        found: list[Speech] = []
        failed: list[tuple[str, Exception]] = []
        for name, samples in batch:
            try:
                answers = self._detector.launch([(name, samples)])
                if self._detector.overlaps_steps:
                    self._answers.append(answers)
                    self.launches += 1
                else:
                    found += answers()
            except Exception as error:
                failed.append((name, error))
        if len(failed) == len(batch):
            last = failed[-1][1]
            raise EngineDead(f"the speech detector failed: {type(last).__name__}: {last}") from last
        self._unheard_in_a_row = 0
        for name, reason in failed:
            self._end_failed(name, reason)
        return found

    def _pass_silence(self, name: str, samples: int) -> None:
        try:
            speech = self._detector.pass_silence(name, samples)
        except Exception as error:
            self._end_failed(name, error)
        else:
            self._found(speech)

    def _found(self, speech: Speech) -> None:
        gate, spoken = self._gates.get(speech.stream), self._spoken.get(speech.stream)
        try:
            if spoken is not None:
                spoken.note(speech)
            if gate is not None and not self._scheduler.streams[speech.stream].finished:
                self._pass_gate(speech, gate)
            self._on_speech(speech)
        except Exception as error:
            self._end_failed(speech.stream, error)
        else:
            self._emit(speech)

    def _pass_gate(self, speech: Speech, gate: SpeechGate) -> None:
        name, turns, times = speech.stream, self._turns.get(speech.stream), self._times[speech.stream]
        stream = self._scheduler.streams[name]
        times.forget_before(stream.clock.sample_at(stream.base))
        times.add_probabilities(speech.sample, speech.frame_samples, speech.probabilities)
        for probabilities, is_end in [(speech.probabilities, False)] if turns is None else turns.split(speech):
            self._apply_decisions(name, gate.judge(probabilities, speech.frame_samples))
            if is_end:
                self._apply_decisions(name, gate.flush_at_pause())
                self._scheduler.mark(name, ends_text=True)

    def _apply_decisions(self, name: str, decisions: list[Decision]) -> None:
        """Apply a gate's decisions to the scheduler."""
        scheduler = self._scheduler
        stream, rate = scheduler.streams[name], scheduler.spec.samples_per_position
        clock = stream.clock

        def position_behind(sample: int) -> int:
            """Return the first received position that begins at or after a sample."""
            return min(clock.position_at(sample + rate - 1), stream.available)

        for decision in decisions:
            match decision:
                case Begin():
                    scheduler.skip(name, clock.position_at(decision.sample))
                    scheduler.hold(name, False)
                case Pause():
                    scheduler.pause(name, position_behind(decision.sample))
                    scheduler.hold(name, True)
                case Resume():
                    scheduler.hold(name, False)
                case End():
                    # Audio from after the utterance may have arrived already; it is not part of it.
                    cut_off = decision.sample - decision.speech_end < self._pause_samples
                    scheduler.flush(name, None, position_behind(decision.sample), cut_off=cut_off)
                    scheduler.hold(name, True)
                case SplitUtterance():
                    scheduler.flush(name, None, position_behind(decision.sample))
                case Skip():
                    scheduler.skip(name, clock.position_at(decision.sample))
