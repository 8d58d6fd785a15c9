"""How accurate and how fast the transcripts of a windowed model are, on recordings with known words.

    python -m benchmarks.accuracy MANIFEST [--file] [--live [--paced]] [--model NAME] [--kind KIND] [--limit N]
                                  [--streams N] [--joined [--rounds N]] [--pause SECONDS] [--json FILE]

Without --live: the weights alone, on whole clips, greedy. With --live: that, and the real engine fed at the pace of a
microphone, in the same run, so that the difference is the price of being live. With --file: that, and the real engine
with the recordings as uploads, --streams of them at a time. --joined plays all clips as one long session per stream,
with --rounds again and again, so that early and late error rates are of the same words.
Exit status: 0 done, 1 the engine failed, 2 the manifest or the model cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy_report import (
    HeardPart,
    Transcript,
    accuracy,
    delays_of,
    drift_of,
    heard_parts,
    print_accuracy,
    print_live,
    rounds_of,
    seams_in,
    transcripts_of,
)
from benchmarks.file_run import FileOutcome, FileRun
from benchmarks.live_run import LiveRun, RunFailed, SessionRun, VirtualClock, WallClock, complain
from benchmarks.offline_run import OfflineTranscriber
from benchmarks.recordings import (
    Clip,
    ManifestError,
    joined_sessions,
    load_audio,
    one_session_per_clip,
    read_manifest,
)
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.errors import EngineError
from engine.models.silero import load_silero
from engine.runner.speech import SpeechDetector
from engine.server.build import build_loop
from engine.server.main import warm_up
from engine.weights.pretrained import load_speech_model
from engine.weights.store import WeightsError, pull, resolve
from realtime.bench.words import Normaliser, english_normaliser

# The microphone stays open after the last word; the engine must find the end of speech by itself.
PAUSE_SECONDS = 1.5
SPELLING_TABLE = "english-spelling"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    try:
        clips = read_manifest(options.manifest, options.kind, options.limit)
        report = _measure(clips, options)
    except (ManifestError, EngineError, RunFailed) as error:
        return complain(error)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("manifest", type=Path, help="JSON lines with path, text and seconds")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--live", action="store_true", help="also run the real engine at the pace of a microphone")
    parser.add_argument("--file", action="store_true", help="also send the recordings as uploads to the real engine")
    parser.add_argument("--paced", action="store_true", help="with --live: wait in real time, do not simulate it")
    parser.add_argument("--only-live", action="store_true", help="with --live: leave the offline run out")
    parser.add_argument("--kind", help="only recordings of this kind")
    parser.add_argument("--limit", type=_positive, help="only the first N recordings")
    parser.add_argument("--streams", type=_positive, default=1, help="live sessions or files at the same time")
    parser.add_argument("--joined", action="store_true", help="all clips as one long session per stream")
    parser.add_argument("--rounds", type=_positive, default=1, help="with --joined: play the clips so many times over")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds of silence after each recording")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of torch")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    if not options.live and (options.paced or options.joined or options.only_live):
        parser.error("--paced, --joined and --only-live need --live")
    if not (options.live or options.file) and options.streams > 1:
        parser.error("--streams needs --live or --file")
    if options.rounds > 1 and not options.joined:
        parser.error("--rounds needs --joined")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _measure(clips: list[Clip], options: argparse.Namespace) -> dict[str, Any]:
    spelling = _spelling_table()
    normalise = english_normaliser(spelling)
    seconds = sum(clip.seconds for clip in clips)
    print(f"{len(clips)} recordings, {seconds / 60:.1f} minutes; model {options.model}; {options.threads} thread(s)")
    report: dict[str, Any] = {
        "model": options.model,
        "recordings": len(clips),
        "seconds": seconds,
        "threads": options.threads,
        "spelling_table": bool(spelling),
    }
    whole: dict[Path, str] = {}
    if not options.only_live:
        report["offline"], whole = _run_offline(clips, options, normalise)
        print_accuracy("Offline: whole clips, greedy", report["offline"])
    if options.file:
        report["file"] = _run_file(clips, options, normalise, whole)
        print_accuracy(f"File: uploads, {options.streams} at a time", report["file"])
        _compare("file", report)
    if options.live:
        report["live"] = _run_live(clips, options, normalise, whole)
        pace = "in real time" if options.paced else "in simulated time"
        print_accuracy(f"Live: {options.streams} stream(s) {pace}", report["live"])
        print_live(report["live"])
        _compare("live", report)
    return report


def _compare(what: str, report: dict[str, Any]) -> None:
    offline, other = report.get("offline", {}).get("wer"), report[what].get("wer")
    if offline is not None and other is not None:
        report[f"{what}_minus_offline_points"] = 100 * (other - offline)
        print(f"\n{what.capitalize()} is {100 * (other - offline):+.2f} points from offline.")


def _spelling_table() -> dict[str, str]:
    """British to American spellings, as the normaliser's authors publish them; transformers does not carry them."""
    try:
        path = pull(SPELLING_TABLE, lambda line: print(line, file=sys.stderr))
    except WeightsError as error:
        print(f"note: scored without the table of spellings, colour is not color: {error}", file=sys.stderr)
        return {}
    table: dict[str, str] = json.loads(path.read_text())
    return table


