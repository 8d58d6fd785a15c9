"""Exception classes of decoding audio: the audio is invalid, not supported, or exceeds a limit.

Their texts are safe to send to the client that sent the audio. Each has a stable `code` for programs. The decoders of
this package raise most of them; `realtime/serving` raises those about the time, size and number of decoder processes.
The gateway turns them into error events and HTTP errors.
"""

from __future__ import annotations


class AudioError(Exception):
    """The audio cannot be decoded, or not beyond this point. The message says what to fix.

    Samples that were decoded before the error are valid.
    """

    code = "invalid_audio"

    @property
    def client_message(self) -> str:
        """The message for the client: with a capital letter and a full stop."""
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
    """More audio than a file of this size can contain in any usual codec: a decompression bomb."""

    code = "audio_too_compressed"


class DecodingTooSlow(AudioError):
    """The decoder did not decode a piece of the audio within the time limit."""

    code = "decoding_too_slow"


class TooLargeToDecode(AudioError):
    """A file for which the decoder needs more memory than is allowed."""

    code = "audio_too_large"


class TooManyDecoders(AudioError):
    """No decoder can be started now; the audio itself may be valid."""

    code = "server_busy"
