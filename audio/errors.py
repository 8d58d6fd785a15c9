"""Exception classes for audio that cannot be decoded. Their texts are safe to send to the client that sent the audio.

Each has a stable `code` for programs. The decoders of this package raise most of them; `realtime/serving` raises those
about the time, size and number of decoder processes. The gateway turns them into error events and HTTP errors.
"""

from __future__ import annotations


class AudioError(Exception):
    """The audio cannot be decoded (any further); the message says what to fix. `code` is stable, for programs.

    Samples before the fault are valid.
    """

    code = "invalid_audio"

    @property
    def sentence(self) -> str:
        """The message as a sentence for the client."""
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


class BadSamples(AudioError):
    """Samples that are not numbers, or far outside [-1, 1]."""

    code = "invalid_samples"


class UnsupportedRate(AudioError):
    """A sample rate that the resampler does not support."""

    code = "unsupported_sample_rate"


class NotAudio(AudioError):
    """The bytes are not in a supported format."""

    code = "not_audio"


class UnsupportedFormat(NotAudio):
    """A known format or codec that is not supported."""

    code = "format_not_served"


class EmptyAudio(AudioError):
    """A file or stream without a single sample."""

    code = "empty_audio"


class NoAudioTrack(AudioError):
    """A readable container without an audio track, such as a silent video."""

    code = "no_audio_track"


class CorruptAudio(AudioError):
    """The container is damaged or cut short."""

    code = "corrupt_audio"


class TooCompressed(AudioError):
    """Far more audio than its bytes can contain: made to use up the server's CPU."""

    code = "audio_too_compressed"


class DecodingTooSlow(AudioError):
    """A piece that the decoder did not decode within the time limit."""

    code = "decoding_too_slow"


class TooLargeToDecode(AudioError):
    """A file for which the decoder needs more memory than is allowed."""

    code = "audio_too_large"


class TooManyDecoders(AudioError):
    """No decoder can be started now; the audio itself may be valid."""

    code = "server_busy"
