"""Receives uploads: parses multipart forms as they arrive, stores the file, and enforces the limits for uploads.

`FormParser` returns the bytes of the file in each piece of a body, and collects the text fields in a `Form`. Text
fields are kept as bytes and counted while they grow; a text is decoded only when it is needed and not too long, so a
client cannot make the server use much more memory than it sends.

All routes that take a file share one `FormReader`. Its `Spool` counts all uploads and their bytes from the first byte
to the end of the response, and refuses more than the limits allow.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile, gettempdir
from typing import BinaryIO, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from realtime.config import Config
from realtime.errors import Refusal, storage_refusal
from realtime.http.authentication import Context
from realtime.serving.quota import Caller, SharedCount, places_of_one_key

log = logging.getLogger("tickertape.uploads")


# Multipart forms


# The parser logs each invalid form; the client gets the error instead.
logging.getLogger("python_multipart.multipart").setLevel(logging.CRITICAL)

# Enough for all keywords that a stream may have, and all other fields.
MAX_FIELDS = 600
MAX_FIELD_BYTES = 64 * 1024
# A field with the recording of a speaker: ten seconds at 48 kHz in stereo, as base64.
REFERENCE_FIELDS = frozenset({b"known_speaker_references", b"known_speaker_references[]"})
MAX_REFERENCE_BYTES = 2_600_000
# The longest boundary. RFC 2046 allows 70 bytes.
MAX_BOUNDARY_BYTES = 200
# The longest headers of one part, in bytes.
MAX_PART_HEAD_BYTES = 8 * 1024
# Parameters of a header, and semicolons in their values. The time to parse a header grows with them.
MAX_PARAMETERS = 32
# Accepted charsets. Some other codecs of Python take quadratic time.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1"})
# Bytes of the longest character.
LETTER_BYTES = 4


@dataclass(slots=True)
class Form:
    """The text fields of a form in order, and the name of the file's field (None if there is no file)."""

    charset: str = "utf-8"
    fields: list[tuple[bytes, bytearray]] = field(default_factory=list)
    file_field: bytes | None = None

    def texts(self, name: str, most: int) -> list[str]:
        """The texts of all fields with this name. Raises Refusal for a text of more than `most` characters."""
        found = [value for known, value in self.fields if known == name.encode()]
        texts = [self._decode(value) for value in found if len(value) <= LETTER_BYTES * most]
        if len(texts) < len(found) or any(len(text) > most for text in texts):
            raise Refusal(400, "invalid_value", f"'{name}' must be text of at most {most} characters.", param=name)
        return texts

    def _decode(self, value: bytearray) -> str:
        try:
            return value.decode(self.charset)
        except UnicodeDecodeError:
            return value.decode("latin-1")


