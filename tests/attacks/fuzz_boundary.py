"""Fuzzes the link to an engine: recorded messages of a real gateway, corrupted and sent again by a raw socket."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import msgspec
import zmq

from tests.attacks.fuzz_grammar import STRANGE, spoil

Frames = list[bytes]
ANSWER_MS = 20_000

_decoder = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()


class MadGateway:
    """Greets as a real gateway does, then goes through the recorded messages in any order and any shape."""

    def __init__(self, address: str, recorded: list[Frames], seed: str) -> None:
        self.sent = 0
        self._dice = Random(seed)
        self._hello, *self._recorded = recorded
        self._address = address
        self._number = 0
        self._socket = self._connected()
        self._seq = 0

    def run(self, messages: int) -> None:
        try:
            while self.sent < messages:
                self._converse(min(self._dice.randint(1, 120), messages - self.sent))
        finally:
            self._socket.close(linger=0)

    def _connected(self) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._address)
        return socket

    def _converse(self, length: int) -> None:
        """One conversation: a greeting, then messages; the engine may dismiss us at any time."""
        if self._dice.random() < 0.3:
            self._socket.close(linger=0)
            self._socket = self._connected()
        self._greet()
        for _ in range(length):
            self._socket.send_multipart(self._message())
            self.sent += 1
            if self._dice.random() < 0.1 and self._dismissed(10):
                # Whatever we said now would be told off for one and the same reason.
                return
        if self._dice.random() < 0.5:
            self._send_whole(["bye"])
        self._dismissed(10)

    def _greet(self) -> None:
        self._number += 1
        self._seq = 0
        hello = _decoder.decode(self._hello[0])
        hello["gateway"] = f"mad {self._number}"
        if self._dice.random() < 0.2:
            hello = _mutate(hello, self._dice)
        self._send_whole(hello)
        self._dismissed(50)

    def _dismissed(self, milliseconds: int) -> bool:
        """Take what the engine has to say; whether it does not want to hear from us any more."""
        delisted = False
        while self._socket.poll(milliseconds):
            delisted |= b"unwelcome" in self._socket.recv_multipart()[0]
            milliseconds = 0
        return delisted

    def _send_whole(self, header: Any) -> None:
        try:
            self._socket.send(_encoder.encode(header))
            self.sent += 1
        except (OverflowError, ValueError, msgspec.EncodeError):
            # A number or a text that MessagePack does not have.
            return

    def _message(self) -> Frames:
        header, *payloads = self._dice.choice(self._recorded)
        kind = self._dice.random()
        if kind < 0.1:
            return [spoil(header, self._dice), *payloads]
        if kind < 0.2:
            return [header, *(spoil(payload, self._dice) for payload in payloads)]
        if kind < 0.25:
            return [header, *payloads[: self._dice.randrange(len(payloads) + 1)]]
        tree = _decoder.decode(header)
        if isinstance(tree, list) and tree[0] == "batch":
            self._seq += 1
            tree[1], tree[2] = self._seq, 0
        if kind < 0.75:
            for _ in range(self._dice.randint(1, 3)):
                tree = _mutate(tree, self._dice)
        try:
            return [_encoder.encode(tree), *payloads]
        except (OverflowError, ValueError, msgspec.EncodeError):
            return [header, *payloads]


def _mutate(tree: Any, dice: Random) -> Any:
    """One value somewhere in the tree becomes another."""
    if isinstance(tree, list) and tree and dice.random() < 0.9:
        changed = list(tree)
        at = dice.randrange(len(changed))
        action = dice.random()
        if action < 0.05:
            del changed[at]
        elif action < 0.1:
            changed.insert(at, dice.choice(STRANGE))
        else:
            changed[at] = _mutate(changed[at], dice)
        return changed
    if isinstance(tree, dict) and tree and dice.random() < 0.9:
        key = dice.choice(list(tree))
        return {**tree, key: _mutate(tree[key], dice)}
    if isinstance(tree, int) and not isinstance(tree, bool) and dice.random() < 0.7:
        return dice.choice((tree + 1, tree - 1, -tree, tree * 1000, 2**31, 2**62, -(2**62), 0))
    if isinstance(tree, bytes) and dice.random() < 0.7:
        return spoil(tree or b"x", dice)
    return dice.choice(STRANGE)


def engine_answers(address: str, hello: Frames) -> bool:
    """Whether an engine welcomes a new gateway."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    try:
        greeting = _decoder.decode(hello[0])
        socket.send(_encoder.encode({**greeting, "gateway": f"after {time.monotonic()}"}))
        return bool(socket.poll(ANSWER_MS)) and b"welcome" in socket.recv_multipart()[0]
    finally:
        socket.close()
