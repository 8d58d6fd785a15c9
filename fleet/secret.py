"""The fleet's secret, one file with the same content on every node; and values derived from it. Used by all of `fleet`.

Derived values do not reveal the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fleet.state import FleetError

LEAST_BYTES = 32
# The limit of engines and gateways, checked here so that the error comes before they start.
MOST_BYTES = 4096


def read_secret(path: Path) -> bytes:
    """Reads the secret without surrounding white space. Raises FleetError."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        text = f"cannot read the fleet's secret {str(path)!r}: {error.strerror}; it must be the same file on every node"
        raise FleetError(text) from error
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        bounds = f"at least {LEAST_BYTES} characters and at most {MOST_BYTES}"
        raise FleetError(f"the fleet's secret {str(path)!r} must have {bounds}, for instance `openssl rand -hex 32`")
    return secret


def make_secret(path: Path) -> None:
    """Writes a random secret that only its owner can read; an existing file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(LEAST_BYTES) + "\n")


def fingerprint(secret: bytes) -> str:
    """A value that differs for different secrets and may be shown."""
    return _derived(secret, b"tickertape fleet fingerprint")[:16]


def cluster_token(secret: bytes) -> str:
    """The token that authenticates calls of the Ray cluster."""
    return _derived(secret, b"tickertape fleet cluster token")


def _derived(secret: bytes, purpose: bytes) -> str:
    return hmac.new(secret, purpose, hashlib.sha256).hexdigest()
