"""Who killed the engine? What is known against each stream, and when that is enough.

The streams in the step that an engine died in are suspects. They come back at once with the others, but no step has two
of them until they are past the spot. If the engine dies at the same spot of the same stream again, that stream is
ended, and only that one. Deaths that somebody else may have caused (a signal from outside) count for less than crashes.
Of an engine on another machine the last step is not known: there, every stream that had audio to compute is a suspect,
and after a second death suspects come back one at a time.

Other gateways may have streams on the same engine. A step that a stream shared with such a stranger says less about it
than one of its own: the engine keeps the suspects of all gateways apart, so a stream that is to blame soon dies without
strangers, and one that is not gets past its spot. Where the step is not known either, suspects come back after a wait
of chance length, so that those of two gateways do not meet time after time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

# Deaths at one spot that convict a stream: crashes, and ends by a signal that anybody may have sent. An operator may
# well kill an engine twice just as it comes back.
STRIKES_IF_CRASHED = 2
STRIKES_IF_UNKNOWN = 3
# The same if it is not known who was in the last step, or strangers were; and if strangers may have been.
STRIKES_IF_UNSEEN = 4
STRIKES_IF_OTHERS_UNSEEN = 6
# One death with more streams than this in a step is no reason to hold all of them up.
FEW_SUSPECTS = 16


class CrashSuspicion:
    """What is known against one stream: how many engines died at the same spot of it, one after the other."""

    __slots__ = ("alone", "must_wait", "not_before", "spot", "strikes")

    def __init__(self) -> None:
        self.strikes = 0
        # Positions on the stream's own count that all those engines were computing when they died.
        self.spot = range(0)
        # The spot must not be computed together with another suspect's.
        self.alone = False
        # The stream must not even be reopened beside another suspect.
        self.must_wait = False
        # When it may be reopened.
        self.not_before = 0.0

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
            self.strikes, self.alone, self.must_wait, self.not_before = 0, False, False, 0.0


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """What a gateway knows of the end of an engine."""

    at: float
    # It ended by its own doing, not by a signal from outside.
    crashed: bool
    # Who was in its last step is known.
    step_known: bool
    # Streams of other gateways were in its last step, or may have been.
    other_gateways: bool = False

    @property
    def strikes_needed(self) -> int:
        if self.step_known and not self.other_gateways:
            return STRIKES_IF_CRASHED if self.crashed else STRIKES_IF_UNKNOWN
        return STRIKES_IF_UNSEEN if self.step_known or not self.other_gateways else STRIKES_IF_OTHERS_UNSEEN


def find_culprit(suspects: Mapping[CrashSuspicion, range], death: EngineDeath) -> CrashSuspicion | None:
    """Write one more death down against those who were computed, and find the one it must be blamed on, if any.

    `suspects` has the positions of each that the engine computed or, if its last step is not known, may have computed.
    """
    for suspicion, spot in suspects.items():
        suspicion.strike(spot.start, spot.stop)
    for suspicion in suspects:
        again = suspicion.strikes > 1
        suspicion.alone = len(suspects) <= FEW_SUSPECTS or again
        suspicion.must_wait = again and not death.step_known
        if suspicion.must_wait and death.other_gateways:
            suspicion.not_before = death.at + random.uniform(0.0, suspicion.strikes)
    guilty = [suspicion for suspicion in suspects if suspicion.strikes >= death.strikes_needed]
    return guilty[0] if len(guilty) == 1 else None
