"""`tickertape plan`: how many engines, gateways and machines a number of sessions needs, by measured figures.

The figures are those of docs/benchmarks.md and docs/voxtral.md, or those that a running server has measured on its own
machine (`--server`). The answer states every assumption. It starts nothing; the plan of a running fleet is
`fleet/plan.py`.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from typing import Any

from realtime.commands.terminal import KEY_VARIABLE, CommandFailed, UsageError, check_server, decimal, integer, out

EPILOG = """\
Examples:
  tickertape plan --sessions 300 --silent 0.5
  tickertape plan --sessions 20 --silent 0.5 --model moonshine-base-streaming --cores 4
  tickertape plan --sessions 300 --server http://gpu-box:8000      by what this server has measured

Without --server the figures are those that were measured for the documentation: measure your own machine with
`tickertape bench` before you buy one.
"""
# Sessions of one gateway process, as in the choice of `server.workers`.
SESSIONS_PER_GATEWAY = 150
# A session counts as speaking for this long after its last speech.
COUNTED_S = 30


@dataclass(frozen=True, slots=True)
class Engine:
    """The capacity of one engine: streams that speak at the same time (`speaking`), and open streams (`streams`)."""

    name: str
    machine: str
    speaking: float
    streams: int
    source: str
    # Whether a silent session takes no computing time. False for frame-synchronous models: they skip silence only after
    # some seconds, so sessions in shorter pauses cost as much as speaking ones.
    silence_is_free: bool


# Measured; `speaking` is the number of streams that ran without growing lag. Windowed models ran on two cores.
MEASURED = {
    "moonshine-base-streaming": Engine(
        "moonshine-base-streaming",
        "two ARM cores",
        6,
        64,
        "6 live streams for 5 minutes, time to final p95 1.28 s (docs/data/bench-six-arm.json)",
        True,
    ),
    "moonshine-tiny": Engine(
        "moonshine-tiny",
        "two cores",
        4,
        64,
        "4 live streams for 5 minutes, time to final p95 1.25 s (README.md)",
        True,
    ),
    "voxtral": Engine(
        "Voxtral Realtime with 8-bit caches",
        "one H200",
        600,
        801,
        "600 sessions over sockets with six workers, lag p99 140 ms, and memory for 801 streams (docs/voxtral.md)",
        False,
    ),
}
CORES_MEASURED = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How many sessions count as speaking, and how many engines and gateways that takes."""

    speaking: int
    engines: int
    gateways: int
    # What determines the number of engines: speaking or open streams.
    limit: str


