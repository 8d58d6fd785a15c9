"""Parses one client's messages and passes them to its session as events: audio, settings, commits, the end.

The reader of a connection calls `Inbox` with each message. The inbox has the client's dialect, which it recognizes by
the first messages, and the decoder of the client's audio format. A mistake in a message is answered with an error event
and never raised. An inbox belongs to the session: a client that resumes on another socket continues with the same
inbox.

`AudioIntake` is the decoder of one audio format, with the state of its resampler: it decodes to float samples at
16 kHz, the model's rate. After each change of the format the inbox gets another one. Raw samples are decoded at once in
the gateway. Containers such as WebM are decoded step by step in a separate process (`isolated_decoder.py`). Uploaded
files do not pass through here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from audio.errors import AudioError
from audio.formats import MODEL_RATE, Decoder, Encoding, Resampler
from engine.client.link import ItemRefused
from engine.client.prepared_audio import parse_items
from realtime.dialects.base import (
    AUDIO_MESSAGE,
    AudioText,
    Dialect,
    DirectAnswer,
    GapRequest,
    InjectRequest,
    Json,
    LongAppend,
    Request,
    SessionFacts,
    Update,
    audio_of_append,
    decode_base64,
    decode_json,
    event_id_of,
)
from realtime.dialects.openai import BetaDialect, OpenAIDialect
from realtime.dialects.vllm import VllmDialect
from realtime.errors import ClientFault, Refusal
from realtime.serving.enrolment import SocketEnrolment
from realtime.serving.isolated_decoder import IsolatedDecoder
from realtime.serving.live_session import LiveSession
from realtime.serving.socket_extras import Part
from realtime.session.events import Answered, Append, Clear, Commit, Configure, End, Gap, Injected, Problem, Samples
from realtime.session.settings import NO_LABELS_TO_ENROL, AudioFormat, Settings

# Decoding the client's audio


class ContainerStream:
    """Decodes one stream of container bytes (WebM, Ogg, MP4, ...) in a separate process."""

    def __init__(self) -> None:
        self._decoder: IsolatedDecoder | None = None
        self._closed = False

    async def decode(self, data: bytes | None) -> AsyncGenerator[Samples]:
        """Decode a piece of the stream, or its end (None), in steps. Raises AudioError.

        The next step is decoded when the caller asks for it. A stream without a single byte is no error.
        """
        if self._closed or (data is None and self._decoder is None):
            return
        if self._decoder is None:
            self._decoder = await IsolatedDecoder.begin()
            if self._closed:
                self._decoder.end()
        samples, more = await self._decoder.ask(data)
        while len(samples) or more:
            yield samples
            if not more:
                return
            samples, more = await self._decoder.ask()

    def close(self) -> None:
        """End the decoder, also while it decodes a piece; no more samples come."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.end()


ENCODINGS = {
    "audio/pcm": Encoding.PCM16,
    "audio/pcm-f32": Encoding.FLOAT32,
    "audio/pcmu": Encoding.ULAW,
    "audio/pcma": Encoding.ALAW,
}


