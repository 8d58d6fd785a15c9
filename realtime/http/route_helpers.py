"""Helpers that several route modules share: bounded request bodies, repeated parameters, and refusals as responses."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from realtime.dialects.base import decode_body
from realtime.dialects.deepgram import error_body
from realtime.errors import ClientFault, Refusal
from realtime.serving.uvicorn_protocols import header_text

# The path of Deepgram's clients, for sockets and files.
LISTEN = "/v1/listen"
# The path of the clients of Deepgram Flux.
FLUX = "/v2/listen"
# The longest JSON body of a request, in bytes; bodies with prepared items have a limit of their own.
MAX_JSON_BODY = 64 * 1024


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises a 413 Refusal as soon as it is larger than `max_bytes`."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise Refusal(413, "body_too_large", f"The body is larger than {max_bytes} bytes.")
    return b"".join(chunks)


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a body; empty if there is no body. Raises Refusal and ClientFault."""
    body = await read_body(request, MAX_JSON_BODY)
    return decode_body(body) if body.strip() else {}


def check_once(query: QueryParams, names: tuple[str, ...]) -> None:
    """Raise Refusal for a repeated parameter, because one of its values would be ignored silently."""
    for name in names:
        if len(query.getlist(name)) > 1:
            raise Refusal(
                400, "invalid_query_parameter", f"'{name}' was sent more than once; send it once.", param=name
            )


def refusal_response(path: str, error: Refusal | ClientFault) -> Response:
    """A refusal as an HTTP response, in the format that clients of this path expect."""
    if isinstance(error, ClientFault):
        error = Refusal(400, error.code, error.message, error.param)
    if path not in (LISTEN, FLUX):
        return JSONResponse(error.body(), error.status, error.headers())
    request_id = str(uuid4())
    headers = {"dg-request-id": request_id, "dg-error": header_text(error.message)}
    return JSONResponse(error_body(error, request_id), error.status, error.headers() | headers)
