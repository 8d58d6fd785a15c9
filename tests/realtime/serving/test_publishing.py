"""What viewers of a published session are told."""

from __future__ import annotations

from realtime.serving.publishing import Finished, SessionPublication
from realtime.session.events import Completed, TimedWord
from realtime.session.text_options import make_formatting


def test_viewers_read_finals_as_the_client_asked_for() -> None:
    publication = SessionPublication(None, "", "s", 16_000)
    words = tuple(
        TimedWord(f" {text}", n * 8_000, (n + 1) * 8_000) for n, text in enumerate("twenty five dollars".split())
    )
    event = Completed("i", "twenty five dollars", words, 0, 24_000, 3, 0.0)
    (written,) = publication._updates(event, make_formatting(smart=True))
    (spoken,) = publication._updates(event, make_formatting())
    assert isinstance(written, Finished) and isinstance(spoken, Finished)
    assert (spoken.line.text, written.line.text) == ("twenty five dollars", "$25")
    assert [(text, start, end) for text, start, end in written.line.words] == [("$25", 0.0, 1.5)]
