"""Tokens to text and words, one token at a time, over a bounded tail.

A stream keeps at most three undecoded bytes and one unfinished word, however long its transcript gets.
"""

from __future__ import annotations

from codecs import utf_8_decode

from engine.messages import Chance, Word
from engine.vocabulary import Vocabulary

# A script without spaces would otherwise make one endless word.
MAX_WORD_CHARACTERS = 64


class Detokenizer:
    """Incremental: any split of a token row gives the same text."""

    __slots__ = ("_vocabulary", "_whole", "tail")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._whole = vocabulary.texts
        self.tail = b""  # of an unfinished character

    def push(self, token: int) -> str:
        if not self.tail:
            text = self._whole[token]
            if text is not None:
                return text
        # A blank between the bytes of one character must not break the character.
        text, used = utf_8_decode(self.tail + self._vocabulary.pieces[token], "replace", False)
        self.tail = (self.tail + self._vocabulary.pieces[token])[used:]
        return text

    def flush(self) -> str:
        """What is left of an unfinished character, as a replacement character."""
        text, _ = utf_8_decode(self.tail, "replace", True)
        self.tail = b""
        return text


class WordBuilder:
    """Groups text into words with times. A word begins at a marker or at a piece that starts with a space."""

    __slots__ = ("_chances", "_end", "_marked", "_start", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._end = 0
        self._marked: int | None = None
        self._chances: list[Chance] = []

    def mark(self, sample: int) -> Word | None:
        """The model announced a word here; the word before it is complete."""
        word = self.flush()
        self._marked = sample
        return word

    def push(self, text: str, start: int, end: int) -> Word | None:
        """Add text heard over samples [start, end); returns the word that this completes."""
        complete = None
        if self._text and (text[0].isspace() or len(self._text) >= MAX_WORD_CHARACTERS):
            complete = self.flush()
        if not self._text:
            text = text.lstrip()
            if not text:
                return complete
            self._start = start if self._marked is None else self._marked
            self._marked = None
        # Marks are not spoken: a word ends with its letters, wherever the model looked when it put the mark.
        if not any(map(str.isalnum, self._text)) or any(map(str.isalnum, text)):
            self._end = end if end > self._start else self._start
        self._text += text
        return complete

    def note_chance(self, piece: bytes, log_probability: float) -> None:
        """How likely the token was that was pushed last."""
        self._chances.append((piece, log_probability))

    @property
    def unfinished(self) -> tuple[str, int, int, int | None, list[Chance]]:
        """The word in progress, where an announced one begins, and how likely its tokens were."""
        return self._text, self._start, self._end, self._marked, list(self._chances)

    def resume(self, text: str, start: int, end: int, marked: int | None, chances: list[Chance]) -> None:
        self._text, self._start, self._end, self._marked = text, start, end, marked
        self._chances = [(piece, log_probability) for piece, log_probability in chances]

    def flush(self) -> Word | None:
        """Complete the word in progress, if there is one."""
        if not self._text:
            return None
        word = Word(self._text.rstrip(), self._start, self._end, self._chances)
        self._text, self._chances = "", []
        return word
