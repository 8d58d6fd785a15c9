"""What can be wrong with audio that a client sends. The text of each error is safe to show to that client."""

from __future__ import annotations


class AudioError(Exception):
    """The audio cannot be used (any further); the message says what to fix. `code` is stable and meant for machines.

    Samples from before the fault are good.
    """

    code = "invalid_audio"

    @property
    def sentence(self) -> str:
        """As a client reads it."""
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


class BadSamples(AudioError):
    """Samples that are not numbers, or far outside [-1, 1]."""

    code = "invalid_samples"


class UnsupportedRate(AudioError):
    """A sample rate that the resampler does not take."""

    code = "unsupported_sample_rate"


class NotAudio(AudioError):
    """The bytes are not a format we read."""

    code = "not_audio"


class NotServed(NotAudio):
    """A format or a codec that is known and not served."""

    code = "format_not_served"


class EmptyAudio(AudioError):
    """A file or stream that ends without one sample."""

    code = "empty_audio"


class NoAudioTrack(AudioError):
    """A readable container without an audio track, such as a silent video."""

    code = "no_audio_track"


class CorruptAudio(AudioError):
    """The container is damaged or cut short."""

    code = "corrupt_audio"


class TooCompressed(AudioError):
    """Far more sound than its bytes can hold: made to cost more than it takes to send."""

    code = "audio_too_compressed"


class DecodingTooSlow(AudioError):
    """A piece that the decoder does not get through."""

    code = "decoding_too_slow"


class TooLargeToDecode(AudioError):
    """A file for which the decoder wants more memory than it may have."""

    code = "audio_too_large"


class TooManyDecoders(AudioError):
    """Not the audio's fault: too many decoders are still at work on what others sent."""

    code = "server_busy"
