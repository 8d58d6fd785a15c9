"""A decoder pass on a CPU as one call without Python, traced with torch.jit (`compiled_decode`).

For one token of a small model a CPU runs some hundred short operations, and half of the time is Python between them.
Only one thread at a time can run Python, so streams that are decoded in parallel would wait for each other. A traced
pass runs the same operations in the same order in torch's own interpreter; the results are the same, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from engine.models.int8 import Int8Linear, copy_for_thread, inference_thread
from engine.models.moonshine import Moonshine
from engine.models.seq2seq import DecoderState, Encoded
from engine.models.whisper import Whisper
from engine.runner.windowed.decoder import Decode

# A decoder pass with tensors as arguments: tokens, positions, (keys, values) of the text, (keys, values, mask of real
# frames) of the audio -> hidden rows, attention.
Pass = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor]]


class _Pass(nn.Module):
    """A model's `decode` with tensors as arguments.

    Its only attributes are the 8-bit weights of one inference thread, because tracing takes time for each submodule.
    All other tensors of the model become constants of the trace.
    """

    def __init__(self, decode: Decode, layers: list[Int8Linear]) -> None:
        super().__init__()
        self._decode = decode
        for name, weights in _weights_of(layers, 0):
            setattr(self, name, weights)

    def forward(
        self, tokens: Tensor, positions: Tensor, text: tuple[Tensor, Tensor], audio: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        keys, values, real = audio
        return self._decode(tokens, positions, DecoderState(*text), Encoded(keys, values, [], real=real))


def _weights_of(layers: list[Int8Linear], number: int) -> list[tuple[str, torch.ScriptObject]]:
    """The 8-bit weights of one inference thread, by their names in a trace."""
    return [(f"weights_{index}", layer.weights_of(number)) for index, layer in enumerate(layers)]


@torch.inference_mode()
def compiled_decode(model: Moonshine | Whisper, threads: int = 1) -> Decode:
    """A traced `SpeechModel.decode` of a model on a CPU whose decoder does not change any more.

    The pass is traced once, for `threads` inference threads. They share its code, and each has its own 8-bit weights of
    the decoder's layers; for the other layers of the model, call `copy_for_thread`. The rest of the model may be
    changed by another thread meanwhile.
    """
    layers = [module for module in model.decoder.modules() if isinstance(module, Int8Linear)]
    # Copies of weights are made on another core while the pass is traced with the weights of the first thread.
    copies = ThreadPoolExecutor(1, "copy weights")
    copying = [copies.submit(copy_for_thread, model.decoder, number) for number in range(1, threads)]
    # Constants of a trace must not need a gradient.
    model.decoder.requires_grad_(False)
    _use_simple_executor()
    traced = _trace(model, layers)
    for done in copying:
        done.result()
    copies.shutdown()
    passes = [_with_weights(traced, _weights_of(layers, number)) for number in range(threads)]

    def decode(tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        real = _all_real(encoded.keys) if encoded.real is None else encoded.real
        decoder_pass = passes[inference_thread.number]
        # Without optimisations: they take longer than a dozen passes, and improve nothing on a CPU.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            hidden, attention = decoder_pass(
                tokens, positions, (state.keys, state.values), (encoded.keys, encoded.values, real)
            )
        return hidden, attention

    return decode


def _use_simple_executor() -> None:
    """Choose torch's simple executor, for all traced models of this process. The default one optimises a pass twice:
    before its first call, and again with the shapes of that call."""
    torch._C._jit_set_profiling_executor(False)


def _with_weights(traced: torch.jit.ScriptModule, weights: list[tuple[str, torch.ScriptObject]]) -> Pass:
    """The traced pass with the weights of another inference thread."""
    module = copy(traced._c)
    for name, value in weights:
        module.setattr(name, value)
    decode: Pass = module._get_method("forward")
    return decode


def _trace(model: Moonshine | Whisper, layers: list[Int8Linear]) -> torch.jit.ScriptModule:
    """Trace a pass with the weights of the first inference thread."""
    shape = model.decoder_shape
    # The trace works for other sizes, too, as long as none of the example's sizes is 1.
    rows, count, frames = 2, 2, 3
    tokens = torch.zeros(rows, count, dtype=torch.int64)
    state = model.new_state(rows, count)
    keys, values = (
        state.keys.new_zeros(shape.layers, rows, shape.heads, *size)
        for size in ((shape.dim, frames), (frames, shape.dim))
    )
    example = (
        tokens,
        torch.arange(count).expand(rows, -1),
        (state.keys, state.values),
        (keys, values, _all_real(keys)),
    )
    with warnings.catch_warnings():
        # Warnings about values treated as constants: sizes of the model, which are constant.
        warnings.simplefilter("ignore", TracerWarning)
        # The replacement that torch recommends needs a C++ compiler at run time. The torch version is pinned.
        warnings.filterwarnings("ignore", "`torch.jit.trace", DeprecationWarning)
        traced: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
            _Pass(model.decode, layers), example, check_trace=False
        )
    return traced


def _all_real(keys: Tensor) -> Tensor:
    """The mask of a batch without padding."""
    return keys.new_ones(keys.shape[1], 1, 1, keys.shape[4], dtype=torch.bool)
