"""8-bit linear layers on a CPU: weights and activations in 8 bits, with one copy of the weights per inference thread.

Whisper, Moonshine and the turn detector replace their large linear layers by `Int8Linear` (`quantise_linears`).

oneDNN, the kernel library on ARM, prepares each matrix for every number of input rows. The preparation reorders all
weights, which takes as long as the product itself or, for few rows, much longer. Only two preparations are kept per
matrix, and live text has another length in every pass, so nearly every product would need a new one. So a product is
computed in pieces of two fixed sizes (`product_in_pieces`).
"""

from __future__ import annotations

import threading
import warnings
from functools import cache

import torch
from torch import Tensor, nn

# Rows of the large pieces. A block of the streaming encoder and its look-ahead have 39 frames, and every piece has at
# least one filler row.
PIECE_ROWS = 40
# Small pieces have 8 rows, the number that the kernels process at a time. The script below needs it as a literal.
# Fewest weights of a matrix for which 8 bits are worthwhile; scaling its rows costs as much as a small product.
SMALLEST_8_BIT = 200_000
# Quantisation steps from zero to the largest weight: all of a signed byte, or half of them where the processor adds two
# products in 16 bits and saturates.
_FULL_STEPS, SAFE_STEPS = 127, 63


def _product_in_pieces(
    scaled: Tensor,
    filler: Tensor,
    weights: torch.classes.quantized.LinearPackedParamsBase,  # type: ignore[name-defined]
) -> Tensor:
    """[rows, inputs] with values between -1 and 1 -> [rows, outputs].

    `filler` [PIECE_ROWS, inputs] has rows that contain -1 and 1, so that the scale is the same for every piece.
    """
    rows, largest = scaled.size(0), filler.size(0)
    # For many rows the preparation costs little in comparison.
    if rows > 4 * largest:
        product: Tensor = torch.ops.quantized.linear_dynamic(torch.cat((scaled, filler[:1])), weights)
        return product[:rows]
    parts: list[Tensor] = []
    done = 0
    while done < rows or done == 0:
        # Two small pieces (8 rows each, one of them a filler row) are cheaper than a large one.
        size = 8 if rows - done <= 2 * (8 - 1) else largest
        part = scaled[done : done + size - 1]
        piece = torch.cat((part, filler[: size - part.size(0)]))
        parts.append(torch.ops.quantized.linear_dynamic(piece, weights)[: part.size(0)])
        done += size - 1
    return parts[0] if len(parts) == 1 else torch.cat(parts)


with warnings.catch_warnings():
    # Traces call this function. A trace cannot contain a loop, so the function is a script. The replacement for scripts
    # that torch recommends needs a C++ compiler.
    warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
    product_in_pieces = torch.jit.script(_product_in_pieces)


class InferenceThread(threading.local):
    """The number of the current thread among those that run a model in parallel; each number has its own weights."""

    number = 0


inference_thread = InferenceThread()


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and 8-bit activations.

    The fast kernels take one scale per matrix. So each row of weights and each row of input is divided by its largest
    magnitude, and the product is multiplied by both, which is as exact as a scale per row. A filler row with the values
    -1 and 1 is added to the input, so that the kernel always chooses the same scale. Sums of integers are exact, so the
    result of a row does not depend on the other rows, bit for bit. Weights have `weight_steps` quantisation steps.

    Kernels keep scratch data with the weights, and two threads that share it crash. So each inference thread has its
    own copy of the weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        # Largest magnitude of each row of weights.
        self.range = weight.abs().amax(dim=1).clamp(min=1e-12)
        self.bias = None if bias is None else bias.detach().float().clone()
        quantised = torch.quantize_per_tensor(weight / self.range[:, None], 1.0 / weight_steps(), 0, torch.qint8)
        # By the number of the inference thread.
        self._weights: dict[int, torch.ScriptObject] = {0: torch.ops.quantized.linear_prepack(quantised, None)}
        self._in_pieces = torch.backends.quantized.engine == "onednn"
        self._filler = torch.zeros(PIECE_ROWS if self._in_pieces else 1, weight.shape[1])
        self._filler[:, :2] = torch.tensor([-1.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
        product = self._product(rows / largest)
        scale = largest * self.range
        product = product.mul_(scale) if self.bias is None else torch.addcmul(self.bias, product, scale)
        return product.view(*x.shape[:-1], product.shape[1])

    def _product(self, scaled: Tensor) -> Tensor:
        product: Tensor
        if self._in_pieces:
            product = product_in_pieces(scaled, self._filler, self._thread_weights())
        else:
            with_filler = torch.cat((scaled, self._filler))
            product = torch.ops.quantized.linear_dynamic(with_filler, self._thread_weights())[:-1]
        return product

    def prepare_kernels(self) -> None:
        """Let the kernels prepare this thread's weights, which takes as much memory as the weights."""
        for rows in {1, self._filler.shape[0]}:
            self(torch.zeros(rows, self._filler.shape[1]))

    def copy_for_thread(self, number: int) -> None:
        """Allow the inference thread with this number to compute at the same time as others."""
        if number not in self._weights:
            quantised, _ = torch.ops.quantized.linear_unpack(self._thread_weights())
            self._weights[number] = torch.ops.quantized.linear_prepack(quantised, None)

    def weights_of(self, number: int) -> torch.ScriptObject:
        """The weights of the inference thread with this number."""
        return self._weights[number]

    def _thread_weights(self) -> torch.ScriptObject:
        return self._weights[inference_thread.number]


@cache
def weight_steps() -> int:
    """Quantisation steps from zero to the largest weight that are safe on this processor.

    Processors without 8-bit dot-product instructions add two products in 16 bits, which silently saturates for large
    weights. Half the range is safe. A product is computed to find out which processor this is.
    """
    largest = torch.quantize_per_tensor(torch.ones(1, 64), 1.0 / _FULL_STEPS, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(largest, None)
    # The -1 sets the lower end of the range, so that the ones become the largest bytes.
    product = torch.ops.quantized.linear_dynamic(torch.tensor([[-1.0] + 63 * [1.0]]), packed)
    return _FULL_STEPS if abs(float(product) - 62.0) < 1.0 else SAFE_STEPS


def in_8_bits(weight: Tensor, bias: Tensor | None = None) -> Int8Linear | None:
    """An 8-bit linear layer; None if the matrix is too small for it. Chooses torch's kernel library for the process."""
    if weight.numel() < SMALLEST_8_BIT:
        return None
    supported = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "x86" if "x86" in supported else "onednn"
    return Int8Linear(weight, bias)


def quantise_linears(module: nn.Module) -> None:
    """Replace every large linear layer in `module` by its 8-bit form."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            int8 = in_8_bits(child.weight, child.bias) if isinstance(child, nn.Linear) else None
            if int8 is not None:
                setattr(parent, name, int8)


def copy_for_thread(model: nn.Module, number: int) -> None:
    """Allow the inference thread with this number to use a model at the same time as others."""
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.copy_for_thread(number)


def prepare_kernels(model: object) -> None:
    """Prepare all 8-bit layers of a model for this thread, before its first window."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, Int8Linear):
            module.prepare_kernels()