class AudioIntake:
    """Decodes the audio of one client in one format. Use `decode` for raw samples and `unpack` for containers."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self.format = audio_format
        # Any bytes are valid samples of this format, so appends may be joined before they are decoded.
        self.any_bytes_valid = audio_format.type in ("audio/pcm", "audio/pcmu", "audio/pcma")
        self.container = ContainerStream() if audio_format.container else None
        self._raw = None if audio_format.container else _RawReader(audio_format)

    def decode(self, data: bytes | memoryview) -> Append:
        """Decode a piece of raw samples; it may end within a sample. Raises ClientFault if it is not valid audio."""
        assert self._raw is not None, "use unpack() for a container"
        try:
            return self._raw.decode(data)
        except AudioError as error:
            raise _fault(error) from error

    async def unpack(self, data: bytes | None) -> AsyncGenerator[Append]:
        """Decode a piece of a container, or its end (None), in steps. Raises ClientFault.

        Source samples are counted at the engine's rate, the only count that client and server agree on for a container.
        """
        assert self.container is not None, "use decode() for raw samples"
        try:
            async with aclosing(self.container.decode(data)) as steps:
                async for samples in steps:
                    yield Append(samples, len(samples), len(samples) * 1000 / MODEL_RATE)
        except AudioError as error:
            raise _fault(error) from error

    def flush(self) -> Append:
        """The samples left in the resampler. The next sample starts a new signal."""
        # A codec cannot be flushed within its stream; its samples come with the next packet.
        return _nothing() if self._raw is None else self._raw.flush()

    def silence(self, source_samples: int) -> Gap:
        """Silence that the client declares instead of sending it, rounded to the engine's rate."""
        rate = self.format.rate
        return Gap((source_samples * MODEL_RATE + rate // 2) // rate, source_samples, source_samples * 1000 / rate)

    def for_new_socket(self) -> AudioIntake:
        """The intake to use when the client resumes on another socket.

        Raw audio continues; only the bytes of an incomplete sample are dropped. A container starts again.
        """
        self.close()
        return AudioIntake(self.format) if self._raw is None else self

    def close(self) -> None:
        if self.container is not None:
            self.container.close()
        if self._raw is not None:
            self._raw.close()


class _RawReader:
    """Decoder and resampler for raw samples."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self._rate = audio_format.rate
        self._decoder = Decoder(ENCODINGS[audio_format.type])
        self._resampler = Resampler(audio_format.rate)
        # Whether the resampler may still have samples.
        self._held_back = False

    def decode(self, data: bytes | memoryview) -> Append:
        source = self._decoder.decode(data)
        self._held_back = self._held_back or len(source) > 0
        return Append(self._resampler.resample(source), len(source), len(source) * 1000 / self._rate)

    def flush(self) -> Append:
        if not self._held_back:
            return _nothing()
        self._held_back = False
        return Append(self._resampler.flush(), 0, 0.0)

    def close(self) -> None:
        self._decoder.flush()


def _fault(error: AudioError) -> ClientFault:
    return ClientFault("invalid_audio", error.client_message, param="audio")


def _nothing() -> Append:
    return Append(np.empty(0, np.float32), 0, 0.0)


# The client's messages

# Long messages are parsed in pieces of at most this size. Short appends that arrive together are joined up to it.
PIECE_BYTES = 64 * 1024
# Audio is decoded and fed in pieces of this size: two seconds in 8-bit formats at 8 kHz.
FED_BYTES = 16 * 1024


class Inbox:
    """Handles the messages of one session's client. It outlives the socket and continues when the client resumes."""

    def __init__(
        self, live: LiveSession, facts: SessionFacts, caller: str, may_inject: bool, enrolment: SocketEnrolment
    ) -> None:
        # Whether the client may inject prepared items; not every caller that may open a socket may do that.
        self.may_inject = may_inject
        self._live = live
        self._facts = facts
        self._caller = caller
        self._enrolment = enrolment
        # The decoder of the client's audio format.
        self._intake = AudioIntake(live.session.settings.format)
        # The longest message that is not audio, in bytes.
        self._control_bytes = live.limits.max_control_bytes
        # The client's dialect was recognized by one of its messages.
        self.dialect_fixed = False
        # The client has ended its audio; audio that it sends after that is ignored.
        self._ended = False
        # The client left within a message, so samples are missing: input is ignored until it resumes.
        self._ignores_input = False
        # Audio of appends that arrived together; it is decoded in one call to save time.
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        # A long message whose last part has not arrived, and the first fault in it.
        self._long: LongAppend | None = None
        self._first_fault: ClientFault | None = None

    def close(self) -> None:
        self._intake.close()

    def reconnected(self) -> None:
        """Prepare for a new socket. The client continues after the samples that the session has counted.

        It begins with a whole sample and a new message; incomplete ones were lost with the old socket.
        """
        self.submit_pending()
        self._long = self._first_fault = None
        self._ignores_input = False
        self._intake = self._intake.for_new_socket()

    def submit_all_pending(self) -> None:
        """Submit all audio, also the samples in the resampler, before another process adopts the session."""
        self.submit_pending()
        if self._intake.container is None:
            self._live.submit(self._intake.flush())

    def submit_pending(self) -> None:
        """Submit the pending audio, which was kept to be joined with the next appends."""
        if self._pending:
            audio = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
            self._pending, self._pending_bytes = [], 0
            self._live.submit(self._intake.decode(audio))

    def handle_now(self, text: str) -> bool:
        """Fast path for a short append of raw samples. Returns False, with nothing done, for any other message and if
        other audio is pending; `handle` then has to handle the message."""
        plain = (
            self._live.dialect.has_appends and self._intake.any_bytes_valid and not (self._ended or self._ignores_input)
        )
        if not plain or self._pending or len(text) > min(self._control_bytes, PIECE_BYTES):
            return False
        audio = audio_of_append(text)
        if audio:
            self._live.submit(self._intake.decode(audio))
        return bool(audio)

    async def handle(
        self, text: str | None, data: bytes | None, has_left: Callable[[], bool], *, more: bool = False
    ) -> bool:
        """Handle one message of the client. Returns whether it had a fault; faults are answered, never raised.

        `more`: another message has already arrived, so audio may stay pending to be joined with it. If the client
        `has_left`, the rest of a long message is dropped: a few bytes of a container can be hours of audio.
        """
        if self._ignores_input:
            return False
        raw = text if text is not None else data or b""
        is_audio = text is None and self._live.session.settings.format.binary
        if is_audio or len(raw) > self._control_bytes:
            whole = raw.encode() if isinstance(raw, str) else raw
            if not whole and self._live.dialect.empty_frame_ends:
                return await self._answer_fault(self._end(has_left))
            return await self.handle_part(Part(whole, is_text=not is_audio, is_last=True), has_left)
        was_faulty = await self._answer_fault(self._message(raw, has_left))
        if was_faulty or not more or self._pending_bytes >= PIECE_BYTES:
            self.submit_pending()
        return was_faulty

    def miss(self, source_samples: int) -> None:
        """Submit silence in place of audio that was lost."""
        if not self._ended:
            self.submit_pending()
            self._control(GapRequest(source_samples))

    async def end(self, has_left: Callable[[], bool]) -> None:
        """End the audio: the client will send no more."""
        self.submit_pending()
        await self._answer_fault(self._end(has_left))

    async def handle_part(self, part: Part, has_left: Callable[[], bool]) -> bool:
        """Handle the next part of a long message, as `handle` does a whole one."""
        if self._ignores_input:
            return False
        self.submit_pending()
        return await self._answer_fault(self._part(part, has_left))

    async def _answer_fault(self, handling: Coroutine[None, None, bool | None]) -> bool:
        """Run the handler, and answer its fault with an error event. Returns whether there was one."""
        try:
            return bool(await handling)
        except ClientFault as fault:
            self._send_fault(fault)
            return True

    def _send_fault(self, fault: ClientFault, event_id: str | None = None) -> None:
        self._live.send_event(Problem(fault.code, fault.message, fault.param, fault.event_id or event_id))

    async def _message(self, raw: str | bytes, has_left: Callable[[], bool]) -> bool:
        """Handle a short message. Returns whether it had a fault that was answered here; other faults are raised."""
        message = decode_json(raw)
        event_id = event_id_of(message)
        if message.get("type") != AUDIO_MESSAGE:
            # It may change the audio format or end the audio, so pending audio comes first.
            self.submit_pending()
        try:
            if not self.dialect_fixed and not self._live.dialect.fixed:
                self._choose_dialect(message)
            request = self._live.dialect.read(message, self._live.session.settings)
            if self._ended and isinstance(request, AudioText | GapRequest):
                return False
            if isinstance(request, AudioText):
                if request.silence_before:
                    self._control(GapRequest(request.silence_before))
                await self._audio_text(request.data, has_left)
            elif isinstance(request, End):
                await self._end(has_left)
            elif isinstance(request, InjectRequest):
                await self._inject(request)
            elif isinstance(request, Update):
                return await self._update(request)
            else:
                return self._control(request)
        except ClientFault as fault:
            fault.event_id = fault.event_id or event_id
            raise
        return False

    async def _part(self, part: Part, has_left: Callable[[], bool]) -> None:
        """Handle a part. After a fault the rest of the message is ignored, and the fault is raised at its end."""
        if self._first_fault is None:
            try:
                if not part.is_text and self._live.session.settings.format.binary:
                    await self._audio(part.data, has_left)
                else:
                    await self._append(part, has_left)
            except ClientFault as fault:
                self._first_fault = fault
        if part.is_last:
            mistake, self._long, self._first_fault = self._first_fault, None, None
            if mistake is not None:
                raise mistake

    async def _append(self, part: Part, has_left: Callable[[], bool]) -> None:
        """Handle a part of a long JSON message."""
        reader = self._long = self._long or LongAppend(self._control_bytes)
        try:
            for start in range(0, len(part.data), PIECE_BYTES):
                audio = reader.read(part.data[start : start + PIECE_BYTES])
                if audio and not self._live.dialect.has_appends:
                    raise ClientFault("message_too_large", "This endpoint takes audio in binary frames only.")
                await self._audio(audio, has_left)
            if part.is_last:
                reader.end()
        except ClientFault as fault:
            fault.event_id = reader.event_id
            raise

    async def _audio_text(self, text: str, has_left: Callable[[], bool]) -> None:
        audio = decode_base64(text)
        if self._intake.any_bytes_valid and len(audio) <= PIECE_BYTES:
            self._pending.append(audio)
            self._pending_bytes += len(audio)
        else:
            self.submit_pending()
            await self._audio(audio, has_left)

    async def _inject(self, request: InjectRequest) -> None:
        if not self.may_inject:
            text = "Prepared items are not accepted; the server needs server.inject, and the client needs an API key."
            raise ClientFault("inject_not_allowed", text, param="type", event_id=request.event_id)
        try:
            taken = await self._live.inject(await asyncio.to_thread(parse_items, request.items))
        except ItemRefused as error:
            raise ClientFault("item_refused", f"{error}.", param="items", event_id=request.event_id) from error
        self._live.send_event(Injected(taken))

    async def _end(self, has_left: Callable[[], bool]) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            if self._intake.container is not None:
                await self._unpack(None, has_left)
        except ClientFault:
            self._live.submit(End())
            raise
        self._live.submit(self._intake.flush())
        self._live.submit(End())

    def _control(self, request: Request) -> bool:
        """Handle a message that is not audio. Returns whether it had a fault that was answered."""
        match request:
            case DirectAnswer(body):
                self._live.send_event(Answered(body))
            case Configure(settings, event_id):
                taken, refused = self._supported(settings)
                if refused:
                    refused[0].event_id = event_id
                    raise refused[0]
                self._configure(Configure(taken, event_id))
            case GapRequest(samples):
                self._live.submit(self._intake.flush())
                self._live.submit(self._intake.silence(samples))
            case Commit() | Clear():
                # The samples in the resampler belong to the audio that is committed or cleared.
                self._live.submit(self._intake.flush())
                self._live.submit(request)
        return False

    async def _update(self, asked: Update) -> bool:
        """Apply the valid part of a settings update, and answer the rest with errors. Returns whether there were any
        errors."""
        taken, refused = self._supported(replace(asked.settings, asked_speakers=None))
        faults = [*asked.faults, *refused]
        if asked.settings.asked_speakers is not None:
            try:
                taken = await self._enrolled(asked.settings.asked_speakers, taken)
            except ClientFault as mistake:
                faults.append(mistake)
        current = self._live.session.settings.publish
        if taken.publish != current and (fault := await self._publish(taken.publish)) is not None:
            faults.append(fault)
            taken = replace(taken, publish=current)
        current_url = self._live.session.settings.on_final
        if taken.on_final != current_url and (fault := self._send_finals(taken.on_final)) is not None:
            faults.append(fault)
            taken = replace(taken, on_final=current_url)
        for fault in faults:
            self._send_fault(fault, asked.event_id)
        if not faults or taken != self._live.session.settings:
            self._configure(Configure(taken, asked.event_id))
        return bool(faults)

    async def _enrolled(self, asked: Sequence[tuple[str, str | None]], taken: Settings) -> Settings:
        """The settings with these voices. Raises ClientFault."""
        param = self._live.dialect.option_paths.get("known_speakers", "known_speakers")
        if all(url is None for _, url in asked) and tuple(name for name, _ in asked) == taken.speaker_names:
            return taken  # a client that sends its session object back
        if asked and not taken.labels_speakers:
            raise ClientFault("invalid_value", NO_LABELS_TO_ENROL, param=param)
        voices = taken.known_speakers
        if not self._live.session.appended:
            try:
                voices = await self._enrolment.enrol(self._caller, asked, voices)
            except Refusal as refusal:
                raise ClientFault(refusal.code, refusal.message, param=param) from refusal
        # Audio of a call comes also while voices are enrolled.
        if self._live.session.appended:
            text = "known_speakers can change only before the first audio: the voices of a session keep their numbers."
            raise ClientFault("invalid_value", text, param=param)
        return replace(taken, known_speakers=voices)

    async def _publish(self, name: str | None) -> ClientFault | None:
        """Publish the session under another name, or under none. Returns the fault if that is not possible."""
        publication = self._live.publication
        if not publication.may_change:
            text = "A session of a client secret is published only under the name that its secret was made with."
            return ClientFault("publish_not_allowed", text, param="session.publish")
        return await publication.change(name)

    def _send_finals(self, url: str | None) -> ClientFault | None:
        """Send the session's finals to another URL, or to none. Returns the fault if that is not allowed."""
        webhooks = self._live.webhooks
        if not webhooks.may_change:
            text = "A session of a client secret has only the webhook that its secret was made with."
            return ClientFault("webhook_not_allowed", text, param="session.on_final")
        return webhooks.change(url)

    def _supported(self, asked: Settings) -> tuple[Settings, list[ClientFault]]:
        """The settings that the model accepts, and a fault for each refused option, by the client's name for it."""
        taken, refused = self._live.in_force(asked)
        for fault in refused:
            fault.param = self._live.dialect.option_paths.get(fault.param or "", fault.param)
        return taken, refused

    def _configure(self, request: Configure) -> None:
        if request.settings.format != self._intake.format:
            old, self._intake = self._intake, AudioIntake(request.settings.format)
            self._live.submit(old.flush())
            old.close()
        self._live.submit(request)

    async def _audio(self, data: bytes, has_left: Callable[[], bool]) -> None:
        if self._ended:
            return
        view = memoryview(data)
        for start in range(0, len(data), FED_BYTES):
            if has_left():
                self._ignores_input = True
                return
            piece = view[start : start + FED_BYTES]
            if self._intake.container is not None:
                await self._unpack(bytes(piece), has_left)
            else:
                self._live.submit(self._intake.decode(piece))
                await self._live.wait_for_room()
            if start + FED_BYTES < len(data):
                await asyncio.sleep(0)

    async def _unpack(self, data: bytes | None, has_left: Callable[[], bool]) -> None:
        async with aclosing(self._intake.unpack(data)) as steps:
            async for append in steps:
                if has_left():
                    self._ignores_input = True
                    return
                self._live.submit(append)
                await self._live.wait_for_room()

    def _choose_dialect(self, message: Json) -> None:
        """Recognize the dialect by the first message that only one dialect has; clients do not name it."""
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
                self._intake = AudioIntake(settings.format)
            self._live.apply_settings(settings)
