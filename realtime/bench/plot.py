"""Plots the figures of a load test as SVG: time to final by the number of streams, and lag over time in the long run.

It needs no plotting library. `load_test.py` writes the plot into the folder of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from realtime.bench.run_records import Objective, RunRecord
from realtime.bench.statistics import percentile

# Sizes in pixels: of the picture, of a panel, and the panels' distance from the top.
WIDTH, HEIGHT = 860, 360
PANEL_WIDTH, PANEL_HEIGHT, TOP = 330, 240, 60
# Seconds of the run that are one point of the lag.
BUCKET_S = 5.0


STYLE = """\
text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}
.axis{stroke:#888}.grid{stroke:#ddd}.limit{stroke:#c33;stroke-dasharray:4 4}
.p50{stroke:#27c;fill:none;stroke-width:2}.p95{stroke:#e80;fill:none;stroke-width:2}
.p50dot{fill:#27c}.p95dot{fill:#e80}.missed{fill:#c33}
@media (prefers-color-scheme:dark){svg{background:#181a1f}text{fill:#ddd}.grid{stroke:#333}}"""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes at `left`, for x from 0 to `max_x` and y from 0 to `max_y`."""

    left: float
    max_x: float
    max_y: float

    def place(self, point: Point) -> Point:
        x, y = point
        return (
            self.left + PANEL_WIDTH * x / self.max_x,
            TOP + PANEL_HEIGHT * (1 - min(y, self.max_y) / self.max_y),
        )

    def frame(self, title: str, x_label: str, y_label: str) -> list[str]:
        bottom, middle = TOP + PANEL_HEIGHT, self.left + PANEL_WIDTH / 2
        parts = [
            f'<text class="title" x="{self.left}" y="{TOP - 28}">{escape(title)}</text>',
            f'<text x="{self.left}" y="{TOP - 10}">{escape(y_label)}</text>',
            f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">{escape(x_label)}</text>',
        ]
        for step in range(5):
            share = step / 4
            y = bottom - PANEL_HEIGHT * share
            x = self.left + PANEL_WIDTH * share
            parts += [
                f'<line class="grid" x1="{self.left}" x2="{self.left + PANEL_WIDTH}" y1="{y}" y2="{y}"/>',
                f'<text x="{self.left - 8}" y="{y + 4}" text-anchor="end">{self.max_y * share:.2g}</text>',
                f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{self.max_x * share:.3g}</text>',
            ]
        parts.append(f'<line class="axis" x1="{self.left}" x2="{self.left}" y1="{TOP}" y2="{bottom}"/>')
        return parts

    def line(self, points: Sequence[Point], kind: str) -> str:
        placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.place, points))
        return f'<polyline class="{kind}" points="{placed}"/>'

    def dots(self, points: Sequence[Point], kind: str) -> list[str]:
        return [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in map(self.place, points)]

    def limit(self, y: float) -> str:
        left, height = self.place((0, y))
        return f'<line class="limit" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'


def draw(runs: Sequence[RunRecord], held: RunRecord, objective: Objective) -> str:
    """The plot as an SVG document: `runs` by their number of streams, and the long run `held` over time."""
    parts = [*_final_panel(runs, objective), *_lag_panel(held), *_legend()]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _final_panel(runs: Sequence[RunRecord], objective: Objective) -> list[str]:
    ordered = sorted(runs, key=lambda run: run.streams)
    lines: dict[str, list[Point]] = {"p50": [], "p95": []}
    missed: list[Point] = []
    for run in ordered:
        for kind, share in (("p50", 50), ("p95", 95)):
            value = percentile(run.finals, share)
            if value is not None:
                lines[kind].append((run.streams, value))
        value = percentile(run.finals, 95)
        if value is not None and objective.missed(run):
            missed.append((run.streams, value))
    max_x = max(run.streams for run in ordered)
    panel = Panel(60, max_x, _round_up(max(objective.final_p95_s * 1.5, *_heights(lines["p95"]))))
    parts = panel.frame("Time to final", "streams at once", "seconds")
    for kind, points in lines.items():
        parts += [panel.line(points, kind), *panel.dots(points, f"{kind}dot")]
    return [*parts, *panel.dots(missed, "missed"), panel.limit(objective.final_p95_s)]


def _lag_panel(held: RunRecord) -> list[str]:
    buckets: dict[int, list[float]] = {}
    for t, lag in held.lags:
        buckets.setdefault(int(t // BUCKET_S), []).append(lag)
    lines = {
        kind: [((bucket + 0.5) * BUCKET_S, percentile(lags, share) or 0.0) for bucket, lags in sorted(buckets.items())]
        for kind, share in (("p50", 50), ("p95", 95))
    }
    max_x = (max(buckets, default=0) + 1) * BUCKET_S
    panel = Panel(490, max_x, _round_up(max(1.0, *_heights(lines["p95"]))))
    parts = panel.frame(f"Lag while {held.streams} streams are held", "seconds into the run", "seconds")
    for kind, points in lines.items():
        parts.append(panel.line(points, kind))
    return parts


def _heights(points: Sequence[Point]) -> list[float]:
    return [y for _, y in points] or [0.0]


def _round_up(value: float) -> float:
    """An axis limit that gives four round steps."""
    for limit in (1, 2, 3, 4, 6, 8, 10, 20, 40, 60, 80, 100):
        if value <= limit:
            return float(limit)
    return value


def _legend() -> list[str]:
    y = HEIGHT - 14
    return [
        f'<circle class="p50dot" cx="70" cy="{y - 4}" r="4"/><text x="80" y="{y}">p50</text>',
        f'<circle class="p95dot" cx="130" cy="{y - 4}" r="4"/><text x="140" y="{y}">p95</text>',
        f'<circle class="missed" cx="190" cy="{y - 4}" r="4"/><text x="200" y="{y}">objective missed</text>',
        f'<line class="limit" x1="320" x2="345" y1="{y - 4}" y2="{y - 4}"/><text x="352" y="{y}">objective</text>',
    ]
