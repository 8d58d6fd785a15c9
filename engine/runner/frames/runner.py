"""`VoxtralRunner`: the frame-synchronous runner; executes plans for Voxtral Realtime, one position per stream and step.

The engine loop calls it on the engine's one thread. A live step is one batched pass over every stream in the plan
(several passes above 512 streams): encode new items into the array of encoder rows, gather each stream's input row, run
encoder and decoder over paged keys and values, choose a token and keep it on the device as the stream's next input. On
CUDA that pass is a recorded graph.

A rebuilt stream repeats known tokens, so many of its positions run as one chunk; other streams with more than one
position take part in further passes. Silent streams may be parked in host memory (`memory.py`), and keywords are
favoured when a token is chosen (`engine/runner/bias.py`).

`launch` queues a plan's work on the device and reads nothing back: the input tokens of the next step are on the device
already, and the host reads the results later.

The first part of this file has the forward passes over the caches (`ModelPasses`), with the buffers that they read and
write; the second has the runner, which decides what is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.plan import SILENCE_ROW, DecodeResult, DecodeTask, EncodeTask, InstantMoves, OpenTask, StepPlan
from engine.host_memory import memory_to_plan_with
from engine.messages import Open
from engine.models.voxtral_realtime import (
    BOS,
    MAX_DELAY_POSITIONS,
    STREAMING_PAD,
    PagedAttention,
    VoxtralConfig,
    VoxtralRealtime,
    tensor_shapes,
)
from engine.runner.base import Runner, never
from engine.runner.bias import BiasTables, KeywordTree, KeywordTrees, wait_briefly
from engine.runner.device import (
    Download,
    SideQueue,
    StepGraphs,
    free_memory,
    require_device,
    shared_memory,
    staging,
    upload,
)
from engine.runner.frames.memory import (
    SPARE_HOST_BUFFERS,
    MemoryPlan,
    ParkedPages,
    ParkingBuffers,
    StackCache,
    StackLayout,
    kv_bytes_per_stream,
    plan_share,
    stack_layouts,
    voxtral_spec,
)
from engine.spec import ModelSpec, Vocabulary
from engine.weights.checkpoint import read_config, read_tekken, read_tensors

logger = logging.getLogger(__name__)

# Forward passes: one position of many streams, a chunk of known tokens of rebuilt streams, and the openings (the
# silence before every stream).
#
# A step uploads one small block of integers and the samples of the items to encode. Everything else is on the device
# already: each stream's last token, delay, number of blanks in a row, and page tables; only changes to it are uploaded.
# Uploads do not wait for the device: the next step can be uploaded while the device computes this one.
#
# Tokens are chosen greedily (`choose`), with a guard against endless blanks. The model can emit blanks for minutes over
# real speech. The blank's logit then leads by 3.5 to 6.6, in true silence by 8.5 and more. So after a long run of
# blanks its logit is lowered step by step, by at most 7: enough to return to words in speech, too little to invent
# words in silence.

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
        self._queue = SideQueue(model.device, "encoding")

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

    def encode(self, payloads: Payloads, ended: bool) -> None:
        """Encode positions outside a batched pass, beside the step under way, which has other rows: rows are free when
        the steps that read them are over. Only if streams have `ended` since the last step, it may have rows of
        theirs."""
        if ended:
            self._queue.wait_for_main()
        with self._queue.used():
            self._encode(payloads)
        self._queue.keep_main_waiting()

    def _encode(self, payloads: Payloads) -> None:
        device = self.rows.device
        for start in range(0, len(payloads.rows), ENCODE_BATCH):
            part = slice(start, start + ENCODE_BATCH)
            rows = upload(np.array(payloads.rows[part], dtype=np.int64), device)
            samples = staging((len(rows), self.payload_samples), torch.float32, device)
            np.concatenate(payloads.samples[part], out=samples.numpy().reshape(-1))
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
        audio, attention = self._encode(slots, positions, 1, inputs)
        hidden = model.decode(audio, state.tokens[slots], delays, attention)
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
        """Compute chunks of equal length in one pass. Returns what was computed last: when it has been downloaded, the
        pass is over."""
        device, count = self.model.device, len(chunks[0].inputs)
        chunk_indices, rows = _chunk_indices(chunks)
        slots, positions = upload(chunk_indices, device)
        inputs, tokens, delays = upload(rows, device)
        return self._remember(slots, positions, count, inputs, tokens, delays)

    def recorded_chunks(self, buffers: ChunkBuffers, streams: int) -> None:
        """Compute the chunks in the buffers, with the padding."""
        slots, positions, inputs, tokens, delays = buffers.inputs_of_pass(streams)
        last = self._remember(slots, positions, buffers.length, inputs, tokens, delays)
        buffers.done.copy_(last[0, :1])

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

    def _remember(
        self,
        slots: Tensor,
        positions: Tensor,
        count: int,
        inputs: Tensor,
        tokens: Tensor,
        delays: Tensor,
    ) -> Tensor:
        """Compute `count` known positions of each stream; see `VoxtralRealtime.remember`."""
        audio, attention = self._encode(slots, positions, count, inputs)
        return self.model.remember(audio, tokens, delays, attention)

    def _encode(self, slots: Tensor, positions: Tensor, count: int, inputs: Tensor) -> tuple[Tensor, PagedAttention]:
        """Run the encoder over `count` positions of each stream. Returns their audio embeddings, and the attention of
        the decoder over the same positions."""
        model = self.model
        attention = self._encoder.attention(slots, positions, count, model.audio_frequencies, self._kernels)
        audio = model.encode(self._encoder_inputs.rows[inputs], attention)
        return audio, self._decoder.attention(slots, positions, count, model.text_frequencies, self._kernels)


# The runner.

# More streams than this in one step run as several passes; the weights are then a small part of the cost.
LARGEST_BATCH = 512
# Rebuilds run in chunks of at most LONGEST_CHUNK positions of a stream, then of a quarter of that, and at most
# CHUNK_PASS_POSITIONS in one pass. Each chunk length needs its own kernel.
LONGEST_CHUNK = 16
CHUNK_PASS_POSITIONS = 2048
# Most rebuilt positions in a step in which all live streams are being rebuilt: 1/16 s on an H200.
REBUILD_POSITIONS = 2048
# Streams in a recorded pass of chunks of LONGEST_CHUNK positions, and its milliseconds on an H200.
CHUNK_PASS_MS = {
    1: 5.1, 2: 5.2, 4: 5.5, 8: 6.4, 16: 8.6, 24: 12.7, 32: 15.6, 48: 23.3, 64: 31.9, 96: 44.8, 128: 61.0
}  # fmt: skip
MOST_CHUNKS = max(CHUNK_PASS_MS)
NOT_FINITE_LOGITS = "the model's output is not a number; the audio may have NaN or infinite values"


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Settings of a `VoxtralRunner`; `engine/runner/load.py` fills them from the engine's configuration."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    # torch.float8_e4m3fn halves the memory of a stream.
    kv_dtype: torch.dtype = torch.bfloat16
    # Most tokens that the decoder attends to.
    decoder_window: int = 1024
    # None: as many as fit.
    max_streams: int | None = None
    # Number of engines that share the device.
    share_of: int = 1
    # Host memory for the keys and values of silent streams, as a part (0 to 1) of what is free.
    parked_share: float = 0.0
    # Device memory that is left for the other models: speaker labels and turn detector.
    background_bytes: int = 0
    # Guard against endless blanks (`choose`).
    blank_guard: bool = True
    # Record CUDA graphs.
    graphs: bool = True


@dataclass(slots=True)
class _Slot:
    """The host's state of a stream."""

    # In positions.
    delay: int
    # Output tokens that are known beforehand: those of a rebuilt stream, and the blanks within the delay.
    known_tokens: list[int]
    keywords: KeywordTree | None = None
    # Its pages have the opening.
    has_opening: bool = False
    # Its keywords, while a thread prepares them.
    pending_keywords: Future[KeywordTree] | None = None

    def blank_run(self, count: int) -> int:
        """Length of the run of blanks at the end of the first `count` known tokens. Those within the delay do not
        count."""
        run = 0
        for token in reversed(self.known_tokens[self.delay : count]):
            if token != STREAMING_PAD:
                break
            run += 1
        return run


