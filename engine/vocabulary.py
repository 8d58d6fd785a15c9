"""What the tokens of a model stand for. Weights bring it, runners and the core read it."""

from __future__ import annotations


class Vocabulary:
    """The bytes each token stands for; b"" for tokens that are not text.

    `word_marker` is the token by which a model announces a word, if it has one: the word's time is the marker's.
    """

    __slots__ = ("blanks", "pieces", "texts", "word_marker")

    def __init__(self, pieces: list[bytes], word_marker: int | None = None) -> None:
        self.pieces = pieces
        self.word_marker = word_marker
        # Tokens that are whole characters by themselves need no byte handling at all.
        self.texts = [_whole_text(piece) for piece in pieces]
        # Tokens that say nothing at all.
        self.blanks = frozenset(token for token, piece in enumerate(pieces) if not piece and token != word_marker)


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
