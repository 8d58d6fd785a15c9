"""Carries out what a session wants of its engine stream, command by command, and hands on what the stream says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine import messages
from engine.client.stream import EngineStream
from engine.client.wills import Inheritance
from engine.errors import EngineError, StreamError
from realtime.errors import OptionsRefused
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.serving.engine_queue import EngineCommand, EngineQueue
from realtime.serving.failing import fail
from realtime.serving.live_limits import LiveLimits, delay_positions
from realtime.serving.saved_live import SavedLive
from realtime.serving.throttle import SHARE_S
from realtime.session.core import Session
from realtime.session.endpointing import turn_rule
from realtime.session.events import (
    EngineSwitched,
    Event,
    Feed,
    FeedGap,
    FinishEngine,
    FlushEngine,
    FollowTurns,
    Reanchor,
    Reopen,
    Samples,
)

log = logging.getLogger("tickertape.session")

FINAL = (messages.Closed, messages.Failed, messages.Dead)
NOT_FOR_SESSIONS = (messages.StreamState, messages.SessionOutput)


class StreamRunner:
    """One stream at a time. `submit` takes what the stream says."""

    def __init__(
        self, session_id: str, session: Session, engine: EngineApi, limits: LiveLimits, submit: Callable[[Event], None]
    ) -> None:
        self.session = session
        self.queue = EngineQueue(int(limits.max_audio_in_flight_s * session.sample_rate), limits.max_commands)
        self.stream: StreamApi | None = None
        # The options that streams are opened with. Later changes come with a Reopen, in their place among the audio.
        self.settings = session.settings
        self._id = session_id
        self._engine = engine
        self._submit = submit
        # Done with the stream's last output, or when nobody wants to hear more of it.
        self._said_all: asyncio.Future[None] | None = None
        # Another stream with other options comes when this one has said all.
        self._runs_out = False
        # All commands so far were carried out, and the next one is waited for.
        self._rests = False
        # Outputs of a stream that was left behind must not reach the core; each stream has its number.
        self._generation = 0
        self._opened = 0
        # The session's samples at which the stream began and up to which audio was fed.
        self._base, self._fed = 0, 0
        # Of a stream that came from another process: answers to flushes that the core knows of, then to others.
        self._known_flushes, self._strange_flushes = 0, 0

    @property
    def full(self) -> bool:
        return self.queue.full and not self.session.closed

    @property
    def engine_stream(self) -> EngineStream | None:
        return self.stream if isinstance(self.stream, EngineStream) else None

    def leave_for(self, reanchor: Reanchor) -> None:
        """What the stream still says is not wanted: another one comes, with the options of now."""
        self._generation += 1
        self.settings, self._runs_out = self.session.settings, False
        if self._said_all is not None and not self._said_all.done():
            self._said_all.set_result(None)
        self.queue.begin_anew(reanchor)

    def put(self, command: EngineCommand) -> None:
        """Audio that nothing stands before and that the stream has room for is fed at once; all else waits its turn."""
        if not (self._rests and isinstance(command, Feed) and not self.queue and self._hear_now(command.samples)):
            self.queue.put(command)

    def save(self, last: bool) -> dict[str, Any]:
        """What a session's value says of its stream; `last`: with the audio that has not left for the engine."""
        reanchor, stream = self.queue.reanchor, self.engine_stream
        return {
            "engine_settings": self.settings,
            "streams_opened": self._opened,
            "fed": self._fed,
            "reanchor": None if reanchor is None else (reanchor.base, self.session.appended - reanchor.base),
            "reopen": self._runs_out or self.queue.reopen is not None,
            "rest": stream.rest().tobytes() if last and stream is not None else b"",
            "runs_out": self._runs_out,
        }

    def load(self, saved: SavedLive, inherited: Inheritance) -> int:
        """Go on with the stream of another process. Returns the session's sample from which on audio is to be fed."""
        self.settings, self._opened = saved.engine_settings, saved.streams_opened
        self.stream, self._runs_out = inherited.stream, saved.runs_out
        known = len(self.session.marks)
        self._known_flushes, self._strange_flushes = known, max(0, inherited.flushes - known)
        self._base, self._fed = self.session.engine_base, saved.fed
        if inherited.stream is not None:
            self._fed = self.session.engine_base + inherited.goes_on_at
        return self._fed

    def lay_down(self) -> None:
        """The stream goes on in another process."""
        stream, self.stream = self.engine_stream, None
        if stream is not None:
            stream.lay_down()

    def drop(self) -> None:
        """The session goes on in another process, without this stream: if an engine runs it for us, it is to end. The
        one that another process has by now is not ours to end, and engines know that."""
        stream, self.stream = self.engine_stream, None
        if stream is not None:
            stream.drop()

    async def abandon(self) -> None:
        """End the stream, if there still is one."""
        stream, self.stream = self.stream, None
        if stream is not None:
            await self._abort(stream)
        self.queue.clear()

    async def work(self, group: asyncio.TaskGroup) -> None:
        if self.stream is not None and self.queue.reanchor is None:
            # It came from another process.
            self._listen_to(self.stream, group)
        clock = asyncio.get_running_loop().time
        while not self.session.closed:
            began = clock()
            while self.queue and not self.session.closed:
                await self._execute(self.queue.take(), group)
                if not self.full:
                    self.queue.make_room()
                if clock() - began >= SHARE_S:
                    # A minute of audio may wait here, and a stream that has room for it does not make us wait.
                    await asyncio.sleep(0)
                    began = clock()
            self.queue.rest()
            if not self.queue and not self.session.closed:
                self._rests = True
                try:
                    await self.queue.wait()
                finally:
                    self._rests = False

    async def _execute(self, command: EngineCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Reanchor(base, replay):
                await self._leave()
                await self._open(base, group)
                for audio in replay:
                    await self._hear(audio, group)
            case Reopen(settings):
                self.settings = settings
                if self.stream is not None and self._said_all is not None:
                    self._runs_out = True
                    await self.stream.finish()
                    await self._said_all
                    await self._leave()
                self._runs_out = False
            case Feed(samples):
                try:
                    await self._hear(samples, group)
                finally:
                    self.queue.heard(len(samples))
            case FeedGap(samples):
                try:
                    await self._hear(samples, group)
                finally:
                    self.queue.heard(samples)
            case FlushEngine(pause):
                await self._flush(pause)
            case FollowTurns(settings):
                self.settings = settings
                if self.stream is not None:
                    self.stream.change_turns(self._turn_rule)
            case FinishEngine():
                await self._finish()

    async def _hear(self, audio: Samples | int, group: asyncio.TaskGroup) -> None:
        if self.stream is None:
            await self._open(self._fed, group)
        assert self.stream is not None
        try:
            if isinstance(audio, int):
                self._fed += audio
                await self.stream.gap(audio)
            else:
                self._fed += len(audio)
                await self.stream.feed(audio)
        except StreamError as error:
            # The stream's own last output says so too, and the core answers that with a new stream.
            log.debug("session %s: %s", self._id, error)

    def _hear_now(self, samples: Samples) -> bool:
        if self.stream is None or not self.stream.feed_now(samples):
            return False
        self._fed += len(samples)
        return True

    @property
    def _turn_rule(self) -> messages.TurnRule | None:
        return turn_rule(self.settings.turn_detection, self.session.sample_rate)

    async def _flush(self, pause: int | None) -> None:
        if self.stream is None:
            self._submit(messages.Flushed(self._id, 0, 0))
            return
        try:
            await self.stream.flush(None if pause is None else max(0, pause - self._base))
        except StreamError as error:
            log.debug("session %s: %s", self._id, error)

    async def _finish(self) -> None:
        if self.stream is None:
            self._submit(messages.Closed(self._id, 0))
            return
        await self.stream.finish()

    async def _open(self, base: int, group: asyncio.TaskGroup) -> None:
        settings, spec = self.settings, self._engine.spec
        self._opened += 1
        name = f"{self._id}.{self._opened}"
        delay, options = delay_positions(settings.delay, spec), settings.engine_options()
        try:
            stream = await self._engine.open(name, delay_positions=delay, options=options, turns=self._turn_rule)
        except ValueError as error:
            raise OptionsRefused(str(error)) from error
        self.stream = stream
        self._fed = self._base = base
        self._known_flushes = self._strange_flushes = 0
        self._submit(EngineSwitched(base))
        self._listen_to(stream, group)

    def _listen_to(self, stream: StreamApi, group: asyncio.TaskGroup) -> None:
        said_all = self._said_all = asyncio.get_running_loop().create_future()
        generation = self._generation

        def hear(output: messages.Output) -> None:
            if isinstance(output, messages.Closed) and self.stream is stream:
                # At once: whoever goes on with the session from here on must not wait for this stream to say anything.
                self.stream = None
            try:
                if generation == self._generation:
                    self._hand_on(output)
            except Exception as error:
                # As if the runner had met it: the session ends, and nobody else's.
                fail(group, error)
            over = isinstance(output, FINAL) or generation != self._generation or self.session.closed
            if over and not said_all.done():
                said_all.set_result(None)

        stream.listen(hear)

    def _hand_on(self, output: messages.Output) -> None:
        assert not isinstance(output, NOT_FOR_SESSIONS), "they are the client's"
        if self._runs_out and isinstance(output, messages.Closed):
            # The end of this stream, but not of the session: the next one goes on from here.
            self._submit(EngineSwitched(self._fed))
        elif not (isinstance(output, messages.Flushed) and self._is_strange_flush()):
            self._submit(output)
        if self.session.closed:
            self.queue.wake()

    def _is_strange_flush(self) -> bool:
        """Whether a process before this one asked for it and the core does not know; the next one is known again."""
        if not self._strange_flushes:
            return False
        if self._known_flushes:
            self._known_flushes -= 1
            return False
        self._strange_flushes -= 1
        return True

    async def _leave(self) -> None:
        """Give up the stream: its outputs are muted already."""
        stream, self.stream, self._said_all = self.stream, None, None
        if stream is not None:
            await self._abort(stream)

    async def _abort(self, stream: StreamApi) -> None:
        try:
            await stream.abort()
        except EngineError as error:
            log.debug("session %s: %s", self._id, error)
