"""One stream as the gateway sees it (`EngineStream`): audio in, outputs out, whichever engine runs it at the moment.

`EngineClient.open` makes it; the live session in `realtime/serving` feeds it and reads its outputs; supervisor,
recovery and migration move it between engines. Everything runs in the gateway's event loop. Its parts: `Placement`
converts between the engine's count of positions and samples and the stream's own, `Delivery` sends commands and replays
in order, `Outputs` queues the outputs, and `PreviousEngine` is the engine that a migrating stream leaves.

Two counts: the stream's own count begins with its first sample. An engine that continues a stream counts from the first
item that it is sent. Outside `Placement` only the stream's own count is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from engine import messages
from engine.boundary.crash_suspects import CrashSuspicion
from engine.boundary.items import check_samples, make_cutter, prepare
from engine.boundary.replay import (
    JOINED_POSITIONS,
    FlushRequest,
    Replay,
    ReplayEntry,
    ReplayLog,
    StreamLimits,
    TurnRuleChange,
    join,
    join_replayed,
    replay_state_for,
)
from engine.client.link import EngineLink, ItemRefused, Queued
from engine.errors import (
    AtCapacity,
    BadOption,
    DuplicateStream,
    EngineError,
    EngineUnavailable,
    EngineUnreachable,
    StreamFailed,
    StreamFinished,
)
from engine.messages import Item
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Items of a replay in one command, before they are joined: what a rebuild computes of a stream in one step
# (`ModelSpec.replay_positions`), and few enough for several streams to be sent in turn.
REPLAY_ITEMS = 4 * JOINED_POSITIONS
# Outputs that may wait for a reader before the stream accepts no more audio.
MAX_QUEUED_OUTPUTS = 1024
# Outputs after which a stream has ended.
_FINAL = (messages.Closed, messages.Failed, messages.Dead)
# After this time without audio, silence is fed to a live stream that has an unanswered flush.
QUIET_LINE_SECONDS = 0.3
# Audio that is sent later, several appends in one message, waits for this long at most: silence that the engine skips,
# and all audio while the engine's one thread is busy. For that thread a message is work, whatever it contains. It is
# the time of the most positions that the engine asks for.
HELD_SECONDS = 0.32
# Audio that is this much louder than the silence before it (in power) may be speech, and is sent at once. Quieter audio
# than the second value never is speech: -70 dB of full scale.
LOUDER, INAUDIBLE_POWER = 4.0, 1e-7
# How fast the level of the silence follows the audio. Louder audio raises it by little, because it may be speech.
LEVEL_SECONDS = 1.0
# A stream whose engine has this many seconds of audio to compute is late.
LATE_SECONDS = 1.0
# Most seconds of audio that wait, of a client that sends faster than people speak.
MAX_HELD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class HandoffTarget:
    """The engine from which another gateway could adopt a stream."""

    link: EngineLink
    # Number of the engine's outputs of the stream that were read here.
    read_count: int = 0
    # Offsets in positions and samples: the stream's count minus the engine's.
    offsets: tuple[int, int] = (0, 0)


class Placement:
    """The engine that runs a stream, how far it has computed, and the offset between its count and the stream's."""

    def __init__(self, spec: ModelSpec) -> None:
        self.link: EngineLink | None = None
        # Time of the loss of the engine, until another one continues the stream.
        self.lost_at: float | None = None
        # Positions below this were computed, on this engine or an earlier one.
        self.computed = spec.prefix_positions
        self._spec = spec
        # Like `computed`, but only on this engine, which may compute replayed audio again.
        self._computed_on_this_engine = spec.prefix_positions
        # Whether this engine has sent new words of the stream, or its end.
        self._has_new_words = False
        # Offsets: the stream's count minus the engine's.
        self._position_offset = 0
        self._sample_offset = 0
        # The stream counts as recovered when the new engine has computed the positions below this one.
        self._recovered_at = 0

    def begin(self, link: EngineLink, replay: Replay) -> None:
        """This engine runs the stream from now on; it is sent the replay first."""
        self.link = link
        self._position_offset, self._sample_offset = replay.positions, replay.samples
        self._computed_on_this_engine = replay.positions + self._spec.prefix_positions
        self._has_new_words = False

    @property
    def offsets(self) -> tuple[int, int]:
        """In positions and samples: the stream's count minus the engine's."""
        return self._position_offset, self._sample_offset

    def lose(self, now: float, end: int) -> None:
        """The engine is lost; the audio so far ends at position `end`."""
        self.link = None
        if self.lost_at is None:
            self.lost_at = now
        # A windowed model computes whole strides: up to one position less than a stride stays uncomputed.
        all_computed = end - (self._spec.stride_positions - 1)
        self._recovered_at = min(all_computed, self.computed + 1)

    def progress(self, computed: int) -> None:
        """The engine has computed the positions below `computed`, on its own count."""
        self._computed_on_this_engine = computed + self._position_offset
        self.computed = max(self.computed, self._computed_on_this_engine)

    @property
    def is_recovered(self) -> bool:
        """Whether the new engine has computed beyond the point where the old one stopped."""
        return self.link is not None and (self._has_new_words or self._computed_on_this_engine >= self._recovered_at)

    def note_new_words(self) -> None:
        """This engine sent new words of the stream, or its end. Its report of progress may come later."""
        self._has_new_words = True

    def uncomputed(self, end: int) -> range:
        """Positions that the engine may have been computing when it died, if the audio sent to it ends at `end`."""
        return range(self._computed_on_this_engine, end)

    def to_stream_positions(self, start: int, end: int) -> range:
        """Convert positions from the engine's count to the stream's."""
        return range(start + self._position_offset, end + self._position_offset)

    def to_engine_positions(self, positions: range) -> tuple[int, int]:
        """Convert positions from the stream's count to the engine's."""
        return positions.start - self._position_offset, positions.stop - self._position_offset

    def to_engine(self, items: Sequence[Item]) -> list[Item]:
        """Convert the items from the stream's count to the engine's."""
        positions, samples = self._position_offset, self._sample_offset
        if not positions:
            return list(items)
        return [structs.replace(item, offset=item.offset - positions, sample=item.sample - samples) for item in items]

    def sample_to_engine(self, sample: int | None) -> int | None:
        return None if sample is None else max(0, sample - self._sample_offset)

    def from_engine(self, output: messages.Output) -> None:
        """Convert the samples in an output from the engine's count to the stream's, in place."""
        samples = self._sample_offset
        if not samples:
            return
        match output:
            case messages.Text():
                output.sample += samples
                for word in output.words:
                    word.start_sample += samples
                    word.end_sample += samples
            case messages.Speech():
                output.shift(samples)
            case messages.Flushed() | messages.Closed():
                output.sample += samples
            case messages.Revised():
                output.start, output.end = output.start + samples, output.end + samples
                for word in output.words or ():
                    word.start_sample += samples
                    word.end_sample += samples
            case messages.Labels():
                output.decided, output.guess = (
                    [(start + samples, end + samples, speaker, sure) for start, end, speaker, sure in spans]
                    for spans in (output.decided, output.guess)
                )
                output.settled += samples if output.settled else 0
            case _:
                pass


