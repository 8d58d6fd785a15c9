"""CAM++, the speaker embedding model: 192 numbers that say whose voice is in a piece of speech of at most two seconds.

`SpeakerEmbedder` in `engine/runner/background.py` runs it. A *column* is one 20 ms frame after the stem.

    samples -> 80 log-mel bands every 10 ms, without their mean over the piece
    -> a two-dimensional residual stem (ten 3 x 3 convolutions), which leaves 32 channels x 10 bands
    -> a convolution that leaves a column every 20 ms
    -> three densely connected blocks (as in DenseNet): each layer reads all channels before it and adds 32;
       after each block a projection halves the number of channels
    -> mean and standard deviation over the columns -> one projection

The embedding of a part of the piece is the same projection of the mean and standard deviation over the part's columns.
It costs next to nothing, because the columns are those of the piece. The model was not trained for it, and it says
less than the embedding of a piece, but of 0.16 s.

A layer's output is multiplied by a context-aware mask, computed from the mean of the layer's bottleneck over the
columns. The original takes the mean over the piece plus the mean over each segment of 100 columns. A piece of at most
two seconds is one segment, so both are the same number.

In the checkpoint all convolutions except those of the masks and the dilated ones (`linear_local`) have a batch norm
with fixed statistics before or after them. These norms are folded into the weights here. Between a norm before a
convolution and that convolution there is a ReLU: relu(scale * x + shift) = scale * clamp(x, bound) + shift with bound =
-shift / scale, a lower bound if scale > 0 and an upper bound if scale < 0. So only the clamp is computed; scale and
shift are folded into the weights of the convolution after it.
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
from engine.options import PART_HOP_SAMPLES

EMBEDDING_SIZE = 192
# Longer pieces would need a mean for each 100 columns.
MAX_PIECE_SAMPLES = 2 * SAMPLE_RATE
# With fewer samples there would be one column, which has no standard deviation.
MIN_PIECE_SAMPLES = FRAME_SAMPLES + 2 * HOP_SAMPLES
_COLUMN_SAMPLES = 2 * HOP_SAMPLES
# A part is two halves; its second half is the first half of the next part.
_HALF_COLUMNS = PART_HOP_SAMPLES // _COLUMN_SAMPLES

_BANDS = 80
_STEM_CHANNELS = 32
_FIRST_CHANNELS = 128
_LAYER_CHANNELS = 32
_BOTTLENECK_CHANNELS = 128
# For each block: its layers, and the dilation of their three-tap convolutions in columns.
_BLOCKS = ((12, 1), (24, 2), (16, 2))
_NORM_EPSILON = 1e-5
_TDNN_WEIGHT = "xvector.tdnn.linear.weight"

Weights = Mapping[str, Tensor]


class SpeakerWeightsError(EngineError):
    """The weights of the speaker embeddings are missing or damaged."""


class _Convolution(nn.Module):
    """Weight and bias of a convolution over bands and frames, with the norm after it folded in."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: Weights, name: str, norm: str) -> None:
        super().__init__()
        scale, shift = _scale_and_shift(weights, norm)
        _register_float32(self, weight=weights[f"{name}.weight"].double() * scale[:, None, None, None], bias=shift)


class _FusedLinear(nn.Module):
    """A convolution over columns as one matrix product, [rows, taps * in] -> [rows, out]: a row is a column of a piece.
    The norm before it (with its ReLU) and the norm after it are folded in."""

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
        self._clamps = bool(before)
        if before:
            scale, shift = _scale_and_shift(weights, before)
            # With scale 0 the channel is the constant relu(shift).
            bias = bias + weight.sum(-1) @ torch.where(scale == 0, shift.relu(), shift)
            weight = weight * scale[:, None]
            bound, infinity = -shift / scale, torch.full_like(scale, torch.inf)
            low, high = torch.where(scale > 0, bound, -infinity), torch.where(scale < 0, bound, infinity)
            _register_float32(self, low=low, high=high)
        _register_float32(self, weight=weight.permute(2, 1, 0).flatten(0, 1), bias=bias)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """The product of `factor * x`."""
        if self._clamps:
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


