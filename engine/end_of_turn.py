"""Decides in a pause whether the speaker's turn has ended: from the turn detector, the words so far, and the silence.

`Judge` has the rule, without side effects. The gateway's session core calls it (`realtime/session/boundaries.py`); the
engine's speech track knows none of it. A pause is a value (`Pause`); its methods return a new one, and know neither
clock nor model. Time is a sample count. The detector is asked shortly before its answer could end the turn
(`Eagerness.questions`) and again while the pause lasts, and words may arrive at any time. What is known gives the
log-odds that the turn is over:

    log-odds = bias + detector's log-odds * weight + what the words tell + growth * ln(silence / 200 ms)

It grows with the silence, so every threshold is reached at one exact sample: at once (end now), later (wait), or not
before `Eagerness.timeout_ms` (wait long). `advance` finds that sample, and the same one for any division of the silence
into pieces. It never passes a question without an answer. A replay is given the recorded answers and words at their
samples, and finds the same ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto

# Silence before which no turn ends: the text of the pause is completed there.
LEAST_MS = 200
# The detector is first asked this long before the earliest moment at which its answer could end the turn, then again
# and again while the pause lasts.
ANSWER_MS, ASK_AGAIN_MS = 100, 400
MOST_QUESTIONS = 3

SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")
# After these words and marks a sentence goes on.
_GOES_ON = (",", ";", ":", "-", "–", "—", "...", "…", "、", "，")
_UNFINISHED_WORDS = frozenset(
    "a an the and or but nor so because if that which who whose when while where than as of to in on at by for from "
    "with without about into onto over under between after before during until since through my your his her its our "
    "their this these those is are was were be been am has have had do does did will would shall should can could may "
    "might must not very i'm we're you're they're it's i we you they he she uh um er erm hmm mm like well".split()
)
_HESITATIONS = frozenset("uh um er erm hmm mm".split())
_CLOSING = " \n\"')”’"


class Words(Enum):
    """Evidence from the last words of a turn about its end."""

    NONE = auto()  # no words yet
    UNFINISHED = auto()  # a comma, or a word after which something follows
    OPEN = auto()  # neither
    FINISHED = auto()  # the end of a sentence


def ends_sentence(text: str) -> bool:
    """Whether the text ends with a complete sentence."""
    return text.rstrip(_CLOSING).endswith(SENTENCE_ENDS) and not text.rstrip().endswith(("...", "…"))


def tell(text: str) -> Words:
    """What the text of a turn tells about its end. The list of words is English; marks count in every language."""
    bare = text.rstrip(_CLOSING)
    if not bare:
        return Words.NONE
    last = bare.split()[-1].lower().replace("’", "'").strip(".,?!…\"'(")
    if bare.endswith(_GOES_ON) or last in _HESITATIONS:
        return Words.UNFINISHED
    if ends_sentence(text):
        return Words.FINISHED
    return Words.UNFINISHED if last in _UNFINISHED_WORDS else Words.OPEN


@dataclass(frozen=True, slots=True)
class Weights:
    """The calibrated score, in log-odds. `growth` is for each e-fold of the silence."""

    bias: float
    detector: float
    words: tuple[float, float, float, float]
    growth: float


# Fitted with training/turn_weights.py; docs/turns.md says on what.
FUSED = Weights(bias=-3.17, detector=0.3, words=(-0.56, -0.05, 0.06, 0.55), growth=2.82)
# Before the first answer, and without a detector. Words that are neither finished nor unfinished count at most as much
# as finished ones.
WORDS_ONLY = Weights(bias=-2.98, detector=0.0, words=(-0.61, -0.44, 0.39, 0.39), growth=2.37)

# A probability beyond these tells no more: the detector gives at most 0.99.
SUREST, LEAST_SURE = 0.99, 0.001

# Where no detector is loaded: silence that ends a turn after a complete and after an incomplete sentence.
FINISHED_MS = {"high": 300, "medium": 500, "auto": 500, "low": 900}
UNFINISHED_MS = {"high": 2000, "medium": 4000, "auto": 4000, "low": 8000}


@dataclass(frozen=True, slots=True)
class Eagerness:
    """When a turn ends: at this probability, or after `timeout_ms` of silence. At the lower `eager` probability (if
    any) an early end is announced, which speech may still take back. A threshold of 1 is never reached.

    Without a detector, `finished_ms` and `unfinished_ms` of silence end a turn, if they are given; else the words' own
    score does.
    """

    threshold: float
    timeout_ms: int
    eager: float | None = None
    finished_ms: int | None = None
    unfinished_ms: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"the threshold for the end of a turn must be above 0 and at most 1, not {self.threshold}")
        if self.timeout_ms < LEAST_MS:
            raise ValueError(f"the timeout for the end of a turn must be at least {LEAST_MS} ms, not {self.timeout_ms}")
        if self.eager is not None and not 0 < self.eager <= self.threshold:
            raise ValueError(
                f"the eager threshold must be above 0 and at most the threshold {self.threshold}, not {self.eager}"
            )

    def questions(self, sample_rate: int) -> tuple[int, ...]:
        """The samples of silence after which the detector is asked, if the pause lasts that long. None, if its answers
        could not end the turn before the timeout does."""
        best = FUSED.bias + FUSED.detector * _log_odds(SUREST) + max(FUSED.words)
        first_ms = max(_silence_ms(self.eager or self.threshold, best, FUSED.growth) - ANSWER_MS, LEAST_MS)
        moments = [first_ms + ASK_AGAIN_MS * number for number in range(MOST_QUESTIONS)]
        return tuple(_samples(moment, sample_rate) for moment in moments if moment < self.timeout_ms)


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
    """Thresholds as numbers. Raises ValueError, with a sentence for the client."""
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


# A pause.


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in an open turn. `fell` is the sample at which speech ended, `now` the end of the silence so far."""

    fell: int
    now: int
    words: Words = Words.NONE
    # The detector's last answer, the number of its answers, and whether it has been asked for another.
    probability: float | None = None
    answers: int = 0
    asked: bool = False
    # The early end was announced.
    eager: bool = False
    # The sample at which the turn ended.
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The detector must be asked about the audio up to `sample`."""

    sample: int


@dataclass(frozen=True, slots=True)
class EagerEnd:
    """The turn has probably ended; `confidence` is the score at `sample`."""

    sample: int
    confidence: float


@dataclass(frozen=True, slots=True)
class End:
    """The turn has ended at `sample`. `timeout`: by the length of the silence alone."""

    sample: int
    confidence: float
    timeout: bool


Sign = Ask | EagerEnd | End


class Judge:
    """The rule with its settings. `learnt`: a detector is loaded and will answer."""

    def __init__(self, eagerness: Eagerness, sample_rate: int, *, learnt: bool) -> None:
        self._eagerness = eagerness
        self._rate = sample_rate
        self._learnt = learnt
        self._questions = eagerness.questions(sample_rate) if learnt else ()

    def begin(self, fell: int, text: str) -> Pause:
        """Speech fell at sample `fell`; `text` is the text of the turn so far."""
        return Pause(fell, fell, tell(text))

    def hear_words(self, pause: Pause, text: str) -> Pause:
        """More text of the turn has arrived; it counts from `pause.now` on."""
        return replace(pause, words=tell(text))

    def hear_answer(self, pause: Pause, probability: float | None) -> Pause:
        """The detector's answer to the open question; None if it has none: the answer before it counts, and without
        any the words and the silence decide as if there were no detector."""
        if not pause.asked:
            raise ValueError("the turn detector was not asked")
        known = pause.probability if probability is None else probability
        return replace(pause, probability=known, answers=pause.answers + 1, asked=False)

    def confidence(self, pause: Pause, sample: int) -> float:
        """The probability that the turn is over, if the silence lasts until `sample`."""
        silence = max(sample - pause.fell, 1) * 1000 / self._rate
        return _sigmoid(self._constant(pause) + self._weights(pause).growth * math.log(silence / LEAST_MS))

    def advance(self, pause: Pause, sample: int) -> tuple[Pause, list[Sign]]:
        """The silence lasts until `sample` at least. Stops at a question until it is answered, and at the end."""
        signs: list[Sign] = []
        while pause.ended is None and not pause.asked:
            end, timeout = self._end(pause)
            early = self._eager(pause)
            ask = self._question(pause)
            due = min(at for at in (end, early, ask) if at is not None)
            if due > sample:
                break
            pause = replace(pause, now=max(pause.now, due))
            if ask == due:
                pause = replace(pause, asked=True)
                signs.append(Ask(due))
            elif early == due and end > due:
                pause = replace(pause, eager=True)
                signs.append(EagerEnd(due, self.confidence(pause, due)))
            else:
                pause = replace(pause, ended=due)
                signs.append(End(due, self.confidence(pause, due), timeout))
        if pause.ended is None and not pause.asked:
            pause = replace(pause, now=max(pause.now, sample))
        return pause, signs

    def _question(self, pause: Pause) -> int | None:
        if pause.answers >= len(self._questions):
            return None
        return max(pause.fell + self._questions[pause.answers], pause.now)

    def _end(self, pause: Pause) -> tuple[int, bool]:
        """The sample at which the turn ends if nothing changes, and whether only the silence ends it."""
        chosen = self._eagerness
        timeout = max(pause.fell + self._samples(chosen.timeout_ms), pause.now)
        unknown = not self._learnt or (pause.answers > 0 and pause.probability is None)
        if unknown and chosen.finished_ms is not None and chosen.unfinished_ms is not None:
            finished = pause.words is Words.FINISHED
            wait = self._samples(chosen.finished_ms if finished else chosen.unfinished_ms)
            return max(pause.fell + wait, pause.now), not finished
        reached = self._reached(pause, chosen.threshold)
        return (reached, False) if reached < timeout else (timeout, True)

    def _eager(self, pause: Pause) -> int | None:
        if self._eagerness.eager is None or pause.eager:
            return None
        return self._reached(pause, self._eagerness.eager)

    def _reached(self, pause: Pause, threshold: float) -> int:
        """The sample at which the score reaches a threshold, if nothing changes."""
        wait_ms = _silence_ms(threshold, self._constant(pause), self._weights(pause).growth)
        return max(pause.fell + self._samples(max(wait_ms, LEAST_MS)), pause.now)

    def _weights(self, pause: Pause) -> Weights:
        return WORDS_ONLY if pause.probability is None else FUSED

    def _constant(self, pause: Pause) -> float:
        weights = self._weights(pause)
        told = weights.words[pause.words.value - 1]
        if pause.probability is None:
            return weights.bias + told
        sure = min(max(pause.probability, LEAST_SURE), SUREST)
        return weights.bias + weights.detector * _log_odds(sure) + told

    def _samples(self, milliseconds: float) -> int:
        return _samples(milliseconds, self._rate)


def _samples(milliseconds: float, rate: int) -> int:
    return math.ceil(milliseconds * rate / 1000)


def _silence_ms(threshold: float, constant: float, growth: float) -> float:
    """The silence at which the score reaches a threshold."""
    exponent = math.inf if threshold >= 1 else (_log_odds(threshold) - constant) / growth
    # No silence is longer than a day.
    return LEAST_MS * math.exp(min(exponent, 13.0))


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