class Delivery:
    """Sends one stream's commands to the engine that runs it, in order.

    It sends Open at once. When the engine has accepted the stream, the replay is sent in pieces, as the link asks for
    them (`next_piece`, the interface `PacedSource`); later commands are sent after it. `on_done` is called when all of
    the replay has been sent.
    """

    def __init__(
        self,
        link: EngineLink,
        opening: messages.Open,
        replay: Replay,
        spec: ModelSpec,
        finished: bool,
        on_done: Callable[[], None],
    ) -> None:
        # Whether the engine has accepted the stream.
        self.is_open = False
        self._tokens, self._spec = replay.forced_tokens, spec
        # Positions below this have been sent.
        self._sent_until = spec.prefix_positions
        self._stream = opening.stream
        self._link = link
        self._on_done = on_done
        self._opening: Queued | None = None
        self._waiting = deque(_commands(opening.stream, replay.entries, finished))
        if replay.before_state:
            # A saved state is sent together with its audio, so this Open is large and is sent in turn with other
            # replays.
            self._opening = (opening, replay.before_state)
            link.send_paced(self)
        else:
            link.send(opening)

    @classmethod
    def of_open_stream(cls, link: EngineLink, stream: str, spec: ModelSpec) -> Delivery:
        """A delivery to an engine that runs the stream already. The constructor would send an Open."""
        delivery = cls.__new__(cls)
        delivery.is_open, delivery._stream, delivery._link = True, stream, link
        delivery._opening, delivery._waiting, delivery._tokens, delivery._spec = None, deque(), [], spec
        delivery._sent_until = spec.prefix_positions
        delivery._on_done = lambda: None
        return delivery

    @property
    def is_done(self) -> bool:
        """Whether all commands so far have been sent to the engine."""
        return self.is_open and not self._waiting

    def send(self, command: messages.Command, items: list[Item] | None = None) -> None:
        if self.is_open and not self._waiting:
            self._link.send(command, items)
        else:
            self._waiting.append((command, items or []))

    def opened(self) -> None:
        """The engine has accepted the stream: send the replay."""
        self.is_open = True
        if self._waiting:
            self._link.send_paced(self)
        else:
            self._on_done()

    @property
    def is_rebuilt(self) -> bool:
        return self._spec.rereads_window or self._sent_until < self._spec.prefix_positions + len(self._tokens)

    def next_piece(self) -> Queued | None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return opening
        if not self.is_open or not self._waiting:
            return None
        command, items = self._waiting.popleft()
        if not self._spec.rereads_window:
            items = join_replayed(self._with_next(items), self._tokens, self._spec)
            if items:
                self._sent_until = items[-1].offset + items[-1].length
        if not self._waiting:
            self._on_done()
        return command, items

    def _with_next(self, items: list[Item]) -> list[Item]:
        """These items of a Feed, with those of the next ones, `REPLAY_ITEMS` in all. Audio that came while the replay
        waited is in commands of one item."""
        items = list(items)
        while items and self._waiting and len(items) + len(self._waiting[0][1]) <= REPLAY_ITEMS:
            if not isinstance(self._waiting[0][0], messages.Feed):
                break
            items += self._waiting.popleft()[1]
        return items

    def abort(self) -> bool:
        """Send nothing more, and make the engine drop the stream. Returns False if the Open was never sent."""
        self._waiting.clear()
        if self._opening is not None:
            self._opening = None
            return False
        self._link.send(messages.Abort(self._stream))
        return True


