"""Container audio for the event loop: decoded on a thread of its own, in steps, the next one when the last is taken.

Nothing here waits on a thread of the event loop's pool: a decoder that does not come to an end is left behind, and
keeps nobody else from decoding.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from weakref import WeakKeyDictionary

import numpy as np

from audio.containers import ContainerDecoder
from audio.errors import DecodingTooSlow
from realtime.session.events import Samples

# Decoders at work at once; more of them would only keep the event loop from its turn.
AT_ONCE = 4
# A step is 5 s of sound or a piece of bytes, either a matter of milliseconds.
MAX_STEP_S = 20.0

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class ContainerStream:
    """Decodes one stream of container bytes."""

    def __init__(self) -> None:
        self._turn = asyncio.Event()
        self._decoder: ContainerDecoder | None = None
        self._closed = False

    async def decode(self, data: bytes | None) -> AsyncGenerator[Samples]:
        """Samples that a piece completes, in steps; None ends the stream. Raises AudioError.

        A stream that ends before its first byte is no error here: nobody has to speak.
        """
        if self._closed or (data is None and self._decoder is None):
            return
        if self._decoder is None:
            self._decoder = ContainerDecoder(_setter(self._turn))
        samples, more = await self._step(data)
        while len(samples) or more:
            yield samples
            if not more:
                return
            samples, more = await self._step(b"")

    def close(self) -> None:
        """Nothing more comes, also of a piece that is being decoded now."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.close()

    async def _step(self, data: bytes | None) -> tuple[Samples, bool]:
        """What one turn of the decoder gives, and whether it can go on without more bytes."""
        assert self._decoder is not None
        loop = asyncio.get_running_loop()
        async with _places.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
            self._turn.clear()
            self._decoder.give(data)
            try:
                async with asyncio.timeout(MAX_STEP_S):
                    await self._turn.wait()
            except TimeoutError:
                self.close()
                raise DecodingTooSlow("the audio takes too long to decode; send it in another format") from None
            blocks = self._decoder.take()
        return np.concatenate([np.empty(0, np.float32), *blocks]), self._decoder.has_more


def _setter(turn: asyncio.Event) -> Callable[[], None]:
    """Sets the event from the decoder's thread, which may outlive the loop. It must not know the stream itself."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(turn.set)

    return tell
