"""Container audio of a socket for the event loop: decoded in steps, the next one when the last is taken."""

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
    """Decodes one stream of container bytes, in a process of its own."""

    def __init__(self) -> None:
        self._decoder: IsolatedDecoder | None = None
        self._closed = False

    async def decode(self, data: bytes | None) -> AsyncGenerator[Samples]:
        """Samples that a piece completes, in steps; None ends the stream. Raises AudioError.

        A stream that ends before its first byte is no error here: nobody has to speak.
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
        """Nothing more comes, also of a piece that is being decoded now."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.end()


# The client's audio bytes -> samples at the engine's rate, sample-exact, for one format at a time.

ENCODINGS = {
    "audio/pcm": Encoding.PCM16,
    "audio/pcm-f32": Encoding.FLOAT32,
    "audio/pcmu": Encoding.ULAW,
    "audio/pcma": Encoding.ALAW,
}


class AudioIntake:
    """Reads one stream of audio. Raw samples are decoded at once; a container is unpacked in steps."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self.format = audio_format
        # Any bytes at all are samples of this format, so pieces may be joined before they are decoded.
        self.takes_anything = audio_format.type in ("audio/pcm", "audio/pcmu", "audio/pcma")
        self.container = ContainerStream() if audio_format.container else None
        self._raw = None if audio_format.container else _RawReader(audio_format)

    def decode(self, data: bytes | memoryview) -> Append:
        """Decode a piece of raw samples, cut anywhere. Raises ClientFault if it is not audio of this format."""
        assert self._raw is not None, "a container is unpacked"
        try:
            return self._raw.decode(data)
        except AudioError as error:
            raise _fault(error) from error

    async def unpack(self, data: bytes | None) -> AsyncGenerator[Append]:
        """Decode a piece of a container, or its end, in steps: the next one is made when the last is taken.

        Counts samples at the engine's rate: a container has no other count that both ends agree on.
        """
        assert self.container is not None, "raw samples are decoded"
        try:
            async with aclosing(self.container.decode(data)) as steps:
                async for samples in steps:
                    yield Append(samples, len(samples), len(samples) * 1000 / MODEL_RATE)
        except AudioError as error:
            raise _fault(error) from error

    def flush(self) -> Append:
        """What the resampler holds back. The next sample starts a new signal at the same ratio."""
        # A codec cannot be flushed in the middle of its stream; what it holds comes with the next packet.
        return _nothing() if self._raw is None else self._raw.flush()

    def silence(self, source_samples: int) -> Gap:
        """Declared silence; rounded to the engine's rate."""
        rate = self.format.rate
        return Gap((source_samples * MODEL_RATE + rate // 2) // rate, source_samples, source_samples * 1000 / rate)

    def on_new_socket(self) -> AudioIntake:
        """The intake of a client that comes back on another socket, with the samples from where this one stands.

        Raw samples go on as if nothing had happened, but for the bytes of an unfinished one. A container begins anew.
        """
        self.close()
        return AudioIntake(self.format) if self._raw is None else self

    def close(self) -> None:
        if self.container is not None:
            self.container.close()
        if self._raw is not None:
            self._raw.close()


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

    def close(self) -> None:
        self._decoder.flush()


def _fault(error: AudioError) -> ClientFault:
    return ClientFault("invalid_audio", error.sentence, param="audio")


def _nothing() -> Append:
    return Append(np.empty(0, np.float32), 0, 0.0)
