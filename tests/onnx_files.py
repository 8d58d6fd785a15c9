"""Small ONNX files with known weights, written field by field: parts of graphs, and a Whisper in 8 bits."""

from __future__ import annotations

import numpy as np


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name: str, values: np.ndarray, packed: bool = False) -> bytes:
    kinds = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6}
    message = b"".join(varint(1 << 3) + varint(size) for size in values.shape)
    message += varint(2 << 3) + varint(kinds[values.dtype.name]) + part(8, name.encode())
    if packed:
        return message + part(5, b"".join(varint(int(value)) for value in values.ravel()))
    return message + part(9, values.tobytes())


def node(inputs: list[str], outputs: list[str]) -> bytes:
    return b"".join(part(1, name.encode()) for name in inputs) + b"".join(part(2, name.encode()) for name in outputs)


# Whisper: an encoder, and a decoder whose weights are in the branches of an If node

WIDTH, MELS, FRAMES, TOKENS, VOCABULARY = 4, 2, 6, 5, 7
WHISPER_CONFIG = {
    "model_type": "whisper",
    "num_mel_bins": MELS,
    "vocab_size": VOCABULARY,
    "max_source_positions": FRAMES,
    "max_target_positions": TOKENS,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
SCALE, ZERO = 0.5, 128


class WhisperFile:
    """One side of a small Whisper as an 8-bit ONNX file, and the weights that should be found in it."""

    def __init__(self, side: str) -> None:
        self.prefix = f"model.{side}."
        # Names as the exporter writes them: the decoder's have a prefix, and a suffix since both branches share them.
        self._prefix, self._suffix = ("model.decoder.", "_merged_0") if side == "decoder" else ("", "")
        self._tensors: list[bytes] = []
        self._nodes: list[bytes] = []
        self.weights: dict[str, np.ndarray] = {}
        self._random = np.random.default_rng(len(side))

    def plain(self, name: str, *shape: int) -> None:
        values = self._random.standard_normal(shape).astype(np.float32)
        self._tensors.append(tensor(f"{self._prefix}{name}{self._suffix}", values))
        self.weights[self.prefix + name] = values

    def quantised(self, name: str, *shape: int) -> None:
        """A convolution or the embedding, which keep their names."""
        self.weights[self.prefix + name] = self._codes(f"{self._prefix}{name}{self._suffix}", shape)

    def product(self, name: str, inputs: int, outputs: int) -> None:
        """A matrix product, whose weight is named by a number."""
        stem = f"onnx::MatMul_{len(self._nodes)}{self._suffix}"
        self.weights[f"{self.prefix}{name}.weight"] = self._codes(stem, (inputs, outputs)).T
        path = "/model/decoder/" if self._suffix else "/"
        output = f"{path}{name.replace('.', '/').replace('layers/', 'layers.')}/MatMul_output_0_output_quantized"
        self._nodes.append(node(["activations_quantized", f"{stem}_quantized", f"{stem}_zero_point"], [output]))

    def layer(self, *attentions: str) -> None:
        for attention in attentions:
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                self.product(f"layers.0.{attention}.{projection}", WIDTH, WIDTH)
                if projection != "k_proj":
                    self.plain(f"layers.0.{attention}.{projection}.bias", WIDTH)
            self.norm(f"layers.0.{attention}_layer_norm")
        for name, inputs, outputs in (("fc1", WIDTH, 4 * WIDTH), ("fc2", 4 * WIDTH, WIDTH)):
            self.product(f"layers.0.{name}", inputs, outputs)
            self.plain(f"layers.0.{name}.bias", outputs)
        self.norm("layers.0.final_layer_norm")
        self.norm("layer_norm")

    def norm(self, name: str) -> None:
        self.plain(f"{name}.weight", WIDTH)
        self.plain(f"{name}.bias", WIDTH)

    def data(self) -> bytes:
        tensors = b"".join(part(5, item) for item in self._tensors)
        nodes = b"".join(part(1, item) for item in self._nodes)
        if self._suffix:
            nodes = part(1, node(["use_cache_branch"], ["logits"]) + part(5, part(6, nodes)))
        return part(7, nodes + tensors)

    def _codes(self, stem: str, shape: tuple[int, ...]) -> np.ndarray:
        codes = self._random.integers(0, 256, shape).astype(np.uint8)
        self._tensors += [
            tensor(f"{stem}_quantized", codes),
            tensor(f"{stem}_scale", np.array(SCALE, np.float32)),
            tensor(f"{stem}_zero_point", np.array(ZERO, np.uint8)),
        ]
        return (codes.astype(np.float32) - ZERO) * SCALE


def whisper_files() -> tuple[WhisperFile, WhisperFile]:
    encoder, decoder = WhisperFile("encoder"), WhisperFile("decoder")
    for name, inputs in (("conv1", MELS), ("conv2", WIDTH)):
        encoder.quantised(f"{name}.weight", WIDTH, inputs, 3)
        encoder.plain(f"{name}.bias", WIDTH)
    encoder.plain("embed_positions.weight", FRAMES, WIDTH)
    encoder.layer("self_attn")
    decoder.quantised("embed_tokens.weight", VOCABULARY, WIDTH)
    decoder.plain("embed_positions.weight", TOKENS, WIDTH)
    decoder.layer("self_attn", "encoder_attn")
    return encoder, decoder
