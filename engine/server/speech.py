"""Which stretches of a stream a windowed model should hear at all, from speech probabilities.

A model that rereads a window makes up words when nobody speaks, and a window without speech is wasted work. The gate
stands in front of it: it lets silence and noise go by unheard, holds audio back while it is in doubt, opens when it is
convinced, and says where an utterance has ended, so that its text becomes final.

    QUIET --evidence above zero--> DOUBTFUL --enough evidence--> OPEN --quiet for the hang-over--> QUIET
                                       `--evidence back at zero--> QUIET

An utterance of a file may be longer than what a model can hear at once. It is cut where it is quiet then, and goes on.

A pause in an utterance is told long before it has lasted for the hang-over. The model can hear the utterance up to
there meanwhile; if nobody speaks on, it ends at the pause, and its text is there without another look.

Evidence is a running sum of the frames' log-odds of speech, never below zero. Coughs and music reach high probabilities
now and then; people who speak reach very high ones and stay there, so their evidence mounts many times faster. How much
is enough depends on what went before: in a conversation a short "yes" is likely, and little evidence will do.

Pure: time is a count of samples, and the cut of the audio into calls changes nothing but when the caller hears of it.
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
from engine.messages import Flush, Item, Output, Saved, Speech, Text, TurnRule
from engine.runner.base import Detector
from engine.server.word_times import WordTimes
from engine.spec import ModelSpec

_SAMPLE_RATE = 16_000
_SAMPLES_PER_MS = _SAMPLE_RATE // 1000

# Log-odds that count neither for nor against speech (a probability of 0.73), and the most one frame can add or take.
_NEUTRAL_LOG_ODDS = 1.0
_MOST_FOR = 6.0
_MOST_AGAINST = -1.0
# Frames over which it must be calm where an utterance is cut.
_CALM_FRAMES = 8
# Keeps the odds finite.
_SURE = 1e-4


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Durations in samples at 16 kHz, evidence in log-odds times seconds. The defaults were measured."""

    # Evidence that opens the gate: a quarter of a second that leaves no doubt, or a second at a probability of 0.9.
    evidence: float = 1.5
    # Evidence that is enough if somebody spoke within the last `conversation_samples`.
    conversation_evidence: float = 0.2
    conversation_samples: int = 10_000 * _SAMPLES_PER_MS
    # Audio kept from before the first evidence: soft beginnings of words are noticed late.
    pre_roll_samples: int = 512 * _SAMPLES_PER_MS
    # Below this probability nobody speaks. Quiet of `pause_samples` is a pause of the utterance, and quiet of
    # `hang_over_samples` is its end.
    stop_threshold: float = 0.35
    pause_samples: int = 96 * _SAMPLES_PER_MS
    hang_over_samples: int = 608 * _SAMPLES_PER_MS
    # Audio is held back for doubt no longer than this.
    hold_samples: int = 5_000 * _SAMPLES_PER_MS
    # An utterance longer than this is cut where it was quietest since it was half as long (None: it is never cut).
    longest_samples: int | None = None

    def for_files(self, longest_samples: int) -> GateSettings:
        """Nobody waits for the next word of a file, so pauses stay in its windows: a model that hears a pause and what
        follows it knows best whether a sentence ended there. A long silence would be wasted work."""
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
    """Audio before `sample` need not be heard. The stream is held: what follows may turn out to be speech."""

    sample: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Somebody speaks. The model should hear the stream from `sample` on, until the utterance ends."""

    sample: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The utterance pauses: hear it up to `sample`, then hold. It will end there unless somebody speaks on soon."""

    sample: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The utterance goes on after a pause; at `sample` that became clear."""

    sample: int


@dataclass(frozen=True, slots=True)
class End:
    """The utterance is over: commit everything before `sample`, then hold. Speech itself ended at `speech_end`."""

    sample: int
    speech_end: int


@dataclass(frozen=True, slots=True)
class SplitUtterance:
    """The utterance goes on behind `sample`, but it has become too long to be heard as one: commit what lies before."""

    sample: int


Decision = Skip | Begin | Pause | Resume | End | SplitUtterance


class GateState(Enum):
    QUIET = auto()
    DOUBTFUL = auto()
    OPEN = auto()


class SpeechGate:
    """Follows one stream, from the sample its first frame starts at."""

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
        # The last probabilities, and how loud and where the calmest place was at which the utterance could be cut.
        self._recent: list[float] = []
        self._calmest: tuple[float, int] | None = None

    def save(self) -> dict[str, Any]:
        """All that decides what comes next, as plain data."""
        return {**vars(self), "settings": None, "state": self.state.name}

    def resume(self, saved: dict[str, Any]) -> None:
        """Take over the state of a saved gate; the settings stay this gate's own."""
        vars(self).update(saved, settings=self.settings, state=GateState[saved["state"]])

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    def judge(self, probabilities: Iterable[float], frame_samples: int) -> list[Decision]:
        """Take the next frames. Decisions are in order of time, with at most one Skip, the last."""
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
        """Text for everything before `sample` is wanted now: end what is open, give up what is doubtful.

        `sample` may lie ahead of the frames seen so far, which trail the audio by up to a frame. An utterance that
        pauses ends at the pause: nobody has spoken since.
        """
        if sample < self._sample:
            raise ValueError(f"sample {sample} is past: frames up to sample {self._sample} have been judged")
        if self.is_open:
            return [self._end(sample if self._paused_at is None else self._paused_at), *self._skip(sample)]
        self._rest()
        return self._skip(sample)

    def flush_at_pause(self) -> list[Decision]:
        """Text for what was said before the last pause is wanted now. What is doubtful may be the beginning of more."""
        if not self.is_open:
            return []
        return [self._end(self._sample if self._paused_at is None else self._paused_at)]

    @property
    def began(self) -> int:
        """Where there was the first sign of what is heard now, or was heard last."""
        return self._speech_start

    @property
    def certain_until(self) -> int | None:
        """Audio before this sample belongs to the utterance, whatever comes; None while nobody speaks."""
        return self._speech_end + self.settings.hang_over_samples if self.is_open else None

    @property
    def floor(self) -> int:
        """Audio before this sample has been dropped, or ended with an utterance."""
        return self._floor

    def _weigh(self, probability: float, frame_samples: int) -> Begin | None:
        """QUIET and DOUBTFUL: is this speech?"""
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
        """OPEN: does the utterance pause, go on, has it ended?"""
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
        """OPEN: an utterance that has become too long is cut where it was calmest since it was half as long."""
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


