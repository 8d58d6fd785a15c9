"""Where turns and utterances begin and end, and the events that tell the client so. No I/O; used by the session core.

- `TurnWatch` finds the turns from speech probabilities and, with semantic or scored detection, from the text. Semantic
  detection ends a turn soon after a complete sentence and waits longer after an incomplete one: up to the limits of the
  OpenAI API, which are 8, 4 and 2 seconds of silence for low, medium (auto) and high eagerness. Scored detection ends a
  turn at a probability (`engine/end_of_turn.py`, without a detector), and announces a probable end before.
- `UtteranceWatch` finds gaps in the text after the last word.
- `Boundaries` counts the audio of a session and applies both. All audio before its boundary is committed or cleared.
  Without turn detection all later audio is the open turn; with it, speech opens a turn and a pause ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audio.speech_edges import EdgeDetector, EdgeMemory, EdgeSettings, EdgeState, Fall, Rise
from engine.end_of_turn import ASK_MS, EagerEnd, Judge, Pause
from engine.end_of_turn import End as TurnEnd
from engine.messages import TurnRule
from realtime.session.events import (
    Cleared,
    Committed,
    Completed,
    Delta,
    EagerTurnEnd,
    Effect,
    Measured,
    Problem,
    Send,
    ServerEvent,
    SpeechStarted,
    SpeechStopped,
    TimedOut,
    TimedWord,
    TurnResumed,
    UtteranceEnded,
)
from realtime.session.settings import Settings, TurnDetection
from realtime.session.speakers import SpeakerTimeline
from realtime.session.turns import SavedTurns, Turn, Turns
from realtime.session.words import ends_sentence

# Shorter sounds are clicks and not speech.
MIN_SPEECH_MS = 64
# After a pause of this length the engine is flushed, so that semantic detection can judge the whole text.
PROBE_MS = 250
# Semantic detection: silence that ends a turn after a complete and after an incomplete sentence, by eagerness.
FINISHED_MS = {"high": 300, "medium": 500, "auto": 500, "low": 900}
UNFINISHED_MS = {"high": 2000, "medium": 4000, "auto": 4000, "low": 8000}


@dataclass(frozen=True, slots=True)
class Started:
    """A turn begins at `sample`."""

    sample: int


@dataclass(frozen=True, slots=True)
class Paused:
    """There is a pause within a turn: the engine has to be flushed, so that the text is complete."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The turn ends at `sample`; there has been silence since `speech_end`."""

    sample: int
    speech_end: int
    # Of scored detection.
    confidence: float | None = None
    timeout: bool = False


