"""What clients without resuming saw is counted."""

from __future__ import annotations

from benchmarks.clients import PlainSession, plain_summary


def test_sessions_that_ended_without_being_told_are_seen() -> None:
    drained = PlainSession(None, words=3, told_at=1.0, code=1012, drained_s=2.5)
    cut = PlainSession(0.5, words=2, turns={"item"}, code=1006)
    figures = plain_summary([([drained, cut, PlainSession(1.0)], 4)])
    assert (figures["sessions"], figures["closed_with_1012"], figures["of_them_told_before"]) == (3, 1, 1)
    assert (figures["closed_otherwise"], figures["turns_cut"], figures["words"]) == (1, 1, 5)
    assert (figures["drained_s_max"], figures["reconnected_s_max"], figures["refused"]) == (2.5, 1.0, 4)
