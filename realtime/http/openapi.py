"""Builds the OpenAPI document (`GET /openapi.json`) from the routes, and serves it with the other API documents.

A route is described beside its code: `@described(Operation(...))` on its endpoint. The bodies are msgspec structs, from
which their schemas are made. `ApiDocs` serves the document, the schema of all events, and the page `/docs/api`, which
shows both as HTML without scripts (`write_page`). `tests/e2e/test_api_documents.py` fails for a route without a
description, and for a response of a running server that does not match its description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from audio.errors import AudioError, TooManyDecoders
from realtime.dialects.deepgram import deepgram_code
from realtime.dialects.event_schema import schema as event_schema
from realtime.dialects.event_schema import without_closing

Json = dict[str, Any]
Codes = Mapping[int, Sequence[str]]
REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
SCHEMA = "application/schema+json"
EVENTS = "text/event-stream"
# The status is nginx's, and has no phrase in the standard library.
CLIENT_GONE = 499
DESCRIPTION = (
    "One port serves HTTP and WebSockets. The messages of the sockets are described in docs/wire.md and by the JSON "
    "schema at /events.schema.json. On a server without configured keys no key is needed. Fields may be added."
)


class ErrorBody(Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, forbid_unknown_fields=True):
    """Why a request was refused, in OpenAI's shape."""

    error: ErrorBody


class DeepgramError(Struct, forbid_unknown_fields=True):
    """Why a request was refused, in Deepgram's shape."""

    err_code: str
    err_msg: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query (or elsewhere, by `place`)."""

    name: str
    description: str
    type: Any = str
    place: str = "query"
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of one method of a path, for clients."""

    summary: str
    tag: str
    # Status -> media type -> type of the body; a tuple means one of several types.
    answers: Mapping[int, Mapping[str, Any]]
    description: str = ""
    # Media type -> type of the request's body.
    body: Mapping[str, Any] = field(default_factory=dict)
    body_required: bool = True
    parameters: Sequence[Parameter] = ()
    # The error codes of each status, besides those that every path has.
    refusals: Sequence[Codes] = ()
    needs_key: bool = True
    # A client secret is a key here.
    takes_secrets: bool = False
    # Refusals have Deepgram's shape and codes.
    deepgram: bool = False


# Refusals that several routes share. Every path may be refused by the rules for browsers and in a lack of file
# descriptors.
ALWAYS: Codes = {403: ("origin_not_allowed", "host_not_allowed"), 503: ("server_busy",)}
KEY: Codes = {401: ("invalid_api_key",)}
NO_SECRETS: Codes = {403: ("client_secret_not_allowed",)}
JSON_BODY: Codes = {400: ("invalid_json", "invalid_value"), 413: ("body_too_large",)}

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def described(operation: Operation) -> Callable[[Endpoint], Endpoint]:
    """Describes an endpoint. The function itself is not changed."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.operation = operation  # type: ignore[attr-defined]
        return endpoint

    return mark


def operations(routes: Iterable[BaseRoute]) -> dict[tuple[str, str], Operation]:
    """The description of every documented path and method; a socket is a GET. Raises LookupError for a route that is
    neither described nor left out of the document by `include_in_schema`."""
    found: dict[tuple[str, str], Operation] = {}
    for route in routes:
        if isinstance(route, WebSocketRoute):
            # Where a path also has a plain GET, that one describes both.
            if hasattr(route.endpoint, "operation"):
                found[path_of(route), "get"] = route.endpoint.operation
        elif isinstance(route, Route) and route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation: Operation | None = getattr(route.endpoint, "operation", None)
                if operation is None:
                    raise LookupError(f"{method} {route.path} is not described; see realtime/http/openapi.py")
                found[path_of(route), method.lower()] = operation
    return found


def path_of(route: Route | WebSocketRoute) -> str:
    """The path as OpenAPI writes it: without the converters of parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)


