"""Names of Whisper's tensors: OpenAI's, transformers', and ours."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from engine.models.seq2seq import FrameConv

# transformers' names, part by part; the order matters where one contains another.
_RENAMES = [
    (r"^model\.", ""),
    (r"\.layers\.", ".blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
    (r"\.embed_tokens\.", ".token_embedding."),
]


def _openai_name(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def fused(tensors: dict[str, Tensor], width: int, audio_layers: int, text_layers: int) -> dict[str, Tensor]:
    """A state dict of either kind under our names, with the matrices that we join."""
    left = {_openai_name(name): value.float() for name, value in tensors.items() if name != "proj_out.weight"}

    def take(prefix: str, parts: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
        weights = [left.pop(f"{prefix}{part}.weight") for part in parts]
        # Keys have no bias in Whisper; a zero one lets the fused matrix have one.
        biases = [left.pop(f"{prefix}{part}.bias", torch.zeros(width)) for part in parts]
        return weights, biases

    for convolution in ("encoder.conv1", "encoder.conv2"):
        left[f"{convolution}.linear.weight"] = FrameConv.matrix(left.pop(f"{convolution}.weight"))
        left[f"{convolution}.linear.bias"] = left.pop(f"{convolution}.bias")
    for side, layers in (("encoder", audio_layers), ("decoder", text_layers)):
        for layer in range(layers):
            prefix = f"{side}.blocks.{layer}.attn."
            weights, biases = take(prefix, ("query", "key", "value"))
            left[prefix + "qkv.weight"], left[prefix + "qkv.bias"] = torch.cat(weights), torch.cat(biases)
    cross_weights, cross_biases = [], []
    for part in ("key", "value"):
        for layer in range(text_layers):
            weights, biases = take(f"decoder.blocks.{layer}.cross_attn.", (part,))
            cross_weights += weights
            cross_biases += biases
    left["cross_kv.weight"], left["cross_kv.bias"] = torch.cat(cross_weights), torch.cat(cross_biases)
    return left
