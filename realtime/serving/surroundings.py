"""What a gateway has around it, beside its engine and its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from realtime.metrics.gateway import Metrics
from realtime.serving.house import House
from realtime.serving.tokens import Signer
from realtime.serving.will import WillApi


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A gateway that is alone needs none of it said.

    `heirs`: other gateways may go on with its sessions, and it with theirs; they share the signer's secret. `house`:
    who counts the sessions of all.
    """

    metrics: Metrics = field(default_factory=Metrics)
    signer: Signer = field(default_factory=Signer)
    heirs: WillApi | None = None
    house: House | None = None
