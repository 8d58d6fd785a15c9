"""Ends of turns: wrong cuts and delays of four end-of-turn rules at the pauses of recordings with known words.

    python -m benchmarks.turns MANIFEST [--model NAME] [--json FILE]

Every pause of at least 250 ms is labelled by the reference: inside a sentence, or at its end. A rule that ends the turn
inside a sentence before the speaker goes on has cut it wrongly. At the end of a sentence the silence is continued (with
the sound of the pause), and the delay from the end of the last word to the end of the turn counts. The words and their
arrival times come from the engine, played at the pace of a microphone with a flush 200 ms after speech fell.

The product's rule is also run with other thresholds, for the curve of wrong cuts against delays in docs/turns.md.

A reference without punctuation is left out, unless its style (`...-nonnative`, `...-spelled`) says that it is one
sentence. Half of the speakers set each rule's threshold for 5 % wrong cuts; all figures are for the other half. The
weights of the product's rule are fitted by `training/turn_weights.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import parser_of, percentiles, run_command, show
from benchmarks.playing import Played, Run, warm_loop
from benchmarks.recordings import (
    SMALL_MODEL,
    add_manifest,
    exit_status,
    load_audio,
    manifest_entries,
    manifest_of,
    sound_session,
)
from benchmarks.scoring import plain_words
from benchmarks.sounds import SAMPLE_RATE, Samples
from engine.end_of_turn import EAGERNESS, MIN_SILENCE_MS, AskDetector, Eagerness, End, Judge
from engine.messages import SpeechPaused, SpeechResumed, TurnRule
from engine.models.smart_turn import WINDOW_SAMPLES, SmartTurn
from engine.options import DEFAULT_MODEL
from engine.runner.device import compute_on_one_thread
from engine.server.speech_track import SpeechTrack
from engine.weights.checkpoint import load_smart_turn
from engine.weights.registry import TURN_DETECTOR
from engine.weights.store import pull
from realtime.bench.clients import BadManifest
from realtime.bench.words import align

SHORTEST_PAUSE_S = 0.25
# Styles whose recordings are one sentence each, though their references have no punctuation.
ONE_SENTENCE = ("nonnative", "spelled")
THRESHOLD, MIN_SPEECH_SAMPLES = 0.5, 64 * SAMPLE_RATE // 1000
# Sound after the end of a recording, and the longest silence that a rule may wait for.
TAIL_S, LONGEST_S = 1.5, 10.0
WRONG_SHARE = 0.05
# Seconds of silence after which the detector is asked where no threshold says when.
MOMENTS_S = (0.2, 0.6, 1.0)
SENTENCE_MARKS = (".", "?", "!")

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A recording of one speaker. `marks`: whether its reference has punctuation; else it is one sentence."""

    name: str
    speaker: str
    audio: Samples
    reference: str
    marks: bool


@dataclass(slots=True)
class PauseCase:
    """A labelled pause. Times are seconds in the recording; `silence` is None at the end of a sentence."""

    source: Source
    fell: float
    silence: float | None
    real_silence: float
    last_word: float
    # The text of the turn before the pause, by the moment at which it came.
    texts: list[tuple[float, str]]
    # The detector's answers, by the seconds of silence.
    answers: dict[float, float] = field(default_factory=dict)

    @property
    def calibrates(self) -> bool:
        """Whether the speaker is one of those that set the thresholds."""
        return zlib.crc32(self.source.speaker.encode()) % 2 == 0

    def text(self, moment: float) -> str:
        came = [text for at, text in self.texts if at <= moment]
        return came[-1] if came else ""

    def lasts(self, seconds: float) -> bool:
        return self.silence is None or seconds <= self.silence

    def audio_until(self, seconds: float) -> Samples:
        """What the detector gets after this much silence; at an end the sound of the pause goes on."""
        audio, fell = with_tail(self.source), round(self.fell * SAMPLE_RATE)
        rose, end = fell + round(self.real_silence * SAMPLE_RATE), fell + round(seconds * SAMPLE_RATE)
        piece = audio[max(0, end - WINDOW_SAMPLES) : min(end, rose)]
        return piece if end <= rose else np.concatenate((piece, _repeated(audio[fell:rose], end - rose)))


# Recordings


