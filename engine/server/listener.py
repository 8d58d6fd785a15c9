"""Who speaks, and what of it a model should hear: the speech detector, the gates behind it, and audio that waits.

The listener promises: each sample of a stream is listened to once, in order, before the step that may read it is
planned; what was found goes out as `Speech`; and with gate settings a model hears only what its gate lets by. An error
in listening to many streams at once is found out: the stream it belongs to is blamed, the others are heard.

A detector on a device that works by itself is told to listen and asked later for what it found (`collect`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine.core.scheduler import Scheduler
from engine.messages import Flush, Item, Output, Saved, Speech, Text, TurnRule
from engine.runner.base import Detector
from engine.server.gate import Begin, Cut, Decision, End, GateSettings, Pause, Resume, Skip, SpeechGate
from engine.server.last_spoken import LastSpoken
from engine.server.turn_ends import TurnEnds
from engine.server.unheard import Samples, Stretch, Unheard
from engine.server.word_times import WordTimes

# A stream that is about to be computed, and the positions [start, end).
Target = tuple[str, int, int]


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
        self._unheard: dict[str, Unheard] = {}
        # Of streams of a frame-synchronous model.
        self._spoken: dict[str, LastSpoken] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._unheard)

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
            self._spoken[name] = LastSpoken()

    def change_turns(self, name: str, rule: TurnRule | None) -> None:
        """By what its turns end from now on; what has come by now is judged by the rule before."""
        if name in self._gates and name in self._unheard:
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
            self._unheard.pop(name, None)

    def take(self, name: str, items: Sequence[Item]) -> None:
        """Audio that has come; it waits for the next `listen`."""
        unheard = self._unheard.get(name)
        if unheard is None:
            unheard = self._unheard[name] = Unheard(self._scheduler.spec)
        end, spoken = unheard.add(items), self._spoken.get(name)
        if spoken is not None and items:
            spoken.came = end

    def listen(self) -> None:
        """Find speech in what has come since the last call, and let the models skip what nobody says."""
        streams = self._scheduler.streams
        waiting, self._unheard = self._unheard, {}
        unheard = {name: audio for name, audio in waiting.items() if name in streams}
        samples = sum(audio.length for audio in unheard.values())
        live_samples = sum(audio.length for name, audio in unheard.items() if streams[name].live)
        self.live_share = live_samples / samples if samples else 0.0
        stretches = {name: audio.stretches for name, audio in unheard.items()}
        if self._scheduler.suspects:
            # One of them may have killed an engine: listened to alone, it is found out.
            for name in stretches:
                self._hear({name: stretches[name]})
        else:
            self._hear(stretches)

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
        if name in self._unheard:
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
                self._obey(name, gate.flush_at_pause())
                then(min(stream.clock.position_at(gate.floor), stream.available))

    def end_now(self, name: str) -> None:
        """Text is wanted now: what the gate holds open ends here, and what is in doubt will not be heard."""
        gate, stream, spoken = self._gates.get(name), self._scheduler.streams.get(name), self._spoken.get(name)
        if stream is None or stream.finished:
            return
        waits = spoken is not None and spoken.is_asked
        if (gate is not None or waits) and name in self._unheard:
            self.listen()
        if spoken is not None:
            spoken.asked_until = spoken.came
            if waits:
                self.collect(self.launches)
            if name in self._spoken:
                spoken.answer_all()
        if gate is not None and name in self._gates:
            self._obey(name, gate.flush(stream.clock.end_sample))
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

    def _hear(self, unheard: dict[str, list[Stretch]]) -> None:
        """Listen to streams side by side; almost always all there is of each is one stretch."""
        streams = self._scheduler.streams
        self._announce((name, streams[name].computed, streams[name].available) for name in unheard)
        for turn in range(max((len(stretches) for stretches in unheard.values()), default=0)):
            present = [
                (name, stretches[turn])
                for name, stretches in unheard.items()
                if turn < len(stretches) and name in streams
            ]
            for speech in self._detect([(name, stretch.samples()) for name, stretch in present]):
                self._found(speech)
            for name, stretch in present:
                if stretch.silence and name in streams:
                    self.collect(self.launches)  # what was said before the silence comes first
                    self._pass_silence(name, stretch.silence)

    def _detect(self, batch: list[tuple[str, Samples]]) -> list[Speech]:
        """All streams at once. If that fails nothing was heard, and each is listened to alone: one of them is why."""
        try:
            answers = self._detector.launch(batch)
            if not self._detector.overlaps_steps:
                return answers()
            self._answers.append(answers)
            self.launches += 1
            return []
        except Exception as error:
            if len(batch) == 1:
                self._blame(batch[0][0], error)
                return []
        return [speech for entry in batch for speech in self._detect([entry])]

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
            self._obey(name, gate.judge(probabilities, speech.frame_samples))
            if is_end:
                self._obey(name, gate.flush_at_pause())
                self._scheduler.mark(name, ends_text=True)

    def _obey(self, name: str, decisions: list[Decision]) -> None:
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
                case Cut():
                    scheduler.flush(name, None, position_behind(decision.sample))
                case Skip():
                    scheduler.skip(name, clock.position_at(decision.sample))
