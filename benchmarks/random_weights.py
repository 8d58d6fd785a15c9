"""Models with random weights for load tests: Voxtral Realtime and Whisper at full size on a GPU, or tiny on a CPU.

Used by `benchmarks/engines.py` and the benchmarks of capacity; no checkpoint is needed. Everything is computed as with
real weights. Only the number of words is set, as in speech: Voxtral outputs a word in three frames of ten, Whisper
three tokens for each second of audio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.core.scheduler import Scheduler
from engine.host_memory import memory_to_plan_with
from engine.models.layers import Heads
from engine.models.voxtral_realtime import (
    FIRST_TEXT_TOKEN,
    STREAMING_PAD,
    STREAMING_WORD,
    Stack,
    VoxtralConfig,
    VoxtralRealtime,
    tensor_shapes,
    voxtral_mini_4b,
)
from engine.models.whisper import Whisper, WhisperConfig
from engine.options import EngineConfig
from engine.runner.device import GIB, compute_on_one_thread, free_memory, require_device, shared_memory
from engine.runner.frames.memory import plan_share
from engine.runner.frames.runner import NOT_FORCED, RunnerSettings, VoxtralRunner
from engine.runner.load import (
    DEVICE_DTYPE,
    background_bytes,
    frames_limits,
    load_detector,
    load_embedder,
    load_turn_detector,
    windowed_on_device,
)
from engine.runner.windowed.decoder import DecodedToken, DecoderBatch, Row
from engine.runner.windowed.windows import DeviceWindows
from engine.server.loop import EngineLoop
from engine.server.skipped_silence import skip_settings
from engine.server.speech_track import GateSettings
from engine.spec import Vocabulary

KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# To plan with in small runs, which take little of it: not what other programs leave.
SMALL_BYTES = 8 * GIB
# Frames of ten that are text: 3.75 words a second, where people say two to three, of one token or two each.
WORDS_IN_TEN_FRAMES = 3

# Voxtral Realtime


def tiny_voxtral() -> VoxtralConfig:
    audio = Stack(32, 2, 48, Heads(2, 2, 16, 42), 1e6, 1e-5, biased=True)
    text = Stack(48, 2, 64, Heads(4, 2, 16, 64), 1e6, 1e-5, biased=False)
    # Most tokens are text, so that random weights output words.
    vocabulary = 10 * FIRST_TEXT_TOKEN
    return VoxtralConfig(audio, text, mel_bins=16, rows_per_position=4, vocabulary=vocabulary, default_delay=6)


def random_tensors(config: VoxtralConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Norms near one and matrices that keep their input's scale, so that activations stay in a sensible range."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        if len(shape) == 1:
            tensors[name] = noise.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensors[name] = noise.mul_(0.05 if "embed_tokens" in name else noise[0].numel() ** -0.5)
    return tensors


def random_voxtral(
    config: VoxtralConfig, dtype: torch.dtype, device: torch.device
) -> tuple[VoxtralRealtime, Vocabulary]:
    pieces = [b""] * FIRST_TEXT_TOKEN + [f" {index}".encode() for index in range(config.vocabulary - FIRST_TEXT_TOKEN)]
    return VoxtralRealtime(config, random_tensors(config, dtype, device)), Vocabulary(pieces, STREAMING_WORD)


class SpeakingRunner(VoxtralRunner):
    """Outputs as many words as in speech; random weights alone would output a word in nearly every frame. The output is
    given to the step in advance, as for a stream that is rebuilt after the death of an engine."""

    def _forced_at(self, slots: list[int], positions: list[int]) -> list[int]:
        known = super()._forced_at(slots, positions)
        return [
            STREAMING_PAD if token == NOT_FORCED and (7 * slot + position) % 10 >= WORDS_IN_TEN_FRAMES else token
            for slot, position, token in zip(slots, positions, known, strict=True)
        ]


def voxtral_runner(
    kv: str, window: int, max_streams: int | None, small: bool = False, config: EngineConfig | None = None
) -> VoxtralRunner:
    """Warm and with full pages: of full dimensions on a GPU, or with `small` a tiny one on the CPU."""
    engine = config or EngineConfig()
    device = require_device("cpu" if small else "cuda")
    sizes = tiny_voxtral() if small else voxtral_mini_4b()
    settings = RunnerSettings(kv_dtype=KV_TYPES[kv], decoder_window=window, max_streams=max_streams)
    if small:
        compute_on_one_thread()
        settings = RunnerSettings("cpu", torch.float32, torch.float32, decoder_window=24, max_streams=max_streams or 8)
    background = background_bytes(engine, own_process=True)
    memory = plan_share(
        sizes,
        SMALL_BYTES if small else free_memory(device) - background,
        SMALL_BYTES if small else shared_memory(device, engine.share_of) - engine.share_of * background,
        engine.share_of,
        decoder_window=settings.decoder_window,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        max_streams=settings.max_streams,
        parked_bytes=0 if small else int(engine.parked_share * memory_to_plan_with(engine.share_of)),
    )
    model, vocabulary = random_voxtral(sizes, settings.dtype, device)
    runner = SpeakingRunner(model, vocabulary, memory, settings)
    # Random rows, because zeros could be faster than real ones.
    for cache in runner._caches:
        for layer in cache.pages.data:
            if layer.dtype == torch.float8_e4m3fn:
                layer.view(torch.uint8).random_(0x20, 0x50)  # bit patterns of moderate values
            else:
                layer.normal_()
        if cache.pages.scales is not None:
            cache.pages.scales.fill_(0.01)
    runner.warm_up()
    return runner


def voxtral_loop(kv: str, max_streams: int | None, small: bool, config: EngineConfig | None = None) -> EngineLoop:
    """As in a server: with speech detection, skipped silence, and speaker labels and the turn detector if their files
    are here."""
    config = config or EngineConfig()
    runner = voxtral_runner(kv, 1024, max_streams, small, config)
    embedder, turns = load_embedder(runner, config), load_turn_detector(runner, config)
    options = replace(runner.spec.options, speakers=embedder is not None, turn_detector=turns is not None)
    scheduler = Scheduler(replace(runner.spec, options=options), frames_limits(runner.memory), runner.vocabulary)
    detector, cut = load_detector(runner, runner.memory.streams), skip_settings(config.cut_silence_s)
    return EngineLoop(scheduler, runner, detector, skipping=cut, embedder=embedder, turn_detector=turns)


# Whisper

# mels, vocabulary, audio frames, width, audio heads, audio layers, text tokens, text heads, text layers
WHISPER_SIZES = {
    "tiny.en": WhisperConfig(80, 51_864, 1500, 384, 6, 4, 448, 6, 4),
    "base.en": WhisperConfig(80, 51_864, 1500, 512, 8, 6, 448, 8, 6),
    "small": WhisperConfig(80, 51_865, 1500, 768, 12, 12, 448, 12, 12),
    "large-v3-turbo": WhisperConfig(128, 51_866, 1500, 1280, 20, 32, 448, 20, 4),
    # For small runs.
    "toy": WhisperConfig(80, 51_864, 1500, 32, 2, 1, 448, 2, 1),
}
TOKENS_PER_SECOND = 3.0
FIRST_TOKEN, TOKENS = 1_000, 20_000
# Log-probability of every token of the script.
SURE = -0.05


def random_whisper(size: str, device: torch.device) -> tuple[Whisper, list[bytes]]:
    """The model, and the bytes of its tokens: each is a word."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Whisper(WHISPER_SIZES[size])
    with torch.no_grad():
        for embedding in (model.encoder.positional_embedding, model.decoder.positional_embedding):
            embedding.normal_(0.0, 0.02)
    pieces = [b" w%d" % token for token in range(model.end_token)]
    return model.eval(), pieces + [b""] * (model.config.vocabulary - len(pieces))


