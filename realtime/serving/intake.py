"""The client's audio bytes -> samples at the engine's rate, sample-exact, for one format at a time."""

from __future__ import annotations

import numpy as np

from audio.containers import ContainerDecoder
from audio.errors import AudioError
from audio.formats import Decoder, Encoding
from audio.resample import MODEL_RATE, Resampler
from realtime.errors import ClientFault
from realtime.session.events import Append, Gap, Samples
from realtime.session.settings import AudioFormat

ENCODINGS = {
    "audio/pcm": Encoding.PCM16,
    "audio/pcm-f32": Encoding.FLOAT32,
    "audio/pcmu": Encoding.ULAW,
    "audio/pcma": Encoding.ALAW,
}


class Intake:
    """Reads one stream of audio."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self.format = audio_format
        # A container's decoder waits for its codec, so it must be called off the event loop.
        self.needs_thread = audio_format.container
        # Any bytes at all are samples of this format, so pieces may be joined before they are decoded.
        self.takes_anything = audio_format.type in ("audio/pcm", "audio/pcmu", "audio/pcma")
        self._reader: _RawReader | _ContainerReader
        self._reader = _ContainerReader() if audio_format.container else _RawReader(audio_format)

    def decode(self, data: bytes | memoryview) -> Append:
        """Decode a piece, cut anywhere. Raises ClientFault if it is not audio of this format."""
        try:
            return self._reader.decode(data)
        except AudioError as error:
            raise ClientFault("invalid_audio", f"{error}.", param="audio") from error

    def flush(self) -> Append:
        """What the resampler holds back. The next sample starts a new signal at the same ratio."""
        try:
            return self._reader.flush()
        except AudioError as error:
            raise ClientFault("invalid_audio", f"{error}.", param="audio") from error

    def finish(self) -> Append:
        """The rest of the stream, which ends here."""
        try:
            return self._reader.finish()
        except AudioError as error:
            raise ClientFault("invalid_audio", f"{error}.", param="audio") from error

    def silence(self, source_samples: int) -> Gap:
        """Declared silence; rounded to the engine's rate."""
        rate = self.format.rate
        return Gap((source_samples * MODEL_RATE + rate // 2) // rate, source_samples, source_samples * 1000 / rate)

    def on_new_socket(self) -> Intake:
        """The intake of a client that comes back on another socket, with the samples from where this one stands.

        Raw samples go on as if nothing had happened, but for the bytes of an unfinished one. A container begins anew.
        """
        self._reader.close()
        return Intake(self.format) if self.format.container else self

    def close(self) -> None:
        self._reader.close()


class _RawReader:
    def __init__(self, audio_format: AudioFormat) -> None:
        self._rate = audio_format.rate
        self._decoder = Decoder(ENCODINGS[audio_format.type])
        self._resampler = Resampler(audio_format.rate)
        self._held_back = False

    def decode(self, data: bytes | memoryview) -> Append:
        source = self._decoder.decode(data)
        self._held_back = self._held_back or len(source) > 0
        return Append(self._resampler.resample(source), len(source), len(source) * 1000 / self._rate)

    def flush(self) -> Append:
        if not self._held_back:
            return _nothing()
        self._held_back = False
        return Append(self._resampler.flush(), 0, 0.0)

    def finish(self) -> Append:
        return self.flush()

    def close(self) -> None:
        self._decoder.flush()


class _ContainerReader:
    """Counts samples at the engine's rate: a container has no other count that both ends agree on."""

    def __init__(self) -> None:
        self._decoder = ContainerDecoder()

    def decode(self, data: bytes | memoryview) -> Append:
        return _joined(self._decoder.decode(bytes(data)))

    def flush(self) -> Append:
        # A codec cannot be flushed in the middle of its stream; what it holds comes with the next packet.
        return _nothing()

    def finish(self) -> Append:
        return _joined(self._decoder.flush())

    def close(self) -> None:
        # The event loop cannot wait for a piece that is being decoded on another thread.
        self._decoder.abandon()


def _joined(blocks: list[Samples]) -> Append:
    samples = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
    return Append(samples, len(samples), len(samples) * 1000 / MODEL_RATE)


def _nothing() -> Append:
    return Append(np.empty(0, np.float32), 0, 0.0)
