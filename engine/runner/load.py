"""Loads the models of an engine: chooses runner and device for a checkpoint, and computes the scheduler's limits.

`engine/server/main.py` calls it at the start of an engine: `load_runner` for the model, `load_detector` for the speech
detector, `load_embedder` for speaker labels, `load_turn_detector` for the turn detector. The choice between model
families is made here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.core.scheduler import Limits
from engine.errors import EngineError
from engine.host_memory import available_memory, needed_memory
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import StreamingEncoder
from engine.models.seq2seq import DecoderState, Encoded, copy_for_thread, copy_weights
from engine.models.silero import load_silero
from engine.models.whisper import Whisper
from engine.options import PIECE_SAMPLES, EngineConfig, cache_folder
from engine.runner.background import SmartTurnDetector, SpeakerEmbedder, UtteranceReviser
from engine.runner.base import Runner
from engine.runner.bias import KeywordTrees
from engine.runner.device import compute_on_one_thread, free_memory, require_device, shared_memory
from engine.runner.frames.memory import MemoryPlan
from engine.runner.frames.runner import REBUILD_POSITIONS, RunnerSettings, VoxtralRunner
from engine.runner.speech import DeviceSpeechDetector, SpeechDetector
from engine.runner.windowed.decoder import Decode, compiled_decode
from engine.runner.windowed.encoders import BlockEncoder, WindowEncoder
from engine.runner.windowed.runner import WindowedRunner, windowed_spec
from engine.runner.windowed.stability import BLOCK_POLICY, Policy
from engine.runner.windowed.windows import DeviceWindows, HostWindows, longest_window, one, plan_windows
from engine.spec import ModelSpec, Vocabulary
from engine.weights.checkpoint import BadCheckpoint, load_speech_model, load_streaming_weights
from engine.weights.registry import STREAMING_ENCODER, TURN_DETECTOR
from engine.weights.store import WeightsError, cached

logger = logging.getLogger(__name__)

# Default for the number of streams of a windowed model on a CPU. A stream needs a few megabytes (up to 29 during speech
# with a streaming encoder), so a CPU runs out of time long before it runs out of memory.
WINDOWED_STREAMS = 64
# Windowed models, in positions of 80 ms: longest window of a live stream (15 s) and of an upload (28 s, within the 30 s
# of Whisper), and new audio between two passes (0.8 s).
WINDOW_POSITIONS = 192
FILE_WINDOW_POSITIONS = 350
STRIDE_POSITIONS = 10
# Frames of 24 ms in a block of a streaming encoder.
BLOCK_FRAMES = 26
# Encoder-cache rows beyond those that streams need: room for repeated audio.
SPARE_EMBEDS = 512
# Memory of a GPU for speaker labels, for the turn detector, and for the CUDA context of their process.
LABELS_BYTES, TURN_DETECTOR_BYTES, CONTEXT_BYTES = 768 * 2**20, 768 * 2**20, 512 * 2**20
# Most threads of an encoder that is alone on its machine; more were not measured.
MAX_ENCODER_THREADS = 4
# Most windows that a windowed model reads in one step on a CPU, of live streams or of uploads.
WINDOWS_PER_STEP = 8
# Data type of windowed models on a GPU. Whisper was trained with it, and its rounding steps are an eighth of those of
# bfloat16, so that words are the same as on a CPU.
DEVICE_DTYPE = torch.float16


class BadDevice(EngineError):
    """The model cannot run on the requested device."""


def load_runner(path: Path, config: EngineConfig) -> tuple[Runner, Limits]:
    """Return the runner of a checkpoint, and the limits for its scheduler."""
    threads = config.threads or torch.get_num_threads()
    if _family(path) == "voxtral_realtime":
        torch.set_num_threads(threads)
        return _load_voxtral(path, config)
    # Streams run in parallel, each on one thread.
    compute_on_one_thread()
    return _load_windowed(path, config, threads)


def load_detector(runner: Runner, max_streams: int) -> SpeechDetector | DeviceSpeechDetector:
    """Return the speech detector for a runner; if the model is on a GPU, the detector is too."""
    if not isinstance(runner, (VoxtralRunner, WindowedRunner)) or runner.device.type != "cuda":
        return SpeechDetector(load_silero(), max_streams)
    if isinstance(runner, WindowedRunner):
        return SpeechDetector(load_silero(fft_as_matmul=True).to(runner.device), max_streams)
    detector = DeviceSpeechDetector(load_silero(fft_as_matmul=True).to(runner.device), max_streams)
    detector.warm_up()
    return detector


def load_embedder(runner: Runner, config: EngineConfig) -> SpeakerEmbedder | None:
    """Return the speaker embedder, on the model's device; None if it is switched off or `tickertape pull speakers` was
    not run. Raises WeightsError if the file is damaged."""
    weights = cached("speakers") if config.speakers else None
    if weights is None:
        return None
    device = runner.device if isinstance(runner, (VoxtralRunner, WindowedRunner)) else torch.device("cpu")
    threads = config.threads or torch.get_num_threads()
    return SpeakerEmbedder(weights, PIECE_SAMPLES, device, max(1, threads // 2))


def load_turn_detector(runner: Runner, config: EngineConfig) -> SmartTurnDetector | None:
    """Return the turn detector, on the model's device. None if it is switched off, missing or damaged: turns then end
    by text and silence. A missing or damaged detector is logged."""
    if not config.turn_detector:
        return None
    try:
        weights = cached(TURN_DETECTOR)
    except WeightsError as error:
        logger.warning("semantic turn detection uses text and silence alone: %s", error)
        return None
    if weights is None:
        logger.warning(
            "semantic turn detection uses text and silence alone: there is no turn detector; "
            "run `tickertape pull turn-detector` and restart, or set model.turn_detector = false"
        )
        return None
    device = runner.device if isinstance(runner, (VoxtralRunner, WindowedRunner)) else torch.device("cpu")
    return SmartTurnDetector(weights, device)


def background_bytes(config: EngineConfig, own_process: bool) -> int:
    """GPU memory that speaker labels and the turn detector will take, if they are switched on and were pulled.
    `own_process`: they run in a process of their own."""
    labels = config.speakers and (cache_folder() / "speakers").exists()
    turns = config.turn_detector and (cache_folder() / TURN_DETECTOR).exists()
    context = CONTEXT_BYTES if own_process and (labels or turns) else 0
    return LABELS_BYTES * labels + TURN_DETECTOR_BYTES * turns + context


def _family(path: Path) -> str:
    """Return the model family of a checkpoint. Empty without a configuration: then it is a windowed model (OpenAI's
    files). Raises BadCheckpoint."""
    file = path / "config.json"
    if not file.is_file():
        return ""
    try:
        return str(json.loads(file.read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{file} does not say which model it belongs to: {error}") from error


def _load_voxtral(path: Path, config: EngineConfig) -> tuple[Runner, Limits]:
    settings = RunnerSettings(
        device="cuda" if config.device == "auto" else config.device,
        kv_dtype=torch.float8_e4m3fn if config.kv_8bit else torch.bfloat16,
        decoder_window=config.decoder_window,
        max_streams=config.max_streams or None,
        share_of=config.share_of,
        # If silence is not skipped, every stream computes all the time, so none could be parked.
        parked_share=config.parked_share if config.cut_silence_s else 0.0,
        background_bytes=background_bytes(config, own_process=True),
        blank_guard=config.blank_guard,
    )
    runner = VoxtralRunner.from_checkpoint(path, settings)
    return runner, frames_limits(runner.memory)


def frames_limits(memory: MemoryPlan) -> Limits:
    """Limits with room in a step for one position of every stream, and for rebuilds."""
    positions = memory.streams + REBUILD_POSITIONS
    return Limits(
        max_streams=memory.streams,
        cache_embeds=memory.cache_embeds,
        group_pages=memory.group_pages,
        step_positions=positions,
        step_embeds=positions,
        rebuild_positions=REBUILD_POSITIONS,
        resident_streams=memory.resident if memory.parked else None,
        moves=memory.moves,
    )


def _load_windowed(path: Path, config: EngineConfig, threads: int) -> tuple[Runner, Limits]:
    streaming = path / STREAMING_ENCODER
    device = windowed_device(config.device, in_blocks=streaming.is_file())
    if device.type == "cpu":
        _warn_if_memory_is_short(path)
    model, pieces = load_speech_model(path)
    if device.type == "cuda":
        return _load_on_device(path.name, model, pieces, device, config)
    if isinstance(model, Moonshine) and streaming.is_file() and not config.files_only:
        return _load_streaming(path, model, pieces, config.max_streams, threads)
    if config.files_only:
        return _load_for_files(path, model, pieces, config, threads)
    with _preparing_decoder(model, threads) as decode:
        model.quantise_encoder()
        copy_weights(nn.ModuleList((model.encoder, model.cross_kv)))
    return windowed_on_cpu(path.name, model, pieces, config.max_streams, threads, decode=decode.result())


def _load_for_files(
    path: Path, model: Moonshine | Whisper, pieces: list[bytes], config: EngineConfig, threads: int
) -> tuple[Runner, Limits]:
    """A runner for uploads only, with one inference thread. It encodes the first window while the decoder is traced."""
    other_core = ThreadPoolExecutor(1, "decoder")
    preparing = other_core.submit(_prepared_decoder, model, 1)
    other_core.shutdown(wait=False)
    model.quantise_encoder()
    copy_weights(nn.ModuleList((model.encoder, model.cross_kv)))
    max_encoder_threads = min(threads, MAX_ENCODER_THREADS) if not config.speakers else 1

    def decode(tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        return preparing.result()(tokens, positions, state, encoded)

    def encoder_threads() -> int:
        # During the tracing the number of threads must not change.
        return max_encoder_threads if preparing.done() else 1

    max_streams = config.max_streams
    runner = windowed_on_cpu(path.name, model, pieces, max_streams, 1, decode=decode, encoder_threads=encoder_threads)
    if preparing.done():
        preparing.result()  # an error ends the start of the engine, instead of every upload
    return runner


@contextmanager
def _preparing_decoder(model: Moonshine | Whisper, threads: int) -> Iterator[Future[Decode]]:
    """Quantise and trace the decoder on another core, while the caller prepares the encoder."""
    with ThreadPoolExecutor(1, "decoder") as other_core:
        yield other_core.submit(_prepared_decoder, model, threads)


def _prepared_decoder(model: Moonshine | Whisper, threads: int) -> Decode:
    """Quantise and trace the decoder, for this many inference threads."""
    model.quantise_decoder()
    # Before the tracing: the trace keeps these tensors.
    copy_weights(model.decoder)
    return compiled_decode(model, threads)


def _warn_if_memory_is_short(weights: Path) -> None:
    """Warn before loading: the system kills a process that runs out of memory, and a killed process logs nothing."""
    needed, available = needed_memory(weights), available_memory()
    if available is not None and available < needed:
        logger.warning(
            "the model needs about %.1f GiB of memory, and %.1f GiB are free: the system may end the engine; "
            "choose a smaller model (`tickertape models`), or give it more memory",
            needed / 2**30,
            available / 2**30,
        )


def _load_streaming(
    path: Path, published: Moonshine, pieces: list[bytes], max_streams: int, threads: int
) -> tuple[Runner, Limits]:
    """A runner for a CPU that encodes live streams in blocks. `published`: the model as published, which encodes the
    windows of uploads and of second passes: there it is more accurate and cheaper."""
    # Numbers of the inference threads of the second pass; those before them are for live streams and uploads.
    revision_threads = range(threads, threads + max(1, threads // 2))
    streaming = published.with_shared_decoder()
    with _preparing_decoder(published, revision_threads.stop) as preparing:
        streaming_spec = load_streaming_weights(streaming, path / STREAMING_ENCODER)
        for each in (published, streaming):
            each.quantise_encoder()
            copy_weights(nn.ModuleList((each.encoder, each.cross_kv)))
    decode = preparing.result()
    for number in range(1, revision_threads.stop):
        copy_for_thread(nn.ModuleList((published, streaming)), number)
    live_encoder = BlockEncoder(streaming, StreamingEncoder(streaming.encoder, streaming_spec, BLOCK_FRAMES))
    spec = windowed_spec(path.name, WINDOW_POSITIONS, live_encoder.first_stride, FILE_WINDOW_POSITIONS)
    spec = replace(spec, options=replace(streaming.options, keywords=spec.options.keywords, revises=True))
    limits = _windowed_limits(spec, max_streams or WINDOWED_STREAMS, WINDOWS_PER_STEP, plans_ahead=threads > 1)
    file_encoder = WindowEncoder(published, pieces, Policy())
    windows = HostWindows(streaming, live_encoder, file_encoder, limits.cache_embeds, threads, decode)
    vocabulary = Vocabulary(pieces)
    reviser = UtteranceReviser(published, pieces, Policy(), KeywordTrees(vocabulary), revision_threads, decode)
    return WindowedRunner(streaming, vocabulary, spec, BLOCK_POLICY, windows, reviser), limits


def windowed_on_cpu(
    name: str,
    model: Moonshine | Whisper,
    pieces: list[bytes],
    max_streams: int,
    threads: int,
    full_padding: bool = False,
    decode: Decode | None = None,
    encoder_threads: Callable[[], int] = one,
) -> tuple[WindowedRunner, Limits]:
    """Return a runner that reads windows stream by stream, on this many threads. `full_padding`: see `SpeechModel`.
    `decode`: a decoder pass in place of a traced one. `encoder_threads`: see `HostWindows`."""
    spec = windowed_spec(name, WINDOW_POSITIONS, STRIDE_POSITIONS, FILE_WINDOW_POSITIONS)
    spec = replace(spec, options=replace(model.options, keywords=spec.options.keywords))
    limits = _windowed_limits(spec, max_streams or WINDOWED_STREAMS, WINDOWS_PER_STEP, plans_ahead=threads > 1)
    policy = Policy()
    # Three settings of one set of weights: for live windows, for live windows that end at a pause, and for windows of
    # uploads. An upload's window is read once, so it can be padded as in the model's training: with little silence
    # after a short window, Whisper repeats its sentence.
    for_uploads, at_pause = copy(model), copy(model)
    model.set_live_padding(full_padding)
    at_pause.set_live_padding(full_padding, ends_at_pause=True)
    live_encoder = WindowEncoder(model, pieces, policy, at_pause=at_pause)
    file_encoder = WindowEncoder(for_uploads, pieces, policy)
    decode = decode or compiled_decode(model, threads)
    for number in range(1, threads):
        copy_for_thread(model, number)
    windows = HostWindows(model, live_encoder, file_encoder, limits.cache_embeds, threads, decode, encoder_threads)
    return WindowedRunner(model, Vocabulary(pieces), spec, policy, windows), limits


def windowed_device(name: str, in_blocks: bool) -> torch.device:
    """Return the device of a windowed model. `in_blocks`: it has a streaming encoder, which encodes one stream at a
    time and runs on a CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and not in_blocks else "cpu"
    device = require_device(name)
    if in_blocks and device.type != "cpu":
        raise BadDevice(
            f"this model encodes each stream in blocks and runs on the CPU, not on {name!r}: leave the device "
            "out, or use moonshine-base, which runs there in batches"
        )
    return device