def room_tone(audio: Samples, samples: int) -> Samples:
    """The quietest 0.3 s of a recording, mirrored and repeated: the background noise without speech."""
    width = round(0.3 * SAMPLE_RATE)
    if len(audio) < width:
        return np.zeros(samples, np.float32)
    power = np.concatenate(([0.0], np.cumsum(np.square(audio, dtype=np.float64))))
    quietest = int(np.argmin(power[width:] - power[:-width]))
    return _repeated(audio[quietest : quietest + width], samples)


def _repeated(sound: Samples, samples: int) -> Samples:
    return np.resize(np.concatenate((sound[::-1], sound)), samples).astype(np.float32)


def manifest_sources(path: Path, one_sentence: bool = False) -> list[Source]:
    """The recordings of a manifest whose sentences are known; all, if each is one sentence. Raises BadManifest."""
    found = []
    for entry in manifest_entries(path):
        text = str(entry.get("text", ""))
        marks = any(mark in text for mark in SENTENCE_MARKS)
        is_known = marks or one_sentence or str(entry.get("style", "")).endswith(ONE_SENTENCE)
        if text and is_known and entry.get("kind", "clips") == "clips":
            name = str(entry.get("id", Path(entry["path"]).stem))
            audio = load_audio(path.parent / entry["path"])
            found.append(Source(name, str(entry.get("speaker", name)), audio, text, marks))
    if not found:
        raise BadManifest(f"{path} has no recording whose sentences are known")
    return found


def with_tail(source: Source) -> Samples:
    return np.concatenate((source.audio, room_tone(source.audio, round(TAIL_S * SAMPLE_RATE))))


