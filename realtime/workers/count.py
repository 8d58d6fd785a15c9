"""How many workers a server gets if nobody says it: as many as the streams call for and the cores leave."""

from __future__ import annotations

import os
from pathlib import Path

from realtime.config import Config

# One gateway process was full at about 280 paced streams on one core; half of that leaves room for bursts.
STREAMS_PER_WORKER = 150
# What an accelerator's engine is expected to hold if nobody says how many streams it may.
STREAMS_OF_AN_ENGINE = 600
# The engine's own thread, and one for everything else.
CORES_FOR_OTHERS = 2


def workers_for(config: Config, cores: int | None = None, has_gpu: bool | None = None) -> int:
    """The number that was asked for, or one per 150 expected streams, never more than the cores leave."""
    if config.server.workers:
        return config.server.workers
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    has_gpu = Path("/dev/nvidiactl").exists() if has_gpu is None else has_gpu
    model = config.model
    if not config.engines_elsewhere and (model.name == "default" or model.device == "cpu" or not has_gpu):
        return 1  # an engine on these cores fills them before one worker is full
    expected = config.limits.max_sessions or model.max_streams or STREAMS_OF_AN_ENGINE * max(1, len(model.engines))
    return max(1, min(-(-expected // STREAMS_PER_WORKER), cores - CORES_FOR_OTHERS))
