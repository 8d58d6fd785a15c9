"""The fleet's secret: one file on every node. What others may see of it says nothing about it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fleet.state import FleetError

LEAST_BYTES = 32
# Engines and gateways take no longer one, and would say so only when they start.
MOST_BYTES = 4096


def read_secret(path: Path) -> bytes:
    """Raises FleetError."""
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
    """Readable for its owner alone; one that is there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(LEAST_BYTES) + "\n")


def fingerprint(secret: bytes) -> str:
    """Tells nodes with different secrets apart, and can be shown."""
    return _derived(secret, b"tickertape fleet fingerprint")[:16]


def cluster_token(secret: bytes) -> str:
    """What the cluster's own calls are authenticated with."""
    return _derived(secret, b"tickertape fleet cluster token")


def _derived(secret: bytes, purpose: bytes) -> str:
    return hmac.new(secret, purpose, hashlib.sha256).hexdigest()
