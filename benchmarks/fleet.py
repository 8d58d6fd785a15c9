"""Parts of a fleet lost under live sessions: does a word change, and how long until every session goes on?

    python -m benchmarks.fleet [--null] [--kinds engine:10,gateway:10,...,upgrade:2,scale:1] [--json FILE]

A Ray cluster of a head and four nodes on this machine, made by `tickertape fleet up` and `tickertape fleet join`, with
real `tickertape engine` and `tickertape serve` processes, encrypted links, and a load balancer in this process. People
speak one session after the other, the same recording at the pace of speech, and resume through any gateway. For each
kind a part is lost as often as asked, each time when all is whole again; `calm` loses nothing and is what the others
are compared with. Times to go on are those of the last of all who speak: from the loss until sound spoken after it has
been heard. `head-long` is a head that is away for `--head-away` seconds; `scale` is a load that asks for three engines
and then for one. With --null the engines are `benchmarks.null_engine`: for numbers, not for words.
Needs the extra tickertape[fleet].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audio.containers import read_file
from benchmarks.fleet_cluster import Fleet, Shape
from benchmarks.fleet_sessions import Crowd, Session
from benchmarks.scoring import plain_words
from benchmarks.survival import differences
from benchmarks.workers import RATE
from engine.weights.store import cache_folder
from realtime.client import lasting_session
from realtime.commands.pull import SAMPLE

KINDS = "calm:3,engine:10,gateway:10,keeper:10,node:10,head:10,network:10,head-long:1,upgrade:2,scale:1"
# Until an engine has forgotten a gateway that it does not hear, and then some.
SETTLE_S = 60.0
HEAD_SHORT_S = 5.0
# A load that three engines carry, and that one of them does not.
LOAD = 0.75
ARRIVE_S = 1.0
STAY_S = 10.0
# Ray looks after a node this often, and gives it up after so many misses: its own 15 s would be most of the run.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True, slots=True)
class Fates:
    """What became of the sessions of one kind."""

    sessions: int
    # Sessions that did not come to their end, and those that had to begin anew (410).
    lost: int
    # Connections that were lost, and seconds from each loss until the client had its session again.
    connections_lost: int
    reconnected_p50_s: float
    reconnected_max_s: float
    # Longest time in which nothing new of a session was heard.
    longest_wait_s: float
    words: int
    words_that_differ: int
    sessions_that_differ: int
    wrong_numbers: int
    wrong_items: int
    # Samples that a client had to drop because nobody took them.
    samples_lost: int


def fates(crowd: Iterable[Session], failures: int, alone: str) -> Fates:
    sessions = list(crowd)
    waits = [wait for session in sessions for wait in session.resumed_s]
    said = [session.text for session in sessions]
    differ, words = differences(said, [alone] * len(said))
    return Fates(
        len(sessions),
        failures + sum(session.begun > 1 for session in sessions),
        len(waits),
        round(statistics.median(waits), 2) if waits else 0.0,
        round(max(waits, default=0.0), 2),
        round(max((session.longest_wait_s for session in sessions), default=0.0), 2),
        words,
        differ,
        sum(plain_words(text) != plain_words(alone) for text in said),
        sum(session.wrong_numbers for session in sessions),
        sum(session.wrong_items for session in sessions),
        sum(session.kept.lost for session in sessions),
    )


class Matrix:
    """One fleet, and everything that is done to it."""

    def __init__(self, fleet: Fleet, audio: bytes, people: int, streams: int, head_away_s: float) -> None:
        self._fleet, self._audio = fleet, audio
        self._people, self._streams, self._head_away_s = people, streams, head_away_s
        self.alone = ""

    def crowd(self, people: int, apart_s: float) -> Crowd:
        return Crowd(lambda: self._fleet.url, self._audio, people, apart_s)

    async def listen_alone(self) -> None:
        crowd = self.crowd(1, 0.0)
        await asyncio.sleep(1.0)
        await crowd.go()
        if crowd.failures or len(crowd.sessions) != 1:
            raise RuntimeError(f"the calm run failed, and what follows would mean nothing: {crowd.failures}")
        self.alone = crowd.sessions[0].text
        print(f"alone: {self.alone}", flush=True)

    async def series(self, kind: str, times: int) -> dict[str, Any]:
        """The same loss again and again."""
        lose = getattr(self._fleet, f"lose_{kind.removesuffix('-long')}")
        away_s = self._head_away_s if kind.endswith("-long") else HEAD_SHORT_S
        crowd = self.crowd(self._people, len(self._audio) / (2 * RATE) / self._people)
        watching = asyncio.create_task(self._keep_balancer())
        begun, went_on_s, owned_twice = time.monotonic(), list[float](), 0
        calls = list[float]()
        try:
            await crowd.until_all_speak()
            for _ in range(times):
                await self._fleet.spread()
                owned_twice += not await self._settled(crowd)
                before = self._fleet.status()
                hearing = asyncio.create_task(crowd.until_heard())
                is_mended = await lose(before, away_s)
                went_on_s.append(await hearing)
                calls += self._calls_per_look(before, await self._fleet.until_whole(is_mended))
            owned_twice += not await self._settled(crowd)
            await crowd.go()
            owned_twice += not await self._emptied()
        finally:
            watching.cancel()
        crowd.tell_troubles(self.alone)
        return {
            "kind": kind,
            "times": times,
            "at_once": self._people,
            "went_on_p50_s": round(statistics.median(went_on_s), 2),
            "went_on_max_s": round(max(went_on_s), 2),
            **asdict(fates(crowd.sessions, len(crowd.failures), self.alone)),
            "owned_twice": owned_twice,
            "calls_per_look": sorted(set(calls)),
            "took_s": round(time.monotonic() - begun),
        }

    async def scale(self) -> dict[str, Any]:
        """More people than one engine has room for, then few: engines follow by the rules of the file."""
        self._fleet.write_plan(least=1, most=3)
        await self._fleet.run("up")
        await self._until_engines(1)
        seen = Seen(self._fleet)
        watching = asyncio.create_task(seen.watch())
        few = self.crowd(2, ARRIVE_S)
        many = self.crowd(round(3 * LOAD * self._streams) - 2, ARRIVE_S)
        try:
            await self._until_engines(3)
            await asyncio.sleep(STAY_S)
            await many.go()
            await self._until_engines(1)
            await few.go()
        finally:
            watching.cancel()
        refused = [*few.refused_s, *many.refused_s]
        failures = len(few.failures) + len(many.failures)
        return {
            "kind": "scale",
            "engines": seen.engines,
            "engine_start_max_s": round(max(seen.start_s, default=0.0), 1),
            "not_let_in_at_first": len(refused),
            "let_in_after_max_s": round(max(refused, default=0.0), 1),
            **asdict(fates([*few.sessions, *many.sessions], failures, self.alone)),
        }

    async def _until_engines(self, engines: int) -> None:
        async with asyncio.timeout(300):
            while True:
                units = (await self._fleet.until_whole())["units"]
                if sum(unit["kind"] == "engine" for unit in units) == engines:
                    return
                await asyncio.sleep(0.2)

    async def _settled(self, crowd: Crowd) -> bool:
        """Until all is whole and everybody is heard; false if engines have more streams than there are people."""
        await self._fleet.until_whole()
        await crowd.until_heard()
        return await self._have_at_most(self._people)

    async def _emptied(self) -> bool:
        return await self._have_at_most(0)

    async def _have_at_most(self, streams: int) -> bool:
        deadline = time.monotonic() + SETTLE_S
        while (await self._fleet.until_whole())["capacity"]["streams"] > streams:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.2)
        return True

    async def _keep_balancer(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._fleet.status()
            await asyncio.sleep(0.2)

    @staticmethod
    def _calls_per_look(before: dict[str, Any], after: dict[str, Any]) -> list[float]:
        """Nothing if the manager was lost: it counts from nothing then."""
        looks = after["looks"] - before["looks"]
        return [round((after["actor_calls"] - before["actor_calls"]) / looks, 2)] if looks > 0 else []


class Seen:
    """How many engines served, one number after the other, and how long each took from its keeper to serving."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.engines: list[int] = []
        self.start_s: list[float] = []

    async def watch(self) -> None:
        first: dict[str, float] = {}
        while True:
            with contextlib.suppress(OSError):
                units = [unit for unit in self._fleet.status()["units"] if unit["kind"] == "engine"]
                serving = [unit["name"] for unit in units if unit["state"] == "serving"]
                for unit in units:
                    first.setdefault(unit["name"], time.monotonic())
                for name in serving:
                    if (since := first[name]) > 0:
                        self.start_s.append(time.monotonic() - since)
                        first[name] = 0.0
                if self.engines[-1:] != [len(serving)]:
                    self.engines.append(len(serving))
            await asyncio.sleep(0.1)


