"""A load test of a running server, step by step: searches the largest load, runs it for longer, repeats clients alone.

`tickertape bench` runs a `LoadTest`. It plays clients (`clients.py`), reads the records that they write and computes
the figures (`run_records.py`), compares the texts alone and under load (`words.py`), and writes the results with a
plot (`plot.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realtime.bench.clients import ClientPlan, Target, play_all
from realtime.bench.plot import draw
from realtime.bench.recordings import Bank, playlist
from realtime.bench.run_records import Objective, RunRecord, read_run
from realtime.bench.words import error_rate


def largest(meets: Callable[[int], bool], maximum: int) -> int:
    """The largest n up to `maximum` with `meets(n)`, by doubling and bisection; 0 if `meets(1)` is False.

    Assumes that fewer streams are never harder.
    """
    good, bad = 0, 1
    while bad <= maximum and meets(bad):
        good, bad = bad, min(2 * bad, maximum) if bad < maximum else maximum + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if meets(middle):
            good = middle
        else:
            bad = middle
    return good


# Clients start at random times within this many seconds, so that they are not in step.
PHASES_S = 1.0
# Pause between two recordings.
PAUSE_S = 1.0


class LoadTest:
    """Runs the load test. `options` are those of `tickertape bench`; `report` gets progress messages."""

    def __init__(
        self,
        target: Target,
        bank: Bank,
        objective: Objective,
        options: argparse.Namespace,
        processes: int,
        report: Callable[[str], None],
    ) -> None:
        self._target = target
        self._bank = bank
        self._objective = objective
        self._options = options
        self._processes = processes
        self._report = report
        self._runs: list[RunRecord] = []

    def measure(self) -> Result:
        options = self._options
        self._play(1, options.seconds, "warm-up")
        self._runs.clear()
        if options.streams:
            streams = options.streams
        else:
            streams = largest(self._meets, options.most)
        if streams == 0:
            return Result(self._target, self._objective, self._runs, self._runs[-1], None, self._settings())
        held = self._hold(streams)
        words = None if held.failures else self._compare(held)
        return Result(self._target, self._objective, self._runs, held, words, self._settings())

    def _meets(self, streams: int) -> bool:
        run = self._play(streams, self._options.seconds, f"search-{streams}")
        return not self._objective.missed(run)

    def _hold(self, streams: int) -> RunRecord:
        """The long run; if it misses the objective, it is repeated with a little less load."""
        while True:
            held = self._play(streams, self._options.hold, f"hold-{streams}")
            if self._options.streams or streams == 1 or not self._objective.missed(held):
                return held
            streams -= max(1, streams // 10)

    def _play(self, streams: int, seconds: float, name: str) -> RunRecord:
        phases = random.Random(name)
        plans = [
            ClientPlan(client, phases.uniform(0, PHASES_S), playlist(self._bank, client, seconds, PAUSE_S))
            for client in range(streams)
        ]
        return self._run(plans, name, self._options.warm_up)

    def _run(self, plans: list[ClientPlan], name: str, warm_up_s: float) -> RunRecord:
        longest = max(plan.playlist.samples for plan in plans) / self._bank.rate
        self._report(f"{name}: {len(plans)} streams for {longest:.0f} s")
        paths = play_all(self._target, self._bank, plans, self._processes, self._options.output, name)
        run = read_run(paths, [plan.client for plan in plans], self._target.silence_ms / 1000, warm_up_s)
        self._runs.append(run)
        missed = self._objective.missed(run)
        self._report(f"  {summary(run)}: {'; '.join(missed) if missed else 'objective met'}")
        return run

    def _compare(self, held: RunRecord) -> WordErrors:
        """Repeat some clients of the long run alone, and compare their text: load must not change it."""
        count = min(self._options.alone, held.streams)
        alone: list[str] = []
        for client in range(count):
            plan = ClientPlan(client, 0.0, playlist(self._bank, client, self._options.hold, PAUSE_S))
            run = self._run([plan], f"alone-{client}", self._options.warm_up)
            alone.append(run.clients[0].text)
        loaded = [client.text for client in held.clients]
        references = [playlist(self._bank, client, self._options.hold, PAUSE_S).text for client in range(held.streams)]
        changed = error_rate(list(zip(alone, loaded[:count], strict=True)))
        if any(text is None for text in references):
            return WordErrors(count, None, None, None, changed)
        known = [text or "" for text in references]
        return WordErrors(
            count,
            error_rate(list(zip(known[:count], alone, strict=True))),
            error_rate(list(zip(known[:count], loaded[:count], strict=True))),
            error_rate(list(zip(known, loaded, strict=True))),
            changed,
        )

    def _settings(self) -> dict[str, Any]:
        options = self._options
        return {
            "seconds": options.seconds,
            "hold": options.hold,
            "warm_up": options.warm_up,
            "chunk_ms": options.chunk_ms,
            "silence_ms": options.silence_ms,
            "rate": self._bank.rate,
            "recordings": len(self._bank.clips),
            "manifest": options.manifest.name if options.manifest else None,
            "generator_processes": self._processes,
            "generator_machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        }


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Word error rates, alone and under load, of the clients that were repeated alone.

    `all_loaded` is the rate of all clients under load. `changed` is the share of words that differ between alone and
    under load.
    """

    clients: int
    alone: float | None
    loaded: float | None
    all_loaded: float | None
    changed: float | None

    @property
    def equal(self) -> bool:
        return not self.changed