def plan(sessions: int, silent: float, headroom: float, engine: Engine) -> Plan:
    """The smallest number of engines for these sessions, if `headroom` (a share) of each engine stays free."""
    speaking = math.ceil(sessions * ((1 - silent) if engine.silence_is_free else 1))
    by_load = math.ceil(speaking / (engine.speaking * (1 - headroom)) - 1e-9)
    by_memory = math.ceil(sessions / engine.streams)
    limit = "speaking streams" if by_load >= by_memory else "open streams"
    return Plan(speaking, max(1, by_load, by_memory), max(1, math.ceil(sessions / SESSIONS_PER_GATEWAY)), limit)


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how many engines and gateways a number of sessions needs",
        description="How many engines, gateways and machines a number of sessions needs, by measured figures.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sessions", type=integer, required=True, help="sessions that are open at the same time")
    parser.add_argument(
        "--silent", type=decimal, default=0.0, metavar="SHARE", help="share of them that is silent (default 0)"
    )
    parser.add_argument(
        "--headroom",
        type=decimal,
        default=0.2,
        metavar="SHARE",
        help="share of each engine to leave free (default 0.2)",
    )
    parser.add_argument("--model", choices=sorted(MEASURED), help="by figures of the documentation (default: voxtral)")
    parser.add_argument("--cores", type=integer, help="cores of a machine, for models that run on the CPU (default 2)")
    parser.add_argument("--server", metavar="URL", help="by what this running server has measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.sessions < 1:
        raise UsageError("--sessions must be at least 1")
    if not 0 <= options.silent <= 1:
        raise UsageError("--silent must be a share from 0 to 1: 0.5 means that half of the sessions are silent")
    if not 0 <= options.headroom < 1:
        raise UsageError("--headroom must be a share from 0 to less than 1")
    if options.server and (options.model or options.cores):
        raise UsageError("--server has figures of its own; leave --model and --cores out")
    engine = (
        _measured_engine(options.server)
        if options.server
        else _documented_engine(options.model or "voxtral", options.cores)
    )
    result = plan(options.sessions, options.silent, options.headroom, engine)
    assumptions = _assumptions(options, engine)
    if options.json:
        _print_json(result, engine, assumptions)
        return 0
    out(f"{options.sessions} sessions; {result.speaking} count as speaking at once:")
    out(f"  engines    {result.engines} ({engine.name}, {engine.machine} each), limited by {result.limit}")
    out(f"             {result.engines + 1} if the loss of one must leave room for all")
    out(f"  gateways   {result.gateways} processes: --workers on one machine, or gateways of a fleet")
    out("Assumptions:")
    for line in assumptions:
        out(f"  - {line}")
    return 0


def _assumptions(options: argparse.Namespace, engine: Engine) -> list[str]:
    lines = [f"one engine carries {engine.speaking:g} speaking and {engine.streams} open streams: {engine.source}"]
    if options.cores and options.cores != CORES_MEASURED:
        lines.append(f"streams grow in proportion to cores; only {CORES_MEASURED} cores were measured")
    if engine.silence_is_free:
        lines.append(
            f"silent sessions take a stream and no time; a session counts as speaking for {COUNTED_S} s after its last "
            "speech, so that short pauses are not silence"
        )
    elif options.silent:
        lines.append("silent sessions count as speaking: with half of 780 sessions silent, words were late")
    lines.append(f"{options.headroom:.0%} of each engine stay free for bursts, uploads and recovery")
    lines.append(f"one gateway process holds {SESSIONS_PER_GATEWAY} sessions, as `server.workers` = 0 assumes")
    lines.append("speech of your users costs what the measured speech did; `tickertape bench` measures yours")
    return lines


def _documented_engine(name: str, cores: int | None) -> Engine:
    engine = MEASURED[name]
    if cores is None:
        return engine
    if not engine.silence_is_free:
        raise UsageError(
            f"--cores is for models that run on the CPU, and {engine.name} was measured on {engine.machine}"
        )
    if cores < 1:
        raise UsageError("--cores must be at least 1")
    speaking = max(1.0, engine.speaking * cores / CORES_MEASURED)
    return Engine(engine.name, f"{cores} cores", speaking, engine.streams, engine.source, True)


def _measured_engine(url: str) -> Engine:
    """The engine of a running server, by its `/capacity`. Raises CommandFailed if it has measured nothing yet."""
    from realtime.client.wire_client import CannotConnect, HttpClient

    check_server(url)
    try:
        answer = HttpClient(url, os.environ.get(KEY_VARIABLE)).get("/capacity")
        return _engine_of(url, answer.json() if answer.status == 200 else {})
    except CannotConnect as error:
        raise CommandFailed(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CommandFailed(f"{url}/capacity does not answer as a Tickertape server does") from error


def _engine_of(url: str, capacity: dict[str, Any]) -> Engine:
    """The engine that `/capacity` describes.

    Raises CommandFailed, and other exceptions if the answer is not that of a Tickertape server.
    """
    engines = capacity.get("engines") or []
    if not engines:
        raise CommandFailed(f"{url} has no engine at the moment; try again when `tickertape status {url}` shows one")
    if not capacity["load_per_stream"]:
        raise CommandFailed(
            f"{url} has not measured the cost of a stream yet; let some sessions speak for half a minute, or run "
            f"`tickertape bench {url}`"
        )
    source = f"measured by {url}, which has {len(engines)} of them"
    speaking, total = (
        float(capacity["streams_that_hold"] / len(engines)),
        int(capacity["streams_total"] // len(engines)),
    )
    if not (0 <= speaking < math.inf and total >= 0):
        raise ValueError
    # The engine measures the cost of speaking streams only. `streams_that_hold` already counts that silence is skipped.
    return Engine(str(engines[0].get("model", "its model")), "a machine like its own", speaking, total, source, True)


def _print_json(result: Plan, engine: Engine, assumptions: list[str]) -> None:
    import json
    from dataclasses import asdict

    text = {**asdict(result), "engines_with_one_lost": result.engines + 1, "engine": asdict(engine)}
    out(json.dumps({**text, "assumptions": assumptions}, indent=1))
