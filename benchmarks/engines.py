"""Engines for benchmarks: engines without a model, and the engine process that other benchmarks start.

    python -m benchmarks.engines --listen ipc:///tmp/engine                             # no model
    python -m benchmarks.engines --listen ipc:///tmp/engine --voxtral --kv fp8 --max-streams 800
    python -m benchmarks.engines --listen ipc:///tmp/engine --whisper small

Without a model, host, scheduler and messages are real, and the runner answers at once: a word every fifth position (400
ms), and a detector that reports a second of silence in every five seconds, whatever the audio. So the cost of gateways
and hosts can be measured without a GPU. With `engine` and the flags of `tickertape engine` it replaces that command in
a fleet; then words and speech are functions of the audio, so that all engines give the same words for the same audio,
however often a stream is migrated. `--voxtral` and `--whisper` have random weights (`benchmarks/random_weights.py`).
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.core.plan import SILENCE_ROW, DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Open, Saved, Speech
from engine.options import EngineConfig
from engine.runner.base import Detector, SynchronousRunner, never
from engine.server.loop import EngineLoop
from engine.spec import KvGroup, ModelSpec, Vocabulary

if TYPE_CHECKING:  # benchmarks of an engine alone run where ZeroMQ is not installed
    from engine.client.client import EngineClient
    from engine.client.engine_handles import EngineProcess

STREAMS = 1000
PIECES = [b"", b"", *(f" word{i}".encode() for i in range(30))]
# Null detector: samples in a frame, and seconds of speech in every period.
FRAME = 512
SPEECH_S, PERIOD_S = 4, 5
# Mean of the absolute samples, above that of a quiet room in a recording.
LOUD = 0.003


def voxtral_spec(history_positions: int = 64) -> ModelSpec:
    """Clock and windows of Voxtral Realtime; `history_positions` is how much of the timeline is kept."""
    return ModelSpec(
        name="null",
        sample_rate=16_000,
        samples_per_position=1280,
        default_delay_positions=6,
        max_delay_positions=30,
        history_positions=history_positions,
        kv_groups=(KvGroup("encoder", 188, 8, 1 << 20), KvGroup("decoder", 1024, 16, 1 << 17)),
    )


# The same with the context samples around an item that its payload contains.
SPEC = replace(voxtral_spec(), look_back_samples=680, look_ahead_samples=40)


def room_for(streams: int, spec: ModelSpec, step_positions: int | None = None) -> Limits:
    """Limits with room for these streams, and one frame of each in a step unless more is asked for."""
    pages = tuple(group.ring_pages * streams for group in spec.kv_groups)
    step = step_positions or streams
    return Limits(streams, spec.embeds_per_stream * streams + 4096, pages, step_positions=step, step_embeds=step)


class NullRunner(SynchronousRunner):
    """Answers at once: a token of text every fifth position and blanks in between, as in speech."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.vocabulary = Vocabulary(PIECES, word_marker=1)

    def check_open(self, message: Open) -> None:
        pass

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        return [
            DecodeResult([2 + place % 30 if place % 5 == 0 else 0 for place in range(task.start, task.end)])
            for task in plan.decode
        ]


class NullDetector(Detector):
    """Reports speech by position only, whatever the audio."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        # By stream: the first sample of its next frame, and the samples of that frame so far.
        self._frames: dict[str, tuple[int, int]] = {}

    def open(self, stream: str, sample: int = 0) -> None:
        self._frames[stream] = (sample, 0)

    def close(self, stream: str) -> None:
        self._frames.pop(stream, None)

    def pass_silence(self, stream: str, samples: int) -> Speech:
        start, rest = self._frames[stream]
        self._frames[stream] = (start + samples, rest)
        return Speech(stream, start, samples, [0.0])

    def save(self, stream: str) -> Saved:
        sample, rest = self._frames[stream]
        return {"sample": sample, "rest": rest}

    def resume(self, stream: str, saved: Saved) -> None:
        self._frames[stream] = (saved["sample"], saved["rest"])

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Callable[[], list[Speech]]:
        found = self.find(batch)
        return lambda: found

    def find(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        found = []
        for stream, samples in batch:
            start, rest = self._frames[stream]
            frames, rest = divmod(rest + len(samples), FRAME)
            self._frames[stream] = (start + frames * FRAME, rest)
            if frames:
                moments = ((start + FRAME * frame) / self._rate % PERIOD_S for frame in range(frames))
                found.append(Speech(stream, start, FRAME, [float(moment < SPEECH_S) for moment in moments]))
        return found


class AudioRunner(NullRunner):
    """Words are a function of the audio: a third of the loud items have one, all others are blank."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._tokens = {SILENCE_ROW: 0}

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        for task in plan.encode:
            is_word = zlib.crc32(task.payload) % 3 == 0 and np.abs(task.payload).mean() > LOUD
            token = 2 + zlib.adler32(task.payload) % (len(PIECES) - 2) if is_word else 0
            self._tokens |= dict.fromkeys(task.rows, token)
        return [DecodeResult([self._tokens[row] for row in task.rows]) for task in plan.decode]