@dataclass(frozen=True, slots=True)
class ProbablyStopped:
    """The turn has probably ended at `sample`; there has been silence since `speech_end`."""

    sample: int
    speech_end: int
    confidence: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Speech continues after `ProbablyStopped`, at the frame that ends at `sample`."""

    sample: int


TurnSign = Started | Paused | Stopped | ProbablyStopped | Resumed


@dataclass(frozen=True, slots=True)
class SavedWatch:
    """A `TurnWatch` as a value."""

    base: int
    edges: EdgeMemory
    silent_samples: int
    probed: bool
    pause: Pause | None = None


def turn_rule(detection: TurnDetection | None, sample_rate: int) -> TurnRule | None:
    """The rule by which the engine expects the end of a turn: the silence after which the watch asks for a flush."""
    if detection is None:
        return None
    silence_ms = PROBE_MS if detection.semantic or detection.scored else detection.silence_duration_ms
    return TurnRule(detection.threshold, MIN_SPEECH_MS * sample_rate // 1000, silence_ms * sample_rate // 1000)


class TurnWatch:
    """Finds the turns of one session from speech probabilities."""

    def __init__(self, detection: TurnDetection, sample_rate: int, start: int, *, first_frame: int) -> None:
        """The next frame begins at sample `first_frame`. No turn begins before `start`, which may be later."""
        self._detection = detection
        self._rate = sample_rate
        self._base = first_frame
        self._detector = EdgeDetector(self._settings(""))
        self._detector.reset(max(0, start - first_frame))
        self._silent_samples = 0
        self._probed = False
        # Scored detection: the pause in the open turn, if there is one. Its samples count from `_base`.
        self._pause: Pause | None = None

    def save(self) -> SavedWatch:
        return SavedWatch(self._base, self._detector.save(), self._silent_samples, self._probed, self._pause)

    def load(self, saved: SavedWatch) -> None:
        """Continue from a saved watch."""
        self._base, self._silent_samples, self._probed = saved.base, saved.silent_samples, saved.probed
        self._pause = saved.pause
        self._detector.load(saved.edges)

    def watch(self, probability: float, samples: int, text: str) -> list[TurnSign]:
        """Take the next frame; `text` is the last text of the open turn."""
        if self._detection.semantic:
            self._detector.settings = self._settings(text)
        found = self._detector.judge(probability, samples)
        signs: list[TurnSign] = []
        if isinstance(found, Rise):
            signs.append(Started(self._base + found.sample))
        elif self._detection.scored is not None:
            signs += self._score(Judge(self._detection.scored, self._rate, learnt=False), found, text)
        elif isinstance(found, Fall):
            signs.append(Stopped(self._base + found.sample, self._base + found.speech_end_sample))
        if (self._detection.semantic or self._detection.scored) and self._pause_needs_text(samples):
            signs.append(Paused())
        return signs

    def _score(self, judge: Judge, fall: Fall | None, text: str) -> list[TurnSign]:
        """Judge the pause up to the end of the last frame, or up to the timeout if `fall` has ended the turn."""
        pause, base = self._pause, self._base
        if fall is None and self._detector.state is not EdgeState.STOPPING:
            self._pause = None
            return [Resumed(base + self._detector.sample)] if pause is not None and pause.eager else []
        now, fell = self._detector.sample, self._detector.sample - self._detector.silent_samples
        if fall is not None:
            now, fell = fall.sample, fall.speech_end_sample
        pause = judge.begin(fell, text) if pause is None else judge.hear_words(pause, text)
        self._pause, found = judge.advance(pause, now)
        signs: list[TurnSign] = []
        for sign in found:
            if isinstance(sign, EagerEnd):
                signs.append(ProbablyStopped(base + sign.sample, base + fell, sign.confidence))
            elif isinstance(sign, TurnEnd):
                signs.append(Stopped(base + sign.sample, base + fell, sign.confidence, sign.timeout))
                self._pause = None
                self._detector.reset()
        return signs

    def change(self, detection: TurnDetection) -> None:
        """Use other settings from the next frame on; an open turn stays open."""
        self._detection = detection
        self._detector.settings = self._settings("")

    @property
    def quiet(self) -> bool:
        """There is no speech, and the last frames are not the possible start of speech either."""
        return self._detector.state is EdgeState.QUIET

    def may_have_stopped(self, samples: int) -> bool:
        """Whether the open turn could have ended within this number of samples, which have no probabilities yet."""
        chosen = self._detection
        silence_ms = FINISHED_MS[chosen.eagerness] if chosen.semantic else chosen.silence_duration_ms
        if chosen.scored is not None:
            silence_ms = ASK_MS
        return samples > 0 and (self._detector.silent_samples + samples) * 1000 >= silence_ms * self._rate

    def resume_turn(self) -> None:
        """Start with an open turn."""
        self._detector.state = EdgeState.SPEAKING

    def restart(self, sample: int) -> None:
        """Drop the open turn; the next one begins at `sample` at the earliest."""
        self._pause = None
        self._detector.reset(max(sample - self._base, self._detector.sample))

    def _pause_needs_text(self, samples: int) -> bool:
        """True once in every pause within a turn."""
        if self._detector.state is not EdgeState.STOPPING:
            self._silent_samples, self._probed = 0, False
            return False
        self._silent_samples += samples
        if self._probed or self._silent_samples < PROBE_MS * self._rate // 1000:
            return False
        self._probed = True
        return True

    def _settings(self, text: str) -> EdgeSettings:
        chosen = self._detection
        silence_ms = chosen.silence_duration_ms
        if chosen.semantic:
            silence_ms = (FINISHED_MS if ends_sentence(text) else UNFINISHED_MS)[chosen.eagerness]
        if chosen.scored is not None:
            silence_ms = chosen.scored.timeout_ms
        return EdgeSettings(
            threshold=chosen.threshold,
            min_speech_samples=MIN_SPEECH_MS * self._rate // 1000,
            silence_samples=silence_ms * self._rate // 1000,
            prefix_samples=chosen.prefix_padding_ms * self._rate // 1000,
        )


# Frames with at least this speech probability may become words.
SPEECH = 0.5
# Length of a pause after which the engine is flushed.
PAUSE_SECONDS = 0.25
# While the audio sounds like speech, words of the gap are expected for this long after it.
LATE_SECONDS = 2.0
# The engine is flushed again after this time, because a stream that was replaced lost the first flush.
ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SavedUtterances:
    """An `UtteranceWatch` as a value."""

    last_word: int | None
    last_speech: int
    settled: int
    asked: int | None


class UtteranceWatch:
    """Finds gaps of `gap_ms` after words: the ends of utterances. Samples are those of the session.

    The end of a turn is found in the audio, the end of an utterance in the text. For that the text of all audio in the
    gap is needed, and models are late with it. So the engine is flushed when the gap may have passed: at a pause, or in
    noise that sounds like speech, when its words should have arrived.
    """

    def __init__(self, gap_ms: int, sample_rate: int) -> None:
        self._gap = gap_ms * sample_rate // 1000
        self._rate = sample_rate
        # End of the last word; None once its utterance has ended.
        self._last_word: int | None = None
        # End of the last frame with speech.
        self._last_speech = 0
        # All text of the audio before this sample has arrived.
        self._settled = 0
        # The sample at which `ask` last returned a flush.
        self._asked: int | None = None

    def save(self) -> SavedUtterances:
        return SavedUtterances(self._last_word, self._last_speech, self._settled, self._asked)

    def load(self, saved: SavedUtterances) -> None:
        """Continue from a saved watch."""
        self._last_word, self._last_speech = saved.last_word, saved.last_speech
        self._settled, self._asked = saved.settled, saved.asked

    def on_words(self, words: Sequence[TimedWord]) -> int | None:
        """Take new words. Returns the end of the utterance before them, if the gap lies between."""
        last, self._last_word = self._last_word, words[-1].end
        return last if last is not None and words[0].start - last >= self._gap else None

    def on_probability(self, probability: float, heard: int) -> None:
        """Take the speech probability of the frame that ends at sample `heard`."""
        if probability >= SPEECH:
            self._last_speech = heard

    def settle(self, sample: int) -> None:
        """All text of the audio before this sample has arrived."""
        self._settled = max(self._settled, sample)

    def ended(self, heard: int) -> int | None:
        """The end of the last utterance, if the gap after it has passed; each is returned once."""
        last = self._last_word
        if last is None:
            return None
        silent = heard >= last + self._gap and self._settled >= self._last_speech
        if not silent and self._settled < last + self._gap:
            return None
        self._last_word = None
        return last

    def ask(self, heard: int) -> bool | None:
        """Whether the engine must be flushed now: True at a pause, False while audio sounds like speech, else None."""
        last = self._last_word
        if last is None or heard < last + self._gap:
            return None
        if self._asked is not None and heard - self._asked < ASK_AGAIN_SECONDS * self._rate:
            return None
        paused = heard - self._last_speech >= PAUSE_SECONDS * self._rate
        if not paused and heard < last + self._gap + LATE_SECONDS * self._rate:
            return None
        self._asked = heard
        return paused


# A turn that has ended is flushed only if speech detection is at most this far behind the audio; after a long pause
# (with a busy engine) at most `BUSY_SECONDS`.
CAUGHT_UP_SECONDS = 0.6
BUSY_SECONDS = 3.0
LONG_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class AudioCount:
    """How much audio a session has: at the engine's rate, and as the client sent it (`source`)."""

    appended: int = 0
    source_samples: int = 0
    source_ms: float = 0.0
    # Sample up to which speech probabilities have arrived.
    covered: int = 0


