"""One text out of many utterances: marks and capitals between them. Pure.

A model that hears an utterance to its end puts a full stop there, for all it knows: a pause in the middle of a sentence
sounds like its end until somebody speaks on. So marks behind the last word stay open. The next utterance is heard
together with the end of this one and goes on from its last word, and so the model says itself whether a mark belongs
between them, and how the next word is written. If the end of this one was not heard with the next, or if a turn ended
between them, the marks stand, and a sentence begins behind them. Words before a full stop at a pause that the model
does not doubt are shown at once; the mark itself stays open even then, or a model that has ended its sentence too early
would have nothing more to say while the speaker goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import TimedToken
from engine.runner.windowed.stability import Heard, Policy, is_mark, starts_word

_SENTENCE_ENDS = (b".", b"?", b"!")
# Log-probability from which on the end of a sentence at a pause is believed. Measured with moonshine-tiny: whole clips
# have 7 of 8 ends above it, and 8 of 33 below.
SURE_END = -0.12


def before_marks(new: list[Heard], count: int, pieces: list[bytes]) -> int:
    """How many of the first `count` tokens there are without the marks at their end: a mark goes out with the word
    behind it, for which nobody has to wait."""
    while count and is_mark(pieces[new[count - 1].token]):
        count -= 1
    return count


def surely_ends(new: list[Heard], pieces: list[bytes], policy: Policy) -> bool:
    """Whether words that were heard up to a pause are a sentence that has ended, beyond doubt."""
    if not new or not pieces[new[-1].token].endswith(_SENTENCE_ENDS):
        return False
    return new[-1].log_probability >= SURE_END and all(heard.log_probability >= policy.sure for heard in new)


class Seams:
    """What stands between two utterances of a stream."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        tokens = {piece: token for token, piece in enumerate(pieces)}
        raised = {token: tokens.get(piece[:1] + piece[1:2].upper() + piece[2:]) for token, piece in enumerate(pieces)}
        # Tokens that begin a word, and the same with a capital.
        self._capitals = {
            token: capital
            for token, capital in raised.items()
            if capital is not None and capital != token and starts_word(pieces[token])
        }

    def prefix(self, before: Sequence[int], marks: list[TimedToken], own: list[int]) -> list[int]:
        """Text to go on from: the end of the last utterance as far as it is heard, the marks behind it that were said,
        and this utterance's own."""
        if before:
            return [*before, *(timed.token for timed in marks), *own]
        while own and is_mark(self._pieces[own[0]]):  # it belongs to words that are not heard
            own = own[1:]
        return own

    def join(
        self, marks: list[TimedToken], new: list[Heard], pending: bool, heard_on: bool
    ) -> tuple[list[TimedToken], list[Heard]]:
        """The first words of an utterance settle which of the last one's marks stand, and how they are written.

        `pending`: the marks have not been said yet. `heard_on`: the model went on from the words before them, without
        them. Then it has said itself what stands there, unless it begins a sentence and says nothing of the last.
        """
        says_mark = is_mark(self._pieces[new[0].token])
        if pending and heard_on and (says_mark or not self._begins_sentence(new[0])):
            return [], new
        return marks, self.begun(marks[-1].token, new) if marks else new

    def begun(self, last: int, new: list[Heard]) -> list[Heard]:
        """The words behind the token `last`: with a capital if that is a full stop, as far as there is a token for it.
        Behind a question somebody may go on, as here: "Why? he asked"."""
        if not self._pieces[last].endswith(b"."):
            return new
        token = self._capitals.get(new[0].token, new[0].token)
        return [Heard(token, new[0].peak, new[0].log_probability), *new[1:]]

    def _begins_sentence(self, first: Heard) -> bool:
        """Whether a word is written as at the beginning of a sentence. "I" and names always are: of these the
        vocabulary has no other form."""
        return first.token in self._capitals.values() and self._pieces[first.token] != b" I"
