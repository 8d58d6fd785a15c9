"""Silero, the speech detector's model (voice activity detection): the probability of speech in each frame of 32 ms.

`engine/runner/speech.py` runs it for all streams; its input is audio at 16 kHz.

    frame, with the 64 samples before it -> magnitudes of a short Fourier transform (4 columns of 129)
    -> four convolutions -> one vector of 128 -> LSTM cell -> probability

Everything up to the LSTM's gates depends on the frame alone, so `encode` takes all frames of all streams at once; only
`step` goes frame by frame. With four columns each convolution is one matrix product over neighbouring columns; at this
size a general convolution would cost several times as much. With `fft_as_matmul` the Fourier transform is a matrix
product, too. That is meant for a GPU: it is faster there and can be recorded in a CUDA graph.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import EngineError

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 512
CONTEXT_SAMPLES = 64
STATE_SIZE = 128

_FFT_SAMPLES = 256
_HOP_SAMPLES = 128
_BINS = _FFT_SAMPLES // 2 + 1
# Samples by which a frame is extended, by reflection, so that its end lies inside a Fourier window, too.
_PADDING_SAMPLES = 64

_SHAPES = {
    "stft.forward_basis_buffer": (2 * _BINS, 1, _FFT_SAMPLES),
    "encoder.0.reparam_conv.weight": (128, _BINS, 3),
    "encoder.0.reparam_conv.bias": (128,),
    "encoder.1.reparam_conv.weight": (64, 128, 3),
    "encoder.1.reparam_conv.bias": (64,),
    "encoder.2.reparam_conv.weight": (64, 64, 3),
    "encoder.2.reparam_conv.bias": (64,),
    "encoder.3.reparam_conv.weight": (128, 64, 3),
    "encoder.3.reparam_conv.bias": (128,),
    "decoder.rnn.weight_ih": (4 * STATE_SIZE, 128),
    "decoder.rnn.weight_hh": (4 * STATE_SIZE, STATE_SIZE),
    "decoder.rnn.bias_ih": (4 * STATE_SIZE,),
    "decoder.rnn.bias_hh": (4 * STATE_SIZE,),
    "decoder.decoder.2.weight": (1, STATE_SIZE, 1),
    "decoder.decoder.2.bias": (1,),
}


# Raised for a damaged zip file.
_BAD_ARCHIVE = (EOFError, pickle.PickleError, zipfile.BadZipFile, zlib.error)


class SpeechWeightsError(EngineError):
    """The speech detector's weights are missing or damaged."""


