"""What a model thinks of a window before it reads it: whether anybody speaks, and in which language.

A stream whose language was not told has it found out in the first window that is long enough to tell. From then on it
stays: one short word that sounds like another language would otherwise change the language of what is said in it, and
with it words that were right. Whoever changes the language tells it, or opens another stream. Where the model is not
sure, its best guess counts for the one utterance, and the next one is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.messages import Saved
from engine.models.seq2seq import Encoded, SpeechModel
from engine.options import Options
from engine.runner.windowed.stability import Policy

# Positions of speech in which a language can be told from others, and how likely it must be then to stay.
# Seen with Whisper tiny and the voices of espeak-ng in German, French, Spanish and Italian: of two seconds one was told
# right, of four seconds all were.
TELLING_POSITIONS = 50
SURE_LANGUAGE = 0.5
# Where the model says with this probability that nobody speaks, doubtful words are not believed. OpenAI's own bound.
NOBODY_SPEAKS = 0.6
# Where it has heard an utterance to its end and says so with less than this, somebody speaks, and words are believed
# down to a lower mean log-probability. Measured with whisper-tiny: of 300 prompts in five languages three are not below
# it; of 28 noises in two lengths only one piece of music is, whose notes have -2.0. Of these prompts 21 were below the
# bound for all others, and three are below this one, taken for other words of their own language or another.
SOMEBODY_SPEAKS = 0.3
SPOKEN_DOUBT = -1.5


@dataclass(frozen=True, slots=True)
class Judgement:
    no_speech: float
    # How likely each of the model's languages is, if it is one of them.
    languages: list[float]


def judge(model: SpeechModel, encoded: Encoded) -> list[Judgement]:
    """One for each row, from the first token that the model would say."""
    judging = model.judging
    assert judging is not None, "this model cannot say"
    rows, device = len(encoded.lengths), encoded.keys.device
    tokens = torch.full((rows, 1), judging.start, device=device)
    hidden, _ = model.decode(tokens, torch.zeros_like(tokens), model.new_state(rows, 1), encoded)
    logits = model.logits(hidden[:, 0]).float()
    nobody = logits.softmax(dim=-1)[:, judging.no_speech].tolist()
    spoken = logits[:, list(judging.languages)].softmax(dim=-1).tolist()
    return [Judgement(*each) for each in zip(nobody, spoken, strict=True)]


@dataclass(slots=True)
class Mind:
    """What a stream was told, and what its model has found out."""

    task: str
    prompt: list[int]
    # Codes that may be spoken.
    languages: Sequence[str]
    # The code of what is spoken; empty if that is not known, or goes without saying.
    language: str = ""
    # The language stays.
    settled: bool = False
    # How likely nobody speaks in the window, if the model says so.
    no_speech: float | None = None

    @classmethod
    def of(cls, options: Options, given: Mapping[str, str], prompt: list[int]) -> Mind:
        languages = given["languages"].split(",") if "languages" in given else options.languages
        told = given.get("language", "")
        settled = bool(told) or not options.detects_language
        return cls(given.get("task", ""), prompt, languages, told, settled)

    def waits(self, positions: int) -> bool:
        """Whether a window of so many positions, to which more will come, is too short to tell its language."""
        return not self.settled and positions < TELLING_POSITIONS

    def hear(self, judgement: Judgement, options: Options, positions: int) -> None:
        self.no_speech = judgement.no_speech
        if self.settled:
            return
        likely = dict(zip(options.languages, judgement.languages, strict=True))
        self.language = max(self.languages, key=lambda code: likely[code])
        share = likely[self.language] / sum(likely[code] for code in self.languages)
        self.settled = share >= SURE_LANGUAGE and positions >= TELLING_POSITIONS

    def doubt(self, policy: Policy, to_end: bool) -> float:
        """Mean log-probability below which an utterance is taken for noise. How unsure a translation is says little
        about what was heard. `to_end`: it was heard to its end."""
        nobody = math.nan if self.no_speech is None else self.no_speech
        if nobody > NOBODY_SPEAKS:
            return policy.sure
        if self.task:
            return -math.inf
        return min(policy.doubt, SPOKEN_DOUBT) if to_end and nobody < SOMEBODY_SPEAKS else policy.doubt

    def save(self) -> Saved:
        return {"language": self.language, "settled": self.settled, "no_speech": self.no_speech}

    def resume(self, saved: Saved) -> None:
        self.language, self.settled, self.no_speech = saved["language"], saved["settled"], saved["no_speech"]
