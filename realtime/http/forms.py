"""Requests that carry a file: what is refused before and while it arrives, and the bounds on files in the house."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from tempfile import SpooledTemporaryFile, gettempdir
from typing import BinaryIO, cast

from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from realtime.config import LimitsConfig
from realtime.errors import Refusal
from realtime.http.context import Context
from realtime.http.multipart import Form, FormParser

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
