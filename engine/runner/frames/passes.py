"""Forward passes of Voxtral Realtime over the caches (`ModelPasses`), with the buffers that they read and write.

`runner.py` decides what is computed. There are three kinds of passes: one position of many streams, a chunk of known
tokens of rebuilt streams, and the openings (the silence before every stream). A step uploads one small block of
integers and the samples of the items to encode. Everything else is on the device already: each stream's last token,
delay, number of blanks in a row, and page tables; only changes to it are uploaded. Uploads do not wait for the device:
the next step can be uploaded while the device computes this one.

Tokens are chosen greedily (`choose`), with a guard against endless blanks. The model can emit blanks for minutes over
real speech. The blank's logit then leads by 3.5 to 6.6, in true silence by 8.5 and more. So after a long run of blanks
its logit is lowered step by step, by at most 7: enough to return to words in speech, too little to invent words in
silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.plan import SILENCE_ROW, EncodeTask
from engine.models.voxtral_realtime import BOS, MAX_DELAY_POSITIONS, STREAMING_PAD, VoxtralRealtime
from engine.runner.device import Download, staging, upload
from engine.runner.frames.bias_tables import BiasTables
from engine.runner.frames.kv_pages import StackCache
from engine.spec import ModelSpec

# In place of a known output token: the model chooses the token.
NOT_FORCED = -1
# The guard against endless blanks: after this many blanks (16 s), the blank's logit is lowered by this much for each
# further blank, and at most by this much.
GUARD_AFTER_BLANKS = 200
GUARD_STEP = 0.5
MAX_GUARD_PENALTY = 7.0


class SlotState:
    """The state of every stream on the device, by slot: last token, delay, number of blanks in a row. The last slot is
    for the padding rows of a batch."""

    def __init__(self, streams: int, device: torch.device) -> None:
        self.tokens = torch.full((streams + 1,), STREAMING_PAD, dtype=torch.int64, device=device)
        self.delays = torch.ones(streams + 1, dtype=torch.int64, device=device)
        self.blank_runs = torch.zeros(streams + 1, dtype=torch.int64, device=device)

    def set(self, slots: Sequence[int], tokens: Sequence[int], delays: Sequence[int], runs: Sequence[int]) -> None:
        values = upload(np.array([slots, tokens, delays, runs], dtype=np.int64), self.tokens.device)
        self.tokens[values[0]] = values[1]
        self.delays[values[0]] = values[2]
        self.blank_runs[values[0]] = values[3]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Indices of one batched step: one entry per stream in each list."""

    slots: Sequence[int]
    positions: Sequence[int]
    # The encoder row that the position reads (`EncoderInputs`).
    inputs: Sequence[int]
    # The known output token, or NOT_FORCED.
    forced: Sequence[int]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Payloads:
    """Positions to encode: the target row of each, and its samples with look-back and look-ahead."""

    rows: list[int]
    samples: list[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The results of a batched step on the host."""

    # Token of each row.
    tokens: list[int]
    # Rows whose logits were not finite.
    failed: list[int]
    # Number of rows whose token the blank guard changed.
    guarded: int


class StepBuffers:
    """Fixed buffers for a step's inputs and outputs, so that a recorded graph can read and write them."""

    def __init__(self, capacity: int, payload_samples: int, padding_slot: int, spare_row: int, device: torch.device):
        self.capacity = capacity
        self._device = device
        self._padding = (padding_slot, 0, 0, STREAMING_PAD, spare_row)
        self._indices = torch.empty(5, capacity, dtype=torch.int64, device=device)
        self.samples = torch.zeros(capacity, payload_samples, dtype=torch.float32, device=device)
        self.results = torch.zeros(3, capacity, dtype=torch.int64, device=device)

    def upload(self, rows: StepRows, payloads: Payloads) -> None:
        """Upload a step's indices, and the samples to encode."""
        indices = staging((5, self.capacity), torch.int64, self._device)
        view = indices.numpy()
        for line, values in enumerate((rows.slots, rows.positions, rows.inputs, rows.forced, payloads.rows)):
            view[line, : len(values)] = values
            view[line, len(values) :] = self._padding[line]
        self._indices.copy_(indices, non_blocking=True)
        count = len(payloads.samples)
        if count:
            samples = staging((count, self.samples.shape[1]), torch.float32, self._device)
            np.concatenate(payloads.samples, out=samples.numpy().reshape(-1))
            self.samples[:count].copy_(samples, non_blocking=True)

    def inputs_of_pass(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Slots, positions, input rows, forced tokens and encode targets of a batch padded to `size`."""
        slots, positions, inputs, forced, targets = self._indices[:, :size].unbind()
        return slots, positions, inputs, forced, targets

    def download(self) -> Download:
        """Start the transfer of the step's results to the host."""
        return Download(self.results)


def outcome_of(results: Download, count: int) -> StepOutcome:
    """Return the results of the first `count` rows. Waits for the device."""
    tokens, failed, guarded = results.values()[:, :count]
    return StepOutcome(tokens.tolist(), np.flatnonzero(failed).tolist(), int(guarded.sum()))


# Positions encoded at once outside a batched pass.
ENCODE_BATCH = 1024


class EncoderInputs:
    """The array of encoder input rows: one per position that streams still need, with the output of the convolutions.

    Row 0 is the model's silence. The padding rows of a batch write to the spare row after the last one.
    """

    def __init__(self, model: VoxtralRealtime, spec: ModelSpec, embeds: int) -> None:
        config = model.config
        self._model = model
        assert spec.features is not None, "the model's front end is log-mel frames"
        self._features = spec.features
        self._step_samples = spec.samples_per_position
        self.payload_samples = spec.look_back_samples + spec.samples_per_position + spec.look_ahead_samples
        self.spare_row = embeds + 1
        width = config.audio.width * config.rows_per_position
        self.rows = torch.zeros(embeds + 2, width, dtype=model.dtype, device=model.device)

    def write_silence(self) -> None:
        """Compute row 0."""
        silence = torch.zeros(1, self.payload_samples, device=self.rows.device)
        self.rows[SILENCE_ROW] = self._model.stem_rows(silence)[0]

    def collect(self, tasks: list[EncodeTask]) -> tuple[Payloads, dict[str, str]]:
        """Return the samples to encode, by position, and the errors of bad items, by stream.

        Items that came as features, which are rare, do not fit into a batched pass and are encoded here at once.
        """
        payloads = Payloads([], [])
        errors: dict[str, str] = {}
        for task in tasks:
            samples, rows, mask = task.payload, task.rows, task.mask
            length = len(rows) if mask is None else len(mask)
            if isinstance(samples, np.ndarray) and samples.ndim == 2:
                problem = self._encode_features(task, length)
                if problem is not None:
                    errors[task.stream] = problem
                continue
            expected = self.payload_samples + (length - 1) * self._step_samples
            if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.shape != (expected,):
                errors[task.stream] = f"an item of {length} positions must have {expected} samples of float32"
            elif length == 1:
                payloads.rows.append(rows[0])
                payloads.samples.append(samples)
            else:
                payloads.rows.extend(rows)
                payloads.samples.extend(self._cut(samples, range(length) if mask is None else np.flatnonzero(mask)))
        return payloads, errors

    def _encode_features(self, task: EncodeTask, length: int) -> str | None:
        """Encode an item that came as log-mel features. Returns the error text if it is bad."""
        shape = self._features.of(length)
        if task.payload.dtype != np.float32 or task.payload.shape != shape:
            return f"features of an item of {length} positions must be float32 of shape {shape}"
        frames = torch.from_numpy(np.array(task.payload.T)).to(self.rows.device)
        step, span = self._features.frames_per_position, self._features.of(1)[1]
        items = frames.unfold(0, span, step).transpose(1, 2)  # [positions, frames, bins]
        if task.mask is not None:
            items = items[torch.tensor(task.mask, device=items.device)]
        rows = torch.tensor(task.rows, dtype=torch.int64).to(self.rows.device)
        self.rows.index_copy_(0, rows, self._model.feature_rows(items))
        return None

    def _cut(self, samples: NDArray[np.float32], positions: Iterable[int]) -> Iterator[NDArray[np.float32]]:
        """Yield the samples of each of an item's positions, with look-back and look-ahead."""
        for position in positions:
            start = position * self._step_samples
            yield samples[start : start + self.payload_samples]

    def encode(self, payloads: Payloads) -> None:
        """Encode positions outside a batched pass."""
        device = self.rows.device
        for start in range(0, len(payloads.rows), ENCODE_BATCH):
            part = slice(start, start + ENCODE_BATCH)
            rows = upload(np.array(payloads.rows[part], dtype=np.int64), device)
            samples = staging((len(rows), self.payload_samples), torch.float32, device)
            np.stack(payloads.samples[part], out=samples.numpy())
            self.rows.index_copy_(0, rows, self._model.stem_rows(samples.to(device, non_blocking=True)))


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen tokens, [streams] each: the token, whether the logits were not finite, whether the guard changed the
    token."""

    tokens: Tensor
    failed: Tensor
    guarded: Tensor


def choose(logits: Tensor, blank_runs: Tensor, guard: bool) -> Choice:
    """Choose a token per stream from logits [streams, vocabulary] and blank_runs [streams]; may change the blank's
    column in place."""
    blank = logits[:, STREAMING_PAD].clone()
    if guard:
        penalty = (GUARD_STEP * (blank_runs - GUARD_AFTER_BLANKS)).clamp(0.0, MAX_GUARD_PENALTY)
        logits[:, STREAMING_PAD] -= penalty.to(logits.dtype)
    best, tokens = logits.max(dim=-1)
    guarded = (tokens != STREAMING_PAD) & (blank > best)
    # max() returns NaN when any logit is NaN; -inf means that no logit was finite.
    return Choice(tokens, ~best.isfinite(), guarded)


def next_blank_runs(blank_runs: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Return the new numbers of consecutive blanks. Positions within the delay (`chosen` is False) do not count."""
    longer = torch.where(tokens == STREAMING_PAD, blank_runs + 1, torch.zeros_like(blank_runs))
    return torch.where(chosen, longer, blank_runs)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive positions of one stream with known tokens."""

    slot: int
    # The first position.
    position: int
    # Encoder row and input token of each position.
    inputs: Sequence[int]
    tokens: Sequence[int]
    # The stream's delay in positions.
    delay: int


class ChunkBuffers:
    """Fixed buffers for the chunks of a pass, all of one length, so that a recorded graph can read and write them."""

    def __init__(self, length: int, streams: int, padding_slot: int, device: torch.device) -> None:
        self.length, self.streams = length, streams
        self._padding = Chunk(padding_slot, 0, [SILENCE_ROW] * length, [STREAMING_PAD] * length, 1)
        # Slot and position of each chunk; encoder row, token and delay of each of its positions.
        self._chunks = torch.zeros(2, streams, dtype=torch.int64, device=device)
        self._rows = torch.zeros(3, streams * length, dtype=torch.int64, device=device)
        self.upload([])
        # Written by every pass: when it has been downloaded, the pass is over.
        self.done = torch.zeros(1, device=device)

    def upload(self, chunks: Sequence[Chunk]) -> None:
        chunk_indices, rows = _chunk_indices([*chunks, *[self._padding] * (self.streams - len(chunks))])
        self._chunks.copy_(upload(chunk_indices, self._chunks.device))
        self._rows.copy_(upload(rows, self._rows.device))

    def inputs_of_pass(self, streams: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Slots and positions of the first `streams` chunks; input rows, tokens and delays of their positions."""
        slots, positions = self._chunks[:, :streams].unbind()
        inputs, tokens, delays = self._rows[:, : streams * self.length].unbind()
        return slots, positions, inputs, tokens, delays


def _chunk_indices(chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slot and position of each chunk; encoder row, token and delay of each of its positions."""
    count = len(chunks[0].inputs)
    chunk_indices = np.array([[chunk.slot, chunk.position] for chunk in chunks], dtype=np.int64).T
    rows = np.array([[chunk.inputs, chunk.tokens, [chunk.delay] * count] for chunk in chunks], dtype=np.int64)
    return chunk_indices, rows.transpose(1, 0, 2).reshape(3, -1)


class ModelPasses:
    """Runs the model over the caches. `batch` and `recorded_chunks` read and write fixed buffers only, so that they can
    be recorded as CUDA graphs."""

    def __init__(
        self,
        model: VoxtralRealtime,
        encoder: StackCache,
        decoder: StackCache,
        encoder_inputs: EncoderInputs,
        state: SlotState,
        buffers: StepBuffers,
        bias: BiasTables,
        prefix_positions: int,
        blank_guard: bool,
        recorded: bool,
    ) -> None:
        self.model = model
        self._encoder = encoder
        self._decoder = decoder
        self._encoder_inputs = encoder_inputs
        self._state = state
        self._buffers = buffers
        self._bias = bias
        # A recorded graph must serve streams with keywords and without.
        self._recorded = recorded
        self._prefix = prefix_positions
        self._guard = blank_guard
        self._kernels = model.device.type == "cuda"

    def batch(self, size: int) -> None:
        """Compute one position of each stream in the buffers, `size` rows with padding, and store the results there."""
        state, model = self._state, self.model
        slots, positions, inputs, forced, targets = self._buffers.inputs_of_pass(size)
        self._encoder_inputs.rows.index_copy_(0, targets, model.stem_rows(self._buffers.samples[:size]))
        delays = state.delays[slots]
        hidden = self._forward(slots, positions, 1, inputs, state.tokens[slots], delays)
        logits = model.logits(hidden)
        choice = choose(logits, state.blank_runs[slots], self._guard)
        tokens, biased = choice.tokens, self._recorded or self._bias.in_use
        if biased:
            tokens = self._bias.choose(slots, logits, tokens)
        tokens = torch.where(forced == NOT_FORCED, tokens, forced)
        if biased:
            self._bias.advance(slots, tokens)
        chosen = positions >= self._prefix + delays
        state.blank_runs[slots] = next_blank_runs(state.blank_runs[slots], tokens, chosen)
        state.tokens[slots] = tokens
        guarded = choice.guarded & (forced == NOT_FORCED)
        self._buffers.results[:, :size] = torch.stack([tokens, choice.failed.long(), guarded.long()])

    def chunks(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute chunks of equal length in one pass; returns the last hidden rows, [streams * positions, width]."""
        device, count = self.model.device, len(chunks[0].inputs)
        chunk_indices, rows = _chunk_indices(chunks)
        slots, positions = upload(chunk_indices, device)
        inputs, tokens, delays = upload(rows, device)
        return self._forward(slots, positions, count, inputs, tokens, delays)

    def recorded_chunks(self, buffers: ChunkBuffers, streams: int) -> None:
        """Compute the chunks in the buffers, with the padding."""
        slots, positions, inputs, tokens, delays = buffers.inputs_of_pass(streams)
        hidden = self._forward(slots, positions, buffers.length, inputs, tokens, delays)
        buffers.done.copy_(hidden[0, :1])

    def openings(self) -> None:
        """Compute the keys and values of the silence before every stream, for each delay; the encoder's do not depend
        on the delay."""
        model, positions, count = self.model, self._prefix, MAX_DELAY_POSITIONS
        delays = torch.arange(1, count + 1, device=model.device)
        attention = self._encoder.opening_attention(torch.zeros_like(delays[:1]), positions, model.audio_frequencies)
        audio = model.encode(model.opening_rows(positions), attention)
        tokens = torch.full((positions,), STREAMING_PAD, dtype=torch.int64, device=model.device)
        tokens[0] = BOS
        attention = self._decoder.opening_attention(delays - 1, positions, model.text_frequencies)
        model.decode(audio.repeat(count, 1), tokens.repeat(count), delays.repeat_interleave(positions), attention)

    def _forward(
        self,
        slots: Tensor,
        positions: Tensor,
        count: int,
        inputs: Tensor,
        tokens: Tensor,
        delays: Tensor,
    ) -> Tensor:
        """Compute `count` positions of each stream; returns the decoder's last hidden rows [streams * count, width]."""
        model = self.model
        attention = self._encoder.attention(slots, positions, count, model.audio_frequencies, self._kernels)
        audio = model.encode(self._encoder_inputs.rows[inputs], attention)
        attention = self._decoder.attention(slots, positions, count, model.text_frequencies, self._kernels)
        return model.decode(audio, tokens, delays, attention)
