"""Encodes and decodes the windows of many streams, on a CPU (`HostWindows`) or a device (`DeviceWindows`).

`WindowedRunner` (`runner.py`) uses one of them. To *read* a window is to encode its audio and to decode its text. The
runner knows streams, text and plans. These classes own the audio of all streams, the encoders with their state, and the
decoder, whose batches have one row (`Row`) per window.

On a CPU windows are read in parallel, one at a time by each thread: threads with separate windows do not hinder each
other as threads within one matrix product do. One window keeps a core busy, needs no padding, and its text cannot
depend on other streams. On a device windows are read in batches. `plan_windows` computes how many streams, and how
large a batch, fit into its memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.core.plan import DecodeResult, DecodeTask, EncodeTask
from engine.models.moonshine import Moonshine
from engine.models.seq2seq import Encoded, SpeechModel, inference_thread, prepare_kernels
from engine.models.whisper import Whisper
from engine.runner.device import GIB, NotEnoughMemory, compute_on_threads, gib
from engine.runner.windowed.decoder import Decode, GreedyDecoder, Judgement, Row, judge
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION, AudioSlab, EncodedAudio, StreamEncoder, WindowEncoder
from engine.runner.windowed.recorded_decoder import DecoderBuffers, RecordedDecoderBatch, Shapes
from engine.runner.windowed.stability import Policy
from engine.spec import ModelSpec

Results = dict[int, DecodeResult]
Result = TypeVar("Result")


class Windows(Protocol):
    """Audio of all streams, their encoders, and the decoder. Streams are identified by slot."""

    device: torch.device
    # Whether uploads are read in batches: then new ones wait until the batch before is done.
    batches_uploads: bool
    upload_encoder: WindowEncoder

    def write(self, tasks: Sequence[EncodeTask]) -> None:
        """Store new audio."""

    def audio(self, task: DecodeTask) -> Tensor:
        """[1, samples] of the task's whole window."""

    def is_broken(self, task: DecodeTask) -> bool:
        """Whether its audio has NaN or infinite values."""

    def stream_encoder(self, live: bool) -> StreamEncoder:
        """The encoder with the state of live streams, or of uploads."""

    def encode(
        self, tasks: Sequence[DecodeTask], live: bool, wanted: Set[int]
    ) -> Generator[None, None, dict[int, EncodedAudio]]:
        """Encode; returns the encoded audio by slot. Yields after each piece of work. The caller may remove slots from
        `wanted` meanwhile: these are left out."""

    def passes(self, rows: Sequence[Row], encoded_audio: Sequence[EncodedAudio], live: bool) -> Iterator[None]:
        """Decode the rows, yielding after each pass. With `live` nothing else may be decoded in between."""

    def judge(self, encoded_audio: Sequence[EncodedAudio]) -> list[Judgement]:
        """Detect language and speech in the encoded audio before it is decoded."""

    def run_in_parts(self, tasks: Sequence[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
        """Call `read` for live tasks, in parts that can be read together; returns all results."""

    def run_in_pieces(self, readings: Sequence[Callable[[], bool]], time_is_up: Callable[[], bool]) -> None:
        """Continue readings in their order until the time is up. A reading that is called does at least one piece of
        work, and more while there is time; it returns whether it is done."""

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


def one() -> int:
    """The default of `encoder_threads`."""
    return 1


class HostWindows:
    """See `Windows`. `threads` read windows in parallel, the calling thread included. `decode`: a traced pass in place
    of `model.decode`.

    Windows of uploads are encoded on `encoder_threads()` threads. This may be more than one only if nothing else
    computes in this process, because the number applies to the whole process. The decoder's products are too small for
    several threads.
    """

    batches_uploads = False

    def __init__(
        self,
        model: SpeechModel,
        stream_encoder: StreamEncoder,
        file_encoder: WindowEncoder,
        cache_embeds: int,
        threads: int = 1,
        decode: Decode | None = None,
        encoder_threads: Callable[[], int] = one,
    ) -> None:
        self.device = torch.device("cpu")
        self._model = model
        self._encoder_threads = encoder_threads
        self.slab = AudioSlab(cache_embeds)
        self._encoder, self.upload_encoder = stream_encoder, file_encoder
        self.decoder = GreedyDecoder(model, decode=decode)
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "read", _number_thread, (count(1),)) if threads > 1 else None
        self.write, self.audio, self.is_broken = self.slab.write, self.slab.audio, self.slab.is_broken

    def stream_encoder(self, live: bool) -> StreamEncoder:
        return self._encoder if live else self.upload_encoder

    def encode(
        self, tasks: Sequence[DecodeTask], live: bool, wanted: Set[int]
    ) -> Generator[None, None, dict[int, EncodedAudio]]:
        encoded_audio: dict[int, EncodedAudio] = {}
        for task in tasks:
            if task.slot not in wanted:
                continue
            if live:
                encoded_audio[task.slot] = self._encoder.encode(task, self.audio(task))
            else:
                encoded_audio[task.slot] = yield from self._on_encoder_threads(
                    self.upload_encoder.encode_in_pieces(task, self.audio(task))
                )
            yield
        return encoded_audio

    def _on_encoder_threads(self, work: Generator[None, None, Result]) -> Generator[None, None, Result]:
        """Run a generator, each piece of it on the encoder's threads."""
        while True:
            threads = self._encoder_threads()
            if threads > 1:
                compute_on_threads(threads)
            try:
                next(work)
            except StopIteration as done:
                result: Result = done.value
                return result
            finally:
                if threads > 1:
                    compute_on_threads(1)
            yield

    def passes(self, rows: Sequence[Row], encoded_audio: Sequence[EncodedAudio], live: bool) -> Iterator[None]:
        return self.decoder.passes(list(rows), Encoded.stack([window.encoded for window in encoded_audio]))

    def judge(self, encoded_audio: Sequence[EncodedAudio]) -> list[Judgement]:
        return judge(self._model, Encoded.stack([window.encoded for window in encoded_audio]))

    def run_in_parts(self, tasks: Sequence[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
        """Each free thread reads one stream at a time. Streams are not batched, because a matrix product of many rows
        rounds differently than one of a single row."""
        waiting = deque(tasks)
        results: Results = {}
        for part in self._on_all_threads(len(tasks), lambda: _read_one_by_one(waiting, read)):
            results |= part
        return results

    def run_in_pieces(self, readings: Sequence[Callable[[], bool]], time_is_up: Callable[[], bool]) -> None:
        """Each free thread continues one reading at a time. Each thread does at least one piece."""
        waiting = deque(readings)
        self._on_all_threads(len(readings), lambda: _continue_one_by_one(waiting, time_is_up))

    def _on_all_threads(self, max_threads: int, work: Callable[[], Result]) -> list[Result]:
        """Call `work` on at most `max_threads` threads at once; returns the results. `work` takes tasks from a shared
        queue: with fixed parts one thread would wait for another."""
        helpers = min(self._threads, max_threads) - 1
        futures = [self._helpers.submit(work) for _ in range(helpers) if self._helpers]
        return [work(), *(future.result() for future in futures)]

    def warm_up(self) -> None:
        """Run all threads at once, so that each of them is warmed up."""
        ready = threading.Barrier(self._threads)
        helpers = [] if self._helpers is None else [self._helpers] * (self._threads - 1)
        warming = [helper.submit(self._warm_up, ready) for helper in helpers]
        self._warm_up(ready)
        for helper in warming:
            helper.result()

    @torch.inference_mode()
    def _warm_up(self, ready: threading.Barrier) -> None:
        """Read a second of noise, so that kernels and memory are ready before the first utterance."""
        ready.wait()
        prepare_kernels(self._model)
        noise = torch.randn(1, 12 * SAMPLES_PER_POSITION) * 0.01
        encoded = self._model.encode(noise, [noise.shape[1]])
        self.decoder.run([Row([], [], 8, None, encoded.audio[0])], encoded)

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()


def _read_one_by_one(waiting: deque[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
    """Read waiting tasks until the queue is empty. Several threads share it."""
    results: Results = {}
    while True:
        try:
            task = waiting.popleft()
        except IndexError:
            return results
        results |= read([task])


def _continue_one_by_one(waiting: deque[Callable[[], bool]], time_is_up: Callable[[], bool]) -> None:
    """Continue waiting readings until the queue is empty or the time is up. Several threads share the queue."""
    while True:
        try:
            continue_reading = waiting.popleft()
        except IndexError:
            return
        if not continue_reading() or time_is_up():
            return


def _number_thread(numbers: Iterator[int]) -> None:
    """Give this thread the next number, which selects its copy of the weights."""
    inference_thread.number = next(numbers)


# The memory plan of a device. `engine/runner/load.py` makes it before anything is allocated there, and `DeviceWindows`
# keeps to it.

# Most windows decoded as one batch. A larger batch would wait for the longest text in it.
MAX_ROWS = 128
# Most frames encoded at once: enough to keep a large device busy.
MAX_FRAMES_AT_ONCE = 24_000
# Most tokens of known text that the decoder takes in one pass, over all rows of a batch. Such a pass costs as many
# kernel launches as a pass that decodes one new token of each row.
MAX_TOKENS_AT_ONCE = 8_192
# Upper bound of the default number of streams: what the host can schedule. Less may fit into memory.
MAX_STREAMS = 1024
# Memory for libraries, CUDA graphs and fragmentation.
FIXED_BYTES = GIB
# The scheduler plans a step as if every window had the longest length. Most are much shorter, so a step that is planned
# for N longest windows may have up to this many times N windows, one batch row each.
ROWS_PER_WHOLE_WINDOW = 4


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """Memory plan of a windowed model on one device."""

    streams: int
    # Most rows (windows) of a decoding batch.
    rows: int
    # Most frames that are encoded at once, padding included.
    frames_at_once: int
    # Most tokens of known text that are read in one pass, over all rows.
    tokens_at_once: int
    weight_bytes: int
    stream_bytes: int
    batch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.batch_bytes + self.streams * self.stream_bytes

    @property
    def windows_per_step(self) -> int:
        """Windows of the longest length that the scheduler may plan for one step."""
        return max(2, self.rows // ROWS_PER_WHOLE_WINDOW)


def longest_window(spec: ModelSpec, policy: Policy) -> int:
    """Upper bound of the audio that is encoded for a window of a live stream, in samples: the longest window, and the
    context before a short one."""
    positions = spec.window_positions + policy.tail_gap + policy.tail_until
    return int(positions + 1) * SAMPLES_PER_POSITION


def plan_windows(
    model: Moonshine | Whisper,
    spec: ModelSpec,
    room: int,
    *,
    dtype: torch.dtype,
    longest: int,
    max_streams: int | None,
) -> WindowMemory:
    """Fit the model, a batch and `max_streams` streams (None: as many as fit) into `room` bytes. `longest`: longest
    window in samples. Raises NotEnoughMemory.
    """
    size, shape, frames = dtype.itemsize, model.decoder_shape, model.frames_of(longest)
    weights = sum(parameter.numel() for parameter in model.parameters()) * size
    # Audio of the window and around it, and of the utterance before.
    stream_bytes = (spec.embeds_for(live=True) + spec.window_positions) * SAMPLES_PER_POSITION * 4
    # Per token of known text: attention weights, and logits.
    token_bytes = shape.heads * frames * 10 + model.config.vocabulary * 8
    # Per row: cross keys and values as encoded and as copied for the decoder, and the decoder's own; a quarter more for
    # uploads.
    row_bytes = 2 * shape.layers * shape.heads * shape.dim * size * (2 * frames + model.max_tokens) * 5 // 4
    frame_bytes = model.peak_values_per_frame * size
    remaining = room - weights - FIXED_BYTES - (max_streams or 1) * stream_bytes
    rows = min(MAX_ROWS, remaining // 2 // row_bytes)
    frames_at_once = min(MAX_FRAMES_AT_ONCE, remaining // 8 // frame_bytes)
    tokens_at_once = min(MAX_TOKENS_AT_ONCE, remaining // 4 // token_bytes)
    if rows < 1 or frames_at_once < frames or tokens_at_once < model.max_tokens:
        reading = FIXED_BYTES + max(2 * row_bytes, 8 * frames * frame_bytes, 4 * model.max_tokens * token_bytes)
        streams = "a stream" if max_streams is None else f"{max_streams} streams"
        raise NotEnoughMemory(
            f"the model needs {gib(weights)} for its weights, {gib(reading)} to read windows and "
            f"{gib((max_streams or 1) * stream_bytes)} for {streams}; {gib(room)} are free"
        )
    batch_bytes = FIXED_BYTES + rows * row_bytes + frames_at_once * frame_bytes + tokens_at_once * token_bytes
    fits = (room - weights - batch_bytes) // stream_bytes
    return WindowMemory(
        streams=max_streams or min(MAX_STREAMS, fits),
        rows=rows,
        frames_at_once=frames_at_once,
        tokens_at_once=tokens_at_once,
        weight_bytes=weights,
        stream_bytes=stream_bytes,
        batch_bytes=batch_bytes,
    )


# Windows on a device: live streams are encoded and decoded in batches.
#
# Audio stays on the device, one row of the `AudioSlab` per position, so a step copies only row numbers and new audio to
# it. Windows are sorted by length, so that those encoded together need little padding; masks keep the rows of a batch
# independent. Each token of a batch costs one launch, one upload and one copy back (`recorded_decoder.py`). Uploads are
# decoded in buffers of their own and without recorded graphs, because live windows may be decoded between two of their
# passes.


class DeviceWindows:
    """See `Windows`. The model is on the device already; `longest` is its longest live window, in samples."""

    batches_uploads = True

    def __init__(
        self,
        model: SpeechModel,
        pieces: list[bytes],
        policy: Policy,
        memory: WindowMemory,
        cache_embeds: int,
        *,
        longest: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device = device
        self._model = model
        self._memory = memory
        self._longest = longest
        self.slab = AudioSlab(cache_embeds, device)
        self._encoder = WindowEncoder(model, pieces, policy, device)
        self.upload_encoder = WindowEncoder(model, pieces, policy, device)
        self.decoder = _RecordedDecoder(model, memory, model.frames_of(longest), device, dtype)
        self.write, self.audio, self.is_broken = self.slab.write, self.slab.audio, self.slab.is_broken

    def stream_encoder(self, live: bool) -> StreamEncoder:
        return self._encoder if live else self.upload_encoder

    def encode(
        self, tasks: Sequence[DecodeTask], live: bool, wanted: Set[int]
    ) -> Generator[None, None, dict[int, EncodedAudio]]:
        encoded_audio: dict[int, EncodedAudio] = {}
        stream_encoder = self._encoder if live else self.upload_encoder
        for batch in self._batches(tasks):
            present = [task for task in batch if task.slot in wanted]
            if present:
                encoded = stream_encoder.encode_batch(present, self.slab)
                encoded_audio |= {task.slot: window for task, window in zip(present, encoded, strict=True)}
                yield
        return encoded_audio

    def passes(self, rows: Sequence[Row], encoded_audio: Sequence[EncodedAudio], live: bool) -> Iterator[None]:
        batches = _encoded_batches(encoded_audio)
        if live:
            return self.decoder.recorded_passes(list(rows), batches)
        return self.decoder.passes(list(rows), Encoded.stack(batches))

    def judge(self, encoded_audio: Sequence[EncodedAudio]) -> list[Judgement]:
        return judge(self._model, Encoded.stack(_encoded_batches(encoded_audio)))

    def run_in_parts(self, tasks: Sequence[DecodeTask], read: Callable[[Sequence[DecodeTask]], Results]) -> Results:
        in_order = sorted(tasks, key=lambda task: len(task.rows))
        results: Results = {}
        for first in range(0, len(in_order), self._memory.rows):
            results |= read(in_order[first : first + self._memory.rows])
        return results

    def run_in_pieces(self, readings: Sequence[Callable[[], bool]], time_is_up: Callable[[], bool]) -> None:
        _continue_one_by_one(deque(readings), time_is_up)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode batches of all sizes, because libraries prepare kernels for each, then record the decoder. So a lack
        of memory appears before streams are admitted. Raises NotEnoughMemory."""
        try:
            frames = self._model.frames_of(self._longest)
            rows = max(1, self._memory.frames_at_once // frames)
            noise = 0.01 * torch.randn(rows, self._longest, device=self.device)
            for count in range(1, rows + 1):
                encoded = self._model.encode(noise[:count], [self._longest] * count)
            self.decoder.run([Row([], [], 2, None, frames) for _ in range(rows)], encoded)
            del noise, encoded
            self.decoder.record()
        except torch.OutOfMemoryError as error:
            raise NotEnoughMemory(
                f"the device ran out of memory; this engine planned {gib(self._memory.total_bytes)} for "
                f"{self._memory.streams} streams: set model.max_streams lower, or stop other programs there"
            ) from error

    def close(self) -> None:
        self.decoder.free()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _batches(self, tasks: Sequence[DecodeTask]) -> Iterator[list[DecodeTask]]:
        """Split tasks, in order, into batches that the encoder may encode at once."""
        batch: list[DecodeTask] = []
        longest = 0
        for task in tasks:
            frames = self._model.frames_of(len(task.rows) * SAMPLES_PER_POSITION)
            longest = max(longest, frames)
            if batch and (len(batch) + 1) * longest > self._memory.frames_at_once:
                yield batch
                batch, longest = [], frames
            batch.append(task)
        if batch:
            yield batch


class _RecordedDecoder(GreedyDecoder):
    """A decoder that also decodes live batches with the recorded graphs of a `DecoderBuffers`."""

    def __init__(
        self, model: SpeechModel, memory: WindowMemory, frames: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(model, device)
        # A model with a fixed context has windows of one length.
        shapes = Shapes.up_to(memory.rows, frames, model.max_tokens, max(200, model.frames_of(model.min_samples)))
        self._buffers: DecoderBuffers | None = DecoderBuffers(
            model, self._suppressed, shapes, dtype, memory.tokens_at_once, records=device.type == "cuda"
        )

    def record(self) -> None:
        assert self._buffers is not None
        self._buffers.record()

    def free(self) -> None:
        """Free the buffers and the graphs."""
        self._buffers = None

    def recorded_passes(self, rows: list[Row], batches: Sequence[Encoded]) -> Iterator[None]:
        """As `passes`, in the buffers, for windows that were encoded in several batches."""
        audio_frames, buffers = [row.frames for row in rows], self._buffers
        assert buffers is not None
        return self._passes(
            rows, lambda text_tokens: RecordedDecoderBatch(self._model, buffers, batches, audio_frames, text_tokens)
        )


def _encoded_batches(encoded_audio: Sequence[EncodedAudio]) -> list[Encoded]:
    """The batches in which this audio was encoded, without the rows of other audio."""
    rows: dict[int, list[int]] = {}
    batches: dict[int, Encoded] = {}
    for window in encoded_audio:
        batches[id(window.encoded)] = window.encoded
        rows.setdefault(id(window.encoded), []).append(window.row)
    return [batches[batch].select(batch_rows) for batch, batch_rows in rows.items()]
