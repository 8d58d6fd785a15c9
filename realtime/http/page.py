"""The page: plain files of one folder, served at the root. Only files that are there at the start are served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parents[1] / "web"
FILES = tuple(sorted(file for file in FOLDER.glob("*") if file.is_file()))
# The page talks to its own server only, and nobody may put it into a frame.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss: blob:; media-src 'self' blob:; img-src 'self' data: blob:; "
        "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """One route for each file, and the root for `index.html`."""
    named = {f"/{file.name}": file for file in FILES}
    if "/index.html" in named:
        named["/"] = named["/index.html"]
    return [Route(path, _serve(file)) for path, file in named.items()]


def _serve(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return FileResponse(file, headers=HEADERS)

    return endpoint