class _Stem(nn.Module):
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
    """Bottleneck, dilated convolution and mask: all channels before it [n, columns, c] -> 32 more."""

    taps: Tensor

    def __init__(self, weights: Weights, name: str, dilation: int) -> None:
        super().__init__()
        self.bottleneck = _FusedLinear(
            weights, f"{name}.linear1", f"{name}.nonlinear1.batchnorm", f"{name}.nonlinear2.batchnorm"
        )
        # [in, taps * out]: one product for all taps; its parts are shifted by the dilation and added.
        _register_float32(self, taps=weights[f"{name}.cam_layer.linear_local.weight"].permute(1, 2, 0).flatten(1))
        self.mask_in = _FusedLinear(weights, f"{name}.cam_layer.linear1")
        self.mask_out = _FusedLinear(weights, f"{name}.cam_layer.linear2")
        self._dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        n, columns, _ = map(int, x.shape)
        x = self.bottleneck(x).relu_()  # [n * columns, 128]
        # Twice the mean: the mean over the piece plus the mean over its only segment.
        mask = self.mask_out(self.mask_in(x.view(n, columns, -1).sum(1), 2.0 / columns).relu_()).sigmoid_()
        before, y, after = torch.chunk((x @ self.taps).view(n, columns, -1), 3, dim=-1)
        dilation, overlap = self._dilation, columns - self._dilation
        y.narrow(1, dilation, overlap).add_(before.narrow(1, 0, overlap))
        y.narrow(1, 0, overlap).add_(after.narrow(1, dilation, overlap))
        return y.mul_(mask.unsqueeze(1))


class _Block(nn.Module):
    """Layers that add channels, and a projection to half of all channels."""

    def __init__(self, weights: Weights, number: int, layers: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _MaskedLayer(weights, f"xvector.block{number}.tdnnd{layer}", dilation) for layer in range(1, layers + 1)
        )
        # The last projection is followed by a norm.
        after = "xvector.out_nonlinear.batchnorm" if number == len(_BLOCKS) else ""
        name = f"xvector.transit{number}"
        self.projection = _FusedLinear(weights, f"{name}.linear", f"{name}.nonlinear.batchnorm", after)

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
    """The network and its front end: weights and constants, no state. The pieces of a batch are independent."""

    def __init__(self, weights: Weights, device: torch.device | str = "cpu") -> None:
        super().__init__()
        _check(weights)
        self.stem = _Stem(weights)
        self.tdnn = _FusedLinear(
            {**weights, _TDNN_WEIGHT: _by_band(weights[_TDNN_WEIGHT])},
            "xvector.tdnn.linear",
            after="xvector.tdnn.nonlinear.batchnorm",
        )
        self.blocks = nn.ModuleList(
            _Block(weights, number, layers, dilation) for number, (layers, dilation) in enumerate(_BLOCKS, start=1)
        )
        self.embedding = _FusedLinear(weights, "xvector.dense.linear", after="xvector.dense.nonlinear.batchnorm")
        self._front_end = KaldiFrontEnd(_BANDS, device)
        self.to(device)

    def features(self, samples: Tensor) -> Tensor:
        """Pieces [n, samples] in [-1, 1] -> log-mel frames [n, 80, frames] minus their mean over the piece."""
        if not MIN_PIECE_SAMPLES <= samples.shape[1] <= MAX_PIECE_SAMPLES:
            raise ValueError(f"a piece has {MIN_PIECE_SAMPLES} to {MAX_PIECE_SAMPLES} samples, not {samples.shape[1]}")
        frames = self._front_end.frames(samples)  # [n, frames, 80]
        return (frames - frames.mean(dim=1, keepdim=True)).mT

    def embed(self, features: Tensor) -> Tensor:
        """Log-mel frames [n, 80, frames] -> embeddings [n, 1 + parts, 192] of pieces and their parts, not
        normalised."""
        x = self.tdnn(_neighbours(self.stem(features))).relu_().view(len(features), -1, _FIRST_CHANNELS)
        for block in self.blocks:
            x = block(x)
        x = x.relu_()
        statistics = torch.cat([_mean_and_deviation(x), _part_statistics(x)], dim=1)
        n, vectors, _ = map(int, statistics.shape)
        embeddings: Tensor = self.embedding(statistics).view(n, vectors, -1)
        return embeddings

    def forward(self, samples: Tensor) -> Tensor:
        """Pieces [n, samples] -> embeddings [n, 1 + parts, 192] with norm 1, of each piece and then of its parts.
        Silence has an embedding, too, without a meaning."""
        return functional.normalize(self.embed(self.features(samples)), dim=-1)