class ScriptedSpeaker(DecoderBatch):
    """Computes every pass of another speaker and replaces its answers by a script.

    Random weights would talk without end, or not at all. The script has a token every `frames_per_token`, each with the
    attention of its moment. The token nearest to the live edge changes from pass to pass, as the last word of a draft
    does. So a pass that goes on by 0.8 s decodes two or three tokens one by one, and one draft token fails.
    """

    def __init__(self, speaker: DecoderBatch, rows: Sequence[Row], frames_per_token: float, end_token: int) -> None:
        self._speaker = speaker
        self._rows = rows
        self._spacing = frames_per_token
        self._end_token = end_token
        self._begins = [max(0.0, row.progress._text_until) for row in rows]

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[DecodedToken]:
        self._speaker.read(known, places, kept)
        self.logits = self._speaker.logits
        starts = [len(text) - len(row.draft) for text, row in zip(known, self._rows, strict=True)]
        return [self._answer(row, column - starts[row] + 1) for row, column in places]

    def next_tokens(self, last: list[tuple[int, int]]) -> list[DecodedToken]:
        self._speaker.next_tokens(last)
        self.logits = self._speaker.logits
        return [self._answer(index, len(row.tokens)) for index, row in enumerate(self._rows)]

    def _answer(self, index: int, number: int) -> DecodedToken:
        """The scripted token with this number."""
        row = self._rows[index]
        peak = int(self._begins[index] + (number + 1) * self._spacing)
        if peak >= row.frames:
            return DecodedToken(self._end_token, SURE, row.frames - 1)
        before = row.committed[-1] if row.committed else FIRST_TOKEN
        token = FIRST_TOKEN + (before - FIRST_TOKEN + number + 1) % TOKENS
        # Close to the edge the hypothesis differs from the later text.
        return DecodedToken(token + TOKENS if peak + self._spacing >= row.frames else token, SURE, peak)


def follow_script(windows: DeviceWindows, model: Whisper) -> None:
    """Live streams say what the script has."""
    decoder = windows.decoder
    passes, spacing = decoder._passes, 16_000 / model.samples_per_frame / TOKENS_PER_SECOND

    def scripted(rows: list[Row], decoder_batch_for: Callable[[int], DecoderBatch]) -> Iterator[None]:
        return passes(rows, lambda text: ScriptedSpeaker(decoder_batch_for(text), rows, spacing, model.end_token))

    decoder._passes = scripted  # type: ignore[method-assign]


def whisper_loop(size: str, max_streams: int | None, small: bool) -> EngineLoop:
    """Random weights and scripted tokens."""
    device = require_device("cpu" if small else "cuda")
    dtype, room = DEVICE_DTYPE if device.type == "cuda" else torch.float32, free_memory(device)
    model, pieces = random_whisper(size, device)
    runner, limits = windowed_on_device(f"whisper-{size}", model, pieces, device, dtype, room, max_streams)
    assert isinstance(runner.windows, DeviceWindows)
    follow_script(runner.windows, model)
    scheduler = Scheduler(runner.spec, limits, runner.vocabulary)
    return EngineLoop(scheduler, runner, load_detector(runner, limits.max_streams), GateSettings())
