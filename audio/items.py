"""Samples at the model's rate -> self-contained items on the model's clock.

Audio comes in *segments*; a flush ends one. Position p of a segment owns samples [p * S, (p + 1) * S) and is encoded
together with `look_back` samples before and `look_ahead` samples after them; outside the segment there is silence.
So an item is released once its look-ahead has come, and the items are the same however the samples arrive.

A position whose samples and look-around are all declared silence is a *gap*: it moves the clock and carries no audio.

The cutter holds one window, the item it is filling; a finished window is handed out as it is, and the part that the
next item shares with it is copied over.

    |<- look_back ->|<- positions_per_item * S ->|<- look_ahead ->|
                    |<- own samples of the item->|
    |<------------- filled ---------->|                              samples that have come
    |<--- heard --->|                                                up to the last sample that is not silence
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FLOAT32 = np.dtype(np.float32)


# Compared by identity: equality of arrays is not a bool. Not frozen, because one is made for every 80 ms of a stream.
@dataclass(slots=True, eq=False)
class AudioItem:
    """Audio for `length` positions from `offset`; `sample` counts audio from the first sample of the session.

    `pcm` holds look-back, own samples and look-ahead in one contiguous array that belongs to the item, or is None for a
    gap, which is one item however long it is.
    """

    offset: int
    length: int
    sample: int
    pcm: NDArray[np.float32] | None


class ItemCutter:
    """Cuts one session's samples into items. Memory does not grow: it holds a single window."""

    def __init__(
        self,
        samples_per_position: int,
        look_back: int,
        look_ahead: int,
        positions_per_item: int = 1,
        first_offset: int = 0,
    ) -> None:
        if samples_per_position < 1 or positions_per_item < 1:
            raise ValueError("an item needs at least one position of at least one sample")
        if look_back < 0 or look_ahead < 0 or first_offset < 0:
            raise ValueError("look-back, look-ahead and the first offset cannot be negative")
        self.samples_in = 0
        self.next_offset = first_offset
        self._position = samples_per_position
        self._look_back = look_back
        self._look_around = look_back + look_ahead
        self._positions_per_item = positions_per_item
        self._next_sample = 0
        self._flushed_at = 0
        self._window = np.zeros(positions_per_item * samples_per_position + self._look_around, np.float32)
        self._filled = look_back
        self._heard = 0

    @property
    def context(self) -> int:
        """Samples before the next position that are encoded together with it."""
        return min(self._look_back, self._next_sample - self._flushed_at)

    def rest(self) -> NDArray[np.float32]:
        """What has come and is in no item yet, with the context before it."""
        return self._window[self._look_back - self.context : self._filled].copy()

    def go_on(self, offset: int, sample: int, segment: int) -> int:
        """Go on where another cutter stopped: at this position and sample, in a segment that began at `segment`.

        Returns the sample from which on audio is to come again: that of the context too.
        """
        self.next_offset, self._next_sample, self._flushed_at = offset, sample, segment
        self._filled = self._heard = self._look_back - self.context
        self.samples_in = sample - self.context
        return self.samples_in

    def cut(self, samples: NDArray[np.float32]) -> list[AudioItem]:
        """Take the next samples; returns the items they complete."""
        if samples.dtype != _FLOAT32 or samples.ndim != 1:
            raise ValueError("samples must be a one-dimensional float32 array")
        items: list[AudioItem] = []
        self.samples_in += len(samples)
        taken = 0
        while taken < len(samples):
            count = min(len(samples) - taken, len(self._window) - self._filled)
            self._window[self._filled : self._filled + count] = samples[taken : taken + count]
            taken += count
            self._filled += count
            self._heard = self._filled
            if self._filled == len(self._window):
                items.append(self._release(self._positions_per_item, self._position))
        return items

    def cut_gap(self, samples: int) -> list[AudioItem]:
        """Take `samples` samples of silence that was declared and not sent; returns the items they complete."""
        if samples < 0:
            raise ValueError(f"a gap cannot have {samples} samples")
        self.samples_in += samples
        return self._take_silence(samples, self._position)

    def flush(self, pad_positions: int) -> list[AudioItem]:
        """End the segment: release all that waits for more audio, then `pad_positions` positions of silence.

        The silence moves the model's clock but not audio time. The next sample starts a new segment. Nothing happens if
        nothing has come since the last flush.
        """
        if pad_positions < 0:
            raise ValueError(f"cannot pad with {pad_positions} positions")
        if self.samples_in == self._flushed_at:
            return []
        self._flushed_at = self.samples_in
        unfinished = (self._look_back - self._filled) % self._position
        look_ahead = self._look_around - self._look_back
        items = self._take_silence(unfinished + look_ahead, self._position)
        items += self._release_unfinished(self._position)
        self._next_sample = self.samples_in
        items += self._take_silence(pad_positions * self._position, 0)
        items += self._release_unfinished(0)
        self._window[: self._look_back] = 0
        self._filled = self._look_back
        self._heard = 0
        return items

    def _take_silence(self, count: int, audio_per_position: int) -> list[AudioItem]:
        """Append zeros: items for positions that still touch sound, then gaps for the others.

        A position is silent throughout only if the silence reaches its last look-ahead sample, and then it is released
        here at once. So `cut` never meets a silent position.
        """
        items: list[AudioItem] = []
        while count:
            first_silent = -(-self._heard // self._position)
            if first_silent < self._positions_per_item:
                target = (first_silent + 1) * self._position + self._look_around
            else:
                target = len(self._window)
            zeros = min(count, target - self._filled)
            self._window[self._filled : self._filled + zeros] = 0
            self._filled += zeros
            count -= zeros
            if self._filled < target:
                break
            if first_silent >= self._positions_per_item:
                items.append(self._release(self._positions_per_item, audio_per_position))
                continue
            if first_silent:
                items.append(self._release(first_silent, audio_per_position))
            # Nothing in the window is audible any more: the rest is arithmetic, however long the silence.
            positions, count = divmod(count, self._position)
            self._filled -= self._position
            items.append(self._advance(positions + 1, audio_per_position, None))
        return items

    def _release(self, positions: int, audio_per_position: int) -> AudioItem:
        """Hand out the first positions of the window, and start the next one with what the two share."""
        own = positions * self._position
        window, size = self._window, own + self._look_around
        self._window = np.empty_like(window)
        kept = self._filled - own
        self._window[:kept] = window[own : self._filled]
        self._filled = kept
        self._heard = max(0, self._heard - own)
        # A short item must not keep the whole window alive.
        pcm = window if size == len(window) else window[:size].copy()
        return self._advance(positions, audio_per_position, pcm)

    def _release_unfinished(self, audio_per_position: int) -> list[AudioItem]:
        """The positions of a window that is not full: it ends with the segment, or where padding begins or ends."""
        positions = (self._filled - self._look_around) // self._position
        return [self._release(positions, audio_per_position)] if positions > 0 else []

    def _advance(self, positions: int, audio_per_position: int, pcm: NDArray[np.float32] | None) -> AudioItem:
        item = AudioItem(self.next_offset, positions, self._next_sample, pcm)
        self.next_offset += positions
        self._next_sample += positions * audio_per_position
        return item
