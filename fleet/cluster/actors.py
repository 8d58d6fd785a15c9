"""What runs inside Ray: one actor around each keeper, and one around the manager.

Each has a thread that does the work; calls are for words, a few a second, whatever the fleet carries.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from fleet.cluster.crew import RayCrew
from fleet.keepers.engine import EngineKeeper
from fleet.keepers.gateway import GatewayKeeper
from fleet.keepers.keeper import Keeper, Place
from fleet.keepers.process import Records
from fleet.manager import Manager, Memory
from fleet.plan import plan_from
from fleet.state import Kind, Unit
from fleet.table import Table, write_whole

logger = logging.getLogger(__name__)
STEP_S = 0.5


def units_on(folder: str, node: str) -> list[Unit]:
    """What runs on this node already; a task, run there."""
    return [record.unit(node) for record in Records(Path(folder)).running()]


class KeeperActor:
    """The process that is kept outlives this one; see `Keeper`."""

    def __init__(self, unit: Unit, plan: dict[str, Any], place: Place) -> None:
        made = EngineKeeper if unit.kind is Kind.ENGINE else GatewayKeeper
        self._keeper: Keeper = made(unit, plan_from(plan), place)
        threading.Thread(target=self._work, name="keep", daemon=True).start()

    def report(self, table: Table, figures: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self._keeper, GatewayKeeper):
            self._keeper.take_table(table)
            self._keeper.take_figures(figures)
        return self._keeper.report()

    def drain(self) -> None:
        self._keeper.drain()

    def _work(self) -> None:
        pause = threading.Event()
        while not pause.wait(STEP_S):
            try:
                self._keeper.step()
            except Exception:
                logger.exception("the keeper of %s stumbled", self._keeper.unit.name)


class FleetActor:
    """The manager; its memory is a file on the head's disk."""

    def __init__(self, plan: dict[str, Any], fingerprint: str) -> None:
        wanted = plan_from(plan)
        self._file = wanted.folder / "memory.json"
        memory = self._remembered() or Memory.of(wanted)
        self._crew = RayCrew(memory.plan, fingerprint, KeeperActor, units_on)
        self._manager = Manager(self._crew, memory, self._store)
        self._lock = threading.Lock()
        self._look_s = wanted.look_s
        threading.Thread(target=self._work, name="manage", daemon=True).start()

    def want(self, plan: dict[str, Any]) -> None:
        with self._lock:
            self._manager.want(plan_from(plan))

    def scale(self, engines: int) -> None:
        with self._lock:
            self._manager.scale(engines)

    def planned(self, engines: int | None) -> dict[str, Any]:
        with self._lock:
            return self._manager.planned(engines)

    def drain(self, name: str) -> None:
        with self._lock:
            self._manager.drain(name)

    def undrain(self, name: str) -> None:
        with self._lock:
            self._manager.undrain(name)

    def upgrade(self) -> int:
        with self._lock:
            return self._manager.upgrade()

    def go_down(self) -> None:
        with self._lock:
            self._manager.go_down()

    def status(self) -> dict[str, Any]:
        with self._lock:
            return self._status()

    def forget(self) -> None:
        """The fleet is down and is not to come back by itself."""
        self._file.unlink(missing_ok=True)

    def _work(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._look_s):
            try:
                with self._lock:
                    self._manager.step()
                    # For programs on the head that look often: asking Ray takes a second and more.
                    write_whole(self._file.with_name("status.json"), json.dumps(self._status()))
            except Exception:
                logger.exception("a look at the fleet failed")

    def _remembered(self) -> Memory | None:
        try:
            return Memory.from_json(json.loads(self._file.read_text()))
        except (OSError, ValueError, KeyError):
            return None

    def _status(self) -> dict[str, Any]:
        is_down = self._manager.is_down
        return {**self._manager.status(), "is_down": is_down, "actor_calls": self._crew.calls, "pid": os.getpid()}

    def _store(self, memory: dict[str, Any]) -> None:
        write_whole(self._file, json.dumps(memory))