def _commands(stream: str, entries: Iterable[ReplayEntry], finished: bool) -> Iterable[Queued]:
    """Yield the commands that a replay consists of."""
    run: list[Item] = []
    for entry in entries:
        if run and (not isinstance(entry, Item) or len(run) == REPLAY_ITEMS):
            yield messages.Feed(stream, []), run
            run = []
        if isinstance(entry, FlushRequest):
            yield messages.Flush(stream, entry.tag, entry.pause, entry.ends_speech), []
        elif isinstance(entry, TurnRuleChange):
            yield messages.ChangeTurns(stream, entry.turns), []
        else:
            run.append(entry)
    if run:
        yield messages.Feed(stream, []), run
    if finished:
        yield messages.Finish(stream), []


class Outputs:
    """The outputs of a stream: passed to a listener as they come, or queued and read by iteration until the last one.

    No speech is reported twice: what was reported before a replay is removed. `on_read` is called when an output has
    been read, so that there is room for more.
    """

    def __init__(self, sample_rate: int, on_read: Callable[[], None]) -> None:
        self._sample_rate = sample_rate
        self._on_read = on_read
        # (sequence number of the output on this engine, output)
        self._queue: deque[tuple[int, messages.Output]] = deque()
        # Sequence numbers on this engine of the last output read, and of the last one received.
        self.read_count = 0
        self.received_count = 0
        self._has_output = asyncio.Event()
        self._listener: Callable[[messages.Output], None] | None = None
        # Speech before this sample has been reported.
        self.reported_until = 0
        # The state of the speech track after it; None if no speech was reported.
        self.track: messages.TrackState | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) >= MAX_QUEUED_OUTPUTS

    def put(self, output: messages.Output | None) -> None:
        if output is None:
            return
        if self._listener is not None:
            self.read_count = self.received_count
            self._listener(output)
        else:
            self._queue.append((self.received_count, output))
            self._has_output.set()

    def subscribe(self, listener: Callable[[messages.Output], None]) -> None:
        """Pass each output to the listener as it comes. The listener must not block or raise."""
        self._listener = listener
        while self._queue:
            self.read_count, output = self._queue.popleft()
            listener(output)

    @property
    def speech_continues(self) -> bool:
        """Whether there is speech at the end of the last reported frame."""
        return self.track is not None and self.track.speaking

    def adopt(self, read_count: int, reported_until: int, track: messages.TrackState | None) -> None:
        """Continue for another gateway, which has read `read_count` outputs of this engine, and speech up to this
        sample."""
        self.begin(read_count)
        self.reported_until, self.track = reported_until, track

    def begin(self, sent_count: int) -> None:
        """Another engine runs the stream and has sent `sent_count` outputs of it before.

        Queued outputs of the former engine get this number, so that reading them acknowledges none of the new engine's.
        """
        self._queue = deque((sent_count, output) for _, output in self._queue)
        self.read_count = self.received_count = sent_count

    def put_speech(self, speech: messages.Speech) -> None:
        """Put the part that was not reported before: an engine that continues a stream reports some speech again."""
        new = self._new_part(speech)
        self.track = self.track if new is None else new.track
        self.put(new)

    async def __aiter__(self) -> AsyncIterator[messages.Output]:
        while True:
            while self._queue:
                self.read_count, output = self._queue.popleft()
                self._on_read()
                yield output
                if isinstance(output, _FINAL):
                    return
            self._has_output.clear()
            await self._has_output.wait()

    def _new_part(self, speech: messages.Speech) -> messages.Speech | None:
        """Return the part that was not reported before (the audio may be a replay), or None."""
        if speech.sample >= self.reported_until and speech.frame_samples and speech.probabilities:
            self.reported_until = speech.sample + len(speech.probabilities) * speech.frame_samples
            return speech
        if speech.frame_samples > self._sample_rate and speech.sample < self.reported_until:
            # A frame of more than a second is a long silence. Return only the samples that were not reported.
            old_samples = min(self.reported_until - speech.sample, speech.frame_samples)
            speech.sample, speech.frame_samples = speech.sample + old_samples, speech.frame_samples - old_samples
        if not speech.frame_samples:
            return None
        old_frames = max(0, -(-(self.reported_until - speech.sample) // speech.frame_samples))
        probabilities = speech.probabilities[old_frames:]
        if not probabilities:
            return None
        sample, reported = speech.sample + old_frames * speech.frame_samples, self.reported_until
        self.reported_until = sample + len(probabilities) * speech.frame_samples
        events = [event for event in speech.events if event.at > reported]
        return structs.replace(speech, sample=sample, probabilities=probabilities, events=events)


def error_of(failed: messages.Failed) -> EngineError | ValueError:
    """Return the error for a stream that an engine ended."""
    text = failed.message.removeprefix(f"stream {failed.stream!r}: ")
    if failed.code == AtCapacity.__name__:
        return AtCapacity(failed.stream, text)
    if failed.code == BadOption.__name__:
        return ValueError(text)
    return StreamFailed(failed.stream, text)


class PreviousEngine:
    """The engine that a migrating stream leaves.

    It keeps the stream until the new engine has all of its audio and also the session's handoff. So at any moment
    another gateway can adopt session and stream from one engine.
    """

    def __init__(self, stream: str) -> None:
        # Whether the session has a handoff, which is saved on the engine that runs the stream.
        self.has_handoff = False
        # The previous engine, until the new one has all audio of the stream.
        self.sending_rest: HandoffTarget | None = None
        self._stream = stream
        # The previous engine after that, until the new one has the handoff too.
        self._waiting_for_handoff: HandoffTarget | None = None

    def begin(self, target: HandoffTarget | None) -> None:
        self.end()
        self.sending_rest = target

    def settle(self) -> None:
        """The new engine has all audio of the stream."""
        if self.sending_rest is not None:
            self._waiting_for_handoff, self.sending_rest = self.sending_rest, None
            if not self.has_handoff:
                self.release()

    def release(self) -> None:
        """The new engine has the session's handoff too: make the previous one drop the stream."""
        previous, self._waiting_for_handoff = self._waiting_for_handoff, None
        if previous is not None:
            previous.link.send(messages.Abort(self._stream))

    def end(self) -> None:
        """Make previous engines that still have the stream drop it."""
        self.release()
        self._waiting_for_handoff, self.sending_rest = self.sending_rest, None
        self.release()

    def is_on(self, link: EngineLink) -> bool:
        return any(
            target is not None and target.link is link for target in (self.sending_rest, self._waiting_for_handoff)
        )


class HeldAudio:
    """Audio of a stream that is sent later, several appends in one message. No word depends on it, because the engine
    gets the same items a little later.

    Silence that the engine skips (`Speech.skipped`) waits, and is sent at once together with audio that may be the
    beginning of speech. Other audio waits while the engine asks for messages of several positions
    (`Status.message_positions`).
    """

    def __init__(self, sample_rate: int) -> None:
        self.pieces: list[NDArray[np.float32]] = []
        self._samples = 0
        self._max_samples = int(MAX_HELD_SECONDS * sample_rate)
        # A longer append does not wait: there would be no second one in the message.
        self._longest_append = int(HELD_SECONDS * sample_rate)
        self._level_samples = LEVEL_SECONDS * sample_rate
        # Whether the engine skips the stream's silence at present.
        self.is_skipped = False
        # Power of the silence, a moving average; None before the first append.
        self._level: float | None = None

    def note(self, is_skipped: bool) -> None:
        """The engine has reported whether it skips silence."""
        if is_skipped != self.is_skipped:
            self.is_skipped, self._level = is_skipped, None

    def add(self, samples: NDArray[np.float32]) -> None:
        self.pieces.append(samples.copy())  # the caller may use its array again
        self._samples += len(samples)

    def may_wait(self, samples: NDArray[np.float32], message_samples: int, sent: int) -> bool:
        """Whether these samples may wait for the next ones: they are as quiet as the skipped silence before them, or no
        message of `message_samples` ends in them. `sent`: samples of the stream before those that wait. Raises
        ValueError as the cutter would."""
        if not self.is_skipped and not message_samples:
            return False
        check_samples(samples)
        count = len(samples)
        if not self.is_skipped:
            # Messages end at multiples of their length. Streams begin at different times, so their messages are spread
            # over the time, also after all have changed the length at once.
            end = sent + self._samples + count
            return 0 < count and sent // message_samples == end // message_samples
        if not 0 < count < self._longest_append or self._samples + count > self._max_samples:
            return False
        power, level = float(np.dot(samples, samples)) / count, self._level
        if level is None:
            self._level = power
            return False
        limit = max(INAUDIBLE_POWER, LOUDER * level)
        self._level = level + (min(limit, power) - level) * count / self._level_samples
        return power <= limit

    def take(self) -> list[NDArray[np.float32]]:
        """Return and clear the pieces."""
        pieces, self.pieces, self._samples = self.pieces, [], 0
        return pieces


class EngineStream:
    """A stream, made by `EngineClient.open`; iterate over it for its outputs until it ends."""

    def __init__(
        self, opening: messages.Open, spec: ModelSpec, limits: StreamLimits, on_end: Callable[[EngineStream], None]
    ) -> None:
        self.id = opening.stream
        self.placement = Placement(spec)
        self.suspicion = CrashSuspicion()
        self._opening = opening
        # Changes of the rule that reported speech does not reflect yet: (sample of the change, new rule).
        self._rules: deque[tuple[int, messages.TurnRule | None]] = deque()
        self._spec = spec
        self._limits = limits
        self._on_end = on_end
        self._cutter = make_cutter(spec)
        # Samples that follow those of the cutter and are sent later.
        self._held = HeldAudio(spec.sample_rate)
        self._held_timer: asyncio.TimerHandle | None = None
        # Called when held audio was sent.
        self.on_held_sent: Callable[[], None] | None = None
        # The commands with which another engine can rebuild the stream.
        self.replay_log = ReplayLog(spec)
        # What the model has computed and another engine needs besides them.
        self._replay_state = replay_state_for(spec, limits.keep_positions)
        self.outputs = Outputs(spec.sample_rate, self.wake)
        self.outputs.reported_until, self.outputs.track = opening.heard_until, opening.track
        # Flushes have the tags 1, 2, 3 ...; the tags of those that were not answered yet.
        self._last_tag = 0
        self._unanswered: set[int] = set()
        # Whether an engine has ever accepted the stream.
        self.was_opened = False
        self._finished = self._aborted = self._ended = False
        # Whether the stream is fed items that the client prepared, and no samples.
        self._prepared_only = False
        self._room = asyncio.Event()
        self._opened: asyncio.Future[None] | None = None
        # Sends to the engine that runs the stream now, or is asked to.
        self._delivery: Delivery | None = None
        self.previous_engine = PreviousEngine(self.id)
        # The last state of the speaker labels, and the stream's sample that is sample 0 in this state.
        self._labels, self._labels_start = opening.labels, -opening.labels_earlier

    # Called by the gateway.

    async def feed(self, samples: NDArray[np.float32]) -> None:
        """Feed samples at the model's rate; waits while the engine is too far behind or the output queue is full."""
        self._check_open()
        if self._prepared_only:
            raise StreamFinished(self.id, "was fed prepared items; open another stream for samples")
        second = self._spec.sample_rate
        for start in range(0, len(samples), second):
            if start:
                await asyncio.sleep(0)  # a long recording must not block the event loop
            await self._wait_for_room()
            self._cut_and_send(samples[start : start + second])

    def feed_now(self, samples: NDArray[np.float32]) -> bool:
        """Feed at most a second of audio if that is possible without waiting; returns whether it was fed."""
        is_short = len(samples) <= self._spec.sample_rate
        if not is_short or self._finished or self._prepared_only or not self._has_room():
            return False
        self._cut_and_send(samples)
        return True

    async def gap(self, samples: int) -> None:
        """Feed silence of this many samples without sending any audio."""
        await self._wait_for_room()
        self._send_held()
        self._send_items(prepare(self._cutter, self._cutter.cut_gap(samples), self._spec))

    async def feed_items(self, items: Sequence[Item | None]) -> None:
        """Feed consecutive items prepared elsewhere; an item needs only its hash if the engine holds the data.

        Raises ItemRefused, and then none of them was fed.
        """
        self._check_open()
        if self._cutter.samples_in or self.holds_audio:
            raise StreamFinished(self.id, "was fed samples; open another stream for prepared items")
        await self._wait_for_room()
        link = self.placement.link
        if link is None:
            raise EngineUnreachable("the engine is being restarted; send the items again")
        checked = link.item_checker.check(items)
        arriving = {item.key for item in checked if item.payload is not None}
        for item in checked:
            if item.key and item.payload is None and item.key not in arriving and item.key not in link.cache:
                raise ItemRefused(f"the engine has never seen {item.key.hex()}; send the item's data with its hash")
        self._prepared_only = True
        if checked:
            positions = self.replay_log.end - checked[0].offset
            samples = self.replay_log.end_sample - checked[0].sample
            self._send_items(
                [
                    structs.replace(item, offset=item.offset + positions, sample=item.sample + samples)
                    for item in checked
                ]
            )

    async def flush(self, pause: int | None = None, ends_speech: bool = False, turn_over: bool = False) -> int:
        """Ask for the text of everything fed so far; `Flushed` carries the returned tag.

        `ends_speech`: the client itself ended the turn here. `turn_over`: our rule ended the turn before the pause.

        With a `pause`, only the text before this sample is wanted, which lies in silence. The audio is then cut into
        positions as if there were no flush, so the following words do not depend on when this was called. A live
        stream of a model with a delay gets no inserted silence then: the model emits the words with the audio that
        follows. An upload to a model with a delay ignores `pause`.
        """
        await self._wait_for_room()
        self._send_held()
        if pause is None or not (self._spec.rereads_window or self._opening.live):
            pause = None
            self._send_items(self._cut_rest())
        self._last_tag += 1
        self.replay_log.mark_flush(self._last_tag, self._unanswered, pause, ends_speech)
        self._unanswered.add(self._last_tag)
        at = self.placement.sample_to_engine(pause)
        self._send(messages.Flush(self.id, self._last_tag, at, ends_speech, turn_over))
        if pause is not None:
            self._answer_flush_later()
        return self._last_tag

    def change_turns(self, turns: messages.TurnRule | None) -> None:
        """Use another rule for the ends of turns from here on."""
        self._send_held()
        self.replay_log.mark_turns(turns)
        if not self._spec.rereads_window:  # the saved state of a windowed model has the rule
            self._rules.append((self.replay_log.end_sample, turns))
        self._send(messages.ChangeTurns(self.id, turns))

    async def finish(self) -> None:
        """No more audio follows; the outputs end with `Closed` after the last text."""
        self._check_open()
        self._send_held()
        self._send_items(self._cut_rest())
        self._finished = True
        self._send(messages.Finish(self.id))

    async def abort(self) -> None:
        """Drop the stream now. Does nothing if it has ended."""
        if self._ended:
            return
        self._finished = self._aborted = True
        self._drop_held()
        if self._delivery is None or not self._delivery.abort():
            self.end(messages.Closed(self.id, self.replay_log.end_sample))

    def __aiter__(self) -> AsyncIterator[messages.Output]:
        return aiter(self.outputs)

    def subscribe(self, listener: Callable[[messages.Output], None]) -> None:
        """Pass each output to the listener as it comes, instead of iteration. The listener must not raise."""
        self.outputs.subscribe(listener)

    @property
    def target(self) -> HandoffTarget | None:
        """The engine from which another gateway could adopt the stream; None while no engine has all of it."""
        leaving = self.previous_engine.sending_rest
        if leaving is not None:
            return leaving if leaving.link.lost is None else None
        if self.placement.link is None or self._delivery is None or not self._delivery.is_done:
            return None
        return HandoffTarget(self.placement.link, self.read_count, self.placement.offsets)

    @property
    def read_count(self) -> int:
        """Number of outputs read that came from the engine that runs the stream now."""
        return self.outputs.read_count

    def rest(self) -> NDArray[np.float32]:
        """Return audio that was fed and not yet sent to the engine, with the context before it. Empty during a
        migration: an adopting gateway would continue on the previous engine, and the client sends the audio again."""
        if self.previous_engine.sending_rest is not None:
            return np.zeros(0, np.float32)
        return np.concatenate([self._cutter.rest(), *self._held.pieces])

    @property
    def holds_audio(self) -> bool:
        """Whether audio that was fed is sent later (`HeldAudio`)."""
        return bool(self._held.pieces)

    def release(self) -> None:
        """The stream continues at another gateway: send nothing more, and deliver no more outputs here."""
        if self.previous_engine.sending_rest is not None and self._delivery is not None:
            self._delivery.abort()
        self._delivery = self.placement.link = None
        self._drop_held()
        if not self._ended:
            self._ended = True
            self._room.set()
            self._on_end(self)

    # Called by the other parts of the engine client.

    async def open_on(self, link: EngineLink) -> None:
        """Open or reopen the stream on this engine and replay the kept audio.

        Raises the engine's error, or EngineUnavailable; then no engine runs the stream.
        """
        if not self._replay_state.can_replay:
            raise StreamFailed(
                self.id,
                "lost its engine soon after this gateway adopted it; too little of its audio is kept to rebuild it",
            )
        if self.previous_engine.is_on(link):
            self.previous_engine.end()
        self._opened = opened = asyncio.get_running_loop().create_future()
        self.outputs.begin(0)
        replay = self._replay_state.replay(self.replay_log)
        self.placement.begin(link, replay)
        suspicion = self.suspicion
        # Without a saved state, a windowed model judges all of its audio again, from the track at the stream's
        # beginning.
        track = self._opening.track if self._spec.rereads_window else self.outputs.track
        turns = self._opening.turns
        while self._rules and self._rules[0][0] < self.outputs.reported_until:
            turns = self._rules.popleft()[1]
        self._opening.turns = turns
        opening = structs.replace(
            self._opening,
            track=None if track is None else track.shifted(-replay.samples),
            forced_tokens=replay.forced_tokens,
            state=replay.state,
            catch_up_until=replay.catch_up_until,
            suspect=self.placement.to_engine_positions(suspicion.spot) if suspicion.keep_apart else None,
            sample=replay.sample,
            segment=max(0, self._cutter.segment - replay.samples),
            heard_until=max(0, self.outputs.reported_until - replay.samples),
            flushes=self._last_tag,
            answered=min(self._unanswered, default=self._last_tag + 1) - 1,
            labels=self._labels,
            labels_earlier=replay.samples - self._labels_start,
        )
        self._delivery = Delivery(link, opening, replay, self._spec, self._finished, self.previous_engine.settle)
        try:
            await opened
        except (EngineError, ValueError):
            self._leave_engine()
            raise

    def adopt_from(self, link: EngineLink, adopted: messages.SessionGiven) -> int:
        """Continue a stream that this engine has run for another gateway. Returns the sample from which on audio has to
        be fed."""
        positions, samples = adopted.position_offset, adopted.sample_offset
        end, sample = adopted.end + positions, adopted.sample + samples
        self.placement.begin(link, Replay(positions, samples, []))
        self.replay_log.end, self.replay_log.end_sample = end, sample
        if adopted.kept is None:
            self._replay_state.start_at(end, adopted.token + positions)
        else:
            self.replay_log.load_commands(adopted.kept)
            if adopted.state is not None:
                self._replay_state.on_state(adopted.state)
        self._labels, self._labels_start = adopted.labels, samples
        self._last_tag = adopted.flushes
        self._unanswered = set(range(adopted.answered + 1, adopted.flushes + 1))
        self._answer_flush_later()
        track = None if adopted.track is None else adopted.track.shifted(samples)
        self.outputs.adopt(adopted.consumed, adopted.heard_until + samples, track)
        self.was_opened = True
        self._delivery = Delivery.of_open_stream(link, self.id, self._spec)
        return self._cutter.continue_from(end, sample, adopted.segment + samples)

    @property
    def can_migrate(self) -> bool:
        """Whether the stream can migrate now without a change of its words.

        All outputs must have been read, and the kept audio must be enough for an exact replay.
        """
        is_settled = self.target is not None and self.previous_engine.sending_rest is None and not len(self.outputs)
        return is_settled and self.is_open and not self._aborted and self._replay_state.replays_exactly(self.replay_log)

    @property
    def is_silent(self) -> bool:
        """Whether the engine skips the audio, which has been silent for some time."""
        return self._held.is_skipped

    @property
    def behind_s(self) -> float:
        """Seconds of audio that the engine has not computed."""
        behind = self.replay_log.end - self.placement.computed
        return behind * self._spec.samples_per_position / self._spec.sample_rate

    @property
    def is_at_pause(self) -> bool:
        """Whether there is silence, and no flush is unanswered."""
        return not self.outputs.speech_continues and not self._unanswered

    def start_migration(self, now: float) -> None:
        """Leave the engine for another one. The old one keeps the stream until the new one has all of it."""
        self.previous_engine.begin(self.target)
        self.placement.lose(now, self.replay_log.end)
        self._leave_engine()

    @property
    def is_open(self) -> bool:
        """Whether the last output has not come yet."""
        return not self._ended

    def cancel_opening(self) -> None:
        """The caller gave up while the stream was being opened: abort it and deliver no outputs."""
        if self._delivery is not None:
            self._delivery.abort()
        self._ended = True

    def abort_everywhere(self) -> None:
        """The stream is not needed any more, here or at another gateway: abort it on all engines."""
        if self._delivery is not None:
            self._delivery.abort()
        self.previous_engine.end()
        self.release()

    def detach(self, why: str, now: float) -> None:
        """The engine is lost. Until another one runs the stream, audio is kept and nothing is sent."""
        self.placement.lose(now, self.replay_log.end)
        self._resolve_open(EngineUnreachable(why))
        self._leave_engine()

    def uncomputed(self) -> range:
        """Positions that the engine may have been computing when it died."""
        return self.placement.uncomputed(self.replay_log.end)

    def on_output(self, output: messages.Output) -> None:
        """Handle an output of the engine that runs the stream now."""
        self.outputs.received_count += 1
        self.placement.from_engine(output)
        match output:
            case messages.Opened():
                self.was_opened = True
                if self._delivery is not None:
                    self._delivery.opened()
                self._resolve_open(None)
            case messages.Text():
                self.outputs.put(self._replay_state.on_text(output))
            case messages.Speech():
                self._on_speech(output)
            case messages.Labels() | messages.Revised():
                self._on_late_result(output)
            case messages.Flushed():
                self._on_flushed(output)
            case messages.StreamState():
                self._replay_state.on_state(output)
                self._replay_state.trim(self.replay_log)
            case messages.Failed() if self._opened is not None and not self._opened.done():
                self._resolve_open(error_of(output))
            case messages.Closed() | messages.Failed() | messages.Dead():
                self.end(output)
            case messages.Refused() if output.code == DuplicateStream.__name__:
                self._resolve_open(DuplicateStream(self.id, "is open already; use another id"))
            case messages.Refused():
                # The command crossed with the end of the stream; it changed nothing.
                logger.debug("stream %s: %s", self.id, output.message)

    def _on_speech(self, output: messages.Speech) -> None:
        silence_ends = self._held.is_skipped and not output.skipped
        self._held.note(output.skipped)
        if silence_ends:
            self._send_held()
        self.outputs.put_speech(output)

    def _on_late_result(self, output: messages.Labels | messages.Revised) -> None:
        if isinstance(output, messages.Labels) and output.state is not None:
            self._labels, self._labels_start = output.state, self.placement.offsets[1]
        self.outputs.put(output)

    def _on_flushed(self, output: messages.Flushed) -> None:
        if output.tag in self._unanswered:
            self._unanswered.discard(output.tag)
            self.outputs.put(output)

    def progress(self, computed: int) -> None:
        """The engine that runs the stream now has computed the positions below `computed`, on its own count."""
        self.placement.progress(computed)
        self.suspicion.passed(self.placement.computed)
        self._replay_state.trim(self.replay_log)
        self._room.set()

    def wake(self) -> None:
        """Let waiting audio check again whether there is room."""
        self._room.set()

    def end(self, output: messages.Output) -> None:
        """End the stream with its last output. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._drop_held()
        self._resolve_open(EngineUnavailable("the stream ended before it was open"))
        self.previous_engine.end()
        self.outputs.put(output)
        self._room.set()
        self._on_end(self)

    # Internal.

    def _check_open(self) -> None:
        if self._finished:
            raise StreamFinished(self.id, "was finished; open a new stream for more audio")

    async def _wait_for_room(self) -> None:
        self._check_open()
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def _has_room(self) -> bool:
        if self._ended:
            return True
        if self.replay_log.end - self.placement.computed >= self._limits.ahead_positions:
            return False
        return not self.outputs.full and (self.placement.link is None or self.placement.link.has_room)

    def _cut_and_send(self, samples: NDArray[np.float32]) -> None:
        held, sent = self._held, self._cutter.samples_in
        # Words before a flush need the audio after it soon, unless the engine is behind with the audio that it has.
        is_hurried = bool(self._unanswered) and self.behind_s <= LATE_SECONDS
        if not (is_hurried or self._ended) and held.may_wait(samples, self._message_samples, sent):
            held.add(samples)
            if self._held_timer is None:
                self._held_timer = asyncio.get_running_loop().call_later(HELD_SECONDS, self._send_held)
        elif held.pieces:
            held.add(samples)
            self._send_held()
        else:
            self._send_items(prepare(self._cutter, self._cutter.cut(samples), self._spec))

    @property
    def _message_samples(self) -> int:
        """Samples of a live stream that the engine wants in one message; 0: as many as there are."""
        link = self.placement.link
        positions = link.status.message_positions if link is not None and self._opening.live else 1
        return 0 if positions < 2 else positions * self._spec.samples_per_position

    def _send_held(self) -> None:
        if pieces := self._drop_held():
            items = prepare(self._cutter, self._cutter.cut(np.concatenate(pieces)), self._spec)
            self._send_items(items, are_joined=True)
            if self.on_held_sent is not None:
                self.on_held_sent()

    def _drop_held(self) -> list[NDArray[np.float32]]:
        """Hold nothing any more. Returns what was held."""
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        return self._held.take()

    def _answer_flush_later(self) -> None:
        """Make sure that a flush at a pause is answered even if no audio follows (models with a delay)."""
        if not self._spec.rereads_window:
            asyncio.get_running_loop().call_later(QUIET_LINE_SECONDS, self._feed_silence_if_quiet, self.replay_log.end)

    def _feed_silence_if_quiet(self, end: int) -> None:
        """Feed silence if a flush is unanswered and no audio came after position `end`."""
        if self._unanswered and not self._finished and not self._ended:
            self._send_held()
            if self.replay_log.end > end:
                self._answer_flush_later()
            else:
                self._send_items(self._cut_rest())

    def _cut_rest(self) -> list[Item]:
        delay = self._opening.delay_positions
        pads = self._spec.flush_positions_for(self._spec.default_delay_positions if delay is None else delay)
        return prepare(self._cutter, self._cutter.flush(pads), self._spec)

    def _send_items(self, items: list[Item], are_joined: bool = False) -> None:
        """Send items, and keep them for a replay. `are_joined`: the engine gets the audio in fewer items of several
        positions, which takes it less time."""
        # Audio that crosses with the end of the stream is not an error: the reader sees the end in the outputs.
        if not items or self._ended:
            return
        self.replay_log.add(items)
        if self._delivery is not None:
            sent = join(items, self._spec) if are_joined else items
            self._delivery.send(messages.Feed(self.id, []), self.placement.to_engine(sent))

    def _send(self, command: messages.Command) -> None:
        if self._delivery is not None and not self._ended:
            self._delivery.send(command)

    def _leave_engine(self) -> None:
        """No engine runs the stream now."""
        self._delivery = self.placement.link = None
        self._room.set()
        if self._aborted:
            self.end(messages.Closed(self.id, self.replay_log.end_sample))

    def _resolve_open(self, error: EngineError | ValueError | None) -> None:
        if self._opened is None or self._opened.done():
            return
        if error is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(error)
            # Mark the exception as retrieved: the awaiting task may have been cancelled.
            self._opened.exception()
