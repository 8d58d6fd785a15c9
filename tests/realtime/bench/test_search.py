"""Search, trend, words and plot: the arithmetic of a load test."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.bench.plot import draw
from realtime.bench.record import ClientRecord, RunRecord
from realtime.bench.search import Objective, largest
from realtime.bench.trend import percentile, trend
from realtime.bench.words import error_rate, word_errors


@given(capacity=st.integers(0, 300), most=st.integers(1, 300))
def test_search_finds_the_largest_with_few_runs(capacity: int, most: int) -> None:
    asked: list[int] = []

    def meets(streams: int) -> bool:
        asked.append(streams)
        return streams <= capacity

    assert largest(meets, most) == min(capacity, most)
    assert len(asked) == len(set(asked)) <= 20 and all(1 <= streams <= most for streams in asked)


def test_trend_needs_points_and_matching_lengths() -> None:
    assert trend([1.0] * 5, [1.0] * 5) is None and trend([2.0] * 20, list(range(20))) is None
    with pytest.raises(ValueError, match="2 places but 1 values"):
        trend([1.0, 2.0], [1.0])


def test_trend_tells_growth_from_noise() -> None:
    xs = [float(x) for x in range(100)]
    noise = [((7919 * x) % 100) / 50 - 1 for x in range(100)]
    flat = trend(xs, noise)
    growing = trend(xs, [0.1 * x + error for x, error in zip(xs, noise, strict=True)])
    assert flat is not None and not flat.grows and flat.low < 0 < flat.high
    assert growing is not None and growing.grows and growing.low < 0.1 < growing.high


@pytest.mark.parametrize(("values", "expected"), [([], None), ([3.0], 3.0), ([1.0, 2.0, 3.0, 4.0], 2.5)])
def test_percentile(values: list[float], expected: float | None) -> None:
    assert percentile(values, 50) == expected


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_word_errors_are_an_edit_distance(left: list[str], right: list[str]) -> None:
    errors = word_errors(left, right)
    assert errors == word_errors(right, left)
    assert abs(len(left) - len(right)) <= errors <= max(len(left), len(right))
    assert (errors == 0) == (left == right)
    assert word_errors([*left, "x"], [*right, "x"]) == errors


def test_error_rate_is_pooled_and_normalised() -> None:
    pairs = [("It's twenty two, Mr. Smith!", "it is 22 mister smith"), ("a b c", "a c d"), ("", "")]
    assert error_rate(pairs) == pytest.approx(2 / 8)
    assert error_rate([("", "words from nowhere")]) is None


def test_plot_is_valid_and_marks_what_missed() -> None:
    def run(streams: int, final: float) -> RunRecord:
        client = ClientRecord(0, finals=[(6.0, final)], word_lags=[(t, final) for t in range(30)], ended=True)
        return RunRecord(streams, [client], 0.0)

    runs = [run(1, 0.5), run(2, 0.7), run(4, 3.0)]
    svg = ElementTree.fromstring(draw(runs, runs[1], Objective(1.0, 2.0)))
    kinds = [element.get("class") for element in svg.iter()]
    assert kinds.count("p95dot") == 3 + 1 and kinds.count("missed") == 1 + 1, "with those of the legend"
    empty = RunRecord(1, [ClientRecord(0)], 0.0)
    ElementTree.fromstring(draw([empty], empty, Objective(1.0, 2.0)))
