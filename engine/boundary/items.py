"""A stream's audio as `Item`s: cuts samples into pieces (`ItemCutter`), and makes and checks the items with them.

Each `EngineStream` of a gateway has a cutter, and passes its pieces to `prepare`, which hashes them and makes items.
Both processes call `complaint_about`: the engine for every item, the gateway (`engine/client/link.py`) for items that
clients prepared themselves. There it also checks that hash and audio of such an item agree.

Audio consists of *segments*; a flush ends a segment. Position p of a segment owns the samples [p * S, (p + 1) * S),
where S is `samples_per_position`. They are encoded together with `look_back` samples before and `look_ahead` samples
after them; outside the segment there is silence. So an item is complete when its look-ahead has arrived, and the items
do not depend on how the samples arrive.

A position whose samples, look-back and look-ahead are all declared silence is a *gap*: it advances the position and has
no audio.

The cutter keeps one window, the item that is being filled. A full window becomes the item's array without a copy, and
the part that the next item shares with it is copied.

    |<- look_back ->|<- positions_per_item * S ->|<- look_ahead ->|
                    |<- own samples of the item->|
    |<------------- filled ---------->|                              samples that have arrived
    |<- sound_end ->|                                                end of the last sample that is not declared silence
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from engine.messages import LARGEST_COUNT, Item
from engine.spec import ModelSpec

_FLOAT32 = np.dtype(np.float32)
# Length of an item's key.
KEY_BYTES = 16
# Seconds of noise that gateway and engine process when they start, so that the first session does not wait for lazy
# loading.
WARM_UP_SECONDS = 2
# Features and samples with equal bytes are different inputs; this keeps their hashes apart.
_FEATURES = b"features"
# The key of a part of an item is a hash of the item's key and of the positions.
_PART = b"part"


# Compared by identity (eq=False), because == of arrays is not a bool. Not frozen, because that is slow and items are
# frequent.
@dataclass(slots=True, eq=False)
class AudioItem:
    """Audio for `length` positions from position `offset`; `sample` is its first own sample in the session.

    `pcm` contains look-back, own samples and look-ahead in one contiguous array that belongs to the item. It is None
    for a gap, which is a single item of any length.
    """

    offset: int
    length: int
    sample: int
    pcm: NDArray[np.float32] | None


class ItemCutter:
    """Cuts one session's samples into items. Its memory is one window."""

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
        # Samples received so far, and the position of the next item.
        self.samples_in = 0
        self.next_offset = first_offset
        self._samples_per_position = samples_per_position
        self._look_back = look_back
        self._look_around = look_back + look_ahead
        self._positions_per_item = positions_per_item
        # First own sample of the next item.
        self._next_sample = 0
        self._segment_start = 0
        # See the figure above.
        self._window = np.zeros(positions_per_item * samples_per_position + self._look_around, np.float32)
        self._filled = look_back
        self._sound_end = 0

    @property
    def segment(self) -> int:
        """The sample at which the current segment began."""
        return self._segment_start

    @property
    def context(self) -> int:
        """Number of samples before the next position that are encoded together with it."""
        return min(self._look_back, self._next_sample - self._segment_start)

    def rest(self) -> NDArray[np.float32]:
        """The samples that are in no item yet, with the context before them."""
        return self._window[self._look_back - self.context : self._filled].copy()

    def continue_from(self, offset: int, sample: int, segment: int) -> int:
        """Continue the work of another cutter, at this position and sample, in a segment that began at sample
        `segment`. Returns the sample from which audio must be passed to `cut` again; it includes the context."""
        self.next_offset, self._next_sample, self._segment_start = offset, sample, segment
        self._filled = self._sound_end = self._look_back - self.context
        self.samples_in = sample - self.context
        return self.samples_in

    def cut(self, samples: NDArray[np.float32]) -> list[AudioItem]:
        """Take the next samples; returns the items they complete."""
        check_samples(samples)
        items: list[AudioItem] = []
        self.samples_in += len(samples)
        copied = 0
        while copied < len(samples):
            count = min(len(samples) - copied, len(self._window) - self._filled)
            self._window[self._filled : self._filled + count] = samples[copied : copied + count]
            copied += count
            self._filled += count
            self._sound_end = self._filled
            if self._filled == len(self._window):
                items.append(self._complete(self._positions_per_item, self._samples_per_position))
        return items

    def cut_gap(self, samples: int) -> list[AudioItem]:
        """Take this many samples of declared silence; returns the items they complete."""
        if samples < 0:
            raise ValueError(f"a gap cannot have {samples} samples")
        self.samples_in += samples
        return self._add_silence(samples, self._samples_per_position)

    def flush(self, pad_positions: int) -> list[AudioItem]:
        """End the segment: returns items for all waiting samples, then for `pad_positions` positions of silence.

        The padding advances positions and not samples. The next sample starts a new segment. Does nothing if no sample
        came since the last flush.
        """
        if pad_positions < 0:
            raise ValueError(f"cannot pad with {pad_positions} positions")
        if self.samples_in == self._segment_start:
            return []
        self._segment_start = self.samples_in
        size = self._samples_per_position
        missing = (self._look_back - self._filled) % size
        look_ahead = self._look_around - self._look_back
        items = self._add_silence(missing + look_ahead, size)
        items += self._complete_partial(size)
        self._next_sample = self.samples_in
        items += self._add_silence(pad_positions * size, 0)
        items += self._complete_partial(0)
        self._window[: self._look_back] = 0
        self._filled = self._look_back
        self._sound_end = 0
        return items

    # In these methods, `audio_per_position` is the number of samples of the client's audio that a position stands for:
    # all of its samples, or 0 for silence that a flush inserts.

    def _add_silence(self, count: int, audio_per_position: int) -> list[AudioItem]:
        """Append zeros: items for positions whose window still contains audio, then gaps for the others.

        A position is entirely silent only if the silence reaches its last look-ahead sample, and then a gap is made
        here at once. So `cut` never gets to a silent position.
        """
        items: list[AudioItem] = []
        size = self._samples_per_position
        while count:
            first_silent = -(-self._sound_end // size)
            if first_silent < self._positions_per_item:
                target = (first_silent + 1) * size + self._look_around
            else:
                target = len(self._window)
            zeros = min(count, target - self._filled)
            self._window[self._filled : self._filled + zeros] = 0
            self._filled += zeros
            count -= zeros
            if self._filled < target:
                break
            if first_silent >= self._positions_per_item:
                items.append(self._complete(self._positions_per_item, audio_per_position))
                continue
            if first_silent:
                items.append(self._complete(first_silent, audio_per_position))
            # The window is silent now, so the rest of the silence needs no loop.
            positions, count = divmod(count, size)
            self._filled -= size
            items.append(self._next_item(positions + 1, audio_per_position, None))
        return items

    def _complete(self, positions: int, audio_per_position: int) -> AudioItem:
        """An item for the first positions of the window; samples that the next item shares are kept in the window."""
        own = positions * self._samples_per_position
        window, size = self._window, own + self._look_around
        self._window = np.empty_like(window)
        kept = self._filled - own
        self._window[:kept] = window[own : self._filled]
        self._filled = kept
        self._sound_end = max(0, self._sound_end - own)
        # Copied, so that a short item does not keep the whole window in memory.
        pcm = window if size == len(window) else window[:size].copy()
        return self._next_item(positions, audio_per_position, pcm)

    def _complete_partial(self, audio_per_position: int) -> list[AudioItem]:
        """An item for the complete positions of a window that is not full, at the end of a segment or of padding."""
        positions = (self._filled - self._look_around) // self._samples_per_position
        return [self._complete(positions, audio_per_position)] if positions > 0 else []

    def _next_item(self, positions: int, audio_per_position: int, pcm: NDArray[np.float32] | None) -> AudioItem:
        """Make the next item, and advance the position and the sample after it."""
        item = AudioItem(self.next_offset, positions, self._next_sample, pcm)
        self.next_offset += positions
        self._next_sample += positions * audio_per_position
        return item


def check_samples(samples: NDArray[np.float32]) -> None:
    """Raise ValueError if a cutter would refuse these samples."""
    if samples.dtype != _FLOAT32 or samples.ndim != 1:
        raise ValueError("samples must be a one-dimensional float32 array")


def hash_payload(payload: NDArray[np.float32]) -> bytes:
    """The content key of samples (one axis) or features (two axes)."""
    person = _FEATURES if payload.ndim > 1 else b""
    return blake2b(payload.data, digest_size=KEY_BYTES, person=person).digest()


def make_cutter(spec: ModelSpec) -> ItemCutter:
    """A stream's cutter. Its first sample belongs to the first position after the model's prefix."""
    return ItemCutter(
        spec.samples_per_position,
        spec.look_back_samples,
        spec.look_ahead_samples,
        first_offset=spec.prefix_positions,
    )


def prepare(cutter: ItemCutter, cut: Iterable[AudioItem], spec: ModelSpec) -> list[Item]:
    """Make items of the pieces that the cutter has just returned. A gap has a length but no payload and no key."""
    items = []
    for piece in cut:
        size = piece.length * spec.samples_per_position
        covered = min(size, cutter.samples_in - piece.sample)
        item = Item(piece.offset, piece.length, piece.sample, samples=None if covered == size else covered)
        if piece.pcm is not None:
            item.key, item.payload = hash_payload(piece.pcm), piece.pcm
        items.append(item)
    return items


def is_gap(item: Item) -> bool:
    """Whether the item is a gap: declared silence or lost packets, without samples."""
    return not item.key and item.payload is None


def can_be_split(item: Item) -> bool:
    """Whether `split_item` accepts the item: it has several positions, and is a gap or has its samples."""
    return item.length > 1 and (is_gap(item) or (item.payload is not None and item.payload.ndim == 1))


def split_item(item: Item, positions: int, spec: ModelSpec) -> tuple[Item, Item]:
    """The first `positions` of an item, and the rest of it. Each part of audio has the samples of its positions with
    look-back and look-ahead, and a key made of the item's key."""
    size = spec.samples_per_position
    covered = item.covered_samples(size)
    taken = min(positions * size, covered)
    first = structs.replace(item, length=positions, samples=None if taken == positions * size else taken)
    rest = structs.replace(item, offset=item.offset + positions, length=item.length - positions)
    rest.sample += taken
    if item.samples is not None:
        rest.samples = covered - taken
    if item.mask is not None:
        first.mask, rest.mask = item.mask[:positions], item.mask[positions:]
    if item.payload is not None:
        around = spec.look_back_samples + spec.look_ahead_samples
        first.payload, rest.payload = item.payload[: positions * size + around], item.payload[positions * size :]
        first.key, rest.key = _key_of_part(item.key, 0, positions), _key_of_part(item.key, positions, item.length)
    return first, rest


def _key_of_part(key: bytes, start: int, end: int) -> bytes:
    return blake2b(b"%b%d-%d" % (key, start, end), digest_size=KEY_BYTES, person=_PART).digest()


def payload_bytes(item: Item) -> int:
    """The size of an item's audio; 0 if the item has none."""
    return int(getattr(item.payload, "nbytes", 0))


def positions_in(size: int, spec: ModelSpec) -> int:
    """The number of positions of an item with this many bytes of audio; 1 if only its hash was sent."""
    own_samples = size // _FLOAT32.itemsize - spec.look_back_samples - spec.look_ahead_samples
    return max(1, own_samples // spec.samples_per_position)


def complaint_about(item: Item, spec: ModelSpec) -> str | None:
    """The error in an item as text, or None. A key without payload is valid: the receiver may have it cached."""
    offset, length, sample, samples = item.offset, item.length, item.sample, item.samples
    # Not isinstance: a bool is an int, too.
    are_ints = type(offset) is int and type(length) is int and type(sample) is int
    if not are_ints or (samples is not None and type(samples) is not int):
        return "offset, length, sample and samples must be whole numbers"
    if not (0 <= offset <= LARGEST_COUNT and 1 <= length <= LARGEST_COUNT and 0 <= sample <= LARGEST_COUNT):
        return "offset and sample must be 0 or more, the length 1 or more, and all below 2**53"
    own_samples = length * spec.samples_per_position
    if offset + length > LARGEST_COUNT or sample + own_samples > LARGEST_COUNT:
        return f"a length of {length} positions from {offset} on; this is longer than any session"
    if samples is not None and not 0 <= samples <= own_samples:
        return f"samples must lie between 0 and {own_samples}: {length} positions have no more"
    if item.mask is not None and len(item.mask) != length:
        return f"a mask of {len(item.mask)} entries for {length} positions; give one for each"
    is_empty = is_gap(item)
    if item.mask is not None and not any(item.mask) and not is_empty:
        return "a gap carries no audio; leave out its key and data, or its mask"
    if is_empty and (item.mask is None or not any(item.mask)):
        return None
    return _complaint_about_data(item, spec, own_samples)


def _complaint_about_data(item: Item, spec: ModelSpec, own_samples: int) -> str | None:
    """The error in an item's key or payload as text, or None."""
    key, payload = item.key, item.payload
    if type(key) is not bytes or len(key) != KEY_BYTES:
        return f"the key must be {KEY_BYTES} bytes, the blake2b hash of the data"
    if payload is None:
        return None
    if not isinstance(payload, np.ndarray) or payload.dtype != np.float32 or not payload.flags.c_contiguous:
        return f"data of type {getattr(payload, 'dtype', type(payload).__name__)}; send contiguous float32"
    samples = spec.look_back_samples + own_samples + spec.look_ahead_samples
    expected: tuple[int, ...] = (samples,)
    if payload.ndim == 2:
        if spec.features is None:
            return (
                f"features of shape {payload.shape}, but {spec.name} takes audio, not features; "
                f"send the item's {samples} samples"
            )
        expected = spec.features.of(item.length)
    if payload.shape != expected:
        return f"data of shape {payload.shape}; {spec.name} takes {expected} for this length"
    return None