def document(routes: Iterable[BaseRoute], *, strict: bool = False) -> Json:
    """The OpenAPI document. `strict`: a field that is not described is wrong."""
    found = operations(routes)
    types = _Types()
    paths: dict[str, Json] = {}
    for (path, method), operation in found.items():
        paths.setdefault(path, {})[method] = _operation(path, method, operation, types)
    schemas, components = types.schemas()
    whole: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Tickertape", "version": version("tickertape"), "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(operation.tag for operation in found.values())],
        "paths": _filled(paths, schemas),
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "'Token KEY' is accepted too."},
                "api_key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
    }
    return whole if strict else without_closing(whole)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the schema of a type goes when all types are known."""

    number: int


class _Types:
    """The types that a document refers to. Their schemas are made together, so that shared parts are made once."""

    def __init__(self) -> None:
        self._types: list[Any] = []

    def add(self, kind: Any) -> _Place | Json:
        if isinstance(kind, tuple):
            return {"anyOf": [self.add(one) for one in kind]}
        self._types.append(kind)
        return _Place(len(self._types) - 1)

    def schemas(self) -> tuple[Sequence[Json], Json]:
        schemas, components = msgspec.json.schema_components(self._types, ref_template=REFERENCE)
        return schemas, components


def _filled(value: Any, schemas: Sequence[Json]) -> Any:
    if isinstance(value, _Place):
        return schemas[value.number]
    if isinstance(value, dict):
        return {key: _filled(item, schemas) for key, item in value.items()}
    return [_filled(item, schemas) for item in value] if isinstance(value, list) else value


def _operation(path: str, method: str, operation: Operation, types: _Types) -> Json:
    in_path = [Parameter(name, "", str, "path") for name in re.findall(r"\{(\w+)\}", path)]
    named = {parameter.name for parameter in operation.parameters}
    shown: Json = {
        "operationId": f"{method}_" + re.sub(r"\W+", "_", path).strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
    }
    if operation.description:
        shown["description"] = operation.description
    parameters = [parameter for parameter in in_path if parameter.name not in named] + list(operation.parameters)
    if parameters:
        shown["parameters"] = [_parameter(parameter, types) for parameter in parameters]
    if operation.body:
        shown["requestBody"] = {"required": operation.body_required, "content": _content(operation.body, types)}
    shown["responses"] = _responses(operation, types)
    if operation.needs_key:
        shown["security"] = [{"bearer": []}, {"api_key": []}]
    return shown


def _parameter(parameter: Parameter, types: _Types) -> Json:
    kind = list[parameter.type] if parameter.repeated else parameter.type  # type: ignore[name-defined]
    shown: Json = {"name": parameter.name, "in": parameter.place, "schema": types.add(kind)}
    if parameter.description:
        shown["description"] = parameter.description
    if parameter.place == "path":
        shown["required"] = True
    return shown


def _content(bodies: Mapping[str, Any], types: _Types) -> Json:
    return {media: {"schema": types.add(kind)} for media, kind in bodies.items()}


def _responses(operation: Operation, types: _Types) -> Json:
    shown: Json = {}
    for status, bodies in operation.answers.items():
        shown[str(status)] = {"description": HTTPStatus(status).phrase}
        if bodies:
            shown[str(status)]["content"] = _content(bodies, types)
    codes = codes_of(operation)
    for status in sorted(codes):
        phrase = "Client gone" if status == CLIENT_GONE else HTTPStatus(status).phrase
        named = deepgram_code(status) if operation.deepgram else ", ".join(codes[status])
        kind = DeepgramError if operation.deepgram else Error
        answer: Json = {"description": f"{phrase}: {named}", "content": _content({JSON: kind}, types)}
        if status in (429, 503):
            answer["headers"] = {"Retry-After": {"description": "Seconds", "schema": types.add(int)}}
        if str(status) in shown:
            # The route itself answers with this status too.
            shown[str(status)]["description"] += f"; {answer['description']}"
            shown[str(status)]["content"][JSON] = {"schema": types.add((operation.answers[status][JSON], kind))}
            continue
        shown[str(status)] = answer
    return shown


def codes_of(operation: Operation) -> dict[int, list[str]]:
    """All error codes of an operation by status."""
    found: dict[int, list[str]] = {}
    keys = (KEY, *(() if operation.takes_secrets else (NO_SECRETS,))) if operation.needs_key else ()
    for codes in (*keys, *operation.refusals, ALWAYS):
        for status, names in codes.items():
            known = found.setdefault(status, [])
            known += [name for name in names if name not in known]
    return found


def _codes_of_audio(kind: type[AudioError]) -> set[str]:
    found = {code for below in kind.__subclasses__() for code in _codes_of_audio(below)}
    # This one is the server's lack, with another status.
    return found if issubclass(kind, TooManyDecoders) else {*found, kind.code}


HTML = "text/html; charset=utf-8"
# The codes of files that cannot be decoded.
AUDIO_CODES = tuple(sorted(_codes_of_audio(AudioError)))
# Whatever takes a file as an upload may refuse it with these.
UPLOADED: Codes = {
    400: ("invalid_value", "invalid_form", "missing_file", *AUDIO_CODES),
    408: ("upload_too_slow",),
    413: ("file_too_large", "form_too_large"),
    499: ("client_gone",),
    500: ("transcription_failed",),
    503: ("engine_not_ready", "engine_unavailable", "too_many_open_files"),
    504: ("timeout",),
    507: ("disk_full", "storage_failed"),
}
AnyObject = Annotated[dict[str, Any], Meta(description="A JSON object.")]


class ApiDocs:
    """The routes of the documents. They need no key and hold nothing of this server's clients or configuration. A
    document is made once, and kept."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """`routes` is read when a document is made; it must have all routes by then."""
        self._routes = routes
        self._made: dict[str, bytes] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/openapi.json", self.openapi),
            Route("/events.schema.json", self.events),
            Route("/docs/api", self.page),
        ]

    def make(self) -> None:
        """Make all documents. A server does this before it listens: it takes longer than one request may hold the
        event loop, on a thread too, because that thread competes with the loop for the interpreter's lock."""
        openapi, events = document(self._routes), event_schema()
        self._made["openapi"] = msgspec.json.encode(openapi)
        self._made["events"] = msgspec.json.encode(events)
        self._made["page"] = write_page(openapi, events)

    @described(Operation("This document", "Documents", {200: {JSON: AnyObject}}, needs_key=False))
    async def openapi(self, request: Request) -> Response:
        return self._answer("openapi", JSON)

    @described(Operation("The JSON schema of all events", "Documents", {200: {SCHEMA: AnyObject}}, needs_key=False))
    async def events(self, request: Request) -> Response:
        return self._answer("events", SCHEMA)

    @described(Operation("This document as a page", "Documents", {200: {"text/html": str}}, needs_key=False))
    async def page(self, request: Request) -> Response:
        return self._answer("page", HTML)

    def _answer(self, name: str, media_type: str) -> Response:
        if not self._made:
            self.make()
        headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        if name == "page":
            headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return Response(self._made[name], media_type=media_type, headers=headers)


