"""On which engine a stream is, how that engine counts, and how far it has come.

An engine that takes a stream over counts its positions and samples anew, from the first item it is sent. The placement
promises that everybody else sees one count: the stream's own, from its first sample on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import messages
from engine.client.link import EngineLink
from engine.client.replay import Replay
from engine.messages import Item
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Keeper:
    """An engine that could go on with a stream for another gateway: how many of its outputs were read here, and by how
    many positions and samples it counts less."""

    link: EngineLink
    read: int = 0
    before: tuple[int, int] = (0, 0)


class Placement:
    """Of one stream."""

    def __init__(self, spec: ModelSpec) -> None:
        self.link: EngineLink | None = None
        # Since when no engine goes on with the stream.
        self.lost_at: float | None = None
        # Positions below this were computed, by any engine.
        self.computed = spec.prefix_positions
        self._spec = spec
        self._computed_here = spec.prefix_positions
        # By how much the engine that carries the stream now counts less than the stream itself does.
        self._positions_before = 0
        self._samples_before = 0
        # The stream has gone on after a loss when it is computed up to here.
        self._goes_on_at = 0

    def begin(self, link: EngineLink, replay: Replay) -> None:
        """This engine carries the stream from now on; it is sent the replay first."""
        self.link = link
        self._positions_before, self._samples_before = replay.positions, replay.samples
        self._computed_here = replay.positions + self._spec.prefix_positions

    @property
    def before(self) -> tuple[int, int]:
        """Positions and samples by which this engine counts less."""
        return self._positions_before, self._samples_before

    def lose(self, now: float, end: int) -> None:
        """The engine is lost; the audio so far ends at position `end`."""
        self.link = None
        if self.lost_at is None:
            self.lost_at = now
        # A model that waits for a stride leaves less than one uncomputed.
        all_of_it = end - (self._spec.stride_positions - 1)
        self._goes_on_at = min(all_of_it, self.computed + 1)

    def progress(self, computed: int) -> None:
        """The engine has computed so far, on its own count."""
        self._computed_here = computed + self._positions_before
        self.computed = max(self.computed, self._computed_here)

    @property
    def goes_on(self) -> bool:
        """Whether the new engine has passed the point where the old one stopped."""
        return self.computed >= self._goes_on_at

    def uncomputed(self, end: int) -> range:
        """What the engine may have been computing when it died, if the audio sent to it ends at `end`."""
        return range(self._computed_here, end)

    def own_count(self, start: int, end: int) -> range:
        """Positions of the engine's count on the stream's own."""
        return range(start + self._positions_before, end + self._positions_before)

    def engine_count(self, positions: range) -> tuple[int, int]:
        """Positions of the stream's count on the engine's."""
        return positions.start - self._positions_before, positions.stop - self._positions_before

    def to_engine(self, items: Sequence[Item]) -> list[Item]:
        """The items as the engine counts."""
        positions, samples = self._positions_before, self._samples_before
        if not positions:
            return list(items)
        return [replace(item, offset=item.offset - positions, sample=item.sample - samples) for item in items]

    def sample_to_engine(self, sample: int | None) -> int | None:
        return None if sample is None else max(0, sample - self._samples_before)

    def from_engine(self, output: messages.Output) -> None:
        """Turn the engine's count of samples in an output into the stream's."""
        samples = self._samples_before
        if not samples:
            return
        match output:
            case messages.Text():
                output.sample += samples
                for word in output.words:
                    word.start_sample += samples
                    word.end_sample += samples
            case messages.Speech() | messages.Flushed() | messages.Closed():
                output.sample += samples
            case _:
                pass
