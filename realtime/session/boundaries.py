"""When a turn begins and ends, from speech probabilities and, for semantic detection, from what was said. Pure.

Semantic detection ends a turn soon after a sentence that reads as finished, and gives an unfinished one time to go on,
up to the caps of the OpenAI interface: 8, 4 and 2 seconds of silence for low, medium (auto) and high eagerness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audio.speech_edges import EdgeDetector, EdgeMemory, EdgeSettings, EdgeState, Fall, Rise
from engine.messages import TurnRule
from realtime.session.events import (
    Cleared,
    Committed,
    Completed,
    Delta,
    Effect,
    Measured,
    Problem,
    Send,
    ServerEvent,
    SpeechStarted,
    SpeechStopped,
    TimedOut,
    TimedWord,
    UtteranceEnded,
)
from realtime.session.settings import Settings, TurnDetection
from realtime.session.turns import SavedTurns, Turn, Turns
from realtime.session.words import ends_sentence

# Shorter sounds are clicks, not speech.
MIN_SPEECH_MS = 64
# After a pause this long the model is asked for all it has heard, so that the text can be judged.
PROBE_MS = 250
FINISHED_MS = {"high": 300, "medium": 500, "auto": 500, "low": 900}
UNFINISHED_MS = {"high": 2000, "medium": 4000, "auto": 4000, "low": 8000}


@dataclass(frozen=True, slots=True)
class Started:
    sample: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The speaker paused inside a turn; the model's whole text is wanted now."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The turn ends at `sample`, with the silence in which nobody has spoken since `speech_end`."""

    sample: int
    speech_end: int


TurnSign = Started | Paused | Stopped


@dataclass(frozen=True, slots=True)
class SavedWatch:
    """A watch as a value."""

    base: int
    edges: EdgeMemory
    silent_samples: int
    probed: bool


