"""Ids that are unique and cheap to make, and can be gone on with elsewhere."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(slots=True)
class Ids:
    """The next one is the prefix and the next number."""

    prefix: str
    number: int = 0

    @classmethod
    def anew(cls, name: str) -> Ids:
        """Nobody else has this prefix."""
        return cls(f"{name}_{secrets.token_hex(6)}")

    def __call__(self) -> str:
        self.number += 1
        return f"{self.prefix}{self.number:x}"
