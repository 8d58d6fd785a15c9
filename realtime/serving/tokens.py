"""Values that the server signs and hands out, so that no process has to remember them: any that has the secret reads
them. They say nothing that their bearer may not know; they cannot be made or changed without the secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from engine.fleet_secret import derive, read_secret
from realtime.config import Config, ConfigError

MAC_BYTES = 18
RESUME_PREFIX = "rt_"


class Signer:
    """Signs for one server, or for all that share its secret."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)

    def sign(self, purpose: str, value: bytes, bearer: str = "") -> str:
        """The value as text, with what proves that we said it, for this purpose and this bearer."""
        return _text(self._mac(purpose, value, bearer) + value)

    def read(self, purpose: str, text: str, bearer: str = "") -> bytes | None:
        """The value, or None if we never signed it for that."""
        try:
            signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            return None
        mac, value = signed[:MAC_BYTES], signed[MAC_BYTES:]
        # One text for each value: what decodes to the same bytes by leniency was not made here.
        if _text(signed) != text or not hmac.compare_digest(mac, self._mac(purpose, value, bearer)):
            return None
        return value

    def alias(self, value: bytes) -> str:
        """A name for a value that must not be told: the same wherever the secret is the same."""
        return _text(self._mac("alias", value, ""))

    def resume_token(self, session_id: str, caller: str) -> str:
        return RESUME_PREFIX + self.sign("resume", session_id.encode(), caller)

    def session_of(self, token: str, caller: str) -> str | None:
        """The session that a token resumes for this caller; None if it is not one of ours, or another's."""
        if not token.startswith(RESUME_PREFIX):
            return None
        value = self.read("resume", token.removeprefix(RESUME_PREFIX), caller)
        return None if value is None else value.decode()

    def _mac(self, purpose: str, value: bytes, bearer: str) -> bytes:
        message = b"\0".join((purpose.encode(), bearer.encode("utf-8", "surrogateescape"), value))
        return hmac.digest(self._secret, message, hashlib.sha256)[:MAC_BYTES]


def fleet_secret(config: Config) -> bytes | None:
    """Raises ConfigError if the file that was named cannot be used."""
    if config.fleet.secret_file is None:
        return None
    try:
        return read_secret(config.fleet.secret_file)
    except ValueError as error:
        raise ConfigError(f"fleet.secret_file: {error}") from None


def signing_secret(config: Config) -> bytes:
    """What this server signs with; empty if it is to make one up."""
    secret = fleet_secret(config)
    return config.auth.secret.reveal().encode() if secret is None else derive(secret, "tokens")


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
