"""Self-distillation: trains a streaming encoder to give the decoder the same text as the published encoder does.

The published model with full context is the teacher. Teacher and student get the same augmented audio; the student's
encoder has the block mask. The loss is the divergence of the decoder's next-token distributions on the teacher's own
text, plus the error of the student's encoder output against the teacher's. No transcript is needed.

In this order: the configuration of a run (`read_config`: a TOML file, unknown keys refused), the run itself (`distil`,
with its state in `Distillation`), and the files that it writes (`save_checkpoint`: a checkpoint to continue from;
`export`: the file that ships).
"""

from __future__ import annotations

import copy
import hashlib
import random
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.models.moonshine import Moonshine, frames_after
from engine.models.moonshine_streaming import NormPrior, StreamingSpec
from engine.weights.checkpoint import description, load_streaming_weights, pack_rows
from training.data import Speech, Utterance, augment, windows
from training.model import (
    BlockPlan,
    Linear,
    block_plan,
    decode_known,
    encode_blocks,
    encode_whole,
    exact,
    greedy_tokens,
    rounded,
    token_limit,
)

# The configuration


class BadConfig(Exception):
    """The configuration cannot be used; the text names the key."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    # Names of index files: "so" is index.so.json.
    corpora: tuple[str, ...]
    window_seconds: tuple[int, ...]
    window_shares: tuple[float, ...]
    # Share of a corpus' files that is never trained on.
    validation_share: float


@dataclass(frozen=True, slots=True)
class MaskConfig:
    """In frames of 24 ms."""

    blocks: tuple[int, ...]
    block_shares: tuple[float, ...]
    look_ahead: int
    left: int
    # Frames of the first convolution (4 ms) that the expected level counts for at the start of an utterance.
    norm_frames: float


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    steps: int
    audio_seconds_per_step: int
    peak_rate: float
    # The cross-attention inputs learn at this share of the encoder's rate.
    cross_attention_share: float
    warm_up_steps: int
    weight_decay: float
    largest_gradient: float
    encoder_weight: float
    # Training of look-ahead frames: the share of blocks whose first frames are the look-ahead results of the block
    # before, and the weight of the look-ahead frames' error.
    ahead_share: float
    # Share of the starting weights in the averaged result.
    start_share: float
    # After this share of the steps, products are rounded as the 8-bit layers of the engine round them.
    int8_from: float
    seed: int


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    name: str
    base: str
    data: DataConfig
    mask: MaskConfig
    optimiser: OptimiserConfig


def read_config(path: Path) -> TrainingConfig:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        config = TrainingConfig(
            name=tables.pop("name"),
            base=tables.pop("base"),
            data=_table(DataConfig, tables.pop("data")),
            mask=_table(MaskConfig, tables.pop("mask")),
            optimiser=_table(OptimiserConfig, tables.pop("optimiser")),
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"cannot read {path}: {error}") from error
    except KeyError as error:
        raise BadConfig(f"{path} lacks {error}") from error
    if tables:
        raise BadConfig(f"{path} has unknown keys: {', '.join(tables)}")
    _check(config, path)
    return config


Table = TypeVar("Table")


def _table(kind: type[Table], values: Mapping[str, Any]) -> Table:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if values.keys() != known:
        raise BadConfig(f"{kind.__name__} needs exactly {sorted(known)}, not {sorted(values)}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _check(config: TrainingConfig, path: Path) -> None:
    pairs = (
        ("window_shares", config.data.window_seconds, config.data.window_shares),
        ("block_shares", config.mask.blocks, config.mask.block_shares),
    )
    for name, things, shares in pairs:
        if not things or len(things) != len(shares):
            raise BadConfig(f"{path}: {name} must have one share for each of {list(things)}")
    if max(config.mask.blocks) > config.mask.left:
        raise BadConfig(f"{path}: a block must not be longer than what it sees to its left")
    if config.mask.look_ahead > min(config.mask.blocks):
        raise BadConfig(f"{path}: a block must not look further ahead than the next one reaches")


# The run

_TEACHER_SECONDS_PER_BATCH = 8_000
_VALIDATION_SECONDS = 10
_VALIDATION_BATCH = 48
_LOG_EVERY_SECONDS = 20.0
_LOWEST_RATE_SHARE = 0.02

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Lesson:
    """Windows of one length: audio int16 [windows, samples]; texts [windows, tokens], the start token in front and end
    tokens behind."""

    audio: Tensor
    texts: Tensor

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.audio), (count,), device=self.audio.device)
        return self.audio[chosen], self.texts[chosen]


def prepare_lesson(teacher: Moonshine, utterances: list[Utterance], seconds: int, seed: int) -> Lesson:
    """Pack windows and let the teacher write down what it hears in them."""
    device = teacher.decoder.embed_tokens.weight.device
    packed = windows(utterances, seconds, np.random.default_rng(seed))
    audio = torch.from_numpy(packed).to(device)
    texts: list[list[int]] = []
    limit = token_limit(seconds, teacher)
    with torch.no_grad():
        for part in torch.split(audio, max(1, _TEACHER_SECONDS_PER_BATCH // seconds)):
            frames = encode_whole(teacher.encoder, part.float() / 32_768)
            texts += greedy_tokens(teacher, frames, [frames.shape[1]] * len(part), [limit] * len(part))
    longest = max(len(text) for text in texts) + 2
    start, end = teacher.start_tokens[0], teacher.end_token
    rows = [[start, *text, *[end] * (longest - 1 - len(text))] for text in texts]
    return Lesson(audio, torch.tensor(rows, device=device))


def measured_norm(teacher: Moonshine, lesson: Lesson, frames: float) -> NormPrior:
    """The prior of the running norm: the level of augmented speech."""
    with torch.no_grad():
        x = torch.tanh(teacher.encoder.conv1(augment(lesson.audio[:_VALIDATION_BATCH])[:, :, None]))
        mean = x.mean(dim=(1, 2))
        variance = x.square().mean(dim=(1, 2)) - mean.square()
    return NormPrior(mean.mean().item(), variance.log().mean().item(), frames)


class Distillation:
    """The student, its optimiser and one step; the teacher's decoder serves both and stays as it is."""

    def __init__(self, teacher: Moonshine, student: Moonshine, norm: NormPrior, config: TrainingConfig) -> None:
        self.config = config
        self.spec = _spec(config.mask, norm)
        self.teacher = teacher.requires_grad_(False)
        self.student = student.requires_grad_(False)
        self.student.decoder = teacher.decoder
        settings = config.optimiser
        encoder: list[nn.Parameter] = []
        for name, parameter in self.student.encoder.named_parameters():
            # The first convolution is not trained.
            if not name.startswith("conv1."):
                parameter.requires_grad_(True)
                encoder.append(parameter)
        cross = list(self.student.cross_kv.requires_grad_(True).parameters())
        self._trained = encoder + cross
        self._shares = (1.0, settings.cross_attention_share)
        self._optimiser = torch.optim.AdamW(
            [{"params": encoder}, {"params": cross}],
            lr=settings.peak_rate,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._start = [parameter.detach().clone() for parameter in self._trained]
        self._plans: dict[tuple[int, int], BlockPlan] = {}

    def losses(
        self, audio: Tensor, texts: Tensor, block: int, take: Linear, ahead_share: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Divergence of the texts' next tokens, and error of the encoder's output over its variance."""
        teacher, student = self.teacher, self.student
        inputs = texts[:, :-1]
        # The loss covers the predictions up to the first end token, not those after it.
        said = inputs != teacher.end_token
        with torch.autocast(audio.device.type, torch.bfloat16, enabled=audio.is_cuda):
            with torch.no_grad():
                wanted = encode_whole(teacher.encoder, audio)
                hidden = decode_known(teacher, inputs, teacher.cross_kv(wanted))
                expected = teacher.logits(hidden[said]).float().log_softmax(dim=-1)
            plan = self._plan(frames_after(audio.shape[1], 3), block, audio.device)
            heard, ahead = encode_blocks(student.encoder, self.spec.norm, audio, plan, take)
            told = heard if not ahead_share else _told_early(heard, ahead, plan, ahead_share)
            hidden = decode_known(student, inputs, take(student.cross_kv, told))
            guessed = student.logits(hidden[said]).float().log_softmax(dim=-1)
        divergence = (expected.exp() * (expected - guessed)).sum(dim=-1).mean()
        wanted = wanted.float()
        error = (heard.float() - wanted).square().mean() / wanted.var()
        if ahead_share:
            error = error + ahead_share * (ahead.float() - wanted[:, plan.ahead]).square().mean() / wanted.var()
        return divergence, error

    def step(self, number: int, lesson: Lesson, count: int, block: int) -> Tensor:
        """One update; returns divergence, error and the gradient's length, [3]."""
        settings = self.config.optimiser
        done = number / settings.steps
        rate = settings.peak_rate * min(1.0, (number + 1) / settings.warm_up_steps) * max(_LOWEST_RATE_SHARE, 1 - done)
        for group, share in zip(self._optimiser.param_groups, self._shares, strict=True):
            group["lr"] = rate * share
        recorded, texts = lesson.draw(count)
        take = rounded if done >= settings.int8_from else exact
        divergence, error = self.losses(augment(recorded), texts, block, take, settings.ahead_share)
        self._optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(divergence + settings.encoder_weight * error)
        length = nn.utils.clip_grad_norm_(self._trained, settings.largest_gradient)
        self._optimiser.step()
        return torch.stack((divergence.detach(), error.detach(), length))

    @torch.no_grad()
    def validate(self, lesson: Lesson, block: int, take: Linear) -> tuple[float, float]:
        """The losses on speech that is not trained on, augmented the same way every time."""
        states = random.getstate(), torch.get_rng_state(), torch.cuda.get_rng_state_all()
        random.seed(5)
        torch.manual_seed(5)
        audio = augment(lesson.audio[:_VALIDATION_BATCH])
        divergence, error = self.losses(audio, lesson.texts[:_VALIDATION_BATCH], block, take)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        torch.cuda.set_rng_state_all(states[2])
        return divergence.item(), error.item()

    @torch.no_grad()
    def mix(self, start_share: float) -> None:
        """Move the weights back towards those that training started from, by this share of the way."""
        for parameter, start in zip(self._trained, self._start, strict=True):
            parameter.lerp_(start, start_share)

    def _plan(self, frames: int, block: int, device: torch.device) -> BlockPlan:
        key = (frames, block)
        if key not in self._plans:
            self._plans[key] = block_plan(frames, block, self.spec.look_ahead, self.spec.left, device)
        return self._plans[key]


def _told_early(heard: Tensor, ahead: Tensor, plan: BlockPlan, share: float) -> Tensor:
    """Encoder output as the live decoder gets it, which does not wait for the block that a frame belongs to: in this
    share of the blocks, the first frames are the look-ahead results of the block before."""
    blocks = int(plan.looking.max()) + 1 if len(plan.looking) else 0
    early = (torch.rand(heard.shape[0], blocks, device=heard.device) < share)[:, plan.looking, None]
    told = heard.clone()
    told[:, plan.ahead] = torch.where(early, ahead, heard[:, plan.ahead])
    return told


def begin(teacher: Moonshine, lesson: Lesson, config: TrainingConfig, start: Path | None) -> Distillation:
    """Start from the teacher's weights with the level of the lesson, or from the weights and level of a file."""
    student = copy.deepcopy(teacher)
    if start is None:
        norm = measured_norm(teacher, lesson, config.mask.norm_frames)
    else:
        norm = load_streaming_weights(student, start).norm
    return Distillation(teacher, student, norm, config)


def distil(
    teacher: Moonshine, speech: Speech, config: TrainingConfig, report: Report, start: Path | None = None
) -> Distillation:
    """Prepare the data, train, and return the trained run. The same configuration gives the same random draws.

    `start`: the file of a streaming encoder to continue from, instead of the teacher's own weights."""
    data, settings = config.data, config.optimiser
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    lessons = [prepare_lesson(teacher, speech.training, seconds, settings.seed) for seconds in data.window_seconds]
    check = prepare_lesson(teacher, speech.validation, _VALIDATION_SECONDS, settings.seed)
    report(f"{speech.training_seconds / 3600:.2f} h in {[len(lesson.audio) for lesson in lessons]} windows")
    run = begin(teacher, check, config, start)
    report(f"expected level {run.spec.norm}; validation before: {_validated(run, check)}")
    began = said = time.monotonic()
    recent: list[Tensor] = []
    for number in range(settings.steps):
        at = random.choices(range(len(lessons)), data.window_shares)[0]
        block = random.choices(config.mask.blocks, config.mask.block_shares)[0]
        count = max(1, settings.audio_seconds_per_step // data.window_seconds[at])
        recent.append(run.step(number, lessons[at], count, block))
        if time.monotonic() - said > _LOG_EVERY_SECONDS or number == settings.steps - 1:
            divergence, error, length = torch.stack(recent).mean(dim=0).tolist()
            spent = time.monotonic() - began
            report(
                f"step {number + 1} of {settings.steps}, {spent:.0f} s, {1000 * spent / (number + 1):.0f} ms each: "
                f"divergence {divergence:.4f}, error {error:.4f}, gradient {length:.2f}"
            )
            said, recent = time.monotonic(), []
    run.mix(settings.start_share)
    report(f"validation after: {_validated(run, check)}")
    return run


def _validated(run: Distillation, lesson: Lesson) -> str:
    figures = []
    for block in run.spec.blocks:
        for name, take in (("float", exact), ("int8", rounded)):
            divergence, error = run.validate(lesson, block, take)
            figures.append(f"{block} {name} {divergence:.4f}/{error:.4f}")
    return ", ".join(figures)


def _spec(mask: MaskConfig, norm: NormPrior) -> StreamingSpec:
    return StreamingSpec(blocks=mask.blocks, look_ahead=mask.look_ahead, left=mask.left, norm=norm)


# The files

# Matrices that the engine multiplies in 8 bits are stored in 8 bits without a further loss.
_EIGHT_BIT = ("qkv_proj.weight", "o_proj.weight", "fc1.weight", "fc2.weight", "conv2.linear.weight", "cross_kv.weight")
_HALF = "conv3.linear.weight"


def trained_tensors(model: Moonshine) -> dict[str, Tensor]:
    """The tensors that training changes: the encoder and the inputs of cross-attention."""
    tensors = model.state_dict()
    return {name: value.cpu() for name, value in tensors.items() if name.startswith(("encoder.", "cross_kv."))}


def save_checkpoint(model: Moonshine, spec: StreamingSpec, base: str, file: Path) -> None:
    halves = {name: value.half() for name, value in trained_tensors(model).items()}
    save_file(halves, file, metadata=description(spec, base))


def export(model: Moonshine, spec: StreamingSpec, base: str, file: Path) -> str:
    """Write the file that ships; returns its sha256."""
    tensors: dict[str, Tensor] = {}
    for name, value in trained_tensors(model).items():
        if name.endswith(_EIGHT_BIT):
            tensors |= pack_rows(name, value.float())
        else:
            tensors[name] = value.to(torch.float16 if name.endswith(_HALF) else torch.float32)
    save_file(tensors, file, metadata=description(spec, base))
    return hashlib.sha256(file.read_bytes()).hexdigest()
