"""Decodes the audio of one client's session to float samples at 16 kHz, the model's rate.

`AudioIntake` is the decoder of one audio format, with the state of its resampler; the inbox of a session (`inbox.py`)
has one, and another after each change of the format. Raw samples are decoded at once in the gateway. Containers such as
WebM are decoded step by step in a separate process (`isolated_decoder.py`). Uploaded files do not pass through here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from audio.errors import AudioError
from audio.formats import MODEL_RATE, Decoder, Encoding, Resampler
from realtime.errors import ClientFault
from realtime.serving.isolated_decoder import IsolatedDecoder
from realtime.session.events import Append, Gap, Samples
from realtime.session.settings import AudioFormat


class ContainerStream:
    """Decodes one stream of container bytes (WebM, Ogg, MP4, ...) in a separate process."""

    def __init__(self) -> None:
        self._decoder: IsolatedDecoder | None = None
        self._closed = False

    async def decode(self, data: bytes | None) -> AsyncGenerator[Samples]:
        """Decode a piece of the stream, or its end (None), in steps. Raises AudioError.

        The next step is decoded when the caller asks for it. A stream without a single byte is no error.
        """
        if self._closed or (data is None and self._decoder is None):
            return
        if self._decoder is None:
            self._decoder = await IsolatedDecoder.begin()
            if self._closed:
                self._decoder.end()
        samples, more = await self._decoder.ask(data)
        while len(samples) or more:
            yield samples
            if not more:
                return
            samples, more = await self._decoder.ask()

    def close(self) -> None:
        """End the decoder, also while it decodes a piece; no more samples come."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.end()


ENCODINGS = {
    "audio/pcm": Encoding.PCM16,
    "audio/pcm-f32": Encoding.FLOAT32,
    "audio/pcmu": Encoding.ULAW,
    "audio/pcma": Encoding.ALAW,
}


class AudioIntake:
    """Decodes the audio of one client in one format. Use `decode` for raw samples and `unpack` for containers."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self.format = audio_format
        # Any bytes are valid samples of this format, so appends may be joined before they are decoded.
        self.any_bytes_valid = audio_format.type in ("audio/pcm", "audio/pcmu", "audio/pcma")
        self.container = ContainerStream() if audio_format.container else None
        self._raw = None if audio_format.container else _RawReader(audio_format)

    def decode(self, data: bytes | memoryview) -> Append:
        """Decode a piece of raw samples; it may end within a sample. Raises ClientFault if it is not valid audio."""
        assert self._raw is not None, "use unpack() for a container"
        try:
            return self._raw.decode(data)
        except AudioError as error:
            raise _fault(error) from error

    async def unpack(self, data: bytes | None) -> AsyncGenerator[Append]:
        """Decode a piece of a container, or its end (None), in steps. Raises ClientFault.

        Source samples are counted at the engine's rate, the only count that client and server agree on for a container.
        """
        assert self.container is not None, "use decode() for raw samples"
        try:
            async with aclosing(self.container.decode(data)) as steps:
                async for samples in steps:
                    yield Append(samples, len(samples), len(samples) * 1000 / MODEL_RATE)
        except AudioError as error:
            raise _fault(error) from error

    def flush(self) -> Append:
        """The samples left in the resampler. The next sample starts a new signal."""
        # A codec cannot be flushed within its stream; its samples come with the next packet.
        return _nothing() if self._raw is None else self._raw.flush()

    def silence(self, source_samples: int) -> Gap:
        """Silence that the client declares instead of sending it, rounded to the engine's rate."""
        rate = self.format.rate
        return Gap((source_samples * MODEL_RATE + rate // 2) // rate, source_samples, source_samples * 1000 / rate)

    def for_new_socket(self) -> AudioIntake:
        """The intake to use when the client resumes on another socket.

        Raw audio continues; only the bytes of an incomplete sample are dropped. A container starts again.
        """
        self.close()
        return AudioIntake(self.format) if self._raw is None else self

    def close(self) -> None:
        if self.container is not None:
            self.container.close()
        if self._raw is not None:
            self._raw.close()


class _RawReader:
    """Decoder and resampler for raw samples."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self._rate = audio_format.rate
        self._decoder = Decoder(ENCODINGS[audio_format.type])
        self._resampler = Resampler(audio_format.rate)
        # Whether the resampler may still have samples.
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

    def close(self) -> None:
        self._decoder.flush()


def _fault(error: AudioError) -> ClientFault:
    return ClientFault("invalid_audio", error.client_message, param="audio")


def _nothing() -> Append:
    return Append(np.empty(0, np.float32), 0, 0.0)