# Audio that waits for the speech detector. A silence that was declared is a number, however long it is.

Samples = NDArray[np.float32]

# So much of a declared silence is listened to: by then speech has ended and the detector's answer does not change.
SETTLING_SECONDS = 2


@dataclass(slots=True)
class PendingSpan:
    """Samples to listen to, and how long a silence follows them that need not be."""

    pieces: list[Samples] = field(default_factory=list)
    silence: int = 0
    # Samples of silence at the end of the pieces.
    settling: int = 0

    def samples(self) -> Samples:
        if len(self.pieces) == 1:
            return self.pieces[0]  # most live streams, most of the time
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)


class PendingAudio:
    """What has come of one stream since it was listened to."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spans = [PendingSpan()]
        self.length = 0  # samples to listen to
        self.end = 0  # where the audio ends that has come
        self._spec = spec
        self._settling = SETTLING_SECONDS * spec.sample_rate

    def add(self, items: Sequence[Item]) -> int:
        """Returns where the audio ends that has come."""
        spec, end = self._spec, 0
        for item in items:
            count = item.length * spec.samples_per_position if item.samples is None else item.samples
            if item.payload is None or item.payload.ndim > 1:
                self._add_silence(count)  # features cannot be listened to
            else:
                # Without look-around and padding.
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


# Where somebody was last heard speaking in a stream, and who waits to be told.
#
# A pause is asked for when the audio before it has come, and answered when that audio was listened to: the answer
# depends on the audio alone, not on when the device said what it had found. Nobody waits for the device for it.

# A frame of at least this probability may be speech.
SPOKEN = GateSettings().stop_threshold


class LastSpeech:
    """Of one stream, in its samples."""

    def __init__(self) -> None:
        # Up to where the audio has come, and up to where text was wanted of all of it, whatever was said.
        self.came = self.asked_until = 0
        self._until = 0
        # How far it was listened to, and the shortest frame that was.
        self._judged = self._frame = 0
        # Ends of the audio behind which a pause was asked for, and whom to tell.
        self._asked: deque[tuple[int, Callable[[int], None]]] = deque()

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def ask(self, then: Callable[[int], None]) -> None:
        """Have `then` told where the last speech ended, in the audio that has come."""
        self._asked.append((self.came, then))
        self._answer()

    def answer_all(self) -> None:
        """By what is known; no more will be listened to before something else is done."""
        while self._asked:
            self._asked.popleft()[1](self._until)

    def note(self, speech: Speech) -> None:
        frame, count = speech.frame_samples, len(speech.probabilities)
        if not count:
            return
        self._frame = min(self._frame, frame) or frame
        if self._asked:
            self._answer()  # it may be the first frame, so that its length was not known
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
        """What is left of the audio before the pause is less than a frame."""
        while self._asked and self._asked[0][0] < self._judged + self._frame:
            self._asked.popleft()[1](self._until)


# Where turns end in a stream: found here by the rule of its gateway, from the same frames and with the same code.
#
# The gateway asks for the text of a turn when it has heard of the turn's end. That may be late: the engine was busy,
# or another one died and this one caught up. What the model hears as one utterance, and where a sentence ends, must
# not depend on it. So the engine ends both by itself where the turn ends, and the gateway is only answered.


class TurnEnds:
    """Of one stream."""

    def __init__(self, rule: TurnRule) -> None:
        self._rule = rule
        self._edges = EdgeDetector(_settings(rule))
        # The end of the last turn.
        self.last = 0

    def change(self, rule: TurnRule) -> None:
        """Judge by another rule from the next frame on; an open turn stays open."""
        self._rule = rule
        self._edges.settings = _settings(rule)

    def restart(self) -> None:
        """Text was asked for in the midst of a turn: it ends there."""
        self._edges.reset()

    def split(self, speech: Speech) -> Iterator[tuple[list[float], bool]]:
        """The frames in stretches, each with whether a turn ends with it."""
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


# Who speaks, and what of it a model should hear: the speech detector, the gates behind it, and audio that waits.
#
# The listener promises: each sample of a stream is listened to once, in order, before the step that may read it is
# planned; what was found goes out as `Speech`; and with gate settings a model hears only what its gate lets by. An
# error in listening to many streams at once is found out: the stream it belongs to is blamed, the others are heard.
#
# A detector on a device that works by itself is told to listen and asked later for what it found (`collect`).

# A stream that is about to be computed, and the positions [start, end).
Target = tuple[str, int, int]
# Streams in a row that a detector cannot listen to: one more, and it is not their fault.
MOST_UNHEARD = 3

logger = logging.getLogger(__name__)


class Listener:
    """`say` takes what was found and `heard` acts on it, `announce` is told who is listened to, `blame` ends a stream
    that went wrong."""

    def __init__(
        self,
        scheduler: Scheduler,
        detector: Detector,
        gate: GateSettings | None,
        say: Callable[[Output], None],
        announce: Callable[[Iterable[Target]], None],
        blame: Callable[[str, Exception], None],
        heard: Callable[[Speech], None],
    ) -> None:
        self._heard = heard
        self._detector = detector
        self._gates: dict[str, SpeechGate] = {}
        # Of streams with a gate: where their words can be.
        self._times: dict[str, WordTimes] = {}
        # Of streams with a gate whose gateway said what ends a turn.
        self._turns: dict[str, TurnEnds] = {}
        # What part of the audio that was listened to last belongs to live streams.
        self.live_share = 0.0
        self._scheduler = scheduler
        self._gate_settings = gate
        # Less quiet than this behind the last speech: somebody is still speaking.
        self._pause_samples = 0 if gate is None else gate.pause_samples
        if gate is not None:
            spec = scheduler.spec
            self._file_settings = gate.for_files((spec.window_for(live=False) - 2) * spec.samples_per_position)
        self._say = say
        self._announce = announce
        self._blame = blame
        self._open: set[str] = set()
        # What the device has yet to be asked for, in the order of the launches, and how many launches there were.
        self._answers: deque[Callable[[], list[Speech]]] = deque()
        self.launches = 0
        self._pending_audio: dict[str, PendingAudio] = {}
        # Streams, one after the other, that the detector could not listen to.
        self._unheard_in_a_row = 0
        # Of streams of a frame-synchronous model.
        self._spoken: dict[str, LastSpeech] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._pending_audio)

    def open(self, name: str, turns: TurnRule | None = None) -> None:
        """Listen to a stream that was just admitted."""
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
        """By what its turns end from now on; what has come by now is judged by the rule before."""
        if name in self._gates and name in self._pending_audio:
            self.listen()
        if rule is None or name not in self._gates:
            self._turns.pop(name, None)
        elif name in self._turns:
            self._turns[name].change(rule)
        else:
            self._turns[name] = TurnEnds(rule)

    def close(self, name: str) -> None:
        """Forget a stream. Harmless for one that was never listened to, such as one whose opening was refused."""
        if name in self._open:
            self._open.remove(name)
            self._detector.close(name)
            self._gates.pop(name, None)
            self._times.pop(name, None)
            self._turns.pop(name, None)
            self._spoken.pop(name, None)
            self._pending_audio.pop(name, None)

    def take(self, name: str, items: Sequence[Item]) -> None:
        """Audio that has come; it waits for the next `listen`."""
        pending_audio = self._pending_audio.get(name)
        if pending_audio is None:
            pending_audio = self._pending_audio[name] = PendingAudio(self._scheduler.spec)
        end, spoken = pending_audio.add(items), self._spoken.get(name)
        if spoken is not None and items:
            spoken.came = end

    def listen(self) -> None:
        """Find speech in what has come since the last call, and let the models skip what nobody says."""
        streams = self._scheduler.streams
        waiting, self._pending_audio = self._pending_audio, {}
        pending_audio = {name: audio for name, audio in waiting.items() if name in streams}
        samples = sum(audio.length for audio in pending_audio.values())
        live_samples = sum(audio.length for name, audio in pending_audio.items() if streams[name].live)
        self.live_share = live_samples / samples if samples else 0.0
        spans = {name: audio.spans for name, audio in pending_audio.items()}
        for name in self._suspects_among(pending_audio):
            # It may have killed an engine: listened to alone, it is found out.
            self._hear({name: spans.pop(name)})
        self._hear(spans)

    def _suspects_among(self, pending_audio: dict[str, PendingAudio]) -> list[str]:
        """Streams that may have killed an engine, and whose audio reaches the spot at which it died."""
        suspects, streams = self._scheduler.suspects, self._scheduler.streams
        return [
            name
            for name in pending_audio.keys() & suspects.keys()
            if streams[name].clock.position_at(pending_audio[name].end) > suspects[name].start
        ]

    def collect(self, launches: int) -> None:
        """Take in what was found by the first so many launches. Waits for the device."""
        while len(self._answers) > self.launches - launches:
            for speech in self._answers.popleft()():
                self._found(speech)

    def end_at_pause(self, flush: Flush, pause: int, then: Callable[[int | None], None]) -> None:
        """Nobody spoke at the pause: an utterance open since before it ends. `then` is told the position up to which
        the stream must be heard; what a gate still holds may be the beginning of the next utterance. Where the turn
        has ended by itself, the flush only wants its answer.

        A frame-synchronous model must be heard as far behind the last speech as it says its words: audio that comes in
        any case, so no silence is inserted. Where that is, `then` is told when the audio so far was listened to.
        """
        name, scheduler = flush.stream, self._scheduler
        stream, gate, spoken = scheduler.streams[name], self._gates.get(name), self._spoken.get(name)
        if spoken is not None:
            said, clock, asked = scheduler.spec.said_positions_for(stream.delay), stream.clock, spoken.asked_until
            # Never before what was asked for already, whether that is answered by now or not.
            spoken.ask(lambda at: then(max(clock.position_at(at) + said, clock.position_at(asked))))
            return
        if name in self._pending_audio:
            self.listen()
        if gate is None:
            then(None)
        elif name in self._gates:  # else listening was the end of it
            turns = self._turns.get(name)
            if turns is not None and turns.last >= pause:
                scheduler.mark(name, flush.tag)
            elif gate.is_open and gate.began >= pause:
                # No rule has ended the text there. It ends now, unless it has gone on with words of what followed.
                first = stream.clock.sample_at(stream.clock.position_at(gate.floor))
                word, start, *_ = stream.text.builder.unfinished
                scheduler.mark(name, flush.tag, ends_text=bool(stream.flushes or (word and start < first)))
            else:
                self._apply_decisions(name, gate.flush_at_pause())
                then(min(stream.clock.position_at(gate.floor), stream.available))

    def end_now(self, name: str) -> None:
        """Text is wanted now: what the gate holds open ends here, and what is in doubt will not be heard."""
        gate, stream, spoken = self._gates.get(name), self._scheduler.streams.get(name), self._spoken.get(name)
        if stream is None or stream.finished:
            return
        waits = spoken is not None and spoken.is_asked
        if (gate is not None or waits) and name in self._pending_audio:
            self.listen()
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
        """Set the times of words right that are about to go out, by what was heard."""
        for output in outputs:
            if isinstance(output, Text) and output.words and output.stream in self._times:
                self._times[output.stream].bound(output.words)

    def save(self, name: str) -> dict[str, Saved]:
        """All that decides what is heard of a stream from here on, as plain data."""
        parts = {"detector": self._detector.save(name)}
        if name in self._gates:
            parts["gate"] = self._gates[name].save()
            parts["times"] = self._times[name].save()
        if name in self._turns:
            parts["turns"] = self._turns[name].save()
        return parts

    def resume(self, name: str, parts: dict[str, Saved]) -> None:
        """Listen on from a saved state."""
        self._detector.resume(name, parts["detector"])
        if name in self._gates:
            self._gates[name].resume(parts["gate"])
            if "times" in parts:  # a state that an older engine saved has none
                self._times[name].resume(parts["times"])
        # The rule of that moment: what the stream was opened with may have changed by then.
        self.change_turns(name, None)
        if "turns" in parts:
            self._turns[name] = TurnEnds.resumed(parts["turns"])

    def _hear(self, pending_audio: dict[str, list[PendingSpan]]) -> None:
        """Listen to streams side by side; almost always all there is of each is one stretch."""
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
                    self.collect(self.launches)  # what was said before the silence comes first
                    self._pass_silence(name, span.silence)

    def _detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        """All streams at once. If that fails nothing was heard, and each is listened to alone: one of them is why, and
        ends. A detector that hears none of several has failed for all of them, and so has the engine."""
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
                self._blame(batch[0][0], error)
                return []
            logger.warning("streams are listened to one by one, because listening to all failed: %r", error)
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
            self._blame(name, reason)
        return found

    def _pass_silence(self, name: str, samples: int) -> None:
        try:
            speech = self._detector.pass_silence(name, samples)
        except Exception as error:
            self._blame(name, error)
        else:
            self._found(speech)

    def _found(self, speech: Speech) -> None:
        gate, spoken = self._gates.get(speech.stream), self._spoken.get(speech.stream)
        try:
            if spoken is not None:
                spoken.note(speech)
            if gate is not None and not self._scheduler.streams[speech.stream].finished:
                self._pass_gate(speech, gate)
            self._heard(speech)
        except Exception as error:
            self._blame(speech.stream, error)
        else:
            self._say(speech)

    def _pass_gate(self, speech: Speech, gate: SpeechGate) -> None:
        name, turns, times = speech.stream, self._turns.get(speech.stream), self._times[speech.stream]
        stream = self._scheduler.streams[name]
        times.forget_before(stream.clock.sample_at(stream.base))
        times.hear(speech.sample, speech.frame_samples, speech.probabilities)
        for probabilities, is_end in [(speech.probabilities, False)] if turns is None else turns.split(speech):
            self._apply_decisions(name, gate.judge(probabilities, speech.frame_samples))
            if is_end:
                self._apply_decisions(name, gate.flush_at_pause())
                self._scheduler.mark(name, ends_text=True)

    def _apply_decisions(self, name: str, decisions: list[Decision]) -> None:
        """Have the scheduler do what a gate decided."""
        scheduler = self._scheduler
        stream, rate = scheduler.streams[name], scheduler.spec.samples_per_position
        clock = stream.clock

        def position_behind(sample: int) -> int:
            """The first position that begins at or behind a sample, of what has come."""
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
                    # Audio of a burst may be here already from behind the utterance: that is not part of it.
                    cut_off = decision.sample - decision.speech_end < self._pause_samples
                    scheduler.flush(name, None, position_behind(decision.sample), cut_off=cut_off)
                    scheduler.hold(name, True)
                case SplitUtterance():
                    scheduler.flush(name, None, position_behind(decision.sample))
                case Skip():
                    scheduler.skip(name, clock.position_at(decision.sample))
