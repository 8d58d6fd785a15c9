"""One server and one good client for all attacks of a file: starting a model takes longer than most of them. They end
with the file, so that the rest of the suite has the machine to itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.attacks.good_client import Lap
from tests.attacks.real_server import GOOD_KEY, RealServer, real_server
from tests.cached_models import skip_unless_cached

# What the reports of tests call the longest hold of the gateway's event loop.
HOLD = "longest hold of the event loop"
NEEDED = ("moonshine-tiny", "sample-two-cities")
LAP_S = 60.0


def letters(lap: Lap) -> list[str]:
    """The words, without capitals and punctuation: an engine that is late hears a pause in one piece with what follows,
    and may write a comma for a full stop."""
    return ["".join(filter(str.isalnum, word)).lower() for word, _, _ in lap.words]


@dataclass
class Beside:
    """The good client, in a process of its own, session after session. Its first session was alone: the calm one."""

    process: subprocess.Popen[str]
    laps: list[Lap] = field(default_factory=list)
    # What was going on, and when: a lap that went wrong can name its suspects.
    attacks: list[tuple[str, float, float]] = field(default_factory=list)
    _checked: int = 0

    @property
    def calm(self) -> Lap:
        return self.laps[0]

    def wait_for_lap(self, after: float) -> None:
        """Until a session that began after this moment, or was running then, is over."""
        deadline = time.monotonic() + LAP_S
        while not any(lap.ended >= after for lap in self.laps):
            assert time.monotonic() < deadline, "the good client has fallen silent"
            time.sleep(0.05)

    def check(self) -> None:
        """Every session since the last check heard the words of the calm one."""
        unchecked, self._checked = range(self._checked, len(self.laps)), len(self.laps)
        for number in unchecked:
            lap = self.laps[number]
            if letters(lap) != letters(self.calm) or lap.problems:
                suspects = [name for name, began, ended in self.attacks if began < lap.ended and ended > lap.began]
                said = " ".join(word for word, _, _ in lap.words)
                raise AssertionError(f"session {number} heard {said!r}, {lap.problems}, beside {suspects}")

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lap = Lap(**json.loads(line))
            lap.words = [(text, start, end) for text, start, end in lap.words]
            self.laps.append(lap)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How long one attack kept the gateway from all others, which no test can assert on a busy machine."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    holds = [
        (ms, text, report.nodeid.rpartition("::")[2])
        for report in reports
        for name, (ms, text) in getattr(report, "user_properties", [])
        if name == HOLD
    ]
    if holds:
        terminalreporter.section("longest hold of the gateway's event loop")
        for _, text, test in sorted(holds, reverse=True):
            terminalreporter.write_line(f"{test}: {text}")
        terminalreporter.write_line(f"the longest of {len(holds)}: {max(holds)[1]}")


def skip_without_models() -> None:
    skip_unless_cached(*NEEDED)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    skip_without_models()
    with real_server() as running:
        yield running


@pytest.fixture(scope="module")
def beside(server: RealServer) -> Iterator[Beside]:
    with GoodClient(server) as client:
        yield client


class GoodClient:
    """Starts the good client, and waits for its calm session."""

    def __init__(self, server: RealServer) -> None:
        self._server = server

    def __enter__(self) -> Beside:
        program = (sys.executable, "-m", "tests.attacks.good_client", self._server.ws, GOOD_KEY)
        self._beside = Beside(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
        self._reader = threading.Thread(target=self._beside.read)
        self._reader.start()
        self._beside.wait_for_lap(0.0)
        calm = self._beside.calm
        assert not calm.problems and "best of times" in " ".join(word for word, _, _ in calm.words), calm
        return self._beside

    def __exit__(self, *_: object) -> None:
        self._beside.process.terminate()
        self._beside.process.wait()
        self._reader.join()
        assert self._beside.process.stdout is not None
        self._beside.process.stdout.close()