@dataclass(slots=True)
class Result:
    target: Target
    objective: Objective
    runs: list[RunRecord]
    held: RunRecord
    words: WordErrors | None
    settings: dict[str, Any]
    missed: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missed = self.objective.missed(self.held)

    @property
    def good(self) -> bool:
        return not self.missed and self.words is not None and self.words.equal

    def text(self) -> str:
        """The result as lines of text."""
        figures = self.held.figures()
        final, lag, late = figures["time_to_final_s"], figures["lag_s"], figures["generator_late_ms"]
        slope = figures["lag_slope_ms_per_minute"]
        lines = [
            f"streams           {self.held.streams}" + ("" if not self.missed else f"   NOT MET: {self.missed[0]}"),
            f"time to final     {_row(final)} s   ({figures['finals']} finals)",
            f"word error rate   {self._words_text()}",
            f"lag               {_row(lag)} s",
            "lag slope         "
            + (
                "too few points"
                if slope is None
                else f"{slope['slope']:+.1f} ms a minute (95 %: {slope['low']:+.1f} to {slope['high']:+.1f})"
            ),
            f"failures          {figures['failures']}",
            f"generator late    {_row(late, 1)} ms, at most {_number(late['max'], 1)} ms",
        ]
        return "\n".join(lines)

    def _words_text(self) -> str:
        words = self.words
        if words is None:
            return "not compared: there was no load without failures"
        same = "the same words" if words.equal else f"{words.changed:.2%} of the words differ"
        clients = f"{words.clients} client{'s' if words.clients > 1 else ''}"
        if words.alone is None or words.loaded is None:
            return f"no reference text; {clients} alone and under load: {same}"
        return (
            f"{words.alone:.2%} alone, {words.loaded:.2%} at {self.held.streams} streams ({clients}: {same}); "
            f"all clients {words.all_loaded:.2%}"
        )

    def write(self, folder: Path) -> None:
        words = self.words
        body = {
            "streams": self.held.streams,
            "good": self.good,
            "missed": self.missed,
            "held": self.held.figures(),
            "words": None
            if words is None
            else {
                "clients": words.clients,
                "wer_alone": words.alone,
                "wer_loaded": words.loaded,
                "wer_all_loaded": words.all_loaded,
                "changed": words.changed,
                "equal": words.equal,
            },
            "objective": {"final_p95_s": self.objective.final_p95_s, "lag_p95_s": self.objective.lag_p95_s},
            "runs": [run.figures() for run in self.runs],
            "settings": self.settings,
        }
        (folder / "results.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        (folder / "plot.svg").write_text(draw(self.runs, self.held, self.objective), encoding="utf-8")


def summary(run: RunRecord) -> str:
    figures = run.figures()
    return f"time to final {_row(figures['time_to_final_s'])} s, lag {_row(figures['lag_s'])} s"


def _row(values: dict[str, float | None], digits: int = 2) -> str:
    return ", ".join(f"{name} {_number(values[name], digits)}" for name in ("p50", "p95", "p99"))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