def turn_rule(detection: TurnDetection | None, sample_rate: int) -> TurnRule | None:
    """What the engine takes for the end of a turn: silence after which the watch asks for the text."""
    if detection is None:
        return None
    silence_ms = PROBE_MS if detection.semantic else detection.silence_duration_ms
    return TurnRule(detection.threshold, MIN_SPEECH_MS * sample_rate // 1000, silence_ms * sample_rate // 1000)


class TurnWatch:
    """Follows the turns of one session from sample `start` on."""

    def __init__(self, detection: TurnDetection, sample_rate: int, start: int, *, first_frame: int) -> None:
        """`first_frame` is where the next frame begins; turns begin at `start`, which may lie ahead of it."""
        self._detection = detection
        self._rate = sample_rate
        self._base = first_frame
        self._detector = EdgeDetector(self._settings(""))
        self._detector.reset(max(0, start - first_frame))
        self._silent_samples = 0
        self._probed = False

    def save(self) -> SavedWatch:
        return SavedWatch(self._base, self._detector.save(), self._silent_samples, self._probed)

    def load(self, saved: SavedWatch) -> None:
        """Go on where another watch stopped."""
        self._base, self._silent_samples, self._probed = saved.base, saved.silent_samples, saved.probed
        self._detector.load(saved.edges)

    def watch(self, probability: float, samples: int, text: str) -> list[TurnSign]:
        """Take the next frame; `text` is the end of what the open turn says so far."""
        if self._detection.semantic:
            self._detector.settings = self._settings(text)
        found = self._detector.judge(probability, samples)
        signs: list[TurnSign] = []
        if isinstance(found, Rise):
            signs.append(Started(self._base + found.sample))
        elif isinstance(found, Fall):
            signs.append(Stopped(self._base + found.sample, self._base + found.speech_end_sample))
        if self._detection.semantic and self._pause_needs_text(samples):
            signs.append(Paused())
        return signs

    def change(self, detection: TurnDetection) -> None:
        """Judge by other settings from the next frame on; an open turn stays open."""
        self._detection = detection
        self._detector.settings = self._settings("")

    @property
    def quiet(self) -> bool:
        """Nobody speaks, and nobody may just have begun to."""
        return self._detector.state is EdgeState.QUIET

    def may_have_stopped(self, samples: int) -> bool:
        """Whether the open turn may have ended in so many samples that were not judged yet."""
        chosen = self._detection
        silence_ms = FINISHED_MS[chosen.eagerness] if chosen.semantic else chosen.silence_duration_ms
        return samples > 0 and (self._detector.silent_samples + samples) * 1000 >= silence_ms * self._rate

    def resume_turn(self) -> None:
        """A turn is open that another watch heard begin."""
        self._detector.state = EdgeState.SPEAKING

    def restart(self, sample: int) -> None:
        """Forget an open turn; the next one begins at `sample` at the earliest."""
        self._detector.reset(max(sample - self._base, self._detector.sample))

    def _pause_needs_text(self, samples: int) -> bool:
        """True once in every pause inside a turn."""
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
        return EdgeSettings(
            threshold=chosen.threshold,
            min_speech_samples=MIN_SPEECH_MS * self._rate // 1000,
            silence_samples=silence_ms * self._rate // 1000,
            prefix_samples=chosen.prefix_padding_ms * self._rate // 1000,
        )


# When nothing more was said for a while after the last word; pure.
#
# The end of a turn is what speech detection hears. The end of an utterance is a gap in the text: it needs the text of
# all audio in the gap, which models give late. So the engine is asked for it when the gap may have passed: at a
# pause, or, where noise sounds like speech, when words would have come by now.

# A frame that is at least so likely speech may become a word.
SPEECH = 0.5
# So long nobody speaks before the engine is asked for what it has.
PAUSE_SECONDS = 0.25
# So long after the gap words may still be on their way while somebody seems to speak.
LATE_SECONDS = 2.0
# The engine is asked again after so long: a stream that was replaced has forgotten the question.
ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SavedUtterances:
    """A watch as a value."""

    last_word: int | None
    last_speech: int
    settled: int
    asked: int | None


class UtteranceWatch:
    """Finds gaps of `gap_ms` after words. Samples are those of the session."""

    def __init__(self, gap_ms: int, sample_rate: int) -> None:
        self._gap = gap_ms * sample_rate // 1000
        self._rate = sample_rate
        # Where the last word ended, until the client was told that nothing followed.
        self._last_word: int | None = None
        self._last_speech = 0
        # All that was said before this has become text.
        self._settled = 0
        self._asked: int | None = None

    def save(self) -> SavedUtterances:
        return SavedUtterances(self._last_word, self._last_speech, self._settled, self._asked)

    def load(self, saved: SavedUtterances) -> None:
        """Go on where another watch stopped."""
        self._last_word, self._last_speech = saved.last_word, saved.last_speech
        self._settled, self._asked = saved.settled, saved.asked

    def say(self, words: Sequence[TimedWord]) -> int | None:
        """New words; returns the end of the utterance before them, if the gap lies in between."""
        last, self._last_word = self._last_word, words[-1].end
        return last if last is not None and words[0].start - last >= self._gap else None

    def hear(self, probability: float, heard: int) -> None:
        """A frame that ends at `heard`, and how likely it is speech."""
        if probability >= SPEECH:
            self._last_speech = heard

    def settle(self, sample: int) -> None:
        """The engine has said all about the audio before this sample."""
        self._settled = max(self._settled, sample)

    def ended(self, heard: int) -> int | None:
        """Where an utterance ended that nothing followed for the gap; each is returned once."""
        last = self._last_word
        if last is None:
            return None
        silent = heard >= last + self._gap and self._settled >= self._last_speech
        if not silent and self._settled < last + self._gap:
            return None
        self._last_word = None
        return last

    def ask(self, heard: int) -> bool | None:
        """Whether the engine must be asked for its text now: at a pause (True), in spite of sound (False), or not."""
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


# Where a session's turns begin and end, and what the client is told about it.
#
# `Boundaries` counts the audio of a session: what was appended, what speech detection has judged (`covered`), and the
# boundary, before which everything is committed or cleared. Without turn detection all uncommitted audio is the open
# turn; with it, speech opens a turn and a pause ends it.

# How far speech detection may be behind the audio for the end of a turn to be worth a flush at once, and how far if
# the pause has lasted a while already (a busy engine).
CAUGHT_UP_SECONDS = 0.6
BUSY_SECONDS = 3.0
LONG_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class AudioCount:
    """Samples at the engine's rate, and the client's own audio they came from."""

    appended: int = 0
    source_samples: int = 0
    source_ms: float = 0.0
    # Audio before this has been judged by speech detection.
    covered: int = 0


@dataclass(frozen=True, slots=True)
class SavedBoundaries:
    """The boundaries as a value."""

    audio: AudioCount
    turns: SavedTurns
    boundary: int
    boundary_ms: float
    watch: SavedWatch | None
    utterances: SavedUtterances | None


class Boundaries:
    """`do` carries an effect out, `flush` asks the engine for all text of the audio so far."""

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
        self._watch: TurnWatch | None = None
        self._set_watch(0)
        self._utterances = self._new_utterances()

    @property
    def speaking(self) -> bool:
        return self.turns.current is not None and self.turns.current.announced

    @property
    def uncommitted_ms(self) -> float:
        return self.audio.source_ms - self._boundary_ms

    @property
    def may_commit(self) -> bool:
        """Whether it is known what a commit ends now: an open turn, unless audio that nobody has judged may end it."""
        if self._watch is None:
            return True
        unjudged = self.audio.appended - self.audio.covered
        return self.turns.current is not None and not self._watch.may_have_stopped(unjudged)

    def save(self) -> SavedBoundaries:
        watch = None if self._watch is None else self._watch.save()
        utterances = None if self._utterances is None else self._utterances.save()
        return SavedBoundaries(self.audio, self.turns.save(), self.boundary, self._boundary_ms, watch, utterances)

    def load(self, saved: SavedBoundaries, shift: float) -> None:
        """Go on where another session stopped, on a clock that shows `shift` more."""
        self.audio = saved.audio
        self.turns.load(saved.turns, shift)
        self.boundary, self._boundary_ms = saved.boundary, saved.boundary_ms
        if self._watch is not None and saved.watch is not None:
            self._watch.load(saved.watch)
        if self._utterances is not None and saved.utterances is not None:
            self._utterances.load(saved.utterances)

    def check_integrity(self) -> None:
        self.turns.check_integrity()
        assert 0 <= self.boundary <= self.audio.appended
        assert 0 <= self.audio.covered <= self.audio.appended

    # What the client does

    def configure(self, new: Settings) -> None:
        old, self._settings = self._settings, new
        self.turns.trim_start = new.trim_start
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
        """Commit the open turn, or without one all uncommitted audio, up to here."""
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
        """A commit at `sample` whose audio has been heard only now."""
        if self.turns.current is None:
            self.refuse_commit(0.0, event_id)
        else:
            self._end(sample, now, event_id=event_id).flushed = True
        self._pass(sample, source_ms)

    def clear_late(self, sample: int, source_ms: float) -> None:
        self._stop_announced(sample)
        self.turns.drop()
        self._send(Cleared())
        self._pass(sample, source_ms)

    def refuse_commit(self, buffered_ms: float, event_id: str | None) -> None:
        text = (
            "Error committing input audio buffer: buffer too small. Expected at least "
            f"{self._settings.minimum_commit_ms}ms of audio, but buffer only has {buffered_ms:.2f}ms of audio."
        )
        self._send(Problem("input_audio_buffer_commit_empty", text, event_id=event_id))

    # What is heard

    def hear(self, probability: float, samples: int, now: float) -> None:
        """The next frame of audio, and how likely it is speech."""
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
            elif self.turns.current is not None:
                end = max(sign.sample, self.boundary)
                # Times of words are not exact, and nobody spoke in this silence: its middle is the safest place.
                self._end(end, now, words_until=(sign.speech_end + end) // 2)
                self._set_boundary(end, end * 1000 / self._rate)
        detection = self._settings.turn_detection
        if detection is not None and detection.idle_timeout_ms is not None:
            self._end_silence(detection.idle_timeout_ms, now)

    def _hear_utterance(self, watch: UtteranceWatch, probability: float) -> None:
        heard = self.audio.covered
        watch.hear(probability, heard)
        self._end_utterance(watch.ended(heard))
        # As for turns: audio that is ahead of speech detection may be in the middle of a word.
        if self.audio.appended - heard <= CAUGHT_UP_SECONDS * self._rate:
            paused = watch.ask(heard)
            if paused is not None:
                self._flush(heard if paused else None)

    def settle(self, sample: int) -> None:
        """The engine has said all about the audio before this sample, and the client has been told."""
        if self._utterances is not None:
            self._utterances.settle(sample)
            self._end_utterance(self._utterances.ended(self.audio.covered))

    def flush_ended(self) -> None:
        """Ask for the rest of turns that speech detection ended.

        While a client sends faster than real time, audio of later turns is already with the engine; a flush there
        could cut a word in two, so it waits until detection has caught up and nobody is speaking.
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
        """No more audio will come: a turn that is open ends with it."""
        if self.turns.current is not None:
            self._end(self.audio.appended, now)

    def tell(self, events: list[ServerEvent], now: float) -> None:
        for event in events:
            if isinstance(event, Delta) and event.words and self._utterances is not None:
                self._end_utterance(self._utterances.say(event.words))
            self._send(event)
            if isinstance(event, Completed) and event.goes_on:
                self.boundary = min(event.end, self.audio.appended)
                self._boundary_ms = self.boundary * 1000 / self._rate
            elif isinstance(event, Completed):
                self._do(Measured("final_seconds", now - event.ended_at))

    # Inside

    def _open_without_detection(self) -> None:
        """Without turn detection all uncommitted audio is the open turn; its item is reserved from the first sample."""
        waiting = self.turns.current is None and self.audio.appended > self.boundary
        if self._settings.turn_detection is None and waiting:
            self.turns.open(self.boundary)

    def _start(self, sample: int, now: float) -> None:
        turn = self.turns.current or self.turns.open(max(sample, self.boundary))
        if turn.announced:
            return
        turn.announced = True
        self._send(SpeechStarted(turn.item_id, turn.start))
        self.tell(self.turns.release(), now)

    def _end(self, end: int, now: float, *, words_until: int | None = None, event_id: str | None = None) -> Turn:
        """Close the open turn at `end` and announce its item."""
        self._stop_announced(end)
        previous = self.turns.last_committed
        turn = self.turns.end(end, now, words_until)
        self._send(Committed(turn.item_id, previous, event_id))
        return turn

    def _end_silence(self, timeout_ms: int, now: float) -> None:
        """Commit the silence since the last turn if it has lasted so long."""
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

    def _stop_announced(self, sample: int) -> None:
        current = self.turns.current
        if current is not None and current.announced:
            self._send(SpeechStopped(current.item_id, sample))

    def _pass(self, sample: int, source_ms: float) -> None:
        if sample > self.boundary:
            self._set_boundary(sample, source_ms)

    def _set_boundary(self, sample: int, source_ms: float) -> None:
        self.boundary, self._boundary_ms = sample, source_ms
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

    def _new_utterances(self) -> UtteranceWatch | None:
        gap_ms = self._settings.utterance_end_ms
        return None if gap_ms is None else UtteranceWatch(gap_ms, self._rate)

    def _send(self, event: ServerEvent) -> None:
        self._do(Send(event))
