"""Keys of links over tcp: both sides prove that they have the fleet's secret, and nobody else reads what they say.

ZeroMQ's CURVE encrypts a link for whoever knows the server's public key; the doorman lets in the gateways' key alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from engine.fleet_secret import derive

# Where ZeroMQ asks whether a client may come in; there is one such place in a context.
DOOR = "inproc://zeromq.zap.01"
DOMAIN = b"tickertape"
LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> KeyPair:
        secret = z85.encode(key)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """Those of all engines and those of all gateways of a fleet."""

    engine: KeyPair
    gateway: KeyPair

    @classmethod
    def from_secret(cls, secret: bytes) -> LinkKeys:
        return cls(KeyPair.of(derive(secret, "engine link")), KeyPair.of(derive(secret, "gateway link")))

    def lock_engine(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.engine.public, self.engine.secret
        socket.zap_domain = DOMAIN

    def lock_gateway(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is connected."""
        socket.curve_serverkey = self.engine.public
        socket.curve_publickey, socket.curve_secretkey = self.gateway.public, self.gateway.secret


class Doorman:
    """Answers ZeroMQ's question who may come in, for one engine's context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(DOOR)
        self._known = z85.decode(keys.gateway.public)

    def answer_all(self) -> None:
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            welcome = mechanism == b"CURVE" and credentials == [self._known]
            status, text = (b"200", b"OK") if welcome else (b"400", b"another key")
            self.socket.send_multipart([version, request, status, text, b"", b""])


def uses_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def leaves_the_machine(address: str) -> bool:
    """Whether others may see, or reach, what goes over this address."""
    host = urlsplit(address).hostname or ""
    return uses_tcp(address) and host not in LOOPBACK and not host.startswith("127.")
