"""Compares the words of windows decoded as batches on a GPU with those of a CPU. Real weights, real speech.

    python -m tests.gpu.windowed_words --model moonshine-tiny --clips FOLDER --devices cpu cuda --json words.json

Plays all clips (WAV files of 16 bits) as live streams, many at a time, in time that does not pass while the engine
works: every stride and every pause is heard, on any machine. `cpu` is the path of a CPU with float32 weights, so that
what differs is the batching, the recording and the rounding to 16 bits; `cpu-8bit` has the 8-bit weights of a server on
a CPU; `batches` is the path of a GPU on the CPU, with float32. Prints for each device how many words differ from those
of the first, and with references (`NAME.txt` beside `NAME.wav`) the word error rate. Whisper hears a window with 2 s of
silence on a CPU, or 12 s at a pause, and as 30 s on a GPU: `--context ample` gives both the same. With short a GPU has
2 s, also at a pause. Needs torch, numpy, silero-vad and transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.sounds import Samples, read_wav
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Command, Dead, Failed, Feed, Finish, Item, Open, Refused, Text
from engine.runner.device import GIB, free_memory, require_device
from engine.runner.load import DEVICE_DTYPE, load_detector, windowed_on_cpu, windowed_on_device
from engine.runner.windowed.runner import WindowedRunner
from engine.server.loop import EngineLoop
from engine.server.speech_track import GateSettings
from engine.weights.checkpoint import load_speech_model
from engine.weights.store import resolve
from realtime.bench.words import edit_distance, normaliser

POSITION_SAMPLES = 1280
# The microphone stays open after the last word.
PAUSE_POSITIONS = 20
# Batches need not be large there.
ROOM_ON_A_CPU = 3 * GIB
DEVICES = ("cpu", "cpu-8bit", "batches", "cuda")


def live_texts(loop: EngineLoop, clips: Sequence[Samples], streams: int) -> list[str]:
    """What is said of each clip, `streams` of them at a time."""
    texts = [""] * len(clips)
    waiting = list(range(len(clips)))[::-1]
    # Clips that play, and the position that each has reached.
    playing: dict[int, int] = {}
    now = 0
    while waiting or playing:
        now += 80_000_000
        while waiting and len(playing) < streams:
            playing[waiting.pop()] = 0
        for clip, position in list(playing.items()):
            name, end = str(clip), -(-len(clips[clip]) // POSITION_SAMPLES) + PAUSE_POSITIONS
            commands: list[Command] = [Open(name)] if position == 0 else []
            commands.append(Feed(name, [_item(clips[clip], clip, position)]))
            playing[clip] += 1
            if playing[clip] == end:
                commands.append(Finish(name))
                del playing[clip]
            loop.submit(commands, now)
        while loop.has_work():
            said = loop.step()
            for output in [] if said is None else said.outputs:
                if isinstance(output, (Dead, Failed, Refused)):
                    raise RuntimeError(output.message)
                if isinstance(output, Text):
                    texts[int(output.stream)] += output.delta
    return texts


def _item(samples: Samples, clip: int, position: int) -> Item:
    first = position * POSITION_SAMPLES
    piece = samples[first : first + POSITION_SAMPLES]
    payload = np.pad(piece, (0, POSITION_SAMPLES - len(piece)))
    return Item(position, 1, first, b"%d/%d" % (clip, position), payload)


def build(model_name: str, device: str, streams: int, threads: int, ample: bool) -> EngineLoop:
    model, pieces = load_speech_model(resolve(model_name))
    name = Path(model_name).name
    runner: WindowedRunner
    limits: Limits
    if device.startswith("cpu"):
        if device == "cpu-8bit":
            model.quantise()
        runner, limits = windowed_on_cpu(name, model, pieces, streams, threads, ample)
    else:
        place = require_device("cpu" if device == "batches" else device)
        if place.type == "cuda":
            room, dtype = free_memory(place), DEVICE_DTYPE
        else:
            room, dtype = ROOM_ON_A_CPU, torch.float32
        runner, limits = windowed_on_device(name, model, pieces, place, dtype, room, streams, ample)
    runner.warm_up()
    detector = load_detector(runner, limits.max_streams)
    return EngineLoop(Scheduler(runner.spec, limits, runner.vocabulary), runner, detector, GateSettings())


def differing(texts: Sequence[str], others: Sequence[str]) -> tuple[int, int]:
    """Words that differ, and all words of the first texts."""
    normalise = normaliser()
    errors = [edit_distance(normalise(one), normalise(other)) for one, other in zip(texts, others, strict=True)]
    return sum(errors), sum(len(normalise(text)) for text in texts)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name that `tickertape pull` knows, or a path")
    parser.add_argument("--clips", type=Path, required=True, help="folder with WAV files of 16 bits")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=["cpu", "cuda"])
    parser.add_argument("--streams", type=int, default=32, help="clips at a time")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--context", choices=["own", "short", "ample"], default="own", help="Whisper: see above")
    parser.add_argument("--compare", type=Path, help="file of an earlier run, whose first device counts as the first")
    parser.add_argument("--json", type=Path, help="file for the texts")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    files = sorted(options.clips.glob("*.wav"))
    clips = [read_wav(file) for file in files]
    references = [file.with_suffix(".txt") for file in files]
    texts: dict[str, list[str]] = {}
    if options.compare:
        texts = {f"{device} before": said for device, said in json.loads(options.compare.read_text())["texts"].items()}
    for device in options.devices:
        ample = {"short": False, "ample": True, "own": not device.startswith("cpu")}[options.context]
        loop = build(options.model, device, options.streams, options.threads, ample)
        began = time.perf_counter()
        texts[device] = live_texts(loop, clips, options.streams)
        seconds = time.perf_counter() - began
        loop.runner.close()
        first = next(iter(texts))
        differ, words = differing(texts[first], texts[device])
        line = f"{options.model} {device}: {differ} of {words} words differ from {first}"
        line += f" ({100 * differ / max(1, words):.2f} %), {seconds:.0f} s"
        if all(file.is_file() for file in references):
            errors, spoken = differing([file.read_text() for file in references], texts[device])
            line += f", word error rate {100 * errors / spoken:.2f} % of {spoken}"
        print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"files": [file.name for file in files], "texts": texts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
