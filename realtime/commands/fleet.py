"""`tickertape fleet`: starts, joins, shows, scales, drains, upgrades and stops a fleet of engines and gateways.

The fleet runs on many machines, with Ray. A unit is an engine or a gateway. This module reads the options, calls the
fleet's manager through `fleet/cluster/connect.py`, and prints the status as a table that is refreshed in a terminal.
All decisions are in `fleet/`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from realtime.commands.terminal import OK, CommandFailed, UsageError, decimal, integer, note, out

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from fleet.cluster.connect import FleetCalls
    from fleet.plan import FleetPlan

EPILOG = """\
Examples:
  tickertape fleet up fleet.toml            start the fleet, and the cluster if it belongs on this machine
  tickertape fleet join fleet.toml          make this machine a node until the command is stopped
  tickertape fleet status                   a live table; --json prints one object
  tickertape fleet scale 3                  set the number of engines; --dry-run only shows the actions
  tickertape fleet drain e3                 drain an engine, a gateway or a node; --undo ends the drain
  tickertape fleet upgrade                  replace all engines and gateways one by one with the installed version
  tickertape fleet down                     drain and stop everything

FILE describes the fleet (docs/fleet.md). The default is fleet.toml in the current folder.
Needs Ray: pip install 'tickertape[fleet]'.
"""
DEFAULT_FILE = "fleet.toml"
# Seconds between refreshes of the table.
REFRESH_S = 1.0
# Seconds for a new head node to accept connections.
HEAD_START_S = 120.0
COLOURS = {"serving": "green", "starting": "yellow", "draining": "yellow", "failed": "red"}
# Messages of the manager below the table.
NOTES_SHOWN = 5


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "fleet",
        help="many engines and gateways on many machines",
        description="Many engines and gateways on many machines, placed, restarted, scaled and drained by Ray.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    up = _action(actions, "up", "start the fleet, or apply the file to a running one")
    up.add_argument("--wait", type=decimal, default=300.0, metavar="SECONDS", help="most seconds until it serves")
    join = _action(actions, "join", "make this machine a node until the command is stopped; then drain it")
    join.add_argument("--name", help="the node's name, the same when it rejoins (default: the host name)")
    join.add_argument("--edge", action="store_true", help="gateways run on this node")
    status = _action(actions, "status", "show nodes, engines, gateways, sessions, load, versions")
    status.add_argument("--json", action="store_true", help="print one JSON object and exit")
    status.add_argument("--once", action="store_true", help="print the table once and exit")
    scale = _action(actions, "scale", "set the number of engines; without a number, show what scaling would do now")
    scale.add_argument("engines", nargs="?", type=integer, metavar="N")
    scale.add_argument("--dry-run", action="store_true", help="only show the actions")
    drain = _action(actions, "drain", "drain a node, an engine or a gateway")
    drain.add_argument("name", metavar="NAME")
    drain.add_argument("--undo", action="store_true", help="end the drain, so that it takes new work")
    drain.add_argument("--wait", type=decimal, default=0.0, metavar="SECONDS", help="wait this long until it is empty")
    upgrade = _action(actions, "upgrade", "apply the file, and replace all engines and gateways one by one")
    upgrade.add_argument("--wait", type=decimal, default=0.0, metavar="SECONDS", help="wait this long until it is done")
    down = _action(actions, "down", "drain and stop everything")
    down.add_argument(
        "--wait", type=decimal, default=300.0, metavar="SECONDS", help="most seconds until all is stopped"
    )
    parser.set_defaults(run=run)


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.allow_abbrev = False
    if name in ("up", "join"):
        parser.add_argument("file", nargs="?", default=DEFAULT_FILE, metavar="FILE", help="the fleet's file, in TOML")
    else:
        parser.add_argument("--file", default=DEFAULT_FILE, metavar="FILE", help="the fleet's file, in TOML")
    return parser


def run(options: argparse.Namespace) -> int:
    from fleet.cluster.connect import check_ray
    from fleet.plan import read_plan
    from fleet.state import FleetError, FleetFileError

    actions = {
        "up": _up,
        "join": _join,
        "status": _status,
        "scale": _scale,
        "drain": _drain,
        "upgrade": _upgrade,
        "down": _down,
    }
    try:
        plan = read_plan(options.file)
        check_ray()
        actions[options.action](plan, options)
    except FleetFileError as error:
        raise UsageError(str(error)) from error
    except FleetError as error:
        raise CommandFailed(str(error)) from error
    return OK


def _calls(plan: FleetPlan, start: bool = False) -> FleetCalls:
    """The manager of the running fleet. With `start`, the manager is started if it does not run yet."""
    from fleet.cluster.connect import FleetCalls, connect

    connect(plan, HEAD_START_S if start else 0.0)
    fleet = FleetCalls(plan, start)
    if start:
        # After the loss of the head node Ray restarts the manager, which takes some time.
        wait_for(fleet, lambda status: True, HEAD_START_S)
    return fleet


def _up(plan: FleetPlan, options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from fleet.cluster.connect import is_listening, is_on_this_machine, start_head

    if not is_listening(plan):
        if not is_on_this_machine(plan):
            raise CommandFailed(f"no cluster answers at {plan.cluster}, which is another machine: start it there")
        note(f"starting a cluster at {plan.cluster}")
        start_head(plan)
    fleet = _calls(plan, start=True)
    fleet.call("want", asdict(plan))
    note("starting the fleet")
    status = wait_for(fleet, _is_up, options.wait)
    if status is None:
        problem = _problem(fleet.call("status"))
        raise CommandFailed(f"the fleet is not complete after {options.wait:g} s: {problem}; it keeps trying")
    _print_table(status)
    out("`tickertape fleet status` shows the fleet; `tickertape fleet down` stops it.")


def _join(plan: FleetPlan, options: argparse.Namespace) -> None:
    import signal

    from fleet.cluster.connect import node_name, run_node

    name = options.name or node_name()
    process = run_node(plan, name, options.edge)
    note(f"this machine is node {name} of {plan.cluster}; SIGTERM drains it")
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: signals.append(signum))
    while process.poll() is None and not signals:
        time.sleep(0.1)
    if process.poll() is not None:
        text = (
            f"the node ended with status {process.returncode}: check that the head has the same secret as "
            f"{plan.secret_path}"
        )
        raise CommandFailed(text)
    try:
        _drain_node(_calls(plan), name, plan.engine.drain_s + plan.gateway.drain_s + 60.0)
    finally:
        process.terminate()
        process.wait()


def _drain_node(fleet: FleetCalls, name: str, wait_s: float) -> None:
    """Drain this node, and wait until it is empty. If it joins again, it takes new work."""
    note(f"draining {name}")
    fleet.call("drain", name)
    if wait_for(fleet, lambda status: _is_empty(status, name), wait_s) is None:
        note(f"{name} is not empty after {wait_s:g} s")


def _status(plan: FleetPlan, options: argparse.Namespace) -> None:
    import json

    fleet = _calls(plan)
    status = fleet.call("status")
    if options.json:
        return out(json.dumps(status))
    if options.once:
        return _print_table(status)
    try:
        watch(lambda: fleet.call("status"), REFRESH_S)
    except KeyboardInterrupt:
        pass


def _scale(plan: FleetPlan, options: argparse.Namespace) -> None:
    fleet = _calls(plan)
    planned = fleet.call("planned", options.engines)
    why = f" ({planned['why']})" if planned["why"] else ""
    out(f"{planned['engines_now']} engines now, {planned['engines_wanted']} wanted{why}")
    for action in planned["actions"] or ["nothing to do"]:
        out(f"  {action}")
    if options.engines is not None and not options.dry_run:
        fleet.call("scale", options.engines)


def _drain(plan: FleetPlan, options: argparse.Namespace) -> None:
    fleet = _calls(plan)
    if options.undo:
        fleet.call("undrain", options.name)
        return out(f"{options.name} takes new work again")
    fleet.call("drain", options.name)
    out(f"{options.name} is draining: it gets no new streams or sessions, and those it has are moved")
    if options.wait and wait_for(fleet, lambda status: _is_empty(status, options.name), options.wait) is None:
        raise CommandFailed(f"{options.name} is not empty after {options.wait:g} s; the drain continues")


def _upgrade(plan: FleetPlan, options: argparse.Namespace) -> None:
    from dataclasses import asdict

    fleet = _calls(plan)
    fleet.call("want", asdict(plan))
    generation = fleet.call("upgrade")
    out(f"all engines and gateways are being replaced one by one by generation {generation}")
    if options.wait and wait_for(fleet, _is_up, options.wait) is None:
        raise CommandFailed(f"not done after {options.wait:g} s: {_problem(fleet.call('status'))}; it continues")


def _down(plan: FleetPlan, options: argparse.Namespace) -> None:
    from fleet.cluster.connect import end_units_here, is_listening, stop_head

    if not is_listening(plan):
        ended = end_units_here(plan)
        stop_head(plan)
        drained = f"drained {', '.join(ended)}" if ended else "nothing of the fleet runs"
        return out(f"no cluster answers at {plan.cluster}; {drained} on this machine")
    fleet = _calls(plan)
    fleet.call("go_down")
    note("draining everything")
    if wait_for(fleet, lambda status: status["is_down"], options.wait) is None:
        raise CommandFailed(f"the fleet is not down after {options.wait:g} s; `tickertape fleet status` shows the rest")
    fleet.end()
    out("the fleet is down" + (", and its cluster too" if stop_head(plan) else "; its cluster keeps running"))


def wait_for(fleet: FleetCalls, condition: Any, wait_s: float) -> dict[str, Any] | None:
    """Wait for the first status for which `condition` is True, and return it; None after `wait_s` seconds.

    The manager may not answer for a while after its head node was restarted. Raises FleetError if it does not answer in
    time.
    """
    from fleet.state import FleetError

    deadline = time.monotonic() + wait_s
    while True:
        is_late = time.monotonic() > deadline
        try:
            status: dict[str, Any] = fleet.call("status")
            if condition(status):
                return status
        except FleetError:
            if is_late:
                raise
        if is_late:
            return None
        time.sleep(0.5)


def _is_up(status: dict[str, Any]) -> bool:
    serving = [unit for unit in status["units"] if unit["state"] == "serving"]
    counts = {kind: sum(unit["kind"] == kind for unit in serving) for kind in ("engine", "gateway")}
    return (
        len(serving) == len(status["units"])
        and counts == {"engine": status["engines_wanted"], "gateway": status["gateways_wanted"]}
        and all(unit["generation"] == status["generation"] for unit in serving)
    )


def _is_empty(status: dict[str, Any], name: str) -> bool:
    return not any(name in (unit["name"], unit["node"]) for unit in status["units"])


def _problem(status: dict[str, Any]) -> str:
    errors = [f"{unit['name']}: {unit['error']}" for unit in status["units"] if unit["error"]]
    return "; ".join([*status["waits_for"], *errors, *status["notes"][-1:]]) or "no error is known"


def _print_table(status: dict[str, Any]) -> None:
    from rich.console import Console

    Console().print(screen(status))


def screen(status: dict[str, Any]) -> Group:
    """The status of the manager as a table with a row for each engine and gateway."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

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
    from rich.text import Text

    name = Text(node["name"], "strike" if node["name"] in status["drained"] else "")
    if unit is None:
        return [name, "-", "", "", "", "", "", "", "", ""]
    load = "" if unit["load"] is None else f"{unit['load']:.0%}"
    carries = f"{unit['busy']} {'streams' if unit['kind'] == 'engine' else 'sessions'}"
    return [
        name,
        unit["name"],
        unit["kind"],
        Text(unit["state"], COLOURS.get(unit["state"], "")),
        carries,
        load,
        unit["version"] or "",
        str(unit["port"]),
        str(unit["restarts"]),
        Text(unit["error"], "red"),
    ]


def watch(read_status: Callable[[], dict[str, Any]], interval_s: float) -> None:
    """Show the status until interrupted; in a pipe, one line for each refresh."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        while True:
            status = read_status()
            room = status["capacity"]
            states = " ".join(f"{unit['name']}={unit['state']}:{unit['busy']}" for unit in status["units"])
            text = f"{time.strftime('%H:%M:%S')} sessions={room['sessions']} share={room['share']:.2f} {states}"
            console.print(text, soft_wrap=True, highlight=False, markup=False)
            time.sleep(interval_s)
    with Live(screen(read_status()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(screen(read_status()), refresh=True)
