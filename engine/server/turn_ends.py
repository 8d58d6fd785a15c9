"""Where turns end in a stream: found here by the rule of its gateway, from the same frames and with the same code.

The gateway asks for the text of a turn when it has heard of the turn's end. That may be late: the engine was busy, or
another one died and this one caught up. What the model hears as one utterance, and where a sentence ends, must not
depend on it. So the engine ends both by itself where the turn ends, and the gateway is only answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from audio.speech_edges import EdgeDetector, EdgeMemory, EdgeSettings, EdgeState, Fall
from engine.messages import Saved, Speech, TurnRule


class TurnEnds:
    """Of one stream."""

    def __init__(self, rule: TurnRule) -> None:
        self._rule = rule
        self._edges = EdgeDetector(_settings(rule))
        # The end of the last turn.
        self.last = 0

    def change(self, rule: TurnRule) -> None:
        """Judge by another rule from the next frame on; an open turn stays open."""
        self._rule = rule
        self._edges.settings = _settings(rule)

    def restart(self) -> None:
        """Text was asked for in the midst of a turn: it ends there."""
        self._edges.reset()

    def split(self, speech: Speech) -> Iterator[tuple[list[float], bool]]:
        """The frames in stretches, each with whether a turn ends with it."""
        edges, frame, start = self._edges, speech.frame_samples, 0
        edges.sample = speech.sample
        for number, probability in enumerate(speech.probabilities, 1):
            edge = edges.judge(probability, frame)
            if isinstance(edge, Fall):
                self.last = edge.sample
                yield speech.probabilities[start:number], True
                start = number
        if start < len(speech.probabilities):
            yield speech.probabilities[start:], False

    def save(self) -> Saved:
        state, *counts = astuple(self._edges.save())
        return {"rule": astuple(self._rule), "last": self.last, "state": state.name, "counts": counts}

    @classmethod
    def resumed(cls, saved: Saved) -> TurnEnds:
        turns = cls(TurnRule(*saved["rule"]))
        turns.last = saved["last"]
        turns._edges.load(EdgeMemory(EdgeState[saved["state"]], *saved["counts"]))
        return turns


def _settings(rule: TurnRule) -> EdgeSettings:
    return EdgeSettings(rule.threshold, rule.min_speech_samples, rule.silence_samples, prefix_samples=0)
