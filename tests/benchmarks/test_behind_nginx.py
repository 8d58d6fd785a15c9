"""Words of rounds are compared with those of calm rounds, and what plain clients saw is counted."""

from __future__ import annotations

from typing import Any

from benchmarks.behind_nginx import PlainClient, PlainSession, RoundClient, plain_figures, word_figures
from realtime.client.wire_client import COMPLETED


def test_disturbed_rounds_are_compared_with_the_usual_calm_round() -> None:
    said = ["a b", "A b.", "a b", "a c", "a", "a b"]
    rounds = [((100.0 * number, 100.0 * number + 50.0), text) for number, text in enumerate(said)]
    figures = word_figures([rounds], [(410.0, 430.0), (449.0, 470.0)])
    assert (figures["calm_rounds"], figures["calm_words_that_differ"]) == (4, 1)
    assert (figures["disturbed_rounds"], figures["disturbed_words_that_differ"]) == (1, 1)


def test_a_turn_belongs_to_the_round_in_which_it_began() -> None:
    client = RoundClient("ws://localhost", [b"", b""], rounds=2)
    client.sent_at = [0.0, 0.08, 0.16, 0.24]

    def turn(item: str, began_ms: int, text: str) -> list[dict[str, Any]]:
        started = {"type": "input_audio_buffer.speech_started", "item_id": item, "audio_start_ms": began_ms}
        return [started, {"type": COMPLETED, "item_id": item, "transcript": text}]

    client.events = [*turn("1", 0, "one"), *turn("2", 150, "two"), *turn("3", 170, "three")]
    assert client.rounds() == [((0.0, 0.16), "one two"), ((0.16, 0.24), "three")]


def test_sessions_that_ended_without_being_told_are_seen() -> None:
    client = PlainClient(8000, b"", 0.0)
    drained = PlainSession(None, words=3, told_at=1.0, code=1012, drained_s=2.5)
    cut = PlainSession(0.5, words=2, turns={"item"}, code=1006)
    client.sessions = [drained, cut, PlainSession(1.0)]
    figures = plain_figures([client])
    assert (figures["sessions"], figures["closed_with_1012"], figures["of_them_told_before"]) == (3, 1, 1)
    assert (figures["closed_otherwise"], figures["turns_cut"], figures["words"]) == (1, 1, 5)
    assert (figures["drained_s_max"], figures["reconnected_s_max"]) == (2.5, 1.0)