def _run_offline(
    clips: list[Clip], options: argparse.Namespace, normalise: Normaliser
) -> tuple[dict[str, Any], dict[Path, str]]:
    """Only where somebody speaks: without a speech gate a windowed model makes up words elsewhere. Returns the figures,
    and the text of each clip."""
    spoken = [clip for clip in clips if clip.text.strip()]
    transcriber = _transcriber(options.model)
    transcripts = []
    cpu = seconds = 0.0
    for number, clip in enumerate(spoken, 1):
        samples = load_audio(clip.path)
        began = time.process_time()
        transcripts.append(Transcript(clip, transcriber.transcribe(samples)))
        cpu += time.process_time() - began
        seconds += len(samples) / 16_000
        _progress("offline", number, len(spoken))
    figures = accuracy(transcripts, normalise)
    figures |= {"cpu_per_audio_second": cpu / seconds} if seconds else {}
    return figures, {item.clip.path: item.text for item in transcripts}


def _run_live(
    clips: list[Clip], options: argparse.Namespace, normalise: Normaliser, whole: dict[Path, str]
) -> dict[str, Any]:
    if options.joined:
        sessions = joined_sessions(clips, options.streams, options.pause, options.rounds)
    else:
        sessions = one_session_per_clip(clips, options.pause)
    loop = build_loop(EngineConfig(options.model, "cpu", max_streams=options.streams, threads=options.threads))
    warm_up(loop)
    clock = WallClock() if options.paced else VirtualClock()
    finished: list[SessionRun] = []

    def note(run: SessionRun) -> None:
        finished.append(run)
        _progress("live", len(finished), len(sessions))

    live = LiveRun(loop, clock, options.streams)
    live.play(sessions, note)
    transcripts = [item for run in finished for item in transcripts_of(run)]
    figures = accuracy(transcripts, normalise) | delays_of(finished).figures() | drift_of(finished, normalise)
    figures |= seams_in([part for run in finished for part in heard_parts(run)], whole)
    if options.rounds > 1:
        figures["rounds"] = rounds_of(finished, options.rounds, live.costs, normalise)
    heard = sum(run.seconds for run in finished)
    return figures | {"streams": options.streams, "cpu_per_audio_second": clock.cpu_seconds / heard}


def _run_file(
    clips: list[Clip], options: argparse.Namespace, normalise: Normaliser, whole: dict[Path, str]
) -> dict[str, Any]:
    loop = build_loop(EngineConfig(options.model, "cpu", max_streams=options.streams, threads=options.threads))
    warm_up(loop)
    outcomes: list[FileOutcome] = []

    def note(outcome: FileOutcome) -> None:
        outcomes.append(outcome)
        _progress("file", len(outcomes), len(clips))

    run = FileRun(loop, options.streams)
    run.send(clips, note)
    seconds = sum(outcome.seconds for outcome in outcomes)
    figures = accuracy([outcome.transcript for outcome in outcomes], normalise)
    figures |= seams_in([HeardPart(o.transcript.clip, o.words, o.utterances) for o in outcomes], whole)
    return figures | {"streams": options.streams, "cpu_per_audio_second": run.cpu_seconds / seconds}


def _transcriber(model: str) -> OfflineTranscriber:
    """With the weights as the engine runs them."""
    weights, pieces = load_speech_model(resolve(model))
    weights.quantise()
    return OfflineTranscriber(weights, pieces, SpeechDetector(load_silero(), max_streams=1))


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