def cases_in(sources: Sequence[Source], model: str) -> list[PauseCase]:
    """The labelled pauses of all recordings, each played to the engine."""
    loop = warm_loop(model, 2)
    rule = TurnRule(THRESHOLD, MIN_SPEECH_SAMPLES, MIN_SILENCE_MS * SAMPLE_RATE // 1000)
    cases = []
    for source in sources:
        (played,) = Run(loop, streams=1, turns=rule).play([sound_session(source.name, with_tail(source))])
        cases += cases_of(source, played)
    return cases


# Pauses and their labels


def silences(played: Played) -> list[tuple[float, float]]:
    """Where speech fell and where it rose again, for every silence that is long enough; the last one is endless."""
    track = SpeechTrack(TurnRule(THRESHOLD, MIN_SPEECH_SAMPLES, 1 << 40))
    found: list[tuple[float, float]] = []
    fell: float | None = None
    for event in track.add_frames(played.probabilities, round(played.frame_seconds * SAMPLE_RATE)):
        if isinstance(event, SpeechPaused):
            fell = event.sample / SAMPLE_RATE
        elif isinstance(event, SpeechResumed) and fell is not None:
            found.append((fell, event.sample / SAMPLE_RATE))
            fell = None
    if fell is not None:
        found.append((fell, played.seconds))
    return [(start, end) for start, end in found if end - start >= SHORTEST_PAUSE_S]


def _bare(word: str) -> str:
    return "".join(plain_words(word))


def cases_of(source: Source, played: Played) -> list[PauseCase]:
    """The labelled pauses of a recording; a pause whose words do not match the reference is left out."""
    reference, words = source.reference.split(), played.emissions.words
    # Both neighbours of a pause must be words of the reference that follow each other.
    pairs = align([_bare(word) for word in reference], [_bare(word.text) for word in words])
    place = {j: i for i, j in pairs if i is not None and j is not None}
    right = {j: i for j, i in place.items() if _bare(reference[i]) == _bare(words[j].text)}
    found = []
    turn_start = 0
    for fell, rose in silences(played):
        before = [number for number, word in enumerate(words) if word.start < fell - 0.02]
        if not before:
            continue
        last = before[-1]
        final = last == len(words) - 1 and rose >= played.seconds - 0.1
        is_end = _label(source, reference, right, place, last, final)
        if is_end is None:
            continue
        silence, texts = None if is_end else rose - fell, _texts(played, turn_start, last)
        found.append(PauseCase(source, fell, silence, rose - fell, words[last].end, texts))
        if is_end:
            # A turn that ended begins a new text.
            turn_start = last + 1
    return found


def _label(
    source: Source, reference: list[str], right: dict[int, int], place: dict[int, int], last: int, final: bool
) -> bool | None:
    """True at the end of a sentence, False inside, None if it is not known."""
    if final:
        known = place.get(last) == len(reference) - 1
        ended = not source.marks or reference[-1].rstrip("\"')").endswith(SENTENCE_MARKS)
        return True if known and ended else None
    if not source.marks:
        # One sentence: every pause between its words is inside.
        return False if last + 1 in place else None
    if last not in right or right.get(last + 1) != right[last] + 1:
        return None
    return reference[right[last]].rstrip("\"')").endswith(SENTENCE_MARKS)


def _texts(played: Played, first: int, last: int) -> list[tuple[float, str]]:
    """The text of the words from `first` to `last`, by the moment at which each part of it came."""
    said = played.emissions
    cursor = start = 0
    for number, word in enumerate(said.words[: last + 1]):
        at = max(cursor, said.text.find(word.text, cursor))
        if number == first:
            start = at
        cursor = at + len(word.text)
    pieces = zip(said.ends, said.moments, strict=True)
    return [(moment, said.text[start : min(end, cursor)]) for end, moment in pieces if end > start]


def question_moments(eagerness: Eagerness) -> list[float]:
    """The seconds of silence after which the product's rule asks."""
    return [samples / SAMPLE_RATE for samples in eagerness.questions(SAMPLE_RATE)]


def ask_detector(cases: Iterable[PauseCase], detector: SmartTurn, moments: Iterable[float]) -> float:
    """Fill in the detector's answers at these moments of the pauses; returns the processor seconds a question."""
    spent, asked = 0.0, 0
    moments = sorted(set(moments))
    for case in cases:
        for moment in filter(case.lasts, moments):
            piece = case.audio_until(moment)
            started = time.process_time()
            (case.answers[moment],) = detector.judge([piece])
            spent, asked = spent + time.process_time() - started, asked + 1
    return spent / max(asked, 1)


def labelled_cases(options: argparse.Namespace, moments: Iterable[float]) -> tuple[list[PauseCase], float]:
    """The pauses of the manifest with the detector's answers at these moments, and the processor seconds a question."""
    with manifest_of(options) as path:
        sources = manifest_sources(path, options.manifest is None)[: 4 if options.small else None]
    detector = load_smart_turn(pull(TURN_DETECTOR))
    detector.quantise()
    cases = cases_in(sources, options.model)
    return cases, ask_detector(cases, detector, moments)


# Rules: the seconds of silence after which each ends the turn, if the silence lasts


@dataclass(frozen=True, slots=True)
class Rule:
    """`end` gives the seconds of silence after which the turn ends; `moments` are those of the detector's questions."""

    end: Callable[[PauseCase], float]
    moments: Sequence[float] = ()

    def asked(self, case: PauseCase) -> list[float]:
        """The moments of a pause at which the detector is asked."""
        end = self.end(case)
        return [moment for moment in self.moments if moment <= end and case.lasts(moment)]


def silence_rule(seconds: float) -> Rule:
    return Rule(lambda case: seconds)


def learnt_rule(threshold: float, timeout_s: float = 3.0) -> Rule:
    """The detector alone: the first answer above a threshold, or a timeout."""

    def end(case: PauseCase) -> float:
        sure = [moment for moment in filter(case.lasts, MOMENTS_S) if case.answers[moment] >= threshold]
        return sure[0] if sure else timeout_s

    return Rule(end, MOMENTS_S)


def judged_rule(eagerness: Eagerness, learnt: bool) -> Rule:
    """The rule of the product, with the detector or without."""
    judge = Judge(eagerness, SAMPLE_RATE, has_detector=learnt)
    moments = question_moments(eagerness) if learnt else []

    def end(case: PauseCase) -> float:
        later = [(moment - case.fell, text) for moment, text in case.texts if moment > case.fell]
        limit = round(LONGEST_S * SAMPLE_RATE) if case.silence is None else round(case.silence * SAMPLE_RATE)
        pause = judge.begin(0, case.text(case.fell))
        for stop, text in [*((round(at * SAMPLE_RATE), text) for at, text in later), (limit, "")]:
            while True:
                pause, signs = judge.advance(pause, min(stop, limit))
                if signs and isinstance(signs[-1], End):
                    return signs[-1].sample / SAMPLE_RATE
                if not (signs and isinstance(signs[-1], AskDetector)):
                    break
                pause = judge.with_answer(pause, case.answers[moments[pause.answers]])
            if stop >= limit:
                break
            pause = judge.with_words(pause, text)
        return np.inf

    return Rule(end, moments)


def text_eagerness(finished_ms: int) -> Eagerness:
    return Eagerness(0.7, 8000, None, finished_ms, min(8 * finished_ms, 8000))


# Each rule with the setting that was chosen, and with other settings from eager to patient.
_THRESHOLDS = [*np.arange(0.2, 0.95, 0.02), *np.arange(0.95, 0.995, 0.005)]
CURVE = [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97]
_MEDIUM = EAGERNESS["medium"]
FAMILIES: dict[str, tuple[Rule, list[tuple[float, Rule]]]] = {
    "silence 500 ms": (silence_rule(0.5), [(at, silence_rule(at)) for at in np.arange(0.2, 4.0, 0.05)]),
    "text": (
        judged_rule(_MEDIUM, learnt=False),
        [(at, judged_rule(text_eagerness(at), learnt=False)) for at in range(200, 4000, 50)],
    ),
    "learnt": (learnt_rule(0.5), [(at, learnt_rule(at)) for at in _THRESHOLDS]),
    "fused": (
        judged_rule(_MEDIUM, learnt=True),
        [(at, judged_rule(replace(_MEDIUM, threshold=at), learnt=True)) for at in CURVE],
    ),
    "fused, high": (judged_rule(EAGERNESS["high"], learnt=True), []),
    "fused, low": (judged_rule(EAGERNESS["low"], learnt=True), []),
}


def all_moments() -> set[float]:
    """The moments of all questions of all rules."""
    return {
        moment
        for chosen, others in FAMILIES.values()
        for rule in (chosen, *(rule for _, rule in others))
        for moment in rule.moments
    }


def wrong_cuts(rule: Rule, cases: Sequence[PauseCase]) -> tuple[int, int]:
    """How many pauses inside sentences the rule takes for ends, and how many there are."""
    inside = [(case, case.silence) for case in cases if case.silence is not None]
    return sum(rule.end(case) < silence for case, silence in inside), len(inside)


def wrong_share(rule: Rule, cases: Sequence[PauseCase]) -> float:
    wrong, inside = wrong_cuts(rule, cases)
    return wrong / max(inside, 1)


def figures_of(rule: Rule, cases: Sequence[PauseCase], question_s: float, speech_s: float) -> Figures:
    delays, after_fall, questions = [], [], 0
    for case in cases:
        end, asked = rule.end(case), rule.asked(case)
        questions += len(asked)
        if case.silence is None:
            # An end is known when the answer to the last question before it is.
            known = asked[-1] + question_s if asked else 0.0
            after_fall.append(max(end, known))
            delays.append(after_fall[-1] + case.fell - case.last_word)
    return {
        "wrong_cuts": wrong_share(rule, cases),
        **percentiles("end_after_word_s", delays, 50, 95),
        **percentiles("end_after_speech_fell_s", after_fall, 50, 95),
        "false_interruptions_per_minute": wrong_cuts(rule, cases)[0] / max(speech_s / 60, 1e-9),
        "questions_per_pause": questions / max(len(cases), 1),
        "cpu_ms_per_pause": questions * question_s * 1000 / max(len(cases), 1),
    }


def measure(options: argparse.Namespace) -> Figures:
    """Every rule at its chosen setting, and at the setting that has 5 % wrong cuts on the first half of speakers."""
    cases, question_s = labelled_cases(options, all_moments())
    first, second = ([case for case in cases if case.calibrates is half] for half in (True, False))
    spoken_s = sum({case.source.name: len(case.source.audio) / SAMPLE_RATE for case in second}.values())
    found: Figures = {
        "pauses": {
            "inside_sentences": sum(case.silence is not None for case in second),
            "at_ends": sum(case.silence is None for case in second),
            "speakers": len({case.source.speaker for case in second}),
            "inside_sentences_first_half": sum(case.silence is not None for case in first),
            "at_ends_first_half": sum(case.silence is None for case in first),
        },
        "cpu_ms_a_question": question_s * 1000,
    }
    for name, (chosen, others) in FAMILIES.items():
        found[name] = figures_of(chosen, second, question_s, spoken_s)
        fitting = [(at, rule) for at, rule in others if wrong_share(rule, first) <= WRONG_SHARE]
        if fitting:
            at, rule = fitting[0]
            found[name]["at_5_percent"] = {"setting": float(at), **figures_of(rule, second, question_s, spoken_s)}
    found["fused_by_threshold"] = {
        f"{at:g}": figures_of(rule, second, question_s, spoken_s) for at, rule in FAMILIES["fused"][1]
    }
    show("Ends of turns", found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model whose words are read")
    compute_on_one_thread()
    return exit_status(lambda: run_command(parser, arguments, measure, model=SMALL_MODEL))


if __name__ == "__main__":
    sys.exit(main())
