"""Turn boundaries of one session: decides where turns and utterances begin and end, and emits the events that say so.

A part of the session core (`core.py`), without I/O. The engine's speech track finds where speech begins, pauses and
ends, with exact sample numbers; this module decides at which of these samples a turn ends. Without semantic detection a
turn ends where the speech track ends speech.

- `PauseWatch` decides during a pause, for semantic and scored detection, from the turn detector's answers, the text and
  the length of the silence. The limits of semantic detection are those of the OpenAI API: 8, 4 and 2 seconds of silence
  for low, medium (auto) and high eagerness. Scored detection has thresholds and a limit that the client sets, and may
  announce probable ends.
- `UtteranceWatch` finds the ends of utterances: gaps in the text after the last word, for Deepgram's `UtteranceEnd`.
  The end of a turn is found in the audio, the end of an utterance in the text. For that the text of all audio in the
  gap is needed, and models send it late. So the engine is flushed when the gap may have passed: at a pause, or, while
  noise sounds like speech, when the words of the gap should have arrived.
- `Boundaries` owns the count of the session's audio and the boundary before which all audio is committed or cleared,
  and applies both. Without turn detection all audio after the boundary is the open turn; with it, speech opens a turn
  and a pause ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine import messages
from engine.end_of_turn import (
    EAGERNESS,
    FINISHED_MS,
    MIN_SILENCE_MS,
    AskDetector,
    EagerEnd,
    Eagerness,
    End,
    Judge,
    Pause,
)
from engine.messages import Phase, SpeechEvent, TrackState, TurnRule
from realtime.session.events import (
    Cleared,
    Committed,
    Completed,
    Delta,
    EagerTurnEnd,
    Effect,
    Measured,
    PauseScored,
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
from realtime.session.settings import INCLUDE_END_OF_TURN, Settings, TurnDetection
from realtime.session.speakers import SpeakerTimeline
from realtime.session.turns import SavedTurns, Turn, Turns

# Shorter sounds are clicks and not speech.
MIN_SPEECH_MS = 64
# Semantic detection by the text alone: after a pause of this length the engine is flushed, to judge the whole text.
PROBE_MS = 250
# A turn that has ended is flushed only if speech detection is at most this far behind the audio; after a long pause
# (with a busy engine) at most `BUSY_SECONDS`.
CAUGHT_UP_SECONDS = 0.6
BUSY_SECONDS = 3.0
LONG_PAUSE_SECONDS = 1.0


def turn_rule(detection: TurnDetection | None, sample_rate: int, has_detector: bool = False) -> TurnRule | None:
    """The rule for the engine's speech track. `has_detector`: whether the engine has a turn detector.

    Without semantic detection the track ends speech after the silence that ends a turn. With it, speech ends after
    `MIN_SILENCE_MS`, or after `PROBE_MS` without a turn detector; `PauseWatch` then decides whether the turn has ended.
    """
    if detection is None:
        return None
    questions: tuple[int, ...] = ()
    silence_ms = detection.silence_duration_ms
    if detection.judges_pauses:
        questions = _eagerness(detection).questions(sample_rate) if has_detector else ()
        silence_ms = MIN_SILENCE_MS if has_detector else PROBE_MS
    min_speech, silence = (duration * sample_rate // 1000 for duration in (MIN_SPEECH_MS, silence_ms))
    return TurnRule(detection.threshold, min_speech, silence, questions)


@dataclass(frozen=True, slots=True)
class Scored:
    """The turn detector has answered; `confidence` is the probability that the turn is over at `sample`."""

    sample: int
    confidence: float


@dataclass(frozen=True, slots=True)
class SavedPauses:
    """The saved state of a `PauseWatch`."""

    pause: Pause | None
    scores: list[tuple[int, float | None]]


class PauseWatch:
    """Decides in the pauses of a turn whether the turn has ended, with semantic or scored detection.

    The rule itself is `engine.end_of_turn.Judge`. The turn detector's answers are events of the engine's speech track,
    at exact samples: an answer that has not come when the silence reaches its sample does not come any more.
    """

    def __init__(self, eagerness: Eagerness, sample_rate: int, has_detector: bool) -> None:
        self._judge = Judge(eagerness, sample_rate, has_detector=has_detector)
        self._pause: Pause | None = None
        # The detector's answers in this pause, by the number of the question.
        self._scores: dict[int, float | None] = {}

    def save(self) -> SavedPauses:
        return SavedPauses(self._pause, list(self._scores.items()))

    def load(self, saved: SavedPauses) -> None:
        self._pause = saved.pause
        self._scores = dict(saved.scores)

    @property
    def pause_start(self) -> int | None:
        """The sample at which the current pause began; None if there is no pause."""
        return None if self._pause is None else self._pause.fell

    @property
    def was_eager(self) -> bool:
        """Whether a probable end was announced in this pause."""
        return self._pause is not None and self._pause.eager

    def begin(self, fell: int, text: str) -> None:
        """A pause of the turn begins."""
        self.end()
        self._pause = self._judge.begin(fell, text)

    def end(self) -> None:
        """The pause or its turn has ended."""
        self._pause = None
        self._scores.clear()

    def on_score(self, score: messages.TurnScored) -> None:
        """The turn detector has answered."""
        if self._pause is not None and score.fell == self._pause.fell:
            self._scores[score.number] = score.probability

    def advance(self, sample: int, text: str) -> list[EagerEnd | End | Scored]:
        """The silence lasts until `sample` at least; `text` is the last text of the turn."""
        if self._pause is None:
            return []
        found: list[EagerEnd | End | Scored] = []
        pause = self._judge.with_words(self._pause, text)
        while True:
            pause, decisions = self._judge.advance(pause, sample)
            found += [decision for decision in decisions if not isinstance(decision, AskDetector)]
            if not pause.asked:
                break
            answer = self._scores.pop(pause.answers, None)
            pause = self._judge.with_answer(pause, answer)
            if answer is not None:
                found.append(Scored(pause.now, self._judge.confidence(pause, pause.now)))
        self._pause = pause
        return found


def _eagerness(detection: TurnDetection) -> Eagerness:
    return detection.scored or EAGERNESS[detection.eagerness]


def _silence_only(silence_ms: int) -> Eagerness:
    """The rule that silence of this length ends a turn, whatever its words are."""
    return Eagerness(0.5, max(silence_ms, MIN_SILENCE_MS), None, silence_ms, silence_ms)


# Ends of utterances

# Silence after which the engine is flushed.
PAUSE_SECONDS = 0.25
# While the audio sounds like speech, the engine is flushed this long after the gap: then its words should have come.
LATE_SECONDS = 2.0
# The engine is flushed again after this time, because a stream that was replaced lost the first flush.
FLUSH_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SavedUtterances:
    """The saved state of an `UtteranceWatch`."""

    last_word: int | None
    last_speech: int
    settled: int
    asked: int | None


class UtteranceWatch:
    """Finds gaps of `gap_ms` after words. Samples are those of the session.

    `judged_until`: the sample up to which the speech track has judged the audio.
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
        # The sample at which a flush was last needed.
        self._flushed_at: int | None = None

    def save(self) -> SavedUtterances:
        return SavedUtterances(self._last_word, self._last_speech, self._settled, self._flushed_at)

    def load(self, saved: SavedUtterances) -> None:
        """Continue from a saved watch."""
        self._last_word, self._last_speech = saved.last_word, saved.last_speech
        self._settled, self._flushed_at = saved.settled, saved.asked

    def on_words(self, words: Sequence[TimedWord]) -> int | None:
        """Add new words. Returns the end of the utterance before them, if there is a gap between."""
        last, self._last_word = self._last_word, words[-1].end
        return last if last is not None and words[0].start - last >= self._gap else None

    def on_speech(self, until: int) -> None:
        """There was speech until this sample."""
        self._last_speech = max(self._last_speech, until)

    def settle(self, sample: int) -> None:
        """All text of the audio before this sample has arrived."""
        self._settled = max(self._settled, sample)

    def ended(self, judged_until: int) -> int | None:
        """The end of the last utterance, if the gap after it has passed and has no word; each end is returned once."""
        last = self._last_word
        if last is None:
            return None
        is_silent = judged_until >= last + self._gap and self._settled >= self._last_speech
        if not is_silent and self._settled < last + self._gap:
            return None
        self._last_word = None
        return last

    def flush_needed(self, judged_until: int) -> bool | None:
        """Whether the engine must be flushed now: True in a pause, False while audio sounds like speech; None: no
        flush."""
        last = self._last_word
        if last is None or judged_until < last + self._gap:
            return None
        if self._flushed_at is not None and judged_until - self._flushed_at < FLUSH_AGAIN_SECONDS * self._rate:
            return None
        is_pause = judged_until - self._last_speech >= PAUSE_SECONDS * self._rate
        if not is_pause and judged_until < last + self._gap + LATE_SECONDS * self._rate:
            return None
        self._flushed_at = judged_until
        return is_pause


