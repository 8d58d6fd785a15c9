"""Forms that carry a file: what is refused before the file is read, and the reading."""

from __future__ import annotations

import asyncio

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request

from realtime.errors import Refusal
from realtime.http.context import Context

MAX_FIELDS = 200


class FormReader:
    """Reads multipart forms within the limits on uploads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._limits = context.limits

    def check(self, request: Request) -> None:
        """Refuse what can be refused before the file is read."""
        if self._context.draining or not self._context.engine.ready:
            text = "The server cannot take files now; try again."
            raise Refusal(503, "server_busy", text, retry_after_s=5, kind="server_error")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.upload_bytes:
            text = f"The file is larger than {self._limits.upload_bytes} bytes."
            raise Refusal(413, "file_too_large", text, param="file")
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise Refusal(400, "invalid_form", "Send the file as multipart/form-data, in the field 'file'.")

    async def read(self, request: Request) -> FormData:
        """The form with its file, which is on disk if it is large. Close it after use."""
        try:
            async with asyncio.timeout(self._limits.upload_s):
                return await request.form(max_files=1, max_fields=MAX_FIELDS)
        except HTTPException as error:
            raise Refusal(400, "invalid_form", f"The form cannot be read: {error.detail}") from error
        except TimeoutError as error:
            raise Refusal(408, "upload_too_slow", "The file took too long to arrive.") from error
