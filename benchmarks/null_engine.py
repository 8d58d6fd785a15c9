"""An engine process that costs next to nothing: real host, scheduler and messages, no model and no detector.

python -m benchmarks.null_engine --listen ipc:///tmp/engine

With `engine` and the flags of `tickertape engine` behind, it stands in for it in a fleet.

It says a word every 400 ms, as people do, and hears them pause for a second in every five. What gateways spend under
load can so be measured where there is no GPU.
"""

from __future__ import annotations

import argparse
import signal
import threading
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.step_cost import NullRunner, voxtral_like
from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.fleet_secret import read_secret
from engine.messages import Saved, Speech
from engine.server.host import Drain
from engine.server.loop import EngineLoop
from engine.server.main import run_engine

STREAMS = 1000
FRAME = 512
SPEAKS_S, OF_S = 4, 5


class NullDetector:
    """Hears speech by the clock alone."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._ears: dict[str, tuple[int, int]] = {}

    def open(self, stream: str, sample: int = 0) -> None:
        self._ears[stream] = (sample, 0)

    def close(self, stream: str) -> None:
        self._ears.pop(stream, None)

    def pass_silence(self, stream: str, samples: int) -> Speech:
        start, rest = self._ears[stream]
        self._ears[stream] = (start + samples, rest)
        return Speech(stream, start, samples, [0.0])

    def save(self, stream: str) -> Saved:
        sample, rest = self._ears[stream]
        return {"sample": sample, "rest": rest}

    def resume(self, stream: str, saved: Saved) -> None:
        self._ears[stream] = (saved["sample"], saved["rest"])

    def detect(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        found = []
        for stream, samples in batch:
            start, rest = self._ears[stream]
            frames, rest = divmod(rest + len(samples), FRAME)
            self._ears[stream] = (start + frames * FRAME, rest)
            if frames:
                moments = ((start + FRAME * frame) / self._rate % OF_S for frame in range(frames))
                found.append(Speech(stream, start, FRAME, [float(moment < SPEAKS_S) for moment in moments]))
        return found


def build(streams: int = STREAMS) -> EngineLoop:
    spec = replace(voxtral_like(), look_back_samples=680, look_ahead_samples=40)
    pages = tuple(group.ring_pages * streams for group in spec.kv_groups)
    # A stream that is rebuilt hears many positions in a step, however few streams there is room for.
    limits = Limits(
        streams, spec.embeds_per_stream * streams + 4096, pages, step_positions=STREAMS, step_embeds=STREAMS
    )
    runner = NullRunner(spec)
    return EngineLoop(Scheduler(spec, limits, runner.vocabulary), runner, NullDetector(spec.sample_rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["engine"], help="as `tickertape engine` is called")
    parser.add_argument("--listen", required=True, help="address to listen on")
    parser.add_argument("--streams", type=int, default=STREAMS, help="how many it has room for")
    parser.add_argument("--fleet-secret-file")
    parser.add_argument("--drain-s", type=float, default=60.0)
    parser.add_argument("--config", help="not read: there is nothing to set")
    options = parser.parse_args()
    asked_to_stop, asked_to_drain = threading.Event(), threading.Event()
    # Alone it has nobody to give its streams to.
    on_term = asked_to_drain if options.what else asked_to_stop
    signal.signal(signal.SIGINT, lambda *_: asked_to_stop.set())
    signal.signal(signal.SIGTERM, lambda *_: on_term.set())
    secret = read_secret(options.fleet_secret_file) if options.fleet_secret_file else None
    drain = Drain(asked_to_drain.is_set, options.drain_s)
    run_engine(options.listen, partial(build, options.streams), asked_to_stop.is_set, drain=drain, fleet_secret=secret)


if __name__ == "__main__":
    main()
