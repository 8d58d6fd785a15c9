"""Helpers of all benchmarks: common options, printed figures, JSON files, percentiles, cost of processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from realtime.bench.statistics import percentile

ROOT = Path(__file__).parents[1]
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class RunFailed(Exception):
    """The run has no result; the text says why."""


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    return with_common_options(parser)


def with_common_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--small", action="store_true", help="seconds, on a CPU: shows that it runs, measures nothing")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Any],
    **small: Any,
) -> None:
    """Parse the options, measure, and write the figures to the file of --json. `small`: options of a small run."""
    options = parser.parse_args(arguments)
    if options.small:
        vars(options).update(small)
    write_json(options, measure(options))


def positive(text: str) -> int:
    """The type of an option: a whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def write_json(options: argparse.Namespace, figures: Any) -> None:
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False, default=str) + "\n")


def show(title: str, figures: Mapping[str, Any]) -> None:
    """Print one figure a line; a group of figures is indented below its name."""
    print(f"\n{title}")
    _show_rows(figures, 2)


def _show_rows(figures: Mapping[str, Any], indent: int) -> None:
    for name, value in figures.items():
        label = " " * indent + (name if "." in name else name.replace("_", " "))
        if isinstance(value, Mapping):
            print(label)
            _show_rows(value, indent + 2)
        else:
            print(f"{label:<44} {_shown(value)}", flush=True)


def row(figures: Mapping[str, Any]) -> str:
    """All figures in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in figures.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.3f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "-"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def percentiles(name: str, values: Sequence[float], *shares: int) -> dict[str, float | None]:
    """{"lag_p50": ..., "lag_max": ...}, where 100 is the maximum; None without values."""
    return {f"{name}_{'max' if share == 100 else f'p{share}'}": percentile(values, share) for share in shares}


def is_at_most(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


async def until(condition: Callable[[], bool], patience_s: float = 300.0) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.005)


# Processes


@contextmanager
def spawned(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, int]]:
    """A new process that runs `target(*arguments, pipe)`: our end of the pipe, and its process id. It is killed at the
    end of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process.pid or 0
    finally:
        process.kill()
        process.join()


def read_process(pid: int | str, file: str) -> str:
    """A file of /proc/PID; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process is gone."""
    return read_process(pid, "stat").rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS if fields else 0.0


def with_descendants(pid: int) -> list[int]:
    """Descendants, found by the parents of all processes: not every kernel lists children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_of(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def private_bytes(pid: int) -> int:
    """Private memory of a process in bytes."""
    lines = read_process(pid, "smaps_rollup").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(read_process("self", "statm").split()[1]) * os.sysconf("SC_PAGESIZE")
