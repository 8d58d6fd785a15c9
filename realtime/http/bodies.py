"""Bodies of plain requests, read whole within a bound."""

from __future__ import annotations

from starlette.requests import Request

from realtime.errors import Refusal


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body; raises a 413 Refusal as soon as it is larger than it may be."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > most_bytes:
            raise Refusal(413, "body_too_large", f"The body is larger than {most_bytes} bytes.")
    return b"".join(chunks)