class FormParser:
    """Parses a multipart body into a `Form`, piece by piece."""

    def __init__(self, content_type: str, hold: Callable[[int, bool], None]) -> None:
        """`hold` is called with each number of bytes that the form takes in memory, and whether they belong to a
        speaker's recording; it may raise Refusal. Raises Refusal."""
        if content_type.count(";") > MAX_PARAMETERS:
            raise bad_form(f"its Content-Type has more than {MAX_PARAMETERS} parameters")
        _, parameters = parse_options_header(content_type)
        charset = parameters.get(b"charset", b"utf-8").decode("latin-1").lower()
        if charset not in CHARSETS:
            raise Refusal(400, "invalid_form", "Send the texts of the form as UTF-8.")
        boundary = parameters.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise bad_form(f"its Content-Type must name a boundary of at most {MAX_BOUNDARY_BYTES} bytes")
        self.form = Form(charset)
        self._hold = hold
        # The header of the current part.
        self._head_bytes = 0
        self._name, self._value, self._disposition = bytearray(), bytearray(), b""
        # The current part is a text (`_text`) or the file (`_in_file`); between two parts and in a header it is
        # neither.
        self._text: bytearray | None = None
        self._in_reference = False
        self._in_file = False
        self._file_bytes: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_head,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
            },
        )

    def feed(self, data: bytes) -> bytes:
        """Parse a piece of the body; returns the bytes of the file in it. Raises Refusal."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise bad_form("it is not multipart/form-data") from error
        found, self._file_bytes = self._file_bytes, []
        return found[0] if len(found) == 1 else b"".join(found)

    def finish(self) -> None:
        """Called at the end of the body. Raises Refusal if the form is incomplete."""
        if self._text is not None or self._in_file:
            raise bad_form("it ends in the middle of a part")

    def close(self) -> None:
        """Release the parser, whose callbacks refer to this object: otherwise both, and the form, would stay in memory
        until a garbage collection."""
        del self._parser

    def _on_part(self) -> None:
        self._disposition, self._head_bytes = b"", 0
        self._name, self._value = bytearray(), bytearray()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += self._of_head(data, start, end)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._of_head(data, start, end)

    def _of_head(self, data: bytes, start: int, end: int) -> bytes:
        self._head_bytes += end - start
        if self._head_bytes > MAX_PART_HEAD_BYTES:
            raise bad_form(f"the headers of a part take more than {MAX_PART_HEAD_BYTES} bytes")
        return data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _on_head(self) -> None:
        if self._disposition.count(b";") > MAX_PARAMETERS:
            raise bad_form(f"the header of a part has more than {MAX_PARAMETERS} parameters")
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if name is None:
            raise bad_form("a part has no name")
        self._in_file = b"filename" in options
        if self._in_file:
            if self.form.file_field is not None:
                raise bad_form("it has more than one file")
            self.form.file_field = name
            return
        if len(self.form.fields) == MAX_FIELDS:
            raise bad_form(f"it has more than {MAX_FIELDS} fields")
        self._text = bytearray()
        self._in_reference = name in REFERENCE_FIELDS
        entry = (name, self._text)
        self._hold(sum(map(sys.getsizeof, (entry, *entry))), False)
        self.form.fields.append(entry)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file_bytes.append(data[start:end])
            return
        text = self._text
        assert text is not None, "data comes after a header"
        most = MAX_REFERENCE_BYTES if self._in_reference else MAX_FIELD_BYTES
        if len(text) + end - start > most:
            raise bad_form(f"a field takes more than {most} bytes")
        before = sys.getsizeof(text)
        text += data[start:end]
        self._hold(sys.getsizeof(text) - before, self._in_reference)

    def _on_part_end(self) -> None:
        self._text, self._in_file = None, False


def bad_form(reason: str) -> Refusal:
    return Refusal(400, "invalid_form", f"The form cannot be read: {reason}.")


# Uploads and their limits

# Memory for the texts of one form, and of all forms together. One form fits a prompt and all keywords of full length.
MAX_FORM_BYTES = 256 * 1024
MAX_FORMS_BYTES = 4 * 1024 * 1024
# The same for recordings of speakers.
MAX_REFERENCES_BYTES = 12 * 1024 * 1024
MAX_ALL_REFERENCES_BYTES = 48 * 1024 * 1024
# Seconds after which a refused client should try again.
RETRY_AFTER_S = 30
# Files with more bytes than this are written to disk.
IN_MEMORY_BYTES = 1024 * 1024
# A form is parsed in pieces of this size, and after this many seconds the parser yields to the event loop.
PIECE_BYTES = 8 * 1024
PARSING_S = 0.001
# Shortest time in seconds between two warnings that files cannot be stored.
WARN_INTERVAL_S = 60.0


class Spool:
    """Counts all uploads, from their first byte to the end of their response, and the bytes that they take.

    When a limit is reached, further uploads are refused with a Retry-After.
    """

    def __init__(self, config: Config) -> None:
        # Called with the duration of an upload in seconds when it has ended.
        self.on_left: Callable[[float], None] = lambda seconds: None
        limits = config.limits

        def count(what: str, most: Callable[[], int], largest: Callable[[], int] = lambda: 1) -> SharedCount:
            """One key's share is at least what a single upload may take."""
            return SharedCount(most, lambda: max(places_of_one_key(most(), len(config.auth.keys)), largest()), what)

        self._uploads = count("files at once", lambda: limits.uploads + limits.uploads_waiting)
        self._bytes = count("bytes of files", lambda: limits.spool_bytes, lambda: limits.upload_bytes)
        # Memory of the text fields, and of those with recordings of speakers.
        self._text_bytes = count("bytes of text fields", lambda: MAX_FORMS_BYTES)
        self._reference_bytes = count("bytes of speakers' recordings", lambda: MAX_ALL_REFERENCES_BYTES)

    @property
    def uploads(self) -> int:
        return self._uploads.used.total()

    @property
    def bytes(self) -> int:
        return self._bytes.used.total()

    @property
    def text_bytes(self) -> int:
        return self._text_bytes.used.total()

    @property
    def reference_bytes(self) -> int:
        return self._reference_bytes.used.total()

    def enter(self, caller: str) -> None:
        _check(self._uploads.reserve(caller))

    def reserve(self, caller: str, size: int) -> None:
        _check(self._bytes.reserve(caller, size))

    def reserve_text(self, caller: str, size: int) -> None:
        _check(self._text_bytes.reserve(caller, size))

    def reserve_reference(self, caller: str, size: int) -> None:
        _check(self._reference_bytes.reserve(caller, size))

    def release(self, caller: str, size: int, text_size: int, reference_size: int) -> None:
        self._bytes.release(caller, size)
        self._text_bytes.release(caller, text_size)
        self._reference_bytes.release(caller, reference_size)

    def leave(self, caller: str, seconds: float) -> None:
        self._uploads.release(caller)
        self.on_left(seconds)


