"""Who a session belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from realtime.session.settings import Settings


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking: a name to count by that is not the key itself, and the settings a client secret carries."""

    name: str
    settings: Settings | None = None

    @property
    def is_secret(self) -> bool:
        """A browser that was given a client secret. It may open sockets, and nothing else."""
        return self.settings is not None