class SileroVad(nn.Module):
    """Weights only; the state of a stream is passed in and returned."""

    window: Tensor
    basis: Tensor
    conv1: Tensor
    conv1_bias: Tensor
    conv2: Tensor
    conv2_bias: Tensor
    conv3: Tensor
    conv3_bias: Tensor
    conv4: Tensor
    conv4_bias: Tensor
    input_gates: Tensor
    state_gates: Tensor
    gates_bias: Tensor
    out: Tensor
    out_bias: Tensor

    def __init__(self, weights: dict[str, Tensor], fft_as_matmul: bool = False) -> None:
        super().__init__()
        _check(weights)
        self._fft_as_matmul = fft_as_matmul

        def register(name: str, tensor: Tensor) -> None:
            self.register_buffer(name, tensor.detach().float().contiguous(), persistent=False)

        # The stored Fourier basis is cosines and sines times this window; its first row (frequency 0) is the window.
        window = weights["stft.forward_basis_buffer"][0, 0]
        register("window", window)
        spectra = torch.fft.rfft(torch.diag(window.double()))  # [sample, bin]
        register("basis", torch.cat([spectra.real, spectra.imag], dim=1))  # [256, 2 * 129]
        # The third convolution turns two columns into one and the fourth sees only that one: their other taps only
        # meet padding.
        for number, taps in enumerate([(0, 1, 2), (0, 1, 2), (1, 2), (1,)]):
            weight = weights[f"encoder.{number}.reparam_conv.weight"]  # [out, in, 3]
            register(f"conv{number + 1}", torch.cat([weight[:, :, tap] for tap in taps], dim=1).T)  # [taps * in, out]
            register(f"conv{number + 1}_bias", weights[f"encoder.{number}.reparam_conv.bias"])
        register("input_gates", _sigmoids_first(weights["decoder.rnn.weight_ih"]).T)
        register("state_gates", _sigmoids_first(weights["decoder.rnn.weight_hh"]).T)
        register("gates_bias", _sigmoids_first(weights["decoder.rnn.bias_ih"] + weights["decoder.rnn.bias_hh"]))
        register("out", weights["decoder.decoder.2.weight"].reshape(STATE_SIZE, 1))
        register("out_bias", weights["decoder.decoder.2.bias"])

    def encode(self, frames: Tensor) -> Tensor:
        """Frames [n, 64 + 512], each after its context -> inputs to the LSTM's gates [n, 4 * 128]."""
        padded = functional.pad(frames, (0, _PADDING_SAMPLES), mode="reflect")
        columns = padded.unfold(1, _FFT_SAMPLES, _HOP_SAMPLES)  # [n, 4, 256]
        magnitude = self._magnitude(columns)  # [n, 4, 129]
        # The zero columns at the sides are the convolutions' padding.
        x = _convolve(functional.pad(magnitude, (0, 0, 1, 1)), 1, self.conv1, self.conv1_bias)  # [n, 4, 128]
        x = _convolve(functional.pad(x, (0, 0, 1, 0)), 2, self.conv2, self.conv2_bias)  # [n, 2, 64]
        x = torch.addmm(self.conv3_bias, x.flatten(1), self.conv3).relu_()  # [n, 64]
        x = torch.addmm(self.conv4_bias, x, self.conv4).relu_()  # [n, 128]
        return torch.addmm(self.gates_bias, x, self.input_gates)

    def _magnitude(self, columns: Tensor) -> Tensor:
        if self._fft_as_matmul:
            parts = (columns @ self.basis).square()
            return (parts[..., :_BINS] + parts[..., _BINS:]).sqrt_()
        parts = torch.view_as_real(torch.fft.rfft(columns * self.window)).square()  # [n, 4, 129, 2]
        return (parts[..., 0] + parts[..., 1]).sqrt_()

    def step(self, gates: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """One frame of each stream: gates [b, 4 * 128], state [b, 128] twice -> the new hidden and cell state."""
        gates = torch.addmm(gates, hidden, self.state_gates)
        input_gate, forget_gate, output_gate = gates[:, : 3 * STATE_SIZE].sigmoid().chunk(3, dim=1)
        cell = torch.addcmul(forget_gate * cell, input_gate, gates[:, 3 * STATE_SIZE :].tanh())
        return output_gate * cell.tanh(), cell

    def steps(self, gates: Tensor, hidden: Tensor, cell: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
        """Many frames of each stream: see `steps_reference`. On CUDA in one kernel: each frame alone takes ten, and
        they take longer to start than to compute."""
        if not gates.is_cuda:
            return self.steps_reference(gates, hidden, cell, due)
        from engine.models import kernels

        return kernels.recurrent(gates, self.state_gates, hidden, cell, due)

    def steps_reference(self, gates: Tensor, hidden: Tensor, cell: Tensor, due: Tensor) -> tuple[Tensor, Tensor]:
        """Gates [b, frames, 4 * 128], state [b, 128] twice -> the hidden state after each frame [b, frames, 128] and
        the cell state after the last one. A frame that is not due [b, frames] changes nothing."""
        after_each = []
        for frame in range(gates.shape[1]):
            next_hidden, next_cell = self.step(gates[:, frame], hidden, cell)
            hidden = torch.where(due[:, frame, None], next_hidden, hidden)
            cell = torch.where(due[:, frame, None], next_cell, cell)
            after_each.append(hidden)
        return torch.stack(after_each, dim=1), cell

    def probability(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, 128] after a frame -> probability of speech in that frame [n]."""
        return torch.addmm(self.out_bias, hidden.relu(), self.out).sigmoid_().squeeze(1)


def load_silero(path: Path | None = None, fft_as_matmul: bool = False) -> SileroVad:
    """The network with the weights of the `silero-vad` package, or with those in `path`. Raises SpeechWeightsError."""
    path = path or _packaged_weights()
    try:
        with zipfile.ZipFile(path) as archive:
            stored = _tensors(_WeightReader(archive).load())
    except (*_BAD_ARCHIVE, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise SpeechWeightsError(
            f"cannot read the speech detector's weights in {path.name}; reinstall silero-vad"
        ) from error
    # The same archive contains a model for 8 kHz under another prefix.
    weights = {name.removeprefix("_model."): tensor for name, tensor in stored.items() if name.startswith("_model.")}
    return SileroVad(weights, fft_as_matmul).eval()


class _Module:
    """Stands for any class of the archive; an instance receives the stored attributes."""


class _WeightReader(pickle.Unpickler):
    """Reads a TorchScript archive, the only form in which the package ships its current weights for torch (its
    safetensors file is an older model). The code in it is not compiled, because that would take a tenth of a second.
    Classes other than `_ALLOWED_CLASSES` are refused."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._folder = archive, archive.namelist()[0].split("/")[0]
        super().__init__(BytesIO(archive.read(f"{self._folder}/data.pkl")))

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__."):
            return _Module
        return _ALLOWED_CLASSES[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Tensor:
        content = bytearray(self._archive.read(f"{self._folder}/data/{pid[2]}"))
        return torch.frombuffer(content, dtype=torch.float32) if content else torch.empty(0)


def _tensor(values: Tensor, offset: int, shape: Sequence[int], strides: Sequence[int], *_: object) -> Tensor:
    return values.as_strided(shape, strides, offset)


# What the pickle of the archive may refer to, and what is used instead.
_ALLOWED_CLASSES = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.FloatStorage": torch.float32,
    "torch.jit._pickle.build_intlist": list,
    "collections.OrderedDict": dict,
}


def _tensors(module: _Module, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a module by their names."""
    found: dict[str, Tensor] = {}
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        elif isinstance(value, _Module):
            found |= _tensors(value, f"{prefix}{name}.")
    return found


def _packaged_weights() -> Path:
    # Not imported: importing the package sets torch's thread count for the whole process.
    package = find_spec("silero_vad")
    if package is None or package.origin is None:
        raise SpeechWeightsError("speech detection needs the package silero-vad: pip install silero-vad")
    return Path(package.origin).parent / "data" / "silero_vad.jit"


def _check(weights: dict[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != _SHAPES:
        wrong = sorted(name for name in shapes.keys() | _SHAPES.keys() if shapes.get(name) != _SHAPES.get(name))
        raise SpeechWeightsError(f"these are not the speech detector's weights (see {wrong[0]}); reinstall silero-vad")


def _convolve(columns: Tensor, stride: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Three-tap convolution over padded columns [n, t, c] and a ReLU -> [n, (t - 3) // stride + 1, out]."""
    channels = columns.shape[2]
    neighbours = columns.flatten(1).unfold(1, 3 * channels, stride * channels)  # [n, t', 3 * c]
    out = torch.addmm(bias, neighbours.reshape(-1, 3 * channels), weight).relu_()
    return out.view(columns.shape[0], -1, weight.shape[1])


def _sigmoids_first(gates: Tensor) -> Tensor:
    """Reorder an LSTM's rows from (input, forget, cell, output) to (input, forget, output, cell), so that one call of
    sigmoid computes the three gates."""
    input_gate, forget_gate, candidate, output_gate = gates.chunk(4)
    return torch.cat([input_gate, forget_gate, output_gate, candidate])