def _check(reason: str | None) -> None:
    if reason is not None:
        raise Refusal(503, "server_busy", f"{reason}; try again.", retry_after_s=RETRY_AFTER_S, kind="server_error")


class Upload:
    """One upload: its form, its file (on disk if it is large), and its share of the spool. Close it after use."""

    def __init__(self, spool: Spool, max_bytes: int, caller: str) -> None:
        spool.enter(caller)
        self.caller = caller
        self._began = time.monotonic()
        self.form = Form()
        self._file = UploadFile(cast(BinaryIO, SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)))
        self._spool: Spool | None = spool
        self._bytes = 0
        self._text_bytes = 0
        self._reference_bytes = 0
        self._max_bytes = max_bytes

    @property
    def file(self) -> BinaryIO:
        """The file of the form; raises Refusal if there is none."""
        if self.form.file_field != b"file":
            raise Refusal(400, "missing_file", "The form has no file in the field 'file'.", param="file")
        return self._file.file

    def counted(self, receive: Receive) -> Receive:
        """Wrap `receive` to count every byte, because a body need not declare its length. Raises Refusal."""

        async def counting() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if self._bytes + size > self._max_bytes:
                raise too_large(self._max_bytes)
            if self._spool is not None:
                self._spool.reserve(self.caller, size)
                self._bytes += size
            return message

        return counting

    def hold_text(self, size: int, reference: bool = False) -> None:
        """Count memory of the form's text fields, or of its recordings of speakers. Raises Refusal."""
        if reference:
            self._hold_reference(size)
            return
        if self._text_bytes + size > MAX_FORM_BYTES:
            text = f"The form's text fields take more than {MAX_FORM_BYTES} bytes; send fewer fields, or shorter ones."
            raise Refusal(413, "form_too_large", text)
        if self._spool is not None:
            self._spool.reserve_text(self.caller, size)
            self._text_bytes += size

    def _hold_reference(self, size: int) -> None:
        if self._reference_bytes + size > MAX_REFERENCES_BYTES:
            text = f"The recordings of speakers take more than {MAX_REFERENCES_BYTES} bytes; send shorter ones."
            raise Refusal(413, "form_too_large", text)
        if self._spool is not None:
            self._spool.reserve_reference(self.caller, size)
            self._reference_bytes += size

    async def write(self, data: bytes) -> None:
        """Append bytes to the file. Raises OSError."""
        await self._file.write(data)

    async def rewind(self) -> None:
        """Flush the file and go to its beginning. Raises OSError."""
        await self._file.seek(0)

    async def release_file(self) -> None:
        """Release the file and the form, which are not needed any more; the upload itself stays counted."""
        if self._spool is not None:
            await self._release(self._spool)

    async def close(self) -> None:
        """Release everything; the counts before the first await. May be called twice."""
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.leave(self.caller, time.monotonic() - self._began)
            await self._release(spool)

    async def _release(self, spool: Spool) -> None:
        spool.release(self.caller, self._bytes, self._text_bytes, self._reference_bytes)
        self._bytes = self._text_bytes = self._reference_bytes = 0
        self.form = Form()
        # On a full disk the last flush fails; the file is deleted nevertheless.
        with suppress(OSError):
            await self._file.close()


