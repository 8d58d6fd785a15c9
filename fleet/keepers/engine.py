"""The keeper of an engine. An engine has no HTTP: what it carries is known from the gateways."""

from __future__ import annotations

from fleet.keepers.keeper import Keeper, program


class EngineKeeper(Keeper):
    @property
    def drain_s(self) -> float:
        return self.plan.engine.drain_s

    def command(self) -> list[str]:
        address = f"tcp://{self.place.host}:{self.unit.port}"
        settings = ["--config", self.plan.config] if self.plan.config else []
        return [
            *program(self.plan.engine.program),
            "engine",
            *("--listen", address),
            *("--fleet-secret-file", str(self.plan.secret_path)),
            *("--drain-s", f"{self.drain_s:g}"),
            *settings,
        ]
