"""The engine that a stream leaves for another one, until it is not needed any more.

It keeps the stream until the other one has all of it, and until the session that was entrusted with it is there too: so
at any moment one engine could go on with both for another gateway.
"""

from __future__ import annotations

from engine import messages
from engine.client.link import EngineLink
from engine.client.placement import Keeper


class Handover:
    """Of one stream."""

    def __init__(self, stream: str) -> None:
        # Whether a session was entrusted to the engine beside the stream.
        self.is_entrusted = False
        # Until the other engine has all of the stream.
        self.leaving: Keeper | None = None
        self._stream = stream
        # From then on, until the session is there too.
        self._left: Keeper | None = None

    def begin(self, keeper: Keeper | None) -> None:
        self.end()
        self.leaving = keeper

    def settle(self) -> None:
        """The other engine has all of the stream."""
        if self.leaving is not None:
            self._left, self.leaving = self.leaving, None
            if not self.is_entrusted:
                self.release()

    def release(self) -> None:
        """The session is with the other engine too."""
        left, self._left = self._left, None
        if left is not None:
            left.link.send(messages.Abort(self._stream))

    def end(self) -> None:
        """Whatever still has the stream, beside the engine that carries it, is to forget it."""
        self.release()
        self._left, self.leaving = self.leaving, None
        self.release()

    def is_from(self, link: EngineLink) -> bool:
        return any(keeper is not None and keeper.link is link for keeper in (self.leaving, self._left))
