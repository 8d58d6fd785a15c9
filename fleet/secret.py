"""The fleet's secret, one file with the same content on every node; and values derived from it. Used by all of `fleet`.

Derived values do not reveal the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from engine.fleet_secret import read_secret as read_shared_secret
from fleet.state import FleetError

MADE_BYTES = 32


def read_secret(path: Path) -> bytes:
    """Reads the secret as engines and gateways do. Raises FleetError."""
    try:
        return read_shared_secret(path)
    except ValueError as error:
        raise FleetError(f"{error}; it must be the same file on every node") from error


def make_secret(path: Path) -> None:
    """Writes a random secret that only its owner can read; an existing file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(MADE_BYTES) + "\n")


def fingerprint(secret: bytes) -> str:
    """A value that differs for different secrets and may be shown."""
    return _derived(secret, b"tickertape fleet fingerprint")[:16]


def cluster_token(secret: bytes) -> str:
    """The token that authenticates calls of the Ray cluster."""
    return _derived(secret, b"tickertape fleet cluster token")


def _derived(secret: bytes, purpose: bytes) -> str:
    return hmac.new(secret, purpose, hashlib.sha256).hexdigest()
