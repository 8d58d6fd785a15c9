"""The live view of `tickertape status`: a screen in a terminal, a line for each look in a pipe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from realtime.client.http_client import HttpServer
from realtime.client.wire_client import CannotConnect
from realtime.commands.server_figures import Histogram, Quantile, Snapshot, look
from realtime.commands.terminal import CommandFailed

# Lag and time to final are those of the last looks, within this time.
RECENT_S = 60.0
NOT_COUNTED = "n/a"
# What a server that is not ready says in a word.
STATES = {
    "starting": "starting: it takes no sessions until an engine has loaded its model",
    "draining": "draining: it takes no new sessions and lets the running turns finish",
}


class StatusView:
    """Give it what each look found; it remembers enough to tell what is recent."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._looks: deque[tuple[float, Snapshot]] = deque()
        self._trouble: tuple[str, str] | None = None

    def saw(self, snapshot: Snapshot, now: float) -> None:
        self._trouble = None
        self._looks.append((now, snapshot))
        while now - self._looks[0][0] > RECENT_S:
            self._looks.popleft()

    def missed(self, reason: str, clock: str) -> bool:
        """Returns whether that is news."""
        news = self._trouble is None
        if self._trouble is None:
            self._trouble = (reason, clock)
        return news

    def screen(self, clock: str) -> Group:
        _, now = self._looks[-1]
        lines = Table.grid(padding=(0, 2))
        style = "dim" if self._trouble else ""
        for name, text in self._rows(now):
            lines.add_row(Text(name, "dim"), Text(text, style))
        head = Text.assemble(
            (self._url, "bold"), "  ", (STATES.get(now.status, now.status), _colour(now.status)), "  ", (clock, "dim")
        )
        if self._trouble is None:
            return Group(head, lines)
        reason, since = self._trouble
        trouble = Text(f"no answer since {since}: {reason}; trying again", "red")
        return Group(head, lines, trouble)

    def line(self, clock: str) -> str:
        _, now = self._looks[-1]
        room, lag, final = now.capacity, self._recent("lag"), self._recent("final")
        load = f"{room['load']:.2f}" if room.get("engines") else NOT_COUNTED
        return (
            f"{clock} {now.status} sessions={room['sessions']} connected={room['connected']} "
            f"speaking={room['speaking']} free={room['streams_free']} load={load} "
            f"lag_p95={_seconds(lag.quantile(0.95))} final_p95={_seconds(final.quantile(0.95))} "
            f"engines={len(room.get('engines', ()))}/{room.get('engines_wanted', 0)}"
        )

    def _rows(self, now: Snapshot) -> list[tuple[str, str]]:
        room = now.capacity
        engines, wanted = room.get("engines", ()), room.get("engines_wanted", 0)
        rows = [
            ("sessions", f"{room['sessions']} open, {room['connected']} connected, {room['speaking']} speaking"),
            ("streams", _streams(room)),
            ("load", _load(room)),
            ("lag", _spread(self._recent("lag"), "from received to processed audio", "no audio came")),
            ("finals", _spread(self._recent("final"), "from the end of a turn to its final text", "no turn ended")),
            (
                "engines",
                f"{len(engines)} of {wanted} connected, {_count(now.restarts, 'restart')}",
            ),
        ]
        for number, engine in enumerate(engines, start=1):
            text = (
                f"{engine['streams_used']} of {_count(engine['streams_total'], 'stream')} open, {engine['speaking']} "
                f"speaking, load {engine['load']:.0%}, {engine['lag_ms'] / 1000:.2f} s of audio not processed yet"
            )
            rows.append((f"  {number}", text))
        rows += [
            ("  missing", f"{engine['name'] or engine['address']}: {engine['problem'] or 'no answer'}")
            for engine in room.get("engines_missing", ())
        ]
        if now.refused:
            rows.append(("refused", ", ".join(f"{count} ({reason})" for reason, count in sorted(now.refused.items()))))
        return rows

    def _recent(self, name: str) -> Histogram:
        (_, first), (_, now) = self._looks[0], self._looks[-1]
        latest: Histogram = getattr(now, name)
        # The first look has nothing before it: what it shows is since the server's start.
        return latest if first is now else latest.since(getattr(first, name))


def watch(server: HttpServer, interval_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Until interrupted. Raises CannotConnect or CommandFailed if the very first look fails."""
    console = Console()
    view = StatusView(server.url)
    view.saw(look(server), time.monotonic())
    if not console.is_terminal:
        return _print_lines(server, view, console, interval_s, sleep)
    with Live(view.screen(_clock()), console=console, auto_refresh=False) as live:
        while True:
            sleep(interval_s)
            _look_again(server, view)
            live.update(view.screen(_clock()), refresh=True)


def _print_lines(
    server: HttpServer, view: StatusView, console: Console, interval_s: float, sleep: Callable[[float], None]
) -> None:
    text = view.line(_clock())
    while True:
        if text:
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        sleep(interval_s)
        trouble = _look_again(server, view)
        if trouble is None:
            text = view.line(_clock())
        else:
            reason, is_news = trouble
            text = f"{_clock()} no answer: {reason}; trying again" if is_news else ""


def _look_again(server: HttpServer, view: StatusView) -> tuple[str, bool] | None:
    """What went wrong, and whether that is news; None if nothing did."""
    try:
        view.saw(look(server), time.monotonic())
    except (CannotConnect, CommandFailed) as error:
        return str(error), view.missed(str(error), _clock())
    return None


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _colour(status: str) -> str:
    return "green" if status == "ready" else "yellow"


def _streams(room: Mapping[str, Any]) -> str:
    used = f"{room['streams_used']} of {room['streams_total']} open"
    more = f"{_count(room['streams_free'], 'more session')} can start"
    if not room.get("load_per_stream"):
        return f"{used}; {more}; how many can speak at once is not measured yet"
    return f"{used}; {room['streams_counted']} speaking, {room['streams_that_hold']} can speak at once; {more}"


def _load(room: Mapping[str, Any]) -> str:
    if not room.get("engines"):
        return f"{NOT_COUNTED}: no engine is connected"
    limit = f"; new sessions are refused above {room['max_load']:.0%}" if room["max_load"] else ""
    return f"the engine is busy {room['load']:.0%} of the time{limit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _seconds(value: Quantile | None) -> str:
    if value is None:
        return NOT_COUNTED
    return f">{value.seconds:g}" if value.is_beyond else f"{value.seconds:.2f}"


def _spread(histogram: Histogram, about: str, nothing: str) -> str:
    if not histogram.total:
        return f"{NOT_COUNTED}: {nothing} in the last minute"
    shown = ", ".join(f"{name} {_seconds(value).replace('>', '> ')} s" for name, value in histogram.quantiles().items())
    return f"{shown} {about}"