def _load_on_device(
    name: str, model: Moonshine | Whisper, pieces: list[bytes], device: torch.device, config: EngineConfig
) -> tuple[Runner, Limits]:
    # Engines that share a device plan with equal parts of it, so that all take the same number of streams.
    engines = config.share_of
    room = free_memory(device) if engines == 1 else shared_memory(device, engines) // engines
    room -= background_bytes(config, own_process=False)
    return windowed_on_device(name, model, pieces, device, DEVICE_DTYPE, room, config.max_streams or None)


def windowed_on_device(
    name: str,
    model: Moonshine | Whisper,
    pieces: list[bytes],
    device: torch.device,
    dtype: torch.dtype,
    room: int,
    max_streams: int | None,
    full_padding: bool = True,
) -> tuple[WindowedRunner, Limits]:
    """Return a runner that reads windows in batches. Raises NotEnoughMemory before anything is allocated."""
    spec = windowed_spec(name, WINDOW_POSITIONS, STRIDE_POSITIONS, FILE_WINDOW_POSITIONS)
    spec = replace(spec, options=replace(model.options, keywords=spec.options.keywords))
    policy = Policy()
    model.set_live_padding(full_padding)
    longest = longest_window(spec, policy)
    memory = plan_windows(model, spec, room, dtype=dtype, longest=longest, max_streams=max_streams)
    limits = _windowed_limits(spec, memory.streams, memory.windows_per_step)
    # cuDNN prepares attention anew for every shape, which takes long; the lengths of windows and texts vary.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.move(device, dtype)
    windows = DeviceWindows(
        model, pieces, policy, memory, limits.cache_embeds, longest=longest, device=device, dtype=dtype
    )
    return WindowedRunner(model, Vocabulary(pieces), spec, policy, windows), limits


def _windowed_limits(spec: ModelSpec, streams: int, windows_per_step: int, plans_ahead: bool = False) -> Limits:
    # Windows of uploads are longer, but only a few of them are in memory at once.
    longer_windows = WINDOWS_PER_STEP * (spec.embeds_for(live=False) - spec.embeds_for(live=True))
    return Limits(
        max_streams=streams,
        cache_embeds=streams * spec.embeds_for(live=True) + longer_windows + SPARE_EMBEDS,
        step_positions=windows_per_step * spec.window_positions,
        step_embeds=windows_per_step * spec.window_positions,
        plans_ahead=plans_ahead,
    )
