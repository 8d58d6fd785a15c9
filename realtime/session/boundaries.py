"""Where a session's turns begin and end, and what the client is told about it.

`Boundaries` counts the audio of a session: what was appended, what speech detection has judged (`covered`), and the
boundary, before which everything is committed or cleared. Without turn detection all uncommitted audio is the open
turn; with it, speech opens a turn and a pause ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realtime.session.endpointing import Paused, SavedWatch, Started, TurnWatch
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
    UtteranceEnded,
)
from realtime.session.settings import Settings
from realtime.session.turns import SavedTurns, Turn, Turns
from realtime.session.utterances import SavedUtterances, UtteranceWatch

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
