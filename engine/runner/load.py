"""Which runner a checkpoint needs, on which device, and how many streams it can take there."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.errors import EngineError
from engine.models.moonshine import Moonshine
from engine.models.moonshine_streaming import StreamingEncoder
from engine.models.silero import load_silero
from engine.runner.base import Runner
from engine.runner.device_speech import DeviceSpeechDetector
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.runner.speech import SpeechDetector
from engine.runner.windowed.block_ear import BlockEar
from engine.runner.windowed.ears import Ear, WindowEar
from engine.runner.windowed.runner import WindowedRunner, windowed_spec
from engine.runner.windowed.stability import BLOCK_POLICY, Policy
from engine.vocabulary import Vocabulary
from engine.weights.checkpoint import BadCheckpoint
from engine.weights.pretrained import load_speech_model
from engine.weights.registry import STREAMING_ENCODER
from engine.weights.streaming import load_streaming_weights

# A windowed stream needs a few megabytes, one in blocks up to 29 while somebody speaks: a CPU runs out of time long
# before it runs out of memory.
WINDOWED_STREAMS = 64
WINDOW_POSITIONS = 192
FILE_WINDOW_POSITIONS = 350
STRIDE_POSITIONS = 10
# A model that hears each frame once: frames of 24 ms in a block.
BLOCK_FRAMES = 26
# Encoder-cache rows beyond what streams hold: room for audio that comes again.
SPARE_EMBEDS = 512
# A windowed model reads at most so many whole windows side by side: of live streams in a step, or of backlog.
WINDOWS_PER_STEP = 8


class BadDevice(EngineError):
    """The model cannot run on the device that was asked for."""


def load_runner(path: Path, config: EngineConfig) -> tuple[Runner, Limits]:
    """The runner of a checkpoint, and the limits to schedule it by."""
    threads = config.threads or torch.get_num_threads()
    if _family(path) == "voxtral_realtime":
        torch.set_num_threads(threads)
        return _load_voxtral(path, config)
    # Streams run side by side, each on one thread.
    torch.set_num_threads(1)
    return _load_windowed(path, config, threads)


def load_detector(runner: Runner, max_streams: int) -> SpeechDetector | DeviceSpeechDetector:
    """The speech detector that goes with a runner: on a GPU it runs where the model does."""
    if not isinstance(runner, VoxtralRunner) or runner.device.type != "cuda":
        return SpeechDetector(load_silero(), max_streams)
    detector = DeviceSpeechDetector(load_silero(products=True).to(runner.device), max_streams)
    detector.warm_up()
    return detector


def _family(path: Path) -> str:
    """The family that a checkpoint names. A checkpoint without a configuration belongs to a windowed model."""
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
        blank_guard=config.blank_guard,
    )
    runner = VoxtralRunner.from_checkpoint(path, settings)
    memory = runner.memory
    limits = Limits(
        max_streams=memory.streams,
        cache_embeds=memory.cache_embeds,
        group_pages=memory.group_pages,
        step_positions=memory.streams,
        step_embeds=memory.streams,
    )
    return runner, limits


def _load_windowed(path: Path, config: EngineConfig, threads: int) -> tuple[Runner, Limits]:
    if config.device not in ("auto", "cpu"):
        raise BadDevice(f"this model runs on the CPU, not on {config.device!r}; leave the device out")
    model, pieces = load_speech_model(path)
    streaming = path / STREAMING_ENCODER
    whole = model
    ear: Ear
    if isinstance(model, Moonshine) and streaming.is_file():
        # Whole windows of files are heard best, and for less, by the encoder as it was published.
        whole = deepcopy(model)
        whole.decoder = model.decoder
        whole.quantise()
        trained_for = load_streaming_weights(model, streaming)
        model.quantise()
        policy, ear = BLOCK_POLICY, BlockEar(model, StreamingEncoder(model.encoder, trained_for, BLOCK_FRAMES))
        stride = ear.first_stride
    else:
        model.quantise()
        policy, stride = Policy(), STRIDE_POSITIONS
        ear = WindowEar(model, pieces, policy)
    file_ear = WindowEar(whole, pieces, Policy())
    spec = windowed_spec(path.name, WINDOW_POSITIONS, stride, FILE_WINDOW_POSITIONS)
    spec = replace(spec, options=model.options)
    streams = config.max_streams or WINDOWED_STREAMS
    longer_windows = WINDOWS_PER_STEP * (spec.embeds_for(live=False) - spec.embeds_for(live=True))
    limits = Limits(
        max_streams=streams,
        cache_embeds=streams * spec.embeds_for(live=True) + longer_windows + SPARE_EMBEDS,
        step_positions=WINDOWS_PER_STEP * spec.window_positions,
        step_embeds=WINDOWS_PER_STEP * spec.window_positions,
    )
    runner = WindowedRunner(model, Vocabulary(pieces), spec, limits.cache_embeds, policy, ear, file_ear, threads)
    return runner, limits