@dataclass(frozen=True, slots=True)
class SavedBoundaries:
    """`Boundaries` as a value."""

    audio: AudioCount
    turns: SavedTurns
    boundary: int
    boundary_ms: float
    watch: SavedWatch | None
    utterances: SavedUtterances | None
    speakers: SpeakerTimeline | None = None
    settled: int = 0
    probable_end: ProbablyStopped | None = None


class Boundaries:
    """The turns of a session in its audio. `do` records an effect; `flush` asks the engine for all text so far, with
    the sample of the pause if there is one."""

    def __init__(
        self,
        settings: Settings,
        sample_rate: int,
        new_item_id: Callable[[], str],
        do: Callable[[Effect], None],
        flush: Callable[[int | None], None],
        max_turn_seconds: float,
    ) -> None:
        self.audio = AudioCount()
        self.turns = Turns(new_item_id, sample_rate, trim_start=settings.trim_start, max_seconds=max_turn_seconds)
        # Audio before the boundary is committed or cleared.
        self.boundary = 0
        self._boundary_ms = 0.0
        self._settings = settings
        self._rate = sample_rate
        self._do = do
        self._flush = flush
        # All text of the audio before this sample has arrived.
        self._settled = 0
        # The probable end of the open turn, which is announced when the text before it has arrived.
        self._probable_end: ProbablyStopped | None = None
        self._watch: TurnWatch | None = None
        self._set_watch(0)
        self._utterances = self._new_utterances()
        self._set_speakers()

    @property
    def speaking(self) -> bool:
        return self.turns.current is not None and self.turns.current.announced

    @property
    def uncommitted_ms(self) -> float:
        return self.audio.source_ms - self._boundary_ms

    @property
    def may_commit(self) -> bool:
        """Whether a commit can be answered now. With turn detection that needs an open turn which cannot have ended in
        the audio without speech probabilities."""
        if self._watch is None:
            return True
        unjudged = self.audio.appended - self.audio.covered
        return self.turns.current is not None and not self._watch.may_have_stopped(unjudged)

    def save(self) -> SavedBoundaries:
        watch = None if self._watch is None else self._watch.save()
        utterances = None if self._utterances is None else self._utterances.save()
        return SavedBoundaries(
            self.audio,
            self.turns.save(),
            self.boundary,
            self._boundary_ms,
            watch,
            utterances,
            self.turns.speakers,
            self._settled,
            self._probable_end,
        )

    def load(self, saved: SavedBoundaries, shift: float) -> None:
        """Continue from a saved session; `shift` is our clock minus its clock."""
        self.audio = saved.audio
        self.turns.load(saved.turns, shift)
        self.boundary, self._boundary_ms = saved.boundary, saved.boundary_ms
        self.turns.speakers = saved.speakers
        self._settled, self._probable_end = saved.settled, saved.probable_end
        if self._watch is not None and saved.watch is not None:
            self._watch.load(saved.watch)
        if self._utterances is not None and saved.utterances is not None:
            self._utterances.load(saved.utterances)

    def check_integrity(self) -> None:
        self.turns.check_integrity()
        assert 0 <= self.boundary <= self.audio.appended
        assert 0 <= self.audio.covered <= self.audio.appended

    # Client events

    def configure(self, new: Settings) -> None:
        old, self._settings = self._settings, new
        self.turns.trim_start = new.trim_start
        self._set_speakers()
        if new.utterance_end_ms != old.utterance_end_ms:
            self._utterances = self._new_utterances()
        if new.turn_detection != old.turn_detection:
            self._set_watch(self.boundary)
            self._open_without_detection()

    def advance(self, samples: int, source_samples: int, source_ms: float) -> None:
        audio = self.audio
        audio.appended += samples
        audio.source_samples += source_samples
        audio.source_ms += source_ms
        self._open_without_detection()

    def commit(self, event_id: str | None, now: float) -> None:
        """Commit the open turn, or if there is none all uncommitted audio, up to the last sample."""
        if self.turns.current is None:
            self.turns.open(self.boundary)
        turn = self._end(self.audio.appended, now, event_id=event_id)
        turn.flushed = True
        self._set_boundary(self.audio.appended, self.audio.source_ms)
        self._flush(None)

    def clear(self) -> None:
        appended = self.audio.appended
        self._stop_announced(appended)
        if appended > self.boundary:
            self.turns.clear(self.boundary, appended)
            self._flush(None)
        self._set_boundary(appended, self.audio.source_ms)
        self._send(Cleared())

    def commit_late(self, sample: int, source_ms: float, event_id: str | None, now: float) -> None:
        """Answer a commit at `sample` that had to wait for speech probabilities."""
        if self.turns.current is None:
            self.refuse_commit(0.0, event_id)
        else:
            self._end(sample, now, event_id=event_id).flushed = True
        self._pass(sample, source_ms)

    def clear_late(self, sample: int, source_ms: float) -> None:
        self._stop_announced(sample)
        self.turns.drop_current()
        self._probable_end = None
        self._send(Cleared())
        self._pass(sample, source_ms)

    def refuse_commit(self, buffered_ms: float, event_id: str | None) -> None:
        text = (
            "Error committing input audio buffer: buffer too small. Expected at least "
            f"{self._settings.minimum_commit_ms}ms of audio, but buffer only has {buffered_ms:.2f}ms of audio."
        )
        self._send(Problem("input_audio_buffer_commit_empty", text, event_id=event_id))

    # Engine outputs

    def on_probability(self, probability: float, samples: int, now: float) -> None:
        """Take the speech probability of the next frame, which has this many samples."""
        self.audio.covered += samples
        if self._watch is not None:
            self._hear_turns(self._watch, probability, samples, now)
        if self._utterances is not None:
            self._hear_utterance(self._utterances, probability)

    def _hear_turns(self, watch: TurnWatch, probability: float, samples: int, now: float) -> None:
        for sign in watch.watch(probability, samples, self.turns.current_text()):
            if isinstance(sign, Started):
                self._start(sign.sample, now)
            elif isinstance(sign, Paused):
                self._flush(self.audio.covered)
            elif self.turns.current is None:
                continue
            elif isinstance(sign, ProbablyStopped):
                self._probable_end = sign
                self._announce_probable_end()
            elif isinstance(sign, Resumed):
                self._resume(self.turns.current, sign.sample)
            else:
                self._stop(sign, now)
        detection = self._settings.turn_detection
        if detection is not None and detection.idle_timeout_ms is not None:
            self._end_silence(detection.idle_timeout_ms, now)

    def _stop(self, sign: Stopped, now: float) -> None:
        """End the open turn where turn detection has ended it."""
        end = max(sign.sample, self.boundary)
        # Word times are not exact: the middle of the silence is the safest border between the words.
        turn = self._end(end, now, words_until=(sign.speech_end + end) // 2, confidence=sign.confidence)
        turn.timeout = sign.timeout
        self._set_boundary(end, end * 1000 / self._rate)

    def _announce_probable_end(self) -> None:
        """Announce the probable end of the open turn if all its text has arrived; a flush in the pause asks for it."""
        sign, turn = self._probable_end, self.turns.current
        if sign is not None and turn is not None and self._settled >= sign.speech_end:
            self._probable_end = None
            turn.probably_over = True
            self._send(EagerTurnEnd(turn.item_id, sign.sample, sign.confidence))

    def _resume(self, turn: Turn, sample: int) -> None:
        """Speech continues: take an announced end back."""
        self._probable_end = None
        if turn.probably_over:
            turn.probably_over = False
            self._send(TurnResumed(turn.item_id, sample))

    def _hear_utterance(self, watch: UtteranceWatch, probability: float) -> None:
        heard = self.audio.covered
        watch.on_probability(probability, heard)
        self._end_utterance(watch.ended(heard))
        # As in `flush_ended`: audio without probabilities may end within a word, and a flush would cut it.
        if self.audio.appended - heard <= CAUGHT_UP_SECONDS * self._rate:
            paused = watch.ask(heard)
            if paused is not None:
                self._flush(heard if paused else None)

    def settle(self, sample: int) -> None:
        """All text of the audio before this sample has arrived and was sent to the client."""
        self._settled = max(self._settled, sample)
        self._announce_probable_end()
        if self._utterances is not None:
            self._utterances.settle(sample)
            self._end_utterance(self._utterances.ended(self.audio.covered))

    def flush_ended(self) -> None:
        """Flush the engine for turns that speech detection has ended.

        If a client sends faster than real time, the engine already has audio of later turns, and a flush there could
        cut a word in two. So the flush waits until speech detection has caught up and there is silence.
        """
        if self.turns.current is not None or all(turn.flushed for turn in self.turns.ended):
            return
        behind = (self.audio.appended - self.audio.covered) / self._rate
        pause = (self.audio.covered - self.boundary) / self._rate
        if behind <= CAUGHT_UP_SECONDS or (behind <= BUSY_SECONDS and pause >= LONG_PAUSE_SECONDS):
            self._flush(self.boundary)
            for turn in self.turns.ended:
                turn.flushed = True

    def end_open(self, now: float) -> None:
        """End the open turn at the last sample: no more audio will come."""
        if self.turns.current is not None:
            self._end(self.audio.appended, now)

    def send_events(self, events: list[ServerEvent], now: float) -> None:
        """Send events of the turns to the client, with the ends of utterances between them."""
        for event in events:
            if isinstance(event, Delta) and event.words and self._utterances is not None:
                self._end_utterance(self._utterances.on_words(event.words))
            self._send(event)
            if isinstance(event, Completed) and event.goes_on:
                self.boundary = min(event.end, self.audio.appended)
                self._boundary_ms = self.boundary * 1000 / self._rate
            elif isinstance(event, Completed):
                self._do(Measured("final_seconds", now - event.ended_at))

    def _open_without_detection(self) -> None:
        """Without turn detection all uncommitted audio is the open turn: open it with the first sample."""
        waiting = self.turns.current is None and self.audio.appended > self.boundary
        if self._settings.turn_detection is None and waiting:
            self.turns.open(self.boundary)

    def _start(self, sample: int, now: float) -> None:
        turn = self.turns.current or self.turns.open(max(sample, self.boundary))
        if turn.announced:
            return
        turn.announced = True
        self._send(SpeechStarted(turn.item_id, turn.start))
        self.send_events(self.turns.release(), now)

    def _end(
        self,
        end: int,
        now: float,
        *,
        words_until: int | None = None,
        event_id: str | None = None,
        confidence: float | None = None,
    ) -> Turn:
        """Commit the open turn at sample `end`. Words before `words_until` belong to it (None: all until the flush)."""
        self._stop_announced(end, confidence)
        self._probable_end = None
        previous = self.turns.last_committed
        turn = self.turns.end(end, now, words_until)
        turn.confidence = confidence
        self._send(Committed(turn.item_id, previous, event_id))
        return turn

    def _end_silence(self, timeout_ms: int, now: float) -> None:
        """Commit the silence since the last turn as an item, if it has lasted for `timeout_ms`."""
        end = self.audio.covered
        quiet = self.turns.current is None and self._watch is not None and self._watch.quiet
        if quiet and (end - self.boundary) * 1000 >= timeout_ms * self._rate:
            turn = self.turns.open(self.boundary)
            self._send(TimedOut(turn.item_id, turn.start, end))
            self._end(end, now, words_until=end)
            self._set_boundary(end, end * 1000 / self._rate)

    def _end_utterance(self, sample: int | None) -> None:
        if sample is not None:
            self._send(UtteranceEnded(sample))

    def _stop_announced(self, sample: int, confidence: float | None = None) -> None:
        current = self.turns.current
        if current is not None and current.announced:
            self._send(SpeechStopped(current.item_id, sample, confidence))

    def _pass(self, sample: int, source_ms: float) -> None:
        if sample > self.boundary:
            self._set_boundary(sample, source_ms)

    def _set_boundary(self, sample: int, source_ms: float) -> None:
        self.boundary, self._boundary_ms = sample, source_ms
        self._probable_end = None
        if self._watch is not None:
            self._watch.restart(sample)
        self._open_without_detection()

    def _set_watch(self, start: int) -> None:
        detection = self._settings.turn_detection
        if detection is None:
            self._watch = None
        elif self._watch is not None:
            self._watch.change(detection)
        else:
            self._watch = TurnWatch(detection, self._rate, start, first_frame=self.audio.covered)
            if self.speaking:
                self._watch.resume_turn()

    def _set_speakers(self) -> None:
        wanted = self._settings.labels_speakers
        self.turns.speakers = (self.turns.speakers or SpeakerTimeline()) if wanted else None

    def _new_utterances(self) -> UtteranceWatch | None:
        gap_ms = self._settings.utterance_end_ms
        return None if gap_ms is None else UtteranceWatch(gap_ms, self._rate)

    def _send(self, event: ServerEvent) -> None:
        self._do(Send(event))
