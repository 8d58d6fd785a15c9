"""The shared secret of a fleet: makes and reads its file, and derives keys for links, signed tokens and Ray.

Every machine of a fleet has a file with the same content. Gateways, engines and `tickertape fleet` read it when they
start. Holders of the secret can derive every key; no derived value reveals the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

MIN_SECRET_BYTES = 16
# A longer file is not a secret but something else, and is refused.
MAX_SECRET_BYTES = 4096
KEY_BYTES = 32
# Random bytes of a new secret; its file has them as hexadecimal digits.
NEW_SECRET_BYTES = 32


def read_secret(path: str | Path) -> bytes:
    """The contents of the file without surrounding white space. Raises ValueError with a text that says what to fix."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(
            f"the fleet's secret cannot be read from {str(path)!r}: {error.strerror}; copy the file of another "
            f"machine of the fleet, or make one with `openssl rand -hex 32`, readable for the server's user"
        ) from None
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        size = f"more than {MAX_SECRET_BYTES}" if len(secret) > MAX_SECRET_BYTES else str(len(secret))
        raise ValueError(
            f"the fleet's secret in {str(path)!r} has {size} bytes; use {MIN_SECRET_BYTES} to "
            f"{MAX_SECRET_BYTES} random ones, for instance `openssl rand -hex 32`"
        )
    return secret


def make_secret(path: Path) -> None:
    """Write a random secret to a file that only its owner can read; an existing file is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(NEW_SECRET_BYTES) + "\n")


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose (HKDF of RFC 5869 with SHA-256). One derived key reveals nothing about another."""
    pseudorandom = hmac.digest(b"tickertape fleet", secret, hashlib.sha256)
    return hmac.digest(pseudorandom, purpose.encode() + b"\x01", hashlib.sha256)[:KEY_BYTES]


def fingerprint(secret: bytes) -> str:
    """A short value that differs for different secrets; it may be shown and sent, because it does not reveal them."""
    return hmac.digest(secret, b"tickertape fleet fingerprint", hashlib.sha256).hex()[:16]


def cluster_token(secret: bytes) -> str:
    """The token that authenticates calls of the Ray cluster."""
    return hmac.digest(secret, b"tickertape fleet cluster token", hashlib.sha256).hex()
