"""What a training run is made of: a TOML file, read once, unknown keys refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar


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
    # How much the frames that a block looks ahead to count: the share of blocks whose first frames the decoder hears as
    # the block before had them, and the weight of their error.
    ahead_share: float
    # How much of the weights that training went on from is in the result: an average keeps what each hears best.
    start_share: float
    # Behind this share of the steps, products are rounded as the 8-bit layers of the engine round them.
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