class FormReader:
    """Receives multipart forms, and bodies that are a file, within the limits for uploads."""

    def __init__(self, context: Context) -> None:
        self.spool = Spool(context.config)
        self.spool.on_left = context.metrics.upload_seconds.observe
        context.metrics.uploads_in_progress.set_function(lambda: self.spool.uploads)
        self._context = context
        self._limits = context.limits
        self._warned_at: float | None = None
        # Choose the folder for temporary files now: if the disk is full later, the library would choose another one.
        gettempdir()

    async def open(self, request: Request, caller: Caller) -> Upload:
        """Receive the form of a request. Raises Refusal as early as possible."""
        async with self._arriving(request, caller) as (upload, counted):
            content_type = request.headers.get("content-type", "")
            if not content_type.startswith("multipart/form-data"):
                raise Refusal(400, "invalid_form", "Send the file as multipart/form-data, in the field 'file'.")
            await _read_form(counted, FormParser(content_type, upload.hold_text), upload)
        return upload

    async def open_body(self, request: Request, caller: Caller, head: bytes) -> Upload:
        """Receive a body that is the file itself; `head` is written before it. Raises Refusal as early as possible."""
        async with self._arriving(request, caller) as (upload, counted):
            upload.form.file_field = b"file"
            await upload.write(head)
            async for piece in counted.stream():
                await upload.write(piece)
            await upload.rewind()
        return upload

    def _check(self, request: Request) -> None:
        """Raise Refusal for reasons that are known before the file is read."""
        if self._context.draining or not self._context.engine.ready:
            text = "The server cannot take files now; try again."
            raise Refusal(503, "server_busy", text, retry_after_s=5, kind="server_error")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.upload_bytes:
            raise too_large(self._limits.upload_bytes)

    @asynccontextmanager
    async def _arriving(self, request: Request, caller: Caller) -> AsyncIterator[tuple[Upload, Request]]:
        """An upload, and the request with counted bytes. The upload is closed if it fails or does not arrive in time.

        Refusals are counted in the metrics by their code.
        """
        upload: Upload | None = None
        try:
            self._check(request)
            upload = Upload(self.spool, self._limits.upload_bytes, caller.name)
            async with asyncio.timeout(self._limits.upload_s):
                yield upload, Request(request.scope, upload.counted(request.receive))
        except BaseException as error:
            if upload is not None:
                await upload.close()
            refusal = error if isinstance(error, Refusal) else self._refusal(error)
            if refusal is not None and refusal.code != GONE:
                self._context.metrics.refused.labels(refusal.code).inc()
            if refusal is None:
                raise
            try:
                if refusal is error:
                    raise
                # The error refers to the frames that it came through, and so to the data that could not be stored. Such
                # cycles of frames and errors would keep a megabyte of each refused upload until a collection.
                raise refusal from error.with_traceback(None)
            finally:
                del refusal

    def _refusal(self, error: BaseException) -> Refusal | None:
        """The refusal for an error while an upload arrives; None for an unexpected error."""
        if isinstance(error, TimeoutError):
            return Refusal(408, "upload_too_slow", "The file took too long to arrive.")
        if isinstance(error, ClientDisconnect):
            return client_gone()
        if not isinstance(error, OSError):
            return None
        self._warn(f"uploaded files cannot be stored in {gettempdir()}: {error.strerror or error}")
        return storage_refusal(error)

    def _warn(self, text: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._warned_at is None or now - self._warned_at >= WARN_INTERVAL_S:
            self._warned_at = now
            log.warning("%s", text)


async def _read_form(request: Request, parser: FormParser, upload: Upload) -> None:
    """Parse a form in pieces, and yield to the event loop between them."""
    upload.form = parser.form
    clock = asyncio.get_running_loop().time
    try:
        async for chunk in request.stream():
            began, file_parts = clock(), []
            for start in range(0, len(chunk), PIECE_BYTES):
                file_parts.append(parser.feed(chunk[start : start + PIECE_BYTES]))
                if clock() - began > PARSING_S:
                    await asyncio.sleep(0)
                    began = clock()
            if data := b"".join(file_parts):
                await upload.write(data)
        parser.finish()
    finally:
        parser.close()
    await upload.rewind()


GONE = "client_gone"


def too_large(max_bytes: int) -> Refusal:
    return Refusal(413, "file_too_large", f"The file is larger than {max_bytes} bytes.", param="file")


def client_gone() -> Refusal:
    return Refusal(499, GONE, "The client left before its file was transcribed.")
