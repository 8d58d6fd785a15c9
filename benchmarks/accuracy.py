"""Word error rate, delay and processor time of a windowed model, on recordings with known words.

    python -m benchmarks.accuracy MANIFEST [--file] [--live] [--model NAME] [--kind KIND] [--limit N] [--streams N]
                                  [--joined ROUNDS] [--pause SECONDS] [--json FILE]

Without options: the weights alone, on whole clips, greedy. --live adds the real engine in the same run, fed at the pace
of a microphone in simulated time, so that the difference is the cost of live transcription. --file adds the real
engine with the recordings as uploads, --streams of them at a time. --joined plays all clips as one long live session
per stream, ROUNDS times over, so that early and late error rates are for the same words.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import parser_of, percentiles, positive, run_command, show
from benchmarks.playing import Cost, Played, Run, warm_loop
from benchmarks.recordings import (
    SMALL_MODEL,
    Clip,
    Part,
    Session,
    add_manifest,
    exit_status,
    joined_sessions,
    load_audio,
    manifest_of,
    one_session_per_clip,
    read_manifest,
)
from benchmarks.scoring import (
    Word,
    bootstrap_interval,
    calibration,
    plain_words,
    pooled,
    right_words,
    times_to_final,
)
from benchmarks.sounds import SAMPLE_RATE, Samples, speech_probabilities, utterances
from engine.core.words import Detokenizer
from engine.models.seq2seq import SpeechModel
from engine.options import DEFAULT_MODEL
from engine.runner.device import compute_on_one_thread
from engine.runner.windowed.decoder import GreedyDecoder, Row
from engine.server.loop import EngineLoop
from engine.spec import Vocabulary
from engine.weights.checkpoint import load_speech_model
from engine.weights.store import WeightsError, pull, resolve
from realtime.bench.words import Normaliser, english_normaliser, word_errors
from realtime.session.settings import Settings

SPELLING_TABLE = "english-spelling"
# Silence after a live recording: the engine must find the end of speech by itself.
PAUSE_SECONDS = 1.5

Figures = dict[str, Any]
# A clip and its text.
Transcript = tuple[Clip, str]


# The same weights without a live edge: what a live transcript is compared with


class OfflineTranscriber:
    """Whole clips, greedy. Windowed models are trained on at most half a minute: what is longer is cut where it is
    quietest, which no listener would hear as a cut."""

    LONGEST_PIECE, SHORTEST_PIECE = 30 * SAMPLE_RATE, 20 * SAMPLE_RATE
    # More than is said in a second; a model that repeats itself stops here.
    TOKENS_PER_SECOND = 6.5

    def __init__(self, model: SpeechModel, pieces: list[bytes]) -> None:
        self._model = model
        self._decoder = GreedyDecoder(model)
        self._vocabulary = Vocabulary(pieces)

    @classmethod
    def load(cls, model: str) -> OfflineTranscriber:
        """With the weights as the engine runs them."""
        weights, pieces = load_speech_model(resolve(model))
        weights.quantise()
        return cls(weights, pieces)

    @torch.inference_mode()
    def transcribe(self, samples: Samples) -> str:
        model, texts = self._model, []
        for part in self._cut(samples):
            part = np.pad(part, (0, max(0, model.min_samples - len(part))))
            encoded = model.encode(torch.from_numpy(part)[None], [len(part)])
            room = model.max_tokens - len(model.start_tokens) - 1
            most = min(room, int(len(part) / SAMPLE_RATE * self.TOKENS_PER_SECOND) + 8)
            row = Row([], [], most, None, encoded.audio[0])
            self._decoder.run([row], encoded)
            detokenizer = Detokenizer(self._vocabulary)
            text = "".join(detokenizer.push(token) for token in row.tokens) + detokenizer.flush()
            texts.append(text.strip())
        return " ".join(texts).strip()

    def _cut(self, samples: Samples) -> list[Samples]:
        if len(samples) <= self.LONGEST_PIECE:
            return [samples]
        probabilities, frame = speech_probabilities(samples)
        # The quietest quarter of a second: the mean of the probabilities around each frame.
        calm = np.convolve(probabilities, np.full(8, 1 / 8), mode="same")
        pieces, start = [], 0
        while len(samples) - start > self.LONGEST_PIECE:
            first, last = (start + self.SHORTEST_PIECE) // frame, (start + self.LONGEST_PIECE) // frame
            end = int(first + calm[first:last].argmin()) * frame
            pieces.append(samples[start:end])
            start = end
        return [*pieces, samples[start:]]


# From transcripts and runs to figures


def accuracy(transcripts: Sequence[Transcript], normalise: Normaliser) -> Figures:
    """Error rate of clips with speech, and words that appeared in clips without."""
    silent = [(clip, text) for clip, text in transcripts if not clip.text.strip()]
    errors = [word_errors(normalise(clip.text), normalise(text)) for clip, text in transcripts if clip.text.strip()]
    figures: Figures = {}
    if errors:
        total = pooled(errors)
        figures |= {
            "clips": len(errors),
            "words": total.words,
            "wer": total.rate,
            "wer_interval": bootstrap_interval(errors),
        }
    if silent:
        inserted = {clip.path.name: text for clip, text in silent if normalise(text)}
        figures |= {
            "silent_minutes": sum(clip.seconds for clip, _ in silent) / 60,
            "words_in_silence": sum(len(normalise(text)) for text in inserted.values()),
            "texts_in_silence": inserted,
        }
    return figures


def words_of(part: Part, words: Sequence[Word]) -> list[Word]:
    return [word for word in words if part.start <= word.middle < part.end]


def transcripts_of(run: Played) -> list[Transcript]:
    """The text of each clip of a session: all of it if there is one clip, or the words that fall into each."""
    if len(run.parts) == 1:
        return [(run.parts[0].clip, run.emissions.text)]
    words = run.emissions.words
    return [(part.clip, " ".join(word.text for word in words_of(part, words))) for part in run.parts]


def finals_of(runs: Sequence[Played], normalise: Normaliser) -> Figures:
    """Error rate of the final texts of turns, and how long after the end of speech they came."""
    finals = [final for run in runs for final in run.finals]
    delays = [at - final.end / SAMPLE_RATE for final, at in finals if final.transcript]
    texts = [
        (run.parts[0].clip, " ".join(final.transcript for final, _ in run.finals))
        for run in runs
        if len(run.parts) == 1
    ]
    return {**accuracy(texts, normalise), **percentiles("delay_after_end", delays, 50, 95)} if texts else {}


def delays_of(runs: Sequence[Played]) -> Figures:
    """Seconds, over all live sessions."""
    emission, final, lag = list[float](), list[float](), list[float]()
    judged: list[tuple[float, bool]] = []
    for run in runs:
        shown = run.emissions.shown()
        for part in run.parts:
            words = right_words(plain_words(part.clip.text), words_of(part, shown))
            emission += [word.shown_at - word.end for word, is_right in words if is_right]
            judged += [(word.confidence, is_right) for word, is_right in words if word.confidence is not None]
        final += times_to_final(utterances(run.probabilities, run.frame_seconds), shown)
        lag += run.lags
    return {
        "words_timed": len(emission),
        **percentiles("emission_delay", emission, 50, 95),
        "utterances_timed": len(final),
        **percentiles("time_to_final", final, 50, 95),
        **percentiles("lag", lag, 50, 95, 100),
        "wrong_in_lowest_tenth_and_upper_half": calibration(judged),
    }


def rounds_of(runs: Sequence[Played], rounds: int, costs: Sequence[Cost], normalise: Normaliser) -> list[Figures]:
    """Error rate and cost of each round of sessions that play the same recordings over and over."""
    transcripts: list[list[Transcript]] = [[] for _ in range(rounds)]
    ends = [0.0] * rounds
    for run in runs:
        items = transcripts_of(run)
        for index, (item, part) in enumerate(zip(items, run.parts, strict=True)):
            number = index * rounds // len(items)
            transcripts[number].append(item)
            ends[number] = max(ends[number], part.end)
    figures, start = list[Figures](), 0.0
    for items, end in zip(transcripts, ends, strict=True):
        first, last = (min(costs, key=lambda cost: abs(cost.at - moment)) for moment in (start, end))
        figures.append(
            {
                "seconds": end - start,
                "wer": accuracy(items, normalise).get("wer"),
                "cpu_per_audio_second": (last.cpu_seconds - first.cpu_seconds) / max(last.at - first.at, 1e-9),
                "resident_mib": last.resident_bytes / 2**20,
            }
        )
        start = end
    return figures


# The command


def offline(clips: list[Clip], model: str, normalise: Normaliser) -> Figures:
    """Only clips with speech: without a speech gate a windowed model makes up words elsewhere."""
    transcriber = OfflineTranscriber.load(model)
    transcripts = []
    cpu = seconds = 0.0
    for clip in clips:
        if clip.text.strip():
            samples = load_audio(clip.path)
            began = time.process_time()
            transcripts.append((clip, transcriber.transcribe(samples)))
            cpu += time.process_time() - began
            seconds += len(samples) / SAMPLE_RATE
    return accuracy(transcripts, normalise) | ({"cpu_per_audio_second": cpu / seconds} if seconds else {})


def through_the_engine(
    loop: EngineLoop, live: bool, sessions: list[Session], options: argparse.Namespace, normalise: Normaliser
) -> Figures:
    run = Run(loop, options.streams, live, settings=Settings())
    finished = run.play(sessions)
    figures = accuracy([item for played in finished for item in transcripts_of(played)], normalise)
    if live:
        figures |= delays_of(finished)
        done = loop.revisions
        looks = {"revised": done.done, "not_revised": done.skipped, "words_revised": done.words_changed}
        figures["finals"] = finals_of(finished, normalise) | looks
    if live and options.joined:
        figures["rounds"] = rounds_of(finished, options.joined, run.costs, normalise)
    heard = sum(played.seconds for played in finished)
    return figures | {"streams": options.streams, "cpu_per_audio_second": run.clock.cpu_seconds / heard}


def measure(options: argparse.Namespace) -> Figures:
    if options.threads == 1:
        compute_on_one_thread()
    else:
        torch.set_num_threads(options.threads)
    with manifest_of(options) as manifest:
        return figures_of(read_manifest(manifest, options.kind, options.limit), options)


def figures_of(clips: list[Clip], options: argparse.Namespace) -> Figures:
    spelling = spelling_table()
    normalise = english_normaliser(spelling)
    report: Figures = {
        "model": options.model,
        "recordings": len(clips),
        "seconds": sum(clip.seconds for clip in clips),
        "threads": options.threads,
        "spelling_table": bool(spelling),
    }
    show("Accuracy", report)
    if not options.only_live:
        report["offline"] = offline(clips, options.model, normalise)
        show("Offline: whole clips, greedy", report["offline"])
    if options.file or options.live:
        loop = warm_loop(options.model, options.streams, options.threads)
    if options.file:
        sessions = one_session_per_clip(clips, 0.0)
        report["file"] = through_the_engine(loop, False, sessions, options, normalise)
        show(f"File: uploads, {options.streams} at a time", report["file"])
    if options.live:
        sessions = one_session_per_clip(clips, options.pause)
        if options.joined:
            sessions = joined_sessions(clips, options.streams, options.pause, options.joined)
        report["live"] = through_the_engine(loop, True, sessions, options, normalise)
        show(f"Live: {options.streams} stream(s) in simulated time", report["live"])
    for what in ("file", "live"):
        before, after = (report.get(name, {}).get("wer") for name in ("offline", what))
        if before is not None and after is not None:
            report[f"{what}_minus_offline_points"] = 100 * (after - before)
            print(f"\n{what.capitalize()} is {100 * (after - before):+.2f} points from offline.")
    return report


def spelling_table() -> dict[str, str]:
    """British to American spellings, as the normaliser's authors publish them; transformers does not carry them."""
    try:
        table: dict[str, str] = json.loads(pull(SPELLING_TABLE).read_text())
    except WeightsError as error:
        print(f"note: scored without the table of spellings, colour is not color: {error}", file=sys.stderr)
        return {}
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name that `tickertape pull` knows, or a folder")
    parser.add_argument("--live", action="store_true", help="also run the real engine at the pace of a microphone")
    parser.add_argument("--file", action="store_true", help="also send the recordings as uploads to the real engine")
    parser.add_argument("--only-live", action="store_true", help="with --live: leave the offline run out")
    parser.add_argument("--kind", help="only recordings of this kind")
    parser.add_argument("--limit", type=positive, help="only the first N recordings")
    parser.add_argument("--streams", type=positive, default=1, help="live sessions or files at the same time")
    parser.add_argument("--joined", type=positive, metavar="ROUNDS", help="one long session per stream, so often")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds of silence after each recording")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch")
    return exit_status(lambda: run_command(parser, arguments, measure, live=True, file=True, model=SMALL_MODEL))


if __name__ == "__main__":
    sys.exit(main())
