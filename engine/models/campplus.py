"""CAM++, the speaker embedding model: 192 numbers that say whose voice is in a piece of speech of at most two seconds.

`SpeakerEmbedder` in `engine/runner/background.py` runs it.

    samples -> 80 log-mel bands every 10 ms, without their mean over the piece
    -> seven two-dimensional convolutions, which leave 32 channels of 10 bands
    -> a convolution that leaves a column every 20 ms
    -> three blocks of layers; each layer sees the channels of all layers before it in the block and adds 32
    -> mean and deviation over the columns -> one projection

A layer's output is multiplied by a mask that depends on the mean of its input over the columns. The original takes the
mean over the piece plus the mean over each 100 columns; in a piece of at most two seconds both are the same number.

In the checkpoint every convolution stands beside a batch norm with fixed statistics, and both are folded into one
product here. A norm before a convolution has a rectifier between them: max(scale * x + shift, 0) is scale * max(x, t) +
shift with t = -shift / scale. So x is only limited at t, and scale and shift become a part of the convolution.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.nn import functional

from engine.errors import EngineError
from engine.models.mel import FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE, KaldiFrontEnd

EMBEDDING_SIZE = 192
# Longer pieces would need a mean for each 100 columns.
MAX_PIECE_SAMPLES = 2 * SAMPLE_RATE
# With fewer samples there is one column, and no deviation.
MIN_PIECE_SAMPLES = FRAME_SAMPLES + 2 * HOP_SAMPLES

_BANDS = 80
_HEAD_CHANNELS = 32
_FIRST_CHANNELS = 128
_LAYER_CHANNELS = 32
_INNER_CHANNELS = 128
# Layers, and the distance in columns between the three taps of a layer.
_BLOCKS = ((12, 1), (24, 2), (16, 2))
_NORM_EPSILON = 1e-5
_COLUMNS = "xvector.tdnn.linear.weight"

Weights = Mapping[str, Tensor]


class SpeakerWeightsError(EngineError):
    """The weights of the speaker embeddings are missing or damaged."""


class _Convolution(nn.Module):
    """A convolution over bands and frames and the norm after it, as one weight and one bias; the caller applies it."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: Weights, name: str, norm: str) -> None:
        super().__init__()
        scale, shift = _scale_and_shift(weights, norm)
        _keep(self, weight=weights[f"{name}.weight"].double() * scale[:, None, None, None], bias=shift)


class _Product(nn.Module):
    """A convolution over columns as a matrix product, [rows, taps * in] -> [rows, out]: a row is a column of a piece.
    The norms before it (with a rectifier between them) and after it are a part of it."""

    weight: Tensor
    bias: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, weights: Weights, name: str, before: str = "", after: str = "") -> None:
        super().__init__()
        weight = weights[f"{name}.weight"].double()  # [out, in, taps]
        bias = weights.get(f"{name}.bias", torch.zeros(len(weight))).double()
        if after:
            scale, shift = _scale_and_shift(weights, after)
            weight, bias = weight * scale[:, None, None], bias * scale + shift
        self._limits = bool(before)
        if before:
            scale, shift = _scale_and_shift(weights, before)
            bias = bias + weight.sum(-1) @ torch.where(scale == 0, shift.relu(), shift)
            weight = weight * scale[:, None]
            at, endless = -shift / scale, torch.full_like(scale, torch.inf)
            # A scale below 0 turns the rectifier round.
            _keep(self, low=torch.where(scale > 0, at, -endless), high=torch.where(scale < 0, at, endless))
        _keep(self, weight=weight.permute(2, 1, 0).flatten(0, 1), bias=bias)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """The product of `factor * x`."""
        if self._limits:
            x = x.clamp(self.low, self.high)
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight, alpha=factor)


