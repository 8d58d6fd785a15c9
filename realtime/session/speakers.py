"""Speaker labels of words: joins the engine's labels to words by sample position, and gives speakers their names.

`SpeakerTimeline` owns the labels of one session and is saved with it. The session core labels live words with it, and
uploads and local commands label theirs. The labels themselves are computed in the engine (`engine/server/speakers.py`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from msgspec.structs import replace

from engine import messages
from realtime.session.events import TimedWord

# Spans that are kept. Neighbours of the same speaker are one span, so this is more than an hour of conversation.
MAX_SPANS = 4096
# Word times are not exact: a word that ends this long after the last label has that label.
SLACK_SAMPLES = 1600
# If turns end where the speaker changes, a word that is farther than this from every label has no label.
LABEL_DISTANCE_SAMPLES = 8000
# An enrolled name that looks like the name of a speaker without one.
_NUMBERED = re.compile("Speaker ([1-9][0-9]*)")


@dataclass(slots=True)
class SpeakerTimeline:
    """The labels of one session, in session samples. A plain value: it is saved with the session."""

    # Decided spans (start, end, speaker, confidence) in order, without overlaps.
    decided: list[messages.LabelSpan] = field(default_factory=list)
    # The engine's best guess for the speech after them.
    guess: list[messages.LabelSpan] = field(default_factory=list)
    # The last state of the engine's labels, and the session sample at which its stream began.
    state: messages.Saved | None = None
    state_base: int = 0
    # No undecided label begins before this sample.
    settled: int = 0
    # Labels were switched on at this sample: there are none of earlier words.
    begins: int = 0
    # The engine has rebuilt the stream after the loss of another engine, and its labels are late.
    is_behind: bool = False

    @property
    def decided_until(self) -> int:
        """The sample up to which labels are decided."""
        return self.decided[-1][1] if self.decided else 0

    def add(self, labels: messages.Labels, base: int) -> None:
        """Add labels of the engine stream that began at session sample `base`.

        Labels that come a second time, after the loss of an engine, change nothing.
        """
        settled = self.settled
        for start, end, speaker, confidence in labels.decided:
            start, end = max(start + base, self.decided_until, settled), end + base
            if end <= start:
                continue
            last = self.decided[-1] if self.decided else None
            if last is not None and last[1] == start and last[2:] == (speaker, confidence):
                self.decided[-1] = (last[0], end, speaker, confidence)
            else:
                self.decided.append((start, end, speaker, confidence))
        del self.decided[:-MAX_SPANS]
        self.guess = [(start + base, end + base, *rest) for start, end, *rest in labels.guess]  # type: ignore[misc]
        self.is_behind = labels.is_behind
        if labels.settled:
            self.settled = max(self.settled, labels.settled + base)
        if labels.state is not None:
            self.state, self.state_base = labels.state, base

    def forget_before(self, sample: int) -> None:
        """Drop the labels before this sample: no word there will be labelled any more."""
        old = bisect_right(self.decided, sample, key=lambda span: span[1])
        del self.decided[: max(0, min(old, len(self.decided) - 1))]

    def is_decided(self, word: TimedWord) -> bool:
        """Whether the label of a word is decided, or the word comes before all labels."""
        middle = (word.start + word.end) // 2
        return middle < self.begins or (bool(self.decided) and middle <= self.decided_until + SLACK_SAMPLES)

    def has_final_label(self, word: TimedWord) -> bool:
        """Whether no later label can change the result of `with_final_label` for this word."""
        middle = (word.start + word.end) // 2
        known_until = max(self.begins, self.decided_until)
        return middle < known_until or middle + LABEL_DISTANCE_SAMPLES < self.settled

    def with_final_label(self, word: TimedWord) -> TimedWord:
        """The word with the label at its middle, or the nearest one within `LABEL_DISTANCE_SAMPLES`, if there is one.

        Once `has_final_label` is true, the result depends only on the word and the labels, not on the time of the call.
        """
        middle = (word.start + word.end) // 2
        after = bisect_right(self.decided, middle, key=lambda span: span[0])
        spans = self.decided[max(0, after - 1) : after + 1]
        near = [
            span for span in spans if span[0] - LABEL_DISTANCE_SAMPLES <= middle <= span[1] + LABEL_DISTANCE_SAMPLES
        ]
        return self._labelled(word, near) if near else word

    def with_decided_label(self, word: TimedWord) -> TimedWord:
        """The word with its label, if the label is decided."""
        return self._labelled(word, self.decided) if word.speaker is None and self.is_decided(word) else word

    def with_best_label(self, word: TimedWord) -> TimedWord:
        """The word with its decided label, or else with the best guess so far."""
        if word.speaker is not None:
            return word
        return self._labelled(word, self.decided if self.is_decided(word) else [*self.decided[-1:], *self.guess])

    def _labelled(self, word: TimedWord, spans: Sequence[messages.LabelSpan]) -> TimedWord:
        """The word with the label of the span at its middle, or of the nearest span."""
        middle = (word.start + word.end) // 2
        after = bisect_right(spans, middle, key=lambda span: span[0])
        near = spans[max(0, after - 1) : after + 1]
        if not near or middle < self.begins:
            return word
        _, _, speaker, confidence = min(near, key=lambda span: max(span[0] - middle, middle - span[1], 0))
        return replace(word, speaker=speaker, speaker_confidence=confidence)


def letter_name(speaker: int, names: Sequence[str] = ()) -> str:
    """The name of a speaker as OpenAI writes it: an enrolled name, or a capital letter that is no enrolled name."""
    if speaker < len(names):
        return names[speaker]
    number, letters = _free_number(speaker - len(names), map(speaker_number, names)), ""
    while number >= 0:
        letters = chr(ord("A") + number % 26) + letters
        number = number // 26 - 1
    return letters


def speaker_number(letters: Any) -> int | None:
    """The inverse of `letter_name` for capital letters; None for any other value."""
    if not isinstance(letters, str) or not letters.isascii() or not (letters.isalpha() and letters.isupper()):
        return None
    return reduce(lambda number, letter: 26 * number + ord(letter) - ord("A") + 1, letters, 0) - 1


def shown_name(speaker: int, names: Sequence[str] = ()) -> str:
    """The name of a speaker in subtitles and texts: an enrolled name, or `Speaker` with a number."""
    if speaker < len(names):
        return names[speaker]
    numbered = map(_NUMBERED.fullmatch, names)
    return f"Speaker {_free_number(speaker - len(names) + 1, (int(match[1]) for match in numbered if match))}"


def _free_number(number: int, taken: Iterable[int | None]) -> int:
    """The number after those that enrolled names look like, so that no two people have the same name."""
    for other in sorted({other for other in taken if other is not None}):
        number += other <= number
    return number


def speaker_of(words: Iterable[TimedWord]) -> int | None:
    """The speaker of most of these words; None if no word has a label."""
    labels = [word.speaker for word in words if word.speaker is not None]
    return max(dict.fromkeys(labels), key=labels.count) if labels else None
