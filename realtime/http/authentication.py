"""Authenticates callers by API key, client secret or Twilio's signature; `Context` has what all routes share.

Routes get their caller from `Context`, which asks the `Authenticator` and counts refusals; it also checks Twilio's
signature. The `Authenticator` owns the API keys as digests only; keys never appear in a log or a response. It also
issues client secrets: short-lived keys for browsers, which are signed and not stored, and contain their owner, the
initial settings of their sessions and their expiry time. `Context` holds the engine, the configuration, the metrics,
the authenticator and the sessions.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from realtime.config import Config, LimitsConfig
from realtime.errors import Refusal
from realtime.serving.engine_api import EngineApi
from realtime.serving.metrics import Metrics
from realtime.serving.quota import Caller
from realtime.serving.registry import Sessions
from realtime.serving.signed_tokens import Signer
from realtime.session.settings import Settings

SECRET_PREFIX = "ek_"
# What the signature of a client secret is bound to.
PURPOSE = "client secret"
# Random bytes of a client secret.
SALT_LENGTH = 9
# The longest client secret: it has to fit into a request header.
MAX_SECRET_CHARACTERS = 6000
KEY_PROTOCOL_PREFIX = "openai-insecure-api-key."
BETA_PROTOCOL = "openai-beta.realtime-v1"
# Deepgram's browser clients send the key as the subprotocol after one of `KEY_FOLLOWS`. The server may select the
# subprotocols in `SELECTABLE`.
KEY_FOLLOWS = ("token", "bearer")
SELECTABLE = ("realtime", *KEY_FOLLOWS)


@dataclass(frozen=True, slots=True)
class ClientSecret:
    value: str
    expires_at: int


class _Issued(msgspec.Struct, array_like=True):
    """The content of a client secret."""

    expires_at: int
    owner: str
    settings: Settings
    # Random, so that every secret is unique.
    salt: bytes


def select_subprotocol(offered: Sequence[str]) -> str | None:
    """The subprotocol that the server selects from the client's offer; never an entry that contains a key.

    A browser fails the socket if none of its offers is selected; some offer only the name of OpenAI's beta.
    """
    otherwise = BETA_PROTOCOL if BETA_PROTOCOL in offered else None
    return next((name for name in offered if name in SELECTABLE), otherwise)


def asks_for_beta(headers: Mapping[str, str], subprotocols: Sequence[str]) -> bool:
    """Whether the client uses OpenAI's beta protocol: by its header, a list, or by a browser's subprotocol."""
    betas = [name.strip() for name in headers.get("openai-beta", "").split(",")]
    return "realtime=v1" in betas or BETA_PROTOCOL in subprotocols


def offered_key(headers: Mapping[str, str], subprotocols: list[str]) -> str | None:
    """The key of a request, from any of the headers and subprotocols that clients use for it."""
    authorization = headers.get("authorization", "")
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() in ("bearer", "token") and value.strip():
        return value.strip()
    if headers.get("api-key"):
        return headers["api-key"]
    for name in subprotocols:
        if name.startswith(KEY_PROTOCOL_PREFIX):
            return name.removeprefix(KEY_PROTOCOL_PREFIX)
    for name, follower in zip(subprotocols, subprotocols[1:], strict=False):
        if name in KEY_FOLLOWS:
            return follower
    return None


class Authenticator:
    """Checks keys and issues client secrets."""

    def __init__(self, keys: Iterable[str], signer: Signer, clock: Callable[[], float] = time.time) -> None:
        self._signer = signer
        self._clock = clock
        self._digests: list[bytes] = []
        self._names: frozenset[str] = frozenset()
        self.use_keys(keys)

    @property
    def asks_for_keys(self) -> bool:
        return bool(self._digests)

    def use_keys(self, keys: Iterable[str]) -> None:
        """Replace the keys. Client secrets of removed keys become invalid."""
        self._digests = [_digest(key) for key in keys]
        # Names of callers do not depend on the order of the keys, which may differ between gateways.
        self._names = frozenset(map(self._name, self._digests))

    def name_of(self, key: str) -> str:
        """The name of the caller with this API key."""
        return self._name(_digest(key))

    def _name(self, digest: bytes) -> str:
        return f"key {self._signer.alias(digest)}"

    def check(self, key: str | None, address: str) -> Caller:
        """The caller with this key. Raises a 401 Refusal if the key is missing, wrong or expired."""
        issued = self._read(key) if key is not None and key.startswith(SECRET_PREFIX) else None
        if issued is not None and issued.expires_at > self._clock() and self.vouches_for(issued.owner):
            return Caller(issued.owner, issued.settings)
        if not self._digests:
            return Caller(f"address {address}")
        if key is None:
            raise _unauthorized("A key is required: send 'Authorization: Bearer <key>'.")
        digest = _digest(key)
        # Compare with every key, so that the time taken reveals nothing about them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if any(matches):
            return Caller(self._name(digest))
        if key.startswith(SECRET_PREFIX):
            raise _unauthorized("The client secret is not valid any more; request a new one.")
        raise _unauthorized("Incorrect API key provided.")

    def vouches_for(self, owner: str) -> bool:
        """Whether client secrets and viewer links of this owner are valid: without keys all are, otherwise those of
        current keys."""
        return owner in self._names if self._digests else True

    def issue(self, caller: Caller, settings: Settings, seconds: int) -> ClientSecret:
        """A secret that can open sessions with these settings for this many seconds. Raises Refusal."""
        expires_at = int(self._clock()) + seconds
        issued = _Issued(expires_at, caller.name, settings, secrets.token_bytes(SALT_LENGTH))
        value = SECRET_PREFIX + self._signer.sign(PURPOSE, zlib.compress(msgspec.msgpack.encode(issued)))
        if len(value) > MAX_SECRET_CHARACTERS:
            text = "The settings are too long for a client secret; send a shorter prompt or fewer keywords."
            raise Refusal(400, "settings_too_long", text, param="session")
        return ClientSecret(value, expires_at)

    def _read(self, key: str) -> _Issued | None:
        value = self._signer.read(PURPOSE, key.removeprefix(SECRET_PREFIX))
        if value is None:
            return None
        try:
            # The signature was valid, but a server of another version may have signed it.
            return msgspec.msgpack.decode(zlib.decompress(value), type=_Issued)
        except (zlib.error, msgspec.DecodeError):
            return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str) -> Refusal:
    return Refusal(401, "invalid_api_key", message)


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that all routes share: engine, configuration, metrics, authentication and sessions."""

    engine: EngineApi
    config: Config
    metrics: Metrics
    authenticator: Authenticator
    sessions: Sessions

    @property
    def limits(self) -> LimitsConfig:
        return self.config.limits

    @property
    def draining(self) -> bool:
        """The server is shutting down and takes no new work."""
        return self.sessions.draining

    def caller(self, headers: Headers, subprotocols: list[str], address: str) -> Caller:
        """The caller of a socket or a request. Raises Refusal, and counts it in the metrics."""
        return self.caller_with(offered_key(headers, subprotocols), address)

    def caller_with(self, key: str | None, address: str) -> Caller:
        """The caller with this key. Raises Refusal, and counts it in the metrics."""
        try:
            return self.authenticator.check(key, address)
        except Refusal:
            self.metrics.refused.labels("auth").inc()
            raise

    def check_twilio(self, headers: Headers, path: str) -> None:
        """Check the signature of an upgrade if the operator has set Twilio's auth token. Raises Refusal.

        It proves that the request comes from Twilio, and names no key: it is asked for in addition to a key. Twilio
        signs the URL of the TwiML. Behind a proxy the name in that URL is the header `Host`; some URLs are signed
        without their port.
        """
        token, host = self.config.auth.twilio_auth_token.reveal(), headers.get("host", "")
        if not token:
            return
        given = headers.get("x-twilio-signature", "").encode("utf-8", "surrogateescape")
        for name in (host, host.rpartition(":")[0]):
            signature = hmac.digest(token.encode(), f"wss://{name}{path}".encode(), "sha1")
            if hmac.compare_digest(base64.b64encode(signature), given):
                return
        self.metrics.refused.labels("auth").inc()
        text = "The X-Twilio-Signature is not that of auth.twilio_auth_token for wss://HOST/v1/twilio."
        raise Refusal(401, "invalid_signature", text)

    def caller_of(self, request: Request) -> Caller:
        """The caller of an HTTP request. Raises Refusal, also for a client secret, which is valid for sockets only."""
        caller = self.caller(request.headers, [], request.client.host if request.client else "")
        if caller.is_secret:
            self.metrics.refused.labels("auth").inc()
            text = "A client secret opens realtime sockets only; use an API key from your own server for this."
            raise Refusal(403, "client_secret_not_allowed", text)
        return caller
