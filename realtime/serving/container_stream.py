"""Container audio of a socket for the event loop: decoded in steps, the next one when the last is taken."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from realtime.serving.isolated_decoder import IsolatedDecoder
from realtime.session.events import Samples


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
