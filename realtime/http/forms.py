"""Requests that carry a file: what is refused before and while it arrives, and the bounds on files in the house."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import SpooledTemporaryFile

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from realtime.config import LimitsConfig
from realtime.errors import Refusal
from realtime.http.context import Context

# All keywords that a stream may have, and everything else.
MAX_FIELDS = 600
MAX_FIELD_BYTES = 64 * 1024
# How the texts of a form may be written: of the codecs that a client could name, some take time by the square of a
# text's length.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1"})
RETRY_AFTER_S = 30
# A file that is no larger than this is not written to disk, as with forms.
IN_MEMORY_BYTES = 1024 * 1024


class Spool:
    """All uploads from their first byte to the end of their answer: how many there are, and how many bytes they hold.

    Policy when it is full: the next one is refused with a time to come back.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self.uploads = 0
        self.bytes = 0
        self._limits = limits

    def enter(self) -> None:
        if self.uploads >= self._limits.uploads + self._limits.uploads_waiting:
            raise _busy("Too many files are waiting already")
        self.uploads += 1

    def take(self, size: int) -> None:
        if self.bytes + size > self._limits.spool_bytes:
            raise _busy("The files that are waiting take all the room there is")
        self.bytes += size

    def leave(self, size: int) -> None:
        self.uploads -= 1
        self.bytes -= size


class Upload:
    """A form with its file, which is on disk if it is large, and its place among the uploads. Close it after use."""

    def __init__(self, spool: Spool, most_bytes: int) -> None:
        spool.enter()
        self.form = FormData()
        self._spool: Spool | None = spool
        self._bytes = 0
        self._most_bytes = most_bytes

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

    async def close(self) -> None:
        """Harmless when done twice."""
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.leave(self._bytes)
            await self.form.close()


class FormReader:
    """Reads multipart forms, and bodies that are a file, within the limits on uploads."""

    def __init__(self, context: Context) -> None:
        self.spool = Spool(context.limits)
        self._context = context
        self._limits = context.limits

    async def open(self, request: Request) -> Upload:
        """The form of a request. Raises Refusal, as early as it can be known."""
        self._check(request)
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise Refusal(400, "invalid_form", "Send the file as multipart/form-data, in the field 'file'.")
        _, parameters = parse_options_header(request.headers["content-type"])
        if parameters.get(b"charset", b"utf-8").decode("latin-1").lower() not in CHARSETS:
            raise Refusal(400, "invalid_form", "Send the texts of the form as UTF-8.")
        async with self._arriving(request) as (upload, counted):
            upload.form = await counted.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
        return upload

    async def open_body(self, request: Request, head: bytes) -> Upload:
        """A request whose body is the file itself, behind bytes of ours. Raises Refusal like the other."""
        self._check(request)
        async with self._arriving(request) as (upload, counted):
            file = UploadFile(SpooledTemporaryFile(max_size=IN_MEMORY_BYTES))  # type: ignore[arg-type]
            upload.form = FormData([("file", file)])
            await file.write(head)
            async for piece in counted.stream():
                await file.write(piece)
            await file.seek(0)
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
        """An upload for the request, whose every byte is counted; closed again if it does not arrive in time."""
        upload = Upload(self.spool, self._limits.upload_bytes)
        try:
            async with asyncio.timeout(self._limits.upload_s):
                yield upload, Request(request.scope, upload.counted(request.receive))
        except BaseException as error:
            await upload.close()
            _raise_refusal(error)
            raise


def _raise_refusal(error: BaseException) -> None:
    """Why an upload did not arrive, if that is the client's doing."""
    if isinstance(error, HTTPException):
        raise Refusal(400, "invalid_form", f"The form cannot be read: {error.detail}") from error
    if isinstance(error, TimeoutError):
        raise Refusal(408, "upload_too_slow", "The file took too long to arrive.") from error
    if isinstance(error, ClientDisconnect):
        raise client_gone() from error


def too_large(most_bytes: int) -> Refusal:
    return Refusal(413, "file_too_large", f"The file is larger than {most_bytes} bytes.", param="file")


def client_gone() -> Refusal:
    return Refusal(499, "client_gone", "The client left before its file was transcribed.")


def _busy(reason: str) -> Refusal:
    return Refusal(503, "server_busy", f"{reason}; try again.", retry_after_s=RETRY_AFTER_S, kind="server_error")
