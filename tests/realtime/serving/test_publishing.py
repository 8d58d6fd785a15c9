"""What viewers of a published session are told."""

from __future__ import annotations

import msgspec

from realtime.serving.publishing import (
    MAX_CHARACTERS,
    MAX_LINE_CHARACTERS,
    MAX_LINES,
    MAX_OPEN_TURNS,
    Added,
    Current,
    Finished,
    PublishedTranscript,
    SessionPublication,
)
from realtime.session.events import Completed, Delta, TimedWord
from realtime.session.settings import make_formatting
from realtime.workers.worker_link import LONGEST_LINE


def test_viewers_read_finals_as_the_client_asked_for() -> None:
    publication = SessionPublication(None, "", "s", 16_000)
    words = tuple(
        TimedWord(f" {text}", n * 8_000, (n + 1) * 8_000) for n, text in enumerate("twenty five dollars".split())
    )
    event = Completed("i", "twenty five dollars", words, 0, 24_000, 3, 0.0)
    (written,) = publication.updates(event, make_formatting(smart=True))
    (spoken,) = publication.updates(event, make_formatting())
    assert isinstance(written, Finished) and isinstance(spoken, Finished)
    assert (spoken.line.text, written.line.text) == ("twenty five dollars", "$25")
    assert [(text, start, end) for text, start, end in written.line.words] == [("$25", 0.0, 1.5)]


def test_words_that_a_client_replaces_by_long_ones_fit_into_a_message_between_processes() -> None:
    publication, transcript = SessionPublication(None, "", "s", 16_000), PublishedTranscript()
    formatting = make_formatting(replace=[("a", "\N{GRINNING FACE}" * 100)])
    for letter in ("a", "\N{HIRAGANA LETTER NO}"):
        words = tuple(TimedWord(f" {letter}", n * 16_000, (n + 1) * 16_000) for n in range(900_000, 901_000))
        text = " ".join([letter] * len(words))
        (whole,) = publication.updates(Completed("i", text, words, 0, 24_000, 3, 0.0), formatting)
        # Short text with many words.
        (short,) = publication.updates(Completed("i", ".", words, 0, 24_000, 3, 0.0), make_formatting())
        long = tuple(TimedWord(100 * "\N{GRINNING FACE}", word.start, word.end) for word in words)
        (added,) = publication.updates(Delta("i", text, long), formatting)
        assert isinstance(whole, Finished) and isinstance(short, Finished) and isinstance(added, Added)
        assert 0 < sum(len(word) for word, _, _ in whole.line.words) <= MAX_LINE_CHARACTERS
        for turn in range(MAX_LINES):
            final = (whole if turn < MAX_LINES // 2 else short).line
            transcript.apply(Finished(msgspec.structs.replace(final, id=f"i{turn}")))
        for turn in range(MAX_OPEN_TURNS):
            for _ in range(3):
                transcript.apply(Added(f"o{turn}", added.text, added.words))
        state = transcript.save()
        assert sum(len(word) for line in state.lines for word, _, _ in line.words) <= MAX_CHARACTERS
        assert all(sum(len(word) for word, _, _ in line.words) <= MAX_LINE_CHARACTERS for line in state.open)
        assert len(msgspec.json.encode(Current("key", "talk", state))) < LONGEST_LINE // 2
