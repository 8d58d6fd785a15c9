"""Moonshine as training computes it: the encoder under a block mask, the decoder over a known text, greedy decoding.

These functions run the engine's own modules on whole utterances and with gradients, which the engine's caches and 8-bit
products do not have. A `Linear` says how a product is computed, so that training can round it as the engine will.

`block_plan` makes the mask that says which frame sees which. The frames that a block looks ahead to are appended as
copies, one set for each block, at their true positions: a copy sees what its block sees, and only its block sees it. So
one masked pass computes what the streaming encoder computes block after block. `greedy_tokens` decodes many rows at a
time, for the teacher's texts and for evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, pad, scaled_dot_product_attention

from engine.models.moonshine import DecoderLayer, EncoderLayer, Moonshine, MoonshineEncoder
from engine.models.moonshine_streaming import NormPrior, NormSums, running_norm
from engine.models.seq2seq import SAFE_STEPS, Encoded, cross_keys_values, join_heads, split_heads


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """frames: how many are real; positions: [count] of these and the copies behind them; mask: [count, count], True
    where the row's frame sees the column's; looking: [copies] the number of the block that looks ahead to a copy."""

    frames: int
    positions: Tensor
    mask: Tensor
    looking: Tensor

    @property
    def ahead(self) -> Tensor:
        """[copies]: the frames they are copies of."""
        return self.positions[self.frames :]


def block_plan(frames: int, block: int, look_ahead: int, left: int, device: torch.device | str) -> BlockPlan:
    own = torch.arange(frames, device=device)
    starts = torch.arange(0, frames, block, device=device)
    ahead = starts[:, None] + block + torch.arange(look_ahead, device=device)  # [blocks, look_ahead]
    there = ahead < frames
    starts_of_copies = starts[:, None].expand_as(ahead)[there]
    positions = torch.cat((own, ahead[there]))
    block_starts = torch.cat((own - own % block, starts_of_copies))  # [count]: where each frame's block begins
    is_copy = torch.arange(len(positions), device=device) >= frames
    same_block = block_starts[:, None] == block_starts
    in_reach = (positions < block_starts[:, None] + block) & (positions >= block_starts[:, None] - left)
    return BlockPlan(frames, positions, torch.where(is_copy, same_block, in_reach), starts_of_copies // block)


Linear = Callable[[nn.Linear, Tensor], Tensor]


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


def rounded(layer: nn.Linear, x: Tensor) -> Tensor:
    """As `Int8Linear` where weights have the fewest steps; weights and input have a range per row."""
    return linear(_round(x, _INPUT_STEPS), _round(layer.weight, SAFE_STEPS), layer.bias)


_INPUT_STEPS = 127


def _round(x: Tensor, steps: int) -> Tensor:
    result: Tensor = _Round.apply(x, steps)  # type: ignore[no-untyped-call]
    return result


class _Round(torch.autograd.Function):
    """Rows rounded to `steps` steps on each side of zero; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / steps
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def encode_whole(encoder: MoonshineEncoder, audio: Tensor) -> Tensor:
    """The published encoder: every frame sees all others. [batch, samples], no padding -> [batch, frames, width]"""
    with _float32(audio):
        x = torch.tanh(encoder.conv1(audio[:, :, None]))
        x = layer_norm(x, x.shape[1:], eps=encoder.groupnorm.eps)
        x = x * encoder.groupnorm.weight + encoder.groupnorm.bias
    x = _frames(encoder, x, exact)
    return _layers(encoder, x, torch.arange(x.shape[1], device=x.device), None, exact)


