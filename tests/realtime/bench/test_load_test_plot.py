"""The plot of a load test."""

from __future__ import annotations

from xml.etree import ElementTree

from realtime.bench.load_test import ClientRecord, Objective, RunRecord, draw


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
