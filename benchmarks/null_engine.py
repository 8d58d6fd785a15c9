"""An engine process that costs next to nothing: real host, scheduler and messages, no model and no detector.

python -m benchmarks.null_engine --listen ipc:///tmp/engine

With `engine` and the flags of `tickertape engine` behind, it stands in for it in a fleet.

It says a word every 400 ms, as people do, and hears them pause for a second in every five, by the clock alone. What
gateways spend under load can so be measured where there is no GPU. In a fleet it goes by the audio instead: whoever
hears the same says the same, however often the stream was moved and by whom.
"""

from __future__ import annotations

import argparse
import signal
import threading
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.step_cost import PIECES, NullRunner, voxtral_like
from engine.core.limits import Limits
from engine.core.plan import SILENCE_ROW, DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.fleet_secret import read_secret
from engine.messages import Saved, Speech
from engine.server.host import Drain
from engine.server.loop import EngineLoop
from engine.server.main import run_engine
from engine.spec import ModelSpec

STREAMS = 1000
FRAME = 512
SPEAKS_S, OF_S = 4, 5
# Mean of the absolute samples, above what a quiet room has in a recording.
LOUD = 0.003
NOTHING = np.zeros(0, np.float32)


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


class HearingRunner(NullRunner):
    """What it keeps of audio is the token for it: blank unless it is loud, and then for all pieces but one in three."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._tokens = {SILENCE_ROW: 0}

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        for task in plan.encode:
            is_said = zlib.crc32(task.payload) % 3 == 0 and np.abs(task.payload).mean() > LOUD
            token = 2 + zlib.adler32(task.payload) % (len(PIECES) - 2) if is_said else 0
            self._tokens |= dict.fromkeys(task.rows, token)
        return [DecodeResult([self._tokens[row] for row in task.rows]) for task in plan.decode]


class HearingDetector(NullDetector):
    """Loud is speech."""

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        # Samples of each stream that do not make a frame yet.
        self._rests: dict[str, NDArray[np.float32]] = {}

    def close(self, stream: str) -> None:
        super().close(stream)
        self._rests.pop(stream, None)

    def detect(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        whole = [(stream, np.concatenate((self._rests.get(stream, NOTHING), samples))) for stream, samples in batch]
        self._rests |= {stream: sound[len(sound) // FRAME * FRAME :] for stream, sound in whole}
        found = super().detect(batch)
        sounds = dict(whole)
        for speech in found:
            sound = sounds[speech.stream]
            loudness = np.abs(sound[: len(sound) // FRAME * FRAME].reshape(-1, FRAME)).mean(axis=1)
            speech.probabilities = (loudness > LOUD).astype(float).tolist()
        return found


def build(streams: int = STREAMS, hears: bool = False) -> EngineLoop:
    spec = replace(voxtral_like(), look_back_samples=680, look_ahead_samples=40)
    pages = tuple(group.ring_pages * streams for group in spec.kv_groups)
    # A stream that is rebuilt hears many positions in a step, however few streams there is room for.
    limits = Limits(
        streams, spec.embeds_per_stream * streams + 4096, pages, step_positions=STREAMS, step_embeds=STREAMS
    )
    runner, detector = (HearingRunner, HearingDetector) if hears else (NullRunner, NullDetector)
    made = runner(spec)
    return EngineLoop(Scheduler(spec, limits, made.vocabulary), made, detector(spec.sample_rate))


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
    run_engine(
        options.listen,
        partial(build, options.streams, bool(options.what)),
        asked_to_stop.is_set,
        drain=drain,
        fleet_secret=secret,
    )


if __name__ == "__main__":
    main()
