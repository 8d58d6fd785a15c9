"""Who killed the engine? What is known against each stream, and when that is enough.

The streams in the step that an engine died in are suspects. They come back at once with the others, but no step has two
of them until they are past the spot. If the engine dies at the same spot of the same stream again, that stream is
ended, and only that one. Deaths that somebody else may have caused (a signal from outside) count for less than crashes.
Of an engine on another machine the last step is not known: there, every stream that had audio to compute is a suspect,
and after a second death suspects come back one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

# Deaths at one spot that convict a stream: crashes, ends by a signal that anybody may have sent, and ends of engines
# whose last step is not known. An operator may well kill an engine twice just as it comes back.
STRIKES_IF_CRASHED = 2
STRIKES_IF_UNKNOWN = 3
STRIKES_IF_UNSEEN = 4
# One death with more streams than this in a step is no reason to hold all of them up.
FEW_SUSPECTS = 16


class Suspicion:
    """What is known against one stream: how many engines died at the same spot of it, one after the other."""

    __slots__ = ("alone", "must_wait", "spot", "strikes")

    def __init__(self) -> None:
        self.strikes = 0
        # Positions on the stream's own count that all those engines were computing when they died.
        self.spot = range(0)
        # The spot must not be computed together with another suspect's.
        self.alone = False
        # The stream must not even be reopened beside another suspect.
        self.must_wait = False

    def strike(self, start: int, end: int) -> None:
        """An engine died while it computed these positions, of this stream and perhaps others."""
        last, spot = self.spot, range(start, max(start + 1, end))
        both = range(max(spot.start, last.start), min(spot.stop, last.stop))
        if self.strikes and spot.stop <= last.start:
            return  # on its way to the spot where the engine before died: that says nothing new
        self.strikes = self.strikes + 1 if both else 1
        self.spot = both or spot

    def passed(self, computed: int) -> None:
        """The stream was computed up to here; past the spot it was not the reason."""
        if computed >= self.spot.stop:
            self.strikes, self.alone, self.must_wait = 0, False, False


def convict(suspects: Mapping[Suspicion, range], step_known: bool, crashed: bool) -> Suspicion | None:
    """One more death: write it down against those who were computed, and find the one it must be blamed on, if any.

    `suspects`: the positions of each that the engine was computing, or, if its last step is not known, may have been.
    """
    for suspicion, spot in suspects.items():
        suspicion.strike(spot.start, spot.stop)
    for suspicion in suspects:
        suspicion.alone = len(suspects) <= FEW_SUSPECTS or suspicion.strikes > 1
        suspicion.must_wait = not step_known and suspicion.strikes > 1
    enough = STRIKES_IF_CRASHED if crashed else STRIKES_IF_UNKNOWN if step_known else STRIKES_IF_UNSEEN
    guilty = [suspicion for suspicion in suspects if suspicion.strikes >= enough]
    return guilty[0] if len(guilty) == 1 else None