# All boundaries of a session


@dataclass(slots=True)
class AudioCount:
    """How much audio a session has: at the engine's rate, and as the client sent it (`source`)."""

    appended: int = 0
    source_samples: int = 0
    source_ms: float = 0.0
    # Sample up to which the speech track has judged the audio.
    covered: int = 0


@dataclass(frozen=True, slots=True)
class SavedBoundaries:
    """The saved state of `Boundaries`."""

    audio: AudioCount
    turns: SavedTurns
    boundary: int
    boundary_ms: float
    utterances: SavedUtterances | None
    track: TrackState = TrackState()
    pauses: SavedPauses | None = None
    joins_speech: bool = False
    speakers: SpeakerTimeline | None = None
    settled: int = 0
    probable_end: EagerEnd | None = None


class Boundaries:
    """The turns of a session in its audio.

    `add_effect` adds an effect of the session. `flush(pause, ends_speech, turn_over)` asks the engine for all text so
    far, as `FlushEngine` describes. `has_detector`: whether the engine has a turn detector.
    """

    def __init__(
        self,
        settings: Settings,
        sample_rate: int,
        new_item_id: Callable[[], str],
        add_effect: Callable[[Effect], None],
        flush: Callable[[int | None, bool, bool], None],
        max_turn_seconds: float,
        has_detector: bool = False,
    ) -> None:
        self.audio = AudioCount()
        self.turns = Turns(new_item_id, sample_rate, trim_start=settings.trim_start, max_seconds=max_turn_seconds)
        self.turns.set_finals(settings)
        # Audio before the boundary is committed or cleared.
        self.boundary = 0
        self._boundary_ms = 0.0
        self._settings = settings
        self._rate = sample_rate
        self._add_effect = add_effect
        self._flush = flush
        self._has_detector = has_detector
        # The speech track after the audio that it has judged so far.
        self.track = TrackState()
        # Turn detection was switched on during speech: that speech opens a turn with the next report.
        self._joins_speech = False
        # All text of the audio before this sample has arrived.
        self._settled = 0
        # The probable end of the open turn, which is announced when the text before it has arrived.
        self._probable_end: EagerEnd | None = None
        self._pauses = self._new_pauses()
        self._utterances = self._new_utterances()
        # The labels so far, also if they are switched off.
        self._speakers: SpeakerTimeline | None = None
        self._set_speakers()
        self.turns.reported_until = self._reported_until

    @property
    def speaking(self) -> bool:
        """Whether the client was sent `SpeechStarted` for the open turn."""
        return self.turns.current is not None and self.turns.current.announced

    @property
    def uncommitted_ms(self) -> float:
        return self.audio.source_ms - self._boundary_ms

    @property
    def can_commit_now(self) -> bool:
        """Whether a commit can be answered now.

        With turn detection there must be an open turn, and it must be certain that the turn has not ended in the audio
        that has no speech probabilities yet.
        """
        detection = self._settings.turn_detection
        if detection is None:
            return True
        if self.turns.current is None:
            return False
        unjudged = self.audio.appended - self.audio.covered
        silent_ms = (self._silent_samples + unjudged) * 1000 / self._rate
        min_silence_ms = detection.silence_duration_ms
        if detection.judges_pauses:
            by_score = self._has_detector or detection.scored is not None
            min_silence_ms = MIN_SILENCE_MS if by_score else FINISHED_MS[detection.eagerness]
        return unjudged <= 0 or silent_ms < min_silence_ms

    @property
    def _silent_samples(self) -> int:
        """Samples of silence so far that may end the open turn."""
        if self._pauses is not None and self._pauses.pause_start is not None:
            return self.audio.covered - self._pauses.pause_start
        return self.audio.covered - self.track.fell if self.track.phase is Phase.PAUSED else 0

    def save(self) -> SavedBoundaries:
        utterances = None if self._utterances is None else self._utterances.save()
        pauses = None if self._pauses is None else self._pauses.save()
        return SavedBoundaries(
            self.audio,
            self.turns.save(),
            self.boundary,
            self._boundary_ms,
            utterances,
            self.track,
            pauses,
            self._joins_speech,
            self._speakers,
            self._settled,
            self._probable_end,
        )

    def load(self, saved: SavedBoundaries, shift: float) -> None:
        """Continue from a saved session; `shift` is our clock minus its clock."""
        self.audio, self.track, self._joins_speech = saved.audio, saved.track, saved.joins_speech
        self.turns.load(saved.turns, shift)
        self.boundary, self._boundary_ms = saved.boundary, saved.boundary_ms
        self._speakers = saved.speakers
        self.turns.speakers = saved.speakers if self._settings.labels_speakers else None
        self.turns.reported_until = self._reported_until
        self._settled, self._probable_end = saved.settled, saved.probable_end
        detection = self._settings.turn_detection
        if saved.pauses is not None and self._pauses is None and detection is not None:
            self._pauses = PauseWatch(_silence_only(detection.silence_duration_ms), self._rate, False)
        if saved.pauses is not None and self._pauses is not None:
            self._pauses.load(saved.pauses)
        if self._utterances is not None and saved.utterances is not None:
            self._utterances.load(saved.utterances)

    def check_integrity(self) -> None:
        self.turns.check_integrity()
        assert 0 <= self.boundary <= self.audio.appended
        assert 0 <= self.audio.covered <= self.audio.appended

    # Client events

    def configure(self, new: Settings, now: float) -> None:
        old, self._settings = self._settings, new
        self.turns.trim_start = new.trim_start
        self.turns.set_finals(new)
        self._set_speakers()
        if new.utterance_end_ms != old.utterance_end_ms:
            self._utterances = self._new_utterances()
        if new.turn_detection != old.turn_detection:
            self._joins_speech = old.turn_detection is None and self.track.phase is Phase.SPEAKING
            self._change_pauses()
            self._open_without_detection()
            self._report_to_turns(now)

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
        self._assign_words(None, now)
        turn = self._commit_turn(self.audio.appended, now, event_id=event_id)
        turn.flushed = True
        self._set_boundary(self.audio.appended, self.audio.source_ms)
        self._flush(None, True, False)

    def clear(self) -> None:
        appended = self.audio.appended
        self._stop_announced(appended)
        if appended > self.boundary:
            self.turns.clear(self.boundary, appended)
            self._flush(None, True, False)
        self._set_boundary(appended, self.audio.source_ms)
        self._send(Cleared())

    def commit_late(self, sample: int, source_ms: float, event_id: str | None, now: float) -> None:
        """Answer a commit at `sample` that had to wait for speech probabilities."""
        if self.turns.current is None:
            self.refuse_commit(0.0, event_id)
        else:
            self._assign_words(sample, now)
            self._commit_turn(sample, now, event_id=event_id).flushed = True
        self._advance_boundary(sample, source_ms)

    def clear_late(self, sample: int, source_ms: float, now: float) -> None:
        self._assign_words(sample, now)
        self._stop_announced(sample)
        self.turns.drop_current()
        self._probable_end = None
        self._send(Cleared())
        self._advance_boundary(sample, source_ms)

    def refuse_commit(self, buffered_ms: float, event_id: str | None) -> None:
        text = (
            "Error committing input audio buffer: buffer too small. Expected at least "
            f"{self._settings.minimum_commit_ms}ms of audio, but buffer only has {buffered_ms:.2f}ms of audio."
        )
        self._send(Problem("input_audio_buffer_commit_empty", text, event_id=event_id))

    # Engine outputs

    def on_speech(self, speech: messages.Speech, now: float) -> None:
        """Handle the next report of the engine's speech track, in samples of the session."""
        end = min(speech.end, self.audio.appended)
        events = [event for event in speech.events if event.at > self.audio.covered]
        if self._settings.turn_detection is not None:
            self._update_turns(events, speech, end, now)
        if self._utterances is not None:
            self._update_utterances(self._utterances, events, speech, end)
        self.audio.covered, self.track = end, speech.track
        self._report_to_turns(now)
        self._end_track_at_boundary()

    def _end_track_at_boundary(self) -> None:
        """End speech in the track that lies before the boundary.

        The engine may not have received yet that the client ended it.
        """
        if self.track.sample <= self.boundary and self.track.phase is not Phase.QUIET:
            self.track = replace(self.track, phase=Phase.QUIET, questions=0)

    def _update_turns(self, events: Sequence[SpeechEvent], speech: messages.Speech, end: int, now: float) -> None:
        if self._joins_speech:
            self._joins_speech = False
            self._start_speech(self.track.start, now)
        for event in events:
            if event.at <= self.boundary:
                continue  # a commit or clear after it has ended that speech
            if isinstance(event, messages.TurnScored):
                # No `_extend_silence` here: speech may be about to start before the sample of the score.
                if self._pauses is not None:
                    self._pauses.on_score(event)
                continue
            self._extend_silence(min(event.sample, end), now)
            match event:
                case messages.SpeechStarted() | messages.SpeechResumed():
                    if not self._judges_pauses and self._has_caught_up(end):
                        # The turn before this speech has ended: its final need not wait for the words of this speech.
                        self._flush_ended_turns()
                    self._start_speech(event.sample, now)
                case messages.SpeechPaused():
                    self._assign_words(event.sample, now)
                    if self._pauses is not None and self._judges_pauses and self.speaking:
                        self._pauses.begin(event.sample, self.turns.current_text())
                case messages.SpeechEnded():
                    self._end_speech(event, min(event.at, end), now)
        self._extend_silence(self._quiet_until(end, speech.track), now)

    def _quiet_until(self, end: int, track: TrackState) -> int:
        """The sample up to which there is certainly silence, if there is no speech at `end`."""
        return min(end, track.start) if track.phase is Phase.STARTING else end

    def _extend_silence(self, sample: int, now: float) -> None:
        """A pause, or the silence between turns, lasts until this sample at least: end what has ended by then."""
        if self._pauses is not None and self._pauses.pause_start is not None and self.turns.current is not None:
            for decision in self._pauses.advance(sample, self.turns.current_text()):
                if isinstance(decision, End):
                    self._end_scored_turn(decision, self._pauses.pause_start, now)
                elif isinstance(decision, Scored):
                    if self._settings.wants(INCLUDE_END_OF_TURN):
                        self._send(PauseScored(self.turns.current.item_id, decision.sample, decision.confidence))
                elif not self.turns.current.probably_over:
                    self._probable_end = decision
                    self._announce_probable_end()
        detection = self._settings.turn_detection
        if detection is not None and detection.idle_timeout_ms is not None:
            self._commit_idle_silence(detection.idle_timeout_ms, sample, now)

    def _end_scored_turn(self, end: End, fell: int, now: float) -> None:
        detection = self._settings.turn_detection
        # Without a detector, semantic detection judges words and times, and has no score.
        by_score = detection is not None and (
            detection.scored is not None or (detection.semantic and self._has_detector)
        )
        turn = self._end_turn(end.sample, fell, now, end.confidence if by_score else None)
        turn.timeout = end.timeout

    def _announce_probable_end(self) -> None:
        """Announce the probable end of the open turn once all text before the pause has arrived.

        The flush in the pause asks the engine for that text.
        """
        decision, turn = self._probable_end, self.turns.current
        start = None if self._pauses is None else self._pauses.pause_start
        if decision is not None and turn is not None and start is not None and self._settled >= start:
            self._probable_end = None
            turn.probably_over = True
            self._send(EagerTurnEnd(turn.item_id, decision.sample, decision.confidence))

    def _resume(self, sample: int) -> None:
        """Speech continues: withdraw an announced end."""
        self._probable_end = None
        turn = self.turns.current
        if turn is not None and turn.probably_over:
            turn.probably_over = False
            self._send(TurnResumed(turn.item_id, sample))

    def _end_speech(self, event: messages.SpeechEnded, pause: int, now: float) -> None:
        """The engine's track has ended speech by its rule; there is silence at sample `pause`."""
        if not self.speaking:
            return
        if self._judges_pauses:
            self._flush(pause, False, False)
        else:
            self._end_turn(event.sample, event.speech_end, now)

    def _end_turn(self, sample: int, speech_end: int, now: float, confidence: float | None = None) -> Turn:
        end = min(max(sample, self.boundary), self.audio.appended)
        # Word times are not exact: the middle of the silence is the safest border between the words.
        turn = self._commit_turn(end, now, words_until=(speech_end + end) // 2, confidence=confidence)
        self._set_boundary(end, end * 1000 / self._rate)
        return turn

    def _update_utterances(
        self, watch: UtteranceWatch, events: Sequence[SpeechEvent], speech: messages.Speech, end: int
    ) -> None:
        """Pass the frames to the watch one by one, so that the result does not depend on how many come at once."""
        frame, phase, waiting = speech.frame_samples, self.track.phase, deque(events)
        start = speech.sample + (self.audio.covered - speech.sample) // frame * frame
        for heard in range(start + frame, speech.end + 1, frame):
            while waiting and waiting[0].at <= heard:
                event = waiting.popleft()
                if isinstance(event, messages.SpeechPaused):
                    watch.on_speech(event.sample)
                paused = isinstance(event, messages.SpeechPaused | messages.SpeechEnded)
                phase = Phase.PAUSED if paused else Phase.SPEAKING
            heard = min(heard, end)
            self.audio.covered = max(self.audio.covered, heard)
            if phase is Phase.SPEAKING:
                watch.on_speech(heard)
            self._update_utterance(watch, heard)

    def _update_utterance(self, watch: UtteranceWatch, heard: int) -> None:
        # A final that waits for labels or a revision is sent before the end of the utterance.
        if not self.turns.finishing:
            self._end_utterance(watch.ended(heard))
        # As in `flush_ended`: audio without probabilities may end within a word, and a flush would cut it.
        if self._has_caught_up(heard):
            is_pause = watch.flush_needed(heard)
            if is_pause is not None:
                self._flush(heard if is_pause else None, False, False)

    def settle(self, sample: int) -> None:
        """All text of the audio before this sample has arrived and was sent to the client."""
        self._settled = max(self._settled, sample)
        self._announce_probable_end()
        if self._utterances is not None:
            self._utterances.settle(sample)
            if not self.turns.finishing:
                self._end_utterance(self._utterances.ended(self.audio.covered))

    def flush_ended(self) -> None:
        """Flush the engine for turns that speech detection has ended.

        If a client sends faster than real time, the engine already has audio of later turns, and a flush there could
        cut a word in two. So the flush waits until speech detection has caught up and there is silence.
        """
        if self.turns.current is not None:
            return
        behind_s = (self.audio.appended - self.audio.covered) / self._rate
        pause_s = (self.audio.covered - self.boundary) / self._rate
        if self._has_caught_up(self.audio.covered) or (behind_s <= BUSY_SECONDS and pause_s >= LONG_PAUSE_SECONDS):
            self._flush_ended_turns()

    def _has_caught_up(self, judged_until: int) -> bool:
        """Whether speech detection, which has judged the audio before this sample, is near the end of the audio."""
        return self.audio.appended - judged_until <= CAUGHT_UP_SECONDS * self._rate

    def _flush_ended_turns(self) -> None:
        if all(turn.flushed for turn in self.turns.ended):
            return
        self._flush(self.boundary, False, True)
        for turn in self.turns.ended:
            turn.flushed = True

    def end_open(self, now: float) -> None:
        """End the open turn at the last sample: no more audio will come."""
        self._assign_words(None, now)
        if self.turns.current is not None:
            self._commit_turn(self.audio.appended, now)

    def send_events(self, events: list[ServerEvent], now: float) -> None:
        """Send events of the turns to the client, with the ends of utterances between them."""
        for event in events:
            if isinstance(event, Delta) and event.words and self._utterances is not None:
                self._end_utterance(self._utterances.on_words(event.words))
            self._send(event)
            if isinstance(event, Completed) and event.goes_on:
                end = min(event.end, self.audio.appended)
                # The end of a part of a turn that was ended before lies before the boundary.
                if end > self.boundary:
                    self.boundary, self._boundary_ms = end, end * 1000 / self._rate
            elif isinstance(event, Completed):
                self._add_effect(Measured("final_seconds", now - event.ended_at))

    def _open_without_detection(self) -> None:
        """Without turn detection all uncommitted audio is the open turn: open it with the first sample."""
        waiting = self.turns.current is None and self.audio.appended > self.boundary
        if self._settings.turn_detection is None and waiting:
            self.turns.open(self.boundary)

    def _start_speech(self, sample: int, now: float) -> None:
        """There is speech from this sample on: a turn begins, with padding before the sample, or the open turn
        continues."""
        detection = self._settings.turn_detection
        assert detection is not None
        self._end_pause()
        self._resume(sample)
        start = sample - detection.prefix_padding_ms * self._rate // 1000
        turn = self.turns.current or self.turns.open(max(start, self.boundary))
        if turn.announced:
            return
        turn.announced = True
        self._send(SpeechStarted(turn.item_id, turn.start))
        self.send_events(self.turns.release(now), now)

    def _commit_turn(
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

    def _commit_idle_silence(self, timeout_ms: int, quiet_until: int, now: float) -> None:
        """Commit the silence since the last turn as an item, if it has lasted for `timeout_ms`."""
        timeout = timeout_ms * self._rate // 1000
        while self.turns.current is None and quiet_until - self.boundary >= max(timeout, 1):
            end = self.boundary + timeout
            turn = self.turns.open(self.boundary)
            self._send(TimedOut(turn.item_id, turn.start, end))
            self._commit_turn(end, now, words_until=end)
            self._set_boundary(end, end * 1000 / self._rate)

    def _end_utterance(self, sample: int | None) -> None:
        if sample is not None:
            self._send(UtteranceEnded(sample))

    def _stop_announced(self, sample: int, confidence: float | None = None) -> None:
        current = self.turns.current
        if current is not None and current.announced:
            self._send(SpeechStopped(current.item_id, sample, confidence))

    def _advance_boundary(self, sample: int, source_ms: float) -> None:
        if sample > self.boundary:
            self._set_boundary(sample, source_ms)

    def _set_boundary(self, sample: int, source_ms: float) -> None:
        self.boundary, self._boundary_ms = sample, source_ms
        self._probable_end = None
        self._end_track_at_boundary()
        self._end_pause()
        self._open_without_detection()

    def _change_pauses(self) -> None:
        """Turn detection was changed, perhaps in a pause of the open turn: the new rule decides about that pause."""
        old, self._pauses = self._pauses, self._new_pauses()
        detection, pause_start = self._settings.turn_detection, None
        if detection is not None and self.speaking:
            pause_start = self.track.fell if self.track.phase is Phase.PAUSED else None
            pause_start = old.pause_start if old is not None and old.pause_start is not None else pause_start
        if pause_start is None or detection is None:
            return
        if self._pauses is None and old is not None:
            # By the old rule the engine's track has ended this speech already, so its silence is counted here.
            self._pauses = PauseWatch(_silence_only(detection.silence_duration_ms), self._rate, False)
        if self._pauses is not None:
            self._pauses.begin(pause_start, self.turns.current_text())

    def _end_pause(self) -> None:
        if self._pauses is not None:
            self._pauses.end()
            self._pauses = self._pauses if self._judges_pauses else None

    @property
    def _judges_pauses(self) -> bool:
        detection = self._settings.turn_detection
        return detection is not None and detection.judges_pauses

    def _new_pauses(self) -> PauseWatch | None:
        detection = self._settings.turn_detection
        if detection is None or not self._judges_pauses:
            return None
        return PauseWatch(_eagerness(detection), self._rate, self._has_detector)

    @property
    def _reported_until(self) -> int | None:
        """The sample up to which the speech track has opened and ended turns; None: it opens and ends none."""
        return None if self._settings.turn_detection is None else self.audio.covered

    def _report_to_turns(self, now: float) -> None:
        self.send_events(self.turns.report(self._reported_until, now), now)

    def _assign_words(self, until: int | None, now: float) -> None:
        """Assign the words that came before the report of their audio, up to this sample (None: all)."""
        self.send_events(self.turns.assign_until(until, now), now)

    def _set_speakers(self) -> None:
        """Switch labels on or off. If they are switched on again, the voices are those that the session had before."""
        wanted, was_on = self._settings.labels_speakers, self.turns.speakers is not None
        if wanted and not was_on:
            self._speakers = self._speakers or SpeakerTimeline()
            self._speakers.begins = self.audio.appended
        self.turns.speakers = self._speakers if wanted else None

    def _new_utterances(self) -> UtteranceWatch | None:
        gap_ms = self._settings.utterance_end_ms
        return None if gap_ms is None else UtteranceWatch(gap_ms, self._rate)

    def _send(self, event: ServerEvent) -> None:
        self._add_effect(Send(event))