@dataclass(slots=True)
class _Work:
    """A decode task during a step."""

    task: DecodeTask
    # Number of its positions that are queued on the device.
    done: int = 0
    # Known tokens, and those that were read.
    tokens: list[int] = field(default_factory=list)


# A batched pass: its tasks, and the transfer of its results.
_Pass = tuple[list[_Work], Download]


def chunk_passes(chunks: Sequence[int], most: int) -> Iterator[list[int]]:
    """Divide the chunks of streams into passes; `chunks` has their number by stream. Yields for each pass the indices
    of its streams, at most `most`: the next chunk of each.

    A recorded pass computes its padding, too. So a pass has the recorded size that takes the least time for each chunk,
    and the streams with the most chunks left go first, which leaves few for the end.
    """
    left, sizes = list(chunks), [size for size in CHUNK_PASS_MS if size <= most]
    while due := sorted((index for index, count in enumerate(left) if count), key=lambda index: -left[index]):
        size = max(sizes, key=lambda size: min(size, len(due)) / CHUNK_PASS_MS[size])
        for index in due[:size]:
            left[index] -= 1
        yield due[:size]


def chunk_sizes(layouts: Sequence[StackLayout]) -> list[int]:
    """Return the chunk lengths in positions, the longest first: at most the rows that a ring has beyond its window,
    because new rows are stored before the oldest ones are read; and a quarter of that."""
    room = min(
        (layout.group.ring_pages * layout.page_rows - layout.heads.window + 1) // layout.rows_per_position
        for layout in layouts
    )
    longest = 1 << (min(room, LONGEST_CHUNK).bit_length() - 1)
    return [size for size in (longest, longest // 4) if size > 1]


class VoxtralRunner(Runner):
    """Executes plans for Voxtral Realtime on one device."""

    overlaps_steps = True

    def __init__(self, model: VoxtralRealtime, vocabulary: Vocabulary, memory: MemoryPlan, settings: RunnerSettings):
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # fusing the weights has fragmented memory that the pages need
        layouts = stack_layouts(model.config, settings.decoder_window, settings.kv_dtype)
        self.spec = voxtral_spec(model.config, layouts, "voxtral-realtime")
        self.vocabulary = vocabulary
        if memory.parked:
            wanted = memory.parked + SPARE_HOST_BUFFERS
            host = ParkingBuffers(wanted, kv_bytes_per_stream(self.spec), model.device.type == "cuda")
            parked = max(0, len(host.buffers) - SPARE_HOST_BUFFERS)
            memory = replace(memory, streams=memory.resident + parked, parked=parked)
            if not parked:
                host.close()
        self.memory = memory
        self.device = model.device
        self.blank_guard_activations = 0
        prefix = self.spec.prefix_positions
        self._caches = [
            StackCache(layout, pages, memory.streams, openings, prefix, settings.kv_dtype, model.device)
            for layout, pages, openings in zip(layouts, memory.group_pages, (1, MAX_DELAY_POSITIONS), strict=True)
        ]
        self._parked: ParkedPages | None = None
        if memory.parked:
            self._parked = ParkedPages([cache.pages for cache in self._caches], host, memory.moves)
        self.moves = self._parked or InstantMoves()
        self._state = SlotState(memory.streams, model.device)
        self._keywords = KeywordTrees(vocabulary)
        self._bias = BiasTables(memory.streams + 1, self._keywords.index, model.device)
        self._encoder_inputs = EncoderInputs(model, self.spec, memory.cache_embeds)
        self._buffers = StepBuffers(
            capacity=min(memory.streams, LARGEST_BATCH),
            payload_samples=self._encoder_inputs.payload_samples,
            padding_slot=memory.streams,
            spare_row=self._encoder_inputs.spare_row,
            device=model.device,
        )
        use_graphs = model.device.type == "cuda" and settings.graphs
        encoder, decoder = self._caches
        self.passes = ModelPasses(
            model,
            encoder,
            decoder,
            self._encoder_inputs,
            self._state,
            self._buffers,
            self._bias,
            prefix,
            blank_guard=settings.blank_guard,
            recorded=use_graphs,
        )
        self._graphs = StepGraphs(self.passes.batch, self._buffers.capacity) if use_graphs else None
        self.slots: dict[int, _Slot] = {}
        # Slots whose keywords are not on the device yet.
        self._without_keywords: set[int] = set()
        self._chunk_sizes = chunk_sizes(layouts)
        # Buffers and graphs by chunk length.
        self._chunk_graphs: dict[int, tuple[ChunkBuffers, StepGraphs]] = {}
        if use_graphs:
            for size in self._chunk_sizes:
                buffers = ChunkBuffers(size, self._max_chunks(size), memory.streams, model.device)
                step = partial(self.passes.recorded_chunks, buffers)
                counts = [count for count in CHUNK_PASS_MS if count <= buffers.streams]
                self._chunk_graphs[size] = buffers, StepGraphs(step, buffers.streams, counts)
        self._warm = False

    @classmethod
    def from_checkpoint(cls, directory: Path, settings: RunnerSettings) -> VoxtralRunner:
        """Load a checkpoint directory. Raises NoDevice or NotEnoughMemory before anything is allocated."""
        config = VoxtralConfig.from_dict(read_config(directory))
        device = require_device(settings.device)
        memory = plan_share(
            config,
            free_memory(device) - settings.background_bytes,
            shared_memory(device, settings.share_of) - settings.share_of * settings.background_bytes,
            settings.share_of,
            decoder_window=settings.decoder_window,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            max_streams=settings.max_streams,
            parked_bytes=int(settings.parked_share * memory_to_plan_with(settings.share_of)),
        )
        vocabulary = read_tekken(directory / "tekken.json", config.vocabulary)
        tied = {"lm_head.weight": "model.language_model.embed_tokens.weight"} if config.tied else None
        tensors = read_tensors(directory, tensor_shapes(config), settings.dtype, device, tied=tied)
        return cls(VoxtralRealtime(config, tensors), vocabulary, memory, settings)

    def check_open(self, message: Open) -> None:
        delay = message.delay_positions
        if delay is not None and not 1 <= delay <= MAX_DELAY_POSITIONS:
            unit = self.spec.samples_per_position * 1000 // self.spec.sample_rate
            raise ValueError(
                f"a delay of {delay * unit} ms; this model takes {unit} to {MAX_DELAY_POSITIONS * unit} ms "
                f"in steps of {unit} ms"
            )
        self.spec.options.check(message.options)
        # Many keywords take long to prepare, so a thread does it, and no other stream waits.
        self._keywords.check(message.options)
        self._keywords.tree_in_background(message.options)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute the row of silence and the openings, then record the step for every batch size."""
        if self._warm:
            return
        self._warm = True
        self._encoder_inputs.write_silence()
        self.passes.openings()
        if self._graphs is not None:
            self._buffers.upload(StepRows([], [], [], []), Payloads([], []))
            self._graphs.capture()
        if self.device.type == "cuda":
            self._compile_chunks()

    def _compile_chunks(self) -> None:
        """Run chunks of every length once, and record them, so that the first rebuild need not compile kernels or
        allocate memory. These chunks write to the padding page."""
        for size in self._chunk_sizes:
            chunk = Chunk(self.memory.streams, 0, [SILENCE_ROW] * size, [STREAMING_PAD] * size, 1)
            for streams in (1, min(self.memory.streams, self._max_chunks(size))):
                self.passes.chunks([chunk] * streams)
        for _, graphs in self._chunk_graphs.values():
            graphs.capture(pool_of=self._graphs)
        # Last, because recording frees memory that no graph has.
        silence = np.zeros(self._encoder_inputs.payload_samples, np.float32)
        spare = Payloads([self._encoder_inputs.spare_row] * ENCODE_BATCH, [silence] * ENCODE_BATCH)
        self._encoder_inputs.encode(spare, ended=False)
        torch.cuda.synchronize()

    @staticmethod
    def _max_chunks(size: int) -> int:
        """Most chunks of this length in one pass."""
        return min(MOST_CHUNKS, CHUNK_PASS_POSITIONS // size)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        if not self._caches:
            return
        self._graphs = None
        self._chunk_graphs.clear()
        if self._parked is not None:
            self._parked.close()
        del self.passes, self._encoder_inputs, self._state, self._buffers, self._bias
        self._caches.clear()
        self.slots.clear()
        self._keywords.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        self.warm_up()
        for slot in plan.closed:
            self.slots.pop(slot, None)
            self._without_keywords.discard(slot)
        if self._parked is not None:
            self._parked.begin_step(plan.closed, plan.parked, plan.restored)
        if plan.opened:
            self._open(plan.opened)
        self._update_tables(plan.decode)
        payloads, errors = self._encoder_inputs.collect(plan.encode)
        waiting = self._set_keywords(plan.decode, errors) if self._without_keywords else set()
        work = [_Work(task) for task in plan.decode]
        healthy = [item for item in work if item.task.stream not in errors] if errors else work
        if waiting:
            healthy = [item for item in healthy if item.task.slot not in waiting]
        longer = [item for item in healthy if item.task.end - item.task.start > 1]
        capacity = self._buffers.capacity
        # A batched pass encodes at most one position per row. Chunks, and more positions than rows, need them encoded
        # before.
        if longer or len(payloads.rows) > min(len(healthy), capacity):
            self._encoder_inputs.encode(payloads, ended=bool(plan.closed))
            payloads = Payloads([], [])
        rebuilt = self._rebuild(longer)
        passes: list[_Pass] = []
        while due := [item for item in healthy if item.task.start + item.done < item.task.end]:
            for start in range(0, len(due), capacity):
                passes.append(self._run_batch(due[start : start + capacity], payloads))
                payloads = Payloads([], [])
        return lambda: self._read(work, passes, rebuilt, errors, waiting)

    def _read(
        self,
        work: list[_Work],
        passes: list[_Pass],
        rebuilt: Download | None,
        errors: dict[str, str],
        waiting: set[int],
    ) -> list[DecodeResult]:
        """Return the results of a plan's passes. Waits for the device. `waiting`: slots that were not computed."""
        if rebuilt is not None:
            rebuilt.values()  # known tokens have no results, but the host must not run ahead of the device
        for batch, results in passes:
            outcome = outcome_of(results, len(batch))
            self.blank_guard_activations += outcome.guarded
            for item, token in zip(batch, outcome.tokens, strict=True):
                item.tokens.append(token)
            for row in outcome.failed:
                errors[batch[row].task.stream] = NOT_FINITE_LOGITS
        return [
            DecodeResult(item.tokens, (), None, errors.get(item.task.stream), unfinished=item.task.slot in waiting)
            for item in work
        ]

    # Changes since the last plan.

    def _open(self, opened: list[OpenTask]) -> None:
        for task in opened:
            # Within the delay the output is always blank.
            blanks = [STREAMING_PAD] * (task.delay_positions - len(task.forced_tokens))
            pending = self._keywords.tree_in_background(task.options)
            known_tokens = [*task.forced_tokens, *blanks]
            self.slots[task.slot] = _Slot(task.delay_positions, known_tokens, pending_keywords=pending)
            self._bias.set_tree(task.slot, None)
            if pending is not None:
                self._without_keywords.add(task.slot)
        slots, delays = [task.slot for task in opened], [task.delay_positions for task in opened]
        self._state.set(slots, tokens=[STREAMING_PAD] * len(opened), delays=delays, runs=[0] * len(opened))

    def _set_keywords(self, tasks: list[DecodeTask], errors: dict[str, str]) -> set[int]:
        """Set the keywords that are ready. Returns the slots that must wait: their next output is not known beforehand,
        and their words must not depend on how long the preparation takes."""
        prefix, late = self.spec.prefix_positions, set[int]()
        futures = [pending for task in tasks if (pending := self._needed_keywords(task)) is not None]
        wait_briefly(futures)
        for task in tasks:
            slot = self.slots[task.slot]
            pending = slot.pending_keywords
            if pending is None:
                continue
            if not pending.done():
                if self._needed_keywords(task) is not None:
                    late.add(task.slot)
                continue
            self._without_keywords.discard(task.slot)
            slot.pending_keywords = None
            try:
                slot.keywords = pending.result()
            except Exception as error:
                logger.error("the keywords of stream %s cannot be used", task.stream, exc_info=error)
                errors[task.stream] = f"its keywords cannot be used ({type(error).__name__})"
                continue
            self._bias.set_tree(task.slot, slot.keywords)
            self._bias.set_state(task.slot, slot.keywords.state_after(slot.known_tokens[: task.start - prefix]))
        return late

    def _needed_keywords(self, task: DecodeTask) -> Future[KeywordTree] | None:
        """The keywords in preparation that a task needs, because one of its outputs is not known beforehand."""
        slot = self.slots[task.slot]
        is_known = task.end - self.spec.prefix_positions <= len(slot.known_tokens)
        return None if is_known else slot.pending_keywords

    def _update_tables(self, tasks: list[DecodeTask]) -> None:
        """Enter new pages into the tables, and copy the opening into the pages of new streams."""
        changed = [task for task in tasks if task.new_pages]
        if not changed:
            return
        for group, cache in enumerate(self._caches):
            cache.update_table(
                [
                    (task.slot, index, page)
                    for task in changed
                    for owner, index, page in task.new_pages
                    if owner == group
                ]
            )
        fresh = [task.slot for task in changed if not self.slots[task.slot].has_opening]
        if fresh:
            encoder, decoder = self._caches
            encoder.open_streams([0] * len(fresh), fresh)
            decoder.open_streams([self.slots[slot].delay - 1 for slot in fresh], fresh)
            for slot in fresh:
                self.slots[slot].has_opening = True

    # Decoding.

    def _rebuild(self, work: list[_Work]) -> Download | None:
        """Compute the positions with known tokens, in chunks of many streams. Returns a transfer that is complete when
        the device has finished, or None.

        A last chunk that would not be full starts earlier and computes some positions again, which changes nothing.
        Streams with few positions take shorter chunks; those with very few are left to the batched passes.
        """
        done: Download | None = None
        for size in self._chunk_sizes:
            # A chunk must have known tokens only, and some that are not computed yet.
            due = [item for item in work if size <= (known := self._known(item)) and known > item.done]
            chunks = [-(-(self._known(item) - item.done) // size) for item in due]
            for indices in chunk_passes(chunks, self._max_chunks(size)):
                done = self._run_chunks([due[index] for index in indices], size)
        rebuilt = [
            (item.task.slot, item.task.start - self.spec.prefix_positions + item.done) for item in work if item.done
        ]
        if not rebuilt:
            return None
        slots = [self.slots[slot] for slot, _ in rebuilt]
        self._state.set(
            [slot for slot, _ in rebuilt],
            [slot.known_tokens[known - 1] for slot, (_, known) in zip(slots, rebuilt, strict=True)],
            [slot.delay for slot in slots],
            [slot.blank_run(known) for slot, (_, known) in zip(slots, rebuilt, strict=True)],
        )
        for slot, (number, known) in zip(slots, rebuilt, strict=True):
            if slot.keywords is not None:
                self._bias.set_state(number, slot.keywords.state_after(slot.known_tokens[:known]))
        return done

    def _known(self, item: _Work) -> int:
        """Return the number of positions of a task with known tokens."""
        begin = item.task.start - self.spec.prefix_positions
        return min(item.task.end - item.task.start, len(self.slots[item.task.slot].known_tokens) - begin)

    def _run_chunks(self, due: list[_Work], size: int) -> Download:
        """Queue the next `size` positions of each stream, as one pass."""
        chunks = []
        for item in due:
            task, slot = item.task, self.slots[item.task.slot]
            first = min(item.done, self._known(item) - size)
            begin = task.start - self.spec.prefix_positions + first
            # The input token of a position is the output token of the position before it.
            input_tokens = slot.known_tokens[max(0, begin - 1) : begin + size - 1]
            if not begin:
                input_tokens = [STREAMING_PAD, *input_tokens]
            chunks.append(
                Chunk(task.slot, task.start + first, task.rows[first : first + size], input_tokens, slot.delay)
            )
            item.tokens += slot.known_tokens[begin + item.done - first : begin + size]
            item.done = first + size
        if size not in self._chunk_graphs:
            return Download(self.passes.chunks(chunks)[:1, :1].float())
        buffers, graphs = self._chunk_graphs[size]
        buffers.upload(chunks)
        graphs.run(len(chunks))
        return Download(buffers.done)

    def _run_batch(self, batch: list[_Work], payloads: Payloads) -> _Pass:
        """Queue the next position of each stream in `batch`, as one pass."""
        slots = [item.task.slot for item in batch]
        positions = [item.task.start + item.done for item in batch]
        inputs = [item.task.rows[item.done] for item in batch]
        self._buffers.upload(StepRows(slots, positions, inputs, self._forced_at(slots, positions)), payloads)
        if self._graphs is not None:
            self._graphs.run(len(batch))
        else:
            self.passes.batch(len(batch))
        for item in batch:
            item.done += 1
        return batch, self._buffers.download()

    def _forced_at(self, slots: list[int], positions: list[int]) -> list[int]:
        """Return the known output token of each position, or NOT_FORCED."""
        states, prefix = self.slots, self.spec.prefix_positions
        forced = []
        for slot, position in zip(slots, positions, strict=True):
            outputs, index = states[slot].known_tokens, position - prefix
            forced.append(outputs[index] if index < len(outputs) else NOT_FORCED)
        return forced