def encode_blocks(
    encoder: MoonshineEncoder,
    norm: NormPrior,
    audio: Tensor,
    plan: BlockPlan,
    take: Linear = exact,
    frames: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[batch, samples] -> [batch, frames, width] and [batch, copies, width], what the blocks looked ahead to as they
    heard it; `frames`: [batch] real frames of each row, where rows are padded."""
    with _float32(audio):
        x = torch.tanh(encoder.conv1(audio[:, :, None]))
        x, _, _ = running_norm(x, NormSums(), norm)
        x = x * encoder.groupnorm.weight + encoder.groupnorm.bias
    x = _frames(encoder, x, take)
    mask = plan.mask[None, None]
    if frames is not None:
        real = plan.positions < frames[:, None]  # [batch, count]
        # Frames of padding see everything: a row of the mask with nothing in it would give no number.
        mask = (mask & real[:, None, None, :]) | ~real[:, None, :, None]
    x = _layers(encoder, x[:, plan.positions], plan.positions, mask, take)
    return x[:, : plan.frames], x[:, plan.frames :]


def _float32(audio: Tensor) -> torch.autocast:
    """The stem's statistics need it, whatever the rest runs in."""
    return torch.autocast(audio.device.type, enabled=False)


def _frames(encoder: MoonshineEncoder, x: Tensor, take: Linear) -> Tensor:
    columns = x.unfold(1, encoder.conv2.kernel, encoder.conv2.stride).transpose(2, 3).flatten(2)
    return gelu(encoder.conv3(gelu(take(encoder.conv2.linear, columns))))


def _layers(encoder: MoonshineEncoder, x: Tensor, positions: Tensor, mask: Tensor | None, take: Linear) -> Tensor:
    angles = encoder.rotary.angles(positions[None])
    for layer in (cast(EncoderLayer, layer) for layer in encoder.layers):
        attention = layer.self_attn
        projected = take(attention.qkv_proj, layer.input_layernorm(x)).chunk(3, dim=-1)
        query, key, value = (split_heads(part, attention.heads) for part in projected)
        query, key = (encoder.rotary.rotate(part, angles).to(value.dtype) for part in (query, key))
        x = x + take(attention.o_proj, _attend(query, key, value, mask))
        inner = gelu(take(layer.mlp.fc1, layer.post_attention_layernorm(x)))
        x = x + take(layer.mlp.fc2, inner)
    result: Tensor = encoder.layer_norm(x)
    return result


def decode_known(model: Moonshine, tokens: Tensor, heard: Tensor) -> Tensor:
    """The decoder over a whole text: tokens [batch, count], heard [batch, frames, 2 * layers * width] -> hidden."""
    decoder, heads = model.decoder, model.config.heads
    x = decoder.embed_tokens(tokens)
    rotary = model.encoder.rotary
    angles = rotary.angles(torch.arange(tokens.shape[1], device=tokens.device)[None])
    keys_values = heard.chunk(2 * len(decoder.layers), dim=-1)
    for index, layer in enumerate(cast(DecoderLayer, layer) for layer in decoder.layers):
        projected = layer.self_attn.qkv_proj(layer.input_layernorm(x)).chunk(3, dim=-1)
        query, key, value = (split_heads(part, heads) for part in projected)
        query, key = (rotary.rotate(part, angles).to(value.dtype) for part in (query, key))
        x = x + layer.self_attn.o_proj(_attend(query, key, value, causal=True))
        query = split_heads(layer.encoder_attn.q_proj(layer.post_attention_layernorm(x)), heads)
        key, value = (
            split_heads(part, heads) for part in (keys_values[index], keys_values[len(decoder.layers) + index])
        )
        x = x + layer.encoder_attn.o_proj(_attend(query, key, value))
        x = x + layer.mlp(layer.final_layernorm(x))
    result: Tensor = decoder.norm(x)
    return result


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """[batch, heads, count, dim] each -> [batch, count, width]"""
    dim = query.shape[-1]
    if query.is_cuda and dim % 8:
        # The fast kernels take multiples of eight only.
        query, key, value = (pad(part, (0, -dim % 8)) for part in (query, key, value))
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=dim**-0.5)
    return join_heads(mixed[..., :dim])


# More tokens than speech has in a second; the engine has the same limit.
TOKENS_PER_SECOND = 6.5
_CHECK_EVERY = 8


def token_limit(seconds: float, model: Moonshine) -> int:
    return min(model.max_tokens - 2, int(seconds * TOKENS_PER_SECOND) + 8)


@torch.no_grad()
def greedy_tokens(model: Moonshine, frames: Tensor, lengths: list[int], limits: list[int]) -> list[list[int]]:
    """frames: [batch, frames, width], `lengths` of them real -> the tokens of each row, at most `limits`."""
    keys, values = cross_keys_values(model.cross_kv(frames), model.config.decoder_layers, model.config.heads)
    encoded = Encoded(keys, values, lengths)
    batch, most = len(lengths), max(limits)
    state = model.new_state(batch, most + 1)
    said = torch.full((batch, most), model.end_token, device=frames.device)
    token = torch.full((batch, 1), model.start_tokens[0], device=frames.device)
    last = torch.tensor(limits, device=frames.device)
    done = torch.zeros(batch, dtype=torch.bool, device=frames.device)
    for place in range(most):
        positions = torch.full((batch, 1), place, device=frames.device)
        hidden, _ = model.decode(token, positions, state.first(place + 1), encoded)
        best = model.logits(hidden[:, 0]).argmax(dim=-1)
        done = done | (best == model.end_token) | (place >= last)
        token = torch.where(done, model.end_token, best)[:, None]
        said[:, place] = token[:, 0]
        # Asking the device whether all are done makes it wait, so it is not asked every time.
        if place % _CHECK_EVERY == 0 and bool(done.all()):
            break
    return [[token for token in row if token != model.end_token] for row in said.tolist()]
