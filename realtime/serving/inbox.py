"""Messages of one client -> events for its session, in the client's dialect and audio format of the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from engine.client.processor import ItemRefused
from engine.client.render import parse_items
from realtime.dialects.base import (
    Answer,
    AudioText,
    Dialect,
    GapRequest,
    InjectRequest,
    Request,
    SessionFacts,
    event_id_of,
)
from realtime.dialects.json_frames import Json, audio_of_append, decode_audio_json, decode_base64, decode_json
from realtime.dialects.openai import BetaDialect, OpenAIDialect
from realtime.dialects.vllm import VllmDialect
from realtime.errors import ClientFault
from realtime.serving.intake import Intake
from realtime.serving.live_session import LiveSession
from realtime.session.events import Answered, Clear, Commit, Configure, End, Injected, Problem

# Messages longer than this are parsed off the event loop; audio is decoded in pieces of at most this size.
LARGE_MESSAGE = 256 * 1024
PIECE_BYTES = 64 * 1024
# The only kind of message, in any dialect, that may be longer than control messages.
AUDIO_MESSAGE = "input_audio_buffer.append"


class Inbox:
    """Turns client messages into core events. Outlives the socket: a reconnected client goes on with the same inbox."""

    def __init__(self, live: LiveSession, facts: SessionFacts, may_inject: bool) -> None:
        # Whether items prepared elsewhere are taken: not from everybody who may open a socket.
        self.may_inject = may_inject
        self._live = live
        self._facts = facts
        self._intake = Intake(live.session.settings.format)
        self._control_bytes = live.limits.max_control_bytes
        self.dialect_fixed = False
        # The client has said that no more audio comes; what comes all the same is not heard.
        self._ended = False
        # Audio of a client that has left was not heard; nothing behind it is, until the client comes back.
        self._let_go = False
        # Audio of messages that came together; decoded together, because each call has its price.
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def close(self) -> None:
        self._intake.close()

    def reconnected(self) -> None:
        """A new socket has the session: it goes on exactly after the samples that are counted from here on.

        It begins with a whole sample: bytes of an unfinished one were lost with the old socket.
        """
        self.settle()
        self._let_go = False
        self._intake = self._intake.on_new_socket()

    def settle_all(self) -> None:
        """Hand on everything, also what a resampler holds back: the session goes on elsewhere."""
        self.settle()
        if self._intake.container is None:
            self._live.submit(self._intake.flush())

    def settle(self) -> None:
        """Hand on the audio that was waiting for more of it."""
        if self._pending:
            audio = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
            self._pending, self._pending_bytes = [], 0
            self._live.submit(self._intake.decode(audio))

    def take_now(self, text: str) -> bool:
        """Take a short piece of raw samples without a detour. False if it is anything else, or others wait before it:
        then it was not taken, and `take` has to look at it."""
        plain = self._live.dialect.has_appends and self._intake.takes_anything and not self._ended
        if not plain or self._pending or len(text) > min(self._control_bytes, PIECE_BYTES):
            return False
        audio = audio_of_append(text)
        if audio:
            self._live.submit(self._intake.decode(audio))
        return bool(audio)

    async def take(self, text: str | None, data: bytes | None, gone: Callable[[], bool], *, more: bool = False) -> bool:
        """Handle one message of the client; its mistakes are answered, never raised. `more`: others wait behind it.

        Returns whether it was a mistake. The rest of a long message is let go when the client is `gone`: a container
        can hold hours of audio in a few bytes, and nobody would hear of them.
        """
        if self._let_go:
            return False
        event_id = None
        try:
            if data is not None and self._live.session.settings.format.binary:
                if not data and self._live.dialect.empty_frame_ends:
                    await self._end(gone)
                if not self._ended:
                    await self._audio(data, gone)
                return False
            raw = text if text is not None else data or b""
            message = await self._parse(raw)
            event_id = event_id_of(message)
            if not self.dialect_fixed and not self._live.dialect.fixed:
                self._choose_dialect(message)
            request = self._live.dialect.read(message, self._live.session.settings)
            if isinstance(request, AudioText):
                await self._audio_text(request.data, gone, more)
            elif isinstance(request, End):
                await self._end(gone)
            elif isinstance(request, InjectRequest):
                await self._inject(request)
            else:
                self.settle()
                self._control(request)
        except ClientFault as fault:
            self._live.tell(Problem(fault.code, fault.message, fault.param, fault.event_id or event_id))
            return True
        return False

    async def _parse(self, raw: str | bytes) -> Json:
        if len(raw) <= self._control_bytes:
            return decode_json(raw)
        if len(raw) <= LARGE_MESSAGE:
            message = decode_audio_json(raw)
        else:
            message = await asyncio.to_thread(decode_audio_json, raw)
        if message is None or message.get("type") != AUDIO_MESSAGE:
            text = f"Messages that are not audio may have at most {self._control_bytes} bytes (limits.control_bytes)."
            raise ClientFault("message_too_large", text)
        return message

    async def _audio_text(self, text: str, gone: Callable[[], bool], more: bool) -> None:
        if len(text) > LARGE_MESSAGE:
            await self._audio(await asyncio.to_thread(decode_base64, text), gone)
        elif len(text) > PIECE_BYTES or not self._intake.takes_anything:
            await self._audio(decode_base64(text), gone)
        else:
            audio = decode_base64(text)
            self._pending.append(audio)
            self._pending_bytes += len(audio)
            if not more or self._pending_bytes >= PIECE_BYTES:
                self.settle()

    async def _inject(self, request: InjectRequest) -> None:
        if not self.may_inject:
            text = "Items prepared elsewhere are not taken here; that needs server.inject and an API key."
            raise ClientFault("inject_not_allowed", text, param="type", event_id=request.event_id)
        try:
            taken = await self._live.inject(await asyncio.to_thread(parse_items, request.items))
        except ItemRefused as error:
            raise ClientFault("item_refused", f"{error}.", param="items", event_id=request.event_id) from error
        self._live.tell(Injected(taken))

    async def _end(self, gone: Callable[[], bool]) -> None:
        if self._ended:
            return
        self.settle()
        self._ended = True
        try:
            if self._intake.container is not None:
                await self._unpack(None, gone)
        except ClientFault:
            self._live.submit(End())
            raise
        self._live.submit(self._intake.flush())
        self._live.submit(End())

    def _control(self, request: Request) -> None:
        match request:
            case Answer(body):
                self._live.tell(Answered(body))
            case Configure():
                self._configure(request)
            case GapRequest(samples):
                self._live.submit(self._intake.flush())
                self._live.submit(self._intake.silence(samples))
            case Commit() | Clear():
                # The resampler's last samples belong to what is committed or cleared.
                self._live.submit(self._intake.flush())
                self._live.submit(request)

    def _configure(self, request: Configure) -> None:
        request = self._in_force(request)
        if request.settings.format != self._intake.format:
            old, self._intake = self._intake, Intake(request.settings.format)
            self._live.submit(old.flush())
            old.close()
        self._live.submit(request)

    def _in_force(self, asked: Configure) -> Configure:
        """What the model takes of it. A client that asks for something else keeps what it had, and is told."""
        try:
            return Configure(self._live.in_force(asked.settings), asked.event_id)
        except ClientFault as fault:
            fault.param = f"{self._live.dialect.option_path}{fault.param}"
            fault.event_id = asked.event_id
            raise

    async def _audio(self, data: bytes, gone: Callable[[], bool]) -> None:
        self.settle()
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            if gone():
                self._let_go = True
                return
            piece = view[start : start + PIECE_BYTES]
            if self._intake.container is not None:
                await self._unpack(bytes(piece), gone)
            else:
                self._live.submit(self._intake.decode(piece))
                await self._live.room()
            if start:
                await asyncio.sleep(0)

    async def _unpack(self, data: bytes | None, gone: Callable[[], bool]) -> None:
        async with aclosing(self._intake.unpack(data)) as steps:
            async for append in steps:
                if gone():
                    self._let_go = True
                    return
                self._live.submit(append)
                await self._live.room()

    def _choose_dialect(self, message: Json) -> None:
        """Clients do not name their dialect; the first message that only one dialect has gives it away."""
        kind = message.get("type")
        dialect: Dialect | None = None
        if (kind == "session.update" and "session" not in message) or (
            kind == "input_audio_buffer.commit" and "final" in message
        ):
            dialect = VllmDialect(self._facts)
        elif kind == "transcription_session.update" and type(self._live.dialect) is OpenAIDialect:
            dialect = BetaDialect(self._facts)
        elif kind in ("session.update", "transcription_session.update"):
            self.dialect_fixed = True
        if dialect is not None:
            self.dialect_fixed = True
            self._live.dialect = dialect
            settings = dialect.start_settings(self._live.session.settings)
            if settings.format != self._intake.format:
                self._intake = Intake(settings.format)
            self._live.adopt(settings)
