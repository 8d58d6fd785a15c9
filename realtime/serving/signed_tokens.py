"""Tokens that the server signs with HMAC and verifies: resume tokens, client secrets and viewer links.

Tokens are not stored: every process with the same secret can verify them. Their content is readable, but cannot be
forged without the secret. `signing_secret` and `fleet_secret` choose the secret by the configuration.

With a viewer link its bearer reads one published session, until the link expires or is revoked. `ViewerLinks` makes and
checks links, for the routes of viewers. Only revocations are kept in memory (`Revocations`), in a bounded number for
each owner. The signing secret of links is new at each start of the server, so a restart ends all links, and a revoked
link can never become valid again. The gateways of a fleet have a permanent secret for links; there a link is valid only
if it was made after `links_from_ms`, the earliest start of the gateways that know each other's revocations.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

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


# Viewer links


LINK_PREFIX = "vl_"
# What the signature of a link is bound to.
LINK_PURPOSE = "viewer link"
MAX_TOKEN_CHARACTERS = 1000
# Lifetime of a link in seconds.
MIN_LINK_S, DEFAULT_LINK_S, MAX_LINK_S = 10, 24 * 3600, 30 * 24 * 3600
# Revocations that are kept for one owner. One more revokes all links of its name, or of the owner.
MAX_REVOKED = 1000
# The id of a link: its expiry time in hexadecimal digits, a hyphen, and random digits.
_ID = re.compile(r"([0-9a-f]{8,10})-[0-9a-f]{16}", re.ASCII)


class Link(msgspec.Struct, array_like=True, frozen=True):
    """The content of a link. Its name is not in it: the signature is bound to the name."""

    id: str
    owner: str
    # In milliseconds, because `Revocation.before` has to tell links of the same second apart.
    issued_ms: int
    expires_at: int


class Revocation(msgspec.Struct, array_like=True, frozen=True):
    """Revokes the link with this id; without an id, all links of the name that were issued up to `before_ms`; without a
    name, all of the owner. It can be forgotten at `until`, when these links have expired."""

    owner: str
    until: float
    name: str = ""
    id: str = ""
    before_ms: int = 0


@dataclass(slots=True)
class _OwnerRevocations:
    """The revocations of one owner: by link id, by name, and for everything."""

    ids: dict[str, Revocation] = field(default_factory=dict)
    names: dict[str, Revocation] = field(default_factory=dict)
    everything: Revocation | None = None

    def __len__(self) -> int:
        return len(self.ids) + len(self.names)

    def all(self) -> Iterator[Revocation]:
        yield from (*self.ids.values(), *self.names.values())
        if self.everything is not None:
            yield self.everything


class Revocations:
    """The revoked links. Owners are API keys, so their number is bounded by the configuration."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        # Links that were issued before this time, in milliseconds, are not valid.
        self.links_from_ms = 0
        self._clock = clock
        self._owners: dict[str, _OwnerRevocations] = {}

    def all(self) -> list[Revocation]:
        return [revocation for owner in self._owners.values() for revocation in owner.all()]

    def add(self, revocation: Revocation) -> None:
        """Add a revocation. If the owner has too many, all links of the name are revoked; if that does not help, all
        links of the owner."""
        of_owner = self._owners.setdefault(revocation.owner, _OwnerRevocations())
        self._forget_expired(of_owner)
        now = self._clock()
        if revocation.id and revocation.id not in of_owner.ids and len(of_owner) >= MAX_REVOKED:
            before_ms = round(now * 1000)
            revocation = Revocation(revocation.owner, now + MAX_LINK_S, revocation.name, before_ms=before_ms)
        if revocation.id:
            of_owner.ids[revocation.id] = revocation
            return
        if revocation.name:
            of_owner.ids = {key: one for key, one in of_owner.ids.items() if one.name != revocation.name}
            of_owner.names.pop(revocation.name, None)
            if len(of_owner) < MAX_REVOKED:
                of_owner.names[revocation.name] = revocation
                return
        self._owners[revocation.owner] = _OwnerRevocations(everything=revocation)

    def include(self, link: Link, name: str) -> bool:
        """Whether a link of this name is revoked."""
        if link.issued_ms < self.links_from_ms:
            return True
        of_owner = self._owners.get(link.owner)
        if of_owner is None:
            return False
        return link.id in of_owner.ids or link.issued_ms <= self._revoked_until_ms(of_owner, name)

    def issue_time(self, owner: str, name: str) -> int:
        """The time for a new link, in milliseconds: it is after all revocations, also if the clock was set back."""
        of_owner = self._owners.get(owner)
        now = max(round(self._clock() * 1000), self.links_from_ms)
        return now if of_owner is None else max(now, self._revoked_until_ms(of_owner, name) + 1)

    def _revoked_until_ms(self, of_owner: _OwnerRevocations, name: str) -> int:
        by_name = of_owner.names.get(name)
        return max(0 if found is None else found.before_ms for found in (by_name, of_owner.everything))

    def _forget_expired(self, of_owner: _OwnerRevocations) -> None:
        now = self._clock()
        of_owner.ids = {key: one for key, one in of_owner.ids.items() if one.until > now}
        of_owner.names = {key: one for key, one in of_owner.names.items() if one.until > now}


class ViewerLinks:
    """Makes links and checks them. `vouches_for` says whether an owner still has a key."""

    def __init__(
        self,
        signer: Signer,
        revocations: Revocations,
        vouches_for: Callable[[str], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._signer = signer
        self._revocations = revocations
        self._vouches_for = vouches_for
        self._clock = clock

    def make(self, owner: str, name: str, seconds: int) -> tuple[str, Link]:
        """A new link of this name, as a token and as a value."""
        expires_at = int(self._clock()) + seconds
        link_id = f"{expires_at:08x}-{secrets.token_hex(8)}"
        link = Link(link_id, owner, self._revocations.issue_time(owner, name), expires_at)
        return LINK_PREFIX + self._signer.sign(LINK_PURPOSE, msgspec.msgpack.encode(link), name), link

    def read(self, token: str, name: str) -> Link | None:
        """The link of a token; None if it is not valid for this name."""
        if not token.startswith(LINK_PREFIX) or len(token) > MAX_TOKEN_CHARACTERS or not token.isascii():
            return None
        value = self._signer.read(LINK_PURPOSE, token.removeprefix(LINK_PREFIX), name)
        if value is None:
            return None
        link = msgspec.msgpack.decode(value, type=Link)
        return link if self.is_valid(link, name) else None

    def is_valid(self, link: Link, name: str) -> bool:
        """Whether a link can still be used."""
        is_open = link.expires_at > self._clock() and self._vouches_for(link.owner)
        return is_open and not self._revocations.include(link, name)

    def revocation(self, owner: str, name: str, link_id: str | None = None) -> Revocation | None:
        """The revocation of one link, or of all links of a name. None if the id is not one of a link."""
        now = self._clock()
        if link_id is None:
            return Revocation(owner, now + MAX_LINK_S, name, before_ms=self._revocations.issue_time(owner, name))
        match = _ID.fullmatch(link_id)
        expires_at = int(match[1], 16) if match else 0
        if match is None or expires_at > now + MAX_LINK_S:
            return None
        return Revocation(owner, float(expires_at), name, link_id)
