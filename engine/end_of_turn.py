"""Decides in a pause whether the speaker's turn has ended: from the turn detector, the words so far, and the silence.

`Judge` has the rule. The gateway's session core calls it (`realtime/session/boundaries.py`); the engine's speech track
does not use it. The state of a pause is a value (`Pause`): the methods of `Judge` return a new one, without side
effects, clock or model. Time is a sample count. The detector is asked shortly before its answer could end the turn
(`Eagerness.questions`) and again while the pause lasts, and words may arrive at any time. Together they give the
log-odds that the turn is over:

    log-odds = bias + detector's log-odds * weight + evidence of the words + growth * ln(silence / 200 ms)

The log-odds grow with the silence, so each threshold is reached at one exact sample, now or later; after
`Eagerness.timeout_ms` of silence the turn ends in any case. `Judge.advance` finds that sample, and finds the same one
however the silence is divided into pieces. It never passes a question without an answer. A replay is given the recorded
answers and words at their samples, and finds the same ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto

# No turn ends before this much silence; by then the text before the pause is complete.
MIN_SILENCE_MS = 200
# The detector is first asked this long before the earliest moment at which its answer could end the turn, so that the
# answer is there in time.
ANSWER_MS = 100
# It is asked again in this interval while the pause lasts, at most `MAX_QUESTIONS` times in all.
ASK_AGAIN_MS = 400
MAX_QUESTIONS = 3

SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")
# After these marks and words a sentence continues.
_CONTINUATION_MARKS = (",", ";", ":", "-", "–", "—", "...", "…", "、", "，")
_UNFINISHED_WORDS = frozenset(
    "a an the and or but nor so because if that which who whose when while where than as of to in on at by for from "
    "with without about into onto over under between after before during until since through my your his her its our "
    "their this these those is are was were be been am has have had do does did will would shall should can could may "
    "might must not very i'm we're you're they're it's i we you they he she uh um er erm hmm mm like well".split()
)
_HESITATIONS = frozenset("uh um er erm hmm mm".split())
# Characters that may follow the mark at the end of a sentence.
_CLOSING = " \n\"')”’"


class WordEvidence(Enum):
    """Evidence from the last words of a turn about its end."""

    NONE = auto()  # no words yet
    UNFINISHED = auto()  # a comma, a hesitation, or a word that cannot end a sentence
    OPEN = auto()  # neither
    FINISHED = auto()  # the end of a sentence


def ends_sentence(text: str) -> bool:
    """Whether the text ends with a complete sentence."""
    return text.rstrip(_CLOSING).endswith(SENTENCE_ENDS) and not text.rstrip().endswith(("...", "…"))


def evidence_of(text: str) -> WordEvidence:
    """The evidence of a turn's text about its end. The word lists are English; marks count in every language."""
    bare = text.rstrip(_CLOSING)
    if not bare:
        return WordEvidence.NONE
    last = bare.split()[-1].lower().replace("’", "'").strip(".,?!…\"'(")
    if bare.endswith(_CONTINUATION_MARKS) or last in _HESITATIONS:
        return WordEvidence.UNFINISHED
    if ends_sentence(text):
        return WordEvidence.FINISHED
    return WordEvidence.UNFINISHED if last in _UNFINISHED_WORDS else WordEvidence.OPEN


@dataclass(frozen=True, slots=True)
class Weights:
    """The coefficients of the calibrated score, in log-odds."""

    bias: float
    # Factor of the detector's log-odds.
    detector: float
    # Evidence of the words, in the order of `WordEvidence`.
    words: tuple[float, float, float, float]
    # Added for each e-fold of the silence beyond `MIN_SILENCE_MS`.
    growth: float


# Fitted with training/turn_weights.py; docs/turns.md says on what.
FUSED = Weights(bias=-3.17, detector=0.3, words=(-0.56, -0.05, 0.06, 0.55), growth=2.82)
# Before the first answer, and without a detector. In the fit, open words may not weigh more than finished ones.
WORDS_ONLY = Weights(bias=-2.98, detector=0.0, words=(-0.61, -0.44, 0.39, 0.39), growth=2.37)

# The detector's probability is limited to this range before its log-odds are used; beyond it, it carries no further
# evidence.
MIN_PROBABILITY, MAX_PROBABILITY = 0.001, 0.99

# Silence that ends a turn after a complete and after an incomplete sentence, by the name of the eagerness. They count
# without a detector, and in a pause in which the detector had no answer. `UNFINISHED_MS` is also the timeout with one.
FINISHED_MS = {"high": 300, "medium": 500, "auto": 500, "low": 900}
UNFINISHED_MS = {"high": 2000, "medium": 4000, "auto": 4000, "low": 8000}


