"""Multipart forms, taken apart as they come: texts stay the bytes they are, and the file's bytes are handed on.

What a form holds in memory is counted as it is held, so a client cannot make it more than it sends: a text is decoded
when it is needed, and only if it is short enough to be needed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
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

from realtime.config import LimitsConfig
from realtime.errors import Refusal
from realtime.http.context import Context

# All keywords that a stream may have, and everything else.
MAX_FIELDS = 600
MAX_FIELD_BYTES = 64 * 1024
# What stands between two parts; clients take less than 70.
MAX_BOUNDARY_BYTES = 200
# The headers of one part.
MAX_PART_HEAD_BYTES = 8 * 1024
# How the texts of a form may be written: of the codecs that a client could name, some take time by the square of a
# text's length.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1"})
# A letter has at most so many bytes.
LETTER_BYTES = 4

# The parser writes a line for each form that is none. Who sent it is told, and nobody else needs to know.
logging.getLogger("python_multipart.multipart").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class Form:
    """The fields of a form in their order, and which field the file came in; None: there was no file."""

    charset: str = "utf-8"
    fields: list[tuple[bytes, bytearray]] = field(default_factory=list)
    file_field: bytes | None = None

    def texts(self, name: str, most: int) -> list[str]:
        """The texts under this name. Raises Refusal for one of more than `most` characters, before it is decoded."""
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
    """Fills a form with what `feed` is given."""

    def __init__(self, content_type: str, hold: Callable[[int], None]) -> None:
        """`hold` is told of every byte that the form holds from now on, and may refuse it. Raises Refusal."""
        _, parameters = parse_options_header(content_type)
        charset = parameters.get(b"charset", b"utf-8").decode("latin-1").lower()
        if charset not in CHARSETS:
            raise Refusal(400, "invalid_form", "Send the texts of the form as UTF-8.")
        boundary = parameters.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise bad_form(f"its Content-Type must name a boundary of at most {MAX_BOUNDARY_BYTES} bytes")
        self.form = Form(charset)
        self._hold = hold
        # The head of the part at hand.
        self._head_bytes = 0
        self._name, self._value, self._disposition = bytearray(), bytearray(), b""
        # What the part at hand is: a text, or the file; neither between two parts and in a head.
        self._text: bytearray | None = None
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
        """Take a piece of the body; returns what of it belongs to the file. Raises Refusal."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise bad_form("it is not multipart/form-data") from error
        found, self._file_bytes = self._file_bytes, []
        return found[0] if len(found) == 1 else b"".join(found)

    def finish(self) -> None:
        """The body is complete. Raises Refusal if the form is not."""
        if self._text is not None or self._in_file:
            raise bad_form("it ends in the middle of a part")

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
        entry = (name, self._text)
        self._hold(sum(map(sys.getsizeof, (entry, *entry))))
        self.form.fields.append(entry)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file_bytes.append(data[start:end])
            return
        text = self._text
        assert text is not None, "data comes after a head"
        if len(text) + end - start > MAX_FIELD_BYTES:
            raise bad_form(f"a field takes more than {MAX_FIELD_BYTES} bytes")
        before = sys.getsizeof(text)
        text += data[start:end]
        self._hold(sys.getsizeof(text) - before)

    def _on_part_end(self) -> None:
        self._text, self._in_file = None, False


def bad_form(reason: str) -> Refusal:
    return Refusal(400, "invalid_form", f"The form cannot be read: {reason}.")


# Requests that carry a file: what is refused before and while it arrives, and the bounds on files in the house.

log = logging.getLogger("tickertape.uploads")

# What the texts of one form, and those of all forms that are here, may take in memory: a prompt and all keywords that a
# stream may have, each as long as it may be.
MAX_FORM_BYTES = 256 * 1024
MAX_FORMS_BYTES = 4 * 1024 * 1024
RETRY_AFTER_S = 30
# A file that is no larger than this is not written to disk.
IN_MEMORY_BYTES = 1024 * 1024
# A form is read in such pieces, and others have their turn when it took so long.
PIECE_BYTES = 8 * 1024
PARSING_S = 0.001
# What the system says when a file does not fit on the disk, and when no more files may be open.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_MORE_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# The log says at most so often that files cannot be stored.
SAID_AGAIN_S = 60.0