# The page `/docs/api`


STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre, .method { font-family: ui-monospace, monospace; font-size: 0.9em; }
.method { display: inline-block; min-width: 4.5em; font-weight: bold; }
summary { cursor: pointer; padding: 0.25rem 0; }
details > :not(summary) { margin-left: 1.5rem; }
table { border-collapse: collapse; margin: 0.5rem 0 0.5rem 1.5rem; }
td { vertical-align: top; padding: 0.15rem 1rem 0.15rem 0; }
pre { overflow-x: auto; }
"""


def write_page(document: Json, events: Json) -> bytes:
    """The whole page in UTF-8."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width"><title>Tickertape: the HTTP interface</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}: the HTTP interface</h1>",
        f"<p>{escape(info['description'])}</p>",
        '<p><a href="/openapi.json">openapi.json</a> · <a href="/events.schema.json">events.schema.json</a></p>',
    ]
    for tag in document["tags"]:
        parts.append(f"<h2>{escape(tag['name'])}</h2>")
        parts += _operations(document, tag["name"])
    parts.append("<h2>Schemas</h2>")
    parts += (_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    parts.append("<h2>Events</h2>")
    parts += (_schema(name, schema) for name, schema in sorted(events["$defs"].items()))
    parts.append("</body></html>\n")
    return "\n".join(parts).encode()


def _operations(document: Json, tag: str) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation["tags"]:
                yield from _operation_html(method, path, operation)


def _operation_html(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f'<details id="{escape(operation["operationId"])}"><summary><span class="method">{method.upper()}</span> '
    yield f"<code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}</p>"
    if "security" in operation:
        yield "<p>Needs a key.</p>"
    yield from _table(
        "Parameters",
        (
            (f"{one['name']} ({one['in']})", _type(one["schema"]), one.get("description", ""))
            for one in operation.get("parameters", ())
        ),
    )
    body = operation.get("requestBody", {}).get("content", {})
    yield from _table("Body", ((media, _type(content["schema"]), "") for media, content in body.items()))
    yield from _table(
        "Responses",
        (
            (status, answer["description"], ", ".join(map(_media, answer.get("content", {}).items())))
            for status, answer in operation["responses"].items()
        ),
    )
    yield "</details>"


def _media(content: tuple[str, Json]) -> str:
    return f"{content[0]}: {_type(content[1]['schema'])}"


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    shown = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if shown:
        yield f"<p>{title}</p><table>{shown}</table>"


def _type(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _schema(name: str, schema: Json) -> str:
    text = escape(json.dumps(schema, indent=1))
    return f"<details><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>"
