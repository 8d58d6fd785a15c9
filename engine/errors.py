"""Errors of streams and of engines that gateway and engine process share: what fails one stream, and unavailability.

A `StreamError` concerns one stream; its text names the stream and says what to fix. `EngineUnavailable` means that no
engine can do what was asked at the moment, and the gateway answers with status 503; its three subclasses say why. All
texts may be shown to the stream's own client. Other subclasses of `EngineError` are defined beside the code that raises
them, for instance errors of loading weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EngineError(Exception):
    """Base class of the engine's own errors."""


class StreamError(EngineError):
    """One stream was used wrongly, refused or failed; the other streams are not affected."""

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


class BadOption(StreamError):
    """A stream was opened with an option that this model does not accept."""


class ItemTooLarge(StreamError):
    """An item is larger than the caches of this engine."""


class StreamFailed(StreamError):
    """The model failed on this stream alone."""


class AtCapacity(StreamError):
    """The engine has no capacity for another stream; nothing was changed. Try again later or on another engine."""


class EngineUnavailable(EngineError):
    """No engine can do what was asked at the moment. The same request may succeed in a few seconds."""


class EngineDead(EngineUnavailable):
    """An engine has failed for all of its streams, or its process ended or could not be started. It must be restarted.

    In the engine process it ends the main loop. In the gateway it is raised if an engine that the gateway started did
    not become ready.
    """


class EngineUnreachable(EngineUnavailable):
    """No engine is connected, the connection was lost, or an engine has not answered in time."""


class AdoptionFailed(EngineUnavailable):
    """A session cannot be adopted now: another gateway has just adopted it, its owner has just reconnected to the
    engine and not yet saved it again, or its client has gone."""


@contextmanager
def reading_state(stream: str, part: str) -> Iterator[None]:
    """Context for reading one part of a stream's saved state: an error in its format is raised as BadItem."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadItem(
            stream, f"its saved {part} cannot be read ({error!r}); run the same version on all engines"
        ) from error
