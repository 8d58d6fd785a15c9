"""The table of `tickertape fleet status`, refreshed in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_COLOURS = {"serving": "green", "starting": "yellow", "draining": "yellow", "failed": "red"}
NOTES_SHOWN = 5


def screen(status: dict[str, Any]) -> Group:
    room = status["capacity"]
    head = Text.assemble(
        (status["name"], "bold"),
        f"  {room['sessions']} sessions, {room['streams']} streams, room for {room['streams_free']} more, "
        f"{room['share']:.0%} taken, busiest engine {room['load']:.0%}",
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("node", "name", "what", "state", "carries", "load", "version", "port", "restarts", "trouble"):
        table.add_column(title, header_style="dim")
    nodes = sorted(status["nodes"], key=lambda node: str(node["name"]))
    for node in nodes:
        units = [unit for unit in status["units"] if unit["node"] == node["name"]]
        for unit in units or [None]:
            table.add_row(*_row(status, node, unit))
    below = [Text(f"waits: {why}", "yellow") for why in status["waits_for"]]
    below += [Text(note, "dim") for note in status["notes"][-NOTES_SHOWN:]]
    return Group(head, table, *below)


def _row(status: dict[str, Any], node: dict[str, Any], unit: dict[str, Any] | None) -> list[Text | str]:
    name = Text(node["name"], "strike" if node["name"] in status["drained"] else "")
    if unit is None:
        return [name, "-", "", "", "", "", "", "", "", ""]
    load = "" if unit["load"] is None else f"{unit['load']:.0%}"
    carries = f"{unit['busy']} {'streams' if unit['kind'] == 'engine' else 'sessions'}"
    return [
        name,
        unit["name"],
        unit["kind"],
        Text(unit["state"], _COLOURS.get(unit["state"], "")),
        carries,
        load,
        unit["version"] or "",
        str(unit["port"]),
        str(unit["restarts"]),
        Text(unit["error"], "red"),
    ]


def watch(look: Callable[[], dict[str, Any]], interval_s: float) -> None:
    """Show the status until interrupted; in a pipe, one line for each refresh."""
    console = Console()
    if not console.is_terminal:
        while True:
            status = look()
            room = status["capacity"]
            states = " ".join(f"{unit['name']}={unit['state']}:{unit['busy']}" for unit in status["units"])
            text = f"{time.strftime('%H:%M:%S')} sessions={room['sessions']} share={room['share']:.2f} {states}"
            console.print(text, soft_wrap=True, highlight=False, markup=False)
            time.sleep(interval_s)
    with Live(screen(look()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(screen(look()), refresh=True)
