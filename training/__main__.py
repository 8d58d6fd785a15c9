"""Train, export and evaluate a streaming encoder; estimate how voices differ.

    python -m training train CONFIG --corpora FOLDER --out FOLDER [--start FILE] [--manifest FILE]
    python -m training export CHECKPOINT --out FILE
    python -m training evaluate MANIFEST [--weights FILE --block N] [--int8] [--utterances]
    python -m training voices CORPUS ... --corpora FOLDER --out FILE

`train` writes NAME.checkpoint.safetensors (half precision) and NAME.safetensors (the file that ships) and prints the
latter's digest; with a manifest it prints word errors too. `evaluate` without weights runs the published model with
full context, on whole clips or on utterances cut as in a live stream. `voices` writes the file with which speaker
labels compare voices. Exit status: 0 done, 2 the input cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.speakers import Labeller
from engine.errors import EngineError
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import StreamingEncoder
from engine.weights.checkpoint import load_speech_model, load_streaming_weights
from engine.weights.store import WeightsError, pull, resolve
from realtime.bench.words import Normaliser, english_normaliser
from training.data import SAMPLE_RATE, CorpusError, read_corpora
from training.distil import BadConfig, distil, export, read_config, save_checkpoint
from training.evaluate import (
    cut_where_quiet,
    hear_blocks,
    hear_masked,
    hear_published,
    read_clips,
    score,
    table,
    timed,
    utterance_cut,
)
from training.voices import embeddings_of, estimate, voices_of, write

_BASE = "moonshine-base"
_CLIPS = "clips"
_MASKED_BATCH = 24


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        {"train": _train, "export": _export, "evaluate": _evaluate, "voices": _voices}[options.command](options)
    except (BadConfig, CorpusError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training", description="Streaming encoders for Moonshine.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train from a configuration, export, say the digest")
    train.add_argument("config", type=Path)
    train.add_argument("--corpora", type=Path, required=True, help="folder with index.NAME.json and recordings")
    train.add_argument("--out", type=Path, required=True, help="folder for the results")
    train.add_argument(
        "--start", type=Path, help="a streaming encoder to go on from: a checkpoint, or a file that ships"
    )
    train.add_argument("--manifest", type=Path, help="count word errors on these clips at the end")
    write = commands.add_parser("export", help="the file that ships, from a checkpoint")
    write.add_argument("checkpoint", type=Path)
    write.add_argument("--out", type=Path, required=True)
    evaluate = commands.add_parser("evaluate", help="word errors on the clips of a manifest, on this processor")
    evaluate.add_argument("manifest", type=Path)
    evaluate.add_argument("--weights", type=Path, help="a streaming encoder; without it the published one is evaluated")
    evaluate.add_argument("--block", type=int, default=13, help="frames in a block")
    evaluate.add_argument("--int8", action="store_true", help="8-bit products, as the engine takes them")
    evaluate.add_argument("--utterances", action="store_true", help="cut clips as the speech gate cuts live streams")
    voices = commands.add_parser("voices", help="how voices differ, from recordings of many speakers")
    voices.add_argument("corpus", nargs="+", help="NAME of index.NAME.json")
    voices.add_argument("--corpora", type=Path, required=True, help="folder with index.NAME.json and recordings")
    voices.add_argument("--out", type=Path, required=True, help="the file that ships")
    return parser.parse_args(arguments)


def _train(options: argparse.Namespace) -> None:
    config = read_config(options.config)
    # Greedy decoding asks for many small attention products; this backend plans each one anew.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, pieces = _published(config.base)
    speech = read_corpora(options.corpora, config.data.corpora, config.data.validation_share)
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    run = distil(model.to(device), speech, config, report, options.start)
    student = run.student.eval()
    options.out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(student, run.spec, config.base, options.out / f"{config.name}.checkpoint.safetensors")
    file = options.out / f"{config.name}.safetensors"
    report(f"{file}: sha256 {export(student, run.spec, config.base, file)}, {file.stat().st_size / 1e6:.1f} MB")
    if options.manifest is not None:
        clips = read_clips(options.manifest, _CLIPS, student.min_samples)
        for block in run.spec.blocks:
            hear = hear_masked(student, run.spec, block)
            counts = score(student, pieces, clips, hear, _normaliser(), _MASKED_BATCH)
            report(f"blocks of {block}, float: {table(counts)}")


def _export(options: argparse.Namespace) -> None:
    model, _ = _published(_BASE)
    spec = load_streaming_weights(model, options.checkpoint)
    digest = export(model, spec, _BASE, options.out)
    print(f"{options.out}: sha256 {digest}, {options.out.stat().st_size / 1e6:.1f} MB")


def _evaluate(options: argparse.Namespace) -> None:
    model, pieces = _published(_BASE)
    spec = None if options.weights is None else load_streaming_weights(model, options.weights)
    if options.int8:
        model.quantise()
    hear = hear_published(model) if spec is None else hear_blocks(StreamingEncoder(model.encoder, spec, options.block))
    cut = utterance_cut() if options.utterances else cut_where_quiet
    clips = read_clips(options.manifest, _CLIPS, model.min_samples, cut)
    seconds = sum(len(piece) for clip in clips for piece in clip.pieces) / SAMPLE_RATE
    spent: list[float] = []
    # One at a time: nothing is padded, and nothing shares a range of 8-bit numbers.
    print(table(score(model, pieces, clips, timed(hear, spent), _normaliser(), batch=1)))
    print(f"the encoder took {sum(spent) / seconds:.4f} processor seconds per second of audio")


def _voices(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    speech = read_corpora(options.corpora, options.corpus, 0.0)
    voices = voices_of([*speech.training, *speech.validation])
    model = estimate(embeddings_of(voices, Labeller(pull("speakers")), lambda text: print(text, flush=True)))
    write(model, options.out)
    print(f"{options.out}: {len(voices)} speakers, within {model.within:.6f}, between {model.between:.6f}")


def _published(name: str) -> tuple[Moonshine, list[bytes]]:
    model, pieces = load_speech_model(resolve(name))
    if not isinstance(model, Moonshine):
        raise BadConfig(f"{name} is no Moonshine model")
    return model, pieces


def _normaliser() -> Normaliser:
    """With the table of British spellings where it can be had."""
    try:
        return english_normaliser(json.loads(pull("english-spelling").read_text()))
    except WeightsError:
        return english_normaliser({})


if __name__ == "__main__":
    sys.exit(main())