@dataclass(frozen=True, slots=True)
class Eagerness:
    """When a turn ends: when its probability reaches `threshold`, or after `timeout_ms` of silence.

    At the lower probability `eager` (if given) an early end is announced, which is withdrawn if speech resumes. A
    threshold of 1 is never reached. Without an answer of the detector, `finished_ms` of silence end a turn after a
    complete sentence and `unfinished_ms` after an incomplete one. If these are not given, the score of words and
    silence alone counts (`WORDS_ONLY`).
    """

    threshold: float
    timeout_ms: int
    eager: float | None = None
    finished_ms: int | None = None
    unfinished_ms: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"the threshold for the end of a turn must be above 0 and at most 1, not {self.threshold}")
        if self.timeout_ms < MIN_SILENCE_MS:
            raise ValueError(
                f"the timeout for the end of a turn must be at least {MIN_SILENCE_MS} ms, not {self.timeout_ms}"
            )
        if self.eager is not None and not 0 < self.eager <= self.threshold:
            raise ValueError(
                f"the eager threshold must be above 0 and at most the threshold {self.threshold}, not {self.eager}"
            )

    def questions(self, sample_rate: int) -> tuple[int, ...]:
        """The lengths of silence, in samples, after which the detector is asked, if the pause lasts that long. Empty if
        its answers could not end the turn before the timeout does."""
        best = FUSED.bias + FUSED.detector * _log_odds(MAX_PROBABILITY) + max(FUSED.words)
        first_ms = max(_silence_ms(self.eager or self.threshold, best, FUSED.growth) - ANSWER_MS, MIN_SILENCE_MS)
        silences_ms = [first_ms + ASK_AGAIN_MS * number for number in range(MAX_QUESTIONS)]
        return tuple(_samples(silence_ms, sample_rate) for silence_ms in silences_ms if silence_ms < self.timeout_ms)


# The eagernesses that a client can choose by name.
THRESHOLDS = {"high": 0.5, "medium": 0.85, "auto": 0.85, "low": 0.95}
EAGERNESS = {
    name: Eagerness(threshold, UNFINISHED_MS[name], None, FINISHED_MS[name], UNFINISHED_MS[name])
    for name, threshold in THRESHOLDS.items()
}

# The ranges and defaults of Deepgram Flux.
EOT_THRESHOLDS, EAGER_EOT_THRESHOLDS, EOT_TIMEOUTS_MS = (0.5, 1.0), (0.3, 0.9), (500, 60_000)
DEFAULT_EOT_THRESHOLD, DEFAULT_EOT_TIMEOUT_MS = 0.7, 5000


def numeric_eagerness(
    eot_threshold: float = DEFAULT_EOT_THRESHOLD,
    eager_eot_threshold: float | None = None,
    eot_timeout_ms: int = DEFAULT_EOT_TIMEOUT_MS,
) -> Eagerness:
    """The eagerness for Deepgram Flux's numeric parameters. Raises ValueError with a text for the client."""
    _check("eot_threshold", eot_threshold, EOT_THRESHOLDS)
    _check("eot_timeout_ms", eot_timeout_ms, EOT_TIMEOUTS_MS)
    if eager_eot_threshold is not None:
        _check("eager_eot_threshold", eager_eot_threshold, EAGER_EOT_THRESHOLDS)
        if eager_eot_threshold > eot_threshold:
            raise ValueError(
                f"eager_eot_threshold ({eager_eot_threshold:g}) must not be above eot_threshold ({eot_threshold:g})"
            )
    return Eagerness(eot_threshold, eot_timeout_ms, eager_eot_threshold)