class LoudnessDetector(NullDetector):
    """A loud frame is speech."""

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        # By stream: samples of an incomplete frame.
        self._rests: dict[str, NDArray[np.float32]] = {}

    def close(self, stream: str) -> None:
        super().close(stream)
        self._rests.pop(stream, None)

    def find(self, batch: list[tuple[str, NDArray[np.float32]]]) -> list[Speech]:
        empty = np.zeros(0, np.float32)
        sounds = {stream: np.concatenate((self._rests.get(stream, empty), samples)) for stream, samples in batch}
        self._rests |= {stream: sound[len(sound) // FRAME * FRAME :] for stream, sound in sounds.items()}
        found = super().find(batch)
        for speech in found:
            sound = sounds[speech.stream]
            loudness = np.abs(sound[: len(sound) // FRAME * FRAME].reshape(-1, FRAME)).mean(axis=1)
            speech.probabilities = (loudness > LOUD).astype(float).tolist()
        return found


def null_loop(streams: int = STREAMS, by_audio: bool = False) -> EngineLoop:
    # A rebuilt stream processes many positions in a step, even if there is room for few streams.
    limits = room_for(streams, SPEC, step_positions=STREAMS)
    runner = AudioRunner(SPEC) if by_audio else NullRunner(SPEC)
    detector = LoudnessDetector(SPEC.sample_rate) if by_audio else NullDetector(SPEC.sample_rate)
    return EngineLoop(Scheduler(SPEC, limits, runner.vocabulary), runner, detector)


@asynccontextmanager
async def engine_client(*engines: EngineProcess, **settings: Any) -> AsyncIterator[EngineClient]:
    """A started client of these engine processes, without a gateway."""
    from engine.client.client import ClientSettings, EngineClient

    client = EngineClient(list(engines), ClientSettings(**settings))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["engine"], help="as `tickertape engine` is called")
    parser.add_argument("--listen", required=True, help="address to listen on")
    parser.add_argument("--max-streams", type=int, help="streams to make room for")
    parser.add_argument("--voxtral", action="store_true", help="a Voxtral Realtime with random weights")
    parser.add_argument("--whisper", metavar="SIZE", help="a Whisper of this size with random weights")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="fp8", help="keys and values of Voxtral")
    parser.add_argument("--share-of", type=int, default=1, help="engines on the device")
    parser.add_argument("--cut-silence", type=float, metavar="S", help="model.cut_silence_s of Voxtral")
    parser.add_argument("--parked-share", type=float, metavar="SHARE", help="model.parked_share of Voxtral")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--fleet-secret-file")
    parser.add_argument("--drain-s", type=float, default=60.0)
    parser.add_argument("--config", help="accepted and not read: there is nothing to set")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # Here, because benchmarks of an engine alone run where ZeroMQ is not installed.
    from engine.fleet_secret import read_secret
    from engine.server.host import DrainRequest
    from engine.server.main import run_engine

    if options.voxtral or options.whisper:
        from benchmarks.random_weights import voxtral_loop, whisper_loop

        given = {"cut_silence_s": options.cut_silence, "parked_share": options.parked_share}
        settings = {name: value for name, value in given.items() if value is not None}
        config = EngineConfig(share_of=options.share_of, **settings)
        build = partial(voxtral_loop, options.kv, options.max_streams, options.small, config)
        if options.whisper:
            build = partial(whisper_loop, options.whisper, options.max_streams, options.small)
    else:
        build = partial(null_loop, options.max_streams or STREAMS, bool(options.what))
    asked_to_stop, asked_to_drain = threading.Event(), threading.Event()
    # Outside a fleet there is no other engine for its streams.
    on_term = asked_to_drain if options.what else asked_to_stop
    signal.signal(signal.SIGINT, lambda *_: asked_to_stop.set())
    signal.signal(signal.SIGTERM, lambda *_: on_term.set())
    secret = read_secret(options.fleet_secret_file) if options.fleet_secret_file else None
    drain = DrainRequest(asked_to_drain.is_set, options.drain_s)
    run_engine(options.listen, build, asked_to_stop.is_set, drain=drain, fleet_secret=secret)


if __name__ == "__main__":
    main()
