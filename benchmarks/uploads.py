"""Uploads beside a live stream: how each changes the other's delay, lag, throughput and words.

    python -m benchmarks.uploads [--uploads 4] [--seconds 44] [--model NAME] [--threads 1] [--json FILE]

Plays the sample recording that `tickertape pull` provides into a real engine loop: at the pace of a microphone for the
live stream, and as fast as the engine takes it for the uploads, with as much audio waiting as with a gateway. Uploads
are repeated for as long as the live stream lasts. Time is virtual (`benchmarks/playing.py`), so time that other
programs take from the machine does not count.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.measuring import RunFailed, parser_of, percentiles, run_command, show
from benchmarks.playing import Played, Run, warm_loop
from benchmarks.recordings import SMALL_MODEL, Session, sample_speech, sound_session
from benchmarks.sounds import SAMPLE_RATE, Samples
from engine.options import DEFAULT_MODEL
from engine.server.loop import EngineLoop, calm_collector


class EndlessUploads:
    """Clients that each send a file, take its text, and send the file again under another name."""

    def __init__(self, audio: Samples, clients: int) -> None:
        # Each starts at another place of the recording, so that no two have the same window at the same time.
        starts = range(0, len(audio), max(1, len(audio) // clients))[:clients]
        self.waiting: deque[Session] = deque(
            sound_session(f"upload-{number}-0", np.roll(audio, -start)) for number, start in enumerate(starts)
        )
        # By client, the text of each finished file.
        self.texts: dict[str, list[str]] = defaultdict(list)

    def again(self, played: Played) -> None:
        client, _, number = played.session.name.rpartition("-")
        if client:
            self.texts[client].append(played.emissions.text)
            self.waiting.append(replace(played.session, name=f"{client}-{int(number) + 1}"))


def same_texts(one: EndlessUploads, other: EndlessUploads) -> bool:
    """Whether each upload has the same text in both runs, for all files that were finished in both."""
    pairs = [pair for client in one.texts for pair in zip(one.texts[client], other.texts[client], strict=False)]
    if not pairs:
        raise RunFailed("no upload was finished in both runs: change --seconds")
    return all(text == same for text, same in pairs)


def play(
    loop: EngineLoop, live: list[Session], uploads: EndlessUploads, clients: int, until: float = math.inf
) -> tuple[list[Played], float]:
    """The live session, if there is one, and seconds of uploaded audio that were computed per second."""
    run = Run(loop, streams=1, uploads=clients)
    played = run.play(live, uploads.waiting, uploads.again, until)
    for name in list(loop.scheduler.streams):
        loop.scheduler.abort(name)
    loop.step()
    spoken = [one for one in played if one.session.name == "live"]
    seconds = sum(run.computed.values()) * loop.scheduler.spec.samples_per_position / SAMPLE_RATE
    return spoken, seconds / (spoken[0].closed_at or until if spoken else until)


def delays(run: Played) -> dict[str, Any]:
    """Seconds from the end of each word to its text, and the engine's lag when text came."""
    waits = [word.shown_at - word.end for word in run.emissions.shown()]
    if not waits:
        raise RunFailed("the live stream has no text")
    return percentiles("delay", waits, 50, 95) | percentiles("lag", run.lags, 50, 95)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    audio = sample_speech(options.seconds)
    # The budget of uploads uses the same virtual clock as the delays.
    loop = warm_loop(options.model, 0, options.threads, time.process_time_ns)
    calm_collector()
    live: list[Session] = [sound_session("live", np.concatenate([audio, np.zeros(SAMPLE_RATE, np.float32)]))]
    beside_live, by_themselves = (EndlessUploads(audio, options.uploads) for _ in range(2))
    (alone,), _ = play(loop, live, EndlessUploads(audio, 1), 0)
    (together,), rate_beside = play(loop, live, beside_live, options.uploads)
    _, rate_alone = play(loop, [], by_themselves, options.uploads, options.seconds / 2)
    before, beside = delays(alone), delays(together)
    report: dict[str, Any] = {
        "live": {"alone": before, "with uploads": beside},
        "ratio": {name: beside[name] / before[name] for name in before},
        # Seconds of audio a second, all together.
        "uploads": {"alone": rate_alone, "beside live": rate_beside},
        "same_words": {
            "live": alone.emissions.text == together.emissions.text,
            "uploads": same_texts(beside_live, by_themselves),
        },
    }
    show("Uploads beside a live stream", report)
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--uploads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=44.0, help="of the recording")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    run_command(parser, arguments, measure, uploads=1, seconds=3.0, model=SMALL_MODEL)


if __name__ == "__main__":
    main()
