"""A decoder's pass as one call of compiled code.

To say one token of a small model, a CPU runs some hundred short operations, and half of the time goes into Python
between them. What is more, only one thread at a time may run Python: streams that are read side by side wait for each
other there. So a pass is traced once, by torch's own interpreter, which needs no Python and runs the same operations in
the same order: what they give is the same, to the last bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from engine.models.moonshine import Moonshine
from engine.models.seq2seq import DecoderState, Encoded, allow_readers, reader
from engine.models.whisper import Whisper

Decode = Callable[[Tensor, Tensor, DecoderState, Encoded], tuple[Tensor, Tensor]]
Pass = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor]]


class _Pass(nn.Module):
    """`decode` of a model, with tensors for arguments. The tracer takes a while over each module that it is shown, so
    these are the ones that take part."""

    def __init__(self, decode: Decode, decoder: nn.Module) -> None:
        super().__init__()
        self._decode = decode
        self._decoder = decoder

    def forward(
        self, tokens: Tensor, positions: Tensor, said: tuple[Tensor, Tensor], heard: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        keys, values, real = heard
        return self._decode(tokens, positions, DecoderState(*said), Encoded(keys, values, [], real=real))


@torch.inference_mode()
def compiled_decode(model: Moonshine | Whisper, readers: int = 1) -> Decode:
    """See `SpeechModel.decode`. The model is on a CPU and changes no more; so many threads may read at a time."""
    allow_readers(model, readers)
    passes = [_trace_as(number, model) for number in range(readers)]

    def decode(tokens: Tensor, positions: Tensor, state: DecoderState, encoded: Encoded) -> tuple[Tensor, Tensor]:
        real = _all_real(encoded.keys) if encoded.real is None else encoded.real
        traced = passes[reader.number]
        hidden, attention = traced(tokens, positions, (state.keys, state.values), (encoded.keys, encoded.values, real))
        return hidden, attention

    return decode


def _trace_as(number: int, model: Moonshine | Whisper) -> Pass:
    """A pass with the weights of one of the readers."""
    shape = model.decoder_shape
    # Sizes are no part of what is traced, as long as none of them is one.
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
        # Of numbers that it takes for constants: sizes of the model, which are.
        warnings.simplefilter("ignore", TracerWarning)
        # What torch would rather have us use needs a C++ compiler where the engine runs. Its version is pinned.
        warnings.filterwarnings("ignore", "`torch.jit.trace", DeprecationWarning)
        reader.number = number
        try:
            traced: Pass = torch.jit.trace(  # type: ignore[no-untyped-call]
                _Pass(model.decode, model.decoder), example, check_trace=False
            )
        finally:
            reader.number = 0
    return traced


def _all_real(keys: Tensor) -> Tensor:
    """The mask of a batch whose frames are all real."""
    return keys.new_ones(keys.shape[1], 1, 1, keys.shape[4], dtype=torch.bool)
