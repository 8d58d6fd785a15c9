"""What can be wrong with audio that a client sends. The text of each error is safe to show to that client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class AudioError(Exception):
    """The audio cannot be used (any further); the message says what to fix. `code` is stable and meant for machines.

    Samples from before the fault are good: `decoded` holds those that had not been handed over yet.
    """

    code = "invalid_audio"

    def __init__(self, message: str, decoded: Sequence[NDArray[np.float32]] = ()) -> None:
        super().__init__(message)
        self.decoded = decoded


class BadSamples(AudioError):
    """Samples that are not numbers, or far outside [-1, 1]."""

    code = "invalid_samples"


class UnsupportedRate(AudioError):
    """A sample rate that the resampler does not take."""

    code = "unsupported_sample_rate"


class NotAudio(AudioError):
    """The bytes are not a format we read."""

    code = "not_audio"


class EmptyAudio(AudioError):
    """A file or stream that ends without one sample."""

    code = "empty_audio"


class NoAudioTrack(AudioError):
    """A readable container without an audio track, such as a silent video."""

    code = "no_audio_track"


class CorruptAudio(AudioError):
    """The container is damaged or cut short."""

    code = "corrupt_audio"
