"""Tokens that the server signs with HMAC and verifies, such as resume tokens and client secrets.

Tokens are not stored: every process with the same secret can verify them. Their content is readable, but cannot be
forged without the secret. `signing_secret` and `fleet_secret` choose the secret by the configuration. Links for viewers
are tokens too (`viewer_links.py`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from engine.fleet_secret import derive, read_secret
from realtime.config import Config, ConfigError

# Bytes of the HMAC in a token.
MAC_BYTES = 18
RESUME_PREFIX = "rt_"


class Signer:
    """Signs and verifies tokens with one secret, which several gateways may share. Without one, a random secret."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)

    def sign(self, purpose: str, value: bytes, bearer: str = "") -> str:
        """A token with this value, valid for this purpose and this bearer only."""
        return _text(self._mac(purpose, value, bearer) + value)

    def read(self, purpose: str, text: str, bearer: str = "") -> bytes | None:
        """The value of a token; None if it was not signed with our secret for this purpose and bearer."""
        try:
            signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            return None
        mac, value = signed[:MAC_BYTES], signed[MAC_BYTES:]
        # Base64 decoding is lenient: accept only the one text that `sign` makes for these bytes.
        if _text(signed) != text or not hmac.compare_digest(mac, self._mac(purpose, value, bearer)):
            return None
        return value

    def alias(self, value: bytes) -> str:
        """A name for a confidential value, such as an API key; the same for all processes with the same secret."""
        return _text(self._mac("alias", value, ""))

    def resume_token(self, session_id: str, caller: str) -> str:
        return RESUME_PREFIX + self.sign("resume", session_id.encode(), caller)

    def session_of(self, token: str, caller: str) -> str | None:
        """The session id of a resume token; None if the token is not valid for this caller."""
        if not token.startswith(RESUME_PREFIX):
            return None
        value = self.read("resume", token.removeprefix(RESUME_PREFIX), caller)
        return None if value is None else value.decode()

    def _mac(self, purpose: str, value: bytes, bearer: str) -> bytes:
        message = b"\0".join((purpose.encode(), bearer.encode("utf-8", "surrogateescape"), value))
        return hmac.digest(self._secret, message, hashlib.sha256)[:MAC_BYTES]


def fleet_secret(config: Config) -> bytes | None:
    """The content of `fleet.secret_file`; None if it is not set. Raises ConfigError if it cannot be used."""
    if config.fleet.secret_file is None:
        return None
    try:
        return read_secret(config.fleet.secret_file)
    except ValueError as error:
        raise ConfigError(f"fleet.secret_file: {error}") from None


def signing_secret(config: Config) -> bytes:
    """The secret for tokens; empty if none is configured, and then the signer makes a random one."""
    secret = fleet_secret(config)
    return config.auth.secret.reveal().encode() if secret is None else derive(secret, "tokens")


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