class _ResidualBlock(nn.Module):
    """Two convolutions over bands and frames, added to the input; a first block halves the number of bands."""

    def __init__(self, weights: Weights, name: str, stride: int) -> None:
        super().__init__()
        self.first = _Convolution(weights, f"{name}.conv1", f"{name}.bn1")
        self.second = _Convolution(weights, f"{name}.conv2", f"{name}.bn2")
        self.shortcut = _Convolution(weights, f"{name}.shortcut.0", f"{name}.shortcut.1") if stride > 1 else None
        self._stride = (stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.conv2d(x, self.first.weight, self.first.bias, self._stride, 1).relu_()
        y = functional.conv2d(y, self.second.weight, self.second.bias, 1, 1)
        if self.shortcut is not None:
            x = functional.conv2d(x, self.shortcut.weight, self.shortcut.bias, self._stride)
        return (y + x).relu_()


class _Head(nn.Module):
    """Log-mel frames [n, bands, frames] -> [n, frames, bands / 8 * 32]."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.first = _Convolution(weights, "head.conv1", "head.bn1")
        self.blocks = nn.ModuleList(
            _ResidualBlock(weights, f"head.layer{layer}.{number}", stride)
            for layer in (1, 2)
            for number, stride in enumerate((2, 1))
        )
        self.last = _Convolution(weights, "head.conv2", "head.bn2")

    def forward(self, x: Tensor) -> Tensor:
        # Channels last: a fifth faster on a CPU.
        x = x.unsqueeze(1).contiguous(memory_format=torch.channels_last)
        x = functional.conv2d(x, self.first.weight, self.first.bias, 1, 1).relu_()
        for block in self.blocks:
            x = block(x)
        x = functional.conv2d(x, self.last.weight, self.last.bias, (2, 1), 1).relu_()
        return x.permute(0, 3, 2, 1).flatten(2)


class _MaskedLayer(nn.Module):
    """All channels so far [n, columns, c] -> 32 more."""

    taps: Tensor

    def __init__(self, weights: Weights, name: str, spacing: int) -> None:
        super().__init__()
        self.inner = _Product(
            weights, f"{name}.linear1", f"{name}.nonlinear1.batchnorm", f"{name}.nonlinear2.batchnorm"
        )
        # [in, taps * out]: one product for all taps, whose results are moved and added.
        _keep(self, taps=weights[f"{name}.cam_layer.linear_local.weight"].permute(1, 2, 0).flatten(1))
        self.mask_in = _Product(weights, f"{name}.cam_layer.linear1")
        self.mask_out = _Product(weights, f"{name}.cam_layer.linear2")
        self._spacing = spacing

    def forward(self, x: Tensor) -> Tensor:
        n, columns, _ = map(int, x.shape)
        x = self.inner(x).relu_()  # [n * columns, 128]
        mask = self.mask_out(self.mask_in(x.view(n, columns, -1).sum(1), 2.0 / columns).relu_()).sigmoid_()
        before, y, after = torch.chunk((x @ self.taps).view(n, columns, -1), 3, dim=-1)
        moved, kept = self._spacing, columns - self._spacing
        y.narrow(1, moved, kept).add_(before.narrow(1, 0, kept))
        y.narrow(1, 0, kept).add_(after.narrow(1, moved, kept))
        return y.mul_(mask.unsqueeze(1))


class _Block(nn.Module):
    """Layers that add channels, and a projection to half of all channels."""

    def __init__(self, weights: Weights, number: int, layers: int, spacing: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _MaskedLayer(weights, f"xvector.block{number}.tdnnd{layer}", spacing) for layer in range(1, layers + 1)
        )
        # The last projection feeds a norm directly.
        after = "xvector.out_nonlinear.batchnorm" if number == len(_BLOCKS) else ""
        name = f"xvector.transit{number}"
        self.projection = _Product(weights, f"{name}.linear", f"{name}.nonlinear.batchnorm", after)

    def forward(self, x: Tensor) -> Tensor:
        n, columns, channels = map(int, x.shape)
        # One tensor for the channels of all layers; each layer reads those before its own.
        y = x.new_empty(n, columns, channels + _LAYER_CHANNELS * len(self.layers))
        y.narrow(2, 0, channels).copy_(x)
        for layer in self.layers:
            y.narrow(2, channels, _LAYER_CHANNELS).copy_(layer(y.narrow(2, 0, channels)))
            channels += _LAYER_CHANNELS
        projected: Tensor = self.projection(y).view(n, columns, -1)
        return projected


class CamPlusPlus(nn.Module):
    """Weights only; a piece of speech is independent of all others."""

    def __init__(self, weights: Weights, device: torch.device | str = "cpu") -> None:
        super().__init__()
        _check(weights)
        self.head = _Head(weights)
        self.columns = _Product(
            {**weights, _COLUMNS: _by_band(weights[_COLUMNS])},
            "xvector.tdnn.linear",
            after="xvector.tdnn.nonlinear.batchnorm",
        )
        self.blocks = nn.ModuleList(
            _Block(weights, number, layers, spacing) for number, (layers, spacing) in enumerate(_BLOCKS, start=1)
        )
        self.embedding = _Product(weights, "xvector.dense.linear", after="xvector.dense.nonlinear.batchnorm")
        self._front_end = KaldiFrontEnd(_BANDS, device)
        self.to(device)

    def features(self, samples: Tensor) -> Tensor:
        """Pieces [n, samples] in [-1, 1] -> log-mel frames [n, 80, frames], without their mean."""
        if not MIN_PIECE_SAMPLES <= samples.shape[1] <= MAX_PIECE_SAMPLES:
            raise ValueError(f"a piece has {MIN_PIECE_SAMPLES} to {MAX_PIECE_SAMPLES} samples, not {samples.shape[1]}")
        frames = self._front_end.frames(samples)  # [n, frames, 80]
        return (frames - frames.mean(dim=1, keepdim=True)).mT

    def embed(self, features: Tensor) -> Tensor:
        """Log-mel frames [n, 80, frames] -> embeddings [n, 192], of any length."""
        x = self.columns(_neighbours(self.head(features))).relu_().view(len(features), -1, _FIRST_CHANNELS)
        for block in self.blocks:
            x = block(x)
        x = x.relu_()
        embeddings: Tensor = self.embedding(torch.cat([x.mean(1), x.std(1)], dim=1))
        return embeddings

    def forward(self, samples: Tensor) -> Tensor:
        """Pieces [n, samples] -> embeddings [n, 192] of length 1; of silence too, though they mean nothing."""
        return functional.normalize(self.embed(self.features(samples)), dim=1)


def load_campplus(path: Path, device: torch.device | str = "cpu") -> CamPlusPlus:
    """The model with the weights in `path`, which `tickertape pull speakers` downloads. Raises SpeakerWeightsError."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises what it stumbles over, such as an IndexError
        raise SpeakerWeightsError(
            f"cannot read the speaker embeddings in {path}; fetch them with `tickertape pull speakers --fresh`"
        ) from error
    if not isinstance(weights, dict):
        raise SpeakerWeightsError(f"{path} holds no tensors; fetch them with `tickertape pull speakers --fresh`")
    return CamPlusPlus(weights, device).eval()


@torch.inference_mode()
def traced(model: CamPlusPlus, samples: int) -> Callable[[Tensor], Tensor]:
    """The model on a CPU for one piece of this length, as one call without Python: a fifth faster, and other threads
    run Python meanwhile. Shapes are read with `int` so that they are constants here, which are not computed again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        example = torch.zeros(1, samples)
        embed = torch.jit.trace(model, example, check_trace=False)  # type: ignore[no-untyped-call]
        frozen: Callable[[Tensor], Tensor] = torch.jit.freeze(embed)
    return frozen


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors that are used, and their shapes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str, channels: int, affine: bool = True) -> None:
        parts = ("weight", "bias") if affine else ()
        shapes.update({f"{name}.{part}": (channels,) for part in (*parts, "running_mean", "running_var")})

    def residual(name: str, first: bool) -> None:
        for number in (1, 2):
            shapes[f"{name}.conv{number}.weight"] = (_HEAD_CHANNELS, _HEAD_CHANNELS, 3, 3)
            norm(f"{name}.bn{number}", _HEAD_CHANNELS)
        if first:
            shapes[f"{name}.shortcut.0.weight"] = (_HEAD_CHANNELS, _HEAD_CHANNELS, 1, 1)
            norm(f"{name}.shortcut.1", _HEAD_CHANNELS)

    def layer(name: str, channels: int) -> None:
        norm(f"{name}.nonlinear1.batchnorm", channels)
        shapes[f"{name}.linear1.weight"] = (_INNER_CHANNELS, channels, 1)
        norm(f"{name}.nonlinear2.batchnorm", _INNER_CHANNELS)
        shapes[f"{name}.cam_layer.linear_local.weight"] = (_LAYER_CHANNELS, _INNER_CHANNELS, 3)
        half = _INNER_CHANNELS // 2
        for part, (wide, narrow) in {"linear1": (half, _INNER_CHANNELS), "linear2": (_LAYER_CHANNELS, half)}.items():
            shapes[f"{name}.cam_layer.{part}.weight"] = (wide, narrow, 1)
            shapes[f"{name}.cam_layer.{part}.bias"] = (wide,)

    shapes["head.conv1.weight"] = (_HEAD_CHANNELS, 1, 3, 3)
    shapes["head.conv2.weight"] = (_HEAD_CHANNELS, _HEAD_CHANNELS, 3, 3)
    norm("head.bn1", _HEAD_CHANNELS)
    norm("head.bn2", _HEAD_CHANNELS)
    for block in (1, 2):
        residual(f"head.layer{block}.0", first=True)
        residual(f"head.layer{block}.1", first=False)
    channels = _FIRST_CHANNELS
    shapes["xvector.tdnn.linear.weight"] = (channels, _HEAD_CHANNELS * _BANDS // 8, 5)
    norm("xvector.tdnn.nonlinear.batchnorm", channels)
    for number, (layers, _) in enumerate(_BLOCKS, start=1):
        for index in range(1, layers + 1):
            layer(f"xvector.block{number}.tdnnd{index}", channels)
            channels += _LAYER_CHANNELS
        norm(f"xvector.transit{number}.nonlinear.batchnorm", channels)
        shapes[f"xvector.transit{number}.linear.weight"] = (channels // 2, channels, 1)
        channels //= 2
    norm("xvector.out_nonlinear.batchnorm", channels)
    shapes["xvector.dense.linear.weight"] = (EMBEDDING_SIZE, 2 * channels, 1)
    norm("xvector.dense.nonlinear.batchnorm", EMBEDDING_SIZE, affine=False)
    return shapes


def _check(weights: Weights) -> None:
    found = {
        name: tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        for name, tensor in weights.items()
        if not str(name).endswith("num_batches_tracked")
    }
    expected = tensor_shapes()
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise SpeakerWeightsError(
            f"these are not the weights of the speaker embeddings (see {wrong[0]}); "
            "fetch them with `tickertape pull speakers --fresh`"
        )


def _by_band(weight: Tensor) -> Tensor:
    """[out, channels * bands, taps] -> [out, bands * channels, taps], the order in which the head writes them."""
    out, _, taps = weight.shape
    return weight.view(out, _HEAD_CHANNELS, -1, taps).transpose(1, 2).flatten(1, 2)


def _neighbours(x: Tensor) -> Tensor:
    """[n, frames, c] -> [n, columns, 5 * c]: every second frame with two on either side, zeros beyond."""
    frames = int(x.shape[1])
    padded = functional.pad(x, (0, 0, 2, 2))
    return torch.cat([padded[:, tap : tap + frames : 2] for tap in range(5)], dim=-1)


def _scale_and_shift(weights: Weights, norm: str) -> tuple[Tensor, Tensor]:
    """A batch norm with fixed statistics as a scale and a shift of each channel, in float64."""
    mean, variance = (weights[f"{norm}.running_{part}"].double() for part in ("mean", "var"))
    scale = weights.get(f"{norm}.weight", torch.ones(len(mean))).double() / (variance + _NORM_EPSILON).sqrt()
    return scale, weights.get(f"{norm}.bias", torch.zeros(len(mean))).double() - mean * scale


def _keep(module: nn.Module, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        form = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        module.register_buffer(name, tensor.float().contiguous(memory_format=form), persistent=False)