class Spool:
    """All uploads from their first byte to the end of their answer: how many there are, and how many bytes they hold.

    Policy when it is full: the next one is refused with a time to come back.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self.uploads = 0
        self.bytes = 0
        # Of the texts in forms, in memory.
        self.text_bytes = 0
        self._limits = limits

    def enter(self) -> None:
        if self.uploads >= self._limits.uploads + self._limits.uploads_waiting:
            raise _busy("Too many files are waiting already")
        self.uploads += 1

    def take(self, size: int) -> None:
        if self.bytes + size > self._limits.spool_bytes:
            raise _busy("The files that are waiting take all the room there is")
        self.bytes += size

    def take_text(self, size: int) -> None:
        if self.text_bytes + size > MAX_FORMS_BYTES:
            raise _busy(f"The forms that are here take all of the {MAX_FORMS_BYTES} bytes for their texts")
        self.text_bytes += size

    def give_back(self, size: int, text_size: int) -> None:
        self.bytes -= size
        self.text_bytes -= text_size

    def leave(self) -> None:
        self.uploads -= 1


class Upload:
    """A form with its file, which is on disk if it is large, and its place among the uploads. Close it after use."""

    def __init__(self, spool: Spool, most_bytes: int) -> None:
        spool.enter()
        self.form = Form()
        self._file = UploadFile(cast(BinaryIO, SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)))
        self._spool: Spool | None = spool
        self._bytes = 0
        self._text_bytes = 0
        self._most_bytes = most_bytes

    @property
    def file(self) -> BinaryIO:
        """The file of the form; raises Refusal if there is none."""
        if self.form.file_field != b"file":
            raise Refusal(400, "missing_file", "The form has no file in the field 'file'.", param="file")
        return self._file.file

    def counted(self, receive: Receive) -> Receive:
        """`receive`, with every byte counted: a body that does not say how long it is must not be longer either."""

        async def counting() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if self._bytes + size > self._most_bytes:
                raise too_large(self._most_bytes)
            if self._spool is not None:
                self._spool.take(size)
                self._bytes += size
            return message

        return counting

    def hold_text(self, size: int) -> None:
        """Count what the form holds in memory from now on; raises Refusal."""
        if self._text_bytes + size > MAX_FORM_BYTES:
            text = f"The texts of the form take more than {MAX_FORM_BYTES} bytes; send fewer fields, or shorter ones."
            raise Refusal(413, "form_too_large", text)
        if self._spool is not None:
            self._spool.take_text(size)
            self._text_bytes += size

    async def write(self, data: bytes) -> None:
        """Bytes of the file. Raises OSError."""
        await self._file.write(data)

    async def rewind(self) -> None:
        """To the beginning of the file, all of which is written then. Raises OSError."""
        await self._file.seek(0)

    async def let_file_go(self) -> None:
        """Give back all but the place: nobody reads the file and the form any more."""
        if self._spool is not None:
            await self._let_go(self._spool)

    async def close(self) -> None:
        """Harmless when done twice. What was counted is free before anything is waited for."""
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.leave()
            await self._let_go(spool)

    async def _let_go(self, spool: Spool) -> None:
        spool.give_back(self._bytes, self._text_bytes)
        self._bytes = self._text_bytes = 0
        self.form = Form()
        # What could not be written to a full disk cannot be written now either. The file is gone all the same.
        with suppress(OSError):
            await self._file.close()


class FormReader:
    """Reads multipart forms, and bodies that are a file, within the limits on uploads."""

    def __init__(self, context: Context) -> None:
        self.spool = Spool(context.limits)
        self._context = context
        self._limits = context.limits
        self._said_at: float | None = None
        # Chosen now: a disk that is full later must not make the library choose another folder.
        gettempdir()

    async def open(self, request: Request) -> Upload:
        """The form of a request. Raises Refusal, as early as it can be known."""
        async with self._arriving(request) as (upload, counted):
            content_type = request.headers.get("content-type", "")
            if not content_type.startswith("multipart/form-data"):
                raise Refusal(400, "invalid_form", "Send the file as multipart/form-data, in the field 'file'.")
            await _read_form(counted, FormParser(content_type, upload.hold_text), upload)
        return upload

    async def open_body(self, request: Request, head: bytes) -> Upload:
        """A request whose body is the file itself, behind bytes of ours. Raises Refusal like the other."""
        async with self._arriving(request) as (upload, counted):
            upload.form.file_field = b"file"
            await upload.write(head)
            async for piece in counted.stream():
                await upload.write(piece)
            await upload.rewind()
        return upload

    def _check(self, request: Request) -> None:
        """Refuse what can be refused before the file is read."""
        if self._context.draining or not self._context.engine.ready:
            text = "The server cannot take files now; try again."
            raise Refusal(503, "server_busy", text, retry_after_s=5, kind="server_error")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.upload_bytes:
            raise too_large(self._limits.upload_bytes)

    @asynccontextmanager
    async def _arriving(self, request: Request) -> AsyncIterator[tuple[Upload, Request]]:
        """An upload for the request, whose every byte is counted; closed again if it does not arrive in time.

        What is refused here is counted, by its code.
        """
        upload: Upload | None = None
        try:
            self._check(request)
            upload = Upload(self.spool, self._limits.upload_bytes)
            async with asyncio.timeout(self._limits.upload_s):
                yield upload, Request(request.scope, upload.counted(request.receive))
        except BaseException as error:
            if upload is not None:
                await upload.close()
            refusal = error if isinstance(error, Refusal) else self._refusal(error)
            if refusal is not None and refusal.code != GONE:
                self._context.metrics.refused.labels(refusal.code).inc()
            if refusal is None or refusal is error:
                raise
            raise refusal from error

    def _refusal(self, error: BaseException) -> Refusal | None:
        """What a client is told of an upload that did not arrive; None for what nobody foresaw."""
        if isinstance(error, TimeoutError):
            return Refusal(408, "upload_too_slow", "The file took too long to arrive.")
        if isinstance(error, ClientDisconnect):
            return client_gone()
        if not isinstance(error, OSError):
            return None
        self._say(f"files that clients send cannot be stored in {gettempdir()}: {error.strerror or error}")
        if error.errno in NO_MORE_FILES:
            text = "The server has as many files open as it may have; try again."
            return Refusal(503, "too_many_open_files", text, None, RETRY_AFTER_S, "server_error")
        if error.errno in DISK_FULL:
            text = "The disk of the server is full; send the file again later, or a smaller one."
            return Refusal(507, "disk_full", text, None, RETRY_AFTER_S, "server_error")
        return Refusal(507, "storage_failed", "The server cannot store the file; try again later.", kind="server_error")

    def _say(self, text: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._said_at is None or now - self._said_at >= SAID_AGAIN_S:
            self._said_at = now
            log.warning("%s", text)


async def _read_form(request: Request, parser: FormParser, upload: Upload) -> None:
    """Take a form apart, in pieces that keep nobody waiting."""
    upload.form = parser.form
    clock = asyncio.get_running_loop().time
    async for chunk in request.stream():
        began, of_file = clock(), []
        for start in range(0, len(chunk), PIECE_BYTES):
            of_file.append(parser.feed(chunk[start : start + PIECE_BYTES]))
            if clock() - began > PARSING_S:
                await asyncio.sleep(0)
                began = clock()
        if data := b"".join(of_file):
            await upload.write(data)
    parser.finish()
    await upload.rewind()


GONE = "client_gone"


def too_large(most_bytes: int) -> Refusal:
    return Refusal(413, "file_too_large", f"The file is larger than {most_bytes} bytes.", param="file")


def client_gone() -> Refusal:
    return Refusal(499, GONE, "The client left before its file was transcribed.")


def _busy(reason: str) -> Refusal:
    return Refusal(503, "server_busy", f"{reason}; try again.", retry_after_s=RETRY_AFTER_S, kind="server_error")