def recording(seconds: float) -> bytes:
    sound = next(file for file in (cache_folder() / SAMPLE).iterdir() if file.suffix == ".wav")
    samples = np.concatenate(list(read_file(sound)))[: int(seconds * RATE)]
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    lasting_session.FIRST_WAIT_S = 0.1
    # Parts of the fleet run elsewhere, and some of them are from this folder.
    os.environ |= HEALTH | {"PYTHONPATH": str(Path(__file__).parents[1])}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        shape = Shape(arguments.model, arguments.streams, arguments.null)
        fleet = Fleet(Path(folder), shape)
        matrix = Matrix(fleet, recording(arguments.seconds), arguments.sessions, shape.streams, arguments.head_away)
        try:
            await fleet.start()
            await matrix.listen_alone()
            for kind, times in arguments.kinds:
                results.append(await (matrix.scale() if kind == "scale" else matrix.series(kind, times)))
                print(json.dumps(results[-1]), flush=True)
        finally:
            await fleet.stop()
    return results


def kinds(text: str) -> list[tuple[str, int]]:
    known = {part.partition(":")[0] for part in KINDS.split(",")}
    found = [(name, int(times or 1)) for name, _, times in (part.partition(":") for part in text.split(","))]
    if unknown := {name for name, _ in found} - known:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=kinds, default=KINDS, help=f"which, and how often; {KINDS} unless given")
    parser.add_argument("--sessions", type=int, default=4, help="people who speak at the same time")
    parser.add_argument("--seconds", type=float, default=20.0, help="how much of the recording a session hears")
    parser.add_argument("--streams", type=int, default=8, help="how many an engine has room for")
    parser.add_argument("--model", default="moonshine-tiny")
    parser.add_argument("--null", action="store_true", help="engines without a model")
    parser.add_argument("--head-away", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    if arguments.json is not None:
        told = {"command": " ".join(sys.argv[1:]), "cores": os.cpu_count(), "results": results}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