def _check(name: str, value: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low <= value <= high:
        # The value is not repeated: it may be an integer that is too long for any text.
        raise ValueError(f"{name} must be between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True)
class Pause:
    """The state of a pause in an open turn. It is saved with the session, under the names of its fields."""

    # The sample at which speech ended, and the end of the silence so far.
    fell: int
    now: int
    words: WordEvidence = WordEvidence.NONE
    # The detector's last answer that had a probability.
    probability: float | None = None
    # Questions that were answered, also those without a probability.
    answers: int = 0
    # A question is open.
    asked: bool = False
    # The early end was announced.
    eager: bool = False
    # The sample at which the turn ended.
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class AskDetector:
    """The detector must be asked about the audio up to `sample`."""

    sample: int


@dataclass(frozen=True, slots=True)
class EagerEnd:
    """The turn has probably ended; `confidence` is the score at `sample`."""

    sample: int
    confidence: float


@dataclass(frozen=True, slots=True)
class End:
    """The turn has ended at `sample`. `timeout`: because of the length of the silence alone."""

    sample: int
    confidence: float
    timeout: bool


Decision = AskDetector | EagerEnd | End


class Judge:
    """The rule for the end of a turn with its settings. `has_detector`: a detector is loaded and answers questions."""

    def __init__(self, eagerness: Eagerness, sample_rate: int, *, has_detector: bool) -> None:
        self._eagerness = eagerness
        self._rate = sample_rate
        self._has_detector = has_detector
        self._questions = eagerness.questions(sample_rate) if has_detector else ()

    def begin(self, fell: int, text: str) -> Pause:
        """A pause begins: speech ended at sample `fell`; `text` is the text of the turn so far."""
        return Pause(fell, fell, evidence_of(text))

    def with_words(self, pause: Pause, text: str) -> Pause:
        """The pause after more text of the turn has arrived; the text counts from `pause.now` on."""
        return replace(pause, words=evidence_of(text))

    def with_answer(self, pause: Pause, probability: float | None) -> Pause:
        """The pause after the detector's answer to the open question. None: it has no probability. Then the answer
        before this one counts; without any, words and silence decide as if there were no detector."""
        if not pause.asked:
            raise ValueError("the turn detector was not asked")
        latest = pause.probability if probability is None else probability
        return replace(pause, probability=latest, answers=pause.answers + 1, asked=False)

    def confidence(self, pause: Pause, sample: int) -> float:
        """The probability that the turn is over, if the silence lasts until `sample`."""
        silence = max(sample - pause.fell, 1) * 1000 / self._rate
        return _sigmoid(self._constant(pause) + self._weights(pause).growth * math.log(silence / MIN_SILENCE_MS))

    def advance(self, pause: Pause, sample: int) -> tuple[Pause, list[Decision]]:
        """The silence lasts until `sample` at least. Returns the pause, advanced to `sample`, to the next question
        (which must be answered first) or to the end of the turn, and the decisions on the way."""
        decisions: list[Decision] = []
        while pause.ended is None and not pause.asked:
            end_at, timeout = self._end_at(pause)
            eager_at = self._eager_at(pause)
            ask_at = self._ask_at(pause)
            next_at = min(at for at in (end_at, eager_at, ask_at) if at is not None)
            if next_at > sample:
                break
            pause = replace(pause, now=max(pause.now, next_at))
            if ask_at == next_at:
                pause = replace(pause, asked=True)
                decisions.append(AskDetector(next_at))
            elif eager_at == next_at and end_at > next_at:
                pause = replace(pause, eager=True)
                decisions.append(EagerEnd(next_at, self.confidence(pause, next_at)))
            else:
                pause = replace(pause, ended=next_at)
                decisions.append(End(next_at, self.confidence(pause, next_at), timeout))
        if pause.ended is None and not pause.asked:
            pause = replace(pause, now=max(pause.now, sample))
        return pause, decisions

    def _ask_at(self, pause: Pause) -> int | None:
        """The sample of the next question; None if all have been asked."""
        if pause.answers >= len(self._questions):
            return None
        return max(pause.fell + self._questions[pause.answers], pause.now)

    def _end_at(self, pause: Pause) -> tuple[int, bool]:
        """The sample at which the turn ends if nothing changes, and whether only the silence ends it."""
        eagerness = self._eagerness
        timeout = max(pause.fell + self._samples(eagerness.timeout_ms), pause.now)
        without_detector = not self._has_detector or (pause.answers > 0 and pause.probability is None)
        if without_detector and eagerness.finished_ms is not None and eagerness.unfinished_ms is not None:
            finished = pause.words is WordEvidence.FINISHED
            wait = self._samples(eagerness.finished_ms if finished else eagerness.unfinished_ms)
            return max(pause.fell + wait, pause.now), not finished
        reached = self._reached_at(pause, eagerness.threshold)
        return (reached, False) if reached < timeout else (timeout, True)

    def _eager_at(self, pause: Pause) -> int | None:
        """The sample of the early end if nothing changes; None if none is announced any more."""
        if self._eagerness.eager is None or pause.eager:
            return None
        return self._reached_at(pause, self._eagerness.eager)

    def _reached_at(self, pause: Pause, threshold: float) -> int:
        """The sample at which the score reaches a threshold, if nothing changes."""
        wait_ms = _silence_ms(threshold, self._constant(pause), self._weights(pause).growth)
        return max(pause.fell + self._samples(max(wait_ms, MIN_SILENCE_MS)), pause.now)

    def _weights(self, pause: Pause) -> Weights:
        return WORDS_ONLY if pause.probability is None else FUSED

    def _constant(self, pause: Pause) -> float:
        """The log-odds at `MIN_SILENCE_MS` of silence: all terms but that of the silence."""
        weights = self._weights(pause)
        words = weights.words[pause.words.value - 1]
        if pause.probability is None:
            return weights.bias + words
        probability = min(max(pause.probability, MIN_PROBABILITY), MAX_PROBABILITY)
        return weights.bias + weights.detector * _log_odds(probability) + words

    def _samples(self, milliseconds: float) -> int:
        return _samples(milliseconds, self._rate)


def _samples(milliseconds: float, rate: int) -> int:
    return math.ceil(milliseconds * rate / 1000)


def _silence_ms(threshold: float, constant: float, growth: float) -> float:
    """The silence at which the score reaches a threshold."""
    exponent = math.inf if threshold >= 1 else (_log_odds(threshold) - constant) / growth
    # The exponent is limited so that `exp` cannot overflow: 200 ms * e^13 is a day, longer than any pause.
    return MIN_SILENCE_MS * math.exp(min(exponent, 13.0))


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
