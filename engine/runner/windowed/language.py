"""Detects language and speech in a window before it is decoded (`judge`); keeps a stream's language (`LanguageState`).

The windowed runner calls it for models with `detection_tokens`. Without a given language, the language is detected in
the first window that is long enough. Then it stays: otherwise one short word that sounds like another language would
change the language of the text, and words that were right. To change it, a client sets it or opens another stream.
While the model is not sure, its best guess is used for one utterance, and detection is repeated in the next one.
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

# Positions of speech needed to detect a language (four seconds), and the probability from which on it stays.
LANGUAGE_POSITIONS = 50
SURE_LANGUAGE = 0.5
# Above this probability of no speech, doubtful words are taken for noise. OpenAI's own threshold.
NO_SPEECH_PROBABILITY = 0.6
# Below this probability of no speech, an utterance that was read to its end is speech. Then its words are accepted down
# to the mean log-probability SPOKEN_DOUBT: short prompts of non-native speakers are often that unsure.
SPEECH_PROBABILITY = 0.3
SPOKEN_DOUBT = -1.5


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the model detected in a window."""

    # Probability that the window has no speech.
    no_speech: float
    # Probability of each of the model's languages, in the order of its options.
    languages: list[float]


def judge(model: SpeechModel, encoded: Encoded) -> list[Judgement]:
    """One judgement per row, from the model's first token."""
    detection = model.detection_tokens
    assert detection is not None, "this model cannot detect language and speech"
    rows, device = len(encoded.lengths), encoded.keys.device
    tokens = torch.full((rows, 1), detection.start, device=device)
    hidden, _ = model.decode(tokens, torch.zeros_like(tokens), model.new_state(rows, 1), encoded)
    logits = model.logits(hidden[:, 0]).float()
    no_speech = logits.softmax(dim=-1)[:, detection.no_speech].tolist()
    spoken = logits[:, list(detection.languages)].softmax(dim=-1).tolist()
    return [Judgement(*each) for each in zip(no_speech, spoken, strict=True)]


@dataclass(slots=True)
class LanguageState:
    """The language options of a stream, and what the model has detected."""

    task: str
    prompt: list[int]
    # Codes of the languages to choose from.
    languages: Sequence[str]
    # Code of the spoken language; empty if unknown, or if the model has only one.
    language: str = ""
    # The language was given or detected for sure, and is not detected any more.
    settled: bool = False
    # Probability that the window has no speech, if the model detects that.
    no_speech: float | None = None

    @classmethod
    def of(cls, options: Options, given: Mapping[str, str], prompt: list[int]) -> LanguageState:
        languages = given["languages"].split(",") if "languages" in given else options.languages
        language = given.get("language", "")
        settled = bool(language) or not options.detects_language
        return cls(given.get("task", ""), prompt, languages, language, settled)

    def waits(self, positions: int) -> bool:
        """Whether a growing window of this many positions is still too short to detect its language."""
        return not self.settled and positions < LANGUAGE_POSITIONS

    def update(self, judgement: Judgement, options: Options, positions: int) -> None:
        """Use what was detected in a window of this many positions."""
        self.no_speech = judgement.no_speech
        if self.settled:
            return
        probabilities = dict(zip(options.languages, judgement.languages, strict=True))
        self.language = max(self.languages, key=lambda code: probabilities[code])
        share = probabilities[self.language] / sum(probabilities[code] for code in self.languages)
        self.settled = share >= SURE_LANGUAGE and positions >= LANGUAGE_POSITIONS

    @property
    def finds_no_speech(self) -> bool:
        """Whether the window probably has no speech."""
        return self.no_speech is not None and self.no_speech > NO_SPEECH_PROBABILITY

    def doubt(self, policy: Policy, to_end: bool, is_long: bool) -> float:
        """Mean log-probability below which an utterance is taken for noise. `to_end`: the utterance was read to its
        end. `is_long`: it is long, which noise rarely is; this counts if the model does not detect speech. The
        log-probabilities of a translation say little about the audio, so there is no limit."""
        if self.finds_no_speech:
            return policy.sure
        if self.task:
            return -math.inf
        is_speech = is_long if self.no_speech is None else self.no_speech < SPEECH_PROBABILITY
        return min(policy.doubt, SPOKEN_DOUBT) if to_end and is_speech else policy.doubt

    def save(self) -> Saved:
        return {"language": self.language, "settled": self.settled, "no_speech": self.no_speech}

    def resume(self, saved: Saved) -> None:
        self.language, self.settled, self.no_speech = saved["language"], saved["settled"], saved["no_speech"]
