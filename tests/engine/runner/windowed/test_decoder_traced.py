"""Compiled passes of a decoder say what the model itself says, to the last bit, for texts and batches of any size.

The models are tiny and random.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.seq2seq import Encoded, SpeechModel, quantise_linears
from engine.models.whisper import Whisper, WhisperConfig
from engine.runner.windowed.decoder import compiled_decode

VOCABULARY = 40


def moonshine(width: int = 32) -> Moonshine:
    torch.manual_seed(11)
    return Moonshine(MoonshineConfig(width, 2 * width, 1, 2, 4, 8, 10_000.0, VOCABULARY, 1, 2)).eval()


def in_8_bits() -> Moonshine:
    """Wide enough that its matrices are worth it."""
    model = moonshine(width=320)
    quantise_linears(model.decoder.layers)
    return model


def whisper() -> Whisper:
    torch.manual_seed(12)
    model = Whisper(WhisperConfig(80, VOCABULARY, 1500, 32, 4, 1, 64, 4, 2)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def heard(model: SpeechModel, frames: list[int]) -> Encoded:
    shape = model.decoder_shape
    rows = [
        Encoded(
            torch.randn(shape.layers, 1, shape.heads, shape.dim, length),
            torch.randn(shape.layers, 1, shape.heads, length, shape.dim),
            [length],
        )
        for length in frames
    ]
    return Encoded.stack(rows)


READ_SIDE_BY_SIDE = """
import threading, torch
from engine.runner.windowed.decoder import compiled_decode
from engine.models.seq2seq import in_8_bits, copy_for_thread, inference_thread
from tests.engine.runner.windowed import test_decoder_traced as models

torch.set_num_threads(1)
model, layer = models.in_8_bits(), in_8_bits(torch.randn(640, 320))
copy_for_thread(layer, 1)
decode = compiled_decode(model, 2)
inputs = [torch.randn(rows, 320) for rows in range(1, 9)]
encoded = [models.heard(model, [frames]) for frames in (5, 9, 14, 30)]
wrong = []

def read(number, known=None):
    inference_thread.number = number
    found = []
    with torch.inference_mode():
        for turn in range(1 if known is None else 40):
            found = [layer(x) for x in inputs]
            for one in encoded:
                found.append(decode(torch.full((1, 2), 3), torch.arange(2)[None], model.new_state(1, 2), one)[0])
            if known is not None and not all(map(torch.equal, found, known)):
                wrong.append((number, turn))
    return found

known = read(0)
threads = [threading.Thread(target=read, args=(number, known)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
raise SystemExit(f"other numbers: {wrong}" if wrong else 0)
"""


def test_readers_side_by_side_are_not_in_each_others_way() -> None:
    # What goes wrong here is the end of the process.
    done = subprocess.run([sys.executable, "-c", READ_SIDE_BY_SIDE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("make", [moonshine, in_8_bits, whisper])
def test_compiled_passes_say_what_the_model_says(make: Callable[[], Moonshine | Whisper]) -> None:
    model = make()
    decode = compiled_decode(model)
    torch.manual_seed(13)
    with torch.inference_mode():
        for frames, known in (([9], 5), ([30], 1), ([7, 21], 6), ([5, 5, 5], 2)):
            encoded, capacity = heard(model, frames), known + 4
            states = [model.new_state(len(frames), capacity) for _ in range(2)]
            for at, count in ((0, known), (known, 1)):
                tokens = torch.randint(3, VOCABULARY, (len(frames), count))
                positions = torch.arange(at, at + count).expand(len(frames), -1)
                plain, ours = (
                    way(tokens, positions, state.first(at + count), encoded)
                    for way, state in zip((model.decode, decode), states, strict=True)
                )
                assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True)), (frames, at)
            assert torch.equal(states[0].keys, states[1].keys) and torch.equal(states[0].values, states[1].values)
