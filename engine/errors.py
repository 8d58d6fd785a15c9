"""Errors of the engine, by what they end: one stream (`StreamError`), one admission (`AtCapacity`), or all streams of
an engine (`EngineDead`).

The text of a `StreamError` names the stream and says what to fix. All texts may be shown to a client; they never quote
its audio or its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EngineError(Exception):
    """Base class of the engine's own errors."""


class StreamError(EngineError):
    """One stream was used wrongly or failed; the other streams are not affected."""

    def __init__(self, stream: str, message: str) -> None:
        super().__init__(f"stream {stream!r}: {message}")
        self.stream = stream


class UnknownStream(StreamError):
    """No stream with this id is open."""


class DuplicateStream(StreamError):
    """A stream with this id is already open."""


class StreamFinished(StreamError):
    """Audio arrived after the stream was finished."""


class BadItem(StreamError):
    """An item is malformed, or does not follow the last item of the timeline."""


@contextmanager
def reading_state(stream: str, part: str) -> Iterator[None]:
    """Reads a part of a saved state: what is not as it was saved is a BadItem."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadItem(
            stream, f"its saved {part} cannot be read ({error!r}); run the same version on all engines"
        ) from error


class BadOption(StreamError):
    """A stream was opened with an option that this model does not accept."""


class ItemTooLarge(StreamError):
    """An item is larger than the caches of this engine."""


class StreamFailed(StreamError):
    """The model failed on this stream alone."""


class AtCapacity(StreamError):
    """The engine has no room for another stream; nothing was changed. Try again later or on another engine."""


class EngineDead(EngineError):
    """The runner failed for all streams at once. Reported once; the engine must be restarted."""
