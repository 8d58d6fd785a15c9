"""Word errors of an encoder with greedy decoding, on the clips of a manifest: `python -m training evaluate`.

A manifest is JSON lines with `path` (relative to the manifest), `text`, and `kind` and `style` for grouping. Clips are
decoded whole, or cut into utterances by the speech detector and gate of the engine (`utterance_cut`). A `Hear` function
encodes audio: the published encoder, block by block as the engine does, or all blocks in one masked pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.models.moonshine import Moonshine, frames_after
from engine.models.moonshine_streaming import StreamingEncoder, StreamingSpec
from engine.models.silero import load_silero
from engine.runner.speech import SpeechDetector
from engine.server.speech_gate import Begin, End, GateSettings, SpeechGate
from realtime.bench.words import Normaliser, edit_distance
from training.data import SAMPLE_RATE, read_recording
from training.model import block_plan, encode_blocks, greedy_tokens, token_limit

# Moonshine takes at most half a minute. Longer audio is cut in its quietest quarter of a second.
_LONGEST_SECONDS, _SHORTEST_SECONDS = 30, 20
_QUIET_SAMPLES = SAMPLE_RATE // 4
_OPEN_SECONDS = 2

Samples = NDArray[np.float32]
Cut = Callable[[Samples], list[Samples]]
# Pieces of audio -> [batch, frames, width] and the real frames of each.
Hear = Callable[[list[Samples]], tuple[Tensor, list[int]]]


@dataclass(frozen=True, slots=True)
class Clip:
    style: str
    text: str
    pieces: list[Samples]


@dataclass(slots=True)
class Count:
    errors: int = 0
    words: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.errors / max(1, self.words)


def cut_where_quiet(samples: Samples) -> list[Samples]:
    """The clip as one piece; a clip that is too long for the model is cut."""
    pieces = []
    while len(samples) > _LONGEST_SECONDS * SAMPLE_RATE:
        first = _SHORTEST_SECONDS * SAMPLE_RATE
        power = np.cumsum(samples[first : _LONGEST_SECONDS * SAMPLE_RATE].astype(np.float64) ** 2)
        end = first + int((power[_QUIET_SAMPLES:] - power[:-_QUIET_SAMPLES]).argmin()) + _QUIET_SAMPLES // 2
        pieces.append(samples[:end])
        samples = samples[end:]
    return [*pieces, samples]


def utterance_cut() -> Cut:
    """A function that cuts clips into utterances as live streams are cut: by the engine's detector and gate."""
    detector = SpeechDetector(load_silero(), max_streams=1)

    def cut(samples: Samples) -> list[Samples]:
        # The microphone stays open after the last word.
        samples = np.pad(samples, (0, _OPEN_SECONDS * SAMPLE_RATE))
        detector.open("clip")
        heard = detector.detect([("clip", samples)])[0]
        detector.close("clip")
        found, start = list[Samples](), 0
        for decision in SpeechGate(GateSettings()).judge(heard.probabilities, heard.frame_samples):
            if isinstance(decision, Begin):
                start = decision.sample
            elif isinstance(decision, End):
                found += cut_where_quiet(samples[start : decision.sample])
        return found

    return cut


def read_clips(manifest: Path, kind: str, shortest_samples: int, cut: Cut = cut_where_quiet) -> list[Clip]:
    clips = []
    for line in manifest.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["kind"] == kind:
            samples = (read_recording(manifest.parent / entry["path"]) / 32_768).astype(np.float32)
            pieces = [np.pad(piece, (0, max(0, shortest_samples - len(piece)))) for piece in cut(samples)]
            clips.append(Clip(entry["style"], entry["text"], pieces))
    return clips


def score(
    model: Moonshine, pieces: Sequence[bytes], clips: Sequence[Clip], hear: Hear, normalise: Normaliser, batch: int
) -> dict[str, Count]:
    """Errors by style, and of "all"; `pieces` are the bytes of the vocabulary's tokens."""
    parts = [(number, part) for number, clip in enumerate(clips) for part in clip.pieces]
    # Parts of like length together: little is padding.
    order = sorted(range(len(parts)), key=lambda place: len(parts[place][1]))
    said: dict[int, str] = {}
    for first in range(0, len(order), batch):
        places = order[first : first + batch]
        audio = [parts[place][1] for place in places]
        frames, lengths = hear(audio)
        limits = [token_limit(len(samples) / SAMPLE_RATE, model) for samples in audio]
        for place, tokens in zip(places, greedy_tokens(model, frames, lengths, limits), strict=True):
            said[place] = b"".join(pieces[token] for token in tokens).decode("utf-8", "replace").strip()
    texts = [""] * len(clips)
    for place, (number, _) in enumerate(parts):
        texts[number] += " " + said[place]
    counts: dict[str, Count] = {}
    for clip, text in zip(clips, texts, strict=True):
        reference = normalise(clip.text)
        errors = edit_distance(reference, normalise(text))
        for group in (clip.style, "all"):
            count = counts.setdefault(group, Count())
            count.errors += errors
            count.words += len(reference)
    return counts


def hear_published(model: Moonshine) -> Hear:
    """The encoder as it was published, one piece at a time: full context."""

    def hear(audio: list[Samples]) -> tuple[Tensor, list[int]]:
        with torch.inference_mode():
            return _padded([model.encoder(torch.from_numpy(part)[None], [len(part)])[0][0] for part in audio])

    return hear


def hear_blocks(encoder: StreamingEncoder) -> Hear:
    """The streaming encoder block by block, as the engine runs it."""

    def hear(audio: list[Samples]) -> tuple[Tensor, list[int]]:
        rows = []
        for part in audio:
            frames, state = encoder.step(torch.from_numpy(part), encoder.start())
            rows.append(torch.cat((frames, encoder.finish(state))))
        return _padded(rows)

    return hear


def hear_masked(model: Moonshine, spec: StreamingSpec, block: int) -> Hear:
    """The streaming encoder in one masked pass, many pieces at a time: fast on a GPU."""
    device = model.decoder.embed_tokens.weight.device

    @torch.no_grad()
    def hear(audio: list[Samples]) -> tuple[Tensor, list[int]]:
        lengths = [frames_after(len(part), 3) for part in audio]
        batch = pad_sequence([torch.from_numpy(part) for part in audio], batch_first=True).to(device)
        plan = block_plan(max(lengths), block, spec.look_ahead, spec.left, device)
        frames = torch.tensor(lengths, device=device)
        return encode_blocks(model.encoder, spec.norm, batch, plan, frames=frames)[0], lengths

    return hear


def timed(hear: Hear, spent: list[float]) -> Hear:
    """`hear`, with the processor seconds of each call added to `spent`."""

    def hear_timed(audio: list[Samples]) -> tuple[Tensor, list[int]]:
        began = time.process_time()
        heard = hear(audio)
        spent.append(time.process_time() - began)
        return heard

    return hear_timed


def _padded(rows: list[Tensor]) -> tuple[Tensor, list[int]]:
    return pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def table(counts: dict[str, Count]) -> str:
    return ", ".join(f"{style} {count.percent:.2f} % of {count.words}" for style, count in sorted(counts.items()))
