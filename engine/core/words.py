"""Text and words from tokens: `Detokenizer` joins the bytes of tokens to text, `WordBuilder` groups text into words.

`engine/core/stream.py` uses them for the text of a stream while it grows; `words_of` makes the words of a text that is
complete (`engine/server/revisions.py`).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable

from engine.core.plan import TimedToken
from engine.messages import TokenLogProbability, Word
from engine.spec import Vocabulary

# A longer word is divided: a script without spaces would otherwise make one endless word.
MAX_WORD_CHARACTERS = 64


class Detokenizer:
    """Decodes tokens to text one by one. A character may consist of bytes of several tokens."""

    __slots__ = ("_pieces", "_texts", "tail")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._texts = vocabulary.texts
        self.tail = b""  # bytes of an incomplete character

    def push(self, token: int) -> str:
        """Return the text that the token completes; may be empty."""
        if not self.tail:
            text = self._texts[token]
            if text is not None:
                return text
        # A blank between the bytes of one character adds no bytes and must not end the character.
        undecoded = self.tail + self._pieces[token]
        text, used = utf_8_decode(undecoded, "replace", False)
        self.tail = undecoded[used:]
        return text

    def flush(self) -> str:
        """Return a replacement character for an incomplete character, or an empty string."""
        text, _ = utf_8_decode(self.tail, "replace", True)
        self.tail = b""
        return text


class WordBuilder:
    """Groups text into words with times in samples. A word begins at a marker or at text that starts with a space."""

    __slots__ = ("_end", "_log_probabilities", "_marked", "_start", "_text")

    def __init__(self) -> None:
        # The word in progress: its text and its first and last sample.
        self._text = ""
        self._start = 0
        self._end = 0
        # Sample of a word marker whose word has no text yet.
        self._marked: int | None = None
        self._log_probabilities: list[TokenLogProbability] = []

    def mark(self, sample: int) -> Word | None:
        """A word marker: the next word begins at `sample`. Returns the word that this completes."""
        word = self.flush()
        self._marked = sample
        return word

    def push(self, text: str, start: int, end: int) -> Word | None:
        """Add text of the samples [start, end); returns the word that this completes."""
        completed = None
        if self._text and (text[0].isspace() or len(self._text) >= MAX_WORD_CHARACTERS):
            completed = self.flush()
        if not self._text:
            text = text.lstrip()
            if not text:
                return completed
            self._start = start if self._marked is None else self._marked
            self._marked = None
        # Punctuation is not spoken: the end of a word is that of its last letters.
        if not any(map(str.isalnum, self._text)) or any(map(str.isalnum, text)):
            self._end = end if end > self._start else self._start
        self._text += text
        return completed

    def note_log_probability(self, piece: bytes, log_probability: float) -> None:
        """Add the log probability of the token whose text was pushed last, and its bytes."""
        self._log_probabilities.append((piece, log_probability))

    @property
    def unfinished(self) -> tuple[str, int, int, int | None, list[TokenLogProbability]]:
        """The word in progress: text, start, end, sample of a word marker, and its tokens' log probabilities."""
        return self._text, self._start, self._end, self._marked, list(self._log_probabilities)

    def resume(
        self, text: str, start: int, end: int, marked: int | None, log_probabilities: list[TokenLogProbability]
    ) -> None:
        """Restore the word in progress from the value of `unfinished`."""
        self._text, self._start, self._end, self._marked = text, start, end, marked
        self._log_probabilities = [(piece, log_probability) for piece, log_probability in log_probabilities]

    def flush(self) -> Word | None:
        """Complete the word in progress, if there is one."""
        if not self._text:
            return None
        word = Word(self._text.rstrip(), self._start, self._end, self._log_probabilities)
        self._text, self._log_probabilities = "", []
        return word


def words_of(tokens: Iterable[TimedToken], vocabulary: Vocabulary, sample_at: Callable[[float], int]) -> list[Word]:
    """The words of a complete text. `sample_at` converts positions to samples."""
    detokenizer, builder, words = Detokenizer(vocabulary), WordBuilder(), list[Word]()
    for timed in tokens:
        text = detokenizer.push(timed.token)
        if text:
            word = builder.push(text, sample_at(timed.start), sample_at(timed.end))
            words += [word] if word is not None and word.text else []
        if timed.log_probability is not None:
            builder.note_log_probability(vocabulary.pieces[timed.token], timed.log_probability)
    word = builder.flush()
    return [*words, word] if word is not None and word.text else words
