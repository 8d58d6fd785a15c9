"""What can go wrong in the engine, by who is hit: one stream, an admission, or everybody.

Every text names the stream and the fix, and is safe to show to a client.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class StreamError(EngineError):
    """One stream did something wrong or failed; every other stream goes on."""

    def __init__(self, stream: str, message: str) -> None:
        super().__init__(f"stream {stream!r}: {message}")
        self.stream = stream


class UnknownStream(StreamError):
    """The stream was never opened, or it is closed already."""


class DuplicateStream(StreamError):
    """A stream with this id is open."""


class StreamFinished(StreamError):
    """Audio came after the stream was finished."""


class BadItem(StreamError):
    """An item breaks the order of the timeline, or is malformed."""


class BadOption(StreamError):
    """A stream was opened with an option this model does not take."""


class ItemTooLarge(StreamError):
    """An item can never fit into the caches this engine was started with."""


class StreamFailed(StreamError):
    """The model failed on this stream alone."""


class AtCapacity(StreamError):
    """The engine has no room for another stream now; nothing was changed. Try again later or elsewhere."""


class EngineDead(EngineError):
    """The runner failed for all streams at once. Reported once; the engine must be started anew."""