def load_campplus(path: Path, device: torch.device | str = "cpu") -> CamPlusPlus:
    """The model with the weights in `path`, which `tickertape pull speakers` downloads. Raises SpeakerWeightsError."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors for damaged files, such as an IndexError
        raise SpeakerWeightsError(
            f"cannot read the speaker embeddings in {path}; fetch them with `tickertape pull speakers --fresh`"
        ) from error
    if not isinstance(weights, dict):
        raise SpeakerWeightsError(f"{path} holds no tensors; fetch them with `tickertape pull speakers --fresh`")
    return CamPlusPlus(weights, device).eval()


@torch.inference_mode()
def trace_for(model: CamPlusPlus, samples: int) -> Callable[[Tensor], Tensor]:
    """Trace the model with torch.jit on a CPU, for one piece of this length. The trace is faster, and other threads run
    Python while it computes. The modules read their shapes with `int()`, so that these are constants of the trace."""
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
            shapes[f"{name}.conv{number}.weight"] = (_STEM_CHANNELS, _STEM_CHANNELS, 3, 3)
            norm(f"{name}.bn{number}", _STEM_CHANNELS)
        if first:
            shapes[f"{name}.shortcut.0.weight"] = (_STEM_CHANNELS, _STEM_CHANNELS, 1, 1)
            norm(f"{name}.shortcut.1", _STEM_CHANNELS)

    def layer(name: str, channels: int) -> None:
        norm(f"{name}.nonlinear1.batchnorm", channels)
        shapes[f"{name}.linear1.weight"] = (_BOTTLENECK_CHANNELS, channels, 1)
        norm(f"{name}.nonlinear2.batchnorm", _BOTTLENECK_CHANNELS)
        shapes[f"{name}.cam_layer.linear_local.weight"] = (_LAYER_CHANNELS, _BOTTLENECK_CHANNELS, 3)
        half = _BOTTLENECK_CHANNELS // 2
        for part, (wide, narrow) in {
            "linear1": (half, _BOTTLENECK_CHANNELS),
            "linear2": (_LAYER_CHANNELS, half),
        }.items():
            shapes[f"{name}.cam_layer.{part}.weight"] = (wide, narrow, 1)
            shapes[f"{name}.cam_layer.{part}.bias"] = (wide,)

    shapes["head.conv1.weight"] = (_STEM_CHANNELS, 1, 3, 3)
    shapes["head.conv2.weight"] = (_STEM_CHANNELS, _STEM_CHANNELS, 3, 3)
    norm("head.bn1", _STEM_CHANNELS)
    norm("head.bn2", _STEM_CHANNELS)
    for block in (1, 2):
        residual(f"head.layer{block}.0", first=True)
        residual(f"head.layer{block}.1", first=False)
    channels = _FIRST_CHANNELS
    shapes["xvector.tdnn.linear.weight"] = (channels, _STEM_CHANNELS * _BANDS // 8, 5)
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
    """[out, channels * bands, taps] -> [out, bands * channels, taps], the order in which the stem writes them."""
    out, _, taps = weight.shape
    return weight.view(out, _STEM_CHANNELS, -1, taps).transpose(1, 2).flatten(1, 2)


def _neighbours(x: Tensor) -> Tensor:
    """[n, frames, c] -> [n, columns, 5 * c]: every second frame with two neighbours on either side; zeros beyond."""
    frames = int(x.shape[1])
    padded = functional.pad(x, (0, 0, 2, 2))
    return torch.cat([padded[:, tap : tap + frames : 2] for tap in range(5)], dim=-1)


def _mean_and_deviation(x: Tensor) -> Tensor:
    """[n, columns, c] -> mean and standard deviation over the columns [n, 1, 2 * c]."""
    return torch.cat([x.mean(1, keepdim=True), x.std(1, keepdim=True)], dim=-1)


def _part_statistics(x: Tensor) -> Tensor:
    """[n, columns, c] -> mean and standard deviation over the columns of each part [n, parts, 2 * c]. No parts if the
    piece is shorter than one."""
    n, columns, channels = map(int, x.shape)
    count = columns // _HALF_COLUMNS
    halves = x[:, : count * _HALF_COLUMNS].reshape(n, count, _HALF_COLUMNS, channels)
    means = halves.mean(2)
    squares = (halves - means.unsqueeze(2)).square_().sum(2)
    first, second = means[:, :-1], means[:, 1:]
    # The squares around the mean of both halves.
    squares = squares[:, :-1] + squares[:, 1:] + _HALF_COLUMNS / 2 * (first - second).square_()
    return torch.cat([(first + second) / 2, (squares / (2 * _HALF_COLUMNS - 1)).sqrt_()], dim=-1)


def _scale_and_shift(weights: Weights, norm: str) -> tuple[Tensor, Tensor]:
    """A batch norm with fixed statistics as a scale and a shift of each channel, in float64."""
    mean, variance = (weights[f"{norm}.running_{part}"].double() for part in ("mean", "var"))
    scale = weights.get(f"{norm}.weight", torch.ones(len(mean))).double() / (variance + _NORM_EPSILON).sqrt()
    return scale, weights.get(f"{norm}.bias", torch.zeros(len(mean))).double() - mean * scale


def _register_float32(module: nn.Module, **tensors: Tensor) -> None:
    """Register buffers; weights of two-dimensional convolutions have their channels last in memory."""
    for name, tensor in tensors.items():
        form = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        module.register_buffer(name, tensor.float().contiguous(memory_format=form), persistent=False)
